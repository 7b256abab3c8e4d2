#include "smp/pipeline/lanes.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace smp::pipeline {
namespace {

constexpr std::uint32_t kStep = 1;

class LanesTest : public ::testing::Test {
 protected:
  Lanes lanes_{Policy::kInterleaved, 0, 2};
  ValueTable values_;
  ValueTable::Trash trash_;

  void push(FrameId frame, Body body, std::int32_t microbatch = 0, std::vector<FrameId> ancestors = {}) {
    const bool outermost = ancestors.empty();
    lanes_.push({frame, 0, microbatch, kStep, outermost, std::move(ancestors), 0, std::move(body)});
  }
  /// A CALL, told apart by its number.
  static Call call(std::int32_t number, std::int64_t ticket = -1, std::int32_t module = 0, std::uint64_t context = 0) {
    Call body;
    body.module = module;
    body.call = static_cast<ValueId>(number);
    body.ticket = ticket;
    body.context = context;
    return body;
  }
  static Backward backward(ValueId of_call) {
    Backward body;
    body.call = of_call;
    return body;
  }
  std::optional<Instruction> take() { return lanes_.take(values_); }
  /// Takes and finishes one instruction; "nothing" when none can run.
  std::string run() {
    const auto taken = take();
    if (!taken) {
      return "nothing";
    }
    lanes_.finish(*taken, 1.0);
    const auto* of_call = std::get_if<Call>(&taken->body);
    return of_call != nullptr ? "CALL " + std::to_string(of_call->call) : taken->name();
  }
};

TEST_F(LanesTest, a_lane_keeps_its_order) {
  push(1, call(1));
  push(1, backward(50));
  push(1, call(2));
  values_.store(50, at::ones({}), trash_);
  EXPECT_EQ(run(), "CALL 1");
  EXPECT_EQ(run(), "BACKWARD");
  EXPECT_EQ(run(), "CALL 2");
  EXPECT_EQ(run(), "nothing");
}

TEST_F(LanesTest, a_lane_runs_one_instruction_at_a_time) {
  push(1, call(1));
  push(1, call(2));
  const auto first = take();
  ASSERT_TRUE(first);
  EXPECT_FALSE(take());
  EXPECT_EQ(lanes_.size(), 2U);
  lanes_.finish(*first, 1.0);
  EXPECT_EQ(run(), "CALL 2");
  EXPECT_EQ(lanes_.size(), 0U);
}

TEST_F(LanesTest, a_waiting_head_blocks_only_its_own_lane) {
  push(1, Send{50, 1, 51});
  push(1, call(1));
  push(2, call(2));
  EXPECT_EQ(run(), "CALL 2");
  EXPECT_EQ(run(), "nothing");
  values_.store(50, at::ones({}), trash_);
  EXPECT_EQ(run(), "SEND");
  EXPECT_EQ(run(), "CALL 1");
}

TEST_F(LanesTest, the_most_urgent_head_goes_first) {
  values_.store(50, at::ones({}), trash_);
  push(1, call(1), 0);
  push(2, backward(50), 1);
  push(3, Op{}, 0);
  push(4, Send{50, 1, 51}, 1);
  EXPECT_EQ(run(), "SEND");
  EXPECT_EQ(run(), "CALL 1");  // it feeds the other rank
  EXPECT_EQ(run(), "BACKWARD");
  EXPECT_EQ(run(), "OP");
}

TEST_F(LanesTest, backward_goes_first_once_the_ranks_behind_are_fed) {
  values_.store(50, at::ones({}), trash_);
  for (int microbatch = 0; microbatch < 3; ++microbatch) {
    push(FrameId{1} + static_cast<FrameId>(microbatch), call(microbatch), microbatch);
  }
  push(9, backward(50), 0);
  EXPECT_EQ(run(), "CALL 0");
  EXPECT_EQ(run(), "CALL 1");
  EXPECT_EQ(run(), "BACKWARD");
  EXPECT_EQ(run(), "CALL 2");
}

TEST_F(LanesTest, a_microbatch_that_ended_makes_room_for_one_that_feeds) {
  values_.store(50, at::ones({}), trash_);
  push(1, call(0), 0);
  push(2, call(1), 1);
  EXPECT_EQ(run(), "CALL 0");
  EXPECT_EQ(run(), "CALL 1");
  push(1, End{}, 0);
  EXPECT_EQ(run(), "END");
  push(2, backward(50), 1);
  push(3, call(2), 2);
  EXPECT_EQ(run(), "BACKWARD");  // it goes on with what it ran last
  push(2, backward(50), 1);
  push(3, Send{50, 1, 51}, 2);
  EXPECT_EQ(run(), "BACKWARD");
  EXPECT_EQ(run(), "CALL 2");
}

TEST_F(LanesTest, brief_calls_are_not_counted_as_held_and_do_not_end_a_run) {
  values_.store(50, at::ones({}), trash_);
  for (const auto module : {1, 2}) {  // what each module takes is learnt
    push(1, call(module, -1, module));
    const auto taken = take();
    lanes_.finish(*taken, module == 1 ? 100.0 : 1.0);
  }
  push(1, End{}, 0);
  EXPECT_EQ(run(), "END");
  lanes_.start_step();
  push(2, call(20, -1, 1), 0);
  push(2, call(21, -1, 1), 0);
  push(3, call(30, -1, 2), 1);
  push(3, call(31, -1, 1), 1);
  push(4, call(40, -1, 2), 2);
  push(4, call(41, -1, 1), 2);
  push(9, backward(50), 0);
  EXPECT_EQ(run(), "CALL 30");
  EXPECT_EQ(run(), "CALL 40");
  const auto run_long = [&] {
    const auto taken = take();
    lanes_.finish(*taken, 100.0);
    const auto* of_call = std::get_if<Call>(&taken->body);
    return of_call != nullptr ? static_cast<int>(of_call->call) : -1;
  };
  EXPECT_EQ(run_long(), 20);  // feeds
  EXPECT_EQ(run_long(), 21);  // continues
  EXPECT_EQ(run_long(), 31);  // feeds: microbatch 1 is not held yet
  EXPECT_EQ(run_long(), -1);  // two are held
  EXPECT_EQ(run_long(), 41);
}

TEST_F(LanesTest, simple_runs_forwards_before_backwards) {
  lanes_ = Lanes(Policy::kSimple, 0, 2);
  values_.store(50, at::ones({}), trash_);
  push(1, backward(50), 0);
  push(2, call(1), 100);
  EXPECT_EQ(run(), "CALL 1");
  EXPECT_EQ(run(), "BACKWARD");
}

TEST_F(LanesTest, what_is_brief_beside_the_others_goes_first) {
  values_.store(50, at::ones({}), trash_);
  push(1, backward(50));
  push(1, call(1, -1, /*module=*/1));
  for (const double took_ms : {100.0, 1.0}) {  // what each kind takes is learnt
    const auto taken = take();
    ASSERT_TRUE(taken);
    lanes_.finish(*taken, took_ms);
  }
  push(1, backward(50), 0);
  push(2, call(2, -1, /*module=*/1), 1);
  EXPECT_EQ(run(), "CALL 2");
  EXPECT_EQ(run(), "BACKWARD");
}

TEST_F(LanesTest, the_lane_that_ran_last_goes_on) {
  push(1, call(1), 0);
  push(2, call(2), 1);
  push(2, call(3), 1);
  EXPECT_EQ(run(), "CALL 1");
  push(1, Send{50, 1, 51}, 0);  // waits
  EXPECT_EQ(run(), "CALL 2");
  values_.store(50, at::ones({}), trash_);
  push(3, call(4), 0);
  EXPECT_EQ(run(), "CALL 3");
  EXPECT_EQ(run(), "SEND");
  EXPECT_EQ(run(), "CALL 4");
}

TEST_F(LanesTest, calls_beyond_the_admission_limit_wait_until_a_microbatch_is_finished) {
  const auto limit = admission_limit(Policy::kInterleaved, 0, 0, 2);
  for (std::int32_t microbatch = 0; microbatch <= limit; ++microbatch) {
    push(FrameId{1} + static_cast<FrameId>(microbatch), call(microbatch), microbatch);
  }
  for (std::int32_t microbatch = 0; microbatch < limit; ++microbatch) {
    EXPECT_EQ(run(), "CALL " + std::to_string(microbatch));
  }
  EXPECT_EQ(run(), "nothing");
  push(2, End{}, 1);  // the lowest one is still open
  EXPECT_EQ(run(), "END");
  EXPECT_EQ(run(), "nothing");
  push(1, End{}, 0);
  EXPECT_EQ(run(), "END");
  EXPECT_EQ(run(), "CALL " + std::to_string(limit));
}

TEST_F(LanesTest, only_calls_are_held_back_by_the_admission_limit) {
  values_.store(50, at::ones({}), trash_);
  push(1, backward(50), 100);
  push(2, Op{}, 100);
  EXPECT_EQ(run(), "BACKWARD");
  EXPECT_EQ(run(), "OP");
}

TEST_F(LanesTest, tickets_order_the_calls_of_a_module) {
  push(1, call(1, 2), 0);
  push(2, call(2, 0), 2);
  push(3, call(3, 1), 1);
  push(4, call(4, 0, /*module=*/1), 2);  // another module's tickets are its own
  EXPECT_EQ(run(), "CALL 2");
  EXPECT_EQ(run(), "CALL 3");
  EXPECT_EQ(run(), "CALL 1");
  EXPECT_EQ(run(), "CALL 4");
}

TEST_F(LanesTest, tickets_of_different_contexts_are_apart_and_start_again_with_a_step) {
  push(1, call(1, 0));
  push(2, call(2, 0, 0, /*context=*/7));
  EXPECT_EQ(run(), "CALL 1");
  EXPECT_EQ(run(), "CALL 2");
  push(1, call(3, 0));
  EXPECT_EQ(run(), "nothing");
  lanes_.start_step();
  EXPECT_EQ(run(), "CALL 3");
}

TEST_F(LanesTest, the_end_waits_for_the_frames_that_the_lane_opened) {
  push(1, call(1));
  push(1, End{});
  const auto container = take();
  ASSERT_TRUE(container);
  lanes_.open_nested(1);
  lanes_.open_nested(1);
  lanes_.finish(*container, 1.0);
  EXPECT_EQ(run(), "nothing");
  lanes_.close_nested(1);
  EXPECT_EQ(run(), "nothing");
  lanes_.close_nested(1);
  EXPECT_EQ(run(), "END");
}

TEST_F(LanesTest, only_ends_of_outermost_frames_finish_a_microbatch) {
  const auto limit = admission_limit(Policy::kInterleaved, 0, 0, 2);
  push(2, End{}, 0, {1});
  EXPECT_EQ(run(), "END");
  push(3, call(1), limit);
  EXPECT_EQ(run(), "nothing");
}

TEST_F(LanesTest, close_comes_after_the_end_and_leaves_no_lane_behind) {
  push(1, End{});
  EXPECT_EQ(run(), "END");
  push(1, Close{});
  EXPECT_EQ(run(), "CLOSE");
  EXPECT_EQ(lanes_.size(), 0U);
  EXPECT_TRUE(lanes_.waiting(values_).empty());
}

TEST_F(LanesTest, in_place_on_a_lent_value_waits_for_the_frame_that_has_it) {
  values_.store(50, at::ones({}), trash_);
  values_.lend(50, 9);
  push(1, Op{"aten::add_", "Tensor", "", {50}, {50}, {}, 0});
  push(2, Op{"aten::add", "Tensor", "", {50}, {}, {51}, 0});  // reading is no harm
  auto changing = call(1);
  changing.inputs = changing.mutated = {50};
  push(3, changing);
  EXPECT_EQ(run(), "OP");
  EXPECT_EQ(run(), "nothing");
  values_.give_back(50, 9);
  EXPECT_EQ(run(), "CALL 1");
  EXPECT_EQ(run(), "OP");
}

TEST_F(LanesTest, in_place_does_not_wait_for_the_frame_itself_and_those_above) {
  values_.store(50, at::ones({}), trash_);
  values_.lend(50, 2);
  values_.lend(50, 3);
  push(3, Op{"aten::add_", "Tensor", "", {50}, {50}, {}, 0}, 0, {1, 2});
  EXPECT_EQ(run(), "OP");
}

TEST_F(LanesTest, clear_hands_out_what_waits_and_forgets_what_runs) {
  push(1, call(1));
  push(1, call(2));
  push(2, call(3));
  const auto running = take();
  ASSERT_TRUE(running);
  EXPECT_EQ(lanes_.clear().size(), 2U);
  EXPECT_EQ(lanes_.size(), 0U);
  lanes_.finish(*running, 1.0);
  lanes_.close_nested(1);
  EXPECT_EQ(lanes_.size(), 0U);
}

TEST_F(LanesTest, what_waits_says_what_the_first_of_each_lane_misses) {
  values_.store(60, at::ones({}), trash_);
  auto needs_two = call(1);
  needs_two.inputs = {50, 60};
  push(1, needs_two, 3);
  push(1, Send{70, 1, 71}, 3);
  const auto waiting = lanes_.waiting(values_);
  ASSERT_EQ(waiting.size(), 2U);
  EXPECT_STREQ(waiting[0].instruction->name(), "CALL");
  EXPECT_TRUE(waiting[0].first);
  EXPECT_EQ(waiting[0].missing, (std::vector<ValueId>{50}));
  EXPECT_FALSE(waiting[1].first);
  EXPECT_TRUE(waiting[1].missing.empty());
}

}  // namespace
}  // namespace smp::pipeline
