#pragma once

#include <smp/partition/tree.h>

#include <vector>

namespace smp::partition {

/// Mark of a module that was not placed by hand.
inline constexpr int kNotMarked = -1;

/// Places modules as the user said: each goes to its mark, else to that of its nearest marked ancestor, else to
/// `default_partition`.
///
/// Throws UsageError, with the names of the modules, when a mark is not below `partitions` or modules that share a
/// parameter end on different partitions; also when there is not one mark for each module.
std::vector<int> place_by_hand(const ModuleTree& tree, const std::vector<int>& marks, int default_partition,
                               int partitions);

}  // namespace smp::partition
