#include <gtest/gtest.h>
#include <smp/partition/segments.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace smp::partition {
namespace {

using Costs = std::vector<std::int64_t>;

Costs run_costs(const Costs& costs, const std::vector<int>& ends, std::int64_t first_extra) {
  Costs result;
  int begin = 0;
  for (const int end : ends) {
    result.push_back(std::accumulate(costs.begin() + begin, costs.begin() + end, result.empty() ? first_extra : 0));
    begin = end;
  }
  return result;
}

/// The smallest largest run over all cuts, by trying all of them.
std::int64_t best_by_brute_force(const Costs& costs, int segments, std::int64_t first_extra) {
  std::int64_t best = std::numeric_limits<std::int64_t>::max();
  const auto count = static_cast<int>(costs.size());
  for (unsigned cuts = 0; cuts < 1U << (count - 1); ++cuts) {
    std::vector<int> ends;
    for (int i = 1; i < count; ++i) {
      if ((cuts >> (i - 1) & 1U) != 0) {
        ends.push_back(i);
      }
    }
    ends.push_back(count);
    if (static_cast<int>(ends.size()) == segments) {
      const Costs runs = run_costs(costs, ends, first_extra);
      best = std::min(best, *std::max_element(runs.begin(), runs.end()));
    }
  }
  return best;
}

std::vector<int> cut(const Costs& costs, int segments, std::int64_t first_extra = 0) {
  Steps steps = 0;
  return cut_segments(with_extras(costs, {first_extra, 0}), segments, steps);
}

Segment leaves(const Costs& costs) { return {costs, std::vector<int>(costs.size(), 1)}; }
Segment container(std::int64_t cost, int capacity) { return {{cost}, {capacity}}; }

std::vector<int> hand_out(const std::vector<Segment>& segments, int partitions, std::int64_t first_extra = 0,
                          std::int64_t last_extra = 0) {
  Steps steps = 0;
  return hand_out_partitions(segments, partitions, {first_extra, last_extra}, steps);
}

TEST(CutSegments, largest_run_is_the_smallest_possible) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 600; ++trial) {
    Costs costs(1 + random() % 12);
    for (auto& cost : costs) {
      cost = static_cast<std::int64_t>(random() % (trial % 3 == 0 ? 3 : 100));
    }
    const std::int64_t first_extra = trial % 2 == 0 ? 0 : static_cast<std::int64_t>(random() % 200);
    for (int segments = 1; segments <= static_cast<int>(costs.size()); ++segments) {
      const std::vector<int> ends = cut(costs, segments, first_extra);
      ASSERT_EQ(static_cast<int>(ends.size()), segments);
      ASSERT_EQ(ends.back(), static_cast<int>(costs.size()));
      ASSERT_GT(ends.front(), 0);
      ASSERT_TRUE(std::is_sorted(ends.begin(), ends.end(), std::less_equal<>())) << "an empty run";
      const Costs runs = run_costs(costs, ends, first_extra);
      const std::int64_t best = best_by_brute_force(costs, segments, first_extra);
      ASSERT_EQ(*std::max_element(runs.begin(), runs.end()), best);
      Steps steps = 0;
      ASSERT_EQ(largest_segment(with_extras(costs, {first_extra, 0}), segments, steps), best);
    }
  }
}

TEST(CutSegments, equal_costs_give_runs_that_differ_by_one_at_most) {
  for (int count = 1; count <= 48; ++count) {
    for (int segments = 1; segments <= count; ++segments) {
      const Costs runs = run_costs(Costs(static_cast<std::size_t>(count), 1),
                                   cut(Costs(static_cast<std::size_t>(count), 1), segments), 0);
      const auto [low, high] = std::minmax_element(runs.begin(), runs.end());
      EXPECT_LE(*high - *low, 1) << count << " siblings in " << segments << " runs";
    }
  }
}

TEST(CutSegments, what_the_bound_leaves_free_is_shared_equally) {
  // The first sibling sets the bound; filling up to it would give {100}, {12}, {} or a tail of one.
  EXPECT_EQ(cut({100, 2, 2, 2, 2, 2, 2}, 4), (std::vector<int>{1, 3, 5, 7}));
}

