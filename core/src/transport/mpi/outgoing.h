#pragma once

#include <mpi.h>
#include <smp/transport.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace smp::mpi {

/// The sending half of the transport: messages on their way out. The caller holds the lock over MPI.
class Outgoing {
 public:
  Outgoing(MPI_Comm comm, int size);

  /// Starts a message. Its payload is held until it has left. Throws FailureError when MPI does.
  void post(int destination, Message message);
  /// Lets go of what has left; returns whether anything has.
  bool advance();

  bool idle() const { return num_open_ == 0; }
  /// How many messages were posted to each rank so far, and how many of them have left (in order).
  const std::vector<std::uint64_t>& posted() const { return posted_; }
  bool have_left(const std::vector<std::uint64_t>& counts) const;

 private:
  struct Send {
    std::unique_ptr<char[]> head;
    at::Tensor payload;
    std::vector<MPI_Request> requests;
  };

  const MPI_Comm comm_;
  std::vector<std::deque<Send>> open_;
  std::size_t num_open_ = 0;
  std::vector<std::uint64_t> posted_;
};

}  // namespace smp::mpi
