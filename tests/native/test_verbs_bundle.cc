/* tests/native/test_verbs_bundle.cc: a verbs connection over several devices: how it comes about,
   what it carries while its links break, how it ends, and what it makes of peers that lie.

   Over the devices of the fake libibverbs, of which there are two; run as lines.h says.
   TEST_LONG=1: 1000 rounds of random faults. */
#include "fabric/verbs/library.h"

#if JAXRDMA_HAVE_VERBS

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fabric/verbs/fabric.h"
#include "fabric/verbs/frame.h"
#include "fake_verbs/fake_verbs.h"
#include "lines.h"

namespace {

using namespace jaxrdma;
using namespace jaxrdma::fabric;
using namespace testing;

const VerbsOptions kBoth = on({"fake0", "fake1"});
const VerbsOptions kCrossed = on({"fake1", "fake0"});

uint32_t queue_pairs() { return FAKE(fake_verbs_alive)().qps; }

/// `count` rounds, to see what comes after all was said.
void settle(std::initializer_list<Node*> nodes, int count = 20) {
  for (int i = 0; i < count; ++i) {
    for (Node* node : nodes) node->poll();
  }
}

/// Writes letters from x one by one, each once what can have arrived has.
void write_slowly(std::initializer_list<Node*> nodes, Line& line, uint64_t count) {
  for (const uint64_t upto = line.x.sent + count; line.x.sent < upto;) {
    const uint64_t before = line.x.sent;
    line.write_x(before + 1);
    REQUIRE(line.x.sent == before + 1);
    settle(nodes, 3);
  }
}

/// Both ends have gone, for reasons that say `words`; nothing of theirs is left in the devices.
void check_ends(std::initializer_list<Node*> nodes, Line& line,
                std::initializer_list<std::string> words) {
  REQUIRE(turn(nodes, [&] { return line.ended(); }));
  check_says(*line.x.ended, words);
  check_says(*line.y.ended, words);
  CHECK(line.x_end() == nullptr);
  CHECK(line.y_end() == nullptr);
  CHECK(queue_pairs() == 0);
  for (End* end : {&line.x, &line.y}) {
    end->in_region.reset();
    end->out_region.reset();
    CHECK(end->wrong == 0);
  }
  settle(nodes);
}

}  // namespace

// ---- What it carries.

FAULT_TEST("several devices make one connection, and share what it carries") {
  for (const VerbsOptions& there : {kBoth, kCrossed}) {
    Devices devices;
    Node a(kBoth), b(there);
    Line line(a, b, 0);
    CHECK(b.asked == 1);
    CHECK(queue_pairs() == 4);
    CHECK(carry({&a, &b}, {&line}, 1000));
    CHECK(line.x_end()->bytes_sent() == line.y_end()->bytes_received());
    for (uint32_t link : {0u, 1u}) {
      CHECK(line.x_link(link)->bytes_sent() > line.x_end()->bytes_sent() * 4 / 10);
      CHECK(line.y_link(link)->bytes_sent() > line.y_end()->bytes_sent() * 4 / 10);
    }
    CHECK(a.fabric->describe().find("fake1 port 1") != std::string::npos);
  }
}

FAULT_TEST("a side with fewer devices has several links on one") {
  for (const bool connecting : {true, false}) {
    CAPTURE(connecting);
    Devices devices;
    Node a(connecting ? on("fake1") : kBoth), b(connecting ? kBoth : on("fake1"));
    Line line(a, b, 0), more(a, b, 1);
    REQUIRE(line.x_link(1) != nullptr);
    REQUIRE(line.y_link(1) != nullptr);
    CHECK(carry({&a, &b}, {&line, &more}, 500));
    CHECK(line.x_link(1)->bytes_sent() > 0);
    CHECK(line.y_link(1)->bytes_sent() > 0);
  }
}

