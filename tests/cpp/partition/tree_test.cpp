#include <gtest/gtest.h>
#include <smp/error.h>
#include <smp/partition/tree.h>

#include <string>
#include <vector>

namespace smp::partition {
namespace {

TEST(ModuleTree, keeps_children_in_the_order_of_adding) {
  ModuleTree tree;
  EXPECT_EQ(tree.add("", ModuleTree::kNoParent, {}), 0);
  EXPECT_EQ(tree.add("a", 0, {}), 1);
  EXPECT_EQ(tree.add("b", 0, {}), 2);
  EXPECT_EQ(tree.add("a.x", 1, {}), 3);
  EXPECT_EQ(tree.children(0), (std::vector<int>{1, 2}));
  EXPECT_EQ(tree.children(1), (std::vector<int>{3}));
  EXPECT_EQ(tree.parent(3), 1);
  EXPECT_EQ(tree.name(3), "a.x");
  EXPECT_EQ(tree.size(), 4);
}

TEST(ModuleTree, a_shared_parameter_counts_at_its_first_owner) {
  ModuleTree tree;
  tree.add("", ModuleTree::kNoParent, {});
  tree.add("embed", 0, {{7, 400}});
  tree.add("head", 0, {{7, 400}, {8, 10}});
  EXPECT_EQ(tree.own_cost(1).memory_bytes, 400);
  EXPECT_EQ(tree.own_cost(1).compute, 400);
  EXPECT_EQ(tree.own_cost(2).memory_bytes, 10);
  EXPECT_TRUE(tree.owns_parameters(2));
  EXPECT_FALSE(tree.owns_parameters(0));
}

TEST(ModuleTree, a_parameter_registered_twice_in_one_module_counts_once) {
  ModuleTree tree;
  tree.add("", ModuleTree::kNoParent, {{7, 400}, {7, 400}});
  EXPECT_EQ(tree.own_cost(0).memory_bytes, 400);
  EXPECT_EQ(tree.tied_to(0), 0);
}

TEST(ModuleTree, only_direct_owners_are_tied) {
  ModuleTree tree;
  tree.add("", ModuleTree::kNoParent, {});
  tree.add("encoder", 0, {});
  tree.add("encoder.embed", 1, {{7, 1}});
  tree.add("decoder", 0, {});
  tree.add("decoder.embed", 3, {{7, 1}});
  EXPECT_EQ(tree.tied_to(4), 2);
  EXPECT_EQ(tree.tied_to(3), 3);
  EXPECT_EQ(tree.tied_to(1), 1);
}

TEST(ModuleTree, ties_join_through_a_module_that_shares_with_two) {
  ModuleTree tree;
  tree.add("", ModuleTree::kNoParent, {});
  tree.add("a", 0, {{1, 1}});
  tree.add("b", 0, {{2, 1}});
  tree.add("c", 0, {{2, 1}, {1, 1}});
  tree.add("d", 0, {{3, 1}});
  EXPECT_EQ(tree.tied_to(1), 1);
  EXPECT_EQ(tree.tied_to(2), 1);
  EXPECT_EQ(tree.tied_to(3), 1);
  EXPECT_EQ(tree.tied_to(4), 4);
}

TEST(ModuleTree, unknown_parents_and_negative_sizes_are_refused) {
  ModuleTree tree;
  EXPECT_THROW(tree.add("", 0, {}), UsageError);
  tree.add("", ModuleTree::kNoParent, {});
  EXPECT_THROW(tree.add("second root", ModuleTree::kNoParent, {}), UsageError);
  EXPECT_THROW(tree.add("own parent", 1, {}), UsageError);
  EXPECT_THROW(tree.add("negative", 0, {{1, -1}}), UsageError);
  EXPECT_EQ(tree.size(), 1);
}

}  // namespace
}  // namespace smp::partition
