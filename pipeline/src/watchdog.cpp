// A step that makes no progress ends, with the reason.
#include <algorithm>
#include <chrono>
#include <utility>

#include "message_kind.h"
#include "smp/error.h"
#include "smp/pipeline/engine.h"
#include "smp/pipeline/trace.h"

namespace smp::pipeline {
namespace {

constexpr std::chrono::seconds kAnswerTime{5};

double seconds_since(std::int64_t ns) { return static_cast<double>(trace_clock_ns() - ns) * 1e-9; }

}  // namespace

void Engine::made_progress() { progress_ns_.store(trace_clock_ns(), std::memory_order_relaxed); }

RankStatus Engine::status() const {
  const std::lock_guard lock(mutex_);
  RankStatus result;
  result.quiet_seconds = seconds_since(progress_ns_);
  const auto add = [&](const Instruction& instruction, std::int64_t since_ns, bool running) -> InstructionStatus& {
    auto& entry = result.instructions.emplace_back();
    entry.what = where(instruction);
    entry.microbatch = instruction.microbatch;
    entry.seconds = seconds_since(since_ns);
    entry.running = running;
    for (const auto& [first, count] : instruction.makes()) {
      entry.makes.push_back(first);
      entry.counts.push_back(count);
    }
    return entry;
  };
  for (const auto& running : running_) {
    add(*running.instruction, running.began_ns, true);
  }
  for (auto& waiting : lanes_.waiting(values_)) {
    auto& entry = add(*waiting.instruction, waiting.arrived_ns, false);
    entry.first = waiting.first;
    entry.missing = std::move(waiting.missing);
  }
  return result;
}

/// Blocks until all ranks have answered, but not for long. Called without the lock.
std::vector<std::optional<RankStatus>> Engine::ask_all() {
  Writer header;
  {
    const std::lock_guard lock(mutex_);
    answers_.clear();
    header(MessageKind::kStatusRequest, ++status_serial_);
  }
  send_to_others(header);
  std::vector<std::optional<RankStatus>> result(options_.peers.size());
  result[static_cast<std::size_t>(partition_)] = status();
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kAnswerTime,
                    [&] { return answers_.size() + 1 == options_.peers.size() || failure_ || stopping_; });
  for (auto& [partition, answer] : answers_) {
    result[static_cast<std::size_t>(partition)] = std::move(answer);
  }
  answers_.clear();
  return result;
}

/// For a thread that waits. Partition 0 ends a step in which no rank makes progress; the others end one whose partition
/// 0 does not answer any more. A step function that is busy with something else is nobody's stall.
void Engine::watch() {
  const double timeout_s = options_.stall_timeout_s;
  if (timeout_s <= 0 || seconds_since(progress_ns_) < timeout_s || trace_clock_ns() < next_question_ns_) {
    return;
  }
  const auto statuses = ask_all();
  double quiet_s = seconds_since(progress_ns_);
  for (const auto& answer : statuses) {
    if (answer) {
      quiet_s = std::min(quiet_s, answer->quiet_seconds);
    }
  }
  const bool driver_answers = statuses[0].has_value();
  if (quiet_s < timeout_s || (partition_ != 0 && driver_answers)) {
    // Not by touching the time of the last progress, which is this rank's answer to the others.
    const double pause_s = quiet_s < timeout_s ? timeout_s - quiet_s : timeout_s / 2;
    next_question_ns_ = trace_clock_ns() + static_cast<std::int64_t>(pause_s * 1e9);
    return;
  }
  Failure failure;
  {
    const std::lock_guard lock(mutex_);
    failure.step = entered_step_;
  }
  failure.rank = transport_->rank();
  failure.stall = true;
  failure.message = formatted(
      "step {} has made no progress on any rank for {:.1f} s (the configuration key stall_timeout is {:g}):\n{}",
      failure.step, quiet_s, timeout_s, explain_stall(options_.peers, statuses));
  abort(std::move(failure));
}

}  // namespace smp::pipeline
