#include "smp/checkpointing/region.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "smp/error.h"

namespace smp::checkpointing {
namespace {

/// A region over `tensors`, which it saves in forward, and again in each recompute, changed by `again`.
struct Fixture {
  explicit Fixture(std::vector<at::Tensor> tensors) : saved(std::move(tensors)) {
    report->name = "module 'a'";
    region = std::make_shared<Region>(report, ReplayState(true), device_store()->save({input}),
                                      [this](Region& self, std::int64_t pass, const std::vector<at::Tensor>& inputs) {
                                        given = inputs;
                                        for (const auto& x : again.empty() ? saved : again) {
                                          ++recorded;
                                          if (self.record(pass, x)) {
                                            return;
                                          }
                                        }
                                      });
    for (const auto& x : saved) {
      region->save(x);
    }
    region->end_forward({});
  }

  std::shared_ptr<RegionReport> report = std::make_shared<RegionReport>();
  at::Tensor input = at::ones({2}).set_requires_grad(true);
  std::vector<at::Tensor> saved;
  std::vector<at::Tensor> again;
  std::vector<at::Tensor> given;
  int recorded = 0;
  std::shared_ptr<Region> region;
};

std::vector<at::Tensor> three() { return {at::rand({2}), at::rand({3, 4}), at::rand({5})}; }

TEST(Region, gives_what_the_function_saves_again_by_number) {
  Fixture fixture(three());
  EXPECT_EQ(fixture.region->load(1).data_ptr(), fixture.saved[1].data_ptr());
  EXPECT_EQ(fixture.region->load(0).data_ptr(), fixture.saved[0].data_ptr());
  ASSERT_EQ(fixture.given.size(), 1U);
  EXPECT_TRUE(fixture.given[0].requires_grad());
  EXPECT_FALSE(fixture.given[0].is_same(fixture.input));
  EXPECT_EQ(fixture.given[0].data_ptr(), fixture.input.data_ptr());
}

TEST(Region, stops_when_nothing_more_is_needed) {
  Fixture fixture(three());
  fixture.region->drop(2);
  static_cast<void>(fixture.region->load(0));
  EXPECT_EQ(fixture.recorded, 2);
}

TEST(Region, refuses_other_shapes_and_fewer_tensors) {
  Fixture fixture(three());
  fixture.again = {fixture.saved[0], at::rand({4, 3}), fixture.saved[2]};
  EXPECT_THROW(static_cast<void>(fixture.region->load(0)), UsageError);
  fixture.again = {fixture.saved[0]};
  EXPECT_THROW(static_cast<void>(fixture.region->load(2)), UsageError);
  fixture.again = {};
  EXPECT_EQ(fixture.region->load(2).data_ptr(), fixture.saved[2].data_ptr());
}

TEST(Region, refuses_inputs_that_were_changed) {
  Fixture fixture(three());
  fixture.input.detach().add_(1);
  EXPECT_THROW(static_cast<void>(fixture.region->load(0)), UsageError);
}

TEST(Region, reports_what_is_not_kept) {
  const auto parameter = at::rand({8});
  const auto before = Region::count();
  {
    Fixture fixture({parameter, at::rand({2, 2})});
    EXPECT_EQ(Region::count(), before + 1);
    EXPECT_EQ(fixture.report->saved_bytes, (8 + 4) * 4);
    EXPECT_EQ(fixture.report->input_bytes, 2 * 4);
    static_cast<void>(fixture.region->load(0));
    EXPECT_EQ(fixture.report->recomputes, 1);
  }
  EXPECT_EQ(Region::count(), before);
}

TEST(ReplayState, random_numbers_and_settings_come_back) {
  const ReplayState state(true);
  const auto first = at::rand({4});
  const c10::AutoGradMode no_grad(false);
  const auto second = at::rand({4});
  {
    const ReplayState::Scope scope(state);
    EXPECT_TRUE(at::equal(at::rand({4}), first));
    EXPECT_TRUE(c10::GradMode::is_enabled());
  }
  EXPECT_FALSE(c10::GradMode::is_enabled());
  EXPECT_FALSE(at::equal(at::rand({4}), second));
}

}  // namespace
}  // namespace smp::checkpointing
