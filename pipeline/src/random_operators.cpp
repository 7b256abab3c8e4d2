// Random operators of a thread whose numbers do not come from the default generators: see StreamScope.
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "smp/pipeline/arguments.h"
#include "smp/pipeline/remote_tensor.h"
#include "smp/random.h"

namespace smp::pipeline {
namespace {

// Close above the kernels, and always included; nobody else registers operators on tensors that draw here.
constexpr auto kRedirect = c10::DispatchKey::BackendSelect;

at::Generator make_generator_on(c10::Device device, std::uint64_t key) {
  if (device.is_cpu()) {
    return make_stream(key);
  }
  auto generator = at::globalContext().getAcceleratorHooksInterface(device.type()).getNewGenerator(device.index());
  generator.set_current_seed(key);
  return generator;
}

void redirect(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kRedirect);
  const auto own = own_stream();
  if (!draws_apart() && !own.defined()) {
    op.redispatchBoxed(below, stack);
    return;
  }
  const auto& schema = op.schema();
  const auto arguments = stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size());
  c10::IValue* generator = nullptr;
  std::optional<c10::Device> device;
  bool elsewhere = false;  // then its owner draws, or nobody does
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    auto& argument = arguments[static_cast<std::ptrdiff_t>(i)];
    if (schema.arguments()[i].name() == "generator") {
      generator = &argument;
    }
    if (argument.isTensor() && argument.toTensor().defined()) {
      device = argument.toTensor().device();
      elsewhere |= is_remote(argument.toTensor()) || device->is_meta();
    }
  }
  if (generator != nullptr && generator->isNone() && device && !elsewhere) {
    const bool takes_stream = !draws_apart() && own.defined() && device->is_cpu();
    if (takes_stream) {
      *generator = own;
    } else {
      *generator = make_generator_on(*device, draw_key());
    }
  }
  op.redispatchBoxed(below, stack);
}

}  // namespace
}  // namespace smp::pipeline

// Of the random operators those that have a kernel of their own: the others are made of these.
TORCH_LIBRARY_IMPL(aten, BackendSelect, m) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (name.getNamespace() != "aten" || !op || !op->hasSchema() ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      continue;
    }
    const auto& arguments = op->schema().arguments();
    if (std::any_of(arguments.begin(), arguments.end(), [](const auto& each) { return each.name() == "generator"; })) {
      const auto full_name = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      m.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&smp::pipeline::redirect>());
    }
  }
}
