// What operators are given and give back: tensors of the device, and the same bytes as the host
// sees them.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <cuda.h>

#include <vector>

#include "../driver/control.h"

namespace fake {

bool is_on_device(const at::Tensor &tensor);

// Applies `change` to each tensor in a value, also to those in lists; names of devices become
// `device`.
template <class Change>
c10::IValue changed(const c10::IValue &value, c10::Device device, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isDevice()) return device;
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor &tensor : value.toTensorVector()) tensors.push_back(change(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto &tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor ? std::optional(change(*tensor)) : tensor);
    return tensors;
  }
  return value;
}

// Calls `see` with each tensor in a value.
template <class See>
void visit(const c10::IValue &value, See see) {
  if (value.isTensor()) {
    see(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor &tensor : value.toTensorVector()) see(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto &tensor : value.toOptionalTensorVector())
      if (tensor) see(*tensor);
  }
}

// A tensor of the host for a kernel that runs later: the bytes of one of the device, without a hold
// on them, or a copy of one of the host, whose owner may go on.
at::Tensor for_kernel(const at::Tensor &tensor);

// The shape alone, for operators that tell the shape of what they would give.
at::Tensor without_bytes(const at::Tensor &tensor);

// The bytes that an operator touches; of a tensor with gaps, row by row as long as the rows are
// few, else with the gaps.
void add_accesses(std::vector<Access> &accesses, const at::Tensor &tensor, bool writes);

CUstream current_stream(c10::Device device);

// Raises what PyTorch would for a code of CUDA.
void check(int code);

}  // namespace fake
