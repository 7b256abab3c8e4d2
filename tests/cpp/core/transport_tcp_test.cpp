#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <exception>
#include <sstream>

#include "../../../core/src/transport/tcp/rendezvous.h"
#include "transport_conformance.h"

namespace smp::testing {
namespace {

/// The exchange between ranks that are threads.
class Board {
 public:
  explicit Board(int size) : contacts_(size) {}

  Exchange of(int rank) {
    return [this, rank](const std::string& own) {
      std::unique_lock lock(mutex_);
      contacts_[rank] = own;
      ++num_told_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return num_told_ == contacts_.size(); });
      return contacts_;
    };
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t num_told_ = 0;
  std::vector<std::string> contacts_;
};

template <int size>
struct TcpBackend {
  static void run(const std::function<void(Transport&)>& body) {
    Board board(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const auto transport = make_tcp_transport(rank, size, board.of(rank));
        try {
          body(*transport);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
          transport->abandon();
        }
        transport->close();
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
};

using TcpBackends = ::testing::Types<TcpBackend<2>, TcpBackend<3>>;
INSTANTIATE_TYPED_TEST_SUITE_P(Tcp, TransportConformance, TcpBackends);

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const FailureError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// A plain connection to the port in a contact.
int connect_to(const std::string& contact) {
  std::istringstream words(contact);
  std::string word;
  std::uint16_t port = 0;
  words >> word >> word >> port;
  const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return descriptor;
}

TEST(TcpTransport, a_job_of_one_rank_has_nobody_to_wait_for) {
  const auto transport = make_tcp_transport(0, 1, Board(1).of(0));
  EXPECT_EQ(transport->size(), 1);
  transport->flush();
  transport->close();
  EXPECT_THROW(make_tcp_transport(2, 2, Board(2).of(0)), UsageError);
  EXPECT_THROW(make_tcp_transport(0, 0, Board(1).of(0)), UsageError);
}

TEST(TcpTransport, strangers_are_not_taken_for_ranks) {
  Board board(2);
  std::thread first([&] {
    const auto transport = make_tcp_transport(0, 2, board.of(0));
    Inbox inbox(*transport);
    EXPECT_EQ(inbox.take(1).header, "the real one");
    transport->close();
  });
  std::vector<int> strangers;
  const auto transport = make_tcp_transport(1, 2, [&](const std::string& own) {
    auto contacts = board.of(1)(own);
    strangers.push_back(connect_to(contacts[0]));  // says nothing
    strangers.push_back(connect_to(contacts[0]));
    const std::string nonsense(1000, 'x');
    EXPECT_EQ(::send(strangers.back(), nonsense.data(), nonsense.size(), MSG_NOSIGNAL), 1000);
    // Knows all but the secret.
    strangers.push_back(connect_to(contacts[0]));
    std::string hello = "smp-tcp1" + std::string(32, '0');
    const std::array<std::int32_t, 2> place{1, 2};
    hello.append(reinterpret_cast<const char*>(place.data()), sizeof(place));
    EXPECT_EQ(::send(strangers.back(), hello.data(), hello.size(), MSG_NOSIGNAL), static_cast<ssize_t>(hello.size()));
    char answer = 0;
    EXPECT_EQ(::recv(strangers.back(), &answer, 1, 0), 0) << "it was answered";
    return contacts;
  });
  transport->send(0, make_message("the real one"));
  transport->close();
  first.join();
  for (const int stranger : strangers) {
    ::close(stranger);
  }
}

TEST(TcpTransport, a_rank_that_does_not_come_is_named) {
  std::string contact;
  const Exchange exchange = [&](const std::string& own) {
    contact = own;
    return std::vector<std::string>(3, own);
  };
  EXPECT_EQ(message_of([&] { make_tcp_transport(1, 3, exchange, {}, 100ms); }).find("rank 1 cannot reach rank 0"), 0U);
  EXPECT_EQ(message_of([&] {
              make_tcp_transport(0, 3, exchange, {}, 1000ms);
            }).find("rank 0 waited 1 s for rank(s) 1, 2 to connect"),
            0U);
  // Nobody listens on that port any more.
  const std::string gone = contact;
  const std::string message = message_of([&] {
    make_tcp_transport(
        1, 2, [&](const std::string&) { return std::vector<std::string>(2, gone); }, {}, 100ms);
  });
  EXPECT_NE(message.find("127.0.0.1"), std::string::npos) << message;
  EXPECT_NE(message.find("Connection refused"), std::string::npos) << message;
}

TEST(TcpTransport, waiting_for_ranks_can_be_interrupted) {
  const Exchange exchange = [](const std::string& own) { return std::vector<std::string>(2, own); };
  EXPECT_THROW(make_tcp_transport(0, 2, exchange, [] { throw std::runtime_error("interrupt"); }), std::runtime_error);
}

TEST(TcpTransport, a_killed_process_fails_the_others) {
  std::array<int, 2> pipes;
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pipes.data()), 0);
  const auto exchange_of = [&](int rank) -> Exchange {
    return [&, rank](const std::string& own) {
      EXPECT_EQ(::write(pipes[rank], own.c_str(), own.size() + 1), static_cast<ssize_t>(own.size() + 1));
      std::string other;
      for (char byte = 1; byte != 0 && ::read(pipes[rank], &byte, 1) == 1;) {
        other += byte;
      }
      return rank == 0 ? std::vector<std::string>{own, other} : std::vector<std::string>{other, own};
    };
  };
  const pid_t child = fork();
  if (child == 0) {
    const auto transport = make_tcp_transport(1, 2, exchange_of(1));
    transport->send(0, make_message("last words"));
    transport->flush();
    raise(SIGKILL);
  }
  const auto transport = make_tcp_transport(0, 2, exchange_of(0));
  Inbox inbox(*transport);
  EXPECT_EQ(inbox.take(1).header, "last words");
  EXPECT_EQ(inbox.wait_for_failure(), "rank 1 left without a word: its process was killed or has crashed");
  EXPECT_THROW(transport->send(1, make_message("")), FailureError);
  transport->close();
  waitpid(child, nullptr, 0);
  ::close(pipes[0]);
  ::close(pipes[1]);
}

TEST(TcpTransport, bytes_that_are_no_message_fail_the_transport) {
  Board board(2);
  std::thread other([&] {
    const auto sockets = tcp::connect_ranks(1, 2, board.of(1), 10s, [] {});
    const std::string nonsense(100, 'x');
    EXPECT_EQ(::send(sockets[0].get(), nonsense.data(), nonsense.size(), MSG_NOSIGNAL), 100);
    pollfd hung_up{sockets[0].get(), POLLIN, 0};
    EXPECT_EQ(poll(&hung_up, 1, 10'000), 1);
  });
  const auto transport = make_tcp_transport(0, 2, board.of(0));
  Inbox inbox(*transport);
  const std::string reason = inbox.wait_for_failure();
  EXPECT_NE(reason.find("rank 1"), std::string::npos) << reason;
  EXPECT_NE(reason.find("no message"), std::string::npos) << reason;
  other.join();
}

TEST(TcpTransport, a_peer_that_does_not_read_blocks_no_sender) {
  Board board(2);
  std::promise<void> done;
  std::thread other([&] {
    const auto sockets = tcp::connect_ranks(1, 2, board.of(1), 10s, [] {});
    done.get_future().wait();
  });
  const auto transport = make_tcp_transport(0, 2, board.of(0));
  for (int i = 0; i < 20; ++i) {
    transport->send(1, make_message("", make_payload(8 << 20, i)));
  }
  transport->abandon();
  done.set_value();
  other.join();
}

}  // namespace
}  // namespace smp::testing
