#pragma once

#include <algorithm>
#include <chrono>

namespace smp::mpi {

/// What the progress thread knows when it decides how soon to look for messages again.
struct Pace {
  bool busy = false;                       ///< this rank computes
  bool crowded = false;                    ///< more ranks than cores on this host
  bool transferring = false;               ///< messages are half sent or half received
  std::chrono::microseconds quiet_for{0};  ///< since something was sent or received, or the rank began to wait
};

/// A rank that computes needs nothing before its instruction ends, when it looks anyway. Each look takes the core from
/// the thread that computes, which costs far more than the look where switching threads does (in virtual machines).
inline constexpr std::chrono::microseconds kBusyPause{3'000};
inline constexpr std::chrono::microseconds kTransferPause{50};
inline constexpr std::chrono::microseconds kCrowdedPause{20};
inline constexpr std::chrono::microseconds kPollHardFor{1'000};
inline constexpr std::chrono::microseconds kShortestDoze{20};
/// Bounds the latency of the first message after a long quiet time.
inline constexpr std::chrono::microseconds kLongestDoze{500};

/// How long to sleep before the next look; 0 means to yield only.
///
/// MPI moves only while somebody calls it, and looking costs a core that may compute (hard looking slows even the
/// sibling of a hyper-threaded core). So a rank that waits looks hard for a millisecond and then the less often the
/// longer nothing came, and one that computes looks now and then.
inline std::chrono::microseconds pause_before_look(const Pace& pace) {
  if (pace.busy) {
    return pace.transferring ? kTransferPause : kBusyPause;
  }
  if (pace.quiet_for >= kPollHardFor) {
    return std::min(kLongestDoze, kShortestDoze + (pace.quiet_for - kPollHardFor) / 100);
  }
  return pace.crowded ? kCrowdedPause : std::chrono::microseconds(0);
}

}  // namespace smp::mpi
