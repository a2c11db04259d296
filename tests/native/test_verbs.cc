/* tests/native/test_verbs.cc: what only the verbs fabric has: queue pairs that fail and are
   replaced.

   Needs an RDMA device, so it runs with TEST_TRANSPORT=verbs only. TEST_LONG=1: 100,000 messages
   and 50 failures. */
#include "fabric/verbs/library.h"

#if JAXRDMA_HAVE_VERBS

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

#include "fabric/verbs/fabric.h"
#include "transports.h"

namespace {

using namespace jaxrdma;
using namespace jaxrdma::fabric;
using Clock = std::chrono::steady_clock;
using Kind = Event::Kind;

#define VERBS_TEST(title) TEST_CASE(title* doctest::skip(testing::transport() != "verbs"))

constexpr size_t kSlots = 16;
constexpr size_t kSlotBytes = 8192;
constexpr size_t kBookBytes = 64 << 10;
constexpr size_t kReaders = 4;

uint64_t checksum(const std::byte* data, size_t bytes) {  // FNV-1a
  uint64_t sum = 14695981039346656037ull;
  for (size_t i = 0; i < bytes; ++i)
    sum = (sum ^ static_cast<uint64_t>(data[i])) * 1099511628211ull;
  return sum;
}

/// Lies at the beginning of a slot.
struct Letter {
  uint64_t number;
  uint64_t bytes;  ///< that follow
  uint64_t sum;    ///< of what follows
};

/// What stands at a place of everybody's book.
std::byte page(size_t place) { return static_cast<std::byte>(place * 2654435761u >> 11); }

/// One end of a stream of letters in both directions: writes letters 0, 1, ... into the peer's
/// slots, and checks those that come. Meanwhile reads in the peer's book, here and there.
class Correspondent {
 public:
  explicit Correspondent(uint32_t seed)
      : random_(seed), out_(kSlots * kSlotBytes), in_(out_.size()) {
    auto made = make_fabric(testing::next_transport(), {.receive_depth = kSlots});
    REQUIRE_MESSAGE(made.ok(), made.status().message());
    fabric = std::move(made.value());
    out_region_ =
        std::move(fabric->register_memory(out_.data(), out_.size(), Access::kLocal).value());
    in_region_ =
        std::move(fabric->register_memory(in_.data(), in_.size(), Access::kRemoteWrite).value());
    for (uint32_t i = 0; i < kSlots; ++i) free_.push_back(i);
    for (size_t i = 0; i < kBookBytes; ++i) book_.push_back(page(i));
    book_region_ =
        std::move(fabric->register_memory(book_.data(), kBookBytes, Access::kRemoteRead).value());
    copies_.resize(kReaders * kBookBytes);
    copies_region_ = std::move(
        fabric->register_memory(copies_.data(), copies_.size(), Access::kRemoteWrite).value());
    for (size_t i = 0; i < kReaders; ++i) idle_.push_back(i);
  }

  Endpoint* endpoint() { return fabric->endpoint(id); }
  RemoteSlice inbox() const {
    return {reinterpret_cast<uint64_t>(in_region_->data()), in_region_->remote_key()};
  }

  RemoteSlice book() const {
    return {reinterpret_cast<uint64_t>(book_region_->data()), book_region_->remote_key()};
  }

  /// Reads until `upto` have been asked for, as many at a time as there are readers.
  void read_all(uint64_t upto, RemoteSlice there) {
    while (asked < upto && !idle_.empty()) {
      const size_t reader = idle_.back();
      idle_.pop_back();
      const size_t begin = random_() % kBookBytes;
      const size_t bytes = 1 + random_() % (kBookBytes - begin);
      ranges_[reader] = {begin, bytes};
      std::byte* const into = copies_.data() + reader * kBookBytes;
      std::fill_n(into, bytes, std::byte{0});
      const Status posted = endpoint()->read({copies_region_.get(), into, bytes},
                                             {there.address + begin, there.key}, 1000 + reader);
      REQUIRE_MESSAGE(posted.ok(), posted.message());
      ++asked;
    }
  }

  void write_all(uint64_t upto, const Correspondent& peer) {
    const RemoteSlice there = peer.inbox();
    while (sent < upto && !free_.empty() && endpoint()->credits() > 0) {
      // The peer must have read what lay at the same place before.
      if (sent >= kSlots && !peer.seen_.contains(sent - kSlots)) return;
      const uint32_t slot = static_cast<uint32_t>(sent % kSlots);
      const auto found = std::find(free_.begin(), free_.end(), slot);
      if (found == free_.end()) return;
      free_.erase(found);
      std::byte* place = out_.data() + slot * kSlotBytes;
      Letter letter{sent, random_() % (kSlotBytes - sizeof(Letter)), 0};
      if (sent % 3 == 0) letter.bytes %= 100;  // short ones are copied into the work request
      for (size_t i = 0; i < letter.bytes; ++i)
        place[sizeof(letter) + i] = static_cast<std::byte>(random_());
      letter.sum = checksum(place + sizeof(letter), letter.bytes);
      std::memcpy(place, &letter, sizeof(letter));
      const Slice slice{out_region_.get(), place, sizeof(letter) + letter.bytes};
      const Status posted =
          endpoint()->write({&slice, 1}, {there.address + slot * kSlotBytes, there.key},
                            static_cast<Immediate>(sent), slot);
      REQUIRE_MESSAGE(posted.ok(), posted.message());
      ++sent;
    }
  }

