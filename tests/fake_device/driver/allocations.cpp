// The driver's functions about memory, except those that move bytes.
#include <cstring>

#include "calls.h"
#include "contexts.h"
#include "memory.h"
#include "options.h"
#include "streams.h"

using namespace fake;

namespace {

// One answer about an address, in the form that CUDA gives it.
int attribute_of(const Region &region, CUpointer_attribute attribute, uintptr_t address,
                 void *out) {
  const bool is_on_device = region.place == Place::device;
  const auto give = [&](auto value) {
    memcpy(out, &value, sizeof value);
    return int(CUDA_SUCCESS);
  };
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: return give(primary_context(region.device));
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return give(unsigned(is_on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: return give(address);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return is_on_device ? int(CUDA_ERROR_INVALID_VALUE) : give(address);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: return give((unsigned long long)region.bytes.begin);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: return give(region.device);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: return give(region.bytes.begin);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: return give(region.bytes.end - region.bytes.begin);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: return give(0u);
    case CU_POINTER_ATTRIBUTE_MAPPED: return give(1u);
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: return give(0u);
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace

extern "C" {

CUresult cuMemAlloc(CUdeviceptr *pointer, size_t size) {
  FAKE_ENTER();
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  uintptr_t address = 0;
  const int code = allocate_on_device(&address, size, current_device());
  *pointer = address;
  return CUresult(code);
}
CUresult cuMemFree(CUdeviceptr pointer) {
  FAKE_ENTER();
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  // As the real one: what may use the memory is over when it goes.
  if (const int code = synchronize_device(current_device())) return CUresult(code);
  return CUresult(free_on_device(pointer));
}
CUresult cuMemGetInfo(size_t *available, size_t *total) {
  FAKE_ENTER();
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  *total = options().memory_bytes;
  *available = bytes_free(current_device());
  return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void **address, size_t size, unsigned) {
  FAKE_ENTER();
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  uintptr_t begin = 0;
  const int code = allocate_pinned(&begin, size, current_device());
  *address = (void *)begin;
  return CUresult(code);
}
CUresult cuMemFreeHost(void *address) {
  FAKE_ENTER();
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  if (const int code = synchronize_device(current_device())) return CUresult(code);
  return CUresult(release_pinned(uintptr_t(address)));
}
CUresult cuMemHostRegister(void *address, size_t size, unsigned) {
  FAKE_ENTER();
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  return CUresult(register_pinned(uintptr_t(address), size, current_device()));
}
CUresult cuMemHostUnregister(void *address) {
  FAKE_ENTER();
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  if (const int code = synchronize_device(current_device())) return CUresult(code);
  return CUresult(release_pinned(uintptr_t(address)));
}
CUresult cuMemHostGetDevicePointer(CUdeviceptr *pointer, void *address, unsigned) {
  FAKE_ENTER();
  Lock lock(order);
  FAKE_NEED(find_region(uintptr_t(address)), CUDA_ERROR_INVALID_VALUE);
  *pointer = CUdeviceptr(address);
  return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
  FAKE_ENTER();
  Lock lock(order);
  const Region *region = find_region(pointer);
  FAKE_NEED(region, CUDA_ERROR_NOT_FOUND);
  if (base) *base = region->bytes.begin;
  if (size) *size = region->bytes.end - region->bytes.begin;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  FAKE_ENTER();
  Lock lock(order);
  const Region *region = find_region(pointer);
  FAKE_NEED(region, CUDA_ERROR_INVALID_VALUE);
  return CUresult(attribute_of(*region, attribute, pointer, out));
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **out,
                                CUdeviceptr pointer) {
  FAKE_ENTER();
  Lock lock(order);
  const Region *region = find_region(pointer);
  for (unsigned i = 0; i < count; i++)
    if (!region || attribute_of(*region, attributes[i], pointer, out[i])) *(unsigned *)out[i] = 0;
  return CUDA_SUCCESS;
}
CUresult cuPointerSetAttribute(const void *, CUpointer_attribute, CUdeviceptr pointer) {
  FAKE_ENTER();
  Lock lock(order);
  return find_region(pointer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
}
