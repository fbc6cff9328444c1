// Which operators of PyTorch's CUDA build run as kernels of the fake.
#include <ATen/core/Tensor.h>
#include <ATen/ops/all.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/item.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>

#include "../driver/calls.h"
#include "operators.h"
#include "values.h"

namespace {

using at::Tensor;

// What moves no bytes, or moves them by copies of the driver, stays PyTorch's own.
const std::set<std::string> pytorchs_own{
    "aten::empty.memory_format", "aten::empty_strided", "aten::as_strided", "aten::view",
    "aten::_reshape_alias", "aten::resize_", "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::set_",
    "aten::unfold", "aten::_local_scalar_dense", "aten::record_stream", "aten::is_pinned",
    "aten::_pin_memory", "aten::view_as_real", "aten::view_as_complex", "aten::is_set_to",
    "aten::_efficientzerotensor", "aten::_copy_from", "aten::_copy_from_and_resize"};
// What has an operator of its own below.
const std::set<std::string> ours{"aten::copy_", "aten::equal", "aten::native_dropout"};

// Lets the current stream of one device wait for what that of another has been given so far.
void order_after(c10::Device waiting, c10::Device running) {
  // A default stream has the same name on each device: it is that of the current one.
  c10::OptionalDeviceGuard guard(running);
  CUevent event;
  fake::check(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  fake::check(cuEventRecord(event, fake::current_stream(running)));
  guard.reset_device(waiting);
  fake::check(cuStreamWaitEvent(fake::current_stream(waiting), event, 0));
  fake::check(cuEventDestroy(event));
}

void copy_as_kernel(const Tensor &target, const Tensor &source) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  torch::jit::Stack stack{target, source, true};
  fake::run_operator(op, &stack);
}

// Between host and device PyTorch's own way, which ends in copies of the driver; on the device a
// kernel. From one device to another as PyTorch does it: each side waits for the other.
Tensor &copy(Tensor &target, const Tensor &source, bool non_blocking) {
  if (!fake::is_on_device(target) || !fake::is_on_device(source)) {
    at::native::copy_(target, source, non_blocking);
  } else if (target.device() == source.device()) {
    copy_as_kernel(target, source);
  } else {
    const c10::Device from = source.device(), to = target.device();
    order_after(to, from);
    copy_as_kernel(target, source);
    order_after(from, to);
  }
  return target;
}

std::tuple<Tensor, Tensor> dropout(const Tensor &input, double p, std::optional<bool> train) {
  const auto booleans = input.options().dtype(at::kBool);
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, booleans)};
  Tensor mask = at::empty_like(input, booleans).bernoulli_(1 - p);
  return {at::mul(at::mul(input, mask), p < 1 ? 1 / (1 - p) : 0), mask};
}

bool equal(const Tensor &one, const Tensor &other) {
  return one.sizes() == other.sizes() && at::all(at::eq(one, other)).item<bool>();
}

bool returns_tensors(const c10::FunctionSchema &schema) {
  for (const auto &one : schema.returns())
    if (!one.type()->isSubtypeOf(*c10::TensorType::get()) &&
        !one.type()->isSubtypeOf(*c10::ListType::ofTensors()))
      return false;
  return true;
}

// In the place of every kernel that the CUDA build has.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (const auto &name : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string full = c10::toString(name);
    if (name.name.rfind("aten::", 0) || pytorchs_own.count(full) || ours.count(full)) continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (op && op->hasSchema() && op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
        returns_tensors(op->schema()))
      library.impl(full.substr(strlen("aten::")).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&fake::run_operator>());
  }
  library.impl("copy_", copy);
  library.impl("native_dropout", dropout);
  library.impl("equal", equal);
}

}  // namespace