TEST(CutSegments, a_cost_that_lies_on_the_first_run_makes_it_shorter) {
  EXPECT_EQ(cut({1, 1, 1, 1, 1, 1}, 2), (std::vector<int>{3, 6}));
  EXPECT_EQ(cut({1, 1, 1, 1, 1, 1}, 2, 4), (std::vector<int>{1, 6}));
  EXPECT_EQ(cut({1, 1, 1, 1, 1, 1}, 2, 100), (std::vector<int>{1, 6}));
}

TEST(CutSegments, costs_of_nothing_are_cut_into_non_empty_runs) {
  EXPECT_EQ(cut({0, 0, 0}, 3), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(cut({0, 0, 0, 0}, 2).size(), 2U);
}

TEST(CutSegments, work_grows_with_siblings_and_not_with_siblings_times_runs) {
  Steps steps = 0;
  cut_segments(Costs(10'000, 7), 64, steps);
  EXPECT_LT(steps, 100'000);
}

TEST(HandOutPartitions, follow_dhondt_with_the_divisor_of_each_segment) {
  // 60/1, 60/2, 60/3, 25/1, 15/1: a divisor counted over all segments would give {2, 1, 1}.
  EXPECT_EQ(hand_out({container(60, 9), container(25, 9), container(14, 9)}, 4), (std::vector<int>{3, 1, 0}));
  EXPECT_EQ(hand_out({container(60, 9), container(25, 9), container(16, 9)}, 5), (std::vector<int>{3, 1, 1}));
}

TEST(HandOutPartitions, no_segment_gets_more_than_it_can_fill) {
  EXPECT_EQ(hand_out({container(1000, 1), container(1, 2), container(1, 2)}, 5), (std::vector<int>{1, 2, 2}));
}

TEST(HandOutPartitions, ties_go_to_the_segment_with_fewer) {
  // 2/2 and 1/1 are equal: the second segment must not stay without.
  EXPECT_EQ(hand_out({container(2, 2), container(1, 1)}, 2), (std::vector<int>{1, 1}));
  EXPECT_EQ(hand_out({container(3, 9), container(3, 9), container(3, 9)}, 4), (std::vector<int>{2, 1, 1}));
}

TEST(HandOutPartitions, segments_without_cost_are_served_too) {
  EXPECT_EQ(hand_out({container(0, 1), container(0, 1)}, 2), (std::vector<int>{1, 1}));
}

TEST(HandOutPartitions, a_fixed_cost_earns_the_first_segment_one_partition_but_no_more) {
  EXPECT_EQ(hand_out({container(10, 9), container(60, 9)}, 4, 100), (std::vector<int>{1, 3}));
}

TEST(HandOutPartitions, one_each_where_dhondt_would_make_the_largest_partition_larger) {
  // D'Hondt alone: 100, 60, 60/2, none for 29, which would join the 100.
  EXPECT_EQ(hand_out({leaves({100}), leaves({30, 30}), leaves({29})}, 3), (std::vector<int>{1, 1, 1}));
  // Here it pays: 50 + 50 and 60 + 1 instead of 100 and 1.
  EXPECT_EQ(hand_out({leaves({50, 50}), leaves({1})}, 2), (std::vector<int>{2, 0}));
  // What lies on the last partition anyway counts there: 100 and 61, not 50 and 111.
  EXPECT_EQ(hand_out({leaves({50, 50}), leaves({1})}, 2, 0, 60), (std::vector<int>{1, 1}));
}

TEST(ExtrasOf, segments_that_get_nothing_lie_on_the_partition_before_them_or_on_the_first) {
  const std::vector<Segment> segments{leaves({1}), leaves({20, 20}), leaves({3}), leaves({30}), leaves({5})};
  const auto extras = extras_of(segments, {0, 2, 0, 1, 0}, {100, 1000});
  EXPECT_EQ(extras[1].first, 101);
  EXPECT_EQ(extras[1].last, 3);
  EXPECT_EQ(extras[3].first, 0);
  EXPECT_EQ(extras[3].last, 1005);
}

}  // namespace
}  // namespace smp::partition
