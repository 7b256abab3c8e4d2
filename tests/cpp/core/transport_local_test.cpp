#include <exception>

#include "transport_conformance.h"

namespace smp::testing {
namespace {

template <int size>
struct LocalBackend {
  static void run(const std::function<void(Transport&)>& body) {
    const auto transports = make_local_transports(size);
    std::vector<std::thread> threads;
    for (const auto& transport : transports) {
      threads.emplace_back([&body, &transport] {
        try {
          body(*transport);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << transport->rank() << ": " << error.what();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    for (const auto& transport : transports) {
      transport->close();
    }
  }
};

using LocalBackends = ::testing::Types<LocalBackend<2>, LocalBackend<3>>;
INSTANTIATE_TYPED_TEST_SUITE_P(Local, TransportConformance, LocalBackends);

TEST(LocalTransport, ranks_know_their_place) {
  const auto transports = make_local_transports(3);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(transports[rank]->rank(), rank);
    EXPECT_EQ(transports[rank]->size(), 3);
  }
  EXPECT_THROW(make_local_transports(0), UsageError);
}

TEST(LocalTransport, a_held_rank_takes_nothing_until_released) {
  const auto transports = make_local_transports(2);
  Inbox inbox(*transports[1]);
  std::atomic<int> count{0};
  transports[1]->set_receiver(kObjectChannel, [&](int, Message) { ++count; });
  hold_local_delivery(*transports[1], true);
  transports[0]->send(1, make_message("", {}, kObjectChannel));
  transports[0]->send(1, make_message("after"));
  transports[0]->flush();
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(count, 0);
  hold_local_delivery(*transports[1], false);
  EXPECT_EQ(inbox.take(0).header, "after");
  EXPECT_EQ(count, 1);
  transports[1]->set_receiver(kObjectChannel, {});
}

TEST(LocalTransport, a_held_rank_can_still_close) {
  const auto transports = make_local_transports(2);
  hold_local_delivery(*transports[1], true);
  transports[0]->send(1, make_message("never taken"));
  transports[1]->close();
}

TEST(LocalTransport, sending_to_a_closed_peer_fails_and_others_go_on) {
  const auto transports = make_local_transports(3);
  Inbox inbox(*transports[2]);
  transports[1]->close();
  EXPECT_THROW(transports[0]->send(1, make_message("")), FailureError);
  transports[0]->send(2, make_message("still here"));
  EXPECT_EQ(inbox.take(0).header, "still here");
}

}  // namespace
}  // namespace smp::testing
