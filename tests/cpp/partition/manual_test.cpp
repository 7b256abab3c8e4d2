#include <gtest/gtest.h>
#include <smp/error.h>
#include <smp/partition/manual.h>

#include <string>
#include <vector>

namespace smp::partition {
namespace {

ModuleTree make_tree() {
  ModuleTree tree;
  tree.add("", ModuleTree::kNoParent, {});
  tree.add("blocks", 0, {});
  tree.add("blocks.0", 1, {{1, 4}});
  tree.add("blocks.1", 1, {{2, 4}});
  tree.add("head", 0, {{1, 4}});
  return tree;
}

std::string usage_message(const std::vector<int>& marks, int default_partition, int partitions) {
  try {
    place_by_hand(make_tree(), marks, default_partition, partitions);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(PlaceByHand, unmarked_modules_inherit_the_nearest_marked_ancestor) {
  EXPECT_EQ(place_by_hand(make_tree(), {-1, 1, -1, 2, 1}, 0, 3), (std::vector<int>{0, 1, 1, 2, 1}));
}

TEST(PlaceByHand, modules_below_no_mark_go_to_the_default_partition) {
  EXPECT_EQ(place_by_hand(make_tree(), {-1, -1, -1, 0, -1}, 1, 2), (std::vector<int>{1, 1, 1, 0, 1}));
}

TEST(PlaceByHand, the_root_can_be_marked) {
  EXPECT_EQ(place_by_hand(make_tree(), {1, -1, -1, 0, -1}, 0, 2), (std::vector<int>{1, 1, 1, 0, 1}));
}

TEST(PlaceByHand, splitting_a_shared_parameter_names_both_modules_and_partitions) {
  const std::string message = usage_message({-1, 1, -1, -1, -1}, 0, 2);
  EXPECT_NE(message.find("module 'blocks.0' is placed on partition 1"), std::string::npos) << message;
  EXPECT_NE(message.find("module 'head' on partition 0"), std::string::npos) << message;
}

TEST(PlaceByHand, marks_outside_the_partitions_are_refused_by_name) {
  EXPECT_NE(usage_message({-1, -1, -1, 2, -1}, 0, 2).find("'blocks.1' is placed on partition 2"), std::string::npos);
  EXPECT_NE(usage_message({-2, -1, -1, -1, -1}, 0, 2).find("the root module"), std::string::npos);
  EXPECT_NE(usage_message({-1}, 0, 2).find("1 marks for 5 modules"), std::string::npos);
}

}  // namespace
}  // namespace smp::partition