FAULT_TEST("a link that answers nothing keeps what it has, and the other goes on") {
  for (const uint32_t link : {0u, 1u}) {
    CAPTURE(link);
    Devices devices;
    Node a(kBoth), b(kCrossed);
    Line line(a, b, 0);
    REQUIRE(carry({&a, &b}, {&line}, 100));
    FAKE(fake_verbs_hold)(line.x_queue_pair(link), true);
    const uint64_t before = line.y.arrived();
    write_slowly({&a, &b}, line, kSlots);
    CHECK(line.y.arrived() >= before + kSlots - 3);  // short letters tell nobody that they are done
    CHECK(line.y.arrived() < before + kSlots);
    FAKE(fake_verbs_hold)(line.x_queue_pair(link), false);
    REQUIRE(turn({&a, &b}, [&] { return line.y.received == before + kSlots; }));
    CHECK(carry({&a, &b}, {&line}, 100));
  }
}

FAULT_TEST("credits are those of all links, and each gets back its own") {
  Devices devices;
  Node a(kBoth, {.receive_depth = 4}), b(kBoth, {.receive_depth = 4});
  Line line(a, b, 0);
  line.y.keeps = true;
  CHECK(line.x_end()->credits() == 8);
  FAKE(fake_verbs_hold)(line.x_queue_pair(1), true);
  write_slowly({&a, &b}, line, 8);
  CHECK(line.x_end()->credits() == 0);
  CHECK(line.y.arrived() == 4);
  const Status refused = line.x_end()->write({}, {}, 0, 0, Solicit::kYes);
  CHECK(refused.code() == Code::kResource);

  line.y_end()->release(4);
  REQUIRE(turn({&a, &b}, [&] { return line.x_link(0)->credits() == 4; }));
  CHECK(line.x_link(1)->credits() == 0);
  CHECK(line.x.credit_events == 1);
  line.y_end()->release(4);  // there is nothing to release
  FAKE(fake_verbs_hold)(line.x_queue_pair(1), false);
  REQUIRE(turn({&a, &b}, [&] { return line.y.received == 8; }));
  CHECK(line.x_link(1)->credits() == 0);
  line.y_end()->release(2);
  REQUIRE(turn({&a, &b}, [&] { return line.x_link(1)->credits() == 2; }));
  line.y_end()->release(2);
  REQUIRE(turn({&a, &b}, [&] { return line.x_link(1)->credits() == 4; }));
  CHECK(line.x_end()->credits() == 8);
  CHECK(line.x.credit_events == 1);  // it was not without
  line.y.keeps = false;
  CHECK(carry({&a, &b}, {&line}, 100));
}

FAULT_TEST("reads go by the first device, in order, whatever becomes of the other's writes") {
  Devices devices;
  Node a(kBoth), b(kCrossed);
  Line line(a, b, 0);
  std::vector<std::byte> copy(64);
  auto region = a.fabric->register_memory(copy.data(), copy.size(), Access::kRemoteWrite);
  REQUIRE(region.ok());
  REQUIRE(carry({&a, &b}, {&line}, kSlots));
  FAKE(fake_verbs_hold)(line.x_queue_pair(1), true);
  const uint64_t upto = line.x.sent + kSlots;
  RemoteKey first{};
  first[0] = line.y.in_region->remote_key()[0];
  for (uint64_t i = 0; i < 50; ++i) {
    line.write_x(upto);
    const uint64_t from = reinterpret_cast<uint64_t>(line.y.in.data()) + kSlotBytes;
    REQUIRE(line.x_end()
                ->read({region.value().get(), copy.data(), copy.size()}, {from, first}, i)
                .ok());
    settle({&a, &b}, 1);
  }
  REQUIRE(turn({&a, &b}, [&] { return line.x.reads.size() == 50; }));
  CHECK(std::is_sorted(line.x.reads.begin(), line.x.reads.end()));
  CHECK(std::equal(copy.begin(), copy.end(), line.y.in.begin() + kSlotBytes));
  FAKE(fake_verbs_hold)(line.x_queue_pair(1), false);
  CHECK(carry({&a, &b}, {&line}, 50));
}

