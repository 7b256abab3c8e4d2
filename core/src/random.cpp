#include "smp/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <mutex>
#include <optional>

namespace smp {
namespace {

thread_local at::Generator tls_own;
thread_local bool tls_apart = false;
thread_local std::vector<RandomState> tls_callers;  // of the modules that this thread is in

std::mutex registered_mutex;
std::vector<at::Generator> registered;  // guarded by registered_mutex

/// The generator of this process's accelerator, if it is in use.
std::optional<at::Generator> accelerator_generator() {
  const auto type = at::getAccelerator(false);
  if (!type || *type == at::kCPU) {
    return std::nullopt;
  }
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(type);
  if (hooks.deviceCount() == 0) {  // PyTorch was built for a device that this machine does not have
    return std::nullopt;
  }
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

/// The default generators of all devices in use, and those that were registered.
std::vector<at::Generator> all() {
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  if (const auto type = at::getAccelerator(false); type && *type != at::kCPU) {
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(type);
    for (c10::DeviceIndex device = 0; device < hooks.deviceCount(); ++device) {
      if (hooks.hasPrimaryContext(device)) {
        generators.push_back(hooks.getDefaultGenerator(device));
      }
    }
  }
  const std::lock_guard lock(registered_mutex);
  generators.insert(generators.end(), registered.begin(), registered.end());
  return generators;
}

void seed_all(std::vector<at::Generator> generators, std::uint64_t key) {
  for (auto& generator : generators) {
    const std::scoped_lock lock(generator.mutex());
    generator.set_current_seed(key);
  }
}

}  // namespace

std::uint64_t mix(std::uint64_t key, std::uint64_t number) {
  auto z = key + 0x9e3779b97f4a7c15ULL * (number + 1);  // SplitMix64
  z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27U)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31U);
}

at::Generator own_stream() { return tls_own; }

bool draws_apart() { return tls_apart; }

void register_generator(const at::Generator& generator) {
  const std::lock_guard lock(registered_mutex);
  if (std::find(registered.begin(), registered.end(), generator) == registered.end()) {
    registered.push_back(generator);
  }
}

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

RandomState RandomState::of_all() { return RandomState(all()); }

bool RandomState::has_moved() const {
  return std::any_of(saved_.begin(), saved_.end(), [](auto saved) {
    const std::scoped_lock lock(saved.first.mutex());
    return !at::equal(saved.first.get_state(), saved.second.get_state());
  });
}

ReplayableRandom::ReplayableRandom() : apart_(tls_apart), state_(RandomState::of_all()) {
  if (tls_own.defined()) {
    const std::scoped_lock lock(tls_own.mutex());
    own_ = tls_own.clone();
  }
}

bool ReplayableRandom::has_moved() const {
  return state_.has_moved() || (own_.defined() && !at::equal(own_.get_state(), tls_own.get_state()));
}

ReplayableRandom::Scope::Scope(const ReplayableRandom& from)
    : stream_(from.own_.defined() ? from.own_.clone() : at::Generator(), from.apart_), before_(RandomState::of_all()) {
  from.state_.restore();
}

ReplayableRandom::Scope::~Scope() { before_.restore(); }

StreamScope::StreamScope(at::Generator own, bool apart)
    : own_before_(std::exchange(tls_own, std::move(own))), apart_before_(std::exchange(tls_apart, apart)) {}

StreamScope::~StreamScope() {
  tls_own = std::move(own_before_);
  tls_apart = apart_before_;
}

}  // namespace smp
