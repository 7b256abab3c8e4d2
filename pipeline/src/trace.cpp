#include "smp/pipeline/trace.h"

#include <utility>

#include "smp/error.h"

namespace smp::pipeline {
namespace {

thread_local std::int32_t tls_track = kIssueTrack;

}  // namespace

std::int64_t trace_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Trace::start() {
  const std::lock_guard lock(mutex_);
  if (on_) {
    throw_usage("a trace is being recorded already: end it (leave its `with` block) before another");
  }
  record_ = {};
  record_.begin_ns = trace_clock_ns();
  on_ = true;
}

Trace::Record Trace::stop() {
  const std::lock_guard lock(mutex_);
  on_ = false;
  record_.end_ns = trace_clock_ns();
  return std::exchange(record_, {});
}

void Trace::record(TraceEvent event) {
  const std::lock_guard lock(mutex_);
  if (!on_) {
    return;
  }
  if (record_.events.size() >= kCapacity) {
    ++record_.dropped;
    return;
  }
  record_.events.push_back(std::move(event));
}

Trace& trace() {
  static Trace instance;
  return instance;
}

void set_trace_track(std::int32_t track) { tls_track = track; }
std::int32_t trace_track() { return tls_track; }

}  // namespace smp::pipeline
