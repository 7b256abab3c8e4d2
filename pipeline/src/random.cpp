#include "smp/pipeline/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>

#include "smp/pipeline/arguments.h"
#include "smp/pipeline/remote_tensor.h"

namespace smp::pipeline {
namespace {

// Close above the kernels, and always included; nobody else registers operators on tensors that draw here.
constexpr auto kRedirect = c10::DispatchKey::BackendSelect;

thread_local at::Generator tls_own;
thread_local bool tls_apart = false;
thread_local std::vector<RandomState> tls_callers;  // of the modules that this thread is in

/// The generator of this process's accelerator, if it is in use.
std::optional<at::Generator> accelerator_generator() {
  const auto type = at::getAccelerator(false);
  if (!type || *type == at::kCPU) {
    return std::nullopt;
  }
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(type);
  const auto device = hooks.getCurrentDevice();
  return hooks.hasPrimaryContext(device) ? std::optional(hooks.getDefaultGenerator(device)) : std::nullopt;
}

std::vector<at::Generator> defaults() {
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  if (auto more = accelerator_generator()) {
    generators.push_back(*more);
  }
  return generators;
}

void seed_all(std::vector<at::Generator> generators, std::uint64_t key) {
  for (auto& generator : generators) {
    const std::scoped_lock lock(generator.mutex());
    generator.set_current_seed(key);
  }
}

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
  if (!tls_apart && !tls_own.defined()) {
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
    const bool takes_stream = !tls_apart && tls_own.defined() && device->is_cpu();
    if (takes_stream) {
      *generator = tls_own;
    } else {
      *generator = make_generator_on(*device, draw_key());
    }
  }
  op.redispatchBoxed(below, stack);
}

}  // namespace

std::uint64_t mix(std::uint64_t key, std::uint64_t number) {
  auto z = key + 0x9e3779b97f4a7c15ULL * (number + 1);  // SplitMix64
  z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27U)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31U);
}

at::Generator own_stream() { return tls_own; }

std::uint64_t draw_key() {
  auto generator = tls_own.defined() ? tls_own : at::detail::getDefaultCPUGenerator();
  const std::scoped_lock lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

void seed_defaults(std::uint64_t key) { seed_all(defaults(), key); }

void enter_module() {
  if (tls_apart) {
    const auto key = draw_key();
    tls_callers.push_back(RandomState::of_stream());
    seed_all(tls_own.defined() ? std::vector{tls_own} : defaults(), key);
  }
}

void leave_module() {
  if (tls_apart && !tls_callers.empty()) {
    tls_callers.back().restore();
    tls_callers.pop_back();
  }
}

at::Generator make_stream(std::uint64_t key) { return at::make_generator<at::CPUGeneratorImpl>(key); }

RandomState::RandomState(std::vector<at::Generator> generators) {
  for (auto& generator : generators) {
    const std::scoped_lock lock(generator.mutex());
    auto copy = generator.clone();
    saved_.emplace_back(std::move(generator), std::move(copy));
  }
}

RandomState RandomState::of_defaults() { return RandomState(defaults()); }

RandomState RandomState::of_stream() { return tls_own.defined() ? RandomState({tls_own}) : of_defaults(); }

void RandomState::restore() const {
  for (auto [generator, copy] : saved_) {
    const std::scoped_lock lock(generator.mutex());
    if (generator.device().is_cpu()) {
      auto* to = at::check_generator<at::CPUGeneratorImpl>(generator);
      auto* from = at::check_generator<at::CPUGeneratorImpl>(copy);
      to->set_engine(from->engine());
      to->set_next_float_normal_sample(from->next_float_normal_sample());
      to->set_next_double_normal_sample(from->next_double_normal_sample());
    } else {
      generator.set_state(copy.get_state());
    }
  }
}

StreamScope::StreamScope(at::Generator own, bool apart)
    : own_before_(std::exchange(tls_own, std::move(own))), apart_before_(std::exchange(tls_apart, apart)) {}

StreamScope::~StreamScope() {
  tls_own = std::move(own_before_);
  tls_apart = apart_before_;
}

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
