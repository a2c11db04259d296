/* fabric/verbs/setup.h: connects queue pairs on a thread of its own, as the kernel may look for the
   peer's address for a second. */
#pragma once

#include "fabric/verbs/library.h"

#if JAXRDMA_HAVE_VERBS

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/verbs/queue_pair.h"

namespace jaxrdma::fabric::verbs {

/// One thread, started at the first question; joined by the destructor.
class Setup {
 public:
  struct Answer {
    EndpointId endpoint;
    uint32_t generation;
    Status status;
  };

  /// `ready` is called on the set-up thread after an answer has been added.
  explicit Setup(std::function<void()> ready) : ready_(std::move(ready)) {}
  ~Setup();

  void ask(EndpointId endpoint, uint32_t generation, std::shared_ptr<QueuePair> queue_pair,
           const ConnectionParameters& peer);
  /// The answers so far, which are then forgotten.
  std::vector<Answer> take();

 private:
  struct Question {
    EndpointId endpoint;
    uint32_t generation;
    std::shared_ptr<QueuePair> queue_pair;
    ConnectionParameters peer;
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

}  // namespace jaxrdma::fabric::verbs

#endif