// ---- Links that break.

FAULT_TEST("a link that breaks is made again, and no letter is lost or doubled") {
  for (const uint32_t link : {0u, 1u}) {
    for (const bool connecting : {true, false}) {
      CAPTURE(link);
      CAPTURE(connecting);
      Devices devices;
      Node a(kBoth), b(kCrossed);
      Line line(a, b, 0);
      const auto number = [&] {
        return connecting ? line.x_queue_pair(link) : line.y_queue_pair(link);
      };
      for (const bool delivered : {true, false}) {
        CHECK(carry({&a, &b}, {&line}, 200, [&] {
          FAKE(fake_verbs_complete)(number(), IBV_WC_RETRY_EXC_ERR, 3, delivered);
        }));
      }
      CHECK(carry({&a, &b}, {&line}, 200,
                  [&] { FAKE(fake_verbs_raise)(nullptr, IBV_EVENT_QP_FATAL, number()); }));
      CHECK(carry({&a, &b}, {&line}, 200, [&] {
        FAKE(fake_verbs_raise)("fake1", IBV_EVENT_PORT_ERR, 0);
        FAKE(fake_verbs_raise)("fake1", IBV_EVENT_PORT_ACTIVE, 0);
      }));
    }
  }
}

FAULT_TEST("while a link is broken the other takes all writes") {
  for (const char* device : {"fake0", "fake1"}) {
    CAPTURE(std::string(device));
    Devices devices;
    const Options deep{.receive_depth = 4 * kSlots};  // for one link to be enough
    Node a(kBoth, deep), b(kBoth, deep);
    Line line(a, b, 0);
    REQUIRE(carry({&a, &b}, {&line}, 100));
    const uint32_t link = device == std::string("fake1");
    FAKE(fake_verbs_raise)(device, IBV_EVENT_PORT_ERR, 0);
    REQUIRE(turn({&a, &b}, [&] {
      return line.x_link(link)->queue_pair() == nullptr &&
             line.y_link(link)->queue_pair() == nullptr;
    }));
    REQUIRE(carry({&a, &b}, {&line}, 200));
    FAKE(fake_verbs_raise)(device, IBV_EVENT_PORT_ACTIVE, 0);
    const uint64_t before = line.x_link(link)->bytes_sent();
    REQUIRE(turn({&a, &b}, [&] {
      line.write(line.x.received + 1);
      return line.x_link(link)->bytes_sent() > before || line.ended();
    }));
    CHECK(carry({&a, &b}, {&line}, 200));
  }
}

FAULT_TEST("a link that does not come back ends the connection once, and is named") {
  for (const char* device : {"fake0", "fake1"}) {
    for (const bool port : {true, false}) {
      CAPTURE(std::string(device));
      CAPTURE(port);
      Devices devices;
      Node a(on({"fake0", "fake1"}, 200)), b(on({"fake0", "fake1"}, 200));
      Line line(a, b, 0);
      REQUIRE(carry({&a, &b}, {&line}, 50));
      if (port) {
        FAKE(fake_verbs_raise)(device, IBV_EVENT_PORT_ERR, 0);
      } else {
        FAKE(fake_verbs_fail)(FakeVerbsCall::kCreateQp, device, 0, 1000, ENOMEM);
        FAKE(fake_verbs_complete)(line.x_queue_pair(device == std::string("fake1")),
                                  IBV_WC_RETRY_EXC_ERR, 0, false);
      }
      const uint64_t upto = std::max(line.x.sent, line.y.sent) + 30;
      REQUIRE(turn({&a, &b}, [&] {
        line.write(upto);
        return line.ended();
      }));
      check_ends({&a, &b}, line, {"the link between " + std::string(device), "did not come back"});
    }
  }
}

