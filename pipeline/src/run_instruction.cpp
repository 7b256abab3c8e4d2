// What each instruction does.
#include <algorithm>
#include <utility>

#include <ATen/autocast_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "message_kind.h"
#include "smp/error.h"
#include "smp/pipeline/engine.h"
#include "smp/pipeline/nodes.h"
#include "smp/pipeline/operators.h"

namespace smp::pipeline {
namespace {

/// The issuer's thread-local settings, for the time of a call.
class ModeScope {
 public:
  explicit ModeScope(const Modes& modes) : grad_(modes.grad), autocast_(modes.autocast), before_(Modes::current()) {
    if (autocast_) {
      apply(modes);
    }
  }
  ~ModeScope() {
    if (autocast_) {
      at::autocast::clear_cache();
      apply(before_);
    }
  }
  ModeScope(const ModeScope&) = delete;
  ModeScope& operator=(const ModeScope&) = delete;

 private:
  static void apply(const Modes& modes) {
    at::autocast::set_autocast_enabled(at::kCPU, modes.autocast);
    at::autocast::set_autocast_dtype(at::kCPU, modes.autocast_dtype);
    at::autocast::set_autocast_cache_enabled(modes.autocast_cache);
  }

  c10::AutoGradMode grad_;
  bool autocast_;
  Modes before_;
};

}  // namespace

/// A value of this rank as a remote tensor of `frame`, which keeps it alive while it has that.
at::Tensor Engine::borrow(Frame& frame, ValueId id, const TensorMeta& meta) {
  Handle handle;
  {
    const auto lock = tables_of(frame.step);
    values_.pin(id);
    handle = c10::make_intrusive<ValueHandle>(releases_, partition_, id, /*borrowed=*/true);
  }
  return make_remote(std::move(handle), meta);
}

// ---- CALL

void Engine::run(const Instruction& instruction, const Call& call) {
  const auto& info = options_.modules[static_cast<std::size_t>(call.module)];
  const auto count = call.inputs.size();
  const bool wants_any = std::any_of(call.wants.begin(), call.wants.end(), [](auto w) { return w != 0; });
  std::shared_ptr<Frame> frame = info.container ? open_frame(instruction) : nullptr;

  auto record = std::make_shared<CallRecord>();
  record->module = call.module;
  record->container = info.container;
  record->step = instruction.step;
  record->microbatch = instruction.microbatch;
  record->captured = std::make_shared<CapturedGradients>();
  auto capture = wants_any ? make_node<CaptureNode>(record->captured) : nullptr;

  std::vector<at::Tensor> inputs;
  std::vector<std::int64_t> versions;
  for (std::size_t i = 0; i < count; ++i) {
    const auto data = value(call.inputs[i]);
    at::Tensor input;
    if (frame) {
      input = borrow(*frame, call.inputs[i], TensorMeta::of(data));
      const auto lock = tables_of(frame->step);
      values_.lend(call.inputs[i], frame->id);
      if (std::find(call.mutated.begin(), call.mutated.end(), call.inputs[i]) != call.mutated.end()) {
        values_.lend_to_writer(call.inputs[i], frame->id);
      }
      frame->borrowed.push_back(call.inputs[i]);
    } else {
      input = data.tensor_data();  // shares data and version counter, but no autograd
    }
    if (capture) {
      const auto nr = capture->add_input_metadata(input);
      if (call.wants[i] != 0) {
        torch::autograd::impl::set_gradient_edge(input, {capture, nr});
      }
    }
    record->inputs.push_back(TensorMeta::of(input));
    versions.push_back(input._version());
    inputs.push_back(std::move(input));
  }

  const auto& shared = shared_[static_cast<std::size_t>(call.module)];
  std::vector<std::uint32_t> shared_versions;
  for (int p : shared) {
    shared_versions.push_back(options_.parameters[static_cast<std::size_t>(p)].tensor._version());
  }

  Host::Outcome outcome;
  CallReport report;
  std::vector<at::Tensor> outputs;
  const auto input_that_is = [&](const at::Tensor& output) {
    const auto it = std::find_if(inputs.begin(), inputs.end(), [&](const at::Tensor& x) { return x.is_same(output); });
    return it == inputs.end() ? -1 : static_cast<std::int32_t>(it - inputs.begin());
  };
  {
    const FrameScope scope(frame.get());
    {
      const ModeScope modes(call.modes);
      outcome = host_->run(call.module, call.tree, inputs, call.training);
      for (std::size_t i = 0; i < shared.size(); ++i) {
        const auto& parameter = options_.parameters[static_cast<std::size_t>(shared[i])];
        if (parameter.tensor._version() != shared_versions[i]) {
          throw_usage(
              "module '{}' changed parameter '{}' in its forward (max_norm of an embedding does), and other modules "
              "use it too: with several microbatches on their way they would see it at another time than in plain "
              "PyTorch. Don't share it, or don't change it",
              info.name, parameter.name);
        }
      }
      for (const auto& given : outcome.outputs) {
        report.same_as.push_back(input_that_is(given));
        const auto output = is_remote(given) ? given : resolved(given);
        // What a container gives back lies here, wherever it was made.
        const bool bring = frame && (is_remote(output) || output.requires_grad());
        outputs.push_back(bring ? to_home(output, partition_) : output);
      }
    }
    report.tree = std::move(outcome.tree);
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      const auto& output = outputs[k];
      report.outputs.push_back(TensorMeta::of(output));
      report.outputs.back().requires_grad &= call.modes.grad && report.same_as[k] < 0;
      for (std::size_t i = 0; report.same_as[k] < 0 && i < count + k; ++i) {
        const bool is_input = i < count;
        if ((is_input || report.same_as[i - count] < 0) &&
            share_memory(output, is_input ? inputs[i] : outputs[i - count])) {
          report.shares.push_back(static_cast<std::int32_t>(k));
          report.shares.push_back(static_cast<std::int32_t>(i));
        }
      }
      record->outputs.push_back(report.outputs.back().requires_grad ? torch::autograd::impl::gradient_edge(output)
                                                                    : torch::autograd::Edge());
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (inputs[i]._version() == versions[i]) {
        continue;
      }
      report.changed.push_back(static_cast<std::int32_t>(i));
      if (frame) {  // its operators that change it may still be on their way
        const auto lock = tables_of(frame->step);
        values_.lend_to_writer(call.inputs[i], frame->id);
      }
      report.changed_metas.push_back(TensorMeta::of(inputs[i]));
      report.changed_metas.back().requires_grad &= call.modes.grad;
      record->outputs.push_back(report.changed_metas.back().requires_grad
                                    ? torch::autograd::impl::gradient_edge(inputs[i])
                                    : torch::autograd::Edge());
    }

    const auto encoded = report.encode();
    if (!call.report && std::hash<std::string>{}(encoded) != call.expected) {
      throw ResultVaries(
          call.module,
          formatted(
              "module '{}' gave back other shapes, dtypes or values that are not tensors than the last time it was "
              "called with arguments of these shapes, and what came of them is wrong. From now on it is asked each "
              "time: zero the gradients and run the step again; or say so before with smp.set_dynamic(module)",
              info.name));
    }
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      if (report.same_as[k] >= 0) {
        continue;  // the issuer has it
      }
      if (is_remote(outputs[k])) {
        issue(partition_, Alias{handle_of(outputs[k])->id(), nth(call.results, k)});
      } else {
        store(instruction.step, nth(call.results, k), outputs[k].detach());
      }
    }
    if (call.modes.grad) {
      if (!info.container) {
        record->alive = live_.hold(record->microbatch);
        record->parameters = info.parameters;
        sums_.open_call(record->step, record->parameters, record->microbatch);
      }
      if (call.report) {
        report.reach = reachable(record->outputs, capture.get(), count);
      }
      store(instruction.step, call.call, std::move(record));
    }
    if (call.report) {
      Writer header;
      header(report.reach);
      const auto bytes = encoded + header.bytes();
      reply(instruction, call.call, bytes);
    }
    inputs.clear();
    outputs.clear();
    outcome.outputs.clear();
  }
  if (frame) {
    close_frame(frame);
  }
}

