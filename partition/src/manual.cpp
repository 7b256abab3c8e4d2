#include <smp/error.h>
#include <smp/partition/manual.h>

#include <cstddef>
#include <string>

namespace smp::partition {

namespace {

std::string quoted(const std::string& name) { return name.empty() ? "the root module" : "module '" + name + "'"; }

}  // namespace

std::vector<int> place_by_hand(const ModuleTree& tree, const std::vector<int>& marks, int default_partition,
                               int partitions) {
  if (marks.size() != static_cast<std::size_t>(tree.size())) {
    throw_usage("there are {} marks for {} modules: one for each is needed", marks.size(), tree.size());
  }
  std::vector<int> home(marks.size(), default_partition);
  for (int module = 0; module < tree.size(); ++module) {
    const int mark = marks[static_cast<std::size_t>(module)];
    int& own_home = home[static_cast<std::size_t>(module)];
    if (mark != kNotMarked) {
      if (mark < 0 || mark >= partitions) {
        throw_usage(
            "{} is placed on partition {}: it must be at least 0 and below the number of partitions, {}; place it on "
            "another one or set partitions higher",
            quoted(tree.name(module)), mark, partitions);
      }
      own_home = mark;
    } else if (tree.parent(module) != ModuleTree::kNoParent) {
      own_home = home[static_cast<std::size_t>(tree.parent(module))];
    }

    const int first_tied = tree.tied_to(module);
    const int shared_home = home[static_cast<std::size_t>(first_tied)];
    if (own_home != shared_home) {
      throw_usage(
          "{} is placed on partition {} and {} on partition {}, but they share a parameter (directly or through "
          "other modules), so they must be on one partition; place both on the same one, or set auto_partition to "
          "true",
          quoted(tree.name(first_tied)), shared_home, quoted(tree.name(module)), own_home);
    }
  }
  return home;
}

}  // namespace smp::partition
