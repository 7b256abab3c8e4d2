// Steps and failures of the engine; engine.h says which source holds the rest.
#include "smp/pipeline/engine.h"
#include "smp/pipeline/nodes.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "message_kind.h"
#include "smp/error.h"
#include "smp/pipeline/trace.h"

namespace smp::pipeline {
namespace {

constexpr std::chrono::milliseconds kInterruptInterval{50};
// What runs when a step has stalled may never end: the caller is told all the same.
constexpr std::chrono::seconds kStallGrace{1};

/// Around what blocks: without the interpreter's lock.
class Outside {
 public:
  explicit Outside(Host& host) : host_(host), state_(host.leave_interpreter()) {}
  ~Outside() { host_.enter_interpreter(state_); }
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;

 private:
  Host& host_;
  void* state_;
};

std::vector<at::Tensor> tensors_of(const std::vector<ParameterInfo>& parameters) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(parameters.size());
  for (const auto& parameter : parameters) {
    tensors.push_back(parameter.tensor);
  }
  return tensors;
}

int position_of(int rank, const std::vector<int>& peers) {
  const auto it = std::find(peers.begin(), peers.end(), rank);
  if (it == peers.end()) {
    throw_usage("rank {} is not among the {} ranks of this pipeline", rank, peers.size());
  }
  return static_cast<int>(it - peers.begin());
}

}  // namespace

// The executor of which engine this thread is; set in executor.cpp.
thread_local const Engine* tls_executor_of = nullptr;

Engine::Engine(std::shared_ptr<Transport> transport, std::shared_ptr<Host> host, EngineOptions options)
    : transport_(std::move(transport)),
      host_(std::move(host)),
      options_(std::move(options)),
      partition_(position_of(transport_->rank(), options_.peers)),
      num_threads_(at::get_num_threads()),
      sums_(tensors_of(options_.parameters)),
      lanes_(options_.policy, partition_, static_cast<int>(options_.peers.size())) {
  if (options_.peers.size() >= (1U << kRankBits)) {
    throw_usage("{} partitions: at most {} are possible", options_.peers.size(), (1U << kRankBits) - 1);
  }
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    parameter_index_.emplace(options_.parameters[i].tensor.unsafeGetTensorImpl(), static_cast<int>(i));
  }
  for (const auto& module : options_.modules) {
    shared_.emplace_back();
    std::copy_if(module.parameters.begin(), module.parameters.end(), std::back_inserter(shared_.back()), [&](int p) {
      return std::find(options_.shared.begin(), options_.shared.end(), p) != options_.shared.end();
    });
  }
  nested_frames_ = std::any_of(options_.modules.begin(), options_.modules.end(),
                               [](const ModuleInfo& m) { return m.container && m.home != 0; });
  {
    const std::lock_guard lock(mutex_);
    start_executor();
  }
  transport_->set_receiver(
      kEngineChannel, [this](int source, Message message) { receive(source, std::move(message)); },
      [this](const std::string& reason) { peer_left(transport_->rank(), 0, reason); });
}

Engine::~Engine() { close(); }