// ---- BACKWARD

/// Runs autograd from the edges of a call. `.grad` of the parameters that it may reach is set aside meanwhile, so that
/// this call's own contribution is what lies there afterwards; that goes to the ordered sums.
std::vector<at::Tensor> Engine::run_autograd(const Instruction& instruction, CallRecord& record,
                                             std::vector<at::Tensor> gradients, std::int64_t pass, bool keep_graph,
                                             bool accumulate) {
  if (record.freed) {
    throw_usage("backward runs a second time through {}: pass retain_graph=True the first time", where(instruction));
  }
  torch::autograd::edge_list roots;
  torch::autograd::variable_list seeds;
  for (std::size_t j = 0; j < gradients.size(); ++j) {
    if (gradients[j].defined() && record.outputs[j].is_valid()) {
      roots.push_back(record.outputs[j]);
      seeds.push_back(std::move(gradients[j]));
    }
  }
  gradients.clear();
  std::vector<std::pair<int, at::Tensor>> aside;
  for (int p : record.parameters) {
    aside.emplace_back(p, std::exchange(sums_.parameter(p).mutable_grad(), at::Tensor()));
  }
  const auto restore = [&] {
    for (auto& [p, grad] : aside) {
      auto& current = sums_.parameter(p).mutable_grad();
      auto contribution = std::exchange(current, std::move(grad));
      if (contribution.defined() && accumulate) {
        sums_.add(record.step, p, record.microbatch, pass, std::move(contribution));
      }
    }
  };
  try {
    if (!roots.empty()) {
      // Local tensors that a frame uses elsewhere may share their graph, which runs once for each of them.
      const bool is_lifted = record.module < 0;
      torch::autograd::Engine::get_default_engine().execute(roots, seeds, keep_graph || is_lifted,
                                                            /*create_graph=*/false, /*accumulate_grad=*/true);
    }
  } catch (...) {
    restore();
    throw;
  }
  restore();
  if (!keep_graph) {
    record.freed = true;
    record.outputs.clear();
    record.alive.reset();
    sums_.close_call(record.step, record.parameters, record.microbatch);
    record.parameters.clear();
  }
  return record.captured ? std::exchange(record.captured->gradients, {}) : std::vector<at::Tensor>{};
}

