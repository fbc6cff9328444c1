// Kernels made for a GPU cannot run here: who launches one is told which operator the fake lacks.
#include <string>
#include <unordered_map>

#include "runtime.h"

namespace {

// Filled while libraries are loaded, by one thread. The names live in those libraries.
auto &kernels = *new std::unordered_map<const void *, const char *>;

cudaError_t refuse_kernel(const void *function) {
  const auto found = kernels.find(function);
  const std::string name = found == kernels.end() ? "without a known name" : found->second;
  return fake::note(fake::refuse(fake::interned("a kernel made for a GPU, " + name)));
}

}  // namespace

extern "C" {

void __cudaRegisterFunction(void **, const char *function, char *, const char *name, int, void *,
                            void *, void *, void *, int *) {
  kernels[function] = name;
}
cudaError_t __cudaGetKernel(void **kernel, const void *function) {
  *kernel = const_cast<void *>(function);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(void *kernel, dim3, dim3, void **, size_t, cudaStream_t) {
  return refuse_kernel(kernel);
}
cudaError_t cudaLaunchKernel(const void *function, dim3, dim3, void **, size_t, cudaStream_t) {
  RUNTIME_ENTER();
  return refuse_kernel(function);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *function, void **) {
  RUNTIME_ENTER();
  return refuse_kernel(function);
}
}
