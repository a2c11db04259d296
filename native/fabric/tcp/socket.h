/* fabric/tcp/socket.h: descriptors, addresses and socket options. */
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace jaxrdma::fabric::tcp {

/// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

/// "Connection refused (errno 111)".
std::string errno_text(int error);

/// An IPv4 or IPv6 address with its port.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  /// "127.0.0.1:80", "[::1]:80".
  std::string text() const;
};

struct HostPort {
  std::string host;
  std::string port;
};
/// Takes "host:port" and "[::1]:port" apart.
Result<HostPort> split_address(const std::string& address);

/// Addresses of a host. `numeric` forbids asking a name service, so that the call does not block;
/// then an empty result means that the host is a name.
Result<std::vector<SocketAddress>> resolve(const HostPort& where, bool numeric, bool passive);

/// Options of every data connection. `silence_timeout_ms` as in fabric::Options.
void tune(int fd, int silence_timeout_ms);

int64_t monotonic_ns();

}  // namespace jaxrdma::fabric::tcp