void Engine::run(const Instruction& instruction, const Backward& backward) {
  std::shared_ptr<CallRecord> record;
  std::vector<at::Tensor> gradients;
  {
    const std::lock_guard lock(mutex_);
    record = values_.call(backward.call);
  }
  std::shared_ptr<Frame> frame = record->container ? open_frame(instruction) : nullptr;
  if (frame) {
    frame->pass = backward.pass;
    frame->accumulate = backward.accumulate;
  }
  for (auto id : backward.gradients) {
    if (id == 0) {
      gradients.emplace_back();
    } else if (frame) {
      gradients.push_back(borrow(*frame, id, TensorMeta::of(value(id))));
    } else {
      gradients.push_back(value(id));
    }
  }
  {
    const FrameScope scope(frame.get());
    auto inputs = run_autograd(instruction, *record, std::move(gradients), backward.pass, backward.keep_graph,
                               backward.accumulate);
    inputs.resize(backward.results.size());
    for (std::size_t i = 0; i < backward.results.size(); ++i) {
      const auto result = backward.results[i];
      if (result == 0) {
        if (inputs[i].defined()) {
          throw ResultVaries(
              backward.module,
              formatted(
                  "argument {} of module '{}' got a gradient, which it did not the last time that it was called with "
                  "arguments of these shapes. From now on it is asked each time: zero the gradients and run the step "
                  "again; or say so before with smp.set_dynamic(module)",
                  i, options_.modules[static_cast<std::size_t>(backward.module)].name));
        }
        continue;
      }
      if (!inputs[i].defined()) {  // the graph could reach it, but nothing came
        const auto& meta = record->inputs[i];
        store(instruction.step, result, at::zeros(meta.sizes, at::TensorOptions().dtype(meta.dtype)));
      } else if (frame) {
        const auto here_now = to_home(inputs[i], partition_, /*remember=*/false);
        issue(partition_, Alias{handle_of(here_now)->id(), result});
      } else {
        store(instruction.step, result, std::move(inputs[i]));
      }
    }
  }
  if (frame) {
    close_frame(frame);
  }
}

