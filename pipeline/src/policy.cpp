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
// forward that feeds       1           2
// backward                 2           3
// operator                 3           1      cheap, and often the loss, which starts a backward
// forward                  4           2
int rank_of(Policy policy, const Candidate& candidate) {
  switch (candidate.urgency) {
    case Urgency::kTransfer:
      return 0;
    case Urgency::kBackward:
      return policy == Policy::kInterleaved ? 2 : 3;
    case Urgency::kOperator:
      return policy == Policy::kInterleaved ? 3 : 1;
    case Urgency::kForward:
      return policy == Policy::kSimple ? 2 : candidate.feeds ? 1 : 4;
  }
  return 4;
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
    return std::tuple(!is_brief(c.cost_ms, longest_ms), !c.continues, rank_of(policy, c), c.microbatch, c.arrival);
  };
  const auto best = std::min_element(candidates.begin(), candidates.end(),
                                     [&](const Candidate& a, const Candidate& b) { return key(a) < key(b); });
  return static_cast<std::size_t>(best - candidates.begin());
}

bool is_brief(double cost_ms, double longest_ms) { return cost_ms != kUnknownCost && cost_ms * kBrief < longest_ms; }

std::int32_t pipeline_depth(int partition, int partitions) { return partitions - partition; }

std::int32_t admission_limit(Policy policy, std::int32_t lowest_unfinished, int partition, int partitions) {
  if (policy == Policy::kSimple) {
    return std::numeric_limits<std::int32_t>::max();
  }
  return lowest_unfinished + pipeline_depth(partition, partitions) + kSlack;
}

}  // namespace smp::pipeline
