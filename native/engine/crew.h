/* engine/crew.h: threads of which one leads, while the others run callbacks or wait for their turn.

   The leader makes progress until an operation has ended. Then it hands the lead on and runs the
   callback itself, so that nobody need be woken between the completion that ended the operation and
   the program that waits for it (the pattern is known as leader and followers).

   XLA runs the rest of a program on the thread that completes its custom call, and that rest may
   wait for another device whose own completion is still to come. So somebody always leads, and a
   callback never waits for a thread that another callback holds: where no thread is idle, a new one
   is made. */
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace jaxrdma {

class Crew {
 public:
  using Task = std::function<void()>;

  /// `lead`: makes progress until there is a callback to run, and returns it; an empty one when
  /// there will be no more, which ends the crew. Called by one thread at a time.
  Crew(const char* thread_name, std::function<Task()> lead);
  ~Crew() { join(); }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  /// Waits until `lead` has ended it and every callback has run. Not to be called from a callback.
  void join();

 private:
  void serve();
  void hire();

  const char* name_;
  const std::function<Task()> lead_;
  std::mutex lock_;  ///< guards everything below
  std::condition_variable turn_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;   ///< threads that wait for the lead
  bool led_ = false;  ///< somebody leads
  bool ended_ = false;
};

}  // namespace jaxrdma
