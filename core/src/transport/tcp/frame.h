#pragma once

#include <smp/transport.h>

#include <cstddef>
#include <cstdint>

namespace smp::tcp {

// On a connection messages follow each other, each as:  Prefix | header | payload

/// Ranks of one job have one byte order, so the bytes travel as they are.
struct Prefix {
  std::uint64_t header_bytes = 0;
  std::uint64_t payload_bytes = 0;
  std::uint8_t channel = 0;
  bool has_payload = false;
};

/// The last message of a rank that closes: nothing more will come from it.
inline constexpr std::uint8_t kCloseChannel = 254;
/// The last message of a rank that has failed; the header is the reason.
inline constexpr std::uint8_t kGoodbyeChannel = 255;

inline constexpr bool is_known(std::uint8_t channel) {
  return channel < kNumChannels || channel == kCloseChannel || channel == kGoodbyeChannel;
}

}  // namespace smp::tcp