FAULT_TEST("a device that dies ends the connection once, and is named on both sides") {
  for (const bool shared : {true, false}) {
    for (const bool connecting : {true, false}) {
      CAPTURE(shared);
      CAPTURE(connecting);
      Devices devices;
      const VerbsOptions one = on("fake0");
      Node a(shared || connecting ? kBoth : one), b(shared || !connecting ? kBoth : one);
      Line line(a, b, 0);
      REQUIRE(carry({&a, &b}, {&line}, 50));
      FAKE(fake_verbs_raise)("fake1", IBV_EVENT_DEVICE_FATAL, 0);
      check_ends({&a, &b}, line, {"device fake1", "catastrophic"});
    }
  }
}

FAULT_TEST("whatever breaks whenever, no letter is lost, changed or doubled over several links") {
  Devices devices;
  Node a(kBoth), b(kCrossed), c(on("fake0"));
  Line first(a, b, 0), second(b, a, 1), third(c, b, 2), fourth(a, c, 3);
  const std::array<Line*, 4> lines{&first, &second, &third, &fourth};
  const int rounds = std::getenv("TEST_LONG") != nullptr ? 1000 : 20;
  std::minstd_rand random(5);
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    REQUIRE(carry({&a, &b, &c}, {&first, &second, &third, &fourth}, 60, [&] {
      for (uint32_t i = 0; i <= random() % 4; ++i)
        break_somehow(*lines[random() % lines.size()], random);
    }));
  }
}

FAULT_TEST("a fault while a connection comes about ends it cleanly, or is mended") {
  const int rounds = std::getenv("TEST_LONG") != nullptr ? 2000 : 60;
  std::minstd_rand random(7);
  int made = 0, given_up = 0;
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    Devices devices;
    Node a(round % 3 == 0 ? on("fake1") : kBoth), b(round % 3 == 1 ? on("fake0") : kCrossed);
    Line line(a, b, 0, Line::Begun());
    line.enrol();
    line.x.any_order = line.y.any_order = true;
    for (uint32_t i = random() % 12; i > 0; --i) {
      a.poll();
      line.meet();
      b.poll();
      if (random() % 4 == 0) a.fabric->wait(1);
    }
    break_somehow(line, random);
    const auto gone = [&] { return line.x.ended && (line.y.ended || line.y_end() == nullptr); };
    REQUIRE(turn({&a, &b}, [&] {
      line.meet();
      return (line.x.connected && line.y.connected) || (gone() && queue_pairs() == 0);
    }));
    if (!line.x.ended) line.write(line.x.sent + 1);  // what fails only now is mended
    if (gone()) {
      ++given_up;
    } else {
      ++made;
      CHECK(carry({&a, &b}, {&line}, 30));
    }
  }
  CHECK(made > 0);
  CHECK(given_up > 0);
}

// ---- The end.

FAULT_TEST("what was written before a flushing close arrives over every link") {
  for (const bool connecting : {true, false}) {
    for (const uint32_t first : {0u, 1u}) {
      CAPTURE(connecting);
      CAPTURE(first);
      Devices devices;
      Node a(kBoth), b(kBoth);
      Line line(connecting ? a : b, connecting ? b : a, 0);
      const bool from_x = first == 0 || connecting;
      const std::array<uint32_t, 2> held{from_x ? line.x_queue_pair(0) : line.y_queue_pair(0),
                                         from_x ? line.x_queue_pair(1) : line.y_queue_pair(1)};
      for (const uint32_t one : held) FAKE(fake_verbs_hold)(one, true);
      if (from_x) {
        line.write_x(kSlots);
        line.x_end()->close({Code::kCancelled, "enough"}, /*flush=*/true);
      } else {
        line.write_y(kSlots);
        line.y_end()->close({Code::kCancelled, "enough"}, /*flush=*/true);
      }
      const End& there = from_x ? line.y : line.x;
      settle({&a, &b});
      CHECK(there.arrived() == 0);
      FAKE(fake_verbs_hold)(held[first], false);
      REQUIRE(turn({&a, &b}, [&] { return there.arrived() >= kSlots / 3; }));
      settle({&a, &b}, 200);
      CHECK(!there.ended);
      FAKE(fake_verbs_hold)(held[1 - first], false);
      check_ends({&a, &b}, line, {"enough"});
      CHECK(there.received == kSlots);
    }
  }
}

