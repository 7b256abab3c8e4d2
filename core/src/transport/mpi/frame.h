#pragma once

#include <cstddef>
#include <cstdint>

namespace smp::mpi {

// A message is one MPI message (its head) and, for a payload too big for that, pieces that follow on another tag:
//
//   kHeadTag    Prefix | header | payload, if it is small
//   kPieceTag   payload bytes, at most kPieceBytes in each
//
// Both keep their order for each pair of ranks, so pieces belong to the first head that still lacks some.

inline constexpr int kHeadTag = 0;
inline constexpr int kPieceTag = 1;

/// Up to this size one copy is cheaper than a second message.
inline constexpr std::size_t kInlineBytes = 32 << 10;
/// Below the 2 GiB that an MPI count can name, and small: over shared memory a piece is copied in one call, and
/// others wait for that.
inline constexpr std::size_t kPieceBytes = 16 << 20;

/// On this channel a rank tells that it has failed; the header is the reason.
inline constexpr std::uint8_t kGoodbyeChannel = 255;

enum class PayloadPlace : std::uint8_t { kNone, kInline, kPieces };

/// Ranks of one job have one byte order, so the bytes travel as they are.
struct Prefix {
  std::uint64_t header_bytes = 0;
  std::uint64_t payload_bytes = 0;
  std::uint8_t channel = 0;
  PayloadPlace place = PayloadPlace::kNone;
};

}  // namespace smp::mpi
