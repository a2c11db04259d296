/* fabric/tcp/resolver.cc: looks up host names on a thread of its own. */
#include "fabric/tcp/resolver.h"

#include <pthread.h>

#include <utility>

namespace jaxrdma::fabric::tcp {

Resolver::~Resolver() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  asked_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Resolver::ask(EndpointId endpoint, HostPort where) {
  const std::lock_guard lock(mutex_);
  questions_.push_back({endpoint, std::move(where)});
  if (!thread_.joinable()) {
    thread_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "jaxrdma-names");
      run();
    });
  }
  asked_.notify_one();
}

std::vector<Resolver::Answer> Resolver::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(answers_, {});
}

void Resolver::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    asked_.wait(lock, [this] { return closing_ || !questions_.empty(); });
    if (closing_) return;
    const Question question = std::move(questions_.front());
    questions_.pop_front();
    lock.unlock();
    auto addresses = resolve(question.where, /*numeric=*/false, /*passive=*/false);
    lock.lock();
    answers_.push_back({question.endpoint, std::move(addresses)});
    lock.unlock();
    ready_();
    lock.lock();
  }
}

}  // namespace jaxrdma::fabric::tcp
