// The runtime's functions about memory and copies.
#include <cstring>

#include "runtime.h"

using fake::note;

extern "C" {

cudaError_t cudaMalloc(void **address, size_t size) {
  RUNTIME_ENTER();
  return note(cuMemAlloc((CUdeviceptr *)address, size));
}
cudaError_t cudaFree(void *address) {
  RUNTIME_ENTER();
  return address ? note(cuMemFree(CUdeviceptr(address))) : cudaSuccess;
}
cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags) {
  RUNTIME_ENTER();
  return note(cuMemHostAlloc(address, size, flags));
}
cudaError_t cudaMallocHost(void **address, size_t size) {
  RUNTIME_ENTER();
  return note(cuMemHostAlloc(address, size, 0));
}
cudaError_t cudaFreeHost(void *address) {
  RUNTIME_ENTER();
  return address ? note(cuMemFreeHost(address)) : cudaSuccess;
}
cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags) {
  RUNTIME_ENTER();
  return note(cuMemHostRegister(address, size, flags));
}
cudaError_t cudaHostUnregister(void *address) {
  RUNTIME_ENTER();
  return note(cuMemHostUnregister(address));
}
cudaError_t cudaHostGetDevicePointer(void **pointer, void *address, unsigned flags) {
  RUNTIME_ENTER();
  return note(cuMemHostGetDevicePointer((CUdeviceptr *)pointer, address, flags));
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  RUNTIME_ENTER();
  return note(cuMemGetInfo(available, total));
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
  RUNTIME_ENTER();
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  const auto pointer = CUdeviceptr(address);
  unsigned type;
  // An address that the driver does not know is no error here.
  if (cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer)) return cudaSuccess;
  attributes->type = fake::type_of(type);
  cuPointerGetAttribute(&attributes->device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer);
  attributes->devicePointer = (void *)address;
  if (attributes->type == cudaMemoryTypeHost) attributes->hostPointer = (void *)address;
  return cudaSuccess;
}

// --- copies; where the two sides lie is asked of the driver, not taken from the caller

cudaError_t cudaMemcpy(void *target, const void *source, size_t size, cudaMemcpyKind) {
  RUNTIME_ENTER();
  return note(cuMemcpy(CUdeviceptr(target), CUdeviceptr(source), size));
}
cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, cudaMemcpyKind,
                            cudaStream_t stream) {
  RUNTIME_ENTER();
  return note(cuMemcpyAsync(CUdeviceptr(target), CUdeviceptr(source), size, stream));
}
cudaError_t cudaMemcpyPeerAsync(void *target, int, const void *source, int, size_t size,
                                cudaStream_t stream) {
  RUNTIME_ENTER();
  return note(cuMemcpyAsync(CUdeviceptr(target), CUdeviceptr(source), size, stream));
}
cudaError_t cudaMemset(void *target, int value, size_t size) {
  RUNTIME_ENTER();
  return note(cuMemsetD8(CUdeviceptr(target), (unsigned char)value, size));
}
cudaError_t cudaMemsetAsync(void *target, int value, size_t size, cudaStream_t stream) {
  RUNTIME_ENTER();
  return note(cuMemsetD8Async(CUdeviceptr(target), (unsigned char)value, size, stream));
}
}
