// The issuing side of the engine: what frames ask of it.
#include <algorithm>
#include <optional>
#include <utility>

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "message_kind.h"
#include "smp/error.h"
#include "smp/pipeline/engine.h"
#include "smp/pipeline/nodes.h"
#include "smp/random.h"

namespace smp::pipeline {
namespace {

// What calls give back is remembered for so many kinds of arguments.
constexpr std::size_t kKnownCalls = 1 << 14;

bool tracked(const at::Tensor& x) { return c10::GradMode::is_enabled() && x.requires_grad(); }

/// Inference tensors have no version.
std::uint32_t version_of(const at::Tensor& x) { return x.is_inference() ? 0 : x._version(); }

/// Gives `out` a grad_fn.
void attach(const at::Tensor& out, const at::Tensor& source, const NodePointer<torch::autograd::Node>& node) {
  node->set_next_edges(torch::autograd::collect_next_edges(source));
  torch::autograd::set_history(out, node);
}

}  // namespace

ValueId Engine::new_ids(std::int64_t count) {
  return (counter_.fetch_add(static_cast<std::uint64_t>(count)) << kRankBits) | static_cast<ValueId>(partition_);
}

Handle Engine::new_handle(int home, ValueId id) {
  const auto lock = tables_of(here().step);
  return c10::make_intrusive<ValueHandle>(releases_, home, id, /*borrowed=*/false);
}

at::Tensor Engine::new_remote(int home, ValueId id, const TensorMeta& meta) {
  return make_remote(new_handle(home, id), meta);
}

void Engine::issue(int home, Body body, std::uint64_t key) {
  auto& frame = here();
  check_failed();
  made_progress();
  frame.issued[static_cast<std::size_t>(home)] = 1;
  if (std::holds_alternative<Backward>(body) || std::holds_alternative<Accumulate>(body)) {
    key = mix(frame.key, ++frame.num_keys);
  }
  Instruction instruction{frame.id, transport_->rank(), frame.microbatch, frame.step, frame.outermost, frame.ancestors,
                          key,      std::move(body)};
  if (home == partition_) {
    const auto needs = instruction.needs();
    const auto lock = tables_of(frame.step);
    ++counts_.issued;
    for (auto id : needs) {
      values_.pin(id);
    }
    lanes_.push(std::move(instruction));
    changed_.notify_all();
  } else {
    Writer header;
    header(MessageKind::kInstruction);
    instruction.encode(header);
    send(home, header);
    const std::lock_guard lock(mutex_);
    ++counts_.issued;
  }
  flush_releases();
}

std::string Engine::wait_reply(ValueId id) {
  {
    const std::lock_guard lock(mutex_);
    ++counts_.asked;
  }
  std::optional<std::string> reply;  // taken at once: a failure may clear what arrived
  wait([&] {
    if (const auto arrived = replies_.find(id); !reply && arrived != replies_.end()) {
      reply = std::move(arrived->second);
      replies_.erase(arrived);
    }
    return reply.has_value();
  });
  return *std::move(reply);
}

int Engine::home_of(const at::Tensor& x) const {
  if (is_remote(x)) {
    return handle_of(x)->home();
  }
  const auto it = parameter_index_.find(x.unsafeGetTensorImpl());
  return it == parameter_index_.end() ? partition_ : options_.parameters[static_cast<std::size_t>(it->second)].home;
}

void Engine::check_not_used(const std::vector<at::Tensor>& tensors, std::int32_t module) const {
  const auto& info = options_.modules[static_cast<std::size_t>(module)];
  for (const auto& x : tensors) {
    const auto it = parameter_index_.find(x.unsafeGetTensorImpl());
    if (it != parameter_index_.end() &&
        std::find(info.parameters.begin(), info.parameters.end(), it->second) != info.parameters.end()) {
      throw_usage(
          "autograd.grad was asked for the gradient of parameter '{}', which module '{}' used: its home alone knows "
          "that "
          "gradient. Call model.backward(loss) and read .grad after the step, or call autograd.grad inside the module",
          options_.parameters[static_cast<std::size_t>(it->second)].name, info.name);
    }
  }
}

int Engine::common_home(const std::vector<at::Tensor>& tensors) const {
  std::vector<std::int64_t> bytes(options_.peers.size(), 0);
  std::vector<std::int64_t> parameter_bytes(options_.peers.size(), 0);
  for (const auto& x : tensors) {
    const auto home = static_cast<std::size_t>(home_of(x));
    const auto size = x.numel() * static_cast<std::int64_t>(x.element_size());
    bytes[home] += size;
    if (parameter_index_.contains(x.unsafeGetTensorImpl())) {
      parameter_bytes[home] += size;
    }
  }
  const auto largest = [](const std::vector<std::int64_t>& of) {
    return std::max_element(of.begin(), of.end()) - of.begin();
  };
  const auto by_parameters = largest(parameter_bytes);
  return static_cast<int>(parameter_bytes[static_cast<std::size_t>(by_parameters)] > 0 ? by_parameters
                                                                                       : largest(bytes));
}

// ---- moves

at::Tensor Engine::to_home(const at::Tensor& x, int home, bool remember) {
  auto& frame = here();
  if (is_remote(x)) {
    bool is_stale = false;
    {
      const std::lock_guard lock(mutex_);
      is_stale = handle_of(x)->queue() != releases_;
    }
    if (is_stale) {
      check_failed();  // if that is why, the failure says more
      throw_usage("a tensor of a step that failed, or of a model that was closed, can't be used any more");
    }
    check_memory(x);
    if (handle_of(x)->home() == home) {
      return x;
    }
  }
  if (!remember || (x.is_inference() && !is_remote(x))) {  // inference tensors don't tell when they change
    return move(x, home);
  }
  auto* source = x.unsafeGetTensorImpl();
  const auto version = version_of(x);
  const bool grad_mode = c10::GradMode::is_enabled();
  auto& moved = frame.moved;
  std::erase_if(moved, [](const Frame::Moved& entry) { return entry.source.use_count() == 0; });
  for (const auto& entry : moved) {
    if (entry.source._unsafe_get_target() == source && entry.version == version && entry.home == home &&
        entry.grad_mode == grad_mode) {
      return entry.copy;
    }
  }
  auto copy = move(x, home);
  moved.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(x.getIntrusivePtr()), version, home, grad_mode, copy});
  return copy;
}

