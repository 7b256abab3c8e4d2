// Several engines in one process: ranks are threads over the local transport.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "model_fixture.h"
#include "smp/pipeline/engine.h"
#include "smp/transport.h"

namespace smp::pipeline {

/// Ends the process, with what every rank waits for, when a test does not come to an end.
class Watchdog {
 public:
  explicit Watchdog(std::function<void()> report)
      : thread_([this, report = std::move(report)] {
          std::unique_lock lock(mutex_);
          if (!changed_.wait_for(lock, std::chrono::seconds(100), [&] { return done_; })) {
            report();
            std::abort();
          }
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;
};

/// All ranks of a partitioned model.
class Cluster {
 public:
  using Transports = std::vector<std::shared_ptr<Transport>>;

  explicit Cluster(const ModelSpec& spec, int partitions, Policy policy = Policy::kInterleaved,
                   Transports transports = {}, std::vector<double> stall_timeouts_s = {},
                   std::function<void(Engine&)> after_look = {})
      : transports_(transports.empty() ? make_local_transports(partitions) : std::move(transports)) {
    at::set_num_threads(1);
    for (int rank = 0; rank < partitions; ++rank) {
      models_.push_back(std::make_shared<Model>(spec, rank));
      EngineOptions options;
      options.policy = policy;
      options.active_microbatches = partitions + 2;
      if (!stall_timeouts_s.empty()) {
        options.stall_timeout_s = stall_timeouts_s[static_cast<std::size_t>(rank)];
      }
      for (int peer = 0; peer < partitions; ++peer) {
        options.peers.push_back(peer);
      }
      for (const auto& p : models_.back()->parameters) {
        options.parameters.push_back({p.name, p.value, p.home});
      }
      for (const auto& m : spec.modules) {
        ModuleInfo info{m.name, m.home, spec.is_container(m.name), false, false, {}};
        for (auto below : spec.subtree(m.name)) {
          info.ordered |= spec.modules[below].ordered;
          for (const auto& name : spec.modules[below].parameters) {
            const auto it = std::find_if(spec.parameters.begin(), spec.parameters.end(),
                                         [&](const auto& p) { return p.name == name; });
            info.parameters.push_back(static_cast<int>(it - spec.parameters.begin()));
          }
        }
        options.modules.push_back(std::move(info));
      }
      if (after_look) {
        options.after_look = [after_look, model = models_.back().get()] { after_look(*model->engine); };
      }
      engines_.push_back(
          std::make_unique<Engine>(transports_[static_cast<std::size_t>(rank)], models_.back(), std::move(options)));
      models_.back()->engine = engines_.back().get();
    }
  }
  ~Cluster() {
    for (auto& engine : engines_) {
      engine->close();
    }
  }

  [[nodiscard]] int size() const { return static_cast<int>(engines_.size()); }
  Model& model(int rank) { return *models_[static_cast<std::size_t>(rank)]; }
  Engine& engine(int rank) { return *engines_[static_cast<std::size_t>(rank)]; }
  Transport& transport(int rank) { return *transports_[static_cast<std::size_t>(rank)]; }

  /// Runs a step on all ranks, none of which may fail. Gives the data of what `body` gave for each microbatch.
  std::vector<Tensors> step(const StepBody& body, int microbatches) {
    const auto errors = try_step(body, microbatches);
    for (std::size_t rank = 0; rank < errors.size(); ++rank) {
      EXPECT_EQ(errors[rank], "") << "on rank " << rank;
    }
    return outputs_;
  }

  /// The text of the error that left the step on each rank; empty where it went well.
  std::vector<std::string> try_step(const StepBody& body, int microbatches) {
    return on_all_ranks([&](int rank) {
      if (rank == 0) {
        outputs_ = drive("step", body, microbatches);
      } else {
        follow(rank, "step");
      }
    });
  }

  /// Calls `work` in a thread for each rank; the text of what each of them threw.
  std::vector<std::string> on_all_ranks(const std::function<void(int rank)>& work) {
    const Watchdog watchdog([this] { report(); });
    std::vector<std::string> errors(engines_.size());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          work(rank);
        } catch (const std::exception& error) {
          errors[static_cast<std::size_t>(rank)] = error.what();
        }
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
    return errors;
  }

  std::vector<Tensors> drive(const std::string& name, const StepBody& body, int microbatches) {
    auto& engine = *engines_[0];
    int current = -1;
    try {
      std::vector<std::vector<ValueId>> arrivals;
      engine.begin_step(name);
      for (current = 0; current < microbatches; ++current) {
        engine.begin_microbatch(current);
        {
          const auto results = body(*models_[0], current);
          const c10::NoGradGuard no_grad;
          arrivals.emplace_back();
          for (const auto& result : results) {
            arrivals.back().push_back(engine.begin_fetch(result));
          }
        }
        engine.end_microbatch();
      }
      current = -1;
      std::vector<Tensors> outputs;
      for (const auto& of_microbatch : arrivals) {
        outputs.emplace_back();
        for (const auto id : of_microbatch) {
          outputs.back().push_back(engine.end_fetch(id));
        }
      }
      engine.finish_microbatches();
      engine.end_step("done");
      return outputs;
    } catch (...) {
      end_step_with_error(0, current);
    }
  }

  void follow(int rank, const std::string& name) {
    try {
      EXPECT_EQ(engine(rank).follow_step(name), "done");
    } catch (...) {
      end_step_with_error(rank, -1);
    }
  }

  /// Nothing is left of a step in any table. Releases may still be under way, so this waits a little.
  void expect_empty_tables() {
    for (int rank = 0; rank < size(); ++rank) {
      const auto is_empty = [](const EngineState& state) {
        return state.values + state.calls + state.queued + state.frames + state.replies + state.announcements == 0 &&
               state.open_microbatches == 0;
      };
      auto state = engine(rank).state();
      for (int tries = 0; tries < 500 && !is_empty(state); ++tries) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        state = engine(rank).state();
      }
      EXPECT_EQ(state.values, 0U) << "rank " << rank;
      EXPECT_EQ(state.value_bytes, 0) << "rank " << rank;
      EXPECT_EQ(state.calls, 0U) << "rank " << rank;
      EXPECT_EQ(state.queued, 0U) << "rank " << rank;
      EXPECT_EQ(state.frames, 0U) << "rank " << rank;
      EXPECT_EQ(state.replies, 0U) << "rank " << rank;
      EXPECT_EQ(state.announcements, 0U) << "rank " << rank;
      EXPECT_EQ(state.open_microbatches, 0) << "rank " << rank;
    }
  }

