#include "smp/pipeline/value_table.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "smp/pipeline/call_record.h"

namespace smp::pipeline {
namespace {

class ValueTableTest : public ::testing::Test {
 protected:
  ValueTable table_;
  ValueTable::Trash trash_;
};

TEST_F(ValueTableTest, a_value_is_there_from_store_to_release) {
  EXPECT_FALSE(table_.ready(7));
  table_.store(7, at::ones({4}), trash_);
  EXPECT_TRUE(table_.ready(7));
  EXPECT_EQ(table_.value(7).numel(), 4);
  table_.release(7, trash_);
  EXPECT_FALSE(table_.ready(7));
  EXPECT_EQ(table_.size(), 0U);
  ASSERT_EQ(trash_.size(), 1U);
  EXPECT_EQ(trash_[0].data.numel(), 4);
}

TEST_F(ValueTableTest, store_pin_unpin_and_release_may_come_in_any_order) {
  std::vector<std::pair<std::string, std::function<void()>>> events{
      {"store", [&] { table_.store(7, at::ones({4}), trash_); }},
      {"pin", [&] { table_.pin(7); }},
      {"release", [&] { table_.release(7, trash_); }},
      {"unpin", [&] { table_.unpin(7, trash_); }},
  };
  std::sort(events.begin(), events.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  do {
    const auto place = [&](const char* name) {
      return std::find_if(events.begin(), events.end(), [&](const auto& event) { return event.first == name; }) -
             events.begin();
    };
    // An instruction pins before the issuer can release, and runs (and unpins) once the value is there.
    if (place("unpin") < place("pin") || place("unpin") < place("store") || place("release") < place("pin")) {
      continue;
    }
    std::string order;
    for (std::size_t i = 0; i < events.size(); ++i) {
      order += events[i].first + " ";
      events[i].second();
      EXPECT_EQ(table_.size(), i + 1 < events.size() ? 1U : 0U) << order;
    }
    trash_.clear();
  } while (std::next_permutation(events.begin(), events.end(),
                                 [](const auto& a, const auto& b) { return a.first < b.first; }));
}

TEST_F(ValueTableTest, every_pin_counts) {
  table_.store(7, at::ones({4}), trash_);
  table_.pin(7);
  table_.pin(7);
  table_.release(7, trash_);
  table_.unpin(7, trash_);
  EXPECT_TRUE(table_.ready(7));
  table_.unpin(7, trash_);
  EXPECT_FALSE(table_.ready(7));
}

TEST_F(ValueTableTest, what_was_released_before_it_came_goes_when_it_comes) {
  table_.release(7, trash_);
  EXPECT_TRUE(trash_.empty());
  table_.store(7, at::ones({4}), trash_);
  EXPECT_EQ(table_.size(), 0U);
  EXPECT_EQ(trash_.size(), 1U);
}

TEST_F(ValueTableTest, a_pinned_value_that_did_not_come_is_not_ready) {
  table_.pin(7);
  EXPECT_FALSE(table_.ready(7));
  EXPECT_THROW(static_cast<void>(table_.value(7)), FailureError);
  EXPECT_THROW(static_cast<void>(table_.call(7)), FailureError);
}

TEST_F(ValueTableTest, unknown_values_are_no_harm_to_unpin_and_give_back) {
  table_.unpin(7, trash_);
  table_.give_back(7, 1);
  EXPECT_FALSE(table_.lent_beyond(7, {}));
  EXPECT_EQ(table_.size(), 0U);
}

TEST_F(ValueTableTest, loans_end_in_any_order) {
  table_.store(7, at::ones({4}), trash_);
  table_.lend(7, 1);
  table_.lend(7, 2);
  table_.lend(7, 2);
  EXPECT_TRUE(table_.lent_beyond(7, {}));
  EXPECT_TRUE(table_.lent_beyond(7, {1}));
  EXPECT_FALSE(table_.lent_beyond(7, {2, 1}));
  table_.give_back(7, 2);
  EXPECT_TRUE(table_.lent_beyond(7, {1}));
  table_.give_back(7, 2);
  EXPECT_FALSE(table_.lent_beyond(7, {1}));
  table_.give_back(7, 1);
  EXPECT_FALSE(table_.lent_beyond(7, {}));
}

TEST_F(ValueTableTest, a_loan_alone_keeps_nothing_alive) {
  table_.store(7, at::ones({4}), trash_);
  table_.lend(7, 1);
  table_.release(7, trash_);
  EXPECT_EQ(table_.size(), 0U);
}

TEST_F(ValueTableTest, bytes_count_a_shared_storage_once) {
  const auto x = at::ones({4, 4}, at::kFloat);
  table_.store(1, x, trash_);
  table_.store(2, x.slice(0, 0, 1), trash_);
  table_.store(3, at::ones({2}, at::kDouble), trash_);
  table_.store(4, at::Tensor(), trash_);
  table_.pin(5);
  EXPECT_EQ(table_.bytes(), 64 + 16);
}

TEST_F(ValueTableTest, calls_are_counted_apart) {
  table_.store(1, at::ones({4}), trash_);
  table_.store(2, std::make_shared<CallRecord>(), trash_);
  EXPECT_EQ(table_.size(), 2U);
  EXPECT_EQ(table_.calls(), 1U);
  EXPECT_NE(table_.call(2), nullptr);
  EXPECT_EQ(table_.call(1), nullptr);
  table_.release(2, trash_);
  EXPECT_EQ(table_.calls(), 0U);
}

TEST_F(ValueTableTest, clear_hands_out_everything) {
  table_.store(1, at::ones({4}), trash_);
  table_.store(2, std::make_shared<CallRecord>(), trash_);
  table_.pin(1);
  table_.pin(3);
  EXPECT_EQ(table_.clear().size(), 3U);
  EXPECT_EQ(table_.size(), 0U);
  table_.unpin(1, trash_);  // of an instruction that is older than the clearing
  EXPECT_EQ(table_.size(), 0U);
}

}  // namespace
}  // namespace smp::pipeline
