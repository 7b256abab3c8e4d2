#include "smp/pipeline/policy.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "smp/error.h"

namespace smp::pipeline {
namespace {

constexpr auto kAll = {Policy::kInterleaved, Policy::kSimple};

TEST(Policy, names_are_known) {
  EXPECT_EQ(policy_named("interleaved"), Policy::kInterleaved);
  EXPECT_EQ(policy_named("simple"), Policy::kSimple);
  try {
    policy_named("Simple");
    FAIL() << "a name with a capital letter was taken";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("'Simple'"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("'interleaved'"), std::string::npos) << error.what();
  }
}

struct Row {
  const char* what;
  std::vector<Candidate> ready;
  std::size_t interleaved;
  std::size_t simple;
};

TEST(Policy, chooses_as_the_table_says) {
  using enum Urgency;
  const std::vector<Row> table{
      {"one is enough", {{kForward, 3, 9}}, 0, 0},
      {"a transfer goes first", {{kBackward, 0, 0}, {kTransfer, 9, 9}, {kForward, 0, 1}}, 1, 1},
      {"backward before forward, or after it", {{kForward, 0, 0}, {kBackward, 5, 1}}, 1, 0},
      {"backward before operator, or after it", {{kOperator, 0, 0}, {kBackward, 5, 1}}, 1, 0},
      {"operator before forward", {{kForward, 0, 0}, {kOperator, 5, 1}}, 1, 1},
      {"the lower microbatch of two forwards", {{kForward, 2, 0}, {kForward, 1, 1}}, 1, 1},
      {"the lower microbatch of two backwards", {{kBackward, 2, 0}, {kBackward, 1, 1}}, 1, 1},
      {"the first that came of two equal ones", {{kForward, 1, 5}, {kForward, 1, 4}, {kForward, 1, 6}}, 1, 1},
      {"all kinds at once", {{kForward, 0, 0}, {kOperator, 0, 1}, {kBackward, 0, 2}, {kTransfer, 0, 3}}, 3, 3},
      {"a brief forward before a long backward", {{kBackward, 0, 0, 40}, {kForward, 3, 1, 4}}, 1, 1},
      {"an eighth is not brief", {{kBackward, 0, 0, 40}, {kForward, 3, 1, 5}}, 0, 1},
      {"what has not run yet is not brief", {{kBackward, 0, 0, 40}, {kForward, 3, 1, kUnknownCost}}, 0, 1},
      {"the usual order among brief ones", {{kForward, 0, 0, 1}, {kBackward, 5, 1, 2}, {kBackward, 0, 2, 40}}, 1, 0},
      {"a forward that continues before a backward", {{kBackward, 0, 0, 9}, {kForward, 3, 1, 8, true}}, 1, 1},
      {"a brief one before one that continues", {{kBackward, 0, 0, 90, true}, {kForward, 3, 1, 1}}, 1, 1},
      {"all but transfers", {{kForward, 0, 0}, {kBackward, 0, 2}, {kOperator, 0, 1}}, 1, 2},
  };
  for (const auto& row : table) {
    EXPECT_EQ(choose(Policy::kInterleaved, row.ready), row.interleaved) << row.what;
    EXPECT_EQ(choose(Policy::kSimple, row.ready), row.simple) << row.what;
  }
}

TEST(Policy, what_takes_under_an_eighth_of_the_longest_goes_first) {
  using enum Urgency;
  const std::vector<Row> table{
      {"a brief forward before a backward", {{kBackward, 0, 0, 80.0}, {kForward, 3, 1, 9.0}}, 1, 1},
      {"an eighth is not brief", {{kBackward, 0, 0, 80.0}, {kForward, 3, 1, 10.0}}, 0, 1},
      {"brief ones among themselves", {{kForward, 0, 0, 1.0}, {kBackward, 1, 1, 1.0}, {kBackward, 0, 2, 80.0}}, 1, 0},
      {"unknown costs are not brief", {{kBackward, 0, 0, 80.0}, {kForward, 0, 1, kUnknownCost}}, 0, 1},
      {"nothing is brief beside unknown costs", {{kBackward, 0, 0, kUnknownCost}, {kForward, 0, 1, 0.001}}, 0, 1},
  };
  for (const auto& row : table) {
    EXPECT_EQ(choose(Policy::kInterleaved, row.ready), row.interleaved) << row.what;
    EXPECT_EQ(choose(Policy::kSimple, row.ready), row.simple) << row.what;
  }
}

TEST(Policy, what_continues_a_lane_goes_before_all_but_brief_ones) {
  using enum Urgency;
  constexpr bool kContinues = true;
  const std::vector<Row> table{
      {"before what is more urgent",
       {{kBackward, 0, 0, kUnknownCost}, {kForward, 3, 1, kUnknownCost, kContinues}},
       1,
       1},
      {"before a lower microbatch", {{kForward, 0, 0, 9.0}, {kForward, 3, 1, 9.0, kContinues}}, 1, 1},
      {"after what is brief", {{kForward, 9, 0, 1.0}, {kBackward, 0, 1, 80.0, kContinues}}, 0, 0},
      {"first of the brief ones",
       {{kForward, 0, 0, 1.0}, {kForward, 1, 1, 1.0, kContinues}, {kForward, 0, 2, 80.0}},
       1,
       1},
  };
  for (const auto& row : table) {
    EXPECT_EQ(choose(Policy::kInterleaved, row.ready), row.interleaved) << row.what;
    EXPECT_EQ(choose(Policy::kSimple, row.ready), row.simple) << row.what;
  }
}

TEST(Policy, a_forward_that_feeds_the_ranks_behind_goes_before_backwards) {
  using enum Urgency;
  constexpr bool kFeeds = true;
  const std::vector<Row> table{
      {"before a backward", {{kBackward, 0, 0}, {kForward, 3, 1, 0, false, kFeeds}}, 1, 1},
      {"after a transfer", {{kTransfer, 0, 0}, {kForward, 3, 1, 0, false, kFeeds}}, 0, 0},
      {"before an operator, or after it", {{kOperator, 5, 0}, {kForward, 3, 1, 0, false, kFeeds}}, 1, 0},
      {"after what continues", {{kForward, 3, 1, 0, false, kFeeds}, {kBackward, 0, 0, 0, true}}, 1, 1},
      {"before a lower one that does not", {{kForward, 0, 0}, {kForward, 3, 1, 0, false, kFeeds}}, 1, 0},
  };
  for (const auto& row : table) {
    EXPECT_EQ(choose(Policy::kInterleaved, row.ready), row.interleaved) << row.what;
    EXPECT_EQ(choose(Policy::kSimple, row.ready), row.simple) << row.what;
  }
}

TEST(Policy, a_rank_holds_as_many_microbatches_as_ranks_from_it_to_the_last) {
  EXPECT_EQ(pipeline_depth(0, 4), 4);
  EXPECT_EQ(pipeline_depth(3, 4), 1);
}

TEST(Policy, the_choice_does_not_depend_on_the_order_of_candidates) {
  using enum Urgency;
  std::vector<Candidate> ready{
      {kForward, 0, 0}, {kBackward, 1, 1}, {kOperator, 0, 2}, {kBackward, 0, 3}, {kForward, 1, 4}};
  for (const auto policy : kAll) {
    const auto expected = ready[choose(policy, ready)].arrival;
    for (std::size_t turn = 0; turn < ready.size(); ++turn) {
      std::vector<Candidate> turned(ready.begin() + static_cast<std::ptrdiff_t>(turn), ready.end());
      turned.insert(turned.end(), ready.begin(), ready.begin() + static_cast<std::ptrdiff_t>(turn));
      EXPECT_EQ(turned[choose(policy, turned)].arrival, expected);
    }
  }
}

TEST(Policy, admission_is_1f1b_and_one_more) {
  //                                  lowest unfinished, partition, partitions
  EXPECT_EQ(admission_limit(Policy::kInterleaved, 0, 0, 4), 5);
  EXPECT_EQ(admission_limit(Policy::kInterleaved, 0, 3, 4), 2);
  EXPECT_EQ(admission_limit(Policy::kInterleaved, 7, 3, 4), 9);
  EXPECT_EQ(admission_limit(Policy::kInterleaved, 0, 0, 1), 2);
}

TEST(Policy, the_lowest_unfinished_microbatch_is_always_admitted) {
  for (int partitions = 1; partitions < 6; ++partitions) {
    for (int partition = 0; partition < partitions; ++partition) {
      EXPECT_GT(admission_limit(Policy::kInterleaved, 10, partition, partitions), 10);
    }
  }
}

TEST(Policy, simple_admits_everything) {
  EXPECT_EQ(admission_limit(Policy::kSimple, 0, 3, 4), std::numeric_limits<std::int32_t>::max());
}

}  // namespace
}  // namespace smp::pipeline
