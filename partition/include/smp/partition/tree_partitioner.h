#pragma once

#include <smp/partition/segments.h>
#include <smp/partition/tree.h>

#include <cstdint>
#include <vector>

namespace smp::partition {

/// The cost of the whole model in the integer units of weighted_costs(): equal modules get exactly equal costs, so
/// that sums and ties do not depend on rounding.
inline constexpr std::int64_t kModelCost = std::int64_t{1} << 40;

struct TreePartition {
  std::vector<int> home;  ///< the partition of each module
  Steps steps = 0;        ///< work done
};

/// The cost of each module itself: `memory_weight * memory + (1 - memory_weight) * compute`, both as fractions of the
/// whole model, in units of 1 / kModelCost. The cost of tied modules counts where the first of them is.
std::vector<std::int64_t> weighted_costs(const ModuleTree& tree, double memory_weight);

/// The number of partitions that each module with all that is below it can fill: the modules there that own
/// parameters and are free to move, so without those that follow an earlier tied module.
std::vector<int> capacities(const ModuleTree& tree);

/// Places any tree of modules on partitions 0 ... partitions-1.
///
/// 1. The root gets all partitions. A module with several partitions is placed on the first of them.
/// 2. With one partition, all below the module goes there too. Otherwise its children (those that can fill a
///    partition) are cut into min(partitions, children) contiguous segments, the largest as small as possible. What
///    lies on the first partition already (the module itself, and what was left to it before) counts to the first.
///    Where that alone is an equal share, or is needed to fill the first partition, the children get the others.
/// 3. The partitions go to the segments by D'Hondt; a segment that gets none joins the first partition.
/// 4. A segment with one child hands its partitions on to that child; one with several is cut again.
///
///     model      P = {0, 1, 2}
///     ├─ embed   ─┐ segment, 1 partition   → 0
///     ├─ blocks  ─┘ segment, 2 partitions  → blocks itself on 1, its children cut again over {1, 2}
///     └─ head     ─ segment, none          → 0, with the parent
///
/// Tied modules go to the home of the earliest of them, while their ancestors and children stay where the walk puts
/// them; a module without movable parameters gets the home of its parent. Every partition gets a module with
/// parameters as long as there are `partitions` movable ones; otherwise the last partitions stay empty.
///
/// Deterministic; work grows with modules x partitions. Throws UsageError for an empty tree, no partitions, or a
/// weight outside [0, 1].
TreePartition partition_tree(const ModuleTree& tree, int partitions, double memory_weight);

}  // namespace smp::partition