at::Tensor Engine::move(const at::Tensor& x, int home) {
  if (!is_remote(x)) {
    return lift(x, home);
  }
  const auto origin = handle_of(x)->home();
  const auto copy = new_ids();
  issue(origin, Send{handle_of(x)->id(), home, copy});
  auto out = new_remote(home, copy, travelled(TensorMeta::of(x)));
  if (tracked(x)) {
    attach(out, x, make_node<MoveNode>(origin));
  }
  return out;
}

at::Tensor Engine::lift(const at::Tensor& x, int home) {
  const auto parameter = parameter_index_.find(x.unsafeGetTensorImpl());
  const auto value = new_ids();
  if (parameter != parameter_index_.end()) {
    // A parameter enters as a value of its own home, and moves on from there like any other.
    const int owner = home_of(x);
    const auto record = new_ids();
    issue(owner, Lift{parameter->second, record, value});
    auto out = new_remote(owner, value, TensorMeta::of(x));
    auto handle = new_handle(owner, record);
    if (tracked(x)) {
      const auto beyond = [x] { return torch::autograd::impl::gradient_edge(x); };
      torch::autograd::set_history(out, make_node<LiftNode>(std::move(handle), beyond));
    }
    return owner == home ? out : move(out, home);
  }
  if (tracked(x) && home != partition_) {
    // Like a parameter: its graph here is run once, with the sum of what comes back from all partitions.
    return move(to_home(x, partition_), home);
  }
  send_value(here().step, home, value, x.detach());
  auto out = new_remote(home, value, travelled(TensorMeta::of(x)));
  if (tracked(x)) {
    auto& frame = here();
    const auto edge = torch::autograd::impl::gradient_edge(x);
    const bool issues = issues_below(edge);
    if (issues && leaves_below(edge).empty()) {
      // Only what remote tensors were gathered by: their gradients may stay remote, and its graph is part of the
      // frame's.
      attach(out, x, make_node<MoveNode>(partition_));
      return out;
    }
    if (issues && !frame.outermost) {
      throw_usage(
          "a tensor that was made here, in a module away from partition 0, from both parameters and tensors of other "
          "partitions is used on "
          "another partition: give the module that makes it parameters and children on one partition");
    }
    auto record = std::make_shared<CallRecord>();
    record->step = frame.step;
    record->microbatch = frame.microbatch;
    record->outputs = {edge};
    record->container = issues;
    frame.nests |= issues;
    for (const auto& leaf : leaves_below(record->outputs[0])) {
      if (const auto it = parameter_index_.find(leaf.unsafeGetTensorImpl()); it != parameter_index_.end()) {
        record->parameters.push_back(it->second);
      }
    }
    const auto id = new_ids();
    const auto beyond = [of = std::weak_ptr<CallRecord>(record)] {
      const auto alive = of.lock();
      return alive && !alive->outputs.empty() ? alive->outputs[0] : torch::autograd::Edge();
    };
    sums_.open_call(record->step, record->parameters, record->microbatch);
    store(record->step, id, record);
    torch::autograd::set_history(out, make_node<LiftNode>(new_handle(partition_, id), beyond));
  }
  return out;
}