FAULT_TEST("a flush ends in time when a link does not answer") {
  Devices devices;
  Options hasty{.receive_depth = kSlots};
  hasty.close_timeout_ms = 50;
  Node a(kBoth, hasty), b(kBoth);
  Line line(a, b, 0);
  FAKE(fake_verbs_hold)(line.x_queue_pair(1), true);
  line.write_x(kSlots);
  line.x_end()->close({Code::kCancelled, "enough"}, /*flush=*/true);
  check_ends({&a, &b}, line, {"enough"});
  CHECK(line.y.arrived() >= kSlots / 3);
}

FAULT_TEST("either side or both may close, with or without a flush") {
  for (const bool flush : {true, false}) {
    for (const int who : {1, 2, 3}) {
      CAPTURE(flush);
      CAPTURE(who);
      Devices devices;
      Node a(kBoth), b(kCrossed);
      Line line(a, b, 0);
      line.write(kSlots);
      if ((who & 1) != 0) line.x_end()->close({Code::kCancelled, "of a"}, flush);
      if ((who & 2) != 0) line.y_end()->close({Code::kCancelled, "of b"}, flush);
      CHECK(line.x_end()->credits() == ((who & 1) != 0 ? 0 : kSlots));
      check_ends({&a, &b}, line, {"of "});
      if (who == 3) {
        CHECK(line.x.ended->message() == "of a");
        CHECK(line.y.ended->message() == "of b");
      }
      if (flush && who == 1) CHECK(line.y.received == kSlots);
      if (flush && who == 2) CHECK(line.x.received == kSlots);
    }
  }
}

FAULT_TEST("what a peer writes at once before it closes is not lost with its last link's opening") {
  for (int i = 0; i < 20; ++i) {
    Devices devices;
    Node a(kBoth), b(kBoth);
    Line line(a, b, 0, Line::Begun());
    line.enrol();
    line.x.any_order = line.y.any_order = true;
    FAKE(fake_verbs_stall_rtr)(true);
    REQUIRE(turn({&a, &b}, [&] {
      line.meet();
      return FAKE(fake_verbs_stalled)() == 2 && queue_pairs() == 4;
    }));
    settle({&a, &b});
    FAKE(fake_verbs_stall_rtr)(false);
    // b is ready first, and looks next when all is said.
    for (int k = 0; k < 10; ++k) {
      b.poll();
      b.fabric->wait(1);
    }
    const auto deadline = Clock::now() + kPatience;
    while (!line.x.connected && Clock::now() < deadline) {
      a.poll();
      if (!line.x.connected) b.poll();
    }
    REQUIRE(line.x.connected);
    line.write_x(1);
    line.x_end()->close({Code::kCancelled, "enough"}, /*flush=*/true);
    settle({&a}, 100);
    check_ends({&a, &b}, line, {"enough"});
    CHECK(line.y.connected);
    CHECK(line.y.received == 1);
  }
}

FAULT_TEST("closing before all links are there ends those that are") {
  for (const bool connecting : {true, false}) {
    for (const bool flush : {true, false}) {
      CAPTURE(connecting);
      CAPTURE(flush);
      Devices devices;
      Node a(kBoth), b(kBoth);
      FAKE(fake_verbs_stall_rtr)(true);
      Line line(a, b, 0, Line::Begun());
      REQUIRE(turn({&a, &b}, [&] {
        line.meet();
        return FAKE(fake_verbs_stalled)() == 2 && queue_pairs() == 4 && line.y.id != 0;
      }));
      (connecting ? line.x_end() : line.y_end())->close({Code::kCancelled, "no more"}, flush);
      REQUIRE(turn({&a, &b}, [&] { return line.x.ended.has_value(); }));
      check_says(*line.x.ended, {"no more"});
      FAKE(fake_verbs_stall_rtr)(false);
      // A setup lets go of its queue pair before its fabric hears of it and lets the link go.
      REQUIRE(turn({&a, &b}, [&] { return queue_pairs() == 0 && line.y_end() == nullptr; }));
      CHECK(!line.x.connected);
      CHECK(!line.y.connected);
      Line later(a, b, 1);
      CHECK(carry({&a, &b}, {&later}, 50));
    }
  }
}

