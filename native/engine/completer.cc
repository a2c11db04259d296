/* engine/completer.cc: see completer.h. */
#include "engine/completer.h"

#include <pthread.h>

#include <utility>

namespace jaxrdma {
namespace {
thread_local const Completer* current_completer = nullptr;
}  // namespace

bool Completer::inside() const { return current_completer == this; }

void Completer::run(std::function<void()> task) {
  std::unique_lock guard(lock_);
  if (closing_) {
    guard.unlock();
    task();
    return;
  }
  tasks_.push_back(std::move(task));
  // Idle threads already promised to earlier tasks do not count: each task must have a thread that
  // nobody holds.
  if (tasks_.size() > idle_) {
    threads_.emplace_back([this] { serve(); });
    pthread_setname_np(threads_.back().native_handle(), name_);
  }
  guard.unlock();
  task_added_.notify_one();
}

void Completer::serve() {
  current_completer = this;
  std::unique_lock guard(lock_);
  while (true) {
    if (tasks_.empty()) {
      if (closing_) return;
      ++idle_;
      task_added_.wait(guard, [this] { return !tasks_.empty() || closing_; });
      --idle_;
      continue;
    }
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    guard.unlock();
    task();
    task = nullptr;
    guard.lock();
  }
}

void Completer::close() {
  std::vector<std::thread> threads;
  {
    std::lock_guard guard(lock_);
    closing_ = true;
    threads.swap(threads_);
  }
  task_added_.notify_all();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace jaxrdma
