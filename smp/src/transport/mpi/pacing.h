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

inline constexpr std::chrono::microseconds kBusyPause{70};
inline constexpr std::chrono::microseconds kTransferPause{20};
inline constexpr std::chrono::microseconds kCrowdedPause{20};
inline constexpr std::chrono::microseconds kPollHardFor{200'000};
inline constexpr std::chrono::microseconds kShortestDoze{50};
/// Bounds the latency of the first message after a long quiet time.
inline constexpr std::chrono::microseconds kLongestDoze{500};

/// How long to sleep before the next look; 0 means to yield only.
///
/// MPI moves only while somebody calls it, and looking costs the core that computes. So a rank that waits looks
/// hard, one that computes looks now and then, and one that has long been quiet leaves its core to others.
inline std::chrono::microseconds pause_before_look(const Pace& pace) {
  if (pace.busy) {
    return pace.transferring ? kTransferPause : kBusyPause;
  }
  if (pace.quiet_for >= kPollHardFor) {
    return std::min(kLongestDoze, kShortestDoze + (pace.quiet_for - kPollHardFor) / 1000);
  }
  return pace.crowded ? kCrowdedPause : std::chrono::microseconds(0);
}

}  // namespace smp::mpi
