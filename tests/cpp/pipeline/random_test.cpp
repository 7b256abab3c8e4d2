#include "smp/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <thread>
#include <vector>

namespace smp::pipeline {
namespace {

const at::Generator& default_generator() { return at::detail::getDefaultCPUGenerator(); }

at::Tensor from_default(std::uint64_t key, const std::function<at::Tensor()>& draw) {
  seed_defaults(key);
  return draw();
}

// One of each kind: composite, in place, functional, of data.
const std::vector<std::function<at::Tensor()>> kDraws{
    [] { return at::rand({100}); },
    [] { return at::randn({99}); },
    [] { return at::randperm(100); },
    [] { return at::dropout(at::ones({100}), 0.5, true); },
    [] { return at::empty({100}).uniform_(); },
    [] { return at::multinomial(at::ones({100}), 50, false); },
};

TEST(Random, keys_differ) {
  std::set<std::uint64_t> keys;
  for (std::uint64_t key = 0; key < 100; ++key) {
    for (std::uint64_t number = 0; number < 100; ++number) {
      keys.insert(mix(key, number));
    }
  }
  EXPECT_EQ(keys.size(), 10'000U);
}

TEST(Random, a_state_comes_back_whole) {
  seed_defaults(5);
  at::randn({3});  // an odd number: the generator holds back the half of a pair
  const auto state = RandomState::of_defaults();
  const auto expected = at::randn({50});
  at::rand({7});
  state.restore();
  EXPECT_TRUE(at::equal(at::randn({50}), expected));
}

TEST(Random, operators_of_a_scope_draw_from_its_stream) {
  for (const auto& draw : kDraws) {
    const auto expected = from_default(11, draw);
    seed_defaults(12);
    const auto before = at::rand({4});
    seed_defaults(12);
    {
      const StreamScope scope(make_stream(11), /*apart=*/false);
      EXPECT_TRUE(at::equal(draw(), expected));
      EXPECT_FALSE(at::equal(draw(), expected)) << "the stream goes on";
    }
    EXPECT_TRUE(at::equal(at::rand({4}), before)) << "the default generator was not used";
  }
}

TEST(Random, operators_that_draw_apart_take_one_key_each) {
  for (const auto& own : {make_stream(21), at::Generator()}) {
    for (const auto& draw : kDraws) {
      const auto stream = make_stream(21);
      auto* reference = at::check_generator<at::CPUGeneratorImpl>(stream);
      if (own.defined()) {
        at::Generator(own).set_current_seed(21);
      }
      seed_defaults(21);
      at::Tensor first;
      at::Tensor second;
      std::uint64_t key = 0;
      {
        const StreamScope scope(own, /*apart=*/true);
        first = draw();
        second = draw();
        key = draw_key();
      }
      EXPECT_TRUE(at::equal(first, from_default(reference->random64(), draw)));
      EXPECT_TRUE(at::equal(second, from_default(reference->random64(), draw)));
      EXPECT_EQ(key, reference->random64());
    }
  }
}

TEST(Random, a_generator_of_the_caller_is_used) {
  const StreamScope scope(make_stream(1), /*apart=*/true);
  const auto first = at::rand({10}, make_stream(31));
  EXPECT_TRUE(at::equal(first, at::rand({10}, make_stream(31))));
}

TEST(Random, metadata_draws_nothing) {
  const StreamScope scope(make_stream(1), /*apart=*/true);
  at::empty({5}, at::TensorOptions().device(at::kMeta)).uniform_();
  EXPECT_EQ(draw_key(), at::check_generator<at::CPUGeneratorImpl>(make_stream(1))->random64());
}

TEST(Random, a_module_leaves_its_caller_one_step_further_on) {
  for (const auto& own : {make_stream(41), at::Generator()}) {
    const auto run = [&](const std::function<void()>& module) {
      if (own.defined()) {
        at::Generator(own).set_current_seed(41);
      }
      seed_defaults(41);
      const StreamScope scope(own, /*apart=*/true);
      enter_module();
      module();
      leave_module();
      return at::rand({10});
    };
    const auto expected = run([] {});
    at::Tensor inside;
    at::Tensor deep;
    EXPECT_TRUE(at::equal(expected, run([&] {
                            inside = at::rand({10});
                            enter_module();
                            deep = at::rand({10});
                            leave_module();
                          })));
    EXPECT_FALSE(at::equal(inside, expected));
    EXPECT_FALSE(at::equal(inside, deep));
    at::Tensor again;
    run([&] { again = at::rand({10}); });
    EXPECT_TRUE(at::equal(again, inside));
  }
}

TEST(Random, modules_share_the_stream_where_operators_do) {
  seed_defaults(51);
  const auto expected = at::rand({10});
  seed_defaults(51);
  enter_module();
  EXPECT_TRUE(at::equal(at::rand({10}), expected));
  leave_module();
}

TEST(Random, a_scope_is_of_its_thread) {
  const StreamScope scope(make_stream(61), /*apart=*/true);
  seed_defaults(62);
  const auto state = RandomState::of_defaults();
  at::Tensor other;
  std::thread([&] { other = at::rand({10}); }).join();
  state.restore();
  EXPECT_TRUE(at::equal(other, at::rand({10}, default_generator())));
}

}  // namespace
}  // namespace smp::pipeline
