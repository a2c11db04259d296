/* tests/native/lines.h: connections that carry numbered letters, over the devices of the fake
   libibverbs (fake_verbs/fake_verbs.h), whose faults they have to bear.

   As the library is loaded once in a process, tests of it run alone: TEST_FAKE_VERBS says which
   variant JAXRDMA_IBVERBS_LIB names (full, old, incomplete), and without it they are skipped. */
#pragma once

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "fabric/verbs/fabric.h"
#include "fake_verbs/fake_verbs.h"

namespace testing {

namespace verbs = jaxrdma::fabric::verbs;
using jaxrdma::Result;
using jaxrdma::Status;
using jaxrdma::fabric::Access;
using jaxrdma::fabric::Endpoint;
using jaxrdma::fabric::EndpointId;
using jaxrdma::fabric::Event;
using jaxrdma::fabric::Fabric;
using jaxrdma::fabric::Hello;
using jaxrdma::fabric::Immediate;
using jaxrdma::fabric::MemoryRegion;
using jaxrdma::fabric::Options;
using jaxrdma::fabric::Slice;
using jaxrdma::fabric::VerbsOptions;

using Clock = std::chrono::steady_clock;
using Kind = Event::Kind;

/// Which variant of the fake TEST_FAKE_VERBS says there is.
inline std::string variant() {
  const char* value = std::getenv("TEST_FAKE_VERBS");
  return value == nullptr ? "" : value;
}

#define FAULT_TEST(title) TEST_CASE(title* doctest::skip(testing::variant() != "full"))

/// A function of the fake.
template <typename Function>
Function* fake(const char* name) {
  static void* const library = dlopen(std::getenv("JAXRDMA_IBVERBS_LIB"), RTLD_NOW | RTLD_LOCAL);
  REQUIRE(library != nullptr);
  void* const found = dlsym(library, name);
  REQUIRE(found != nullptr);
  return reinterpret_cast<Function*>(found);
}
#define FAKE(name) testing::fake<decltype(name)>(#name)

/// First in each test: when everything of it is gone, nothing may be left in the library, and
/// nothing have been done to it that a real one would punish.
struct Devices {
  Devices() { FAKE(fake_verbs_reset)(); }
  ~Devices() {
    const FakeVerbsAlive alive = FAKE(fake_verbs_alive)();
    CHECK(alive.contexts == 0);
    CHECK(alive.pds == 0);
    CHECK(alive.regions == 0);
    CHECK(alive.channels == 0);
    CHECK(alive.cqs == 0);
    CHECK(alive.qps == 0);
    CHECK(std::string(FAKE(fake_verbs_misuse)()) == "");
  }
};

// Far beyond what any of this takes, so that only a hang hits it, under sanitizers too.
inline constexpr auto kPatience = std::chrono::seconds(30);
inline constexpr uint32_t kSlots = 16;
inline constexpr size_t kSlotBytes = 1024;
// Every third letter is so short, and copied when it is posted.
inline constexpr size_t kInlineBytes = 40;

inline void check_says(const Status& status, std::initializer_list<std::string> words) {
  INFO(status.message());
  CHECK(!status.ok());
  for (const std::string& word : words) {
    CAPTURE(word);
    CHECK(status.message().find(word) != std::string::npos);
  }
}

/// One end of a connection that carries letters 0, 1, ... both ways.
struct End {
  EndpointId id = 0;
  bool connected = false;
  std::optional<Status> ended;
  uint64_t sent = 0, wrong = 0;
  uint64_t received = 0;        ///< all letters below
  std::vector<uint64_t> reads;  ///< the requests, as they were done
  uint64_t credit_events = 0;
  bool any_order = false;    ///< over several links
  std::set<uint64_t> ahead;  ///< letters that came before letter `received`
  uint64_t arrived() const { return received + ahead.size(); }
  bool keeps = false;  ///< releases nothing
  std::vector<std::byte> out = std::vector<std::byte>(kSlots * kSlotBytes), in = out;
  std::unique_ptr<MemoryRegion> out_region, in_region;
  std::array<bool, kSlots> busy{};
};

inline std::byte letter_byte(uint64_t number, size_t at) {
  return static_cast<std::byte>((number * 2654435761u + at * 40503u) >> 8);
}
inline size_t letter_bytes(uint64_t number) { return number % 3 == 0 ? kInlineBytes : kSlotBytes; }

inline VerbsOptions on(std::initializer_list<const char*> devices, int link_timeout_ms = 20'000) {
  VerbsOptions options;
  options.sources.clear();
  for (const char* device : devices) options.sources.emplace_back().device = device;
  options.link_timeout_ms = link_timeout_ms;
  return options;
}
inline VerbsOptions on(const char* device, int link_timeout_ms = 20'000) {
  return on({device}, link_timeout_ms);
}

/// Tests beside this one may listen where a node of this one has just done so.
inline std::string job_of_this_process() { return "faults " + std::to_string(getpid()); }

/// One process's fabric.
class Node {
 public:
  explicit Node(const VerbsOptions& verbs, Options options = {.receive_depth = kSlots}) {
    auto made = make_verbs_fabric(options, verbs);
    REQUIRE_MESSAGE(made.ok(), made.status().message());
    fabric = std::move(made.value());
    auto listening = fabric->listen(
        "127.0.0.1:0", [this](EndpointId id, const Hello& hello) -> Result<std::vector<std::byte>> {
          if (hello.job != job_of_this_process())
            return Status(jaxrdma::Code::kPermissionDenied, "another test's");
          accepted[hello.worker] = id;
          ++asked;
          return std::vector<std::byte>();
        });
    REQUIRE(listening.ok());
    address = listening.value();
  }