FAULT_TEST("a fabric may go at any moment of a connection's coming about") {
  for (const bool connecting : {true, false}) {
    for (int rounds = 0; rounds < 16; ++rounds) {
      CAPTURE(connecting);
      CAPTURE(rounds);
      Devices devices;
      auto a = std::make_unique<Node>(kBoth), b = std::make_unique<Node>(kCrossed);
      auto made = connect(*a, *b, 0, /*timeout_ms=*/100);
      REQUIRE(made.ok());
      End x;
      a->ends[made.value()] = &x;
      for (int i = 0; i < rounds; ++i) {
        a->poll();
        b->poll();
        if (i % 4 == 3) b->fabric->wait(1);
      }
      (connecting ? a : b).reset();
      Node& left = connecting ? *b : *a;
      REQUIRE(
          turn({&left}, [&] { return (connecting || x.ended.has_value()) && queue_pairs() == 0; }));
      settle({&left});
    }
  }
}

// ---- What cannot be made.

FAULT_TEST("a further link that cannot be made ends the connection, and its device is named") {
  for (const FakeVerbsCall call :
       {FakeVerbsCall::kCreateCq, FakeVerbsCall::kCreateQp, FakeVerbsCall::kPostRecv,
        FakeVerbsCall::kModifyInit, FakeVerbsCall::kModifyRtr, FakeVerbsCall::kModifyRts}) {
    for (const uint32_t skip : {0u, 1u}) {
      CAPTURE(static_cast<int>(call));
      CAPTURE(skip);
      Devices devices;
      Node a(kBoth), b(kBoth);
      FAKE(fake_verbs_fail)(call, "fake1", skip, 1, ENOMEM);
      Line line(a, b, 0, Line::Begun());
      REQUIRE(turn({&a, &b}, [&] {
        line.meet();
        return line.x.ended.has_value() && queue_pairs() == 0 && line.y_end() == nullptr;
      }));
      check_says(*line.x.ended, {"fake1", "Cannot allocate memory"});
      CHECK(!line.x.connected);
      CHECK(!line.y.connected);
      Line next(a, b, 1);
      CHECK(carry({&a, &b}, {&next}, 50));
    }
  }
}

FAULT_TEST("memory that one of several devices does not register is with none") {
  Devices devices;
  Node a(kBoth);
  std::vector<std::byte> memory(5000);
  FAKE(fake_verbs_fail)(FakeVerbsCall::kRegMr, "fake1", 0, 1, ENOMEM);
  check_says(a.fabric->register_memory(memory.data(), memory.size(), Access::kLocal).status(),
             {"fake1", "5000 bytes", "lock"});
  CHECK(FAKE(fake_verbs_alive)().regions == 0);
  CHECK(a.fabric->register_memory(memory.data(), memory.size(), Access::kLocal).ok());
}

FAULT_TEST("devices to spread traffic over are different, and neither none nor too many") {
  Devices devices;
  for (const VerbsOptions& twice :
       {on({"fake0", "fake0"}), on({"fake1", "fake0", "fake1"}), on({"fake0", ""})}) {
    const auto made = make_verbs_fabric({}, twice);
    REQUIRE(!made.ok());
    CHECK(made.status().code() == Code::kInvalidArgument);
    check_says(made.status(), {"is named twice"});
  }
  for (const VerbsOptions& wrong : {on({}), on({"fake0", "fake1", "a", "b", "c"})}) {
    const auto made = make_verbs_fabric({}, wrong);
    REQUIRE(!made.ok());
    CHECK(made.status().code() == Code::kInvalidArgument);
    check_says(made.status(), {std::to_string(wrong.sources.size()) + " devices", "1 to 4"});
  }
  const auto missing = make_verbs_fabric({}, on({"fake0", "fake7"}));
  REQUIRE(!missing.ok());
  check_says(missing.status(), {"fake7"});
}

