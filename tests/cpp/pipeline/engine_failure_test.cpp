// Failures: every rank leaves the step with the same reason, and the next step is a good one.
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "engine_fixture.h"

namespace smp::pipeline {
namespace {

class EngineFailure : public ::testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(11);
    spec_.block("a", 0).block("b", 1).block("c", 0);
    data_ = batches(kMicrobatches);
  }

  static constexpr int kMicrobatches = 5;

  /// a, then `middle`, then c.
  StepBody through(const std::string& middle) const {
    return [middle, data = data_](Model& model, int microbatch) {
      const auto loss = loss_of(model("c", model(middle, model("a", data[static_cast<std::size_t>(microbatch)]))));
      loss.backward();
      return Tensors{loss};
    };
  }

  /// After a failure: a step like any other. What the failed step had already added to gradients is dropped first.
  void expect_good_step(Cluster& cluster) {
    Model plain(spec_);
    for (int rank = 0; rank < cluster.size(); ++rank) {
      for (const auto& p : cluster.model(rank).parameters) {
        p.value.mutable_grad() = at::Tensor();
      }
    }
    const auto expected = run_plainly(plain, through("b"), kMicrobatches);
    const auto actual = cluster.step(through("b"), kMicrobatches);
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expect_same_bits(actual[i][0], expected[i][0], "loss of microbatch " + std::to_string(i));
    }
    cluster.expect_gradients_of(plain);
    cluster.expect_empty_tables();
  }

  static void expect_all_say(const std::vector<std::string>& errors, const std::vector<std::string>& parts) {
    for (std::size_t rank = 0; rank < errors.size(); ++rank) {
      for (const auto& part : parts) {
        EXPECT_NE(errors[rank].find(part), std::string::npos)
            << "rank " << rank << " says '" << errors[rank] << "', not '" << part << "'";
      }
    }
  }

  ModelSpec spec_;
  Tensors data_;
};

TEST_F(EngineFailure, an_exception_in_a_call_reaches_every_rank) {
  for (const int home : {0, 1}) {
    SCOPED_TRACE(home);
    auto spec = spec_;
    auto calls = std::make_shared<std::atomic<int>>(0);
    spec.module({"bad", home, [calls](Model&, const Tensors& in) -> Tensors {
                   if (++*calls > 2) {
                     throw std::runtime_error("the third call is one too many");
                   }
                   return {in[0] * 1};
                 }});
    Cluster cluster(spec, 2);
    const auto body = through("bad");
    const auto errors = cluster.try_step(body, kMicrobatches);
    expect_all_say(errors, {"rank " + std::to_string(home), "microbatch 2", "CALL of module 'bad'", "one too many"});
    expect_good_step(cluster);
  }
}

TEST_F(EngineFailure, a_stall_is_found_though_another_rank_asks_before_partition_0) {
  auto spec = spec_;
  auto done = std::make_shared<std::atomic<bool>>(false);
  spec.module({"hangs", 1, [done](Model&, const Tensors& in) -> Tensors {
                 for (int i = 0; i < 200 && !*done; ++i) {
                   std::this_thread::sleep_for(std::chrono::milliseconds(10));
                 }
                 return {in[0] * 1};
               }});
  Cluster cluster(spec, 2, Policy::kInterleaved, {}, /*stall_timeouts_s=*/{0.2, 0.15});
  const auto errors = cluster.try_step(through("hangs"), 1);
  *done = true;
  expect_all_say(errors, {"made no progress on any rank", "CALL of module 'hangs'"});
}

