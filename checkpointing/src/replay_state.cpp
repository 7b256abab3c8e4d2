#include "smp/checkpointing/replay_state.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>

namespace smp::checkpointing {

ReplayState::Autocasts ReplayState::current_autocasts() {
  const auto of = [](c10::DeviceType device) {
    return Autocast{device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)};
  };
  Autocasts autocasts{of(at::kCPU)};
  if (const auto accelerator = at::getAccelerator(false); accelerator && *accelerator != at::kCPU) {
    autocasts.push_back(of(*accelerator));
  }
  return autocasts;
}

void ReplayState::apply(const Autocasts& autocasts, bool cache) {
  for (const auto& autocast : autocasts) {
    at::autocast::set_autocast_enabled(autocast.device, autocast.enabled);
    at::autocast::set_autocast_dtype(autocast.device, autocast.dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache);
}

ReplayState::ReplayState(bool random)
    : autocasts_(current_autocasts()), autocast_cache_(at::autocast::is_autocast_cache_enabled()) {
  if (random) {
    random_.emplace();
  }
}

ReplayState::Scope::Scope(const ReplayState& state)
    : before_(current_autocasts()),
      cache_before_(at::autocast::is_autocast_cache_enabled()),
      grad_before_(c10::GradMode::is_enabled()) {
  // Casts of weights that are made here go when the outermost autocast ends, as in forward.
  at::autocast::increment_nesting();
  apply(state.autocasts_, state.autocast_cache_);
  c10::GradMode::set_enabled(true);
  if (state.random_) {
    random_.emplace(*state.random_);
  }
}

ReplayState::Scope::~Scope() {
  random_.reset();
  c10::GradMode::set_enabled(grad_before_);
  apply(before_, cache_before_);
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
}

}  // namespace smp::checkpointing