void Engine::close() {
  void* const interpreter = host_->leave_interpreter();
  std::vector<std::thread> threads;
  Leftovers leftovers;
  bool was_open = false;
  {
    const std::lock_guard lock(mutex_);
    was_open = !std::exchange(closed_, true);
    stopping_ = true;
    threads.swap(executors_);
    changed_.notify_all();
  }
  if (was_open) {
    try {
      Writer header;
      header(MessageKind::kLeave, in_step_ ? entered_step_ - 1 : entered_step_);
      send_to_others(header);
    } catch (const FailureError&) {  // the transport is gone, and so are the peers
    }
    transport_->set_receiver(kEngineChannel, {});
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (const auto& parameter : options_.parameters) {
    unwatch_gradient(parameter.tensor);
  }
  {
    const std::lock_guard lock(mutex_);
    forget_locked(leftovers);
  }
  leftovers = {};
  host_->enter_interpreter(interpreter);
}

// ---- steps

void Engine::enter_step(const std::string& name) {
  step_name_ = name;
  made_progress();
  step_began_ns_ = trace_clock_ns();
  std::string frozen;
  for (const auto& parameter : options_.parameters) {
    frozen.push_back(parameter.tensor.requires_grad() ? '1' : '0');
  }
  std::optional<Failure> left;
  leave_failed_step();
  watch_gradients();
  const std::lock_guard receiving(receive_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (closed_) {
      throw_usage("a step was called on a model that was closed");
    }
    ++entered_step_;
    in_step_ = true;
    script_random_ = RandomState::of_defaults();
    lanes_.start_step();
    sums_.start_step(entered_step_);
    tickets_.clear();
    if (frozen != frozen_) {  // what needs a gradient has changed, and with it what calls give back
      frozen_ = std::move(frozen);
      reports_.clear();
    }
    failure_.reset();
    if (left_ && left_->first < entered_step_) {
      left = as_of_now(left_->second);
    }
    changed_.notify_all();
  }
  if (left) {
    abort(*left);
  }
  for (auto& [source, message] : std::exchange(early_, {})) {
    take(source, std::move(message));
  }
  check_failed();
}

void Engine::leave_step() {
  // Every frame is done; what may be left are CLOSE instructions, which add up gradients.
  wait([&] { return lanes_.size() == 0 && !computing_; });
  sums_.finish_step();
  give_random_back();
  flush_releases();
  const std::lock_guard lock(mutex_);
  in_step_ = false;
  if (trace().on()) {
    trace().record({TraceKind::kStep, step_name_, step_began_ns_, trace_clock_ns(), trace_track(), -1, entered_step_});
  }
}

// The code between steps goes on with its random numbers as if no module had run.
void Engine::give_random_back() {
  if (script_random_) {
    script_random_->restore();
    script_random_.reset();
  }
}

void Engine::begin_step(const std::string& name) {
  step_key_ = draw_key();
  enter_step(name);
  Writer header;
  header(MessageKind::kStepBegin, entered_step_, name);
  send_to_others(header);
}

void Engine::begin_microbatch(std::int32_t microbatch) {
  const int active =
      options_.policy == Policy::kSimple ? std::numeric_limits<int>::max() : options_.active_microbatches;
  wait([&] { return open_microbatches_ < active; });
  auto frame = std::make_shared<Frame>();
  frame->engine = this;
  frame->id = new_ids();
  frame->microbatch = microbatch;
  frame->step = entered_step_;
  frame->outermost = true;
  frame->key = mix(step_key_, static_cast<std::uint64_t>(microbatch));
  // Every rank gets the end of every microbatch: it is what tells a rank that the microbatch is finished there.
  frame->issued.assign(options_.peers.size(), 1);
  microbatch_began_ns_ = trace_clock_ns();
  const auto lock = tables_of(entered_step_);
  ++open_microbatches_;
  frames_[frame->id] = frame;
  microbatch_frame_ = frame;
  microbatch_scope_.emplace(frame.get());
  microbatch_stream_.emplace(make_stream(frame->key), options_.rng_by_module);
}

void Engine::end_microbatch() {
  microbatch_stream_.reset();
  microbatch_scope_.reset();
  const auto microbatch = microbatch_frame_->microbatch;
  close_frame(std::exchange(microbatch_frame_, nullptr));
  if (trace().on()) {
    trace().record({TraceKind::kIssue, formatted("microbatch {}", microbatch), microbatch_began_ns_, trace_clock_ns(),
                    trace_track(), microbatch, entered_step_});
  }
}

void Engine::leave_failed_step() {
  microbatch_stream_.reset();
  microbatch_scope_.reset();
  microbatch_frame_.reset();
  const Outside outside(*host_);
  std::unique_lock lock(mutex_);
  const auto deadline = std::chrono::steady_clock::now() + kStallGrace;
  while (failure_ && !stopping_ && idle_executors_ < static_cast<int>(executors_.size())) {
    if (failure_->stall && std::chrono::steady_clock::now() > deadline) {
      break;
    }
    changed_.wait_for(lock, kInterruptInterval);
    lock.unlock();
    host_->check_interrupt();
    lock.lock();
  }
  give_random_back();
}

void Engine::finish_microbatches() {
  wait([&] { return open_microbatches_ == 0; });
  leave_step();
}

void Engine::end_step(const std::string& outputs) {
  Writer header;
  header(MessageKind::kStepEnd, entered_step_, outputs);
  send_to_others(header);
}

std::string Engine::follow_step(const std::string& name) {
  try {
    return follow(name);
  } catch (...) {
    leave_failed_step();
    throw;
  }
}

std::string Engine::follow(const std::string& name) {
  enter_step(name);
  const auto step = entered_step_;
  const auto announced = [&](std::map<std::uint32_t, std::string>& steps) {
    std::optional<std::string> text;  // taken at once: a failure may clear what arrived
    wait([&] {
      if (const auto node = steps.extract(step)) {
        text = std::move(node.mapped());
      }
      return text.has_value();
    });
    return *std::move(text);
  };
  const auto begun = announced(begun_steps_);
  if (begun != name) {
    Failure failure;
    failure.step = step;
    failure.rank = transport_->rank();
    failure.message = formatted(
        "step {} is '{}' on the rank of partition 0 but '{}' on rank {}: all ranks must call the same step functions "
        "in the same order",
        step, begun, name, failure.rank);
    abort(failure);
    check_failed();
  }
  auto outputs = announced(ended_steps_);
  leave_step();
  return outputs;
}

// ---- waiting and failing

void Engine::wait(const std::function<bool()>& ready) {
  const auto step = own_step();
  const auto over = [&] { return ready() || step <= failed_step_; };
  {
    const Outside outside(*host_);
    const bool is_executor = tls_executor_of == this;
    std::unique_lock lock(mutex_);
    if (over()) {
      lock.unlock();
    } else {
      ++counts_.waits;
      const auto begin = trace_clock_ns();
      std::optional<RandomState> random;
      if (is_executor) {  // somebody must go on serving this rank
        random = RandomState::of_defaults();
        computing_ = false;
        if (idle_executors_ == 0) {
          start_executor();
        }
        changed_.notify_all();
        transport_->set_busy(false);
      }
      lock.unlock();
      flush_releases();
      lock.lock();
      while (!over() && !stopping_) {
        changed_.wait_for(lock, kInterruptInterval);
        if (!is_executor) {
          lock.unlock();
          host_->check_interrupt();
          watch();
          lock.lock();
        }
      }
      if (is_executor) {
        ++resuming_;
        while (computing_) {
          changed_.wait(lock);
        }
        --resuming_;
        computing_ = true;
        random->restore();
      }
      if (trace().on()) {
        trace().record({TraceKind::kWait, "wait", begin, trace_clock_ns(), trace_track()});
      }
      if (stopping_ && !over()) {
        throw_failure("rank {} closed its model in the middle of step {}", transport_->rank(), entered_step_);
      }
    }
  }
  check_failed();
}

/// The step that this thread's code belongs to.
std::uint32_t Engine::own_step() const {
  const auto* frame = current_frame();
  return frame != nullptr ? frame->step : entered_step_;
}

void Engine::check_failed() const {
  if (const auto step = own_step(); step <= failed_step_) {
    host_->throw_aborted(failure_of(step));
  }
  if (options_.after_look) {
    options_.after_look();
  }
}

Failure Engine::failure_of(std::uint32_t step) const {
  {
    const std::lock_guard lock(mutex_);
    if (failure_ && failure_->step == step) {
      return *failure_;
    }
  }
  Failure failure;  // the next step has begun
  failure.step = step;
  failure.message = formatted("step {} has failed", step);
  return failure;
}

std::unique_lock<std::mutex> Engine::tables_of(std::uint32_t step) const {
  if (options_.after_look) {
    options_.after_look();
  }
  std::unique_lock lock(mutex_);
  if (step <= failed_step_) {
    lock.unlock();
    host_->throw_aborted(failure_of(step));
  }
  return lock;
}

std::uint32_t Engine::step() const {
  const std::lock_guard lock(mutex_);
  return entered_step_;
}

std::optional<Failure> Engine::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

/// Empties the tables, and makes the handles of what lay there worthless.
void Engine::forget_locked(Leftovers& leftovers) {
  leftovers.values = values_.clear();
  leftovers.releases = std::exchange(releases_, std::make_shared<ReleaseQueue>());
  for (auto& [id, frame] : frames_) {
    leftovers.frames.push_back(std::move(frame));
  }
  frames_.clear();
  static_cast<void>(lanes_.clear());
}

void Engine::fail_locked(Failure failure, Leftovers& leftovers) {
  failed_step_ = failure.step;
  if (failure.varies >= 0) {
    options_.modules[static_cast<std::size_t>(failure.varies)].dynamic = true;
  }
  failure_ = std::move(failure);
  in_step_ = false;
  forget_locked(leftovers);
  replies_.clear();
  reports_.clear();
  for (auto* steps : {&begun_steps_, &ended_steps_}) {
    std::erase_if(*steps, [&](const auto& announced) { return announced.first <= failed_step_; });
  }
  open_microbatches_ = 0;
  changed_.notify_all();
}

void Engine::abort(Failure failure) {
  Leftovers leftovers;
  {
    const std::lock_guard lock(mutex_);
    if (failure.step <= failed_step_ || failure.step != entered_step_) {
      return;  // the first failure of a step wins, and a step that was left can't fail any more
    }
    fail_locked(failure, leftovers);
  }
  try {
    Writer header;
    header(MessageKind::kAbort);
    failure.fields(header);
    send_to_others(header);
  } catch (const FailureError&) {  // nobody is left to tell
  }
}

void Engine::watch_gradients() {
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    if (const auto& [name, parameter, home] = options_.parameters[i]; home == partition_) {
      watch_gradient(parameter, *this, static_cast<int>(i));
    }
  }
}

void Engine::set_dynamic(std::int32_t module, bool dynamic) {
  const std::lock_guard lock(mutex_);
  options_.modules.at(static_cast<std::size_t>(module)).dynamic = dynamic;
}

// ---- looking at it

EngineCounts Engine::counts() const {
  const std::lock_guard lock(mutex_);
  auto counts = counts_;
  counts.gradient_contributions = static_cast<std::int64_t>(sums_.contributions());
  counts.peak_microbatches = live_.peak();
  return counts;
}

EngineState Engine::state() const {
  const std::lock_guard lock(mutex_);
  return {values_.size() - values_.calls(),
          values_.calls(),
          values_.bytes(),
          lanes_.size(),
          frames_.size(),
          sums_.pending_bytes(),
          replies_.size(),
          begun_steps_.size() + ended_steps_.size(),
          open_microbatches_};
}

}  // namespace smp::pipeline
