#include "smp/pipeline/nodes.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <unordered_set>

#include "smp/error.h"

namespace smp::pipeline {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

Engine& issuing_engine() {
  auto* frame = current_frame();
  if (frame == nullptr) {
    throw_usage(
        "backward of a tensor that lives on another partition was called outside a step: call model.backward(loss) in "
        "the @smp.step function");
  }
  if (c10::GradMode::is_enabled()) {
    throw_usage("create_graph=True is not possible across partitions: gradients of gradients stay within one module");
  }
  return *frame->engine;
}

/// The user's call of backward: contributions of one pass are summed before they are accumulated.
std::int64_t pass() {
  const auto* frame = current_frame();
  return frame->pass != 0 ? frame->pass : torch::autograd::get_current_graph_task_id() + 1;
}

/// False under autograd.grad: nothing goes into .grad.
bool accumulates() {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  return current_frame()->accumulate && (wanted == nullptr || wanted->empty());
}

bool keep_graph() { return torch::autograd::get_current_graph_task_keep_graph(); }

/// Calls `visit` once for each node that `root` reaches, with the node; it returns whether to go on below that node.
template <typename Visit>
void walk(const Edge& root, Visit visit) {
  std::unordered_set<Node*> seen;
  std::vector<Node*> open;
  const auto enter = [&](const Edge& edge) {
    if (edge.is_valid() && visit(edge) && seen.insert(edge.function.get()).second) {
      open.push_back(edge.function.get());
    }
  };
  enter(root);
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) {
      enter(edge);
    }
  }
}

}  // namespace

variable_list CallNode::apply(variable_list&& gradients) {
  auto& engine = issuing_engine();
  if (released_) {
    throw_usage(
        "backward runs a second time through a call on another partition: pass retain_graph=True the first time");
  }
  const int home = call_->home();
  Backward backward;
  backward.call = call_->id();
  backward.module = module_;
  backward.pass = pass();
  backward.keep_graph = keep_graph();
  backward.accumulate = accumulates();
  backward.gradients.assign(gradients.size(), 0);
  backward.results.assign(inputs_.size(), 0);
  variable_list moved(gradients.size());  // alive until BACKWARD is issued
  variable_list results(inputs_.size());
  for (std::size_t j = 0; j < gradients.size(); ++j) {
    if (!gradients[j].defined()) {
      continue;
    }
    moved[j] = engine.to_home(gradients[j], home, /*remember=*/false);
    backward.gradients[j] = handle_of(moved[j])->id();
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (wants_[i] != 0 && reach_[j * inputs_.size() + i] != 0 && backward.results[i] == 0) {
        backward.results[i] = engine.new_ids();
      }
    }
  }
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (backward.results[i] != 0) {
      results[i] = engine.new_remote(home, backward.results[i], inputs_[i]);
    }
  }
  engine.issue(home, std::move(backward));
  return results;
}

variable_list MoveNode::apply(variable_list&& gradients) {
  if (!gradients[0].defined()) {
    return {at::Tensor()};
  }
  return {issuing_engine().to_home(gradients[0], origin_, /*remember=*/false)};
}

variable_list LiftNode::apply(variable_list&& gradients) {
  if (gradients[0].defined()) {
    auto& engine = issuing_engine();
    if (!accumulates()) {
      return num_outputs() == 0 ? variable_list{}
                                : variable_list{engine.to_home(gradients[0], engine.partition(), /*remember=*/false)};
    }
    const auto gradient = engine.to_home(gradients[0], record_->home(), /*remember=*/false);
    engine.issue(record_->home(), Accumulate{record_->id(), handle_of(gradient)->id(), pass(), keep_graph()});
  }
  return variable_list(num_outputs());
}

