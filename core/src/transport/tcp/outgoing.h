#pragma once

#include <smp/transport.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "frame.h"

namespace smp::tcp {

/// The sending half of a connection: messages on their way out, in order. The caller serialises the calls.
class Outgoing {
 public:
  /// Appends a message; its payload is held until it has left.
  void push(Message message);

  /// Writes to the non-blocking `descriptor` until all has left, it takes no more, or about `budget` bytes are gone.
  /// Throws FailureError when the connection is broken.
  void write(int descriptor, std::size_t budget);

  bool empty() const { return queue_.empty(); }
  /// How many messages were pushed so far, and how many of them have left.
  std::uint64_t pushed() const { return left_ + queue_.size(); }
  std::uint64_t left() const { return left_; }

  /// Forgets what has not left.
  void clear() { queue_.clear(); }

 private:
  struct Entry {
    Prefix prefix;
    Message message;
  };

  std::deque<Entry> queue_;
  std::size_t written_ = 0;  ///< bytes of the first message that have left
  std::uint64_t left_ = 0;
};

}  // namespace smp::tcp
