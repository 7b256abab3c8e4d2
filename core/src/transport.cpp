#include <smp/transport.h>

#include <smp/error.h>

#include <unistd.h>
#include <exception>
#include <utility>

namespace smp {

Transport::Transport(int rank, int size) : rank_(rank), size_(size), owner_pid_(getpid()) {}

Transport::~Transport() = default;

int Transport::rank() const { return rank_; }

int Transport::size() const { return size_; }

bool Transport::in_owner_process() const { return getpid() == owner_pid_; }

bool Transport::has_failed() const { return failed_.load(std::memory_order_acquire); }

std::string Transport::failure() const {
  const std::lock_guard lock(receivers_mutex_);
  return failure_;
}

void Transport::check_sendable(int destination, const Message& message) const {
  if (destination < 0 || destination >= size_) {
    throw_usage("a message to rank {}: the ranks of this job are 0 to {}", destination, size_ - 1);
  }
  if (destination == rank_) {
    throw_usage("a message from rank {} to itself: a transport only reaches other ranks, hand it over directly", rank_);
  }
  if (message.channel >= kNumChannels) {
    throw_usage("a message on channel {}: channels are 0 to {}", message.channel, kNumChannels - 1);
  }
  if (message.header.size() > kLargestHeaderBytes) {
    throw_usage("a message header of {} bytes: at most {} are allowed, the payload is for the rest",
                message.header.size(), kLargestHeaderBytes);
  }
  const at::Tensor& payload = message.payload;
  if (payload.defined() && (payload.dim() != 1 || payload.scalar_type() != at::kByte || !payload.is_contiguous() ||
                            !payload.device().is_cpu())) {
    throw_usage("a payload of {} dimensions and type {} on {}: it must be a contiguous 1-D uint8 tensor on the CPU",
                payload.dim(), c10::toString(payload.scalar_type()), payload.device().str());
  }
  if (!in_owner_process()) {
    throw_usage("a message from process {}, forked from rank {}: only the process that made a transport can use it",
                getpid(), rank_);
  }
  if (has_failed()) {
    throw_failure("rank {} cannot send to rank {}: {}", rank_, destination, failure());
  }
}

bool Transport::is_running(std::size_t channel) const {
  const auto self = std::this_thread::get_id();
  return (delivering_channel_ == channel && delivering_thread_ != self) ||
         (failing_thread_ != std::thread::id() && failing_thread_ != self);
}

void Transport::set_receiver(std::uint8_t channel, Receiver receiver, FailureHandler on_failure) {
  if (channel >= kNumChannels) {
    throw_usage("a receiver for channel {}: channels are 0 to {}", channel, kNumChannels - 1);
  }
  std::shared_ptr<Receiver> next = receiver ? std::make_shared<Receiver>(std::move(receiver)) : nullptr;
  const bool set = next != nullptr;
  std::unique_lock lock(receivers_mutex_);
  Slot& slot = slots_[channel];
  // What was there before is destroyed after the lock is gone: its destructor may do anything.
  slot.receiver.swap(next);
  FailureHandler to_notify = has_failed() ? on_failure : nullptr;
  slot.on_failure.swap(on_failure);
  if (!set) {
    callback_ended_.wait(lock, [&] { return !is_running(channel); });
    return;
  }
  const std::string reason = failure_;
  lock.unlock();
  if (to_notify) {
    to_notify(reason);
  }
  wake();
}

void Transport::deliver(int source, Message message) {
  std::unique_lock lock(receivers_mutex_);
  const std::size_t channel = message.channel;
  slots_.at(channel).pending.push_back({source, std::move(message)});
  drain(lock, channel);
}

void Transport::deliver_pending() {
  std::unique_lock lock(receivers_mutex_);
  for (std::size_t channel = 0; channel < kNumChannels; ++channel) {
    drain(lock, channel);
  }
}

void Transport::drain(std::unique_lock<std::mutex>& lock, std::size_t channel) {
  Slot& slot = slots_[channel];
  while (slot.receiver && !slot.pending.empty() && !has_failed()) {
    // A copy of the pointer, since the receiver may replace itself.
    std::shared_ptr<Receiver> receiver = slot.receiver;
    Arrival arrival = std::move(slot.pending.front());
    slot.pending.pop_front();
    delivering_channel_ = channel;
    delivering_thread_ = std::this_thread::get_id();
    lock.unlock();
    try {
      (*receiver)(arrival.source, std::move(arrival.message));
    } catch (const std::exception& error) {
      fail(formatted("the receiver of channel {} on rank {} failed on a message from rank {}: {}", channel, rank_,
                     arrival.source, error.what()));
    } catch (...) {
      fail(formatted("the receiver of channel {} on rank {} failed on a message from rank {}", channel, rank_,
                     arrival.source));
    }
    receiver.reset();
    lock.lock();
    delivering_channel_ = kNumChannels;
    callback_ended_.notify_all();
  }
}

void Transport::fail(const std::string& reason) noexcept {
  std::array<FailureHandler, kNumChannels> handlers;
  {
    const std::lock_guard lock(receivers_mutex_);
    if (has_failed()) {
      return;
    }
    failure_ = reason;
    failed_.store(true, std::memory_order_release);
    failing_thread_ = std::this_thread::get_id();
    for (std::size_t channel = 0; channel < kNumChannels; ++channel) {
      handlers[channel] = slots_[channel].on_failure;
    }
  }
  for (const FailureHandler& handler : handlers) {
    if (handler) {
      handler(reason);
    }
  }
  const std::lock_guard lock(receivers_mutex_);
  failing_thread_ = std::thread::id();
  callback_ended_.notify_all();
}

}  // namespace smp
