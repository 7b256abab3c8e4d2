// The queues of one rank: what arrived, what of it can run, and which of that runs next.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "smp/pipeline/instruction.h"
#include "smp/pipeline/policy.h"
#include "smp/pipeline/value_table.h"

namespace smp::pipeline {

/// A lane holds the instructions of one frame for this rank, in the order they were issued:
///
///   frame 12 (microbatch 0):  BACKWARD ▸ SEND ▸ END          each lane runs in order, one instruction at a time;
///   frame 13 (microbatch 1):  CALL ▸ CALL ▸ SEND ▸ OP        a lane whose head waits blocks only itself
///
/// Not thread-safe: the engine's lock guards it.
class Lanes {
 public:
  Lanes(Policy policy, int partition, int partitions)
      : policy_(policy), partition_(partition), partitions_(partitions) {}

  void push(Instruction instruction);

  /// Takes the most urgent instruction that can run (its lane is then busy), or nothing.
  std::optional<Instruction> take(const ValueTable& values);
  /// The instruction that take() gave has run, in so many milliseconds.
  void finish(const Instruction& instruction, double took_ms);

  /// A frame was opened by an instruction of lane `parent` / is done.
  void open_nested(FrameId parent) { ++lanes_[parent].open_nested; }
  void close_nested(FrameId parent);

  /// The step ended: microbatches and tickets start again at 0.
  void start_step();
  [[nodiscard]] std::vector<Instruction> clear();
  [[nodiscard]] std::size_t size() const;
  /// Every instruction that has not been taken, with what of its needs is missing if it is the first of its lane.
  struct Waiting {
    const Instruction* instruction;
    std::int64_t arrived_ns;
    bool first;
    std::vector<ValueId> missing;
  };
  [[nodiscard]] std::vector<Waiting> waiting(const ValueTable& values) const;

 private:
  struct Item {
    Instruction instruction;
    std::vector<ValueId> needs;
    std::uint64_t arrival;
    std::int64_t arrived_ns;
  };
  struct Lane {
    std::deque<Item> items;
    int open_nested = 0;
    bool busy = false;
  };

  [[nodiscard]] bool can_run(const Lane& lane, const ValueTable& values) const;
  [[nodiscard]] double cost_ms(const Instruction& instruction) const;
  [[nodiscard]] bool feeds(const Instruction& instruction) const;

  Policy policy_;
  int partition_;
  int partitions_;
  std::unordered_map<FrameId, Lane> lanes_;
  std::uint64_t arrivals_ = 0;
  FrameId last_lane_ = 0;  // of what ran last and was not brief
  std::int32_t lowest_unfinished_ = 0;
  std::set<std::int32_t> finished_;
  std::set<std::int32_t> held_;  // microbatches whose activations lie here
  std::map<std::pair<std::int32_t, std::uint64_t>, std::int64_t> next_ticket_;  // by module and context
  std::map<std::pair<std::size_t, std::int32_t>, double> costs_ms_;  // running mean, by kind of instruction and module
  double longest_ms_ = 0;                                            // of these
};

}  // namespace smp::pipeline
