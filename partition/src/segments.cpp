#include <smp/partition/segments.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <numeric>

namespace smp::partition {

namespace {

using Costs = std::vector<std::int64_t>;

/// prefix[i] is the cost of the first i siblings.
Costs prefix_sums(const Costs& costs, Steps& steps) {
  Costs prefix(costs.size() + 1, 0);
  std::partial_sum(costs.begin(), costs.end(), prefix.begin() + 1);
  steps += static_cast<Steps>(costs.size());
  return prefix;
}

/// The furthest end of a run that starts at `start` and costs at most `bound`.
std::size_t furthest_end(const Costs& prefix, std::size_t start, std::int64_t bound) {
  const auto begin = prefix.begin() + static_cast<std::ptrdiff_t>(start);
  const auto end = std::upper_bound(begin, prefix.end(), *begin + bound);
  return static_cast<std::size_t>(end - prefix.begin()) - 1;
}

bool fits(const Costs& prefix, int segments, std::int64_t bound, Steps& steps) {
  std::size_t start = 0;
  for (int segment = 0; segment < segments && start + 1 < prefix.size(); ++segment) {
    start = furthest_end(prefix, start, bound);
    ++steps;
  }
  return start + 1 == prefix.size();
}

std::int64_t smallest_bound(const Costs& costs, const Costs& prefix, int segments, Steps& steps) {
  // At the lower end every single sibling fits, so that a run is never empty.
  std::int64_t low = *std::max_element(costs.begin(), costs.end());
  std::int64_t high = prefix.back();
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (fits(prefix, segments, middle, steps)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

/// needed[i]: the smallest number of runs of at most `bound` that cover the siblings from i on.
std::vector<int> runs_needed(const Costs& prefix, std::int64_t bound, Steps& steps) {
  const std::size_t count = prefix.size() - 1;
  std::vector<int> needed(count + 1, 0);
  std::size_t end = count;
  for (std::size_t start = count; start-- > 0;) {
    while (prefix[end] - prefix[start] > bound) {
      --end;
      ++steps;
    }
    needed[start] = needed[end] + 1;
    ++steps;
  }
  return needed;
}

std::int64_t total_cost(const Segment& segment) {
  return std::accumulate(segment.costs.begin(), segment.costs.end(), std::int64_t{0});
}

int total_capacity(const Segment& segment) {
  return std::accumulate(segment.capacities.begin(), segment.capacities.end(), 0);
}

/// What the largest of `partitions` partitions of the segment costs at least: exact where its siblings are leaves.
std::int64_t largest_partition(const Segment& segment, int partitions, const Extras& extras, Steps& steps) {
  const bool all_leaves =
      std::all_of(segment.capacities.begin(), segment.capacities.end(), [](int capacity) { return capacity == 1; });
  if (all_leaves) {
    return largest_segment(with_extras(segment.costs, extras), partitions, steps);
  }
  const std::int64_t cost = extras.first + total_cost(segment) + extras.last;
  return std::max({extras.first, extras.last, (cost + partitions - 1) / partitions});
}

std::int64_t largest_partition(const std::vector<Segment>& segments, const std::vector<int>& given,
                               const Extras& extras, Steps& steps) {
  const std::vector<Extras> by_segment = extras_of(segments, given, extras);
  std::int64_t largest = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (given[i] > 0) {
      largest = std::max(largest, largest_partition(segments[i], given[i], by_segment[i], steps));
    }
  }
  return largest;
}

}  // namespace

Costs with_extras(Costs costs, const Extras& extras) {
  costs.front() += extras.first;
  costs.back() += extras.last;
  return costs;
}

std::vector<Extras> extras_of(const std::vector<Segment>& segments, const std::vector<int>& given,
                              const Extras& extras) {
  std::vector<Extras> result(segments.size());
  std::int64_t before = extras.first;  // waits for the first segment that has a partition
  Extras* last = nullptr;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (given[i] > 0) {
      last = &result[i];
      last->first += before;
      before = 0;
    } else {
      (last != nullptr ? last->last : before) += total_cost(segments[i]);
    }
  }
  if (last != nullptr) {
    last->last += extras.last;
  }
  return result;
}

std::int64_t largest_segment(const Costs& costs, int segments, Steps& steps) {
  return smallest_bound(costs, prefix_sums(costs, steps), segments, steps);
}

std::vector<int> cut_segments(const Costs& costs, int segments, Steps& steps) {
  const Costs prefix = prefix_sums(costs, steps);
  const std::int64_t bound = smallest_bound(costs, prefix, segments, steps);
  const std::vector<int> needed = runs_needed(prefix, bound, steps);

  std::vector<int> ends;
  std::size_t start = 0;
  for (int left = segments; left > 1; --left) {
    // The end may lie where the run keeps the bound and the siblings after it can keep it in the runs that are left.
    std::size_t first_end = start + 1;
    while (needed[first_end] > left - 1) {
      ++first_end;
      ++steps;
    }
    const std::size_t last_end =
        std::min(furthest_end(prefix, start, bound), costs.size() - static_cast<std::size_t>(left - 1));
    // There, as close as possible to an equal share of what is left.
    const std::int64_t share = (prefix.back() - prefix[start]) / left;
    std::size_t end = std::clamp(furthest_end(prefix, start, share), first_end, last_end);
    if (end < last_end) {
      const std::int64_t below = share - (prefix[end] - prefix[start]);
      const std::int64_t above = prefix[end + 1] - prefix[start] - share;
      if (above < below) {
        ++end;
      }
    }
    ends.push_back(static_cast<int>(end));
    start = end;
  }
  ends.push_back(static_cast<int>(costs.size()));
  return ends;
}

std::vector<int> hand_out_partitions(const std::vector<Segment>& segments, int partitions, const Extras& extras,
                                     Steps& steps) {
  std::vector<std::int64_t> costs;
  std::vector<int> capacities;
  for (const Segment& segment : segments) {
    costs.push_back(total_cost(segment));
    capacities.push_back(total_capacity(segment));
    steps += static_cast<Steps>(segment.costs.size());
  }

  std::vector<int> given(segments.size(), 0);
  const auto is_better = [&](std::size_t one, std::size_t other) {
    const auto cost = [&](std::size_t i) {
      const std::int64_t first = i == 0 ? extras.first : 0;
      const std::int64_t last = i + 1 == segments.size() ? extras.last : 0;
      return costs[i] + (given[i] == 0 ? first + last : 0);
    };
    // one / (given + 1) > other / (given + 1), without division.
    const std::int64_t left = cost(one) * (given[other] + 1);
    const std::int64_t right = cost(other) * (given[one] + 1);
    return left != right ? left > right : given[one] < given[other];
  };
  for (int i = 0; i < partitions; ++i) {
    std::size_t best = segments.size();
    for (std::size_t candidate = 0; candidate < segments.size(); ++candidate) {
      ++steps;
      if (given[candidate] < capacities[candidate] && (best == segments.size() || is_better(candidate, best))) {
        best = candidate;
      }
    }
    ++given[best];
  }

  if (segments.size() == static_cast<std::size_t>(partitions)) {
    std::vector<int> one_each(segments.size(), 1);
    if (given != one_each &&
        largest_partition(segments, one_each, extras, steps) <= largest_partition(segments, given, extras, steps)) {
      return one_each;
    }
  }
  return given;
}

}  // namespace smp::partition
