// Gradients of this rank's parameters, added up in the order of microbatches whatever the order of the work.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace smp::pipeline {

/// Contributions of one call of backward in one microbatch are summed first, as autograd does; the sums are then added
/// to
/// `.grad` in the order of microbatches. So every run gives the bits of the plain loop over microbatches.
///
///   microbatch:      0 (lowest open)        1                  2
///   contribution:    into .grad as soon     waits for          waits for
///                    as no call is left     close(0)           close(0), close(1)
///
/// Everything is said for a step, and what is said for another one than the running is ignored: work that outlives its
/// step, which failed, must not reach the next. Thread-safe, but `.grad` of the parameters belongs to the thread that
/// holds the compute token: only it adds and closes.
class GradientSums {
 public:
  explicit GradientSums(std::vector<at::Tensor> parameters)
      : parameters_(std::move(parameters)), pending_(parameters_.size()) {}

  [[nodiscard]] const at::Tensor& parameter(int index) const { return parameters_[static_cast<std::size_t>(index)]; }

  /// A call in `microbatch` may contribute to these parameters / will not do so any more.
  void open_call(std::uint32_t step, const std::vector<int>& parameters, std::int32_t microbatch);
  void close_call(std::uint32_t step, const std::vector<int>& parameters, std::int32_t microbatch);

  /// `pass`: the call of backward that the contribution belongs to.
  void add(std::uint32_t step, int parameter, std::int32_t microbatch, std::int64_t pass, at::Tensor gradient);

  /// No more contributions of this microbatch can come.
  void close(std::uint32_t step, std::int32_t microbatch);

  /// Forgets what is not in `.grad` yet, and starts again with microbatch 0.
  void start_step(std::uint32_t step);
  /// Adds what is left, in order.
  void finish_step();

  [[nodiscard]] std::size_t contributions() const;
  [[nodiscard]] std::int64_t pending_bytes() const;

 private:
  struct Pending {
    std::vector<std::pair<std::int64_t, at::Tensor>> sums;  // by pass, in their order
    int open_calls = 0;
  };
  void flush(std::size_t parameter, std::int32_t microbatch);
  void forget();

  std::vector<at::Tensor> parameters_;
  mutable std::mutex mutex_;                              // of all below
  std::vector<std::map<std::int32_t, Pending>> pending_;  // for each parameter, by microbatch
  std::set<std::int32_t> closed_;
  std::uint32_t step_ = 0;
  std::int32_t lowest_open_ = 0;
  std::size_t contributions_ = 0;
};

}  // namespace smp::pipeline