// ---- Peers that lie.

namespace {

/// Speaks the signalling protocol by itself, and has no device.
class Liar {
 public:
  Liar() {
    Options options;
    options.receive_depth = verbs::kMailboxSlots;
    fabric = std::move(make_tcp_fabric(options).value());
    region_ = std::move(
        fabric->register_memory(mailbox_.data(), mailbox_.size(), Access::kRemoteWrite).value());
  }

  /// What a peer with two devices says of its first link.
  verbs::ConnectionParameters parameters(uint32_t link = 0, uint32_t bundle = 0) const {
    verbs::ConnectionParameters mine;
    mine.queue_pair = 0xabcdef;
    mine.receive_depth = kSlots;
    mine.gid = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 2};
    mine.mailbox_address = reinterpret_cast<uint64_t>(mailbox_.data());
    mine.mailbox_key = region_->remote_key()[0];
    mine.max_message = 1u << 20;
    mine.mtu = IBV_MTU_1024;
    mine.ethernet = 1;
    mine.rails = 2;
    mine.link = static_cast<uint8_t>(link);
    mine.bundle = bundle;
    return mine;
  }

  /// The refusal; ok, and `id` and `reply` set, if there was none.
  Status say(Node& to, Hello hello, const verbs::ConnectionParameters& mine) {
    hello.payload = verbs::encode_payload(mine, {});
    id = fabric->connect(to.address, hello, 10'000).value();
    const auto deadline = Clock::now() + kPatience;
    while (Clock::now() < deadline) {
      to.poll();
      for (const Event& event : poll()) {
        if (event.endpoint != id) continue;
        if (event.kind == Kind::kDisconnected) return event.status;
        if (event.kind != Kind::kConnected) continue;
        std::vector<std::byte> rest;
        REQUIRE(verbs::decode_payload(event.hello->payload, reply, rest).ok());
        return {};
      }
      fabric->wait(1);
    }
    return {Code::kUnavailable, "no answer"};
  }
  std::vector<Event> poll() {
    std::vector<Event> events;
    fabric->poll(events);
    return events;
  }
  /// Until this connection has ended: why.
  Status ended(Node& with, EndpointId which) {
    const auto deadline = Clock::now() + kPatience;
    while (Clock::now() < deadline) {
      with.poll();
      for (const Event& event : poll()) {
        if (event.endpoint == which && event.kind == Kind::kDisconnected) return event.status;
      }
      fabric->wait(1);
    }
    return {};
  }

  std::unique_ptr<Fabric> fabric;
  EndpointId id = 0;
  verbs::ConnectionParameters reply;

 private:
  std::vector<std::byte> mailbox_ =
      std::vector<std::byte>(verbs::kMailboxSlots * sizeof(verbs::Message));
  std::unique_ptr<MemoryRegion> region_;
};

}  // namespace