TEST_F(EngineFailure, an_instruction_that_outlives_a_stalled_step_leaves_nothing_in_the_next) {
  auto spec = spec_;
  auto done = std::make_shared<std::atomic<bool>>(false);
  spec.module({"hangs", 1, [done](Model&, const Tensors& in) -> Tensors {
                 while (!*done) {
                   std::this_thread::sleep_for(std::chrono::milliseconds(1));
                 }
                 return {in[0] * 1};
               }});
  // Longer than a rank waits for what does not end: the next step must not stall meanwhile.
  Cluster cluster(spec, 2, Policy::kInterleaved, {}, /*stall_timeouts_s=*/{2.5, 2.5});
  expect_all_say(cluster.try_step(through("hangs"), 1), {"made no progress on any rank"});
  std::thread ending([&] {
    while (cluster.engine(1).step() < 2) {
      std::this_thread::yield();
    }
    *done = true;
  });
  expect_good_step(cluster);
  ending.join();
}

TEST_F(EngineFailure, an_exception_in_a_backward_reaches_every_rank) {
  for (const int home : {0, 1}) {
    SCOPED_TRACE(home);
    auto spec = spec_;
    spec.module({"bad", home, [](Model&, const Tensors& in) -> Tensors {
                   const auto out = in[0] * 2;
                   out.register_hook([](const at::Tensor&) { throw std::runtime_error("no gradient for you"); });
                   return {out};
                 }});
    Cluster cluster(spec, 2);
    const auto errors = cluster.try_step(through("bad"), kMicrobatches);
    expect_all_say(errors,
                   {"rank " + std::to_string(home), "microbatch 0", "BACKWARD of module 'bad'", "no gradient for you"});
    expect_good_step(cluster);
  }
}

TEST_F(EngineFailure, an_exception_below_nested_containers_reaches_every_rank) {
  auto spec = spec_;
  spec.module({"bad", 1, [](Model&, const Tensors&) -> Tensors { throw std::runtime_error("deep down"); }});
  spec.module({"inner",
               0,
               [](Model& model, const Tensors& in) { return Tensors{model("bad", model("b", in[0]))}; },
               {},
               {"bad", "b"}});
  spec.module(
      {"outer", 1, [](Model& model, const Tensors& in) { return Tensors{model("inner", in[0]) + 1}; }, {}, {"inner"}});
  Cluster cluster(spec, 2);
  for (int round = 0; round < 20; ++round) {
    expect_all_say(cluster.try_step(through("outer"), kMicrobatches),
                   {"rank 1", "microbatch 0", "CALL of module 'bad'", "deep down"});
  }
  expect_good_step(cluster);
}

TEST_F(EngineFailure, an_operator_that_fails_is_named) {
  Cluster cluster(spec_, 2);
  const auto errors = cluster.try_step(
      [data = data_](Model& model, int microbatch) {
        const auto y = model("b", data[static_cast<std::size_t>(microbatch)]);
        return Tensors{y.gather(0, at::full({1, 1}, 100, at::kLong))};
      },
      kMicrobatches);
  expect_all_say(errors, {"rank 1", "microbatch 0", "OP aten::gather", "out of bounds"});
  expect_good_step(cluster);
}

// What comes out of it is not known where it is called, so its caller waits: the error is raised there.
TEST_F(EngineFailure, an_operator_whose_caller_waits_fails_where_it_was_called) {
  Cluster cluster(spec_, 2);
  bool caught = false;
  const auto errors = cluster.try_step(
      [&caught, data = data_](Model& model, int microbatch) {
        const auto y = model("b", data[static_cast<std::size_t>(microbatch)]);
        try {
          static_cast<void>(y.matmul(at::ones({1000, 2})));
        } catch (const c10::Error& error) {
          caught = std::string(error.what()).find("1000") != std::string::npos;
        }
        return Tensors{y};
      },
      1);
  EXPECT_EQ(errors, std::vector<std::string>(2));
  EXPECT_TRUE(caught);
}

TEST_F(EngineFailure, a_step_that_was_left_can_not_fail_any_more) {
  Cluster cluster(spec_, 2);
  expect_good_step(cluster);
  expect_good_step(cluster);
  Failure late;
  late.step = 1;
  late.rank = 1;
  late.message = "too late";
  cluster.engine(1).abort(late);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_FALSE(cluster.engine(rank).failure()) << rank;
  }
  expect_good_step(cluster);
}

