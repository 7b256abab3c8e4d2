#include "incoming.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "../../bytes.h"
#include "frame.h"
#include "session.h"

namespace smp::mpi {
namespace {

// Bounds the time that one look holds the lock.
constexpr int kHeadsPerLook = 64;

}  // namespace

Incoming::Incoming(MPI_Comm comm, int size) : comm_(comm), sources_(size) {}

bool Incoming::advance(std::vector<Arrived>& arrived) {
  bool moved = match_heads();
  if (num_open_ > 0) {
    for (int source = 0; source < static_cast<int>(sources_.size()); ++source) {
      moved = advance(source, arrived) || moved;
    }
  }
  return moved;
}

bool Incoming::match_heads() {
  for (int count = 0; count < kHeadsPerLook; ++count) {
    int found = 0;
    MPI_Message match = MPI_MESSAGE_NULL;
    MPI_Status status;
    check(MPI_Improbe(MPI_ANY_SOURCE, kHeadTag, comm_, &found, &match, &status), "MPI_Improbe");
    if (found == 0) {
      return count > 0;
    }
    int head_bytes = 0;
    check(MPI_Get_count(&status, MPI_BYTE, &head_bytes), "MPI_Get_count");
    std::deque<Receive>& open = sources_[status.MPI_SOURCE].open;
    Receive& receive = open.emplace_back();
    ++num_open_;
    receive.head = std::make_unique_for_overwrite<char[]>(head_bytes);
    check(MPI_Imrecv(receive.head.get(), head_bytes, MPI_BYTE, &match, &receive.head_request), "MPI_Imrecv");
  }
  return true;
}

bool Incoming::advance(int source, std::vector<Arrived>& arrived) {
  auto& [open, num_with_head] = sources_[source];
  bool moved = false;
  for (; num_with_head < open.size(); ++num_with_head) {
    Receive& receive = open[num_with_head];
    int done = 0;
    check(MPI_Test(&receive.head_request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done == 0) {
      break;
    }
    read_head(source, receive);
    moved = true;
  }
  while (num_with_head > 0) {
    std::vector<MPI_Request>& pieces = open.front().pieces;
    int done = 0;
    check(MPI_Testall(static_cast<int>(pieces.size()), pieces.data(), &done, MPI_STATUSES_IGNORE), "MPI_Testall");
    if (done == 0) {
      break;
    }
    arrived.push_back({source, std::move(open.front().message)});
    open.pop_front();
    --num_with_head;
    --num_open_;
    moved = true;
  }
  return moved;
}

void Incoming::read_head(int source, Receive& receive) {
  Prefix prefix;
  const char* bytes = receive.head.get();
  std::memcpy(&prefix, bytes, sizeof(prefix));
  bytes += sizeof(prefix);
  Message& message = receive.message;
  message.channel = prefix.channel;
  message.header.assign(bytes, prefix.header_bytes);
  bytes += prefix.header_bytes;
  if (prefix.place != PayloadPlace::kNone) {
    message.payload = new_bytes(prefix.payload_bytes);
  }
  if (prefix.place == PayloadPlace::kInline && prefix.payload_bytes > 0) {
    std::memcpy(message.payload.data_ptr(), bytes, prefix.payload_bytes);
  }
  if (prefix.place == PayloadPlace::kPieces) {
    auto* payload = static_cast<char*>(message.payload.data_ptr());
    for (std::size_t begin = 0; begin < prefix.payload_bytes; begin += kPieceBytes) {
      const std::size_t piece_bytes = std::min<std::size_t>(kPieceBytes, prefix.payload_bytes - begin);
      receive.pieces.push_back(MPI_REQUEST_NULL);
      check(MPI_Irecv(payload + begin, static_cast<int>(piece_bytes), MPI_BYTE, source, kPieceTag, comm_,
                      &receive.pieces.back()),
            "MPI_Irecv");
    }
  }
  receive.head.reset();
}

}  // namespace smp::mpi
