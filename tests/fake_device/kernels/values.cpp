#include "values.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "../driver/calls.h"
#include "../driver/memory.h"

namespace fake {
namespace {

constexpr int64_t rows_max = 64;

// The dimensions of more than one element that cover bytes without a gap between them are one; what
// is left, by falling strides, are rows, rows of rows, and so on.
struct Layout {
  int64_t row_bytes;
  std::vector<std::pair<int64_t, int64_t>> repeats;  // count, stride in bytes
};

Layout layout_of(const at::Tensor &tensor) {
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, size
  for (int64_t i = 0; i < tensor.dim(); i++)
    if (tensor.size(i) > 1 && tensor.stride(i) > 0)
      dimensions.emplace_back(tensor.stride(i) * int64_t(tensor.itemsize()), tensor.size(i));
  std::sort(dimensions.begin(), dimensions.end());
  Layout layout{int64_t(tensor.itemsize()), {}};
  for (const auto &[stride, size] : dimensions) {
    if (layout.repeats.empty() && stride <= layout.row_bytes)
      layout.row_bytes = stride * (size - 1) + layout.row_bytes;
    else
      layout.repeats.emplace_back(size, stride);
  }
  return layout;
}

}  // namespace

bool is_on_device(const at::Tensor &tensor) { return tensor.defined() && tensor.is_cuda(); }

at::Tensor for_kernel(const at::Tensor &tensor) {
  if (!tensor.defined()) return tensor;
  if (!is_on_device(tensor)) {
    at::Tensor copy = tensor.is_cpu() ? tensor.clone() : tensor;
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }
  // A tensor on no bytes has an address of null.
  void *alias = tensor.numel() ? alias_of(uintptr_t(tensor.const_data_ptr())) : nullptr;
  at::Tensor out = at::from_blob(alias, tensor.sizes(), tensor.strides(),
                                 at::TensorOptions().dtype(tensor.dtype()));
  if (tensor.is_conj()) out._set_conj(true);
  if (tensor.is_neg()) out._set_neg(true);
  return out;
}

at::Tensor without_bytes(const at::Tensor &tensor) {
  // A number that was wrapped, or another scalar of the host, goes with tensors of any device.
  if (!tensor.defined() || (!is_on_device(tensor) && tensor.dim() == 0)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

void add_accesses(std::vector<Access> &accesses, const at::Tensor &tensor, bool writes) {
  if (!is_on_device(tensor) || !tensor.numel()) return;
  Layout layout = layout_of(tensor);
  int64_t rows = 1;
  for (const auto &[count, stride] : layout.repeats) rows *= count;
  if (rows > rows_max) {
    for (const auto &[count, stride] : layout.repeats) layout.row_bytes += (count - 1) * stride;
    layout.repeats.clear();
  }
  std::vector<uintptr_t> begins{uintptr_t(tensor.const_data_ptr())};
  for (const auto &[count, stride] : layout.repeats) {
    const std::vector<uintptr_t> inner = begins;
    for (int64_t i = 1; i < count; i++)
      for (uintptr_t begin : inner) begins.push_back(begin + uintptr_t(i * stride));
  }
  for (uintptr_t begin : begins)
    accesses.push_back({{begin, begin + uintptr_t(layout.row_bytes)}, writes});
}

CUstream current_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return (CUstream)guard.getStream(device).native_handle();
}

void check(int code) {
  if (code)
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code,
                                std::string("CUDA error: ") + error_text(code));
}

}  // namespace fake