TEST_F(EngineFailure, an_exception_in_the_step_function_reaches_every_rank) {
  Cluster cluster(spec_, 2);
  const auto errors = cluster.try_step(
      [body = through("b")](Model& model, int microbatch) -> Tensors {
        if (microbatch == 3) {
          throw std::runtime_error("enough");
        }
        return body(model, microbatch);
      },
      kMicrobatches);
  EXPECT_EQ(errors[0], "enough");
  expect_all_say({errors[1]}, {"rank 0", "microbatch 3", "in the step function", "enough"});
  expect_good_step(cluster);
}

TEST_F(EngineFailure, a_second_backward_needs_retain_graph) {
  Cluster cluster(spec_, 2);
  const auto errors = cluster.try_step(
      [data = data_](Model& model, int microbatch) {
        const auto y = model("b", data[static_cast<std::size_t>(microbatch)]);
        y.sum().backward();
        (y * 2).sum().backward();
        return Tensors{y};
      },
      kMicrobatches);
  expect_all_say(errors, {"retain_graph=True"});
  expect_good_step(cluster);
}

TEST_F(EngineFailure, the_first_failure_wins_on_the_rank_that_has_it) {
  Cluster cluster(spec_, 2);
  Failure first;
  first.step = 1;
  first.message = "first";
  auto second = first;
  second.message = "second";
  cluster.on_all_ranks([&](int rank) {
    if (rank == 0) {
      cluster.engine(0).begin_step("step");
      cluster.engine(0).abort(first);
      cluster.engine(0).abort(second);
    } else {
      EXPECT_THROW(cluster.engine(1).follow_step("step"), Model::Aborted);
    }
  });
  EXPECT_EQ(cluster.engine(0).failure()->message, "first");
  EXPECT_EQ(cluster.engine(1).failure()->message, "first");
  expect_good_step(cluster);
}

TEST_F(EngineFailure, a_rank_that_computes_when_the_step_is_aborted_leaves_it_when_that_has_ended) {
  auto spec = spec_;
  std::atomic<bool> computing{false};
  std::atomic<bool> aborted{false};
  std::atomic<bool> ended{false};
  spec.module({"slow", 1, [&](Model&, const Tensors& in) -> Tensors {
                 computing = true;
                 while (!aborted) {
                   std::this_thread::yield();
                 }
                 std::this_thread::sleep_for(std::chrono::milliseconds(50));
                 ended = true;
                 return {in[0] * 2};
               }});
  Cluster cluster(spec, 2);
  std::thread aborting([&] {
    while (!computing) {
      std::this_thread::yield();
    }
    Failure failure;
    failure.step = 1;
    failure.rank = 0;
    failure.message = "stop now";
    cluster.engine(0).abort(failure);
    aborted = true;
  });
  const auto errors = cluster.try_step([&](Model& model, int) { return model.call("slow", {data_[0]}); }, 1);
  aborting.join();
  expect_all_say(errors, {"stop now"});
  EXPECT_TRUE(ended);
  expect_good_step(cluster);
}

TEST_F(EngineFailure, steps_with_different_names_end_on_all_ranks) {
  Cluster cluster(spec_, 2);
  const auto errors = cluster.on_all_ranks([&](int rank) {
    if (rank == 0) {
      cluster.drive("train", through("b"), kMicrobatches);
    } else {
      cluster.follow(rank, "evaluate");
    }
  });
  expect_all_say(errors, {"step 1", "'train'", "'evaluate'"});
  expect_good_step(cluster);
}

