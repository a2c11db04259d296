/* tests/native/test_wait.cc: what is to come soon is looked for, the rest is slept for. */
#include <doctest/doctest.h>

#include <chrono>

#include "engine/wait.h"

namespace {

using namespace jaxrdma;
using std::chrono::microseconds;

constexpr microseconds kLimit(1000), kStep(1);

class Waits {
 public:
  explicit Waits(microseconds limit = kLimit) : wait_(limit) {}

  /// A wait of `length`; how much of it was spent looking.
  microseconds of(microseconds length) {
    const auto ends = now_ + length;
    microseconds looked{0};
    for (; now_ < ends; now_ += kStep)
      if (wait_.look_again(now_)) looked += kStep;
    wait_.worked(now_);
    // More work at once, which is no wait.
    wait_.worked(now_);
    return looked;
  }

 private:
  Wait::Clock::time_point now_{};
  Wait wait_;
};

TEST_CASE("short waits are spent looking") {
  Waits waits;
  for (int i = 0; i < 100; ++i) CHECK(waits.of(microseconds(100 + i)) == microseconds(100 + i));
}

TEST_CASE("of a row of long waits the first few are looked for, no longer than the limit") {
  Waits waits;
  for (const auto length : {microseconds(1500), microseconds(50'000)}) {
    CAPTURE(length.count());
    microseconds looked{0};
    for (int i = 0; i < 100; ++i) {
      const auto once = waits.of(length);
      CHECK(once <= kLimit);
      looked += once;
      if (i >= 5) CHECK(once == microseconds(0));
    }
    CHECK(looked <= 5 * kLimit);
    for (int i = 0; i < 20; ++i) waits.of(microseconds(10));
    CHECK(waits.of(microseconds(15)) == microseconds(15));
  }
}

TEST_CASE("a long wait among short ones is looked for no longer than they promised") {
  Waits waits;
  for (int i = 0; i < 50; ++i) waits.of(microseconds(20));
  const auto looked = waits.of(microseconds(100'000));
  CHECK(looked >= microseconds(20));
  CHECK(looked <= microseconds(60));
}

TEST_CASE("with a limit of 0 nothing is looked for") {
  Waits waits(microseconds(0));
  for (int i = 0; i < 10; ++i) CHECK(waits.of(microseconds(5)) == microseconds(0));
}

}  // namespace
