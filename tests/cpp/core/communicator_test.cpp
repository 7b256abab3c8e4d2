#include <gtest/gtest.h>
#include <smp/communicator.h>
#include <smp/error.h>
#include <smp/transport.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace smp {
namespace {

using namespace std::chrono_literals;

/// Runs `body` on each of `size` ranks in a thread of its own.
void run_ranks(int size, const std::function<void(int rank, Communicator&)>& body) {
  const auto transports = make_local_transports(size);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (const auto& transport : transports) {
    communicators.push_back(std::make_unique<Communicator>(transport));
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank, *communicators[rank]);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(Communicator, objects_arrive_in_order_and_unchanged) {
  const std::vector<std::string> objects{"", std::string("\0binary\xff", 8), std::string(3'000'000, 'x'), "last"};
  run_ranks(2, [&](int rank, Communicator& communicator) {
    for (const std::string& object : objects) {
      if (rank == 0) {
        communicator.send(1, object);
      } else {
        EXPECT_EQ(communicator.recv(0), object);
      }
    }
  });
}

TEST(Communicator, send_returns_only_when_matched) {
  std::atomic<bool> received{false};
  run_ranks(2, [&](int rank, Communicator& communicator) {
    if (rank == 0) {
      communicator.send(1, "slow");
      EXPECT_TRUE(received);
    } else {
      std::this_thread::sleep_for(100ms);
      received = true;
      communicator.recv(0);
    }
  });
}

TEST(Communicator, two_ranks_may_send_to_each_other_from_two_threads) {
  run_ranks(2, [](int rank, Communicator& communicator) {
    std::thread sender([&] {
      for (int i = 0; i < 100; ++i) {
        communicator.send(1 - rank, std::to_string(i));
      }
    });
    for (int i = 0; i < 100; ++i) {
      EXPECT_EQ(communicator.recv(1 - rank), std::to_string(i));
    }
    sender.join();
  });
}

TEST(Communicator, sources_do_not_mix) {
  run_ranks(3, [](int rank, Communicator& communicator) {
    if (rank == 0) {
      EXPECT_EQ(communicator.recv(2), "from 2");
      EXPECT_EQ(communicator.recv(1), "from 1");
    } else {
      communicator.send(0, "from " + std::to_string(rank));
    }
  });
}

TEST(Communicator, broadcast_reaches_all_members_and_only_them) {
  run_ranks(4, [](int rank, Communicator& communicator) {
    const std::vector<int> members{0, 1, 3};
    if (rank == 1) {
      communicator.broadcast("news", members);
    } else if (rank != 2) {
      EXPECT_EQ(communicator.recv(1), "news");
    }
  });
}

TEST(Communicator, allgather_follows_the_order_of_the_members) {
  run_ranks(4, [](int rank, Communicator& communicator) {
    for (int round = 0; round < 20; ++round) {
      const auto own = [&](int member) { return std::string(member * 1000, static_cast<char>('a' + round)); };
      const auto gathered = communicator.allgather(own(rank), {3, 0, 2, 1});
      EXPECT_EQ(gathered, (std::vector<std::string>{own(3), own(0), own(2), own(1)}));
    }
  });
}

TEST(Communicator, groups_do_not_disturb_each_other) {
  run_ranks(4, [](int rank, Communicator& communicator) {
    const std::vector<int> pair = rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3};
    for (int round = 0; round < 20; ++round) {
      const std::string text = std::to_string(round);
      EXPECT_EQ(communicator.allgather(text, pair), std::vector<std::string>(2, text));
      if (rank % 2 == 0) {
        communicator.barrier({0, 2});
      }
      EXPECT_EQ(communicator.allgather(text, {0, 1, 2, 3}).size(), 4U);
    }
  });
}

TEST(Communicator, barrier_waits_for_the_last) {
  std::atomic<int> num_arrived{0};
  run_ranks(3, [&](int rank, Communicator& communicator) {
    std::this_thread::sleep_for(rank * 30ms);
    ++num_arrived;
    communicator.barrier({0, 1, 2});
    EXPECT_EQ(num_arrived, 3);
  });
}

TEST(Communicator, a_group_of_one_needs_nobody) {
  run_ranks(1, [](int, Communicator& communicator) {
    communicator.barrier({0});
    communicator.broadcast("to nobody", {0});
    EXPECT_EQ(communicator.allgather("alone", {0}), std::vector<std::string>{"alone"});
  });
}

TEST(Communicator, members_that_disagree_on_the_operation_all_hear_it) {
  run_ranks(3, [](int rank, Communicator& communicator) {
    const std::vector<int> all{0, 1, 2};
    try {
      if (rank == 2) {
        communicator.barrier(all);
      } else {
        communicator.allgather("x", all);
      }
      ADD_FAILURE() << "rank " << rank << " noticed nothing";
    } catch (const UsageError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("rank 0 called allgather but rank 2 called barrier"), std::string::npos) << text;
    }
    communicator.barrier(all);  // the group goes on
  });
}

