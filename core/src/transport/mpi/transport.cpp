// Ranks as processes of an MPI job. Sends go out in the calling thread; a progress thread completes them and receives.

#include <smp/transport.h>

#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <smp/error.h>
#include <sys/prctl.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

#include "../ownership.h"
#include "entry.h"
#include "frame.h"
#include "incoming.h"
#include "outgoing.h"
#include "pacing.h"
#include "session.h"

namespace smp::mpi {
namespace {

using Clock = std::chrono::steady_clock;

// How long a rank that gives up tries to get its goodbyes out.
constexpr std::chrono::milliseconds kGoodbyeTime{50};

/// The lock over all calls of MPI. The progress thread takes it in a tight loop, and would starve a sender that has
/// to be woken first: so senders spin, and the progress thread lets them pass.
class CallLock {
 public:
  void lock() {
    num_waiting_.fetch_add(1);
    while (!mutex_.try_lock()) {
      sched_yield();
    }
    num_waiting_.fetch_sub(1);
  }
  void unlock() { mutex_.unlock(); }

  /// For the progress thread.
  std::unique_lock<std::mutex> lock_politely() {
    while (num_waiting_.load() > 0) {
      sched_yield();
    }
    return std::unique_lock(mutex_);
  }

 private:
  std::mutex mutex_;
  std::atomic<int> num_waiting_{0};
};

class MpiTransport final : public Transport {
 public:
  MpiTransport(MPI_Comm comm, int rank, int size, bool crowded)
      : Transport(rank, size),
        comm_(comm),
        crowded_(crowded),
        outgoing_(std::make_unique<Outgoing>(comm, size)),
        incoming_(std::make_unique<Incoming>(comm, size)) {
    thread_ = start_without_signals([this] { run(); });
    thread_id_ = thread_.get_id();
  }

  ~MpiTransport() override { abandon(); }

  void send(int destination, Message message) override {
    check_sendable(destination, message);
    try {
      const std::lock_guard lock(calls_);
      // Closed since the check above: then nobody would complete this send.
      if (closing_ || has_failed()) {
        throw_failure("rank {} cannot send to rank {}: its transport is closed", rank(), destination);
      }
      outgoing_->post(destination, std::move(message));
    } catch (const FailureError& error) {
      fail(error.what());
      throw;
    }
    stir();
  }

  void set_busy(bool busy) override {
    if (busy_.exchange(busy) && !busy) {
      stirred_ = true;
      nudge();
    }
  }

  void flush() override {
    const auto started = Clock::now();
    std::vector<std::uint64_t> counts;
    while (true) {
      try {
        const std::lock_guard lock(calls_);
        if (has_failed()) {
          throw_failure("rank {} cannot flush: {}", rank(), failure());
        }
        if (counts.empty()) {
          counts = outgoing_->posted();
        }
        outgoing_->advance();
        if (outgoing_->have_left(counts)) {
          return;
        }
      } catch (const FailureError& error) {
        fail(error.what());
        throw;
      }
      if (Clock::now() - started < kPollHardFor) {
        sched_yield();
      } else {
        std::this_thread::sleep_for(kShortestDoze);
      }
    }
  }

  void close() override {
    if (has_failed() || !in_owner_process()) {
      stop(true);
    } else {
      stop(false);
    }
  }

  void abandon() override { stop(true); }

 protected:
  void wake() override {
    woken_ = true;
    nudge();
  }

 private:
  void stop(bool abandoned) {
    if (!in_owner_process()) {
      return;
    }
    if (abandoned) {
      abandoned_ = true;
      fail(formatted("rank {} has abandoned the job", rank()));
    } else {
      {
        const std::lock_guard lock(calls_);
        closing_ = true;
      }
      fail(formatted("the transport of rank {} is closed", rank()));
    }
    nudge();
    // A receiver may abandon: then the destructor joins.
    if (std::this_thread::get_id() == thread_id_) {
      return;
    }
    const std::lock_guard lock(join_mutex_);
    if (!thread_.joinable()) {
      return;
    }
    thread_.join();
    if (ended_cleanly_) {
      MPI_Comm_free(&comm_);
    } else {
      // MPI may still read and write these buffers.
      const std::lock_guard calls(calls_);
      static_cast<void>(outgoing_.release());
      static_cast<void>(incoming_.release());
    }
    leave(ended_cleanly_);
  }

  void run() {
    pthread_setname_np(pthread_self(), "smp-mpi");
    // Sleeps here are as short as the 50 µs that the kernel may add by default.
    prctl(PR_SET_TIMERSLACK, 1000UL);
    last_moved_ = Clock::now();
    try {
      while (!abandoned_ && !(has_failed() && !closing_) && !ended_cleanly_) {
        if (look() || stirred_.exchange(false)) {
          last_moved_ = Clock::now();
        }
        if (woken_.exchange(false)) {
          deliver_pending();
        }
        if (closing_) {
          ended_cleanly_ = all_have_closed();
        }
        pause();
      }
    } catch (const FailureError& error) {
      fail(error.what());
    }
    if (!ended_cleanly_) {
      say_goodbye();
    }
  }

