#pragma once

#include <ATen/core/Tensor.h>

#include <sys/types.h>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace smp {

/// Who a message is for. Each channel has its own receiver and its own order.
inline constexpr std::uint8_t kObjectChannel = 0;  ///< objects between user scripts (Communicator)
inline constexpr std::uint8_t kEngineChannel = 1;  ///< instructions and values of the pipeline
inline constexpr std::size_t kNumChannels = 4;
inline constexpr std::size_t kLargestHeaderBytes = 1 << 30;

/// What travels between two ranks.
struct Message {
  std::uint8_t channel = kObjectChannel;
  /// Any bytes; small (it is copied on its way).
  std::string header;
  /// Undefined, or a contiguous 1-D uint8 CPU tensor (0 bytes allowed). What arrives is defined exactly
  /// if what was sent was, and never shares memory with it.
  at::Tensor payload;
};

/// Framed messages between the ranks of one job: asynchronous sends, one receive callback for a channel, in
/// order for each ordered pair of ranks and channel. Every rank has one; all ranks make theirs together.
class Transport {
 public:
  /// Runs on the transport's thread: it must not block (a blocked receiver stops all traffic of its rank),
  /// but may send. If it throws, the transport fails.
  using Receiver = std::function<void(int source, Message message)>;
  /// Runs at most once, on the thread that noticed that no further message can come or go: after a failure, or
  /// in close() or abandon() here (in set_receiver(), when that is known already). Must not block; may
  /// call set_receiver().
  using FailureHandler = std::function<void(const std::string& reason)>;

  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport();

  virtual int rank() const;
  virtual int size() const;

  /// Queues `message` for `destination` and returns at once; callable from any thread. Holds the payload until
  /// it has left: its bytes must not change before that (flush() tells). Throws UsageError for a destination
  /// that is out of range or this rank, a channel that does not exist, a header above kLargestHeaderBytes or a payload
  /// of another kind; FailureError when this transport is closed or has failed.
  virtual void send(int destination, Message message) = 0;

  /// Sets who takes the messages of `channel`. Messages that came before are kept, and delivered first, in
  /// order. An empty receiver unsets: it blocks until a delivery that is running has ended, so that what
  /// the receiver uses can then be destroyed (called inside the receiver itself, it does not block).
  /// Throws UsageError for a channel that does not exist.
  void set_receiver(std::uint8_t channel, Receiver receiver, FailureHandler on_failure = {});

  /// A hint: true while this rank computes (look for messages gently), false while it waits for one (look hard).
  virtual void set_busy(bool busy) = 0;

  /// Blocks until all sends accepted so far have left this rank. Throws FailureError when the transport
  /// fails or is closed meanwhile. Not to be called by a receiver.
  virtual void flush() = 0;

  /// Ends the traffic of this rank: what was sent leaves first, messages that have not been delivered are dropped,
  /// the thread stops. Every rank closes; over MPI this waits for all of them, as MPI_Finalize does. After a
  /// failure it waits for nobody, like abandon(). Idempotent, throws nothing. Not to be called by a receiver.
  virtual void close() = 0;

  /// close() for a job that has failed: waits for nobody, tells the other ranks, whose transports then fail, and
  /// finalizes nothing, so that the launcher sees an abnormal end. What destroying an open transport does.
  /// Idempotent, throws nothing. Callable from any thread.
  virtual void abandon() = 0;

  /// False in a process forked from the one that made this transport: its thread and its connections
  /// belong to the parent, and here it must not be used. Destroying it there does nothing.
  bool in_owner_process() const;

 protected:
  Transport(int rank, int size);

  /// For the transport's thread: passes one message on, or keeps it until its channel has a receiver.
  void deliver(int source, Message message);
  /// For the transport's thread, after wake(): passes on what was kept for channels that have a receiver by now.
  void deliver_pending();
  /// Makes the transport's thread call deliver_pending() soon.
  virtual void wake() = 0;

  /// Records that the transport does not work any more (the first reason wins) and tells the failure handlers.
  void fail(const std::string& reason) noexcept;
  /// The reason given to fail(), empty while all is well.
  std::string failure() const;
  bool has_failed() const;
  /// Throws what send() throws, except for being closed.
  void check_sendable(int destination, const Message& message) const;

 private:
  struct Arrival {
    int source = 0;
    Message message;
  };
  struct Slot {
    std::shared_ptr<Receiver> receiver;
    FailureHandler on_failure;
    std::deque<Arrival> pending;
  };

  void drain(std::unique_lock<std::mutex>& lock, std::size_t channel);
  bool is_running(std::size_t channel) const;

  const int rank_;
  const int size_;
  const pid_t owner_pid_;
  mutable std::mutex receivers_mutex_;
  std::condition_variable callback_ended_;
  std::array<Slot, kNumChannels> slots_;
  std::size_t delivering_channel_ = kNumChannels;  // kNumChannels: none
  std::thread::id delivering_thread_;
  std::thread::id failing_thread_;
  std::atomic<bool> failed_{false};
  std::string failure_;
};

/// One transport for each of `size` ranks in one process, for tests and debugging: a thread delivers for each
/// rank, and payloads are copied when sent. Sending to a rank that has closed throws FailureError.
/// Throws UsageError unless size >= 1.
std::vector<std::shared_ptr<Transport>> make_local_transports(int size);

/// Fault injection on a local transport: while held, this rank takes no message, like a process that hangs.
/// Throws UsageError for a transport of another kind.
void hold_local_delivery(Transport& transport, bool held);

/// Tells all ranks `own` and gives what each of them told, by rank. Collective over them.
using Exchange = std::function<std::vector<std::string>(const std::string& own)>;

/// The transport over TCP, a connection between any two of `size` processes of which this is `rank`. Collective over
/// them, and blocking: `exchange` is called once, then the ranks connect within `patience`, while `check_interrupt` (if
/// any) is called many times a second. Throws UsageError unless 0 <= rank < size; FailureError when a rank cannot be
/// reached or does not come; what the two functions throw. close() waits for all ranks to close. A rank whose process
/// ends without close() fails the transports of all others.
std::shared_ptr<Transport> make_tcp_transport(int rank, int size, const Exchange& exchange,
                                              const std::function<void()>& check_interrupt = {},
                                              std::chrono::milliseconds patience = std::chrono::seconds(60));

/// The transport between the processes of an MPI job, on its own duplicate of MPI_COMM_WORLD. Collective over all
/// processes. Initialises MPI if nobody did, and then finalizes it in close(); never finalizes an MPI that others
/// (such as mpi4py) started. Throws FailureError when MPI does not work or this library was built without it.
std::shared_ptr<Transport> make_mpi_transport();

}  // namespace smp