  bool poll() {
    events_.clear();
    const bool moved = fabric->poll(events_);
    for (const Event& event : events_) {
      if (event.kind == Kind::kConnected) id = event.endpoint, connected = true;
      if (event.kind == Kind::kDisconnected) ended = event.status.message();
      if (event.kind == Kind::kWriteDone) free_.push_back(static_cast<uint32_t>(event.request));
      if (event.kind == Kind::kReceived) receive(event);
      if (event.kind == Kind::kReadDone) read_done(event);
    }
    return moved;
  }

  std::unique_ptr<Fabric> fabric;
  EndpointId id = 0;
  bool connected = false;
  std::string ended;
  uint64_t sent = 0, received = 0, wrong = 0;
  uint64_t asked = 0, read = 0, misread = 0;

 private:
  void read_done(const Event& event) {
    const size_t reader = event.request - 1000;
    const auto [begin, bytes] = ranges_[reader];
    bool right = event.bytes == bytes;
    for (size_t i = 0; i < bytes; ++i)
      right = right && copies_[reader * kBookBytes + i] == page(begin + i);
    misread += !right;
    ++read;
    idle_.push_back(reader);
  }

  void receive(const Event& event) {
    const std::byte* place = in_.data() + event.immediate % kSlots * kSlotBytes;
    Letter letter;
    std::memcpy(&letter, place, sizeof(letter));
    // Over several devices they may come in any order; none comes twice.
    const bool due = seen_.insert(event.immediate).second &&
                     (testing::links() > 1 || event.immediate == received);
    const bool right = due && letter.number == event.immediate &&
                       event.bytes == sizeof(letter) + letter.bytes &&
                       letter.sum == checksum(place + sizeof(letter), letter.bytes);
    wrong += !right;
    ++received;
    if (Endpoint* open = endpoint()) open->release(1);
  }

  std::minstd_rand random_;
  std::vector<std::byte> out_, in_;
  std::vector<std::byte> book_, copies_;
  std::unique_ptr<MemoryRegion> out_region_, in_region_, book_region_, copies_region_;
  std::array<std::pair<size_t, size_t>, kReaders> ranges_;
  std::vector<size_t> idle_;
  std::vector<uint32_t> free_;
  std::unordered_set<uint64_t> seen_;  ///< letters that came
  std::vector<Event> events_;
};

bool turn(Correspondent& a, Correspondent& b, const std::function<bool()>& done) {
  const auto deadline = Clock::now() + std::chrono::seconds(60);
  while (!done()) {
    const bool moved = a.poll() | b.poll();
    if (moved) continue;
    if (Clock::now() > deadline) return false;
    a.fabric->wait(1);
    b.fabric->wait(1);
  }
  return true;
}

/// What a fault of the device does to a queue pair.
void break_queue_pair(Correspondent& who, uint32_t link) {
  Endpoint* const all = who.endpoint();
  const auto* one = testing::links() > 1 ? static_cast<verbs::Bundle*>(all)->link(link)
                                         : static_cast<verbs::VerbsEndpoint*>(all);
  if (one->queue_pair() != nullptr) one->queue_pair()->fail();
}

}  // namespace

VERBS_TEST("queue pairs that fail are replaced, and no letter is lost, changed or doubled") {
  const bool full = std::getenv("TEST_LONG") != nullptr;
  const uint64_t letters = full ? 50'000 : 2'000;  // in each direction
  const uint64_t failures = full ? 50 : 10;
  const uint64_t reads = letters / 20;
  Correspondent a(1), b(2);
  const std::string address =
      b.fabric
          ->listen("127.0.0.1:0", [](EndpointId, const Hello&) { return std::vector<std::byte>(); })
          .value();
  Hello hello;
  hello.job = "letters";
  hello.token.resize(Hello::kTokenBytes);
  a.id = a.fabric->connect(address, hello, 20'000).value();
  REQUIRE(turn(a, b, [&] { return a.connected && b.connected; }));
  std::minstd_rand random(7);
  for (uint64_t failure = 1; failure <= failures; ++failure) {
    CAPTURE(failure);
    const uint64_t upto = letters * failure / failures;
    const uint64_t read_upto = reads * failure / failures;
    const uint64_t moment = letters * (failure - 1) / failures + random() % (letters / failures);
    bool broken = false;
    REQUIRE(turn(a, b, [&] {
      if (!a.ended.empty() || !b.ended.empty()) return true;
      a.write_all(upto, b);
      b.write_all(upto, a);
      a.read_all(read_upto, b.book());
      b.read_all(read_upto, a.book());
      if (!broken && a.sent >= moment) {
        broken = true;
        // One side, the other, or both at once.
        const uint32_t which = random() % 3;
        const uint32_t link = random() % testing::links();
        if (which != 1) break_queue_pair(a, link);
        if (which != 0) break_queue_pair(b, link);
      }
      return a.received == upto && b.received == upto && a.read == read_upto && b.read == read_upto;
    }));
    REQUIRE_MESSAGE(a.ended.empty(), a.ended);
    REQUIRE_MESSAGE(b.ended.empty(), b.ended);
  }
  CHECK(a.wrong == 0);
  CHECK(b.wrong == 0);
  CHECK(a.sent == letters);
  CHECK(b.sent == letters);
  CHECK(a.misread == 0);
  CHECK(b.misread == 0);
}

#endif
