#pragma once

#include <cstdint>
#include <vector>

namespace smp::partition {

/// A run of neighbouring siblings, cut from the children of a module.
struct Segment {
  std::vector<std::int64_t> costs;  ///< of each sibling with all that is below it
  /// How many partitions each sibling can fill.
  std::vector<int> capacities;
};

/// Number of elements looked at: a measure of work that does not depend on the machine.
using Steps = std::int64_t;

/// Costs that the first and the last of some partitions have anyway.
struct Extras {
  std::int64_t first = 0;
  std::int64_t last = 0;
};

/// `costs` with the extras added where they lie: at the first and at the last sibling. `costs` is not empty.
std::vector<std::int64_t> with_extras(std::vector<std::int64_t> costs, const Extras& extras);

/// Cuts `costs` into `segments` contiguous, non-empty runs such that the largest run is as small as possible; what is
/// free beyond that goes towards equal runs, the shorter one first. Gives the end of each run. Costs are not negative;
/// 1 <= segments <= size of `costs`.
///
/// Example: {8, 1, 1, 8} in 3 runs gives the ends {1, 3, 4}.
std::vector<int> cut_segments(const std::vector<std::int64_t>& costs, int segments, Steps& steps);

/// The cost of the largest run of that cut.
std::int64_t largest_segment(const std::vector<std::int64_t>& costs, int segments, Steps& steps);

/// Hands `partitions` partitions to the segments by D'Hondt: again and again one to the segment with the largest
/// cost / (already given + 1), ties to the one that has fewer, then to the first. No segment gets more than its
/// siblings can fill. The extras make the first and the last segment larger for their first partition, but more
/// partitions cannot share them.
///
/// A segment that gets none joins the last partition of the segment before it, or, where no segment before it has any,
/// the first of all. Where there is one partition for each segment, D'Hondt is followed only if that makes the largest
/// partition smaller than giving one to each.
///
/// The capacities must add up to `partitions` at least. Gives the number of partitions of each segment.
std::vector<int> hand_out_partitions(const std::vector<Segment>& segments, int partitions, const Extras& extras,
                                     Steps& steps);

/// What lies on the first and last partition of each segment that got any: the extras of all of them, and the segments
/// that joined.
std::vector<Extras> extras_of(const std::vector<Segment>& segments, const std::vector<int>& given,
                              const Extras& extras);

}  // namespace smp::partition
