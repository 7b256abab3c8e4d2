// Many steps, threads and failures at once. scripts/soak.sh runs the suites named PipelineTsan* under ThreadSanitizer.
#include <atomic>
#include <random>
#include <stdexcept>

#include "engine_fixture.h"

namespace smp::pipeline {
namespace {

constexpr int kMicrobatches = 5;

/// Containers with homes 1 and 0 in one another, below them blocks on all ranks, and a module with a buffer.
ModelSpec nested_spec() {
  at::manual_seed(23);
  ModelSpec spec;
  spec.block("a", 0).block("b", 1).block("c", 2);
  spec.module({"count",
               0,
               [](Model& model, const Tensors& in) {
                 auto& calls = model.buffers["calls"];
                 calls = calls.defined() ? calls + 1 : at::ones({});
                 return Tensors{in[0] * 1};
               },
               {},
               {},
               /*ordered=*/true});
  spec.module(
      {"inner",
       0,
       [](Model& model, const Tensors& in) { return Tensors{model("c", model("count", model("b", in[0]))) + in[0]}; },
       {},
       {"b", "c", "count"}});
  spec.module({"outer",
               1,
               [](Model& model, const Tensors& in) {
                 const auto x = in[0] * 2;  // read once: three readers of a tensor may be summed in another order
                 return Tensors{model("inner", model("a", x)) + model("c", x)};
               },
               {},
               {"inner", "a", "c"}});
  return spec;
}

StepBody nested_body(Tensors data) {
  return [data = std::move(data)](Model& model, int microbatch) {
    const auto x = model("count", model("a", data[static_cast<std::size_t>(microbatch)]));
    const auto loss = loss_of(model("outer", x) * x);
    loss.backward();
    return Tensors{loss};
  };
}

void forget_gradients(Cluster& cluster) {
  for (int rank = 0; rank < cluster.size(); ++rank) {
    for (const auto& p : cluster.model(rank).parameters) {
      p.value.mutable_grad() = at::Tensor();
    }
  }
}

void expect_good_step(Cluster& cluster, const ModelSpec& spec, const StepBody& body) {
  Model plain(spec);
  forget_gradients(cluster);
  run_plainly(plain, body, kMicrobatches);
  cluster.step(body, kMicrobatches);
  cluster.expect_gradients_of(plain);
  cluster.expect_empty_tables();
}

Failure failure_of(Engine& engine, const std::string& message) {
  Failure failure;
  failure.step = engine.step();
  failure.message = message;
  return failure;
}

TEST(PipelineTsanEngine, nested_frames_give_the_same_bits_every_time) {
  const auto spec = nested_spec();
  const auto body = nested_body(batches(kMicrobatches));
  expect_equals_plain(spec, 3, body, kMicrobatches, /*steps=*/10);
}

TEST(PipelineTsanEngine, looking_at_an_engine_disturbs_nothing) {
  const auto spec = nested_spec();
  const auto body = nested_body(batches(kMicrobatches));
  Cluster cluster(spec, 3);
  std::atomic<bool> done{false};
  std::thread looking([&] {
    while (!done) {
      for (int rank = 0; rank < 3; ++rank) {
        static_cast<void>(cluster.engine(rank).state());
        static_cast<void>(cluster.engine(rank).counts());
        static_cast<void>(cluster.engine(rank).status());
        static_cast<void>(cluster.engine(rank).failure());
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  for (int step = 0; step < 5; ++step) {
    expect_good_step(cluster, spec, body);
  }
  done = true;
  looking.join();
  EXPECT_GT(cluster.engine(0).counts().gradient_contributions, 0);
}

TEST(PipelineTsanEngine, sends_and_releases_may_cross) {
  const auto spec = nested_spec();
  const auto data = batches(kMicrobatches);
  Cluster cluster(spec, 3);
  const auto body = [&](Model& model, int microbatch) {
    auto x = model("a", data[static_cast<std::size_t>(microbatch)]);
    at::Tensor sum;
    for (int i = 0; i < 20; ++i) {
      // What goes to the next rank is dropped here at once.
      x = model(i % 3 == 0 ? "b" : i % 3 == 1 ? "c" : "a", x * 1.5) + data[0];
      std::thread([dying = x.detach().slice(0, 0, 2)]() mutable { dying = at::Tensor(); }).join();
      sum = i % 5 == 0 ? x.sum() : sum + x.mean();
    }
    if (microbatch % 2 == 0) {
      sum.backward();
    }
    return Tensors{sum};
  };
  Model plain(spec);
  for (int step = 0; step < 4; ++step) {
    const auto expected = run_plainly(plain, body, kMicrobatches);
    const auto actual = cluster.step(body, kMicrobatches);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expect_same_bits(actual[i][0], expected[i][0], "sum of microbatch " + std::to_string(i));
    }
    cluster.expect_gradients_of(plain);
    cluster.expect_empty_tables();
  }
}

TEST(PipelineTsanEngine, failures_anywhere_are_followed_by_good_steps) {
  auto spec = nested_spec();
  static std::atomic<int> calls_left{0};
  static std::atomic<bool> in_backward{false};
  for (const int home : {0, 1, 2}) {
    spec.module({"bad" + std::to_string(home), home, [](Model&, const Tensors& in) {
                   const auto out = in[0] * 1;
                   if (--calls_left < 0) {
                     if (!in_backward) {
                       throw std::runtime_error("bad luck");
                     }
                     if (out.requires_grad()) {
                       out.register_hook([](const at::Tensor&) { throw std::runtime_error("bad luck"); });
                     }
                   }
                   return Tensors{out};
                 }});
    spec.module({"box" + std::to_string(home),
                 (home + 1) % 3,
                 [home](Model& model, const Tensors& in) {
                   return Tensors{model("bad" + std::to_string(home), model("outer", in[0])) + in[0]};
                 },
                 {},
                 {"bad" + std::to_string(home), "outer"}});
  }
  const auto data = batches(kMicrobatches);
  const auto good = nested_body(data);
  Cluster cluster(spec, 3);
  std::mt19937 random(1);
  for (int round = 0; round < 24; ++round) {
    calls_left = static_cast<int>(random() % kMicrobatches);
    in_backward = round % 2 == 1;
    const auto box = "box" + std::to_string(round % 3);
    const auto errors = cluster.try_step(
        [&](Model& model, int microbatch) {
          const auto loss = loss_of(model(box, model("a", data[static_cast<std::size_t>(microbatch)])));
          loss.backward();
          return Tensors{loss};
        },
        kMicrobatches);
    for (const auto& error : errors) {
      EXPECT_NE(error.find("bad luck"), std::string::npos) << error;
      EXPECT_NE(error.find("module 'bad" + std::to_string(round % 3)), std::string::npos) << error;
    }
    if (round % 4 == 3) {
      expect_good_step(cluster, spec, good);
    }
  }
}

TEST(PipelineTsanEngine, aborts_at_any_time_from_any_rank_end_the_step_everywhere_or_nowhere) {
  const auto spec = nested_spec();
  const auto good = nested_body(batches(kMicrobatches));
  Cluster cluster(spec, 3);
  std::mt19937 random(2);
  for (int round = 0; round < 40; ++round) {
    const auto delay = std::chrono::microseconds(random() % 8000);
    const int rank = static_cast<int>(random() % 3);
    const auto before = cluster.engine(rank).step();
    std::thread aborting([&, delay, rank] {
      std::this_thread::sleep_for(delay);
      if (cluster.engine(rank).step() > before) {
        cluster.engine(rank).abort(failure_of(cluster.engine(rank), "stop"));
      }
    });
    // The abort may come when some ranks have left the step already: those see nothing of it.
    for (const auto& error : cluster.try_step(good, kMicrobatches)) {
      EXPECT_TRUE(error.empty() || error.find("stop") != std::string::npos) << error;
    }
    aborting.join();
    if (round % 4 == 3) {
      expect_good_step(cluster, spec, good);
    }
  }
}

// Between the look at a failure and the change of a table that follows, another thread may abort the step. Here it
// does, once at each place, on every rank.
TEST(PipelineTsanAborts, an_abort_just_before_any_change_of_the_tables_leaves_nothing_for_the_next_step) {
  constexpr int kFew = 2;
  const auto spec = nested_spec();
  const auto data = batches(kFew);
  const StepBody body = [&](Model& model, int microbatch) {
    const auto loss = nested_body(data)(model, microbatch)[0];
    return Tensors{loss + model.parameter("b.bias").sum()};  // what lies elsewhere enters a frame too
  };
  for (int rank = 0; rank < 3; ++rank) {
    std::atomic<int> changes_left{0};
    Cluster cluster(spec, 3, Policy::kInterleaved, {}, {}, [&, rank](Engine& engine) {
      if (engine.partition() == rank && --changes_left == 0) {
        engine.abort(failure_of(engine, "stop"));
      }
    });
    int changes = 0;
    do {
      changes_left = ++changes;
      for (const auto& error : cluster.try_step(body, kFew)) {
        // Who has left the step already sees nothing of an abort.
        EXPECT_TRUE(error.empty() || error.find("stop") != std::string::npos) << error;
      }
      cluster.expect_empty_tables();
      Model plain(spec);
      forget_gradients(cluster);
      run_plainly(plain, body, kFew);
      const bool aborted = changes_left <= 0;
      changes_left = 0;  // counts on below it
      cluster.step(body, kFew);
      cluster.expect_gradients_of(plain);
      cluster.expect_empty_tables();
      ASSERT_FALSE(HasFailure()) << "after an abort before change " << changes << " on rank " << rank;
      if (!aborted) {
        break;
      }
    } while (true);
    EXPECT_GT(changes, 10) << "changes of the tables of rank " << rank;
  }
}

/// A transport whose messages to one rank can be kept back, as on a slow route.
class SlowRoute final : public Transport {
 public:
  explicit SlowRoute(std::shared_ptr<Transport> inner)
      : Transport(inner->rank(), inner->size()), inner_(std::move(inner)) {
    inner_->set_receiver(kEngineChannel, [this](int source, Message message) { deliver(source, std::move(message)); });
  }
  ~SlowRoute() override { inner_->set_receiver(kEngineChannel, {}); }

  void send(int destination, Message message) override {
    const std::lock_guard lock(mutex_);
    if (destination == slow_destination_) {
      kept_.push_back(std::move(message));
    } else {
      inner_->send(destination, std::move(message));
    }
  }
  void keep_back(int destination) {
    const std::lock_guard lock(mutex_);
    slow_destination_ = destination;
  }
  void let_go() {
    const std::lock_guard lock(mutex_);
    for (auto& message : kept_) {
      inner_->send(slow_destination_, std::move(message));
    }
    kept_.clear();
    slow_destination_ = -1;
  }
  void set_busy(bool busy) override { inner_->set_busy(busy); }
  void flush() override { inner_->flush(); }
  void close() override { inner_->close(); }
  void abandon() override { inner_->abandon(); }

 private:
  void wake() override { deliver_pending(); }

  const std::shared_ptr<Transport> inner_;
  std::mutex mutex_;
  int slow_destination_ = -1;
  std::vector<Message> kept_;
};

TEST(PipelineTsanEngine, a_late_abort_does_not_touch_the_step_that_has_begun_meanwhile) {
  auto spec = nested_spec();
  spec.module({"bad", 1, [](Model&, const Tensors&) -> Tensors { throw std::runtime_error("bad luck"); }});
  const auto data = batches(kMicrobatches);
  auto transports = make_local_transports(3);
  const auto slow = std::make_shared<SlowRoute>(transports[1]);
  transports[1] = slow;
  Cluster cluster(spec, 3, Policy::kInterleaved, transports);
  const StepBody bad = [&](Model& model, int microbatch) {
    return model.call("bad", {data[static_cast<std::size_t>(microbatch)]});
  };
  const StepBody good = [&](Model& model, int microbatch) {
    return model.call("c", {model("a", data[static_cast<std::size_t>(microbatch)])});
  };

  for (int round = 0; round < 3; ++round) {
    slow->keep_back(2);
    const auto errors = cluster.on_all_ranks([&](int rank) {
      if (rank == 0) {
        EXPECT_THROW(cluster.drive("step", bad, kMicrobatches), Model::Aborted);
        std::thread letting_go([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          slow->let_go();
        });
        EXPECT_NO_THROW(cluster.drive("step", good, kMicrobatches));
        letting_go.join();
      } else {
        EXPECT_THROW(cluster.follow(rank, "step"), Model::Aborted) << rank;
        EXPECT_NO_THROW(cluster.follow(rank, "step")) << rank;
      }
    });
    cluster.expect_empty_tables();
  }
}

TEST(PipelineTsanEngine, the_begin_of_a_step_that_has_failed_here_is_forgotten) {
  const auto spec = nested_spec();
  auto transports = make_local_transports(3);
  const auto slow = std::make_shared<SlowRoute>(transports[0]);
  transports[0] = slow;
  Cluster cluster(spec, 3, Policy::kInterleaved, transports);
  slow->keep_back(1);
  cluster.on_all_ranks([&](int rank) {
    if (rank == 0) {
      cluster.engine(0).begin_step("step");
      while (cluster.engine(1).step() == 0) {
        std::this_thread::yield();
      }
      cluster.engine(1).abort(failure_of(cluster.engine(1), "stop"));
      cluster.engine(0).leave_failed_step();
    } else {
      EXPECT_THROW(cluster.follow(rank, "step"), Model::Aborted) << rank;
    }
  });
  slow->let_go();
  expect_good_step(cluster, spec, nested_body(batches(kMicrobatches)));
}

TEST(PipelineTsanEngine, an_abort_of_the_next_step_does_not_touch_the_one_before) {
  const auto spec = nested_spec();
  const auto good = nested_body(batches(kMicrobatches));
  Cluster cluster(spec, 3);
  for (int round = 0; round < 10; ++round) {
    cluster.on_all_ranks([&](int rank) {
      if (rank == 0) {
        EXPECT_NO_THROW(cluster.drive("step", good, kMicrobatches));
        cluster.engine(0).begin_step("step");
        cluster.engine(0).abort(failure_of(cluster.engine(0), "stop"));
      } else {
        EXPECT_NO_THROW(cluster.follow(rank, "step")) << rank;
        EXPECT_THROW(cluster.follow(rank, "step"), Model::Aborted) << rank;
      }
    });
  }
  expect_good_step(cluster, spec, good);
}

TEST(PipelineTsanEngine, engines_open_and_close_in_a_row) {
  const auto spec = nested_spec();
  const auto good = nested_body(batches(kMicrobatches));
  for (int round = 0; round < 5; ++round) {
    Cluster cluster(spec, 3, round % 2 == 0 ? Policy::kInterleaved : Policy::kSimple);
    expect_good_step(cluster, spec, good);
  }
}

}  // namespace
}  // namespace smp::pipeline