TEST(Communicator, refuses_ranks_that_make_no_sense) {
  run_ranks(2, [](int rank, Communicator& communicator) {
    EXPECT_THROW(communicator.send(rank, "x"), UsageError);
    EXPECT_THROW(communicator.recv(rank), UsageError);
    EXPECT_THROW(communicator.send(2, "x"), UsageError);
    EXPECT_THROW(communicator.recv(-1), UsageError);
    EXPECT_THROW(communicator.barrier({}), UsageError);
    EXPECT_THROW(communicator.barrier({1 - rank}), UsageError);
    EXPECT_THROW(communicator.barrier({0, 1, 1}), UsageError);
    EXPECT_THROW(communicator.allgather("x", {0, 1, 2}), UsageError);
    EXPECT_THROW(communicator.broadcast("x", {1 - rank}), UsageError);
  });
}

TEST(Communicator, fail_wakes_waiting_and_refuses_later_calls) {
  run_ranks(2, [](int rank, Communicator& communicator) {
    if (rank == 1) {
      return;
    }
    std::vector<std::thread> waiting;
    std::atomic<int> num_failed{0};
    const auto expect_failure = [&](const std::function<void()>& operation) {
      waiting.emplace_back([&num_failed, operation] {
        try {
          operation();
        } catch (const FailureError& error) {
          EXPECT_STREQ(error.what(), "rank 1 is out of memory");
          ++num_failed;
        }
      });
    };
    expect_failure([&] { communicator.recv(1); });
    expect_failure([&] { communicator.send(1, "never taken"); });
    expect_failure([&] { communicator.barrier({0, 1}); });
    std::this_thread::sleep_for(20ms);
    communicator.fail("rank 1 is out of memory");
    communicator.fail("a second reason");
    for (std::thread& thread : waiting) {
      thread.join();
    }
    EXPECT_EQ(num_failed, 3);
    EXPECT_THROW(communicator.recv(1), FailureError);
    EXPECT_THROW(communicator.send(1, "x"), FailureError);
    EXPECT_THROW(communicator.allgather("x", {0, 1}), FailureError);
  });
}

TEST(Communicator, poll_is_called_and_what_it_throws_leaves) {
  struct Interrupt {};
  std::atomic<bool> interrupted{false};
  run_ranks(2, [&](int rank, Communicator& communicator) {
    if (rank == 1) {
      while (!interrupted) {
        std::this_thread::yield();
      }
      EXPECT_EQ(communicator.recv(0), "left");
      EXPECT_EQ(communicator.recv(0), "next");
      return;
    }
    int num_polls = 0;
    const auto poll = [&] {
      if (++num_polls == 3) {
        throw Interrupt();
      }
    };
    const auto start = std::chrono::steady_clock::now();
    EXPECT_THROW(communicator.recv(1, poll), Interrupt);
    EXPECT_GE(std::chrono::steady_clock::now() - start, 3 * Communicator::kPollInterval);
    // A send that was left is still delivered, and its late answer harms nobody.
    EXPECT_THROW(communicator.send(1, "left", [] { throw Interrupt(); }), Interrupt);
    interrupted = true;
    communicator.send(1, "next");
  });
}

TEST(Communicator, who_waits_for_a_rank_that_has_left_hears_it) {
  for (const int leaving : {0, 1, 2}) {
    run_ranks(3, [&](int rank, Communicator& communicator) {
      const std::vector<int> all{0, 1, 2};
      communicator.barrier(all);
      const int other = 3 - rank - leaving;
      if (rank == leaving) {
        communicator.send((leaving + 1) % 3, "before it left");
        communicator.leave();
        return;
      }
      const std::string name = "rank " + std::to_string(leaving);
      const auto expect_failure = [&](const std::function<void()>& operation) {
        try {
          operation();
          ADD_FAILURE() << "rank " << rank << " noticed nothing";
        } catch (const FailureError& error) {
          EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
        }
      };
      if (rank == (leaving + 1) % 3) {
        EXPECT_EQ(communicator.recv(leaving), "before it left");
      }
      expect_failure([&] { communicator.barrier(all); });
      expect_failure([&] { communicator.allgather("x", all); });
      expect_failure([&] { communicator.recv(leaving); });
      expect_failure([&] { communicator.send(leaving, "never taken"); });
      communicator.barrier({std::min(rank, other), std::max(rank, other)});  // the others go on
    });
  }
}

TEST(Communicator, a_failing_transport_wakes_the_waiting) {
  const auto transports = make_local_transports(2);
  Communicator communicator(transports[0]);
  std::thread waiting([&] { EXPECT_THROW(communicator.recv(1), FailureError); });
  std::this_thread::sleep_for(20ms);
  transports[1]->abandon();
  waiting.join();
  EXPECT_THROW(communicator.send(1, "x"), FailureError);
}

TEST(Communicator, a_frame_that_makes_no_sense_fails_the_transport) {
  const auto transports = make_local_transports(2);
  Communicator communicator(transports[0]);
  Message garbage;
  garbage.channel = kObjectChannel;
  garbage.header = "short";
  transports[1]->send(0, garbage);
  EXPECT_THROW(communicator.recv(1), FailureError);
}

TEST(Communicator, a_new_one_may_follow_on_the_same_transport) {
  const auto transports = make_local_transports(2);
  for (int round = 0; round < 3; ++round) {
    std::thread peer([&] {
      Communicator communicator(transports[1]);
      EXPECT_EQ(communicator.recv(0), "hello");
    });
    Communicator communicator(transports[0]);
    communicator.send(1, "hello");
    peer.join();
  }
}

}  // namespace
}  // namespace smp
