/* engine/crew.cc: see crew.h. */
#include "engine/crew.h"

#include <pthread.h>

#include <utility>

namespace jaxrdma {

Crew::Crew(const char* thread_name, std::function<Task()> lead)
    : name_(thread_name), lead_(std::move(lead)) {
  std::lock_guard guard(lock_);
  hire();
}

void Crew::hire() {
  threads_.emplace_back([this] { serve(); });
  pthread_setname_np(threads_.back().native_handle(), name_);
}

void Crew::serve() {
  std::unique_lock guard(lock_);
  while (true) {
    ++idle_;
    turn_.wait(guard, [this] { return !led_ || ended_; });
    --idle_;
    if (ended_) return;
    led_ = true;
    guard.unlock();
    Task task = lead_();
    guard.lock();
    led_ = false;
    if (!task) {
      ended_ = true;
      turn_.notify_all();
      return;
    }
    if (idle_ == 0) {
      hire();
    } else {
      turn_.notify_one();
    }
    guard.unlock();
    task();
    task = nullptr;
    guard.lock();
  }
}

void Crew::join() {
  // Whoever hires holds the lead, and ends before the last one does: a thread that was hired
  // meanwhile is found in the next round.
  while (true) {
    std::vector<std::thread> threads;
    {
      std::lock_guard guard(lock_);
      threads.swap(threads_);
    }
    if (threads.empty()) return;
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace jaxrdma