  bool look() {
    bool moved = false;
    {
      const auto lock = calls_.lock_politely();
      moved = incoming_->advance(arrived_);
      moved = outgoing_->advance() || moved;
      transferring_ = !incoming_->idle() || !outgoing_->idle();
    }
    for (Arrived& arrived : arrived_) {
      if (arrived.message.channel == kGoodbyeChannel) {
        fail(arrived.message.header);
        abandoned_ = true;
        break;
      }
      deliver(arrived.source, std::move(arrived.message));
    }
    arrived_.clear();
    return moved;
  }

  // Every rank enters the barrier when all it sent has left. So when it ends nothing more can come, except what
  // is half received.
  bool all_have_closed() {
    const auto lock = calls_.lock_politely();
    if (!outgoing_->idle()) {
      return false;
    }
    if (!barrier_started_) {
      check(MPI_Ibarrier(comm_, &barrier_), "MPI_Ibarrier");
      barrier_started_ = true;
    }
    int done = 0;
    check(MPI_Test(&barrier_, &done, MPI_STATUS_IGNORE), "MPI_Test");
    return done != 0 && incoming_->idle();
  }

  void say_goodbye() {
    Message goodbye;
    goodbye.channel = kGoodbyeChannel;
    goodbye.header = failure();
    try {
      const auto until = Clock::now() + kGoodbyeTime;
      {
        const std::lock_guard lock(calls_);
        for (int peer = 0; peer < size(); ++peer) {
          if (peer != rank()) {
            outgoing_->post(peer, goodbye);
          }
        }
      }
      bool gone = false;
      while (!gone && Clock::now() < until) {
        const std::lock_guard lock(calls_);
        outgoing_->advance();
        gone = outgoing_->idle();
      }
    } catch (const FailureError&) {
      // MPI does not work any more: the launcher will notice.
    }
  }

  void pause() {
    Pace pace;
    pace.busy = busy_;
    pace.crowded = crowded_;
    pace.transferring = transferring_;
    pace.quiet_for = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - last_moved_);
    const auto time = pause_before_look(pace);
    if (time.count() == 0) {
      sched_yield();
      return;
    }
    std::unique_lock lock(sleep_mutex_);
    dozing_ = !pace.busy && time >= kShortestDoze;
    sleep_ended_.wait_for(lock, time, [&] { return nudged_; });
    nudged_ = false;
    dozing_ = false;
  }

  // After a long quiet time an answer to what is sent now is likely: look hard again.
  void stir() {
    stirred_ = true;
    if (dozing_) {
      nudge();
    }
  }

  void nudge() {
    {
      const std::lock_guard lock(sleep_mutex_);
      nudged_ = true;
    }
    sleep_ended_.notify_one();
  }

  MPI_Comm comm_;
  const bool crowded_;
  CallLock calls_;
  std::unique_ptr<Outgoing> outgoing_;
  std::unique_ptr<Incoming> incoming_;

  std::atomic<bool> busy_{false};
  std::atomic<bool> stirred_{false};
  std::atomic<bool> woken_{false};
  std::atomic<bool> closing_{false};
  std::atomic<bool> abandoned_{false};

  std::mutex sleep_mutex_;
  std::condition_variable sleep_ended_;
  bool nudged_ = false;
  std::atomic<bool> dozing_{false};

  // Of the progress thread.
  std::vector<Arrived> arrived_;
  Clock::time_point last_moved_;
  bool transferring_ = false;
  MPI_Request barrier_ = MPI_REQUEST_NULL;
  bool barrier_started_ = false;
  bool ended_cleanly_ = false;

  std::mutex join_mutex_;
  std::thread thread_;
  std::thread::id thread_id_;
};

std::shared_ptr<Transport> make_transport() {
  MPI_Comm comm = MPI_COMM_NULL;
  check(MPI_Comm_dup(MPI_COMM_WORLD, &comm), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  int rank = 0;
  int size = 0;
  check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  const bool crowded = is_crowded(comm);
  return destroyed_in_owner(std::make_unique<MpiTransport>(comm, rank, size, crowded));
}

}  // namespace
}  // namespace smp::mpi

void smp_make_mpi_transport(std::shared_ptr<smp::Transport>& transport) {
  smp::mpi::enter();
  try {
    transport = smp::mpi::make_transport();
  } catch (...) {
    smp::mpi::leave(false);
    throw;
  }
}
