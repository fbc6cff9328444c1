// The driver's functions that move or set bytes.
#include <memory>

#include "calls.h"
#include "contexts.h"
#include "lag.h"
#include "memory.h"
#include "streams.h"

using namespace fake;

namespace {

enum class Waits { no, yes };

// What a copy is called, and which lag it has, by where its two sides lie.
struct Way {
  const char *name, *kind;
};

Way way_of(const Region *target, const Region *source) {
  const bool from_device = source && source->place == Place::device;
  const bool to_device = target && target->place == Place::device;
  if (from_device && to_device) return {"a copy on the device", kind::on_device};
  if (from_device) return {"a copy to the host", kind::to_host};
  if (to_device) return {"a copy to the device", kind::to_device};
  return {"a copy on the host", kind::to_host};
}

bool fits(const Region *region, uintptr_t address, size_t size) {
  return !region || address + size <= region->bytes.end;
}

// Whether an address of a device is meant that does not exist any more. With `order` held.
bool is_stale(const Region *region, uintptr_t address) { return !region && was_freed(address); }

CUresult copy(uintptr_t target, uintptr_t source, size_t size, CUstream stream, Waits waits) {
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  stream = resolve(stream);
  FAKE_NEED(stream, CUDA_ERROR_INVALID_HANDLE);
  if (!size) return CUDA_SUCCESS;
  bool is_source_pageable, is_target_pageable;
  Way way;
  {
    Lock lock(order);
    const Region *from = find_region(source), *to = find_region(target);
    FAKE_NEED(fits(from, source, size) && fits(to, target, size), CUDA_ERROR_INVALID_VALUE);
    FAKE_NEED(!is_stale(from, source) && !is_stale(to, target), CUDA_ERROR_INVALID_VALUE);
    way = way_of(to, from);
    is_source_pageable = !from;
    is_target_pageable = !to;
  }
  // Memory that is not pinned: the driver has taken the bytes, or given them, when the call
  // returns.
  std::shared_ptr<std::vector<char>> taken;
  if (is_source_pageable)
    taken = std::make_shared<std::vector<char>>((char *)source, (char *)source + size);
  const int number = stream->number;
  // Half at once and half late: whoever changes the source, or reads the target, too early gets
  // wrong bytes too.
  const auto run = [=] {
    const uintptr_t from = taken ? uintptr_t(taken->data()) : source;
    const size_t half = size / 2;
    move_bytes(target, from, half);
    wait_for_turn(way.kind, number);
    move_bytes(target + half, from + half, size - half);
    return 0;
  };
  Operation operation{run};
  operation.accesses = {{{target, target + size}, true, way.name},
                        {{source, source + size}, false, way.name}};
  if (const int code = enqueue(stream, std::move(operation))) return CUresult(code);
  if (waits == Waits::no && !is_target_pageable) return CUDA_SUCCESS;
  return CUresult(synchronize(stream));
}

CUresult set(uintptr_t target, unsigned char value, size_t size, CUstream stream, Waits waits) {
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  stream = resolve(stream);
  FAKE_NEED(stream, CUDA_ERROR_INVALID_HANDLE);
  {
    Lock lock(order);
    const Region *to = find_region(target);
    FAKE_NEED(to && fits(to, target, size), CUDA_ERROR_INVALID_VALUE);
  }
  const int number = stream->number;
  Operation operation{[=] {
    wait_for_turn(kind::on_device, number);
    fill_bytes(target, value, size);
    return 0;
  }};
  operation.accesses = {{{target, target + size}, true, "a memset"}};
  if (const int code = enqueue(stream, std::move(operation))) return CUresult(code);
  return waits == Waits::no ? CUDA_SUCCESS : CUresult(synchronize(stream));
}

}  // namespace

extern "C" {

CUresult cuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t size) {
  FAKE_ENTER();
  return copy(target, source, size, nullptr, Waits::yes);
}
CUresult cuMemcpyDtoH(void *target, CUdeviceptr source, size_t size) {
  FAKE_ENTER();
  return copy(uintptr_t(target), source, size, nullptr, Waits::yes);
}
CUresult cuMemcpyHtoD(CUdeviceptr target, const void *source, size_t size) {
  FAKE_ENTER();
  return copy(target, uintptr_t(source), size, nullptr, Waits::yes);
}
CUresult cuMemcpyDtoD(CUdeviceptr target, CUdeviceptr source, size_t size) {
  FAKE_ENTER();
  return copy(target, source, size, nullptr, Waits::no);  // as the real one
}
CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
  FAKE_ENTER();
  return copy(target, source, size, stream, Waits::no);
}
CUresult cuMemcpyDtoHAsync(void *target, CUdeviceptr source, size_t size, CUstream stream) {
  FAKE_ENTER();
  return copy(uintptr_t(target), source, size, stream, Waits::no);
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void *source, size_t size, CUstream stream) {
  FAKE_ENTER();
  return copy(target, uintptr_t(source), size, stream, Waits::no);
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
  FAKE_ENTER();
  return copy(target, source, size, stream, Waits::no);
}
CUresult cuMemsetD8(CUdeviceptr target, unsigned char value, size_t size) {
  FAKE_ENTER();
  return set(target, value, size, nullptr, Waits::yes);
}
CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t size, CUstream stream) {
  FAKE_ENTER();
  return set(target, value, size, stream, Waits::no);
}
}
