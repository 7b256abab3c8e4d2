// What each thread of this rank did, and when.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace smp::pipeline {

enum class TraceKind : std::uint8_t {
  kStep,     // a step on the thread that called it
  kIssue,    // the step function of one microbatch
  kRun,      // an instruction
  kWait,     // running code that waits for a value or an answer
  kStarve,   // the rank has instructions, but none whose values are there
  kIdle,     // the rank has no instruction
  kSend,     // a value leaves; peer is its destination
  kReceive,  // a value came; peer is its source
};

/// A row of the picture.
inline constexpr std::int32_t kIssueTrack = 0;    // the user's thread
inline constexpr std::int32_t kArrivalTrack = 1;  // the transport's thread
inline constexpr std::int32_t kFirstExecutorTrack = 2;

struct TraceEvent {
  TraceKind kind = TraceKind::kRun;
  std::string name;
  std::int64_t begin_ns = 0;  // steady clock of this rank
  std::int64_t end_ns = 0;
  std::int32_t track = kIssueTrack;
  std::int32_t microbatch = -1;
  std::uint32_t step = 0;
  std::uint64_t id = 0;          // of the value that is sent or received
  std::int32_t peer = -1;        // partition
  std::int64_t bytes = 0;        // that are sent or received
  std::int64_t value_bytes = 0;  // in the rank's table when the event ended; of kRun only
};

std::int64_t trace_clock_ns();

/// Collects events of one process while it is on. Off, each place that could record costs a relaxed load and at most
/// two reads of the clock. All functions may be called from any thread.
class Trace {
 public:
  /// Events after this many are counted, not kept.
  static constexpr std::size_t kCapacity = 2'000'000;
  struct Record {
    std::vector<TraceEvent> events;
    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;
    std::size_t dropped = 0;
  };

  [[nodiscard]] bool on() const { return on_.load(std::memory_order_relaxed); }
  /// Throws UsageError when it is on already.
  void start();
  Record stop();
  void record(TraceEvent event);

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  Record record_;
};

/// That of this process: engines come and go while it runs.
Trace& trace();

/// The row of this thread; 0, the user's, until it is set.
void set_trace_track(std::int32_t track);
std::int32_t trace_track();

}  // namespace smp::pipeline