  /// Gradients lie at the home of their parameter, and only there, and have the bits of the plain loop.
  void expect_gradients_of(const Model& plain) {
    for (std::size_t p = 0; p < plain.parameters.size(); ++p) {
      const auto& expected = plain.parameters[p];
      for (int rank = 0; rank < size(); ++rank) {
        const auto& grad = model(rank).parameters[p].value.grad();
        const auto what = "gradient of " + expected.name + " on rank " + std::to_string(rank);
        expect_same_bits(grad, rank == expected.home ? expected.value.grad() : at::Tensor(), what);
      }
    }
  }

 private:
  [[noreturn]] void end_step_with_error(int rank, int microbatch) {
    try {
      throw;
    } catch (const Model::Aborted&) {
      engine(rank).leave_failed_step();
      throw;
    } catch (const std::exception& error) {
      Failure failure;
      failure.step = engine(rank).step();
      failure.rank = rank;
      failure.microbatch = microbatch;
      failure.message = error.what();
      engine(rank).abort(failure);
      engine(rank).leave_failed_step();
      throw;
    }
  }

  void report() {
    for (int rank = 0; rank < size(); ++rank) {
      const auto state = engine(rank).state();
      std::fprintf(stderr, "rank %d, step %u: %zu values, %zu calls, %zu queued, %zu frames\n", rank,
                   engine(rank).step(), state.values, state.calls, state.queued, state.frames);
      std::fprintf(stderr, "%s\n", explain_stall({rank}, {engine(rank).status()}).c_str());
    }
  }

  Transports transports_;
  std::vector<std::shared_ptr<Model>> models_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<Tensors> outputs_;
};

/// Runs `steps` steps with both policies, over so many partitions, and expects the bits of the plain loop, and empty
/// tables after each step. Gradients add up over the steps.
inline void expect_equals_plain(const ModelSpec& spec, int partitions, const StepBody& body, int microbatches = 4,
                                int steps = 2) {
  for (const auto policy : {Policy::kInterleaved, Policy::kSimple}) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, policy == Policy::kSimple ? "simple" : "interleaved");
    Cluster cluster(spec, partitions, policy);
    Model plain(spec);
    for (int step = 0; step < steps; ++step) {
      const auto expected = run_plainly(plain, body, microbatches);
      const auto actual = cluster.step(body, microbatches);
      ASSERT_EQ(actual.size(), expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(actual[i].size(), expected[i].size());
        for (std::size_t k = 0; k < expected[i].size(); ++k) {
          expect_same_bits(actual[i][k], expected[i][k],
                           "output " + std::to_string(k) + " of microbatch " + std::to_string(i));
        }
      }
      cluster.expect_gradients_of(plain);
      cluster.expect_empty_tables();
    }
  }
}

}  // namespace smp::pipeline
