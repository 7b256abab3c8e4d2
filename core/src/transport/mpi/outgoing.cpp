#include "outgoing.h"

#include <smp/error.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "frame.h"
#include "session.h"

namespace smp::mpi {

Outgoing::Outgoing(MPI_Comm comm, int size) : comm_(comm), open_(size), posted_(size, 0) {}

void Outgoing::post(int destination, Message message) {
  Prefix prefix;
  prefix.channel = message.channel;
  prefix.header_bytes = message.header.size();
  if (message.payload.defined()) {
    prefix.payload_bytes = static_cast<std::uint64_t>(message.payload.numel());
    prefix.place = prefix.payload_bytes <= kInlineBytes ? PayloadPlace::kInline : PayloadPlace::kPieces;
  }
  const char* payload = prefix.payload_bytes > 0 ? static_cast<const char*>(message.payload.const_data_ptr()) : nullptr;
  const bool is_inline = prefix.place == PayloadPlace::kInline;
  const std::size_t head_bytes = sizeof(prefix) + prefix.header_bytes + (is_inline ? prefix.payload_bytes : 0);

  Send send;
  send.head = std::make_unique_for_overwrite<char[]>(head_bytes);
  std::memcpy(send.head.get(), &prefix, sizeof(prefix));
  std::memcpy(send.head.get() + sizeof(prefix), message.header.data(), prefix.header_bytes);
  if (is_inline && payload != nullptr) {
    std::memcpy(send.head.get() + sizeof(prefix) + prefix.header_bytes, payload, prefix.payload_bytes);
  }

  // In the table before MPI knows its buffers: they must live even if a later call fails.
  std::deque<Send>& queue = open_[destination];
  queue.push_back(std::move(send));
  ++num_open_;
  ++posted_[destination];
  Send& open = queue.back();
  const auto start = [&](const char* bytes, std::size_t size_bytes, int tag) {
    open.requests.push_back(MPI_REQUEST_NULL);
    check(MPI_Isend(bytes, static_cast<int>(size_bytes), MPI_BYTE, destination, tag, comm_, &open.requests.back()),
          "MPI_Isend");
  };
  start(open.head.get(), head_bytes, kHeadTag);
  if (prefix.place == PayloadPlace::kPieces) {
    open.payload = std::move(message.payload);
    for (std::size_t begin = 0; begin < prefix.payload_bytes; begin += kPieceBytes) {
      start(payload + begin, std::min(kPieceBytes, prefix.payload_bytes - begin), kPieceTag);
    }
  } else if (queue.size() == 1) {
    // A small message has mostly left by now.
    int done = 0;
    check(MPI_Test(open.requests.data(), &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done != 0) {
      queue.pop_front();
      --num_open_;
    }
  }
}

bool Outgoing::advance() {
  if (num_open_ == 0) {
    return false;
  }
  bool moved = false;
  for (std::deque<Send>& queue : open_) {
    while (!queue.empty()) {
      std::vector<MPI_Request>& requests = queue.front().requests;
      int done = 0;
      check(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE), "MPI_Testall");
      if (done == 0) {
        break;
      }
      queue.pop_front();
      --num_open_;
      moved = true;
    }
  }
  return moved;
}

bool Outgoing::have_left(const std::vector<std::uint64_t>& counts) const {
  for (std::size_t peer = 0; peer < open_.size(); ++peer) {
    if (posted_[peer] - open_[peer].size() < counts[peer]) {
      return false;
    }
  }
  return true;
}

}  // namespace smp::mpi
