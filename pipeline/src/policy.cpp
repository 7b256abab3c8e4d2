#include "smp/pipeline/policy.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "smp/error.h"

namespace smp::pipeline {
namespace {

constexpr double kBrief = 8;  // brief: under an eighth of the longest
constexpr std::int32_t kSlack =
    1;  // one more microbatch than 1F1B holds, so that a late gradient does not idle the rank

//                     interleaved   simple
// transfer                 0           0      others wait for it
// backward                 1           3
// operator                 2           1      cheap, and often the loss, which starts a backward
// forward                  3           2
int rank_of(Policy policy, Urgency urgency) {
  switch (urgency) {
    case Urgency::kTransfer:
      return 0;
    case Urgency::kBackward:
      return policy == Policy::kInterleaved ? 1 : 3;
    case Urgency::kOperator:
      return policy == Policy::kInterleaved ? 2 : 1;
    case Urgency::kForward:
      return policy == Policy::kInterleaved ? 3 : 2;
  }
  return 3;
}

}  // namespace

Policy policy_named(std::string_view name) {
  if (name == "interleaved") {
    return Policy::kInterleaved;
  }
  if (name == "simple") {
    return Policy::kSimple;
  }
  throw_usage("pipeline is '{}', but must be 'interleaved' or 'simple'", name);
}

std::size_t choose(Policy policy, const std::vector<Candidate>& candidates) {
  double longest_ms = 0;
  for (const auto& candidate : candidates) {
    longest_ms = std::max(longest_ms, candidate.cost_ms);
  }
  const auto key = [&](const Candidate& c) {
    const bool is_brief = c.cost_ms != kUnknownCost && c.cost_ms * kBrief < longest_ms;
    return std::tuple(!is_brief, !c.continues, rank_of(policy, c.urgency), c.microbatch, c.arrival);
  };
  const auto best = std::min_element(candidates.begin(), candidates.end(),
                                     [&](const Candidate& a, const Candidate& b) { return key(a) < key(b); });
  return static_cast<std::size_t>(best - candidates.begin());
}

std::int32_t admission_limit(Policy policy, std::int32_t lowest_unfinished, int partition, int partitions) {
  if (policy == Policy::kSimple) {
    return std::numeric_limits<std::int32_t>::max();
  }
  return lowest_unfinished + (partitions - partition) + kSlack;
}

}  // namespace smp::pipeline
