// Operators of PyTorch for a device without a processor: each becomes a kernel on the current
// stream, which runs the CPU's operator, when its turn comes, on the bytes that lie there then.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

namespace fake {

// In the place of a CUDA kernel of PyTorch: takes its arguments from the stack, and puts results
// there, on whose bytes a kernel works later.
void run_operator(const c10::OperatorHandle &op, torch::jit::Stack *stack);

}  // namespace fake
