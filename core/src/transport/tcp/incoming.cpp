#include "incoming.h"

#include <smp/error.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "../../bytes.h"
#include "socket.h"

namespace smp::tcp {
namespace {

constexpr std::size_t kBufferBytes = 64 << 10;

}  // namespace

Incoming::Incoming() : buffer_(std::make_unique_for_overwrite<char[]>(kBufferBytes)) {
  expect(Part::kPrefix, &prefix_, sizeof(prefix_));
}

bool Incoming::read(int descriptor, std::size_t budget, const Sink& sink) {
  std::size_t received = 0;
  while (received < budget) {
    // What is missing goes straight to its place, what follows it into the buffer.
    std::array<iovec, 2> parts{{{target_, missing_}, {buffer_.get(), kBufferBytes}}};
    const ssize_t count = readv(descriptor, parts.data(), parts.size());
    if (count == 0 || (count < 0 && errno == ECONNRESET)) {
      return false;
    }
    if (count < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return true;
      }
      if (errno == EINTR) {
        continue;
      }
      throw_errno("readv");
    }
    received += static_cast<std::size_t>(count);
    const std::size_t direct = std::min(static_cast<std::size_t>(count), missing_);
    target_ += direct;
    missing_ -= direct;
    end_part(sink);
    consume(static_cast<std::size_t>(count) - direct, sink);
  }
  return true;
}

// Takes `count` bytes of the buffer.
void Incoming::consume(std::size_t count, const Sink& sink) {
  const char* bytes = buffer_.get();
  while (count > 0) {
    const std::size_t taken = std::min(count, missing_);
    std::memcpy(target_, bytes, taken);
    bytes += taken;
    count -= taken;
    target_ += taken;
    missing_ -= taken;
    end_part(sink);
  }
}

void Incoming::expect(Part part, void* bytes, std::size_t size_bytes) {
  part_ = part;
  target_ = static_cast<char*>(bytes);
  missing_ = size_bytes;
}

// Goes on to the next part that has bytes, when this one has all of its own.
void Incoming::end_part(const Sink& sink) {
  while (missing_ == 0) {
    switch (part_) {
      case Part::kPrefix:
        if (!is_known(prefix_.channel) || prefix_.header_bytes > kLargestHeaderBytes) {
          throw_failure("the bytes that came are no message");
        }
        message_.channel = prefix_.channel;
        message_.header.resize(prefix_.header_bytes);
        expect(Part::kHeader, message_.header.data(), prefix_.header_bytes);
        break;
      case Part::kHeader:
        if (prefix_.has_payload) {
          message_.payload = new_bytes(prefix_.payload_bytes);
        }
        expect(Part::kPayload, prefix_.payload_bytes > 0 ? message_.payload.data_ptr() : nullptr,
               prefix_.payload_bytes);
        break;
      case Part::kPayload:
        sink(std::exchange(message_, {}));
        expect(Part::kPrefix, &prefix_, sizeof(prefix_));
        break;
    }
  }
}

}  // namespace smp::tcp
