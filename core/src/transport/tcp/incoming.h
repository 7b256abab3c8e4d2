#pragma once

#include <smp/transport.h>

#include <cstddef>
#include <functional>
#include <memory>

#include "frame.h"

namespace smp::tcp {

/// The receiving half of a connection: puts messages together from the bytes that come.
class Incoming {
 public:
  /// Takes one message; its channel may be kCloseChannel or kGoodbyeChannel.
  using Sink = std::function<void(Message)>;

  Incoming();

  /// Reads from the non-blocking `descriptor` until nothing is there or about `budget` bytes were read, and passes on
  /// each message that is complete. False when the other side has closed the connection. Throws FailureError when the
  /// connection is broken or what comes is no message.
  bool read(int descriptor, std::size_t budget, const Sink& sink);

 private:
  enum class Part { kPrefix, kHeader, kPayload };

  void expect(Part part, void* bytes, std::size_t size_bytes);
  void consume(std::size_t count, const Sink& sink);
  void end_part(const Sink& sink);

  const std::unique_ptr<char[]> buffer_;
  Prefix prefix_;
  Message message_;
  // The part that is being filled, and what it lacks.
  Part part_ = Part::kPrefix;
  char* target_ = nullptr;
  std::size_t missing_ = 0;
};

}  // namespace smp::tcp
