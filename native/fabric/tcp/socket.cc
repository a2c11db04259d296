/* fabric/tcp/socket.cc: descriptors, addresses and socket options. */
#include "fabric/tcp/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace jaxrdma::fabric::tcp {

void Fd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

std::string errno_text(int error) {
  return std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
}

std::string SocketAddress::text() const {
  char host[INET6_ADDRSTRLEN] = "?";
  if (family() == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&storage);
    inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof(host));
    return "[" + std::string(host) + "]:" + std::to_string(ntohs(v6->sin6_port));
  }
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&storage);
  inet_ntop(AF_INET, &v4->sin_addr, host, sizeof(host));
  return std::string(host) + ":" + std::to_string(ntohs(v4->sin_port));
}

Result<HostPort> split_address(const std::string& address) {
  const Status bad(Code::kInvalidArgument,
                   "'" + address + "' is not an address; expected host:port or [ipv6]:port");
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0) return bad;
  HostPort parts{address.substr(0, colon), address.substr(colon + 1)};
  if (parts.host.front() == '[') {
    if (parts.host.size() < 3 || parts.host.back() != ']') return bad;
    parts.host = parts.host.substr(1, parts.host.size() - 2);
  } else if (parts.host.find(':') != std::string::npos) {
    return bad;  // an IPv6 address without brackets: where its port begins is anybody's guess
  }
  if (parts.port.empty() || parts.port.size() > 5) return bad;
  int port = 0;
  for (const char c : parts.port) {
    if (c < '0' || c > '9') return bad;
    port = port * 10 + (c - '0');
  }
  if (port > 65535) return bad;
  return parts;
}

Result<std::vector<SocketAddress>> resolve(const HostPort& where, bool numeric, bool passive) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (numeric ? AI_NUMERICHOST : 0) | (passive ? AI_PASSIVE : 0);
  addrinfo* list = nullptr;
  const int error = getaddrinfo(where.host.c_str(), where.port.c_str(), &hints, &list);
  if (error != 0) {
    if (numeric && error == EAI_NONAME) return std::vector<SocketAddress>{};
    const std::string reason = error == EAI_SYSTEM ? errno_text(errno) : gai_strerror(error);
    return Status(Code::kUnavailable, "could not look up host '" + where.host + "': " + reason);
  }
  std::vector<SocketAddress> addresses;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_addrlen > sizeof(sockaddr_storage)) continue;
    SocketAddress address;
    std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
    address.bytes = entry->ai_addrlen;
    addresses.push_back(address);
  }
  freeaddrinfo(list);
  return addresses;
}

void tune(int fd, int silence_timeout_ms) {
  const int on = 1;
  // Frames leave whole, in one call; waiting for more would only delay the last piece of each.
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  // A peer whose machine vanished without a word is noticed after idle + count * interval, 25 s.
  // The control plane's heartbeats are quicker; this only keeps dead connections from staying for
  // ever.
  int idle_s = 10, interval_s = 5;
  const int count = 3;
  if (silence_timeout_ms > 0) {
    // Then this one decides, also while something is on the way; asked often enough to be in time.
    const auto limit_ms = static_cast<unsigned>(silence_timeout_ms);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, sizeof(limit_ms));
    idle_s = interval_s = std::clamp(silence_timeout_ms / 8000, 1, 5);
  }
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof(count));
}

int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace jaxrdma::fabric::tcp
