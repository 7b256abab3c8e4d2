// Scheduling policies: which of the ready instructions a rank runs next. Pure functions of the ready set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace smp::pipeline {

/// `interleaved`: 1F1B where it can be, backward work first, then the lower microbatch. `simple`: forwards before
/// backwards, as a preference.
enum class Policy : std::uint8_t { kInterleaved, kSimple };

/// Throws UsageError for a name that is neither "interleaved" nor "simple".
Policy policy_named(std::string_view name);

enum class Urgency : std::uint8_t { kTransfer, kOperator, kForward, kBackward };

/// An instruction that could run now. `arrival` orders those that are equal otherwise.
struct Candidate {
  Urgency urgency;
  std::int32_t microbatch;
  std::uint64_t arrival;
  double cost_ms = 0;      // what it is expected to take; kUnknownCost before it has run
  bool continues = false;  // it follows, in its lane, what this rank ran last but for brief ones
  bool feeds = false;      // a forward of a microbatch that keeps the ranks behind this one from running dry
};
inline constexpr double kUnknownCost = -1;

/// Index of the candidate to run. What is brief beside the longest candidate goes first: another rank may wait for it
/// (a head that is tied to the embedding, say), and it delays the others little. Then what continues, since the next
/// rank waits for the end of a run of layers and not for a part of it. Precondition: candidates is not empty.
std::size_t choose(Policy policy, const std::vector<Candidate>& candidates);

/// Under an eighth of the longest; what has not run yet (kUnknownCost) is not brief.
bool is_brief(double cost_ms, double longest_ms);

/// How many microbatches rank `partition` holds in 1F1B: while it holds fewer, a new one goes before backward work.
/// A rank that only ran the backwards that pile up on it would let those behind it run dry.
std::int32_t pipeline_depth(int partition, int partitions);

/// The first microbatch that rank `partition` may not take up yet while `lowest_unfinished` is the lowest one that it
/// has not finished: running further ahead would hold more activations than 1F1B does. `simple` has no such bound.
std::int32_t admission_limit(Policy policy, std::int32_t lowest_unfinished, int partition, int partitions);

}  // namespace smp::pipeline
