#include "outgoing.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "socket.h"

namespace smp::tcp {
namespace {

// Small messages leave together, in one call.
constexpr std::size_t kLargestBatch = 16;

}  // namespace

void Outgoing::push(Message message) {
  Prefix prefix;
  prefix.channel = message.channel;
  prefix.header_bytes = message.header.size();
  prefix.has_payload = message.payload.defined();
  if (prefix.has_payload) {
    prefix.payload_bytes = static_cast<std::uint64_t>(message.payload.numel());
  }
  queue_.push_back({prefix, std::move(message)});
}

void Outgoing::write(int descriptor, std::size_t budget) {
  std::size_t gone = 0;
  while (!queue_.empty() && gone < budget) {
    std::array<iovec, 3 * kLargestBatch> parts;
    std::size_t num_parts = 0;
    std::size_t skip = written_;
    std::size_t room = budget - gone;
    const auto add = [&](const void* bytes, std::size_t size_bytes) {
      const std::size_t skipped = std::min(skip, size_bytes);
      skip -= skipped;
      const std::size_t count = std::min(size_bytes - skipped, room);
      if (count > 0) {
        parts[num_parts++] = {const_cast<char*>(static_cast<const char*>(bytes)) + skipped, count};
        room -= count;
      }
    };
    for (std::size_t i = 0; i < std::min(queue_.size(), kLargestBatch); ++i) {
      const Entry& entry = queue_[i];
      add(&entry.prefix, sizeof(Prefix));
      add(entry.message.header.data(), entry.prefix.header_bytes);
      if (entry.prefix.payload_bytes > 0) {
        add(entry.message.payload.const_data_ptr(), entry.prefix.payload_bytes);
      }
    }
    msghdr what{};
    what.msg_iov = parts.data();
    what.msg_iovlen = num_parts;
    const ssize_t count = sendmsg(descriptor, &what, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return;
      }
      if (errno == EINTR) {
        continue;
      }
      throw_errno("sendmsg");
    }
    gone += static_cast<std::size_t>(count);
    written_ += static_cast<std::size_t>(count);
    while (!queue_.empty()) {
      const Prefix& first = queue_.front().prefix;
      const std::size_t size_bytes = sizeof(Prefix) + first.header_bytes + first.payload_bytes;
      if (written_ < size_bytes) {
        break;
      }
      written_ -= size_bytes;
      queue_.pop_front();
      ++left_;
    }
  }
}

}  // namespace smp::tcp
