/* base/recorder.h: the flight recorder: the last few thousand things that happened, kept in fixed
 * memory. */
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace jaxrdma {

/// Where a partition is on its way. The first four are what a wait can be waiting for.
enum class Stage : uint8_t {
  kQueued = 0,     ///< known to the engine, not yet given to the fabric
  kPosted = 1,     ///< given to the fabric
  kCompleted = 2,  ///< the fabric is done with the source
  kConsumed =
      3,  ///< the answer is in the result buffer (worker); the contribution is in the sum (server)
  kLanded = 4,     ///< server: a contribution arrived
  kReduced = 5,    ///< server: all contributions are in the sum
  kPublished = 6,  ///< server: the parameters of the next step are there
  kDropped = 7,    ///< stale or duplicate; counted
  kUpdating = 8,   ///< server: all sums of a flow are there, the update may begin
  kAnswered = 9,   ///< server: the fabric is done with an answer
};
const char* stage_name(Stage stage);

/// One thing that happened. 32 bytes, handed to Python as a NumPy structured array of the same
/// layout.
struct Record {
  int64_t time_ns;  ///< CLOCK_REALTIME
  int64_t step;
  uint32_t partition;  ///< index in the plan
  uint16_t flow;
  uint16_t peer;  ///< worker index on a server, server index on a worker
  Stage stage;
  uint8_t reserved[7];
};
static_assert(sizeof(Record) == 32);

/// How many there were so far.
struct RecordCounts {
  uint64_t added = 0;  ///< also those that newer ones have pushed out
  uint64_t lost = 0;   ///< of these, never kept: another thread was still writing in their place
};

/// A ring of Records that any thread may add to, without locks or allocation.
class Recorder {
 public:
  explicit Recorder(size_t capacity);
  void add(Stage stage, uint16_t flow, int64_t step, uint32_t partition, uint16_t peer);
  /// Oldest first. A record that is being written during the call is left out.
  std::vector<Record> snapshot() const;
  RecordCounts counts() const;

 private:
  struct Slot;
  size_t mask_;
  std::unique_ptr<Slot[]> slots_;
  std::atomic<uint64_t> next_{0};
  std::atomic<uint64_t> lost_{0};

 public:
  ~Recorder();
};

}  // namespace jaxrdma
