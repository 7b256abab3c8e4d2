#pragma once

#include <mpi.h>
#include <smp/transport.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

namespace smp::mpi {

/// A message that has come completely; its channel may be kGoodbyeChannel.
struct Arrived {
  int source = 0;
  Message message;
};

/// The receiving half of the transport: messages on their way in. The caller holds the lock over MPI.
class Incoming {
 public:
  Incoming(MPI_Comm comm, int size);

  /// Looks once: appends what is complete, in order for each source; returns whether anything moved.
  /// Throws FailureError when MPI does.
  bool advance(std::vector<Arrived>& arrived);

  bool idle() const { return num_open_ == 0; }

 private:
  struct Receive {
    std::unique_ptr<char[]> head;
    MPI_Request head_request = MPI_REQUEST_NULL;
    std::vector<MPI_Request> pieces;
    Message message;
  };
  struct Source {
    std::deque<Receive> open;
    /// So many of the first ones have their head, and their pieces on the way. Only a prefix: pieces are
    /// matched in order.
    std::size_t num_with_head = 0;
  };

  bool match_heads();
  bool advance(int source, std::vector<Arrived>& arrived);
  void read_head(int source, Receive& receive);

  const MPI_Comm comm_;
  std::vector<Source> sources_;
  std::size_t num_open_ = 0;
};

}  // namespace smp::mpi
