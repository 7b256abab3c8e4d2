#pragma once

// What every transport must do. A backend is a type with
//   static void run(const std::function<void(smp::Transport&)>& body);
// which runs `body` on every rank of a fresh job of at least two ranks, and closes the transports afterwards.

#include <gtest/gtest.h>
#include <smp/error.h>
#include <smp/transport.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../../core/src/bytes.h"

namespace smp::testing {

using namespace std::chrono_literals;

inline constexpr auto kPatience = 60s;

/// Bytes that differ for each seed and position (up to a period that no size of a piece is a multiple of).
inline at::Tensor make_payload(std::size_t size_bytes, unsigned seed) {
  std::array<std::uint8_t, 8191> pattern;
  std::uint32_t state = seed * 2654435761U + 1;
  for (std::uint8_t& byte : pattern) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::uint8_t>(state >> 24);
  }
  at::Tensor payload = new_bytes(size_bytes);
  auto* bytes = static_cast<std::uint8_t*>(payload.data_ptr());
  for (std::size_t begin = 0; begin < size_bytes; begin += pattern.size()) {
    std::memcpy(bytes + begin, pattern.data(), std::min(pattern.size(), size_bytes - begin));
  }
  return payload;
}

inline bool holds(const at::Tensor& payload, std::size_t size_bytes, unsigned seed) {
  if (!payload.defined() || payload.scalar_type() != at::kByte || payload.dim() != 1 ||
      static_cast<std::size_t>(payload.numel()) != size_bytes) {
    return false;
  }
  return size_bytes == 0 ||
         std::memcmp(payload.const_data_ptr(), make_payload(size_bytes, seed).const_data_ptr(), size_bytes) == 0;
}

inline Message make_message(std::string header, at::Tensor payload = {}, std::uint8_t channel = kEngineChannel) {
  Message message;
  message.channel = channel;
  message.header = std::move(header);
  message.payload = std::move(payload);
  return message;
}

/// A receiver that keeps everything, for a thread that waits.
class Inbox {
 public:
  explicit Inbox(Transport& transport, std::uint8_t channel = kEngineChannel)
      : transport_(transport), channel_(channel) {
    transport_.set_receiver(
        channel_,
        [this](int source, Message message) {
          const std::lock_guard lock(mutex_);
          messages_[source].push_back(std::move(message));
          changed_.notify_all();
        },
        [this](const std::string& reason) {
          const std::lock_guard lock(mutex_);
          failure_ = reason;
          changed_.notify_all();
        });
  }
  ~Inbox() { transport_.set_receiver(channel_, {}); }

  Message take(int source) {
    std::unique_lock lock(mutex_);
    auto& messages = messages_[source];
    if (!changed_.wait_for(lock, kPatience, [&] { return !messages.empty() || !failure_.empty(); })) {
      throw std::runtime_error("no message came");
    }
    if (messages.empty()) {
      throw FailureError(failure_);
    }
    Message message = std::move(messages.front());
    messages.pop_front();
    return message;
  }

  std::string wait_for_failure() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kPatience, [&] { return !failure_.empty(); });
    return failure_;
  }

 private:
  Transport& transport_;
  const std::uint8_t channel_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, std::deque<Message>> messages_;
  std::string failure_;
};

/// Returns when all ranks are here.
inline void meet(Transport& transport, Inbox& inbox) {
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer != transport.rank()) {
      transport.send(peer, make_message("meet"));
    }
  }
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer != transport.rank()) {
      ASSERT_EQ(inbox.take(peer).header, "meet");
    }
  }
}

inline int next_rank(const Transport& transport) { return (transport.rank() + 1) % transport.size(); }
inline int previous_rank(const Transport& transport) {
  return (transport.rank() + transport.size() - 1) % transport.size();
}

template <typename Backend>
class TransportConformance : public ::testing::Test {};
TYPED_TEST_SUITE_P(TransportConformance);

TYPED_TEST_P(TransportConformance, carries_payloads_of_all_sizes_both_ways) {
  TypeParam::run([](Transport& transport) {
    Inbox inbox(transport);
    const std::vector<std::size_t> sizes{0,       1,        4095,           (32 << 10) - 1, 32 << 10, (32 << 10) + 1,
                                         1 << 20, 16 << 20, (16 << 20) + 1, 64 << 20,       7};
    for (unsigned i = 0; i < sizes.size(); ++i) {
      transport.send(next_rank(transport), make_message(std::to_string(i), make_payload(sizes[i], i)));
    }
    for (unsigned i = 0; i < sizes.size(); ++i) {
      const Message message = inbox.take(previous_rank(transport));
      EXPECT_EQ(message.header, std::to_string(i));
      EXPECT_TRUE(holds(message.payload, sizes[i], i)) << sizes[i] << " bytes";
    }
  });
}

