// The settings of a thread under which code ran, to run it under them again.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "smp/random.h"

namespace smp::checkpointing {

class ReplayState {
 public:
  /// Of this thread, now. `random`: with random numbers, so that the same ones are drawn again.
  explicit ReplayState(bool random);

  /// Puts them in force for a scope, with gradients on.
  class Scope;

 private:
  struct Autocast {
    c10::DeviceType device;
    bool enabled;
    c10::ScalarType dtype;
  };
  using Autocasts = c10::SmallVector<Autocast, 2>;
  static Autocasts current_autocasts();
  static void apply(const Autocasts& autocasts, bool cache);

  Autocasts autocasts_;
  bool autocast_cache_;
  std::optional<ReplayableRandom> random_;
};

class ReplayState::Scope {
 public:
  explicit Scope(const ReplayState& state);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  Autocasts before_;
  bool cache_before_;
  bool grad_before_;
  std::optional<ReplayableRandom::Scope> random_;
};

}  // namespace smp::checkpointing
