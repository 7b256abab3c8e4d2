#include "smp/pipeline/gradient_sums.h"

#include <ATen/ops/add.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <utility>

namespace smp::pipeline {

void GradientSums::open_call(std::uint32_t step, const std::vector<int>& parameters, std::int32_t microbatch) {
  const std::lock_guard lock(mutex_);
  if (step != step_) {
    return;
  }
  for (int p : parameters) {
    ++pending_[static_cast<std::size_t>(p)][microbatch].open_calls;
  }
}

void GradientSums::close_call(std::uint32_t step, const std::vector<int>& parameters, std::int32_t microbatch) {
  const std::lock_guard lock(mutex_);
  if (step != step_) {
    return;
  }
  for (int p : parameters) {
    auto& by_microbatch = pending_[static_cast<std::size_t>(p)];
    const auto found = by_microbatch.find(microbatch);
    if (found == by_microbatch.end()) {
      continue;
    }
    --found->second.open_calls;
    if (found->second.open_calls <= 0 && microbatch == lowest_open_) {
      flush(static_cast<std::size_t>(p), microbatch);
    }
  }
}

void GradientSums::add(std::uint32_t step, int parameter, std::int32_t microbatch, std::int64_t pass,
                       at::Tensor gradient) {
  const c10::AutoGradMode no_grad(false);
  const std::lock_guard lock(mutex_);
  if (step != step_) {
    return;
  }
  auto& sums = pending_[static_cast<std::size_t>(parameter)][microbatch].sums;
  if (!sums.empty() && sums.back().first == pass) {
    sums.back().second = at::add(sums.back().second, gradient);
  } else {
    sums.emplace_back(pass, std::move(gradient));
  }
  ++contributions_;
}

void GradientSums::flush(std::size_t parameter, std::int32_t microbatch) {
  auto& by_microbatch = pending_[parameter];
  const auto found = by_microbatch.find(microbatch);
  if (found == by_microbatch.end()) {
    return;
  }
  auto sums = std::exchange(found->second.sums, {});
  if (found->second.open_calls <= 0) {
    by_microbatch.erase(found);
  }
  const c10::AutoGradMode no_grad(false);
  auto& variable = parameters_[parameter];
  auto& grad = variable.mutable_grad();
  for (const auto& [pass, sum] : sums) {
    torch::autograd::AccumulateGrad::accumulateGrad(variable, grad, sum, 1,
                                                    [&grad](at::Tensor&& updated) { grad = std::move(updated); });
  }
}

void GradientSums::close(std::uint32_t step, std::int32_t microbatch) {
  const std::lock_guard lock(mutex_);
  if (step != step_) {
    return;
  }
  closed_.insert(microbatch);
  while (closed_.erase(lowest_open_) > 0) {
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      flush(p, lowest_open_);
    }
    ++lowest_open_;
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      const auto found = pending_[p].find(lowest_open_);
      if (found != pending_[p].end() && found->second.open_calls <= 0) {
        flush(p, lowest_open_);
      }
    }
  }
}

void GradientSums::finish_step() {
  const std::lock_guard lock(mutex_);
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    while (!pending_[p].empty()) {
      const auto microbatch = pending_[p].begin()->first;
      pending_[p].begin()->second.open_calls = 0;
      flush(p, microbatch);
    }
  }
  forget();
}

void GradientSums::start_step(std::uint32_t step) {
  const std::lock_guard lock(mutex_);
  step_ = step;
  forget();
}

void GradientSums::forget() {
  for (auto& by_microbatch : pending_) {
    by_microbatch.clear();
  }
  closed_.clear();
  lowest_open_ = 0;
}

std::size_t GradientSums::contributions() const {
  const std::lock_guard lock(mutex_);
  return contributions_;
}

std::int64_t GradientSums::pending_bytes() const {
  const std::lock_guard lock(mutex_);
  std::int64_t bytes = 0;
  for (const auto& by_microbatch : pending_) {
    for (const auto& [microbatch, pending] : by_microbatch) {
      for (const auto& [pass, sum] : pending.sums) {
        bytes += static_cast<std::int64_t>(sum.nbytes());
      }
    }
  }
  return bytes;
}

}  // namespace smp::pipeline
