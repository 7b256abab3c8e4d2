// Autograd nodes of remote tensors. None of them computes or waits: each issues an instruction and returns.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <functional>
#include <memory>
#include <vector>

#include "smp/pipeline/call_record.h"
#include "smp/pipeline/engine.h"
#include "smp/pipeline/node_pointer.h"

namespace smp::pipeline {

/// Backward of a call: issues BACKWARD.
///
///   inputs ──► CallNode ──► outputs (and inputs that the call changed)
class CallNode final : public torch::autograd::Node {
 public:
  CallNode(Handle call, std::int32_t module, std::vector<std::uint8_t> wants, std::vector<TensorMeta> inputs,
           std::vector<std::uint8_t> reach)
      : call_(std::move(call)),
        module_(module),
        wants_(std::move(wants)),
        inputs_(std::move(inputs)),
        reach_(std::move(reach)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  void release_variables() override { released_ = true; }
  [[nodiscard]] std::int32_t module() const { return module_; }
  [[nodiscard]] std::string name() const override { return "smp::CallNode"; }

 private:
  Handle call_;
  std::int32_t module_;
  std::vector<std::uint8_t> wants_;
  std::vector<TensorMeta> inputs_;
  std::vector<std::uint8_t> reach_;
  bool released_ = false;
};

/// Backward of a move between partitions, or of a local tensor that became a remote one: moves the gradient back.
class MoveNode final : public torch::autograd::Node {
 public:
  explicit MoveNode(int origin) : origin_(origin) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  [[nodiscard]] std::string name() const override { return "smp::MoveNode"; }

 private:
  int origin_;
};

/// Where the graph of a frame meets a parameter or a local tensor: issues ACCUMULATE.
class LiftNode final : public torch::autograd::Node {
 public:
  /// `beyond`: where the graph of the parameter or local tensor begins; without function once that was freed.
  LiftNode(Handle record, std::function<torch::autograd::Edge()> beyond)
      : record_(std::move(record)), beyond_(std::move(beyond)) {
    update_topological_nr(beyond_());
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  /// See OpenLifts.
  void open() { next_edges_ = {beyond_()}; }
  void close() { next_edges_.clear(); }
  [[nodiscard]] std::string name() const override { return "smp::LiftNode"; }

 private:
  Handle record_;
  std::function<torch::autograd::Edge()> beyond_;
};

/// For the time of an autograd.grad in a frame: the graph below `roots` goes on through parameters and local tensors,
/// whose gradients may be asked for. Throws UsageError where one of `wanted` is a parameter that a call used: its home
/// alone knows that gradient.
class OpenLifts {
 public:
  OpenLifts(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& wanted);
  ~OpenLifts();
  OpenLifts(const OpenLifts&) = delete;
  OpenLifts& operator=(const OpenLifts&) = delete;

 private:
  std::vector<NodePointer<torch::autograd::Node>> opened_;
};

/// Where the graph of a call meets its inputs: keeps their gradients. The inputs are not leaves, so in-place works on
/// them.
class CaptureNode final : public torch::autograd::Node {
 public:
  explicit CaptureNode(std::shared_ptr<CapturedGradients> captured) : captured_(std::move(captured)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  [[nodiscard]] std::string name() const override { return "smp::CaptureNode"; }

 private:
  std::shared_ptr<CapturedGradients> captured_;
};

/// Puts a gradient into `.grad` of a parameter whose hooks it went through already.
class GradientNode final : public torch::autograd::Node {
 public:
  explicit GradientNode(const at::Tensor& parameter);
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  [[nodiscard]] std::string name() const override { return "smp::GradientNode"; }

 private:
  at::Tensor parameter_;
};

/// A gradient that comes to a parameter of this rank as a remote tensor (from a custom autograd function in glue, say)
/// goes to Engine::accumulate() instead, after the hooks that the user has set so far. Until unwatch_gradient(), or
/// until the user sets another one.
void watch_gradient(const at::Tensor& parameter, Engine& engine, int index);
void unwatch_gradient(const at::Tensor& parameter);

/// For each root and each output of `capture`: is there a path. Row by row.
std::vector<std::uint8_t> reachable(const std::vector<torch::autograd::Edge>& roots,
                                    const torch::autograd::Node* capture, std::size_t inputs);

/// Does backward from `root` go on through a tensor of another rank.
bool issues_below(const torch::autograd::Edge& root);

/// The leaf tensors that backward from `root` may accumulate into.
std::vector<at::Tensor> leaves_below(const torch::autograd::Edge& root);

}  // namespace smp::pipeline
