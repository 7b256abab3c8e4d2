#include "rendezvous.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <smp/error.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

namespace smp::tcp {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kInterruptInterval{50};
// An address that does not answer (a firewall that drops) must not use up the time of the next one.
constexpr milliseconds kTimeForOneAddress{5'000};

/// What one rank tells the others: `<secret> <host> <port> <address>...`, addresses as numbers.
struct Contact {
  std::string secret;
  std::string host;  ///< equal exactly for ranks that reach each other by the loopback address
  std::uint16_t port = 0;
  std::vector<std::string> addresses;

  std::string encode() const { return formatted("{} {} {} {}", secret, host, port, joined(addresses, " ")); }
  static Contact decode(const std::string& text) {
    Contact contact;
    std::istringstream words(text);
    words >> contact.secret >> contact.host >> contact.port;
    if (!words) {
      throw_failure(
          "a rank published {:?}, which names no address of a rank: do all ranks run one version of this library?",
          text);
    }
    for (std::string address; words >> address;) {
      contact.addresses.push_back(address);
    }
    return contact;
  }
};

/// The first thing each side of a connection says.
struct Hello {
  std::array<char, 8> magic{'s', 'm', 'p', '-', 't', 'c', 'p', '1'};
  std::array<char, 32> secret{};
  std::int32_t rank = 0;
  std::int32_t size = 0;
};

std::string make_secret() {
  std::array<std::uint8_t, 16> bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw_errno("getrandom");
  }
  std::string secret;
  for (const auto byte : bytes) {
    secret += formatted("{:02x}", byte);
  }
  return secret;
}

std::string this_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  // Containers on one machine have loopback addresses of their own.
  std::array<char, 64> network{};
  if (readlink("/proc/self/ns/net", network.data(), network.size() - 1) < 0) {
    network[0] = '-';
  }
  return boot + network.data();
}

std::vector<std::string> own_addresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    throw_errno("getifaddrs");
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  std::vector<std::string> four;
  std::vector<std::string> six;
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0 || (each->ifa_flags & IFF_LOOPBACK) != 0) {
      continue;
    }
    std::array<char, INET6_ADDRSTRLEN> text{};
    if (each->ifa_addr->sa_family == AF_INET) {
      const auto* address = reinterpret_cast<const sockaddr_in*>(each->ifa_addr);
      four.emplace_back(inet_ntop(AF_INET, &address->sin_addr, text.data(), text.size()));
    } else if (each->ifa_addr->sa_family == AF_INET6) {
      const auto* address = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr);
      if (!IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) {
        six.emplace_back(inet_ntop(AF_INET6, &address->sin6_addr, text.data(), text.size()));
      }
    }
  }
  four.insert(four.end(), six.begin(), six.end());
  return four;
}

/// The numeric `address` and `port`, as the system wants them.
std::pair<sockaddr_storage, socklen_t> to_sockaddr(const std::string& address, std::uint16_t port) {
  sockaddr_storage storage{};
  auto* four = reinterpret_cast<sockaddr_in*>(&storage);
  auto* six = reinterpret_cast<sockaddr_in6*>(&storage);
  if (inet_pton(AF_INET, address.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(port);
    return {storage, sizeof(*four)};
  }
  if (inet_pton(AF_INET6, address.c_str(), &six->sin6_addr) != 1) {
    throw_failure("{:?} is no address", address);
  }
  six->sin6_family = AF_INET6;
  six->sin6_port = htons(port);
  return {storage, sizeof(*six)};
}

Socket new_socket(int family) { return Socket(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

/// Listens on all addresses of this host; gives the port too.
std::pair<Socket, std::uint16_t> listen_somewhere(int num_ranks) {
  Socket listener = new_socket(AF_INET6);
  const int both = 0;
  const bool six = listener && setsockopt(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, &both, sizeof(both)) == 0;
  auto [any, length] = to_sockaddr(six ? "::" : "0.0.0.0", 0);
  if (!six) {
    listener = new_socket(AF_INET);
  }
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&any), length) != 0) {
    // A host whose kernel knows IPv6 but has it switched off.
    std::tie(any, length) = to_sockaddr("0.0.0.0", 0);
    listener = new_socket(AF_INET);
    if (bind(listener.get(), reinterpret_cast<sockaddr*>(&any), length) != 0) {
      throw_errno("bind");
    }
  }
  if (listen(listener.get(), std::max(num_ranks, 128)) != 0) {
    throw_errno("listen");
  }
  if (getsockname(listener.get(), reinterpret_cast<sockaddr*>(&any), &length) != 0) {
    throw_errno("getsockname");
  }
  const bool is_six = any.ss_family == AF_INET6;
  const auto port = is_six ? reinterpret_cast<const sockaddr_in6*>(&any)->sin6_port
                           : reinterpret_cast<const sockaddr_in*>(&any)->sin_port;
  return {std::move(listener), ntohs(port)};
}

