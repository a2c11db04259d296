/* engine/wait.h: how long a thread looks for work before it sleeps.

   To sleep and be woken takes longer than the answer of a near peer takes to come; to look for it
   takes a processor that others could use. So a wait that the last ones promise to be short is
   spent looking, for up to twice as long as they took, and one that they promise to be long is
   slept at once. Waits are measured whether slept or not: after a few short ones the thread looks
   again.

   Not thread-safe. */
#pragma once

#include <algorithm>
#include <chrono>

namespace jaxrdma {

class Wait {
 public:
  using Clock = std::chrono::steady_clock;

  /// `limit`: no wait is spent looking for longer; 0: none is at all.
  explicit Wait(std::chrono::microseconds limit) : limit_(limit), expected_(limit / 2) {}

  /// There was nothing to do at `now`. Whether to look again, rather than sleep.
  bool look_again(Clock::time_point now) {
    if (!waiting_) {
      waiting_ = true;
      began_ = now;
    }
    return now - began_ < std::min(2 * expected_, limit_) && expected_ <= limit_;
  }

  /// There was something to do at `now`.
  void worked(Clock::time_point now) {
    if (!waiting_) return;
    waiting_ = false;
    // A long wait, as that for the next step, does not count for more than a few short ones.
    const auto took = std::min<Clock::duration>(now - began_, 4 * limit_);
    expected_ += (took - expected_) / 4;
  }

 private:
  const Clock::duration limit_;
  Clock::duration expected_;  ///< moving average of the waits
  bool waiting_ = false;
  Clock::time_point began_;
};

}  // namespace jaxrdma
