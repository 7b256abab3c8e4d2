#include <smp/error.h>
#include <smp/partition/tree_partitioner.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <deque>
#include <utility>

namespace smp::partition {

namespace {

std::size_t index(int module) { return static_cast<std::size_t>(module); }

/// Adds what is below each module to it: parents come before their children.
template <typename T>
void add_up(const ModuleTree& tree, std::vector<T>& values) {
  for (int module = tree.size() - 1; module > 0; --module) {
    values[index(tree.parent(module))] += values[index(module)];
  }
}

/// Partitions first ... first + count - 1, with the costs that lie on the first and on the last of them already.
struct Range {
  int first = 0;
  int count = 1;
  Extras costs;
};

class TreeWalk {
 public:
  TreeWalk(const ModuleTree& tree, double memory_weight)
      : tree_(tree),
        own_costs_(weighted_costs(tree, memory_weight)),
        costs_(own_costs_),
        capacities_(capacities(tree)),
        placed_(index(tree.size()), kNotPlaced) {
    add_up(tree, costs_);
  }

  TreePartition run(int partitions) {
    // A model that cannot fill all partitions fills as many as it can.
    queue_.push_back({{0}, {0, std::clamp(partitions, 1, std::max(capacities_[0], 1)), {}}});
    while (!queue_.empty()) {
      const Task task = std::move(queue_.front());
      queue_.pop_front();
      place(task);
    }
    return {homes(), steps_};
  }

 private:
  static constexpr int kNotPlaced = -1;

  /// Siblings in a row, and the partitions that they share.
  struct Task {
    std::vector<int> siblings;
    Range range;
  };

  void place(const Task& task) {
    steps_ += static_cast<Steps>(task.siblings.size());
    if (task.range.count == 1) {
      place_all(task.siblings, task.range.first);
    } else if (task.siblings.size() == 1) {
      place_module(task.siblings.front(), task.range);
    } else {
      place_siblings(task.siblings, task.range);
    }
  }

  /// What is below a module follows it where it is not placed itself.
  void place_all(const std::vector<int>& siblings, int partition) {
    for (const int module : siblings) {
      placed_[index(module)] = partition;
    }
  }

  void place_module(int module, Range range) {
    placed_[index(module)] = range.first;
    std::vector<int> children;
    int capacity_below = 0;
    std::int64_t cost_below = 0;
    for (const int child : tree_.children(module)) {
      ++steps_;
      if (capacities_[index(child)] > 0) {
        children.push_back(child);
        capacity_below += capacities_[index(child)];
        cost_below += costs_[index(child)];
      }
    }
    auto& first_cost = range.costs.first;
    first_cost += own_costs_[index(module)];
    const bool is_first_full = first_cost > 0 && first_cost * range.count >= first_cost + cost_below + range.costs.last;
    if (is_first_full || capacity_below < range.count) {
      range = {range.first + 1, range.count - 1, {0, range.costs.last}};
    }
    queue_.push_back({std::move(children), range});
  }

  void place_siblings(const std::vector<int>& siblings, const Range& range) {
    std::vector<std::int64_t> costs;
    costs.reserve(siblings.size());
    for (const int module : siblings) {
      costs.push_back(costs_[index(module)]);
    }
    const int count = std::min(range.count, static_cast<int>(siblings.size()));
    std::vector<std::vector<int>> runs;
    std::vector<Segment> segments;
    auto begin = siblings.begin();
    for (const int end : cut_segments(with_extras(costs, range.costs), count, steps_)) {
      runs.emplace_back(begin, siblings.begin() + end);
      begin = siblings.begin() + end;
      Segment& segment = segments.emplace_back();
      for (const int module : runs.back()) {
        segment.costs.push_back(costs_[index(module)]);
        segment.capacities.push_back(capacities_[index(module)]);
      }
    }

    const std::vector<int> given = hand_out_partitions(segments, range.count, range.costs, steps_);
    const std::vector<Extras> extras = extras_of(segments, given, range.costs);
    int first = range.first;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      if (given[i] == 0) {
        place_all(runs[i], std::max(first - 1, range.first));
      } else {
        queue_.push_back({std::move(runs[i]), {first, given[i], extras[i]}});
        first += given[i];
      }
    }
  }

  std::vector<int> homes() {
    std::vector<int> home(placed_.size(), 0);
    for (int module = 0; module < tree_.size(); ++module) {
      const int parent = tree_.parent(module);
      int& placed = placed_[index(module)];
      if (placed == kNotPlaced) {
        placed = parent == ModuleTree::kNoParent ? 0 : placed_[index(parent)];
      }
      const int first_tied = tree_.tied_to(module);
      if (first_tied != module) {
        home[index(module)] = home[index(first_tied)];
      } else if (capacities_[index(module)] == 0 && parent != ModuleTree::kNoParent) {
        home[index(module)] = home[index(parent)];
      } else {
        home[index(module)] = placed;
      }
    }
    return home;
  }

  const ModuleTree& tree_;
  std::vector<std::int64_t> own_costs_;
  std::vector<std::int64_t> costs_;
  std::vector<int> capacities_;
  std::vector<int> placed_;  // by the walk, which knows nothing of ties
  std::deque<Task> queue_;
  Steps steps_ = 0;
};

}  // namespace

std::vector<std::int64_t> weighted_costs(const ModuleTree& tree, double memory_weight) {
  Cost total;
  for (int module = 0; module < tree.size(); ++module) {
    total.memory_bytes += tree.own_cost(module).memory_bytes;
    total.compute += tree.own_cost(module).compute;
  }
  const auto fraction = [](double part, double whole) { return whole > 0 ? part / whole : 0.0; };
  std::vector<std::int64_t> costs(index(tree.size()), 0);
  for (int module = 0; module < tree.size(); ++module) {
    const Cost& own = tree.own_cost(module);
    const double weighted = memory_weight * fraction(own.memory_bytes, total.memory_bytes) +
                            (1 - memory_weight) * fraction(own.compute, total.compute);
    costs[index(tree.tied_to(module))] += std::llround(weighted * static_cast<double>(kModelCost));
  }
  return costs;
}

std::vector<int> capacities(const ModuleTree& tree) {
  std::vector<int> result(index(tree.size()), 0);
  for (int module = 0; module < tree.size(); ++module) {
    result[index(module)] = tree.owns_parameters(module) && tree.tied_to(module) == module ? 1 : 0;
  }
  add_up(tree, result);
  return result;
}

TreePartition partition_tree(const ModuleTree& tree, int partitions, double memory_weight) {
  if (tree.size() == 0) {
    throw_usage("the module tree is empty: add the root module first");
  }
  if (partitions < 1) {
    throw_usage("the number of partitions is {}: at least 1 is needed; set partitions to 1 or more", partitions);
  }
  if (!(memory_weight >= 0 && memory_weight <= 1)) {
    throw_usage("memory_weight is {}: it must be from 0 to 1; set it there", memory_weight);
  }
  return TreeWalk(tree, memory_weight).run(partitions);
}

}  // namespace smp::partition