TYPED_TEST_P(TransportConformance, keeps_headers_and_missing_payloads_as_they_are) {
  TypeParam::run([](Transport& transport) {
    Inbox inbox(transport);
    const std::string binary("\0\xff\n header", 10);
    const std::string large(3 << 20, 'h');
    transport.send(next_rank(transport), make_message(binary));
    transport.send(next_rank(transport), make_message(""));
    transport.send(next_rank(transport), make_message(large, make_payload(100'000, 1)));
    Message message = inbox.take(previous_rank(transport));
    EXPECT_EQ(message.header, binary);
    EXPECT_FALSE(message.payload.defined());
    message = inbox.take(previous_rank(transport));
    EXPECT_EQ(message.header, "");
    EXPECT_FALSE(message.payload.defined());
    message = inbox.take(previous_rank(transport));
    EXPECT_EQ(message.header, large);
    EXPECT_TRUE(holds(message.payload, 100'000, 1));
  });
}

TYPED_TEST_P(TransportConformance, keeps_order_with_many_mixed_messages_in_flight) {
  TypeParam::run([](Transport& transport) {
    Inbox inbox(transport);
    constexpr unsigned kNumMessages = 1500;
    const auto size_of = [](unsigned i) -> std::size_t {
      return i % 97 == 0 ? 2'000'000 : i % 7 == 0 ? 50'000 + i : i % 3 == 0 ? 0 : i;
    };
    for (unsigned i = 0; i < kNumMessages; ++i) {
      transport.send(next_rank(transport), make_message(std::to_string(i), make_payload(size_of(i), i)));
    }
    for (unsigned i = 0; i < kNumMessages; ++i) {
      const Message message = inbox.take(previous_rank(transport));
      ASSERT_EQ(message.header, std::to_string(i));
      ASSERT_TRUE(holds(message.payload, size_of(i), i)) << "message " << i;
    }
  });
}

TYPED_TEST_P(TransportConformance, keeps_the_order_of_each_sending_thread) {
  TypeParam::run([](Transport& transport) {
    Inbox inbox(transport);
    Inbox objects(transport, kObjectChannel);
    constexpr int kNumThreads = 4;
    constexpr int kNumMessages = 300;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kNumThreads; ++thread) {
      threads.emplace_back([&transport, thread] {
        for (int i = 0; i < kNumMessages; ++i) {
          const std::uint8_t channel = thread % 2 == 0 ? kEngineChannel : kObjectChannel;
          transport.send(next_rank(transport),
                         make_message(std::string(1, static_cast<char>('0' + thread)) + std::to_string(i),
                                      make_payload(i % 50 == 0 ? 100'000 : 10, i), channel));
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    std::vector<int> next(kNumThreads, 0);
    for (int i = 0; i < kNumThreads * kNumMessages; ++i) {
      const Message message = (i % 2 == 0 ? inbox : objects).take(previous_rank(transport));
      const int thread = message.header[0] - '0';
      ASSERT_EQ(message.channel, thread % 2 == 0 ? kEngineChannel : kObjectChannel);
      ASSERT_EQ(message.header.substr(1), std::to_string(next[thread]));
      ASSERT_TRUE(holds(message.payload, next[thread] % 50 == 0 ? 100'000 : 10, next[thread]));
      ++next[thread];
    }
  });
}

TYPED_TEST_P(TransportConformance, keeps_messages_that_come_before_their_receiver) {
  TypeParam::run([](Transport& transport) {
    Inbox inbox(transport);
    for (unsigned i = 0; i < 20; ++i) {
      transport.send(next_rank(transport),
                     make_message(std::to_string(i), make_payload(i * 10'000, i), kObjectChannel));
    }
    meet(transport, inbox);
    std::this_thread::sleep_for(20ms);
    Inbox late(transport, kObjectChannel);
    for (unsigned i = 0; i < 20; ++i) {
      const Message message = late.take(previous_rank(transport));
      ASSERT_EQ(message.header, std::to_string(i));
      ASSERT_TRUE(holds(message.payload, i * 10'000, i));
    }
  });
}

TYPED_TEST_P(TransportConformance, lets_receivers_send) {
  TypeParam::run([](Transport& transport) {
    constexpr int kNumRounds = 2000;
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    // A ball goes round all ranks; the round is in its header.
    transport.set_receiver(kEngineChannel, [&](int, Message message) {
      const int round = std::stoi(message.header) + (transport.rank() == 0 ? 1 : 0);
      if (round < kNumRounds || transport.rank() != 0) {
        transport.send(next_rank(transport), make_message(std::to_string(round)));
      }
      // Rank 0 takes the ball out after the last round; the others see round kNumRounds - 1 last.
      if (round >= kNumRounds - (transport.rank() == 0 ? 0 : 1)) {
        const std::lock_guard lock(mutex);
        done = true;
        changed.notify_all();
      }
    });
    if (transport.rank() == 0) {
      transport.send(next_rank(transport), make_message("0"));
    }
    {
      std::unique_lock lock(mutex);
      EXPECT_TRUE(changed.wait_for(lock, kPatience, [&] { return done; }));
    }
    transport.set_receiver(kEngineChannel, {});
  });
}

TYPED_TEST_P(TransportConformance, lets_payloads_change_after_flush) {
  TypeParam::run([](Transport& transport) {
    Inbox inbox(transport);
    for (const std::size_t size_bytes : {std::size_t{100}, std::size_t{40'000}, std::size_t{20} << 20}) {
      at::Tensor payload = make_payload(size_bytes, 5);
      transport.send(next_rank(transport), make_message("", payload));
      transport.flush();
      std::memset(payload.data_ptr(), 0, size_bytes);
      Message message = inbox.take(previous_rank(transport));
      EXPECT_TRUE(holds(message.payload, size_bytes, 5));
      // Nor does the receiver see the sender's memory.
      std::memset(message.payload.data_ptr(), 1, size_bytes);
      EXPECT_EQ(static_cast<const char*>(payload.const_data_ptr())[0], 0);
    }
  });
}

TYPED_TEST_P(TransportConformance, unsetting_a_receiver_waits_for_a_running_delivery) {
  TypeParam::run([](Transport& transport) {
    Inbox inbox(transport);
    std::atomic<bool> entered{false};
    std::atomic<bool> left{false};
    transport.set_receiver(kObjectChannel, [&](int, Message) {
      entered = true;
      std::this_thread::sleep_for(50ms);
      left = true;
    });
    transport.send(next_rank(transport), make_message("slow", {}, kObjectChannel));
    while (!entered) {
      std::this_thread::yield();
    }
    transport.set_receiver(kObjectChannel, {});
    EXPECT_TRUE(left);
    meet(transport, inbox);
  });
}

TYPED_TEST_P(TransportConformance, a_receiver_may_unset_itself) {
  TypeParam::run([](Transport& transport) {
    Inbox inbox(transport);
    std::atomic<int> count{0};
    std::promise<void> unset;
    transport.set_receiver(kObjectChannel, [&](int, Message) {
      ++count;
      transport.set_receiver(kObjectChannel, {});
      unset.set_value();
    });
    transport.send(next_rank(transport), make_message("first", {}, kObjectChannel));
    transport.send(next_rank(transport), make_message("second", {}, kObjectChannel));
    meet(transport, inbox);
    // Messages kept from before set_receiver may come after later ones of another channel.
    unset.get_future().wait();
    EXPECT_EQ(count, 1);
    Inbox rest(transport, kObjectChannel);
    EXPECT_EQ(rest.take(previous_rank(transport)).header, "second");
  });
}

TYPED_TEST_P(TransportConformance, busy_and_quiet_ranks_still_receive) {
  TypeParam::run([](Transport& transport) {
    Inbox inbox(transport);
    transport.set_busy(true);
    for (unsigned i = 0; i < 50; ++i) {
      transport.send(next_rank(transport), make_message("", make_payload(i * 3000, i)));
      ASSERT_TRUE(holds(inbox.take(previous_rank(transport)).payload, i * 3000, i));
    }
    transport.set_busy(false);
    std::this_thread::sleep_for(400ms);
    meet(transport, inbox);
  });
}

TYPED_TEST_P(TransportConformance, refuses_misuse) {
  TypeParam::run([](Transport& transport) {
    const int peer = next_rank(transport);
    EXPECT_THROW(transport.send(transport.rank(), make_message("")), UsageError);
    EXPECT_THROW(transport.send(-1, make_message("")), UsageError);
    EXPECT_THROW(transport.send(transport.size(), make_message("")), UsageError);
    EXPECT_THROW(transport.send(peer, make_message("", {}, kNumChannels)), UsageError);
    EXPECT_THROW(transport.set_receiver(kNumChannels, {}), UsageError);
    EXPECT_THROW(transport.send(peer, make_message("", new_bytes(4).view({2, 2}))), UsageError);
    EXPECT_THROW(transport.send(peer, make_message("", new_bytes(4).view(at::kInt))), UsageError);
    EXPECT_THROW(transport.send(peer, make_message("", new_bytes(4).as_strided({2}, {2}))), UsageError);
  });
}

TYPED_TEST_P(TransportConformance, a_closed_transport_refuses_and_tells) {
  TypeParam::run([](Transport& transport) {
    Inbox inbox(transport);
    transport.send(next_rank(transport), make_message("", make_payload(1 << 20, 3)));
    EXPECT_TRUE(holds(inbox.take(previous_rank(transport)).payload, 1 << 20, 3));
    meet(transport, inbox);
    transport.close();
    EXPECT_NE(inbox.wait_for_failure().find("closed"), std::string::npos);
    EXPECT_THROW(transport.send(next_rank(transport), make_message("")), FailureError);
    EXPECT_THROW(transport.flush(), FailureError);
    // Who comes late hears it too.
    bool told = false;
    transport.set_receiver(
        kObjectChannel, [](int, Message) {}, [&](const std::string&) { told = true; });
    EXPECT_TRUE(told);
    transport.set_receiver(kObjectChannel, {});
    transport.close();
  });
}

TYPED_TEST_P(TransportConformance, a_rank_that_abandons_fails_the_others) {
  TypeParam::run([](Transport& transport) {
    Inbox inbox(transport);
    meet(transport, inbox);
    if (transport.rank() == 0) {
      for (int peer = 1; peer < transport.size(); ++peer) {
        EXPECT_EQ(inbox.take(peer).header, "ready");
      }
      for (int peer = 1; peer < transport.size(); ++peer) {
        transport.send(peer, make_message("last words"));
      }
      transport.abandon();
      transport.abandon();
    } else {
      transport.send(0, make_message("ready"));
      // Among more ranks another one may pass the failure on before these words are here.
      if (transport.size() == 2) {
        EXPECT_EQ(inbox.take(0).header, "last words");
      }
    }
    EXPECT_EQ(inbox.wait_for_failure(), "rank 0 has abandoned the job");
    EXPECT_THROW(transport.send(next_rank(transport), make_message("")), FailureError);
    EXPECT_THROW(transport.flush(), FailureError);
  });
}

TYPED_TEST_P(TransportConformance, a_receiver_that_throws_fails_all_ranks) {
  TypeParam::run([](Transport& transport) {
    Inbox inbox(transport);
    if (transport.rank() == 1) {
      transport.set_receiver(kObjectChannel, [](int, Message) { throw std::runtime_error("spilt"); });
    }
    if (transport.rank() == 0) {
      transport.send(1, make_message("", {}, kObjectChannel));
    }
    const std::string reason = inbox.wait_for_failure();
    EXPECT_NE(reason.find("rank 1"), std::string::npos) << reason;
    EXPECT_NE(reason.find("spilt"), std::string::npos) << reason;
    transport.set_receiver(kObjectChannel, {});
  });
}

TYPED_TEST_P(TransportConformance, a_forked_process_leaves_the_transport_alone) {
  TypeParam::run([](Transport& transport) {
    Inbox inbox(transport);
    meet(transport, inbox);
    for (int i = 0; i < 3; ++i) {
      const pid_t child = fork();
      if (child == 0) {
        transport.close();
        transport.abandon();
        try {
          transport.send(next_rank(transport), make_message(""));
        } catch (const UsageError&) {
          _exit(0);
        }
        _exit(1);
      }
      int status = -1;
      waitpid(child, &status, 0);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
      meet(transport, inbox);
    }
  });
}

REGISTER_TYPED_TEST_SUITE_P(TransportConformance, carries_payloads_of_all_sizes_both_ways,
                            keeps_headers_and_missing_payloads_as_they_are,
                            keeps_order_with_many_mixed_messages_in_flight, keeps_the_order_of_each_sending_thread,
                            keeps_messages_that_come_before_their_receiver, lets_receivers_send,
                            lets_payloads_change_after_flush, unsetting_a_receiver_waits_for_a_running_delivery,
                            a_receiver_may_unset_itself, busy_and_quiet_ranks_still_receive, refuses_misuse,
                            a_closed_transport_refuses_and_tells, a_rank_that_abandons_fails_the_others,
                            a_receiver_that_throws_fails_all_ranks, a_forked_process_leaves_the_transport_alone);

}  // namespace smp::testing
