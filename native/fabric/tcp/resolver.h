/* fabric/tcp/resolver.h: looks up host names on a thread of its own, as getaddrinfo blocks. */
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/tcp/socket.h"

namespace jaxrdma::fabric::tcp {

/// One thread, started at the first name; joined by the destructor, which may have to wait for a
/// name server.
class Resolver {
 public:
  struct Answer {
    EndpointId endpoint;
    Result<std::vector<SocketAddress>> addresses;
  };

  /// `ready` is called on the resolver's thread after an answer has been added.
  explicit Resolver(std::function<void()> ready) : ready_(std::move(ready)) {}
  ~Resolver();

  void ask(EndpointId endpoint, HostPort where);
  /// The answers so far, which are then forgotten.
  std::vector<Answer> take();

 private:
  struct Question {
    EndpointId endpoint;
    HostPort where;
  };
  void run();

  const std::function<void()> ready_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable asked_;
  std::deque<Question> questions_;
  std::vector<Answer> answers_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace jaxrdma::fabric::tcp