class Rendezvous {
 public:
  Rendezvous(int rank, int size, milliseconds patience, const std::function<void()>& check_interrupt)
      : size_(size), patience_(patience), check_interrupt_(check_interrupt), sockets_(size) {
    hello_.rank = rank;
    hello_.size = size;
  }

  std::vector<Socket> run(const Exchange& exchange) {
    auto [listener, port] = listen_somewhere(size_);
    const Contact own{make_secret(), this_host(), port, own_addresses()};
    std::vector<Contact> contacts;
    for (const std::string& text : exchange(own.encode())) {
      contacts.push_back(Contact::decode(text));
    }
    if (contacts.size() != sockets_.size()) {
      throw_usage("{} contacts were exchanged among {} ranks: one for each is needed", contacts.size(), size_);
    }
    std::copy_n(contacts[0].secret.begin(), std::min(contacts[0].secret.size(), hello_.secret.size()),
                hello_.secret.begin());
    end_ = Clock::now() + patience_;
    for (int peer = 0; peer < hello_.rank; ++peer) {
      connect_to(peer, contacts[peer], contacts[peer].host == own.host);
    }
    accept_others(listener);
    for (const Socket& socket : sockets_) {
      if (socket) {
        set_options(socket);
      }
    }
    return std::move(sockets_);
  }

 private:
  /// Waits until one of `events` happens or `until` is there, in which case it returns false.
  bool wait(std::vector<pollfd>& events, Clock::time_point until) const {
    while (true) {
      check_interrupt_();
      const auto left = std::chrono::ceil<milliseconds>(until - Clock::now());
      if (left.count() <= 0) {
        return false;
      }
      const int ready =
          poll(events.data(), events.size(), static_cast<int>(std::min(left, kInterruptInterval).count()));
      if (ready > 0) {
        return true;
      }
      if (ready < 0 && errno != EINTR) {
        throw_errno("poll");
      }
    }
  }

  void connect_to(int peer, const Contact& contact, bool same_host) {
    std::vector<std::string> addresses = contact.addresses;
    if (same_host) {
      addresses.insert(addresses.begin(), "127.0.0.1");
    }
    std::string tried;
    while (true) {
      for (const std::string& address : addresses) {
        const auto until = std::min(end_, Clock::now() + kTimeForOneAddress);
        const std::string problem = try_address(peer, address, contact.port, until);
        if (problem.empty()) {
          return;
        }
        tried += formatted("\n  {} port {}: {}", address, contact.port, problem);
      }
      if (Clock::now() + kInterruptInterval >= end_ || addresses.empty()) {
        throw_failure("rank {} cannot reach rank {} (of {} ranks). Tried:{}", hello_.rank, peer, size_, tried);
      }
      tried.clear();
      std::vector<pollfd> nothing;
      wait(nothing, Clock::now() + kInterruptInterval);
    }
  }

