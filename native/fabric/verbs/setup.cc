/* fabric/verbs/setup.cc: connects queue pairs on a thread of its own. */
#include "fabric/verbs/setup.h"

#if JAXRDMA_HAVE_VERBS

#include <pthread.h>

#include <utility>

namespace jaxrdma::fabric::verbs {

Setup::~Setup() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    questions_.clear();
  }
  asked_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Setup::ask(EndpointId endpoint, uint32_t generation, std::shared_ptr<QueuePair> queue_pair,
                const ConnectionParameters& peer) {
  const std::lock_guard lock(mutex_);
  questions_.push_back({endpoint, generation, std::move(queue_pair), peer});
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run(); });
    pthread_setname_np(thread_.native_handle(), "jaxrdma-setup");
  }
  asked_.notify_all();
}

std::vector<Setup::Answer> Setup::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(answers_, {});
}

void Setup::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    asked_.wait(lock, [this] { return closing_ || !questions_.empty(); });
    if (closing_) return;
    Question question = std::move(questions_.front());
    questions_.pop_front();
    lock.unlock();
    Status status = question.queue_pair->connect(question.peer);
    question.queue_pair.reset();
    lock.lock();
    answers_.push_back({question.endpoint, question.generation, std::move(status)});
    lock.unlock();
    ready_();
    lock.lock();
  }
}

}  // namespace jaxrdma::fabric::verbs

#endif
