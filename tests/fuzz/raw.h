/* tests/fuzz/raw.h: peers that speak frames of the tcp fabric by hand, on loopback, and so also
   what no peer of ours says; and how a fuzz target says that something is wrong. */
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/tcp/frame.h"
#include "fabric/tcp/socket.h"

namespace fuzz {

namespace tcp = jaxrdma::fabric::tcp;
using jaxrdma::fabric::Hello;

/// Ends the process where `holds` does not: the fuzzer keeps the input.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

// Far beyond what an input takes: who is not done by then hangs.
inline constexpr auto kPatience = std::chrono::seconds(20);
// What is sent before anybody reads must fit into the socket's buffers.
inline constexpr size_t kMostBytes = 48 << 10;

template <typename Done>
void until(const char* what, Done done) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!done()) require(std::chrono::steady_clock::now() < deadline, what);
}

inline std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

template <typename T>
std::string text_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

inline std::string frame(tcp::FrameType type, const std::string& body, uint32_t credits = 0) {
  tcp::FrameHeader header;
  header.type = type;
  header.credits = credits;
  header.length = body.size();
  return text_of(header) + body;
}

/// A frame as it was received.
struct Frame {
  tcp::FrameHeader header;
  std::string body;
};

/// A socket that is bound to an address and a port of loopback which no other had for minutes.
///
/// Who ends a connection first keeps its own end of it for a minute, in TIME_WAIT. Were ends of
/// 127.0.0.1 taken, as the kernel picks them, a fuzzer would soon find none free, and neither would
/// the side that is tested. There are so many others that each is taken once; and the ports are
/// below those that the kernel picks.
inline tcp::Fd bound_socket() {
  constexpr uint32_t kFirstPort = 10'000, kPorts = 20'000;
  constexpr uint32_t kFirstAddress = (127u << 24) + (1u << 16), kAddresses = 254u << 16;
  // Fuzzers that run side by side are far apart.
  static const uint32_t begin = std::random_device()();
  static uint64_t taken = 0;
  tcp::Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  require(fd.open(), "a descriptor");
  sockaddr_in end{};
  end.sin_family = AF_INET;
  int bound = -1;
  for (int tries = 0; bound != 0 && tries < 100; ++tries) {  // others have ports there too
    const uint64_t number = taken++;
    end.sin_port = htons(static_cast<uint16_t>(kFirstPort + number % kPorts));
    end.sin_addr.s_addr =
        htonl(static_cast<uint32_t>(kFirstAddress + (begin + number / kPorts) % kAddresses));
    bound = bind(fd.get(), reinterpret_cast<const sockaddr*>(&end), sizeof(end));
  }
  require(bound == 0, "an address of our own");
  return fd;
}

/// What a system call returns that no signal has interrupted: libFuzzer has a timer, of which each
/// call that waits may end.
template <typename Call>
auto uninterrupted(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

/// Whether something can be read before the time is over; a signal makes it no shorter.
inline bool readable(int fd, int timeout_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  return uninterrupted([&] {
           const auto left = std::chrono::ceil<std::chrono::milliseconds>(
               deadline - std::chrono::steady_clock::now());
           pollfd what{fd, POLLIN, 0};
           return ::poll(&what, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
         }) > 0;
}

inline std::string address_of(const tcp::Fd& fd) {
  tcp::SocketAddress own;
  own.bytes = sizeof(own.storage);
  getsockname(fd.get(), own.get(), &own.bytes);
  return own.text();
}

/// Such an address and port, for the side that is tested to listen at.
inline std::string free_address() { return address_of(bound_socket()); }

/// One end of a connection.
class Socket {
 public:
  explicit Socket(tcp::Fd fd) : fd_(std::move(fd)) {
    const int on = 1;
    setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    // Once it is closed the other side, if that ended the connection, need not remember it either.
    const linger at_once{1, 0};
    setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  }
  /// To "host:port", both numbers.
  static Socket connect(const std::string& address) {
    tcp::Fd fd = bound_socket();
    const auto parts = tcp::split_address(address);
    const auto found = tcp::resolve(parts.value(), /*numeric=*/true, /*passive=*/false);
    const tcp::SocketAddress& where = found.value().front();
    int error = ::connect(fd.get(), where.get(), where.bytes) == 0 ? 0 : errno;
    if (error == EINTR) {  // it goes on by itself
      pollfd what{fd.get(), POLLOUT, 0};
      uninterrupted([&] { return ::poll(&what, 1, -1); });
      socklen_t bytes = sizeof(error);
      getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
    }
    require(error == 0, "the port is open");
    return Socket(std::move(fd));
  }

  void send(const std::string& bytes) {
    uninterrupted([&] { return ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL); });
  }
  /// The peer will see the end, and may still answer.
  void end() { shutdown(fd_.get(), SHUT_WR); }
  /// Reads and forgets what is there now; whether the peer has closed.
  bool closed() {
    char scrap[4096];
    ssize_t got;
    while ((got = recv(fd_.get(), scrap, sizeof(scrap), MSG_DONTWAIT)) > 0) {
    }
    return got == 0 || (errno != EAGAIN && errno != EINTR);
  }
  void wait(int timeout_ms) { (void)readable(fd_.get(), timeout_ms); }
  /// The next frame, if it comes in time and the connection lasts.
  std::optional<Frame> receive(int timeout_ms) {
    Frame got;
    if (!fill(&got.header, sizeof(got.header), timeout_ms) || got.header.length > kMostBytes)
      return std::nullopt;
    got.body.resize(got.header.length);
    if (!fill(got.body.data(), got.body.size(), timeout_ms)) return std::nullopt;
    return got;
  }

 private:
  bool fill(void* into, size_t bytes, int timeout_ms) {
    for (size_t have = 0; have < bytes;) {
      if (!readable(fd_.get(), timeout_ms)) return false;
      char* rest = static_cast<char*>(into) + have;
      const ssize_t got = uninterrupted([&] { return recv(fd_.get(), rest, bytes - have, 0); });
      if (got <= 0) return false;
      have += static_cast<size_t>(got);
    }
    return true;
  }
  tcp::Fd fd_;
};

/// Listens on loopback.
class Listener {
 public:
  Listener() : fd_(bound_socket()), address_(address_of(fd_)) {
    require(listen(fd_.get(), 8) == 0, "a port");
  }
  const std::string& address() const { return address_; }
  Socket accept() {
    return Socket(tcp::Fd(
        uninterrupted([this] { return accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC); })));
  }

 private:
  tcp::Fd fd_;
  std::string address_;
};

}  // namespace fuzz