FAULT_TEST("links that do not belong to a connection are refused, and leave it alone") {
  Devices devices;
  Node a(kBoth), b(kBoth);
  Line line(a, b, 0);
  const uint32_t asked = b.asked;
  Liar liar;
  const uint32_t bundle = line.y.id;
  Hello token = hello_of(0), incarnation = token, worker = token, job = token, version = token;
  token.token.back() ^= std::byte{1};
  incarnation.incarnation += 1;
  worker.worker += 1;
  job.job = "another";
  version.protocol_version += 1;
  for (const Hello* wrong : {&token, &incarnation, &worker, &job, &version}) {
    CHECK(liar.say(b, *wrong, liar.parameters(1, bundle)).code() == Code::kPermissionDenied);
  }
  for (const uint32_t unknown : {0u, bundle + 1, UINT32_MAX}) {
    CHECK(liar.say(b, hello_of(0), liar.parameters(1, unknown)).code() == Code::kPermissionDenied);
  }
  for (const uint32_t link : {1u, 2u, 3u})
    CHECK(liar.say(b, hello_of(0), liar.parameters(link, bundle)).code() == Code::kProtocol);
  CHECK(b.asked == asked);
  for (const uint32_t link : {4u, 255u})
    CHECK(liar.say(b, hello_of(0), liar.parameters(link, bundle)).code() == Code::kProtocol);
  for (const uint8_t rails : {0, 5, 255}) {
    verbs::ConnectionParameters wrong = liar.parameters();
    wrong.rails = rails;
    CHECK(liar.say(b, hello_of(0), wrong).code() == Code::kProtocol);
  }
  for (const uint32_t depth : {0u, kMaxReceiveDepth + 1, UINT32_MAX}) {
    verbs::ConnectionParameters wrong = liar.parameters();
    wrong.receive_depth = depth;
    CHECK(liar.say(b, hello_of(0), wrong).code() == Code::kProtocol);
  }
  CHECK(carry({&a, &b}, {&line}, 200));
  CHECK(queue_pairs() == 4);
}

FAULT_TEST("each link is taken once, in any order") {
  Devices devices;
  Node b(kBoth);
  Liar liar;
  verbs::ConnectionParameters first = liar.parameters();
  first.rails = 4;
  REQUIRE(liar.say(b, hello_of(0), first).ok());
  const EndpointId id = liar.id;
  const uint32_t bundle = liar.reply.bundle;
  CHECK(liar.reply.rails == 2);
  for (const uint32_t link : {2u, 1u}) {
    CHECK(liar.say(b, hello_of(0), liar.parameters(link, bundle)).ok());
    CHECK(liar.reply.link == link);
    CHECK(liar.say(b, hello_of(0), liar.parameters(link, bundle)).code() == Code::kProtocol);
  }
  CHECK(queue_pairs() == 3);
  CHECK(b.asked == 1);

  // One that ends, ends the others, and there is nothing to join any more.
  liar.fabric->endpoint(id)->close({Code::kCancelled, "gone"}, /*flush=*/true);
  REQUIRE(turn({&b}, [&] {
    liar.poll();
    return queue_pairs() == 0 && b.fabric->endpoint(b.accepted[0]) == nullptr;
  }));
  CHECK(liar.say(b, hello_of(0), liar.parameters(3, bundle)).code() == Code::kPermissionDenied);
}

FAULT_TEST("a connection that is ending takes no further link") {
  Devices devices;
  Node b(kBoth);
  Liar liar;
  REQUIRE(liar.say(b, hello_of(0), liar.parameters()).ok());
  const uint32_t bundle = liar.reply.bundle;
  b.fabric->endpoint(bundle)->close({Code::kCancelled, "gone"}, /*flush=*/true);
  const Status late = liar.say(b, hello_of(0), liar.parameters(1, bundle));
  CHECK((late.code() == Code::kProtocol || late.code() == Code::kPermissionDenied));
  REQUIRE(turn({&b}, [&] {
    liar.poll();
    return queue_pairs() == 0;
  }));
}

FAULT_TEST("a connection whose other links never come is given up") {
  Devices devices;
  Node b(kBoth);
  Liar liar;
  REQUIRE(liar.say(b, hello_of(0), liar.parameters()).ok());
  auto* bundle = dynamic_cast<verbs::Bundle*>(b.fabric->endpoint(liar.reply.bundle));
  REQUIRE(bundle != nullptr);
  CHECK(bundle->deadline_ns() != verbs::kNever);
  bundle->on_deadline();
  check_says(liar.ended(b, liar.id), {"was not made in time", "of its 2 links"});
  REQUIRE(turn({&b},
               [&] { return queue_pairs() == 0 && b.fabric->endpoint(b.accepted[0]) == nullptr; }));
}

#endif
