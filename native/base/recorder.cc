/* base/recorder.cc: a ring of sequence-locked slots. */
#include "base/recorder.h"

#include <time.h>

#include <array>
#include <bit>
#include <cstring>

namespace jaxrdma {

namespace {
constexpr size_t kWords = sizeof(Record) / sizeof(uint64_t);

int64_t realtime_ns() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}
}  // namespace

const char* stage_name(Stage stage) {
  switch (stage) {
    case Stage::kQueued:
      return "queued";
    case Stage::kPosted:
      return "posted";
    case Stage::kCompleted:
      return "completed";
    case Stage::kConsumed:
      return "consumed";
    case Stage::kLanded:
      return "landed";
    case Stage::kReduced:
      return "reduced";
    case Stage::kPublished:
      return "published";
    case Stage::kDropped:
      return "dropped";
    case Stage::kUpdating:
      return "updating";
    case Stage::kAnswered:
      return "answered";
  }
  return "unknown";
}

/// The n-th record ever lies in slot n mod capacity. `sequence` is 2n+1 while it is written and
/// 2n+2 once it is whole, so that a reader knows which record it saw. The words are atomics because
/// a reader may look while a writer writes; each is stored with release and loaded with acquire, so
/// that whoever saw a new word also sees the new sequence.
struct Recorder::Slot {
  std::atomic<uint64_t> sequence{0};
  std::array<std::atomic<uint64_t>, kWords> words{};
};

Recorder::Recorder(size_t capacity)
    : mask_(std::bit_ceil(capacity == 0 ? size_t{1} : capacity) - 1), slots_(new Slot[mask_ + 1]) {}

Recorder::~Recorder() = default;

void Recorder::add(Stage stage, uint16_t flow, int64_t step, uint32_t partition, uint16_t peer) {
  Record record{};
  record.time_ns = realtime_ns();
  record.step = step;
  record.partition = partition;
  record.flow = flow;
  record.peer = peer;
  record.stage = stage;
  const auto words = std::bit_cast<std::array<uint64_t, kWords>>(record);

  const uint64_t n = next_.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = slots_[n & mask_];
  // The ring went once around while another thread was still writing here, or overtook us: this
  // record is lost rather than mixed with the other.
  uint64_t before = slot.sequence.load(std::memory_order_relaxed);
  if ((before & 1) != 0 || before > 2 * n ||
      !slot.sequence.compare_exchange_strong(before, 2 * n + 1, std::memory_order_acquire)) {
    lost_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  for (size_t i = 0; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_release);
  slot.sequence.store(2 * n + 2, std::memory_order_release);
}

RecordCounts Recorder::counts() const {
  return {next_.load(std::memory_order_relaxed), lost_.load(std::memory_order_relaxed)};
}

std::vector<Record> Recorder::snapshot() const {
  const uint64_t end = next_.load(std::memory_order_acquire);
  const uint64_t capacity = mask_ + 1;
  std::vector<Record> records;
  records.reserve(end < capacity ? end : capacity);
  for (uint64_t n = end < capacity ? 0 : end - capacity; n < end; ++n) {
    const Slot& slot = slots_[n & mask_];
    if (slot.sequence.load(std::memory_order_acquire) != 2 * n + 2) continue;
    std::array<uint64_t, kWords> words;
    for (size_t i = 0; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_acquire);
    if (slot.sequence.load(std::memory_order_relaxed) != 2 * n + 2) continue;
    records.push_back(std::bit_cast<Record>(words));
  }
  return records;
}

}  // namespace jaxrdma