  bool poll() {
    events_.clear();
    const bool moved = fabric->poll(events_);
    for (const Event& event : events_) handle(event);
    return moved;
  }

  std::unique_ptr<Fabric> fabric;
  std::string address;
  std::unordered_map<uint32_t, EndpointId> accepted;  ///< by the number of the line
  uint32_t asked = 0;                                 ///< of the gatekeeper, how often
  std::unordered_map<EndpointId, End*> ends;

 private:
  void handle(const Event& event) {
    const auto found = ends.find(event.endpoint);
    if (found == ends.end()) return;
    End& end = *found->second;
    CHECK(!end.ended.has_value());  // nothing comes after the end
    switch (event.kind) {
      case Kind::kConnected:
        end.connected = true;
        break;
      case Kind::kDisconnected:
        end.ended = event.status;
        break;
      case Kind::kWriteDone:
        CHECK(end.busy[event.request]);
        end.busy[event.request] = false;
        break;
      case Kind::kReceived: {
        const uint64_t number = event.immediate;
        const std::byte* letter = end.in.data() + number % kSlots * kSlotBytes;
        const bool awaited = end.any_order ? number >= end.received && !end.ahead.contains(number)
                                           : number == end.received;
        bool right = awaited && event.bytes == letter_bytes(number);
        for (size_t i = 0; i < event.bytes && right; ++i)
          right = letter[i] == letter_byte(number, i);
        end.wrong += !right;
        end.ahead.insert(end.any_order ? number : end.received);
        while (end.ahead.erase(end.received) > 0) ++end.received;
        if (Endpoint* open = fabric->endpoint(end.id); open != nullptr && !end.keeps)
          open->release(1);
        break;
      }
      case Kind::kReadDone:
        end.reads.push_back(event.request);
        break;
      case Kind::kCredits:
        ++end.credit_events;
        break;
    }
  }
  std::vector<Event> events_;
};

inline bool turn(std::initializer_list<Node*> nodes, const std::function<bool()>& done) {
  const auto deadline = Clock::now() + kPatience;
  while (!done()) {
    bool moved = false;
    for (Node* node : nodes) moved |= node->poll();
    if (Clock::now() > deadline) return false;
    if (moved || done()) continue;
    for (Node* node : nodes) node->fabric->wait(1);
  }
  return true;
}

inline Hello hello_of(uint32_t number) {
  Hello hello;
  hello.job = job_of_this_process();
  hello.worker = number;
  hello.token.resize(Hello::kTokenBytes);
  return hello;
}

inline Result<EndpointId> connect(Node& from, Node& to, uint32_t number, int timeout_ms = 10'000) {
  return from.fabric->connect(to.address, hello_of(number), timeout_ms);
}

/// A connection between two nodes.
class Line {
 public:
  /// `number`: of its own among the lines of a test.
  Line(Node& from, Node& to, uint32_t number) : x_node(from), y_node(to) {
    begin(number);
    REQUIRE(turn({&x_node, &y_node}, [&] {
      meet(number);
      return x.connected && y_node.fabric->endpoint(y.id) != nullptr && y.connected;
    }));
    x.any_order = y.any_order = dynamic_cast<verbs::Bundle*>(x_end()) != nullptr;
  }
  /// Begun, and not awaited. Carries no letters before `enrol`.
  struct Begun {};
  Line(Node& from, Node& to, uint32_t number, Begun) : x_node(from), y_node(to), number_(number) {
    ask(number);
  }
  ~Line() {
    x_node.ends.erase(x.id);
    y_node.ends.erase(y.id);
  }
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  void meet() { meet(number_); }
  void enrol() {
    enrol(x_node, x);
    enrol(y_node, y);
  }
  Endpoint* x_end() { return x_node.fabric->endpoint(x.id); }
  Endpoint* y_end() { return y_node.fabric->endpoint(y.id); }
  /// A link of it; null where that is dead.
  verbs::VerbsEndpoint* x_link(uint32_t link = 0) { return link_of(x_end(), link); }
  verbs::VerbsEndpoint* y_link(uint32_t link = 0) { return link_of(y_end(), link); }
  uint32_t x_queue_pair(uint32_t link = 0) { return queue_pair(x_link(link)); }
  uint32_t y_queue_pair(uint32_t link = 0) { return queue_pair(y_link(link)); }
  bool ended() const { return x.ended.has_value() && y.ended.has_value(); }

