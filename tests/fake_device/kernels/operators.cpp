#include "operators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "../driver/calls.h"
#include "values.h"

namespace fake {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// An operator that will run on the host, on bytes of the device.
struct Task {
  c10::OperatorHandle op;
  Stack arguments;
  std::vector<Tensor> targets;  // of its results; undefined where it writes to an argument

  void run() const {
    at::AutoDispatchBelowAutograd no_autograd;
    Stack stack = arguments;
    op.callBoxed(&stack);
    size_t place = 0;
    for (const IValue &value : stack)
      visit(value, [&](const Tensor &result) {
        const Tensor target = targets.at(place++);
        if (target.defined() && result.defined()) target.copy_(result);
      });
  }
};

// Operators that draw numbers: a generator of the host whose seed comes from where the device's
// generator stands. What is drawn does not depend on when the kernel runs, and to save and restore
// the device's generator works.
IValue host_generator(const IValue &given, c10::Device device) {
  at::Generator generator =
      given.isGenerator() ? given.toGenerator() : at::globalContext().defaultGenerator(device);
  std::lock_guard lock(generator.mutex());
  const uint64_t offset = generator.get_offset();
  generator.set_offset(offset + 4);
  return at::detail::createCPUGenerator(generator.current_seed() +
                                        offset * 0x9E3779B97F4A7C15ull);
}

bool is_written(const c10::Argument &argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// One call of an operator: its arguments, and the device that it runs on.
struct Call {
  const c10::OperatorHandle &op;
  const c10::FunctionSchema &schema;
  Stack given;
  c10::Device device;

  Call(const c10::OperatorHandle &called, const Stack &stack)
      : op(called), schema(called.schema()), given(stack.end() - int64_t(schema.arguments().size()),
                                                   stack.end()),
        device(c10::DeviceType::CUDA) {
    for (const IValue &value : given) {
      visit(value, [&](const Tensor &tensor) {
        if (is_on_device(tensor) && !device.has_index()) device = tensor.device();
      });
      if (value.isDevice() && value.toDevice().is_cuda() && !device.has_index())
        device = value.toDevice();
    }
  }

  // Which argument a result is, if it is none of its own: the count of all if it is.
  size_t argument_of(const c10::Argument &result) const {
    size_t place = 0;
    for (const auto &argument : schema.arguments()) {
      if (result.alias_info() && argument.alias_info() &&
          *argument.alias_info() == *result.alias_info())
        break;
      place++;
    }
    return place;
  }

  // What a kernel is given; it must not write to a tensor of the host, which it has a copy of.
  Stack on_host() const {
    Stack values;
    for (size_t i = 0; i < given.size(); i++) {
      const auto &argument = schema.arguments()[i];
      visit(given[i], [&](const Tensor &tensor) {
        TORCH_CHECK(!is_written(argument) || !tensor.defined() || is_on_device(tensor),
                    "fake device: ", schema.name(), " writes to a tensor that is not on a device");
      });
      values.push_back(argument.name() == "generator"
                           ? host_generator(given[i], device)
                           : changed(given[i], at::kCPU, for_kernel));
    }
    return values;
  }

  std::vector<Access> accesses() const {
    std::vector<Access> all;
    for (size_t i = 0; i < given.size(); i++)
      visit(given[i], [&](const Tensor &tensor) {
        add_accesses(all, tensor, is_written(schema.arguments()[i]));
      });
    return all;
  }

  const char *name() const { return interned(schema.name()); }
};

// Whether a function of Python that tells shapes has said that there is no answer before the bytes.
// All else goes on: an interrupt (KeyboardInterrupt) that came while it ran must end the program.
bool cannot_know(const std::exception &of_python) {
  const std::string words = of_python.what();
  return words.rfind("NotImplementedError", 0) == 0 || words.rfind("RuntimeError", 0) == 0;
}

// The shapes of the results, told by the same operator on tensors without bytes; nothing if it
// cannot know them before it has seen the bytes. Arguments that it would resize are resized.
std::optional<Stack> shapes_of(const Call &call) {
  Stack shapes;
  for (const IValue &value : call.given)
    shapes.push_back(value.isGenerator() ? IValue() : changed(value, at::kMeta, without_bytes));
  const Stack arguments = shapes;
  try {
    call.op.callBoxed(&shapes);
  } catch (const c10::Error &) {
    return std::nullopt;
  } catch (const std::exception &error) {
    if (!cannot_know(error)) throw;
    return std::nullopt;
  }
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!is_written(call.schema.arguments()[i]) || !call.given[i].isTensor()) continue;
    const Tensor &target = call.given[i].toTensor(), &shape = arguments[i].toTensor();
    if (is_on_device(target) && target.sizes() != shape.sizes()) target.resize_(shape.sizes());
  }
  return shapes;
}

// Results whose shapes depend on bytes: waits for them, as PyTorch's own operators do.
Stack run_and_wait(const Call &call) {
  const auto found = std::make_shared<Stack>();
  const Task task{call.op, call.on_host(), {}};
  const CUstream stream = current_stream(call.device);
  check(launch_kernel(stream, call.name(), call.accesses(), [task, found] {
    at::AutoDispatchBelowAutograd no_autograd;
    Stack values = task.arguments;
    task.op.callBoxed(&values);
    *found = std::move(values);
  }));
  check(cuStreamSynchronize(stream));
  Stack results;
  for (size_t i = 0; i < found->size(); i++) {
    const size_t argument = call.argument_of(call.schema.returns()[i]);
    results.push_back(argument < call.given.size()
                          ? call.given[argument]
                          : changed(found->at(i), call.device, [&](const Tensor &result) {
                              return result.defined() ? result.to(call.device) : result;
                            }));
  }
  return results;
}

Stack run_later(const Call &call, const Stack &shapes) {
  std::vector<Access> accesses = call.accesses();
  Task task{call.op, call.on_host(), {}};
  Stack results;
  for (size_t i = 0; i < call.schema.returns().size(); i++) {
    const size_t argument = call.argument_of(call.schema.returns()[i]);
    if (argument < call.given.size()) {
      results.push_back(call.given[argument]);
      visit(call.given[argument], [&](const Tensor &) { task.targets.emplace_back(); });
      continue;
    }
    results.push_back(changed(shapes[i], call.device, [&](const Tensor &shape) {
      if (!shape.defined()) return task.targets.emplace_back(), shape;
      Tensor result = at::empty_strided(shape.sizes(), shape.strides(),
                                        shape.options().device(call.device));
      add_accesses(accesses, result, true);
      task.targets.push_back(for_kernel(result));
      return result;
    }));
  }
  check(launch_kernel(current_stream(call.device), call.name(), std::move(accesses),
                      [task] { task.run(); }));
  return results;
}

// Makes a device the current one, until the end of the block.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device) : before_(guard_.exchangeDevice(device)) {}
  ~OnDevice() { guard_.setDevice(before_); }

 private:
  const c10::impl::VirtualGuardImpl guard_{c10::DeviceType::CUDA};
  const c10::Device before_;
};

}  // namespace

void run_operator(const c10::OperatorHandle &op, Stack *stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                              "fake device: ", op.schema().name(), " has no operator on the CPU");
  Call call(op, *stack);
  if (!call.device.has_index())
    call.device = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
  const OnDevice guard(call.device);
  at::AutoDispatchBelowADInplaceOrView below;
  const std::optional<Stack> shapes = shapes_of(call);
  Stack results = shapes ? run_later(call, *shapes) : run_and_wait(call);
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (IValue &result : results) stack->push_back(std::move(result));
}

}  // namespace fake