TEST_F(EngineFailure, a_peer_that_leaves_ends_the_step_of_the_others) {
  Cluster cluster(spec_, 2);
  cluster.step(through("b"), kMicrobatches);
  const auto errors = cluster.on_all_ranks([&](int rank) {
    if (rank == 0) {
      cluster.drive("step", through("b"), kMicrobatches);
    } else {
      cluster.engine(1).close();
    }
  });
  expect_all_say({errors[0]}, {"rank 1 has left after 1 steps", "rank 0 is in step 2", "the same steps"});
  const auto later = cluster.on_all_ranks([&](int rank) {
    if (rank == 0) {
      cluster.drive("step", through("b"), kMicrobatches);
    }
  });
  expect_all_say({later[0]}, {"rank 1 has left"});
}

TEST_F(EngineFailure, a_peer_that_leaves_after_the_last_step_is_no_failure) {
  Cluster cluster(spec_, 2);
  cluster.step(through("b"), kMicrobatches);
  cluster.engine(1).close();
  EXPECT_FALSE(cluster.engine(0).failure());
  cluster.engine(1).close();
  EXPECT_THROW(cluster.engine(1).follow_step("step"), UsageError);
}

TEST_F(EngineFailure, a_transport_that_fails_ends_the_step) {
  Cluster cluster(spec_, 2);
  const auto errors = cluster.on_all_ranks([&](int rank) {
    if (rank == 0) {
      cluster.transport(0).abandon();
    } else {
      cluster.follow(1, "step");
    }
  });
  expect_all_say({errors[1]}, {"rank 0"});
}

TEST_F(EngineFailure, a_peer_that_hangs_for_a_while_is_waited_for) {
  Cluster cluster(spec_, 2);
  hold_local_delivery(cluster.transport(1), true);
  std::thread release([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    hold_local_delivery(cluster.transport(1), false);
  });
  expect_good_step(cluster);
  release.join();
}

TEST_F(EngineFailure, tensors_of_other_ranks_are_refused_after_their_step) {
  Cluster cluster(spec_, 2);
  at::Tensor kept;
  cluster.step(
      [&](Model& model, int) {
        kept = model("b", data_[0]);
        return Tensors{};
      },
      1);
  EXPECT_THROW(kept + 1, UsageError);
  kept = at::Tensor();
}

TEST_F(EngineFailure, tensors_of_a_failed_step_are_refused_in_the_next) {
  Cluster cluster(spec_, 2);
  at::Tensor kept;
  cluster.try_step(
      [&](Model& model, int) -> Tensors {
        kept = model("b", data_[0]);
        throw std::runtime_error("oh");
      },
      1);
  const auto errors = cluster.try_step([&](Model& model, int) { return model.call("b", {kept}); }, 1);
  expect_all_say(errors, {"step that failed"});
  kept = at::Tensor();
  expect_good_step(cluster);
}

TEST_F(EngineFailure, a_module_that_gives_other_shapes_than_last_time_is_refused) {
  auto spec = spec_;
  auto calls = std::make_shared<std::atomic<int>>(0);
  spec.module({"moody", 1, [calls](Model&, const Tensors& in) {
                 return Tensors{++*calls < 3 ? in[0] * 1 : at::cat({in[0], in[0]})};
               }});
  Cluster cluster(spec, 2);
  expect_all_say(cluster.try_step(through("moody"), kMicrobatches), {"'moody'", "other shapes", "last time"});
  expect_good_step(cluster);
}

TEST_F(EngineFailure, closing_in_the_middle_of_a_step_ends_its_waits) {
  Cluster cluster(spec_, 2);
  const auto errors = cluster.on_all_ranks([&](int rank) {
    if (rank == 1) {
      std::thread closing([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        cluster.engine(1).close();
      });
      try {
        cluster.engine(1).follow_step("step");
      } catch (...) {
        closing.join();
        throw;
      }
      closing.join();
    }
  });
  expect_all_say({errors[1]}, {"closed", "in the middle of step 1"});
}

}  // namespace
}  // namespace smp::pipeline
