#include <smp/communicator.h>

#include <smp/error.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "bytes.h"

// Frames. The header is: kind, operation, sequence, member count, members. The bytes are the payload.
//
//   send / broadcast           allgather / barrier (0 is the leader: the smallest member)
//
//   sender      receiver       rank 1        rank 0         rank 2
//     |  kObject   |             | kContribution |              |
//     |----------->|             |-------------->|kContribution |
//     |            | recv()      |               |<-------------|
//     |    kAck    |             |    kResult    |   kResult    |
//     |<-----------|             |<--------------|------------->|
//
// The last frame of a rank is kLeft. Frames of one rank arrive in their order, so what it owes by then never comes.

namespace smp {
namespace {

template <typename T>
void put(std::string& bytes, T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
T take(std::string_view& bytes) {
  static_assert(std::is_trivially_copyable_v<T>);
  T value;
  if (bytes.size() < sizeof(value)) {
    throw_failure("a frame between communicators ends {} bytes early", sizeof(value) - bytes.size());
  }
  std::memcpy(&value, bytes.data(), sizeof(value));
  bytes.remove_prefix(sizeof(value));
  return value;
}

std::string take_string(std::string_view& bytes) {
  const auto size_bytes = take<std::uint64_t>(bytes);
  if (bytes.size() < size_bytes) {
    throw_failure("a frame between communicators ends {} bytes early", size_bytes - bytes.size());
  }
  std::string value(bytes.substr(0, size_bytes));
  bytes.remove_prefix(size_bytes);
  return value;
}

at::Tensor to_payload(std::string_view bytes) {
  if (bytes.empty()) {
    return {};
  }
  at::Tensor payload = new_bytes(bytes.size());
  std::memcpy(payload.data_ptr(), bytes.data(), bytes.size());
  return payload;
}

std::string from_payload(const at::Tensor& payload) {
  if (!payload.defined()) {
    return {};
  }
  return {static_cast<const char*>(payload.const_data_ptr()), static_cast<std::size_t>(payload.numel())};
}

const char* name_of(auto operation) { return operation == decltype(operation)::kBarrier ? "barrier" : "allgather"; }

}  // namespace

Communicator::Communicator(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {
  transport_->set_receiver(
      kObjectChannel, [this](int source, const Message& message) { receive(source, message); },
      [this](const std::string& reason) { fail(reason); });
}

Communicator::~Communicator() {
  // In a forked process the transport's locks may be held for ever.
  if (transport_->in_owner_process()) {
    transport_->set_receiver(kObjectChannel, {});
  }
}

void Communicator::fail(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_) {
      return;
    }
    failed_ = true;
    failure_ = reason;
  }
  changed_.notify_all();
}

void Communicator::leave() {
  try {
    for (int peer = 0; peer < transport_->size(); ++peer) {
      if (peer != transport_->rank()) {
        send_frame(peer, Kind::kLeft, Operation::kAllgather, {}, {});
      }
    }
  } catch (const FailureError&) {
    // Then the others hear of the failure.
  }
}

void Communicator::send(int destination, std::string_view bytes, const Poll& poll) {
  check_peer(destination, "send to");
  send_objects({destination}, bytes, poll);
}

void Communicator::broadcast(std::string_view bytes, const std::vector<int>& members, const Poll& poll) {
  std::vector<int> destinations = check_members(members);
  std::erase(destinations, transport_->rank());
  send_objects(destinations, bytes, poll);
}

void Communicator::send_objects(const std::vector<int>& destinations, std::string_view bytes, const Poll& poll) {
  std::unique_lock lock(mutex_);
  const std::uint64_t sequence = next_sequence_++;
  for (const int destination : destinations) {
    unacknowledged_.emplace(destination, sequence);
  }
  const auto forget = [&] {
    for (const int destination : destinations) {
      unacknowledged_.erase({destination, sequence});
    }
  };
  lock.unlock();
  try {
    const at::Tensor payload = to_payload(bytes);
    for (const int destination : destinations) {
      send_frame(destination, Kind::kObject, Operation::kAllgather, {{}, sequence}, payload);
    }
    lock.lock();
    wait(lock, poll, [&] {
      return std::none_of(destinations.begin(), destinations.end(), [&](int destination) {
        if (unacknowledged_.count({destination, sequence}) == 0) {
          return false;
        }
        check_present(destination, "sends to");
        return true;
      });
    });
  } catch (...) {
    if (!lock.owns_lock()) {
      lock.lock();
    }
    forget();
    throw;
  }
}

std::string Communicator::recv(int source, const Poll& poll) {
  check_peer(source, "receive from");
  std::unique_lock lock(mutex_);
  std::deque<Object>& objects = inbox_[source];
  wait(lock, poll, [&] {
    if (objects.empty()) {
      check_present(source, "receives from");
    }
    return !objects.empty();
  });
  Object object = std::move(objects.front());
  objects.pop_front();
  lock.unlock();
  send_frame(source, Kind::kAck, Operation::kAllgather, {{}, object.sequence}, {});
  return std::move(object.bytes);
}

std::vector<std::string> Communicator::allgather(std::string_view bytes, const std::vector<int>& members,
                                                 const Poll& poll) {
  return gather(Operation::kAllgather, bytes, members, poll);
}

void Communicator::barrier(const std::vector<int>& members, const Poll& poll) {
  gather(Operation::kBarrier, {}, members, poll);
}

std::vector<std::string> Communicator::gather(Operation operation, std::string_view bytes,
                                              const std::vector<int>& members, const Poll& poll) {
  const std::vector<int> group = check_members(members);
  std::unique_lock lock(mutex_);
  wait(lock, {}, [] { return true; });  // a failed communicator starts nothing
  const GroupStep step{group, next_group_step_[group]++};
  lock.unlock();

  Result result;
  if (group.front() == transport_->rank()) {
    result = lead(operation, step, bytes, poll);
  } else {
    send_frame(group.front(), Kind::kContribution, operation, step, to_payload(bytes));
    lock.lock();
    wait(lock, poll, [&] {
      if (results_.count(step) == 0 && left_.count(group.front()) > 0) {
        throw FailureError(has_left(group.front(), step, operation));
      }
      return results_.count(step) > 0;
    });
    result = std::move(results_.extract(step).mapped());
    lock.unlock();
  }
  if (result.kind == Kind::kMismatch) {
    throw UsageError(result.bytes);
  }
  if (result.kind == Kind::kMissing) {
    throw FailureError(result.bytes);
  }
  std::map<int, std::string> by_rank;
  std::string_view rest = result.bytes;
  for (const int member : group) {
    by_rank[member] = take_string(rest);
  }
  std::vector<std::string> ordered;
  ordered.reserve(members.size());
  for (const int member : members) {
    ordered.push_back(std::move(by_rank[member]));
  }
  return ordered;
}

std::string Communicator::has_left(int member, const GroupStep& step, Operation operation) const {
  return formatted(
      "the script of rank {} has ended, but rank {} waits for it in operation {} ({}) of the group of ranks {}. All "
      "ranks of a group must make its collective calls, such as model.state_dict(), smp.barrier() or the first step.",
      member, transport_->rank(), step.second, name_of(operation), joined(step.first, ", "));
}

Communicator::Result Communicator::lead(Operation operation, const GroupStep& step, std::string_view bytes,
                                        const Poll& poll) {
  const std::vector<int>& group = step.first;
  std::unique_lock lock(mutex_);
  std::map<int, Contribution>& contributions = contributions_[step];
  contributions[transport_->rank()] = {operation, std::string(bytes)};
  Result result;
  wait(lock, poll, [&] {
    for (const int member : group) {
      if (contributions.count(member) == 0 && left_.count(member) > 0) {
        result = {Kind::kMissing, has_left(member, step, operation)};
        return true;
      }
    }
    return contributions.size() == group.size();
  });
  for (const auto& [member, contribution] : contributions) {
    if (result.kind == Kind::kResult && contribution.operation != operation) {
      result = {Kind::kMismatch,
                formatted("operation {} of the group of ranks {}: rank {} called {} but rank {} called {}. All members "
                          "of a group must call the same operations in the same order.",
                          step.second, joined(group, ", "), transport_->rank(), name_of(operation), member,
                          name_of(contribution.operation))};
    }
  }
  if (result.kind == Kind::kResult) {
    for (const auto& [member, contribution] : contributions) {
      put<std::uint64_t>(result.bytes, contribution.bytes.size());
      result.bytes += contribution.bytes;
    }
  }
  contributions_.erase(step);
  lock.unlock();
  const at::Tensor payload = to_payload(result.bytes);
  for (const int member : group) {
    if (member != transport_->rank()) {
      send_frame(member, result.kind, operation, step, payload);
    }
  }
  return result;
}

void Communicator::send_frame(int destination, Kind kind, Operation operation, const GroupStep& step,
                              at::Tensor payload) {
  Message message;
  message.channel = kObjectChannel;
  put(message.header, kind);
  put(message.header, operation);
  put(message.header, step.second);
  put<std::uint64_t>(message.header, step.first.size());
  for (const int member : step.first) {
    put(message.header, member);
  }
  message.payload = std::move(payload);
  transport_->send(destination, std::move(message));
}

void Communicator::receive(int source, const Message& message) {
  std::string_view header = message.header;
  const auto kind = take<Kind>(header);
  const auto operation = take<Operation>(header);
  GroupStep step;
  step.second = take<std::uint64_t>(header);
  const auto num_members = take<std::uint64_t>(header);
  for (std::uint64_t i = 0; i < num_members; ++i) {
    step.first.push_back(take<int>(header));
  }
  std::string bytes = from_payload(message.payload);
  {
    const std::lock_guard lock(mutex_);
    switch (kind) {
      case Kind::kObject:
        inbox_[source].push_back({step.second, std::move(bytes)});
        break;
      case Kind::kAck:
        unacknowledged_.erase({source, step.second});
        break;
      case Kind::kContribution:
        contributions_[step][source] = {operation, std::move(bytes)};
        break;
      case Kind::kResult:
      case Kind::kMismatch:
      case Kind::kMissing:
        results_[step] = {kind, std::move(bytes)};
        break;
      case Kind::kLeft:
        left_.insert(source);
        break;
      default:
        throw_failure("a frame of kind {} between communicators", static_cast<int>(kind));
    }
  }
  changed_.notify_all();
}

void Communicator::wait(std::unique_lock<std::mutex>& lock, const Poll& poll, const std::function<bool()>& ready) {
  auto next_poll = std::chrono::steady_clock::now() + kPollInterval;
  while (true) {
    if (failed_) {
      throw FailureError(failure_);
    }
    if (ready()) {
      return;
    }
    if (changed_.wait_until(lock, next_poll) == std::cv_status::timeout) {
      next_poll = std::chrono::steady_clock::now() + kPollInterval;
      if (poll) {
        lock.unlock();
        poll();
        lock.lock();
      }
    }
  }
}

void Communicator::check_peer(int peer, const char* what) const {
  if (peer < 0 || peer >= transport_->size()) {
    throw_usage("rank {} cannot {} rank {}: the ranks of this job are 0 to {}", transport_->rank(), what, peer,
                transport_->size() - 1);
  }
  if (peer == transport_->rank()) {
    throw_usage("rank {0} cannot {1} itself (rank {0}): name another rank", transport_->rank(), what);
  }
}

// The caller holds the mutex.
void Communicator::check_present(int peer, const char* what) const {
  if (left_.count(peer) > 0) {
    throw_failure("rank {} {} rank {}, whose script has ended: it will not answer", transport_->rank(), what, peer);
  }
}

std::vector<int> Communicator::check_members(const std::vector<int>& members) const {
  std::vector<int> group = members;
  std::sort(group.begin(), group.end());
  for (std::size_t i = 0; i < group.size(); ++i) {
    if (group[i] < 0 || group[i] >= transport_->size()) {
      throw_usage("a group of ranks {}: {} is not a rank of this job, which are 0 to {}", joined(members, ", "),
                  group[i], transport_->size() - 1);
    }
    if (i > 0 && group[i] == group[i - 1]) {
      throw_usage("a group of ranks {}: rank {} may be named only once", joined(members, ", "), group[i]);
    }
  }
  if (!std::binary_search(group.begin(), group.end(), transport_->rank())) {
    throw_usage("rank {} runs an operation of the group of ranks {}: it must be one of them", transport_->rank(),
                joined(members, ", "));
  }
  return group;
}

}  // namespace smp