  /// Posts what there is room for, up to letter `upto`.
  void write(uint64_t upto) {
    write_x(upto);
    write_y(upto);
  }
  void write_x(uint64_t upto) { write(x_end(), x, y, upto); }
  void write_y(uint64_t upto) { write(y_end(), y, x, upto); }

  Node& x_node;
  Node& y_node;
  End x, y;

 private:
  void begin(uint32_t number) {
    enrol();
    ask(number);
  }
  void ask(uint32_t number) {
    auto id = connect(x_node, y_node, number);
    REQUIRE_MESSAGE(id.ok(), id.status().message());
    x.id = id.value();
    x_node.ends[x.id] = &x;
  }
  void meet(uint32_t number) {
    const auto found = y_node.accepted.find(number);
    if (y.id != 0 || found == y_node.accepted.end()) return;
    y.id = found->second;
    y_node.ends[y.id] = &y;
  }
  static void enrol(Node& node, End& end) {
    auto out = node.fabric->register_memory(end.out.data(), end.out.size(), Access::kLocal);
    auto in = node.fabric->register_memory(end.in.data(), end.in.size(), Access::kRemoteReadWrite);
    REQUIRE((out.ok() && in.ok()));
    end.out_region = std::move(out.value());
    end.in_region = std::move(in.value());
  }
  static verbs::VerbsEndpoint* link_of(Endpoint* endpoint, uint32_t link) {
    if (auto* bundle = dynamic_cast<verbs::Bundle*>(endpoint)) return bundle->link(link);
    return link == 0 ? static_cast<verbs::VerbsEndpoint*>(endpoint) : nullptr;
  }
  static uint32_t queue_pair(const verbs::VerbsEndpoint* link) {
    REQUIRE((link != nullptr && link->queue_pair() != nullptr));
    return link->queue_pair()->number();
  }
  static void write(Endpoint* endpoint, End& from, End& to, uint64_t upto) {
    while (endpoint != nullptr && from.sent < upto && from.sent < to.received + kSlots &&
           endpoint->credits() > 0) {
      const auto slot = static_cast<uint32_t>(from.sent % kSlots);
      if (from.busy[slot]) return;
      std::byte* letter = from.out.data() + slot * kSlotBytes;
      const size_t bytes = letter_bytes(from.sent);
      for (size_t i = 0; i < bytes; ++i) letter[i] = letter_byte(from.sent, i);
      const Slice slice{from.out_region.get(), letter, bytes};
      from.busy[slot] = true;
      const Status posted =
          endpoint->write({&slice, 1},
                          {reinterpret_cast<uint64_t>(to.in.data()) + slot * kSlotBytes,
                           to.in_region->remote_key()},
                          static_cast<Immediate>(from.sent), slot);
      if (!posted.ok()) return;  // it has ended, and says so by an event
      ++from.sent;
    }
  }
  uint32_t number_ = 0;
};

/// Carries `more` letters each way over every line, beginning with `moment` after half of them.
/// True if all arrived once, unchanged, and, over a single link, in order.
inline bool carry(std::initializer_list<Node*> nodes, std::initializer_list<Line*> lines,
                  uint64_t more, const std::function<void()>& moment = {}) {
  std::vector<uint64_t> aims;
  for (Line* line : lines) aims.push_back(line->x.received + more);
  bool happened = !moment;
  const bool in_time = turn(nodes, [&] {
    size_t i = 0;
    bool all = true, half = true;
    for (Line* line : lines) {
      const uint64_t aim = aims[i++];
      if (line->x.ended || line->y.ended) return true;
      line->write(happened ? aim : aim - more / 2);
      all = all && line->x.received == aim && line->y.received == aim;
      half = half && line->x.received >= aim - more / 2;
    }
    if (half && !happened) {
      happened = true;
      moment();
      return false;
    }
    return all;
  });
  bool good = in_time && happened;
  for (Line* line : lines) {
    if (line->x.ended) MESSAGE(line->x.ended->message());
    if (line->y.ended) MESSAGE(line->y.ended->message());
    good = good && !line->x.ended && !line->y.ended && line->x.wrong == 0 && line->y.wrong == 0;
  }
  return good;
}

/// One of the faults that a line survives, on either side of a link of it.
inline void break_somehow(Line& line, std::minstd_rand& random) {
  const auto link = static_cast<uint32_t>(random() % 2);
  const bool at_x = random() % 2 == 0;
  const verbs::VerbsEndpoint* endpoint = at_x ? line.x_link(link) : line.y_link(link);
  if (endpoint == nullptr || endpoint->queue_pair() == nullptr) return;  // is broken just now
  const uint32_t number = endpoint->queue_pair()->number();
  const char* device = random() % 2 == 0 ? "fake0" : "fake1";
  constexpr std::array kStatuses{IBV_WC_RETRY_EXC_ERR, IBV_WC_WR_FLUSH_ERR, IBV_WC_RESP_TIMEOUT_ERR,
                                 IBV_WC_FATAL_ERR};
  switch (random() % 4) {
    case 0:
    case 1:
      FAKE(fake_verbs_complete)(number, kStatuses[random() % kStatuses.size()], random() % 30,
                                random() % 2 == 0);
      break;
    case 2:
      FAKE(fake_verbs_complete_receive)(number, IBV_WC_WR_FLUSH_ERR);
      FAKE(fake_verbs_raise)(nullptr, IBV_EVENT_QP_FATAL, number);
      break;
    case 3:
      FAKE(fake_verbs_raise)(device, IBV_EVENT_PORT_ERR, 0);
      FAKE(fake_verbs_raise)(device, IBV_EVENT_PORT_ACTIVE, 0);
      break;
  }
}

}  // namespace testing