void Engine::run(const Instruction& instruction, const Lift& lift) {
  const auto& parameter = sums_.parameter(lift.parameter);
  auto record = std::make_shared<CallRecord>();
  record->step = instruction.step;
  record->microbatch = instruction.microbatch;
  if (parameter.requires_grad()) {
    record->outputs = {torch::autograd::impl::gradient_edge(parameter)};
    record->parameters = {lift.parameter};
    sums_.open_call(record->step, record->parameters, record->microbatch);
  }
  store(instruction.step, lift.record, std::move(record));
  store(instruction.step, lift.value, parameter.detach());
}

void Engine::run(const Instruction& instruction, const Accumulate& accumulate) {
  std::shared_ptr<CallRecord> record;
  {
    const std::lock_guard lock(mutex_);
    record = values_.call(accumulate.record);
  }
  // The graph of a local tensor may go on through tensors of other ranks.
  std::shared_ptr<Frame> frame = record->container ? open_frame(instruction) : nullptr;
  if (frame) {
    frame->pass = accumulate.pass;
  }
  {
    const FrameScope scope(frame.get());
    run_autograd(instruction, *record, {value(accumulate.gradient)}, accumulate.pass, accumulate.keep_graph, true);
  }
  if (frame) {
    close_frame(frame);
  }
}

// ---- the others

void Engine::run(const Instruction& instruction, const Op& op) {
  const c10::AutoGradMode no_grad(false);
  std::vector<std::vector<at::Tensor>> results;
  try {
    results = run_operator(op, [&](ValueId id) { return value(id); });
  } catch (const c10::Error& error) {
    if (op.reply == 0) {
      throw;
    }
    Writer failed;  // raised where the operator was called: code may expect it
    failed(false, std::string(error.what_without_backtrace()));
    reply(instruction, op.reply, failed.bytes());
    return;
  }
  Writer report;
  report(true);
  std::size_t next = 0;
  for (const auto& tensors : results) {
    report(static_cast<std::uint64_t>(tensors.size()));
    for (const auto& x : tensors) {
      const auto id = op.reply != 0 ? nth(op.results[0], next) : next < op.results.size() ? op.results[next] : 0;
      ++next;
      if (id != 0) {
        store(instruction.step, id, x);
      }
      if (op.reply != 0) {
        TensorMeta::of(x).fields(report);
      }
    }
  }
  if (op.reply != 0) {
    reply(instruction, op.reply, report.bytes());
  }
}

void Engine::run(const Instruction& instruction, const Send& send) {
  send_value(instruction.step, send.destination, send.copy, value(send.value));
}

void Engine::run(const Instruction& instruction, const Alias& alias) {
  store(instruction.step, alias.name, value(alias.value));
}

void Engine::run(const Instruction& instruction, const End& end) {
  if (end.closes) {
    sums_.close(instruction.step, instruction.microbatch);  // nobody else's frame can use this rank's parameters
  }
  const int issuer = partition_of(instruction.issuer);
  if (issuer == partition_) {
    frame_done(instruction.frame);
    return;
  }
  Writer header;
  header(MessageKind::kDone, instruction.frame);
  send(issuer, header);
}

void Engine::run(const Instruction& instruction, const Close& /*close*/) {
  sums_.close(instruction.step, instruction.microbatch);
}

}  // namespace smp::pipeline
