/* tests/fuzz/raw.h: peers that speak frames of the tcp fabric by hand, on loopback, and so also
   what no peer of ours says; and how a fuzz target says that something is wrong. */
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
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

/// One end of a connection.
class Socket {
 public:
  explicit Socket(tcp::Fd fd) : fd_(std::move(fd)) {
    const int on = 1;
    setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  /// To "127.0.0.1:port".
  static Socket connect(const std::string& address) {
    tcp::Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in where{};
    where.sin_family = AF_INET;
    where.sin_port =
        htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const auto* to = reinterpret_cast<const sockaddr*>(&where);
    require(::connect(fd.get(), to, sizeof(where)) == 0, "the port is open");
    return Socket(std::move(fd));
  }

  void send(const std::string& bytes) {
    (void)!::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
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
  void wait(int timeout_ms) {
    pollfd what{fd_.get(), POLLIN, 0};
    ::poll(&what, 1, timeout_ms);
  }
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
      pollfd what{fd_.get(), POLLIN, 0};
      if (::poll(&what, 1, timeout_ms) <= 0) return false;
      const ssize_t got = recv(fd_.get(), static_cast<char*>(into) + have, bytes - have, 0);
      if (got <= 0) return false;
      have += static_cast<size_t>(got);
    }
    return true;
  }
  tcp::Fd fd_;
};

/// Listens on a free port of loopback.
class Listener {
 public:
  Listener() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in where{};
    where.sin_family = AF_INET;
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* address = reinterpret_cast<sockaddr*>(&where);
    require(bind(fd_.get(), address, sizeof(where)) == 0 && listen(fd_.get(), 8) == 0, "a port");
    socklen_t bytes = sizeof(where);
    getsockname(fd_.get(), address, &bytes);
    address_ = "127.0.0.1:" + std::to_string(ntohs(where.sin_port));
  }
  const std::string& address() const { return address_; }
  Socket accept() { return Socket(tcp::Fd(accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC))); }

 private:
  tcp::Fd fd_;
  std::string address_;
};

}  // namespace fuzz
