// Several engines in one process: ranks are threads over the local transport, modules are C++ functions.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "smp/error.h"
#include "smp/pipeline/engine.h"

namespace smp::pipeline {

using Tensors = std::vector<at::Tensor>;
class Model;

/// A module: gets tensors, gives tensors, and calls its children through the model.
struct ModuleSpec {
  std::string name;
  int home = 0;
  std::function<Tensors(Model&, Tensors)> forward;
  std::vector<std::string> parameters = {};  // its own
  std::vector<std::string> children = {};
  bool ordered = false;
};

struct ParameterSpec {
  std::string name;
  at::Tensor value;
  int home = 0;
};

/// A model written once, to be run plainly and by engines.
struct ModelSpec {
  std::vector<ParameterSpec> parameters;
  std::vector<ModuleSpec> modules;

  [[nodiscard]] std::size_t index_of(const std::string& name) const {
    const auto it = std::find_if(modules.begin(), modules.end(), [&](const auto& m) { return m.name == name; });
    if (it == modules.end()) {
      throw std::logic_error("no module " + name);
    }
    return static_cast<std::size_t>(it - modules.begin());
  }

  /// The module and all below it.
  [[nodiscard]] std::vector<std::size_t> subtree(const std::string& name) const {
    std::vector<std::size_t> found{index_of(name)};
    for (const auto& child : modules[found[0]].children) {
      const auto below = subtree(child);
      found.insert(found.end(), below.begin(), below.end());
    }
    return found;
  }

  [[nodiscard]] bool is_container(const std::string& name) const {
    const auto all = subtree(name);
    return std::any_of(all.begin(), all.end(), [&](auto m) { return modules[m].home != modules[all[0]].home; });
  }

  ModelSpec& parameter(const std::string& name, at::Tensor value, int home) {
    parameters.push_back({name, std::move(value), home});
    return *this;
  }
  ModelSpec& module(ModuleSpec module) {
    modules.push_back(std::move(module));
    return *this;
  }
  /// tanh(x @ weight + bias), with its parameters.
  ModelSpec& block(const std::string& name, int home, std::int64_t width = 6);
};

/// One rank's copy of a model, or (without engine) the plain one.
class Model final : public Host {
 public:
  /// What a rank sees of other partitions' parameters is NaN, so that nothing can use it unnoticed.
  explicit Model(const ModelSpec& spec, std::optional<int> partition = std::nullopt)
      : spec_(spec), partition_(partition) {
    for (const auto& p : spec_.parameters) {
      const bool mine = !partition || p.home == *partition;
      auto copy = mine ? p.value.clone() : at::full_like(p.value, std::numeric_limits<double>::quiet_NaN());
      parameters.push_back({p.name, copy.set_requires_grad(true), p.home});
    }
  }

  [[nodiscard]] const at::Tensor& parameter(const std::string& name) const {
    return std::find_if(parameters.begin(), parameters.end(), [&](const auto& p) { return p.name == name; })->value;
  }

  /// As the shells of the product do: runs directly outside frames and for containers at home, else issues.
  Tensors call(const std::string& name, Tensors inputs) {
    const auto index = spec_.index_of(name);
    const auto& module = spec_.modules[index];
    const bool inline_container = partition_ && module.home == *partition_ && spec_.is_container(name);
    if (current_frame() == nullptr || inline_container) {
      return module.forward(*this, std::move(inputs));
    }
    return engine->call(static_cast<std::int32_t>(index), "", inputs, "").outputs;
  }
  at::Tensor operator()(const std::string& name, const at::Tensor& input) { return call(name, {input})[0]; }

  Outcome run(std::int32_t module, const std::string& tree, std::vector<at::Tensor> inputs,
              const std::string&) override {
    const auto& spec = spec_.modules[static_cast<std::size_t>(module)];
    if (on_call) {
      on_call(spec.name);
    }
    return {tree, spec.forward(*this, std::move(inputs))};
  }