void Engine::accumulate(int parameter, const at::Tensor& gradient, std::int64_t pass) {
  const auto& frame = here();
  auto record = std::make_shared<CallRecord>();
  record->step = frame.step;
  record->microbatch = frame.microbatch;
  const auto& tensor = options_.parameters[static_cast<std::size_t>(parameter)].tensor;
  record->outputs = {{make_node<GradientNode>(tensor), 0}};
  record->parameters = {parameter};
  sums_.open_call(record->step, record->parameters, record->microbatch);
  const auto id = new_ids();
  const auto handle = new_handle(partition_, id);  // until it is issued
  store(frame.step, id, std::move(record));
  const auto arrived = to_home(gradient, partition_, /*remember=*/false);
  issue(partition_, Accumulate{id, handle_of(arrived)->id(), pass, /*keep_graph=*/false});
}

ValueId Engine::begin_fetch(const at::Tensor& x) {
  const auto arrival = new_ids();
  if (is_remote(x)) {
    static_cast<void>(to_home(x, handle_of(x)->home()));  // throws when it can't be used any more
    issue(handle_of(x)->home(), Send{handle_of(x)->id(), partition_, arrival});
  } else {
    send_value(here().step, partition_, arrival, x.detach());
  }
  return arrival;
}

at::Tensor Engine::end_fetch(ValueId arrival) {
  at::Tensor data;  // taken at once: a failure may clear what arrived
  ValueTable::Trash trash;
  wait([&] {
    if (!data.defined() && values_.ready(arrival)) {
      data = values_.value(arrival);
      values_.release(arrival, trash);
    }
    return data.defined();
  });
  return data;
}

at::Tensor Engine::fetch(const at::Tensor& x) { return is_remote(x) ? end_fetch(begin_fetch(x)) : x.detach(); }

at::Tensor Engine::to_local(const at::Tensor& x) {
  if (!is_remote(x)) {
    const int home = home_of(x);
    return home == partition_ ? x : to_local(to_home(x, home));
  }
  auto out = fetch(x);
  if (tracked(x)) {
    attach(out, x, make_node<MoveNode>(handle_of(x)->home()));
  }
  return out;
}

// ---- calls

std::string CallReport::encode() const {
  Writer writer;
  writer(tree, static_cast<std::uint64_t>(outputs.size()));
  for (auto meta : outputs) {
    meta.fields(writer);
  }
  writer(same_as, shares, changed);
  for (auto meta : changed_metas) {
    meta.fields(writer);
  }
  return writer.take();
}

CallReport CallReport::decode(Reader& reader) {
  CallReport report;
  reader(report.tree);
  report.outputs.resize(reader.get<std::uint64_t>());
  for (auto& meta : report.outputs) {
    meta.fields(reader);
  }
  reader(report.same_as, report.shares, report.changed);
  report.changed_metas.resize(report.changed.size());
  for (auto& meta : report.changed_metas) {
    meta.fields(reader);
  }
  return report;
}

