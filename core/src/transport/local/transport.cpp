// Ranks as threads of one process: a mailbox and a delivering thread for each.

#include <smp/error.h>
#include <smp/transport.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "../../bytes.h"
#include "../ownership.h"

namespace smp {
namespace {

struct Letter {
  int source = 0;
  Message message;
  bool goodbye = false;  // the source has failed, for the reason in the header
};

struct Mailbox {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Letter> letters;
  bool closed = false;
  bool held = false;
  bool woken = false;
};

// Shared by the transports of one job, so that a mailbox outlives the transport that reads it.
using Mailboxes = std::vector<std::unique_ptr<Mailbox>>;

Message copy_of(Message message) {
  if (message.payload.defined()) {
    const std::size_t size_bytes = message.payload.numel();
    at::Tensor copy = new_bytes(size_bytes);
    if (size_bytes > 0) {
      std::memcpy(copy.data_ptr(), message.payload.const_data_ptr(), size_bytes);
    }
    message.payload = std::move(copy);
  }
  return message;
}

class LocalTransport final : public Transport {
 public:
  LocalTransport(int rank, std::shared_ptr<Mailboxes> mailboxes)
      : Transport(rank, static_cast<int>(mailboxes->size())), mailboxes_(std::move(mailboxes)) {
    thread_ = std::thread([this] { run(); });
    thread_id_ = thread_.get_id();
  }

  ~LocalTransport() override { stop(true); }

  void send(int destination, Message message) override {
    check_sendable(destination, message);
    Message copy = copy_of(std::move(message));
    Mailbox& mailbox = *(*mailboxes_)[destination];
    {
      const std::lock_guard lock(mailbox.mutex);
      if (mailbox.closed) {
        throw_failure("rank {} cannot send to rank {}, which has closed its transport", rank(), destination);
      }
      mailbox.letters.push_back({rank(), std::move(copy), false});
    }
    mailbox.changed.notify_all();
  }

  void set_busy(bool) override {}

  // A sent message is in the mailbox of its destination at once.
  void flush() override {
    if (has_failed()) {
      throw_failure("rank {} cannot flush: {}", rank(), failure());
    }
  }

  void close() override { stop(has_failed()); }

  void abandon() override { stop(true); }

  void hold(bool held) {
    {
      const std::lock_guard lock(mailbox().mutex);
      mailbox().held = held;
    }
    mailbox().changed.notify_all();
  }

 protected:
  void wake() override {
    {
      const std::lock_guard lock(mailbox().mutex);
      mailbox().woken = true;
    }
    mailbox().changed.notify_all();
  }

 private:
  Mailbox& mailbox() { return *(*mailboxes_)[rank()]; }

  void stop(bool abandoned) {
    if (!in_owner_process()) {
      return;
    }
    bool first = false;
    {
      const std::lock_guard lock(mailbox().mutex);
      first = !std::exchange(mailbox().closed, true);
    }
    mailbox().changed.notify_all();
    fail(abandoned ? formatted("rank {} has abandoned the job", rank())
                   : formatted("the transport of rank {} is closed", rank()));
    if (first && abandoned) {
      tell_others();
    }
    // A receiver may abandon: then the destructor joins.
    if (std::this_thread::get_id() == thread_id_) {
      return;
    }
    const std::lock_guard lock(join_mutex_);
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  void tell_others() {
    Message goodbye;
    goodbye.header = failure();
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) {
        continue;
      }
      Mailbox& other = *(*mailboxes_)[peer];
      {
        const std::lock_guard lock(other.mutex);
        if (other.closed) {
          continue;
        }
        other.letters.push_back({rank(), goodbye, true});
      }
      other.changed.notify_all();
    }
  }

  void run() {
    Mailbox& box = mailbox();
    std::unique_lock lock(box.mutex);
    while (!box.closed) {
      box.changed.wait(lock, [&] { return box.closed || box.woken || (!box.held && !box.letters.empty()); });
      if (box.closed) {
        break;
      }
      const bool woken = std::exchange(box.woken, false);
      Letter letter;
      const bool arrived = !box.held && !box.letters.empty();
      if (arrived) {
        letter = std::move(box.letters.front());
        box.letters.pop_front();
      }
      lock.unlock();
      if (woken) {
        deliver_pending();
      }
      if (letter.goodbye) {
        fail(letter.message.header);
      } else if (arrived) {
        deliver(letter.source, std::move(letter.message));
      }
      lock.lock();
      // stop() closes the mailbox before it fails the transport, so this is a failure of another kind.
      if (has_failed() && !box.closed) {
        lock.unlock();
        tell_others();
        return;
      }
    }
    box.letters.clear();
  }

  const std::shared_ptr<Mailboxes> mailboxes_;
  std::mutex join_mutex_;
  std::thread thread_;
  std::thread::id thread_id_;
};

}  // namespace

std::vector<std::shared_ptr<Transport>> make_local_transports(int size) {
  if (size < 1) {
    throw_usage("local transports for {} ranks: at least 1 is needed", size);
  }
  auto mailboxes = std::make_shared<Mailboxes>();
  mailboxes->reserve(size);
  for (int rank = 0; rank < size; ++rank) {
    mailboxes->push_back(std::make_unique<Mailbox>());
  }
  std::vector<std::shared_ptr<Transport>> transports;
  transports.reserve(size);
  for (int rank = 0; rank < size; ++rank) {
    transports.push_back(destroyed_in_owner(std::make_unique<LocalTransport>(rank, mailboxes)));
  }
  return transports;
}

void hold_local_delivery(Transport& transport, bool held) {
  auto* local = dynamic_cast<LocalTransport*>(&transport);
  if (local == nullptr) {
    throw_usage("the transport of rank {} is not a local one: only those can be held", transport.rank());
  }
  local->hold(held);
}

}  // namespace smp