  struct Aborted : FailureError {
    using FailureError::FailureError;
  };
  void throw_aborted(const Failure& failure) override { throw Aborted(failure.describe()); }

  std::vector<ParameterSpec> parameters;
  std::map<std::string, at::Tensor> buffers;
  std::function<void(const std::string& module)> on_call;  // on the executor, before each CALL
  Engine* engine = nullptr;

 private:
  const ModelSpec spec_;
  const std::optional<int> partition_;
};

inline ModelSpec& ModelSpec::block(const std::string& name, int home, std::int64_t width) {
  parameter(name + ".weight", at::randn({width, width}) * 0.4, home);
  parameter(name + ".bias", at::randn({width}) * 0.1, home);
  return module({name,
                 home,
                 [name](Model& model, const Tensors& in) {
                   return Tensors{
                       at::tanh(at::linear(in[0], model.parameter(name + ".weight"), model.parameter(name + ".bias")))};
                 },
                 {name + ".weight", name + ".bias"}});
}

/// What a step function does in one microbatch; it gives tensors, whose data the step gives back.
using StepBody = std::function<Tensors(Model&, int microbatch)>;

inline at::Tensor copy_of(const at::Tensor& x) { return x.detach().clone(); }

inline void expect_same_bits(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (expected.defined()) {
    ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
    ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
    const auto a = actual.detach().contiguous();
    const auto e = expected.detach().contiguous();
    EXPECT_EQ(std::memcmp(a.const_data_ptr(), e.const_data_ptr(), a.nbytes()), 0)
        << what << ": off by " << (a.to(at::kDouble) - e.to(at::kDouble)).abs().max().item<double>();
  }
}

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
                   Transports transports = {})
      : transports_(transports.empty() ? make_local_transports(partitions) : std::move(transports)) {
    at::set_num_threads(1);
    for (int rank = 0; rank < partitions; ++rank) {
      models_.push_back(std::make_shared<Model>(spec, rank));
      EngineOptions options;
      options.policy = policy;
      options.active_microbatches = partitions + 2;
      for (int peer = 0; peer < partitions; ++peer) {
        options.peers.push_back(peer);
      }
      for (const auto& p : models_.back()->parameters) {
        options.parameters.push_back({p.name, p.value, p.home});
      }
      for (const auto& m : spec.modules) {
        ModuleInfo info{m.name, m.home, spec.is_container(m.name), false, {}};
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
      auto state = engine(rank).state();
      for (int tries = 0; tries < 500 && (state.values + state.calls + state.queued + state.frames) > 0; ++tries) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        state = engine(rank).state();
      }
      EXPECT_EQ(state.values, 0U) << "rank " << rank;
      EXPECT_EQ(state.value_bytes, 0) << "rank " << rank;
      EXPECT_EQ(state.calls, 0U) << "rank " << rank;
      EXPECT_EQ(state.queued, 0U) << "rank " << rank;
      EXPECT_EQ(state.frames, 0U) << "rank " << rank;
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
      for (const auto& line : engine(rank).describe_lanes()) {
        std::fprintf(stderr, "  %s\n", line.c_str());
      }
    }
  }

  Transports transports_;
  std::vector<std::shared_ptr<Model>> models_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<Tensors> outputs_;
};

/// The plain loop over microbatches.
inline std::vector<Tensors> run_plainly(Model& model, const StepBody& body, int microbatches) {
  std::vector<Tensors> outputs;
  for (int microbatch = 0; microbatch < microbatches; ++microbatch) {
    outputs.emplace_back();
    for (const auto& result : body(model, microbatch)) {
      outputs.back().push_back(copy_of(result));
    }
  }
  return outputs;
}

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

/// So many batches of random numbers.
inline Tensors batches(int count, std::int64_t rows = 3, std::int64_t width = 6) {
  Tensors data;
  for (int i = 0; i < count; ++i) {
    data.push_back(at::randn({rows, width}));
  }
  return data;
}

inline at::Tensor loss_of(const at::Tensor& x) { return x.square().mean(); }

}  // namespace smp::pipeline
