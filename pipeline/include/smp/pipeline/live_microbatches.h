// Which microbatches hold activations on this rank.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace smp::pipeline {

/// Counts microbatches whose graphs are alive. Thread-safe.
class LiveMicrobatches {
 public:
  LiveMicrobatches() : counts_(std::make_shared<Counts>()) {}

  /// One graph of a microbatch, alive until the result is dropped; it may outlive this.
  std::shared_ptr<void> hold(std::int32_t microbatch) {
    {
      const std::lock_guard lock(counts_->mutex);
      ++counts_->graphs[microbatch];
      counts_->peak = std::max(counts_->peak, counts_->graphs.size());
    }
    return {nullptr, [counts = counts_, microbatch](std::nullptr_t) {
              const std::lock_guard lock(counts->mutex);
              if (--counts->graphs[microbatch] == 0) {
                counts->graphs.erase(microbatch);
              }
            }};
  }

  /// The most microbatches at once so far.
  [[nodiscard]] std::size_t peak() const {
    const std::lock_guard lock(counts_->mutex);
    return counts_->peak;
  }

 private:
  struct Counts {
    std::mutex mutex;
    std::map<std::int32_t, std::size_t> graphs;
    std::size_t peak = 0;
  };
  std::shared_ptr<Counts> counts_;
};

}  // namespace smp::pipeline
