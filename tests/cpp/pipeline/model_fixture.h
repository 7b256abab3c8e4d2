// Models of C++ functions for the engine's tests: run plainly, or as the host of one rank's engine.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
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
