// The executing side of the engine: one thread at a time runs the most urgent instruction that is ready.
#include <algorithm>
#include <chrono>
#include <utility>

#include <ATen/Parallel.h>

#include "message_kind.h"
#include "smp/error.h"
#include "smp/pipeline/call_record.h"
#include "smp/pipeline/engine.h"
#include "smp/pipeline/trace.h"

namespace smp::pipeline {

extern thread_local const Engine* tls_executor_of;

namespace {

// How soon an idle rank notices handles that died: they only push to a queue.
constexpr std::chrono::milliseconds kIdleInterval{50};

/// The time between two instructions, as one event for each reason.
class Pause {
 public:
  void note(TraceKind kind) {
    if (trace().on() && (begin_ns_ == 0 || kind != kind_)) {
      end();
      kind_ = kind;
      begin_ns_ = trace_clock_ns();
    }
  }
  void end() {
    if (begin_ns_ != 0) {
      const bool starves = kind_ == TraceKind::kStarve;
      trace().record({kind_, starves ? "waits for values" : "idle", begin_ns_, trace_clock_ns(), trace_track()});
      begin_ns_ = 0;
    }
  }

 private:
  TraceKind kind_ = TraceKind::kIdle;
  std::int64_t begin_ns_ = 0;
};

}  // namespace

void Engine::pass_releases_on() {
  try {
    flush_releases();
  } catch (const FailureError&) {  // the peers have gone, and their values with them
  }
}

void Engine::start_executor() {
  executors_.emplace_back([this, track = kFirstExecutorTrack + static_cast<std::int32_t>(executors_.size())] {
    set_trace_track(track);
    run_executor();
  });
}

void Engine::run_executor() {
  tls_executor_of = this;
  // A setting of each thread: new ones would take every core. Setting it by hand changes MKL_DYNAMIC for the whole
  // process.
  at::init_num_threads();
  if (at::get_num_threads() != num_threads_) {
    at::set_num_threads(num_threads_);
  }
  std::unique_lock lock(mutex_);
  while (true) {
    std::optional<Instruction> instruction;
    Pause pause;
    ++idle_executors_;
    if (failure_) {  // the next step waits until nothing of this one runs
      changed_.notify_all();
    }
    while (!stopping_ && (computing_ || resuming_ > 0 || !(instruction = lanes_.take(values_)))) {
      if (!computing_) {
        transport_->set_busy(false);
        pause.note(lanes_.size() > 0 ? TraceKind::kStarve : TraceKind::kIdle);
      }
      if (!releases_->empty()) {  // tensors that the user dropped between steps
        lock.unlock();
        pass_releases_on();
        lock.lock();
        continue;
      }
      changed_.wait_for(lock, kIdleInterval);
    }
    --idle_executors_;
    pause.end();
    if (stopping_) {
      return;
    }
    computing_ = true;
    running_.push_back({&*instruction, trace_clock_ns()});
    transport_->set_busy(true);
    ++counts_.executed[instruction->name()];
    lock.unlock();

    const auto begin = trace_clock_ns();
    made_progress();
    execute(*instruction);
    made_progress();
    const auto end = trace_clock_ns();

    Leftovers leftovers;
    lock.lock();
    if (instruction->step > failed_step_) {
      lanes_.finish(*instruction, static_cast<double>(end - begin) * 1e-6);
      for (auto id : instruction->needs()) {
        values_.unpin(id, leftovers.values);
      }
    }
    computing_ = false;
    std::erase_if(running_, [&](const Running& running) { return running.instruction == &*instruction; });
    changed_.notify_all();
    if (trace().on()) {
      TraceEvent event{TraceKind::kRun, where(*instruction), begin, end, trace_track()};
      event.microbatch = instruction->microbatch;
      event.step = instruction->step;
      event.value_bytes = values_.bytes();
      trace().record(std::move(event));
    }
    const bool releases = !leftovers.values.empty() || !releases_->empty();
    if (releases) {
      lock.unlock();
      leftovers = {};
      instruction.reset();
      flush_releases();
      lock.lock();
    }
  }
}

void Engine::execute(const Instruction& instruction) {
  try {
    if (instruction.key != 0) {
      seed_defaults(instruction.key);
    }
    // An operator was one draw where it was issued, and is all that the key is for.
    const StreamScope stream({}, options_.rng_by_module && !std::holds_alternative<Op>(instruction.body));
    std::visit([&](const auto& body) { run(instruction, body); }, instruction.body);
  } catch (...) {
    if (instruction.step <= failed_step_) {
      return;  // unwound because of a failure that everybody knows
    }
    Failure failure;
    failure.step = instruction.step;
    failure.rank = transport_->rank();
    failure.microbatch = instruction.microbatch;
    failure.where = where(instruction);
    try {
      throw;
    } catch (const ResultVaries& error) {
      failure.varies = error.module;
    } catch (...) {
    }
    host_->describe(std::current_exception(), failure);
    abort(std::move(failure));
  }
}

std::string Engine::where(const Instruction& instruction) const {
  std::int32_t module = -1;
  if (const auto* call = std::get_if<Call>(&instruction.body)) {
    module = call->module;
  } else if (const auto* backward = std::get_if<Backward>(&instruction.body)) {
    module = backward->module;
  } else if (const auto* op = std::get_if<Op>(&instruction.body)) {
    return formatted("OP {}", op->name);
  }
  if (module < 0) {
    return instruction.name();
  }
  const auto& name = options_.modules[static_cast<std::size_t>(module)].name;
  return formatted("{} of module '{}'", instruction.name(), name.empty() ? "(the model itself)" : name);
}

void Engine::store(std::uint32_t step, ValueId id, at::Tensor data) {
  Leftovers leftovers;
  const auto lock = tables_of(step);
  values_.store(id, std::move(data), leftovers.values);
  changed_.notify_all();
}

void Engine::store(std::uint32_t step, ValueId id, std::shared_ptr<CallRecord> record) {
  Leftovers leftovers;
  const auto lock = tables_of(step);
  values_.store(id, std::move(record), leftovers.values);
  changed_.notify_all();
}

at::Tensor Engine::value(ValueId id) const {
  const std::lock_guard lock(mutex_);
  return values_.value(id);
}

int Engine::partition_of(int rank) const {
  return static_cast<int>(std::find(options_.peers.begin(), options_.peers.end(), rank) - options_.peers.begin());
}

void Engine::reply(const Instruction& to, ValueId id, const std::string& bytes) {
  const int issuer = partition_of(to.issuer);
  if (issuer != partition_) {
    Writer header;
    header(MessageKind::kReply, to.step, id, bytes);
    send(issuer, header);
    return;
  }
  const std::lock_guard lock(mutex_);
  if (to.step > failed_step_) {
    replies_[id] = bytes;
    changed_.notify_all();
  }
}

}  // namespace smp::pipeline