OpenLifts::OpenLifts(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& wanted) {
  const auto& engine = *current_frame()->engine;
  for (const auto& root : roots) {
    if (!root.requires_grad()) {
      continue;
    }
    walk(torch::autograd::impl::gradient_edge(root), [&](const Edge& edge) {
      if (const auto* call = dynamic_cast<const CallNode*>(edge.function.get())) {
        engine.check_not_used(wanted, call->module());
      } else if (auto* lift = dynamic_cast<LiftNode*>(edge.function.get())) {
        lift->open();
        opened_.push_back(edge.function);
      }
      return true;
    });
  }
}

OpenLifts::~OpenLifts() {
  for (const auto& node : opened_) {
    static_cast<LiftNode*>(node.get())->close();
  }
}

variable_list CaptureNode::apply(variable_list&& gradients) {
  captured_->gradients = std::move(gradients);
  return {};
}

GradientNode::GradientNode(const at::Tensor& parameter) : parameter_(parameter) { add_input_metadata(parameter); }

variable_list GradientNode::apply(variable_list&& gradients) {
  auto& grad = parameter_.mutable_grad();
  torch::autograd::AccumulateGrad::accumulateGrad(parameter_, grad, gradients[0], 1,
                                                  [&grad](at::Tensor&& updated) { grad = std::move(updated); });
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter_)) {
    (*hook)(parameter_);
  }
  return {};
}

namespace {

class GradientWatch final : public torch::autograd::FunctionPreHook {
 public:
  GradientWatch(Engine& engine, int index) : engine_(&engine), index_(index) {}
  variable_list operator()(const variable_list& gradients) override {
    if (!gradients[0].defined() || !is_remote(gradients[0]) || !accumulates()) {
      return gradients;
    }
    engine_->accumulate(index_, gradients[0], pass());
    return {at::Tensor()};
  }

 private:
  Engine* engine_;
  int index_;
};

bool is_watch(const std::unique_ptr<torch::autograd::FunctionPreHook>& hook) {
  return dynamic_cast<const GradientWatch*>(hook.get()) != nullptr;
}

}  // namespace

void watch_gradient(const at::Tensor& parameter, Engine& engine, int index) {
  torch::autograd::impl::materialize_autograd_meta(parameter);
  auto& hooks = torch::autograd::impl::hooks(parameter);
  if (hooks.empty() || !is_watch(hooks.back())) {
    unwatch_gradient(parameter);
    hooks.push_back(std::make_unique<GradientWatch>(engine, index));
  }
}

void unwatch_gradient(const at::Tensor& parameter) {
  if (torch::autograd::impl::get_autograd_meta(parameter) != nullptr) {
    std::erase_if(torch::autograd::impl::hooks(parameter), is_watch);
  }
}

std::vector<std::uint8_t> reachable(const std::vector<Edge>& roots, const Node* capture, std::size_t inputs) {
  std::vector<std::uint8_t> reach(roots.size() * inputs, 0);
  if (capture == nullptr) {
    return reach;
  }
  for (std::size_t j = 0; j < roots.size(); ++j) {
    walk(roots[j], [&](const Edge& edge) {
      if (edge.function.get() == capture) {
        reach[j * inputs + edge.input_nr] = 1;
        return false;
      }
      return true;
    });
  }
  return reach;
}

bool issues_below(const Edge& root) {
  bool found = false;
  walk(root, [&](const Edge& edge) {
    const auto* node = edge.function.get();
    found = found || dynamic_cast<const MoveNode*>(node) != nullptr || dynamic_cast<const CallNode*>(node) != nullptr;
    return !found;
  });
  return found;
}

std::vector<at::Tensor> leaves_below(const Edge& root) {
  std::vector<at::Tensor> leaves;
  std::unordered_set<Node*> seen;
  walk(root, [&](const Edge& edge) {
    if (auto* accumulate = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get())) {
      if (seen.insert(accumulate).second) {
        leaves.push_back(accumulate->variable);
      }
      return false;
    }
    return true;
  });
  return leaves;
}

}  // namespace smp::pipeline
