#pragma once

#include <smp/transport.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace smp {

/// Objects (as bytes) between the scripts of different ranks, over kObjectChannel of a transport.
///
/// Every operation blocks until it is matched, and calls its `poll` about every kPollInterval meanwhile, without
/// holding a lock; what `poll` throws leaves the operation (after which a group's members are out of step). All may be
/// used by several threads; two threads of a rank that run operations of one group at the same time must agree on an
/// order across ranks themselves.
///
/// All throw UsageError for ranks that are out of range, repeated, or this rank where another is meant, and
/// FailureError after fail(), or when the transport is closed or fails.
class Communicator {
 public:
  using Poll = std::function<void()>;
  static constexpr std::chrono::milliseconds kPollInterval{50};

  explicit Communicator(std::shared_ptr<Transport> transport);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Sends `bytes` to `destination`; returns when a recv() there has taken them.
  void send(int destination, std::string_view bytes, const Poll& poll = {});
  /// Takes the next object that `source` sent or broadcast to this rank, in order.
  std::string recv(int source, const Poll& poll = {});
  /// Sends `bytes` to all other members, which take them with recv(); returns when all have. `members` holds
  /// this rank.
  void broadcast(std::string_view bytes, const std::vector<int>& members, const Poll& poll = {});

  /// Collective over `members` (which holds this rank): everybody's bytes, in the order of `members`.
  /// Throws UsageError on all members when one of them calls another operation of the group instead.
  std::vector<std::string> allgather(std::string_view bytes, const std::vector<int>& members, const Poll& poll = {});
  /// Collective over `members` (which holds this rank): returns when all of them are here. Throws as allgather().
  void barrier(const std::vector<int>& members, const Poll& poll = {});

  /// Tells the other ranks that this one starts no further operation: what waits for one of it then throws FailureError
  /// on all its members. Does not block; called at most once, before the transport is closed. Does nothing after a
  /// failure.
  void leave();

  /// Wakes all waiting operations, here only, with a FailureError; later ones throw it at once. The first
  /// reason wins. Callable from any thread.
  void fail(const std::string& reason);

 private:
  enum class Kind : std::uint8_t { kObject, kAck, kContribution, kResult, kMismatch, kMissing, kLeft };
  enum class Operation : std::uint8_t { kAllgather, kBarrier };

  struct Object {
    std::uint64_t sequence = 0;
    std::string bytes;
  };
  struct Contribution {
    Operation operation = Operation::kAllgather;
    std::string bytes;
  };
  struct Result {
    Kind kind = Kind::kResult;
    std::string bytes;  // after a mismatch, or when a member is missing, what to say
  };
  /// One operation of one group: its sorted members, and its number among the operations of that group.
  using GroupStep = std::pair<std::vector<int>, std::uint64_t>;

  void receive(int source, const Message& message);
  void send_frame(int destination, Kind kind, Operation operation, const GroupStep& step, at::Tensor payload);
  void send_objects(const std::vector<int>& destinations, std::string_view bytes, const Poll& poll);
  void wait(std::unique_lock<std::mutex>& lock, const Poll& poll, const std::function<bool()>& ready);
  void check_peer(int peer, const char* what) const;
  std::vector<int> check_members(const std::vector<int>& members) const;
  void check_present(int peer, const char* what) const;
  std::string has_left(int member, const GroupStep& step, Operation operation) const;
  std::vector<std::string> gather(Operation operation, std::string_view bytes, const std::vector<int>& members,
                                  const Poll& poll);
  Result lead(Operation operation, const GroupStep& step, std::string_view bytes, const Poll& poll);

  const std::shared_ptr<Transport> transport_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t next_sequence_ = 0;
  std::set<std::pair<int, std::uint64_t>> unacknowledged_;
  std::map<int, std::deque<Object>> inbox_;
  std::map<std::vector<int>, std::uint64_t> next_group_step_;
  std::map<GroupStep, std::map<int, Contribution>> contributions_;  // where this rank is the leader
  std::map<GroupStep, Result> results_;                             // where another rank is
  std::set<int> left_;
  bool failed_ = false;
  std::string failure_;
};

}  // namespace smp
