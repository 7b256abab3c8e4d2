#include "smp/pipeline/gradient_sums.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace smp::pipeline {
namespace {

constexpr std::int64_t kSize = 33;

at::Tensor new_parameter() { return at::zeros({kSize}).set_requires_grad(true); }

void expect_same_bits(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_TRUE(actual.defined()) << what;
  EXPECT_EQ(std::memcmp(actual.const_data_ptr(), expected.const_data_ptr(), expected.nbytes()), 0) << what;
}

/// What one call in one microbatch contributes to one parameter.
struct Contribution {
  int parameter;
  std::int32_t microbatch;
  at::Tensor gradient;
};

TEST(GradientSums, scrambled_contributions_give_the_bits_of_the_plain_loop) {
  constexpr std::int32_t kMicrobatches = 5;
  at::manual_seed(3);
  std::mt19937 random(5);
  std::vector<Contribution> contributions;
  std::vector<at::Tensor> expected(2);
  for (std::int32_t microbatch = 0; microbatch < kMicrobatches; ++microbatch) {
    for (int parameter = 0; parameter < 2; ++parameter) {
      at::Tensor sum;
      for (int use = 0; use <= parameter; ++use) {  // the second parameter is used twice: two sums commute
        const auto gradient = at::randn({kSize});
        contributions.push_back({parameter, microbatch, gradient});
        sum = sum.defined() ? sum + gradient : gradient;
      }
      auto& total = expected[static_cast<std::size_t>(parameter)];
      total = total.defined() ? total + sum : sum;
    }
  }
  for (int round = 0; round < 30; ++round) {
    std::shuffle(contributions.begin(), contributions.end(), random);
    GradientSums sums({new_parameter(), new_parameter()});
    for (const auto& c : contributions) {
      sums.open_call(0, {c.parameter}, c.microbatch);
    }
    std::vector<std::size_t> left(kMicrobatches, 3);
    for (const auto& c : contributions) {
      sums.add(0, c.parameter, c.microbatch, 1, c.gradient.clone());
      sums.close_call(0, {c.parameter}, c.microbatch);
      if (--left[static_cast<std::size_t>(c.microbatch)] == 0 && round % 2 == 0) {
        sums.close(0, c.microbatch);
      }
    }
    sums.finish_step();
    EXPECT_EQ(sums.contributions(), contributions.size());
    for (int parameter = 0; parameter < 2; ++parameter) {
      expect_same_bits(sums.parameter(parameter).grad(), expected[static_cast<std::size_t>(parameter)],
                       "parameter " + std::to_string(parameter));
    }
  }
}

TEST(GradientSums, contributions_of_one_pass_are_summed_before_they_are_added) {
  // 1e8 + 1 + 1 is 1e8 in float, but 1e8 + (1 + 1) is not.
  GradientSums sums({at::zeros({1}).set_requires_grad(true)});
  sums.open_call(0, {0}, 0);
  sums.add(0, 0, 0, 1, at::full({1}, 1e8F));
  sums.add(0, 0, 0, 2, at::full({1}, 4.0F));
  sums.add(0, 0, 0, 2, at::full({1}, 4.0F));
  sums.close_call(0, {0}, 0);
  EXPECT_EQ(sums.parameter(0).grad().item<float>(), 1e8F + 8.0F);

  GradientSums apart({at::zeros({1}).set_requires_grad(true)});
  apart.add(0, 0, 0, 1, at::full({1}, 1e8F));
  apart.add(0, 0, 0, 2, at::full({1}, 3.0F));
  apart.add(0, 0, 0, 3, at::full({1}, 3.0F));
  apart.finish_step();
  EXPECT_EQ(apart.parameter(0).grad().item<float>(), 1e8F + 3.0F + 3.0F);
}

TEST(GradientSums, the_lowest_open_microbatch_is_added_as_soon_as_no_call_is_left) {
  GradientSums sums({new_parameter()});
  sums.open_call(0, {0}, 0);
  sums.open_call(0, {0}, 0);
  sums.add(0, 0, 0, 1, at::ones({kSize}));
  sums.close_call(0, {0}, 0);
  EXPECT_FALSE(sums.parameter(0).grad().defined());
  EXPECT_EQ(sums.pending_bytes(), kSize * 4);
  sums.close_call(0, {0}, 0);
  EXPECT_TRUE(sums.parameter(0).grad().defined());
  EXPECT_EQ(sums.pending_bytes(), 0);
}

TEST(GradientSums, later_microbatches_wait_for_the_ones_before) {
  GradientSums sums({new_parameter()});
  for (const std::int32_t microbatch : {2, 1}) {
    sums.open_call(0, {0}, microbatch);
    sums.add(0, 0, microbatch, 1, at::ones({kSize}));
    sums.close_call(0, {0}, microbatch);
    sums.close(0, microbatch);
  }
  EXPECT_FALSE(sums.parameter(0).grad().defined());
  EXPECT_EQ(sums.pending_bytes(), 2 * kSize * 4);
  sums.close(0, 0);
  EXPECT_EQ(sums.parameter(0).grad()[0].item<float>(), 2);
  EXPECT_EQ(sums.pending_bytes(), 0);
}

TEST(GradientSums, a_call_without_backward_does_not_hold_up_the_rest) {
  GradientSums sums({new_parameter()});
  sums.open_call(0, {0}, 0);  // its backward never comes
  sums.open_call(0, {0}, 0);
  sums.add(0, 0, 0, 1, at::ones({kSize}));
  sums.close_call(0, {0}, 0);
  EXPECT_FALSE(sums.parameter(0).grad().defined());
  sums.close(0, 0);
  EXPECT_TRUE(sums.parameter(0).grad().defined());
  sums.finish_step();
  EXPECT_EQ(sums.parameter(0).grad()[0].item<float>(), 1);
}

TEST(GradientSums, gradients_add_up_over_steps) {
  GradientSums sums({new_parameter()});
  for (int step = 0; step < 3; ++step) {
    for (std::int32_t microbatch = 0; microbatch < 2; ++microbatch) {
      sums.add(0, 0, microbatch, 1, at::ones({kSize}));
      sums.close(0, microbatch);
    }
    sums.finish_step();
  }
  EXPECT_EQ(sums.parameter(0).grad()[0].item<float>(), 6);
}

TEST(GradientSums, the_start_of_a_step_forgets_what_was_not_added) {
  GradientSums sums({new_parameter()});
  sums.add(0, 0, 0, 1, at::ones({kSize}));
  sums.close(0, 0);
  sums.add(0, 0, 2, 1, at::ones({kSize}));
  sums.start_step(0);
  EXPECT_EQ(sums.pending_bytes(), 0);
  sums.add(0, 0, 0, 1, at::ones({kSize}));
  sums.close(0, 0);
  EXPECT_EQ(sums.parameter(0).grad()[0].item<float>(), 2);
}

TEST(GradientSums, a_parameter_without_contributions_gets_no_gradient) {
  GradientSums sums({new_parameter(), new_parameter()});
  sums.open_call(0, {0, 1}, 0);
  sums.add(0, 0, 0, 1, at::ones({kSize}));
  sums.close_call(0, {0, 1}, 0);
  sums.close(0, 0);
  sums.finish_step();
  EXPECT_TRUE(sums.parameter(0).grad().defined());
  EXPECT_FALSE(sums.parameter(1).grad().defined());
}

TEST(GradientSums, an_expanded_gradient_becomes_one_with_memory_of_its_own) {
  GradientSums sums({new_parameter()});
  sums.add(0, 0, 0, 1, at::ones({1}).expand({kSize}));
  sums.finish_step();
  sums.parameter(0).grad()[0].fill_(5);
  EXPECT_EQ(sums.parameter(0).grad()[1].item<float>(), 1);
}

// Frames issue, and with that open calls, while the executor adds up.
TEST(PipelineTsanGradientSums, calls_may_be_opened_while_others_are_added) {
  constexpr std::int32_t kRounds = 300;
  GradientSums sums({new_parameter()});
  std::thread issuing([&] {
    for (std::int32_t i = 0; i < kRounds; ++i) {
      sums.open_call(0, {0}, i);
    }
  });
  for (std::int32_t i = 0; i < kRounds; ++i) {
    sums.add(0, 0, i, 1, at::ones({kSize}));
    static_cast<void>(sums.contributions());
  }
  issuing.join();
  for (std::int32_t i = 0; i < kRounds; ++i) {
    sums.close_call(0, {0}, i);
    sums.close(0, i);
  }
  EXPECT_EQ(sums.parameter(0).grad()[0].item<float>(), kRounds);
}

TEST(GradientSums, what_is_said_for_another_step_is_ignored) {
  GradientSums sums({new_parameter()});
  sums.start_step(2);
  sums.open_call(1, {0}, 0);
  sums.add(1, 0, 0, 1, at::ones({kSize}));
  sums.close_call(1, {0}, 0);
  sums.close(1, 0);
  EXPECT_EQ(sums.pending_bytes(), 0);
  sums.open_call(2, {0}, 0);
  sums.add(2, 0, 0, 1, at::full({kSize}, 2.0F));
  sums.close_call(1, {0}, 0);  // does not close the one of this step
  EXPECT_FALSE(sums.parameter(0).grad().defined());
  sums.close_call(2, {0}, 0);
  expect_same_bits(sums.parameter(0).grad(), at::full({kSize}, 2.0F), "gradient");
}

}  // namespace
}  // namespace smp::pipeline
