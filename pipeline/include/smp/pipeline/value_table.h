// The values and calls of one rank, by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "smp/pipeline/instruction.h"

namespace smp::pipeline {

struct CallRecord;

/// An entry lives until it was released and nobody pins it. Instructions pin what they name from their arrival until
/// they ran; frames pin what they were lent. Not thread-safe: the engine's lock guards it. Entries that go are handed
/// to the caller, who must drop them without the lock: the end of a tensor may need other locks.
class ValueTable {
 public:
  struct Entry {
    at::Tensor data;
    std::shared_ptr<CallRecord> call;
    bool ready = false;
    bool released = false;
    int pins = 0;
    std::vector<FrameId> loans;
    std::vector<FrameId> writers;  // frames that change it
  };
  using Trash = std::vector<Entry>;

  void store(ValueId id, at::Tensor data, Trash& trash);
  void store(ValueId id, std::shared_ptr<CallRecord> call, Trash& trash);
  void pin(ValueId id) { ++entries_[id].pins; }
  void unpin(ValueId id, Trash& trash);
  void release(ValueId id, Trash& trash);
  void lend(ValueId id, FrameId frame) { entries_[id].loans.push_back(frame); }
  /// To a frame that changes it in place: until it gives the value back nobody else reads it.
  void lend_to_writer(ValueId id, FrameId frame);
  void give_back(ValueId id, FrameId frame);

  [[nodiscard]] bool ready(ValueId id) const;
  /// Lent to a frame that is not among `ancestors`.
  [[nodiscard]] bool lent_beyond(ValueId id, const std::vector<FrameId>& ancestors) const;
  /// Changed by a frame that is not among `ancestors`.
  [[nodiscard]] bool written_beyond(ValueId id, const std::vector<FrameId>& ancestors) const;
  [[nodiscard]] bool has_writers() const { return num_writers_ > 0; }
  /// Throw FailureError when there is no such value or call.
  [[nodiscard]] const at::Tensor& value(ValueId id) const;
  [[nodiscard]] const std::shared_ptr<CallRecord>& call(ValueId id) const;

  [[nodiscard]] std::size_t size() const { return entries_.size(); }
  [[nodiscard]] std::int64_t bytes() const;
  [[nodiscard]] std::size_t calls() const;
  Trash clear();

 private:
  void reap(std::unordered_map<ValueId, Entry>::iterator entry, Trash& trash);
  const Entry& at(ValueId id) const;

  std::unordered_map<ValueId, Entry> entries_;
  std::size_t num_writers_ = 0;
};

}  // namespace smp::pipeline
