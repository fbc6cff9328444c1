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

// The lines with which a function of the runtime begins; most need a context.
#define RUNTIME_ENTER_BARE() \
  FAKE_SITE();               \
  if (int code_ = fake::enter(site_)) return fake::note(code_)
#define RUNTIME_ENTER() \
  RUNTIME_ENTER_BARE(); \
  fake::need_context()
