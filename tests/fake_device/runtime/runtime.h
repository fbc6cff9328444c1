// What the files of the runtime share: libcudart as PyTorch calls it, on top of the fake driver.
// Preloaded, these functions take the place of the real ones of the same names.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "../driver/calls.h"

namespace fake {

// Remembers an error for cudaGetLastError, and gives it back.
cudaError_t note(int code);

// Makes the primary context of this thread's device current if it has none, as the runtime does
// before the first call that needs one.
void need_context();

inline cudaMemoryType type_of(unsigned driver_type) {
  return driver_type == CU_MEMORYTYPE_DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
}

}  // namespace fake

#define RUNTIME_ENTER()                                            \
  do {                                                             \
    if (int code_ = fake::enter(__func__)) return fake::note(code_); \
    fake::need_context();                                          \
  } while (0)