CallOutcome Engine::call(std::int32_t module, const std::string& tree, const std::vector<at::Tensor>& tensors,
                         const std::string& training) {
  const auto& frame = here();
  const auto& info = options_.modules[static_cast<std::size_t>(module)];
  const int home = info.home == kFollowsData ? common_home(tensors) : info.home;
  const auto modes = Modes::current();

  Call call;
  call.module = module;
  call.call = new_ids();
  call.tree = tree;
  call.modes = modes;
  call.training = training;
  Writer key;
  key(module, home, tree, training);
  call.modes.fields(key);
  std::vector<at::Tensor> inputs;
  std::vector<TensorMeta> metas;
  for (const auto& x : tensors) {
    inputs.push_back(to_home(x, home));
    metas.push_back(TensorMeta::of(inputs.back()));
    metas.back().requires_grad &= modes.grad;
    metas.back().fields(key);
    call.inputs.push_back(handle_of(inputs.back())->id());
    call.wants.push_back(metas.back().requires_grad ? 1 : 0);
  }
  if (info.ordered) {
    // In each context the calls come in the order of microbatches, so a call never waits for one of a higher
    // microbatch, which may not be admitted before this one is finished.
    call.context = frame.context;
    const auto lock = tables_of(frame.step);
    call.ticket = tickets_[{module, frame.context}]++;
  }

  // What will come out: remembered, or asked for.
  std::optional<CallReport> report;
  {
    const std::lock_guard lock(mutex_);
    const auto known = info.dynamic ? reports_.end() : reports_.find(key.bytes());
    if (known != reports_.end()) {
      report = known->second;
    }
  }
  if (report) {
    call.results = new_ids(static_cast<std::int64_t>(report->outputs.size()) + 1);
    call.expected = std::hash<std::string>{}(report->encode());
    for (auto i : report->changed) {
      call.mutated.push_back(call.inputs[static_cast<std::size_t>(i)]);
    }
  } else {
    call.results = new_ids(kUnknownResults);
    call.report = true;
  }
  const auto id = call.call;
  const auto first = call.results;
  auto wants = call.wants;
  auto handle = modes.grad ? new_handle(home, id) : Handle();
  issue(home, std::move(call), draw_key());
  if (!report) {
    const auto bytes = wait_reply(id);
    Reader reader(bytes);
    report = CallReport::decode(reader);
    reader(report->reach);
    const auto lock = tables_of(frame.step);
    if (!info.dynamic) {
      if (reports_.size() >= kKnownCalls) {
        reports_.clear();
      }
      reports_.emplace(key.bytes(), *report);
    }
  }

  const bool differentiable = modes.grad && std::any_of(report->outputs.begin(), report->outputs.end(),
                                                        [](const TensorMeta& m) { return m.requires_grad; });
  const bool changes_graph = modes.grad && std::any_of(report->changed_metas.begin(), report->changed_metas.end(),
                                                       [](const TensorMeta& m) { return m.requires_grad; });
  NodePointer<torch::autograd::Node> node;
  if (differentiable || changes_graph) {
    node = make_node<CallNode>(std::move(handle), module, std::move(wants), metas, report->reach);
    node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  }
  CallOutcome outcome;
  outcome.tree = report->tree;
  for (std::size_t k = 0; k < report->outputs.size(); ++k) {
    if (const auto input = report->same_as[k]; input >= 0) {
      outcome.outputs.push_back(tensors[static_cast<std::size_t>(input)]);
      if (node) {
        node->add_input_metadata(torch::autograd::Node::undefined_input());
      }
      continue;
    }
    outcome.outputs.push_back(new_remote(home, nth(first, k), report->outputs[k]));
    if (node && report->outputs[k].requires_grad) {
      torch::autograd::set_history(outcome.outputs.back(), node);
    } else if (node) {
      node->add_input_metadata(torch::autograd::Node::undefined_input());
    }
  }
  for (std::size_t k = 0; k < report->changed.size(); ++k) {
    const auto i = static_cast<std::size_t>(report->changed[k]);
    note_write(inputs[i]);
    inputs[i].unsafeGetTensorImpl()->bump_version();
    if (node && report->changed_metas[k].requires_grad) {
      torch::autograd::impl::rebase_history(inputs[i], {node, node->add_input_metadata(inputs[i])});
    } else if (node) {
      node->add_input_metadata(torch::autograd::Node::undefined_input());
    }
    if (!inputs[i].is_same(tensors[i])) {
      tensors[i].copy_(inputs[i]);  // the call changed a copy: the original follows
    }
  }
  if (!report->shares.empty()) {
    std::vector<SharedMemory> pairs;
    for (std::size_t s = 0; s < report->shares.size(); s += 2) {
      const auto& result = outcome.outputs[static_cast<std::size_t>(report->shares[s])];
      const auto other = static_cast<std::size_t>(report->shares[s + 1]);
      const bool is_input = other < inputs.size();
      const auto& with = is_input ? tensors[other] : outcome.outputs[other - inputs.size()];
      pairs.push_back({result, with, is_input ? inputs[other] : with});
    }
    join_memory(pairs, info.name);
  }
  return outcome;
}

}  // namespace smp::pipeline
