// Ranks as processes that are connected by TCP, each with each. A send writes in the calling thread what the connection
// takes at once; a thread that sleeps in epoll writes the rest, and receives.

#include <smp/transport.h>

#include <pthread.h>
#include <smp/error.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

#include "../ownership.h"
#include "frame.h"
#include "incoming.h"
#include "outgoing.h"
#include "rendezvous.h"
#include "socket.h"

namespace smp::tcp {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// What send() writes itself: a thread that computes is not kept for longer.
constexpr std::size_t kEagerBytes = 128 << 10;
// What one connection moves before the others have their turn.
constexpr std::size_t kTurnBytes = 1 << 20;
// How long a rank that gives up tries to get its goodbyes out.
constexpr milliseconds kGoodbyeTime{50};

class TcpTransport final : public Transport {
 public:
  TcpTransport(int rank, std::vector<Socket> sockets)
      : Transport(rank, static_cast<int>(sockets.size())),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!epoll_ || !wake_) {
      throw_errno("epoll_create1 or eventfd");
    }
    watch(EPOLL_CTL_ADD, wake_, EPOLLIN, rank);
    for (int peer = 0; peer < size(); ++peer) {
      peers_.push_back(std::make_unique<Peer>());
      peers_.back()->socket = std::move(sockets[peer]);
      if (peer != rank) {
        watch(EPOLL_CTL_ADD, peers_.back()->socket, EPOLLIN, peer);
      }
    }
    thread_ = start_without_signals([this] { run(); });
    thread_id_ = thread_.get_id();
  }

  ~TcpTransport() override { abandon(); }

  void send(int destination, Message message) override {
    check_sendable(destination, message);
    Peer& peer = *peers_[destination];
    const std::lock_guard lock(peer.mutex);
    // Closed since the check above: then this message would come after the last one.
    if (closing_ || has_failed()) {
      throw_failure("rank {} cannot send to rank {}: its transport is closed", rank(), destination);
    }
    const bool was_empty = peer.outgoing.empty();
    peer.outgoing.push(std::move(message));
    if (was_empty) {
      write(destination, kEagerBytes);
    }
  }

  void set_busy(bool) override {}  // a thread that sleeps in epoll robs nobody

  void flush() override {
    std::vector<std::uint64_t> counts;
    for (const auto& peer : peers_) {
      const std::lock_guard lock(peer->mutex);
      counts.push_back(peer->outgoing.pushed());
    }
    std::unique_lock lock(flush_mutex_);
    ++num_flushing_;
    progressed_.wait(lock, [&] { return has_failed() || have_left(counts); });
    --num_flushing_;
    if (has_failed()) {
      throw_failure("rank {} cannot flush: {}", rank(), failure());
    }
  }

  void close() override { stop(has_failed()); }

  void abandon() override { stop(true); }

 protected:
  void wake() override {
    const std::uint64_t one = 1;
    static_cast<void>(::write(wake_.get(), &one, sizeof(one)));
  }

 private:
  struct Peer {
    Socket socket;
    std::mutex mutex;  // of `outgoing`, `writing`, `broken`
    Outgoing outgoing;
    bool writing = false;  // the thread writes as soon as the connection takes more
    bool broken = false;   // the other side does not read any more; why, reading tells

    // Of the thread.
    Incoming incoming;
    bool said_last = false;
    bool gone = false;
  };

  void watch(int operation, const Socket& socket, std::uint32_t what, int peer) {
    epoll_event event{};
    event.events = what;
    event.data.u32 = static_cast<std::uint32_t>(peer);
    if (epoll_ctl(epoll_.get(), operation, socket.get(), &event) != 0) {
      throw_errno("epoll_ctl");
    }
  }

  // The caller holds the peer's mutex.
  void write(int destination, std::size_t budget) {
    Peer& peer = *peers_[destination];
    if (!peer.broken) {
      try {
        peer.outgoing.write(peer.socket.get(), budget);
      } catch (const FailureError&) {
        peer.broken = true;
      }
    }
    if (peer.broken) {
      peer.outgoing.clear();
    }
    const bool more = !peer.outgoing.empty();
    if (more != peer.writing) {
      peer.writing = more;
      watch(EPOLL_CTL_MOD, peer.socket, more ? EPOLLIN | EPOLLOUT : EPOLLIN, destination);
    }
  }

  bool have_left(const std::vector<std::uint64_t>& counts) {
    for (std::size_t peer = 0; peer < counts.size(); ++peer) {
      const std::lock_guard lock(peers_[peer]->mutex);
      if (peers_[peer]->outgoing.left() < counts[peer]) {
        return false;
      }
    }
    return true;
  }

  void stop(bool abandoned) {
    if (!in_owner_process()) {
      return;
    }
    if (abandoned) {
      abandoned_ = true;
      fail(formatted("rank {} has abandoned the job", rank()));
    } else if (!closing_.exchange(true)) {
      push_to_all(kCloseChannel, "");
      fail(formatted("the transport of rank {} is closed", rank()));
    }
    wake();
    tell_flushers();
    // A receiver may abandon: then the destructor joins.
    if (std::this_thread::get_id() == thread_id_) {
      return;
    }
    const std::lock_guard lock(join_mutex_);
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  void push_to_all(std::uint8_t channel, const std::string& header) {
    for (int destination = 0; destination < size(); ++destination) {
      if (destination != rank()) {
        Peer& peer = *peers_[destination];
        const std::lock_guard lock(peer.mutex);
        peer.outgoing.push({channel, header, {}});
        write(destination, kEagerBytes);
      }
    }
  }

  void run() {
    pthread_setname_np(pthread_self(), "smp-tcp");
    try {
      while (!abandoned_ && !(has_failed() && !closing_) && !has_closed()) {
        turn(-1);
      }
    } catch (const FailureError& error) {
      fail(error.what());
    }
    if (abandoned_ || !closing_) {
      say_goodbye();
    }
    tell_flushers();
    for (const auto& peer : peers_) {
      if (peer->socket) {
        // Not close(): a forked process may have the descriptor too.
        shutdown(peer->socket.get(), SHUT_RDWR);
      }
    }
  }

  /// Waits for something to do, for at most so many milliseconds (-1: for ever), and does it.
  void turn(int timeout_ms) {
    std::array<epoll_event, 64> events;
    const int count = epoll_wait(epoll_.get(), events.data(), events.size(), timeout_ms);
    if (count < 0 && errno != EINTR) {
      throw_errno("epoll_wait");
    }
    for (int i = 0; i < count; ++i) {
      const int peer = static_cast<int>(events[i].data.u32);
      if (peer == rank()) {
        std::uint64_t ignored = 0;
        static_cast<void>(::read(wake_.get(), &ignored, sizeof(ignored)));
        deliver_pending();
        continue;
      }
      if ((events[i].events & EPOLLOUT) != 0) {
        {
          const std::lock_guard lock(peers_[peer]->mutex);
          write(peer, kTurnBytes);
        }
        tell_flushers();
      }
      if ((events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
        read(peer);
      }
    }
  }

  void read(int source) {
    Peer& peer = *peers_[source];
    bool open = false;
    std::string problem;
    try {
      open = peer.incoming.read(peer.socket.get(), kTurnBytes, [&](Message message) {
        if (message.channel == kCloseChannel) {
          peer.said_last = true;
        } else if (message.channel == kGoodbyeChannel) {
          fail(message.header);
          abandoned_ = true;
        } else {
          deliver(source, std::move(message));
        }
      });
    } catch (const FailureError& error) {
      problem = error.what();
    }
    if (!open) {
      peer.gone = true;
      watch(EPOLL_CTL_DEL, peer.socket, 0, source);
      if (!problem.empty()) {
        fail(formatted("the connection to rank {} broke: {}", source, problem));
      } else if (!peer.said_last) {
        fail(formatted("rank {} left without a word: its process was killed or has crashed", source));
      }
    }
  }

  // Every rank says that nothing more will come when all it sent has left. So when all have said it this is the end.
  bool has_closed() {
    return closing_ && std::all_of(peers_.begin(), peers_.end(), [&](const std::unique_ptr<Peer>& peer) {
             const std::lock_guard lock(peer->mutex);
             return !peer->socket || peer->gone || (peer->outgoing.empty() && peer->said_last);
           });
  }

  // Then reads until the others hang up: closing a connection with unread bytes would drop what is still on its way.
  void say_goodbye() {
    try {
      push_to_all(kGoodbyeChannel, failure());
      for (const auto until = Clock::now() + kGoodbyeTime; Clock::now() < until;) {
        bool done = true;
        for (const auto& peer : peers_) {
          const std::lock_guard lock(peer->mutex);
          if (peer->socket && peer->outgoing.empty()) {
            shutdown(peer->socket.get(), SHUT_WR);
          }
          done = done && (!peer->socket || peer->gone || peer->broken);
        }
        if (done) {
          break;
        }
        turn(1);
      }
    } catch (const FailureError&) {
      // Then the others see that this rank has gone.
    }
  }

  void tell_flushers() {
    {
      const std::lock_guard lock(flush_mutex_);
      if (num_flushing_ == 0) {
        return;
      }
    }
    progressed_.notify_all();
  }

  const Socket epoll_;
  const Socket wake_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; the own one has no socket

  std::atomic<bool> closing_{false};
  std::atomic<bool> abandoned_{false};

  std::mutex flush_mutex_;
  std::condition_variable progressed_;
  int num_flushing_ = 0;

  std::mutex join_mutex_;
  std::thread thread_;
  std::thread::id thread_id_;
};

}  // namespace
}  // namespace smp::tcp

namespace smp {

std::shared_ptr<Transport> make_tcp_transport(int rank, int size, const Exchange& exchange,
                                              const std::function<void()>& check_interrupt,
                                              std::chrono::milliseconds patience) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw_usage("rank {} of {}: ranks are 0 to size - 1", rank, size);
  }
  auto sockets = tcp::connect_ranks(
      rank, size, exchange, patience, check_interrupt ? check_interrupt : [] {});
  return destroyed_in_owner(std::make_unique<tcp::TcpTransport>(rank, std::move(sockets)));
}

}  // namespace smp
