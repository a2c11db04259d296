/* engine/completer.h: threads that run completion callbacks, as many as are busy at one time.

   XLA runs the rest of a program on the thread that completes its custom call, and that rest may
   wait for another device whose own completion is still to come. So a callback must never wait for
   a thread that another callback holds: where no idle thread is left, a new one is made. */
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace jaxrdma {

class Completer {
 public:
  explicit Completer(const char* thread_name) : name_(thread_name) {}
  ~Completer() { close(); }
  Completer(const Completer&) = delete;
  Completer& operator=(const Completer&) = delete;

  /// Runs `task` on a thread of its own, soon. After close: at once, on the calling thread.
  void run(std::function<void()> task);
  /// Waits for every task that was handed in, joins every thread. Not to be called from a task.
  void close();
  /// True on a thread of this completer.
  bool inside() const;

 private:
  void serve();

  const char* name_;
  std::mutex lock_;  ///< guards everything below
  std::condition_variable task_added_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool closing_ = false;
};

}  // namespace jaxrdma