  /// What went wrong; empty when sockets_[peer] is connected.
  std::string try_address(int peer, const std::string& address, std::uint16_t port, Clock::time_point until) {
    const auto text_of = [](int code) { return std::generic_category().message(code); };
    auto [target, length] = to_sockaddr(address, port);
    Socket socket = new_socket(target.ss_family);
    if (!socket) {
      return text_of(errno);
    }
    std::vector<pollfd> events{{socket.get(), POLLOUT, 0}};
    if (connect(socket.get(), reinterpret_cast<sockaddr*>(&target), length) != 0) {
      if (errno != EINPROGRESS) {
        return text_of(errno);
      }
      if (!wait(events, until)) {
        return "no answer";
      }
      int code = 0;
      socklen_t size_bytes = sizeof(code);
      getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &code, &size_bytes);
      if (code != 0) {
        return text_of(code);
      }
    }
    if (!greet(socket)) {
      return text_of(errno);
    }
    // A peer answers when it has connected to all ranks before it: that takes its time, not the address's.
    Hello answer;
    std::size_t received = 0;
    events[0].events = POLLIN;
    while (received < sizeof(answer)) {
      if (!wait(events, end_)) {
        return "it does not answer";
      }
      const ssize_t count =
          recv(socket.get(), reinterpret_cast<char*>(&answer) + received, sizeof(answer) - received, 0);
      if (count == 0) {
        return "it hung up";
      }
      if (count < 0 && errno != EAGAIN && errno != EINTR) {
        return text_of(errno);
      }
      received += static_cast<std::size_t>(std::max<ssize_t>(count, 0));
    }
    if (!is_of_this_job(answer) || answer.rank != peer) {
      return "somebody else answers";
    }
    sockets_[peer] = std::move(socket);
    return "";
  }

  void accept_others(const Socket& listener) {
    struct Guest {
      Socket socket;
      Hello hello;
      std::size_t received = 0;
    };
    std::vector<Guest> guests;
    while (true) {
      std::vector<int> missing;
      for (int peer = hello_.rank + 1; peer < size_; ++peer) {
        if (!sockets_[peer]) {
          missing.push_back(peer);
        }
      }
      if (missing.empty()) {
        return;
      }
      std::vector<pollfd> events{{listener.get(), POLLIN, 0}};
      for (const Guest& guest : guests) {
        events.push_back({guest.socket.get(), POLLIN, 0});
      }
      if (!wait(events, end_)) {
        throw_failure("rank {} waited {} s for rank(s) {} to connect: they have stopped, or cannot reach this host",
                      hello_.rank, patience_.count() / 1000, joined(missing, ", "));
      }
      std::vector<Guest> rest;
      for (Guest& guest : guests) {
        const ssize_t count = recv(guest.socket.get(), reinterpret_cast<char*>(&guest.hello) + guest.received,
                                   sizeof(Hello) - guest.received, 0);
        if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) {
          continue;  // gone
        }
        guest.received += static_cast<std::size_t>(std::max<ssize_t>(count, 0));
        if (guest.received < sizeof(Hello)) {
          rest.push_back(std::move(guest));
          continue;
        }
        const int peer = guest.hello.rank;
        if (is_of_this_job(guest.hello) && peer > hello_.rank && peer < size_ && !sockets_[peer] &&
            greet(guest.socket)) {
          sockets_[peer] = std::move(guest.socket);
        }
      }
      guests = std::move(rest);
      if ((events[0].revents & POLLIN) != 0) {
        Socket socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (socket) {
          guests.push_back({std::move(socket), {}, 0});
        }
      }
    }
  }

  // A fresh connection has room for so little.
  bool greet(const Socket& socket) const {
    return send(socket.get(), &hello_, sizeof(hello_), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(hello_));
  }

  bool is_of_this_job(const Hello& other) const {
    return other.magic == hello_.magic && other.secret == hello_.secret && other.size == hello_.size;
  }

  static void set_options(const Socket& socket) {
    const int on = 1;
    setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    // A host that loses power or network says nothing: ask after a minute of silence.
    const int idle_s = 60;
    const int interval_s = 10;
    const int probes = 6;
    setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
    setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
    setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
  }

  const int size_;
  const milliseconds patience_;
  const std::function<void()>& check_interrupt_;
  Hello hello_;
  Clock::time_point end_;
  std::vector<Socket> sockets_;
};

}  // namespace

std::vector<Socket> connect_ranks(int rank, int size, const Exchange& exchange, milliseconds patience,
                                  const std::function<void()>& check_interrupt) {
  return Rendezvous(rank, size, patience, check_interrupt).run(exchange);
}

}  // namespace smp::tcp
