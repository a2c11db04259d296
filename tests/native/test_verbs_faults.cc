/* tests/native/test_verbs_faults.cc: what the verbs fabric, and the engines on it, make of faults
   that no driver can be made to have: devices that die, queues that are full, completions and
   events that say what is wrong.

   They are made by a libibverbs of our own (fake_verbs/fake_verbs.h), so this proves how errors are
   handled, and never that verbs work. They run alone, as lines.h says. TEST_LONG=1: 1000 rounds of
   random faults. */
#include "fabric/verbs/library.h"

#if JAXRDMA_HAVE_VERBS

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "call.h"
#include "engine/server.h"
#include "engine/worker.h"
#include "fabric/verbs/fabric.h"
#include "fake_verbs/fake_verbs.h"
#include "lines.h"

namespace {

using namespace jaxrdma;
using namespace jaxrdma::fabric;
using namespace testing;

/// `line` goes down on both sides, `other` does not notice. `more`: letters that it has to carry.
void check_only_one_ends(std::initializer_list<Node*> nodes, Line& line, Line& other,
                         uint64_t more = 20) {
  const uint64_t upto = std::max(line.x.sent, line.y.sent) + more;
  REQUIRE(turn(nodes, [&] {
    line.write(upto);
    return line.ended();
  }));
  CHECK(carry(nodes, {&other}, 50));
  CHECK(line.x.wrong == 0);
  CHECK(line.y.wrong == 0);
}

}  // namespace

// ---- Nothing can be made.

FAULT_TEST("a device that cannot be set up is named, with the reason") {
  struct Case {
    FakeVerbsCall call;
    int error;
    std::initializer_list<std::string> words;
  };
  const Case cases[] = {
      {FakeVerbsCall::kOpenDevice, EACCES, {"could not be opened", "/dev/infiniband/uverbs"}},
      {FakeVerbsCall::kOpenDevice, ENODEV, {"could not be opened", "--device=/dev/infiniband"}},
      {FakeVerbsCall::kQueryDevice, EIO, {"could not be queried", "Input/output"}},
      {FakeVerbsCall::kAllocPd, ENOMEM, {"no protection domain", "emory"}},
      {FakeVerbsCall::kQueryPort, EIO, {"port", "Input/output"}},
      {FakeVerbsCall::kCreateCompChannel, EMFILE, {"no completion channel", "Too many open"}},
  };
  for (const Case& one : cases) {
    Devices devices;
    FAKE(fake_verbs_fail)(one.call, "fake0", 0, 100, one.error);
    const auto made = make_verbs_fabric({}, on("fake0"));
    REQUIRE(!made.ok());
    check_says(made.status(), {"fake0"});
    check_says(made.status(), one.words);
    CHECK(make_verbs_fabric({}, on("fake1")).ok());
  }
}

FAULT_TEST("where any device will do, one that cannot be opened is passed over") {
  Devices devices;
  FAKE(fake_verbs_fail)(FakeVerbsCall::kOpenDevice, "fake0", 0, 100, EACCES);
  const auto made = make_verbs_fabric({}, on(""));
  REQUIRE(made.ok());
  CHECK(made.value()->describe().find("fake1") != std::string::npos);
}

FAULT_TEST("memory that a device does not register is an error that names both and the cure") {
  Devices devices;
  Node a(on("fake0"));
  std::vector<std::byte> memory(5000);
  FAKE(fake_verbs_fail)(FakeVerbsCall::kRegMr, nullptr, 0, 1, ENOMEM);
  check_says(a.fabric->register_memory(memory.data(), memory.size(), Access::kLocal).status(),
             {"fake0", "5000 bytes", "Cannot allocate memory", "lock"});
  FAKE(fake_verbs_fail)(FakeVerbsCall::kRegMr, nullptr, 0, 1, EFAULT);
  check_says(a.fabric->register_memory(memory.data(), memory.size(), Access::kLocal).status(),
             {"fake0", "5000 bytes", "not mapped"});
  CHECK(a.fabric->register_memory(memory.data(), memory.size(), Access::kLocal).ok());
}

FAULT_TEST("queues that a device refuses to the connecting side are an error at once") {
  struct Case {
    FakeVerbsCall call;
    int error;
    std::string what;
  };
  const Case cases[] = {
      {FakeVerbsCall::kCreateCq, ENOMEM, "no completion queue"},
      {FakeVerbsCall::kCreateQp, ENOMEM, "no queue pair"},
      {FakeVerbsCall::kCreateQp, EINVAL, "no queue pair"},
      {FakeVerbsCall::kModifyInit, EINVAL, "did not become INIT"},
      {FakeVerbsCall::kPostRecv, ENOMEM, "receive"},
      {FakeVerbsCall::kQueryPort, EIO, "port"},
  };
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  uint32_t number = 0;
  for (const Case& one : cases) {
    CAPTURE(one.what);
    FAKE(fake_verbs_fail)(one.call, "fake0", 0, 4, one.error);
    check_says(connect(a, b, 100).status(), {"fake0", one.what});
    FAKE(fake_verbs_reset)();
    Line line(a, b, number++);
    CHECK(carry({&a, &b}, {&line}, 10));
  }
}

FAULT_TEST("queues that a device refuses to the accepting side are told to the other") {
  for (const FakeVerbsCall call :
       {FakeVerbsCall::kCreateCq, FakeVerbsCall::kCreateQp, FakeVerbsCall::kPostRecv}) {
    Devices devices;
    Node a(on("fake0")), b(on("fake1"));
    Line good(a, b, 0);
    FAKE(fake_verbs_fail)(call, "fake1", 0, 1, ENOMEM);
    Line line(a, b, 1, Line::Begun());
    REQUIRE(turn({&a, &b}, [&] { return line.x.ended.has_value(); }));
    check_says(*line.x.ended, {b.address, "fake1", "Cannot allocate memory"});
    CHECK(carry({&a, &b}, {&good}, 20));
    FAKE(fake_verbs_reset)();
    Line later(a, b, 2);
    CHECK(carry({&a, &b}, {&later}, 20));
  }
}

FAULT_TEST("a device that copies less into its queues is asked for less") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  FAKE(fake_verbs_fail)(FakeVerbsCall::kCreateQp, "fake0", 0, 3, EINVAL);
  Line line(a, b, 0);
  const auto& made = static_cast<verbs::VerbsEndpoint&>(*line.x_end());
  CHECK(made.queue_pair()->max_inline() == 0);
  CHECK(carry({&a, &b}, {&line}, 100));
}

FAULT_TEST("a queue pair that cannot be connected ends both sides, with both devices and why") {
  for (const FakeVerbsCall call : {FakeVerbsCall::kModifyRtr, FakeVerbsCall::kModifyRts}) {
    for (const char* device : {"fake0", "fake1"}) {
      CAPTURE(device);
      Devices devices;
      Node a(on("fake0")), b(on("fake1"));
      Line good(a, b, 0);
      FAKE(fake_verbs_fail)(call, device, 0, 1, ETIMEDOUT);
      Line line(a, b, 1, Line::Begun());
      REQUIRE(turn({&a, &b}, [&] {
        line.meet();
        return line.x.ended.has_value();
      }));
      check_says(*line.x.ended,
                 {b.address, call == FakeVerbsCall::kModifyRtr ? "RTR" : "RTS", "fake0", "fake1",
                  "192.0.2.1", "192.0.2.2", "its host or link is down"});
      CHECK(carry({&a, &b}, {&good}, 20));
    }
  }
}

// ---- Full queues.

FAULT_TEST("a full send queue ends its connection alone, and says which") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0), other(a, b, 1);
  REQUIRE(carry({&a, &b}, {&line, &other}, 50));
  FAKE(fake_verbs_fail)(FakeVerbsCall::kPostSend, "fake0", 0, 1, ENOMEM);
  line.write(line.x.sent + 1);
  check_only_one_ends({&a, &b}, line, other);
  check_says(*line.x.ended,
             {"writing to " + b.address, "fake0", "Cannot allocate memory", "full", "bug"});
  check_says(*line.y.ended, {"Cannot allocate memory"});
}

FAULT_TEST("a receive that is not taken ends its connection alone, and says which") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0), other(a, b, 1);
  REQUIRE(carry({&a, &b}, {&line, &other}, 50));
  FAKE(fake_verbs_fail)(FakeVerbsCall::kPostRecv, "fake1", 0, 1, ENOMEM);
  line.write(line.x.sent + 1);
  check_only_one_ends({&a, &b}, line, other);
  check_says(*line.y.ended, {"receiving from 127.0.0.1:", "fake1", "Cannot allocate memory"});
  check_says(*line.x.ended, {b.address, "Cannot allocate memory"});
}

FAULT_TEST("a device that answers nothing for a while is never given more than its queues hold") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0);
  FAKE(fake_verbs_hold)(line.x_queue_pair(), true);
  FAKE(fake_verbs_hold)(line.y_queue_pair(), true);
  line.write(UINT64_MAX);
  std::vector<std::byte> copy(64);
  auto region = a.fabric->register_memory(copy.data(), copy.size(), Access::kRemoteWrite);
  constexpr uint64_t kReads = 2000;  // far more than the send queue holds
  for (uint64_t i = 0; i < kReads; ++i) {
    REQUIRE(
        line.x_end()
            ->read({region.value().get(), copy.data(), copy.size()},
                   {reinterpret_cast<uint64_t>(line.y.in.data()), line.y.in_region->remote_key()},
                   i)
            .ok());
  }
  CHECK(line.x.sent == kSlots);
  FAKE(fake_verbs_hold)(line.x_queue_pair(), false);
  FAKE(fake_verbs_hold)(line.y_queue_pair(), false);
  CHECK(carry({&a, &b}, {&line}, 100));
  REQUIRE(turn({&a, &b}, [&] { return line.x.reads.size() == kReads; }));
}

FAULT_TEST("closing a connection whose device does not answer takes as long as it may") {
  Devices devices;
  Options hasty{.receive_depth = kSlots};
  hasty.close_timeout_ms = 50;
  Node a(on("fake0"), hasty), b(on("fake1"));
  Line line(a, b, 0);
  FAKE(fake_verbs_hold)(line.x_queue_pair(), true);
  line.write(5);
  line.x_end()->close({Code::kCancelled, "enough"}, /*flush=*/true);
  REQUIRE(turn({&a, &b}, [&] { return line.ended(); }));
  CHECK(line.x.ended->message() == "enough");
  CHECK(line.x.received == 5);
  CHECK(line.y.received == 0);
}

// ---- Completions.

FAULT_TEST("a completion that tells of a fault ends its connection alone, with cause and cure") {
  struct Case {
    ibv_wc_status status;
    Code code;
    std::string cure;
  };
  const Case cases[] = {
      {IBV_WC_RNR_RETRY_EXC_ERR, Code::kUnavailable, "no receive posted"},
      {IBV_WC_REM_ACCESS_ERR, Code::kProtocol, "remote key"},
      {IBV_WC_REM_OP_ERR, Code::kUnavailable, "kernel log there"},
      {IBV_WC_LOC_PROT_ERR, Code::kUnavailable, "no longer registered"},
      {IBV_WC_LOC_LEN_ERR, Code::kUnavailable, "longer than"},
      {IBV_WC_GENERAL_ERR, Code::kUnavailable, "kernel log"},
      {IBV_WC_BAD_RESP_ERR, Code::kUnavailable, "kernel log"},
      {IBV_WC_REM_ABORT_ERR, Code::kUnavailable, "kernel log"},
  };
  for (const bool connecting : {true, false}) {
    for (const Case& one : cases) {
      CAPTURE(one.cure);
      CAPTURE(connecting);
      Devices devices;
      Node a(on("fake0")), b(on("fake1"));
      Line line(a, b, 0), other(a, b, 1);
      REQUIRE(carry({&a, &b}, {&line, &other}, 50));
      FAKE(fake_verbs_complete)(connecting ? line.x_queue_pair() : line.y_queue_pair(), one.status,
                                3, false);
      check_only_one_ends({&a, &b}, line, other);
      const Status& told = connecting ? *line.x.ended : *line.y.ended;
      CHECK(told.code() == one.code);
      check_says(
          told, {"fake0", "fake1", connecting ? b.address : "127.0.0.1:", "vendor 0xfa", one.cure});
      // The other side gets the same sentence.
      check_says(connecting ? *line.y.ended : *line.x.ended,
                 {"fake0", "fake1", one.cure, connecting ? "127.0.0.1:" : b.address});
    }
  }
}

FAULT_TEST("a connection whose every request the peer's device refuses ends alone") {
  for (const bool connecting : {true, false}) {
    CAPTURE(connecting);
    Devices devices;
    Node a(on("fake0")), b(on("fake1"));
    Line line(a, b, 0), other(a, b, 1);
    REQUIRE(carry({&a, &b}, {&line, &other}, 50));
    uint32_t refused = 0;  // the queue pair whose next request will be
    const uint64_t upto = line.x.sent + 20;
    REQUIRE(turn({&a, &b}, [&] {
      auto* endpoint = static_cast<verbs::VerbsEndpoint*>(connecting ? line.x_end() : line.y_end());
      const auto queue_pair = endpoint == nullptr ? nullptr : endpoint->queue_pair();
      if (queue_pair != nullptr && queue_pair->number() != refused) {
        refused = queue_pair->number();
        FAKE(fake_verbs_complete)(refused, IBV_WC_REM_INV_REQ_ERR, 0, false);
      }
      line.write(upto);
      return line.ended();
    }));
    CHECK(carry({&a, &b}, {&other}, 50));
    check_says(connecting ? *line.x.ended : *line.y.ended,
               {"fake0", "fake1", connecting ? b.address : "127.0.0.1:", "path MTU"});
  }
}

FAULT_TEST("a receive that fails ends its connection alone, with cause and cure") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0), other(a, b, 1);
  REQUIRE(carry({&a, &b}, {&line, &other}, 50));
  FAKE(fake_verbs_complete_receive)(line.y_queue_pair(), IBV_WC_LOC_ACCESS_ERR);
  check_only_one_ends({&a, &b}, line, other);
  check_says(*line.y.ended, {"fake0", "fake1", "does not permit"});
}

FAULT_TEST("a path that breaks is made again, and every letter arrives once, in order") {
  for (const ibv_wc_status status :
       {IBV_WC_RETRY_EXC_ERR, IBV_WC_WR_FLUSH_ERR, IBV_WC_RESP_TIMEOUT_ERR, IBV_WC_LOC_QP_OP_ERR,
        IBV_WC_FATAL_ERR}) {
    CAPTURE(status);
    Devices devices;
    Node a(on("fake0")), b(on("fake1"));
    Line line(a, b, 0), other(a, b, 1);
    uint32_t skip = 0;
    for (const bool connecting : {true, false}) {
      // What is lost may be the request, or only the word that it arrived.
      for (const bool delivered : {true, false}) {
        CAPTURE(connecting);
        CAPTURE(delivered);
        CHECK(carry({&a, &b}, {&line, &other}, 200, [&] {
          FAKE(fake_verbs_complete)(connecting ? line.x_queue_pair() : line.y_queue_pair(), status,
                                    skip++, delivered);
        }));
      }
    }
  }
}

FAULT_TEST("a path that breaks on both sides at once is made again") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0);
  for (uint32_t i = 0; i < 10; ++i) {
    CHECK(carry({&a, &b}, {&line}, 100, [&] {
      FAKE(fake_verbs_complete)(line.x_queue_pair(), IBV_WC_RETRY_EXC_ERR, i, i % 2 == 0);
      FAKE(fake_verbs_complete)(line.y_queue_pair(), IBV_WC_RETRY_EXC_ERR, i / 2, i % 3 == 0);
    }));
  }
}

FAULT_TEST("a broken path with deep queues is found drained without waiting") {
  Devices devices;
  Node a(on("fake0"), {.receive_depth = 512}), b(on("fake1"));
  Line line(a, b, 0);
  const uint32_t before = line.x_queue_pair();
  FAKE(fake_verbs_complete_receive)(before, IBV_WC_WR_FLUSH_ERR);
  // What is left in the queue raises no event, so `poll` must say that there is more.
  while (a.poll()) continue;
  CHECK(line.x_queue_pair() != before);
  CHECK(carry({&a, &b}, {&line}, 50));
}

FAULT_TEST("a device that is slow to flush is waited for as long as its link") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0);
  for (const bool connecting : {true, false}) {
    CAPTURE(connecting);
    const uint32_t broken = connecting ? line.x_queue_pair() : line.y_queue_pair();
    FAKE(fake_verbs_slow_flush)(broken, true);
    FAKE(fake_verbs_complete)(broken, IBV_WC_RETRY_EXC_ERR, 0, false);
    // Twice the time that a queue pair gets which its device has given up.
    const auto until = Clock::now() + std::chrono::seconds(2);
    CHECK(turn({&a, &b}, [&] {
      line.write(line.x.received + 50);
      return Clock::now() > until;
    }));
    REQUIRE(!line.ended());
    CHECK((connecting ? line.x_queue_pair() : line.y_queue_pair()) == broken);
    FAKE(fake_verbs_slow_flush)(broken, false);
    CHECK(carry({&a, &b}, {&line}, 100));
    CHECK((connecting ? line.x_queue_pair() : line.y_queue_pair()) != broken);
  }
}

FAULT_TEST("a device that never flushes ends its link in time") {
  Devices devices;
  Node a(on("fake0", 300)), b(on("fake1", 300));
  Line line(a, b, 0), other(a, b, 1);
  FAKE(fake_verbs_slow_flush)(line.x_queue_pair(), true);
  FAKE(fake_verbs_complete)(line.x_queue_pair(), IBV_WC_RETRY_EXC_ERR, 0, false);
  check_only_one_ends({&a, &b}, line, other);
  check_says(*line.x.ended, {"the link between fake0", "did not answer", "within 0.3 s"});
}

FAULT_TEST("what a given up queue pair had delivered counts, however late it is looked at") {
  Devices devices;
  // Deep queues, so that a look at them takes several turns.
  Node a(on("fake0"), {.receive_depth = 512}), b(on("fake1"), {.receive_depth = 512});
  Line line(a, b, 0);
  REQUIRE(carry({&a, &b}, {&line}, 50));
  while (b.poll()) continue;
  // All of the same slot, whose content nobody looks at: their number is what matters.
  a.ends.erase(line.x.id);
  uint64_t number = line.x.sent;
  const auto write = [&](int count) {
    const Slice slice{line.x.out_region.get(), line.x.out.data(), kSlotBytes};
    for (int i = 0; i < count; ++i) {
      REQUIRE(line.x_end()
                  ->write({&slice, 1},
                          {reinterpret_cast<uint64_t>(line.y.in.data()),
                           line.y.in_region->remote_key()},
                          static_cast<Immediate>(number++), 0)
                  .ok());
    }
  };
  // Between two looks at events there is a number of busy turns.
  for (int i = 0; i < 8; ++i) {
    write(1);
    b.poll();
  }
  write(400);
  a.poll();  // they are complete, and will not be sent again
  const uint32_t before = line.y_queue_pair();
  FAKE(fake_verbs_raise)(nullptr, IBV_EVENT_QP_FATAL, before);
  b.fabric->wait(0);
  for (int i = 0; i < 8; ++i) b.poll();
  REQUIRE(line.y_queue_pair() == before);
  REQUIRE(!line.y_link()->working());
  REQUIRE(line.y.received < number - 64);
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  CHECK(turn({&a, &b}, [&] {
    const auto* link = line.y_link();
    return link == nullptr || link->working();
  }));
  REQUIRE(!line.y.ended.has_value());
  CHECK(line.y.received == number);
}

FAULT_TEST("a message that a device delivers twice counts once") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0);
  for (uint32_t round = 0; round < 30; ++round) {
    CAPTURE(round);
    CHECK(carry({&a, &b}, {&line}, 40, [&] {
      FAKE(fake_verbs_repeat)(line.x_queue_pair(), round % 7);
      FAKE(fake_verbs_repeat)(line.y_queue_pair(), round % 5);
      // Before the link is made anew, and after.
      if (round % 3 == 0)
        FAKE(fake_verbs_complete)(line.x_queue_pair(), IBV_WC_RETRY_EXC_ERR, 3, round % 2 == 0);
    }));
  }
  // Credits that came twice would be seen here.
  CHECK(carry({&a, &b}, {&line}, 10 * kSlots));
}

FAULT_TEST("a message that a device loses and acknowledges ends its connection, with the reason") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0), other(a, b, 1);
  REQUIRE(carry({&a, &b}, {&line, &other}, 50));
  while (a.poll() || b.poll()) continue;
  FAKE(fake_verbs_complete)(line.x_queue_pair(), IBV_WC_SUCCESS, 0, false);
  const uint64_t lost = line.x.sent;
  line.write_x(lost + 1);
  REQUIRE(line.x.sent == lost + 1);
  check_only_one_ends({&a, &b}, line, other);
  CHECK(line.y.received == lost);
}

FAULT_TEST("reads that a broken path lost are done again, each once") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0);
  std::vector<std::byte> copy(64);
  auto region = a.fabric->register_memory(copy.data(), copy.size(), Access::kRemoteWrite);
  for (const bool delivered : {true, false}) {
    FAKE(fake_verbs_complete)(line.x_queue_pair(), IBV_WC_RETRY_EXC_ERR, 20, delivered);
    const size_t before = line.x.reads.size();
    for (uint64_t i = 0; i < 50; ++i) {
      REQUIRE(
          line.x_end()
              ->read({region.value().get(), copy.data(), copy.size()},
                     {reinterpret_cast<uint64_t>(line.y.in.data()), line.y.in_region->remote_key()},
                     i)
              .ok());
    }
    REQUIRE(turn({&a, &b}, [&] { return line.x.reads.size() >= before + 50; }));
    CHECK(carry({&a, &b}, {&line}, 20));
    CHECK(line.x.reads.size() == before + 50);
  }
}

// ---- Making a broken path again meets faults of its own.

FAULT_TEST("a path is tried again while its device refuses what that takes") {
  struct Case {
    FakeVerbsCall call;
    const char* device;
  };
  for (const Case one :
       {Case{FakeVerbsCall::kCreateQp, "fake0"}, Case{FakeVerbsCall::kCreateQp, "fake1"},
        Case{FakeVerbsCall::kModifyRtr, "fake0"}, Case{FakeVerbsCall::kModifyRtr, "fake1"},
        Case{FakeVerbsCall::kModifyRts, "fake0"}}) {
    CAPTURE(static_cast<int>(one.call));
    CAPTURE(one.device);
    Devices devices;
    Node a(on("fake0")), b(on("fake1"));
    Line line(a, b, 0), other(a, b, 1);
    CHECK(carry({&a, &b}, {&line, &other}, 100, [&] {
      FAKE(fake_verbs_fail)(one.call, one.device, 0, 1, ENOMEM);
      FAKE(fake_verbs_complete)(line.x_queue_pair(), IBV_WC_RETRY_EXC_ERR, 0, false);
    }));
  }
}

FAULT_TEST("a path that cannot be made again ends in time, with why it broke and what was tried") {
  for (const char* device : {"fake0", "fake1"}) {
    CAPTURE(device);
    Devices devices;
    Node a(on("fake0", 300)), b(on("fake1", 300));
    Line line(a, b, 0), other(a, b, 1);
    REQUIRE(carry({&a, &b}, {&line, &other}, 50));
    FAKE(fake_verbs_fail)(FakeVerbsCall::kCreateQp, device, 0, 1000, ENOMEM);
    FAKE(fake_verbs_complete)(line.x_queue_pair(), IBV_WC_RETRY_EXC_ERR, 0, false);
    check_only_one_ends({&a, &b}, line, other);
    check_says(*line.x.ended, {"the link between fake0", b.address, "fake1", "did not answer",
                               "did not come back within"});
    check_says(*line.y.ended, {"fake0", "fake1", "broke"});
    // What stood in the way is known where it did.
    check_says(device == std::string("fake0") ? *line.x.ended : *line.y.ended, {"no queue pair"});
  }
}

FAULT_TEST("closing while a broken path is being made again ends it, whatever that comes to") {
  for (const bool flush : {true, false}) {
    CAPTURE(flush);
    Devices devices;
    Options hasty{.receive_depth = kSlots};
    hasty.close_timeout_ms = 200;
    Node a(on("fake0"), hasty), b(on("fake1"));
    Line line(a, b, 0), other(a, b, 1);
    REQUIRE(carry({&a, &b}, {&line, &other}, 50));
    FAKE(fake_verbs_stall_rtr)(true);
    FAKE(fake_verbs_complete)(line.x_queue_pair(), IBV_WC_RETRY_EXC_ERR, 0, false);
    const uint64_t one_more = line.x.sent + 1;
    REQUIRE(turn({&a, &b}, [&] {
      line.write(one_more);
      return FAKE(fake_verbs_stalled)() == 2;
    }));
    FAKE(fake_verbs_fail)(FakeVerbsCall::kModifyRtr, nullptr, 0, 2, ETIMEDOUT);
    line.x_end()->close({Code::kCancelled, "no more"}, flush);
    FAKE(fake_verbs_stall_rtr)(false);
    // The other side is slow, so that the failure is known before the signalling connection ends.
    REQUIRE(turn({&a}, [&] { return line.x.ended.has_value(); }));
    REQUIRE(turn({&a, &b}, [&] { return line.ended(); }));
    CHECK(line.x.ended->message() == "no more");
    check_says(*line.y.ended, {"no more"});
    CHECK(carry({&a, &b}, {&other}, 50));
  }
}

// ---- Asynchronous events.

FAULT_TEST("a queue pair that its device gives up is replaced, and no letter is lost or doubled") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0), other(a, b, 1);
  for (const bool flushed : {true, false}) {
    for (const bool connecting : {true, false}) {
      CAPTURE(flushed);
      CAPTURE(connecting);
      CHECK(carry({&a, &b}, {&line, &other}, 100, [&] {
        const uint32_t number = connecting ? line.x_queue_pair() : line.y_queue_pair();
        if (flushed) FAKE(fake_verbs_complete_receive)(number, IBV_WC_WR_FLUSH_ERR);
        FAKE(fake_verbs_raise)(nullptr, IBV_EVENT_QP_FATAL, number);
      }));
    }
  }
}

FAULT_TEST("a queue pair that fails before its connection is there ends that") {
  for (const bool flushed : {true, false}) {
    CAPTURE(flushed);
    Devices devices;
    Node a(on("fake0")), b(on("fake1"));
    Line other(a, b, 0);
    FAKE(fake_verbs_stall_rtr)(true);
    Line line(a, b, 1, Line::Begun());
    REQUIRE(turn({&a, &b}, [&] { return FAKE(fake_verbs_stalled)() == 2; }));
    const uint32_t number = line.x_queue_pair();
    if (flushed) FAKE(fake_verbs_complete_receive)(number, IBV_WC_WR_FLUSH_ERR);
    FAKE(fake_verbs_raise)(nullptr, IBV_EVENT_QP_FATAL, number);
    REQUIRE(turn({&a, &b}, [&] { return line.x.ended.has_value(); }));
    check_says(*line.x.ended, {b.address, "fake0", "fake1", "could not be made",
                               flushed ? "torn down" : "catastrophic"});
    FAKE(fake_verbs_stall_rtr)(false);
    CHECK(carry({&a, &b}, {&other}, 50));
  }
}

FAULT_TEST("an event that tells of a forbidden access ends its connection alone") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0), other(a, b, 1);
  REQUIRE(carry({&a, &b}, {&line, &other}, 50));
  FAKE(fake_verbs_raise)(nullptr, IBV_EVENT_QP_ACCESS_ERR, line.y_queue_pair());
  check_only_one_ends({&a, &b}, line, other, 0);
  check_says(*line.y.ended, {"127.0.0.1:", "fake1", "local access violation", "same jaxrdma"});
  check_says(*line.x.ended, {b.address, "fake1", "local access violation"});
}

FAULT_TEST("an event that tells of a wrong request ends its connection, or that is made again") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0), other(a, b, 1);
  REQUIRE(carry({&a, &b}, {&line, &other}, 50));
  const uint32_t before = line.y_queue_pair();
  FAKE(fake_verbs_raise)(nullptr, IBV_EVENT_QP_REQ_ERR, before);
  REQUIRE(turn({&a, &b}, [&] {
    const auto* y = static_cast<verbs::VerbsEndpoint*>(line.y_end());
    const bool again =
        y != nullptr && y->queue_pair() != nullptr && y->queue_pair()->number() != before;
    return line.ended() || again;
  }));
  if (line.ended()) {
    check_says(*line.y.ended, {"127.0.0.1:", "fake1", "invalid request", "kernel log"});
    CHECK(carry({&a, &b}, {&other}, 50));
  } else {
    CHECK(carry({&a, &b}, {&line, &other}, 50));
  }
}

FAULT_TEST("a completion queue that fails ends its connection alone") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0), other(a, b, 1);
  REQUIRE(carry({&a, &b}, {&line, &other}, 50));
  FAKE(fake_verbs_raise)(nullptr, IBV_EVENT_CQ_ERR, line.x_queue_pair());
  check_only_one_ends({&a, &b}, line, other);
  check_says(*line.x.ended, {b.address, "fake0", "CQ error", "kernel log"});
  check_says(*line.y.ended, {"CQ error"});
}

FAULT_TEST("a port that goes down and comes back is waited for") {
  for (const char* device : {"fake0", "fake1"}) {
    CAPTURE(device);
    Devices devices;
    Node a(on("fake0")), b(on("fake1"));
    Line line(a, b, 0), other(a, b, 1);
    for (int i = 0; i < 3; ++i) {
      const uint64_t aim = line.x.received + 100;
      bool down = false, up = false;
      const auto tells = [&](Line& one) {
        return one.x_end() == nullptr || one.y_end() == nullptr ||
               static_cast<verbs::VerbsEndpoint&>(*one.x_end()).queue_pair() == nullptr ||
               static_cast<verbs::VerbsEndpoint&>(*one.y_end()).queue_pair() == nullptr;
      };
      REQUIRE(turn({&a, &b}, [&] {
        line.write(aim);
        other.write(aim);
        if (!down && line.x.received + 50 >= aim) {
          down = true;
          FAKE(fake_verbs_raise)(device, IBV_EVENT_PORT_ERR, 0);
        } else if (down && !up && tells(line) && tells(other)) {
          up = true;
          FAKE(fake_verbs_raise)(device, IBV_EVENT_PORT_ACTIVE, 0);
        }
        const bool ended = line.x.ended || line.y.ended || other.x.ended || other.y.ended;
        return ended || (line.x.received == aim && line.y.received == aim &&
                         other.x.received == aim && other.y.received == aim);
      }));
      CHECK(up);
      REQUIRE((!line.x.ended && !line.y.ended && !other.x.ended && !other.y.ended));
      CHECK(line.x.wrong + line.y.wrong + other.x.wrong + other.y.wrong == 0);
      CHECK(a.fabric->trouble() + b.fabric->trouble() == "");
    }
  }
}

FAULT_TEST("a port that stays down ends its connections in time, and says which") {
  Devices devices;
  Node a(on("fake0", 200)), b(on("fake1", 200)), c(on("fake1", 200));
  Line line(a, b, 0), other(b, c, 1);
  REQUIRE(carry({&a, &b, &c}, {&line, &other}, 50));
  CHECK(a.fabric->trouble().empty());
  FAKE(fake_verbs_raise)("fake0", IBV_EVENT_PORT_ERR, 0);
  // Before it ends it can be asked for.
  REQUIRE(turn({&a, &b, &c}, [&] { return !a.fabric->trouble().empty(); }));
  CHECK(!line.x.ended);
  check_says(Status(Code::kUnavailable, a.fabric->trouble()),
             {"the link between fake0 port 1", b.address, "went down"});
  check_only_one_ends({&a, &b, &c}, line, other);
  check_says(*line.x.ended, {"the link between fake0 port 1", b.address, "fake1",
                             "port 1 of fake0 on this side went down", "did not come back within"});
  check_says(*line.y.ended, {"the link between fake1 port 1", "fake0"});
}

FAULT_TEST("a device that dies ends its connections on both sides, and no others") {
  for (const bool connecting : {true, false}) {
    CAPTURE(connecting);
    Devices devices;
    Node a(on("fake0")), b(on("fake1")), c(on("fake1"));
    // a's device dies; the line in question is made by it or to it.
    Line line(connecting ? a : b, connecting ? b : a, 0), second(a, b, 1), other(b, c, 2);
    REQUIRE(carry({&a, &b, &c}, {&line, &second, &other}, 50));
    FAKE(fake_verbs_raise)("fake0", IBV_EVENT_DEVICE_FATAL, 0);
    REQUIRE(turn({&a, &b, &c}, [&] { return line.ended() && second.ended(); }));
    for (const Line* one : {&line, &second}) {
      const bool x_dies = &one->x_node == &a;
      const Status& died = x_dies ? *one->x.ended : *one->y.ended;
      const Status& lost = x_dies ? *one->y.ended : *one->x.ended;
      check_says(died, {x_dies ? b.address : "127.0.0.1:", "fake0", "local catastrophic error",
                        "cannot be used any more", "kernel log"});
      check_says(lost, {x_dies ? "127.0.0.1:" : a.address, "fake0", "local catastrophic error"});
    }
    CHECK(carry({&a, &b, &c}, {&other}, 100));
    // What is begun later fails at once, on this device and towards it.
    check_says(connect(a, b, 10).status(), {"fake0"});
    Line late(b, a, 11, Line::Begun());
    REQUIRE(turn({&a, &b, &c}, [&] { return late.x.ended.has_value(); }));
    check_says(*late.x.ended, {a.address, "fake0"});
  }
}

FAULT_TEST("events that change nothing for a connection leave it alone") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0);
  for (const ibv_event_type event :
       {IBV_EVENT_LID_CHANGE, IBV_EVENT_GID_CHANGE, IBV_EVENT_PKEY_CHANGE, IBV_EVENT_SM_CHANGE,
        IBV_EVENT_CLIENT_REREGISTER, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_WQ_FATAL}) {
    CAPTURE(event);
    const uint32_t before = line.x_queue_pair();
    CHECK(carry({&a, &b}, {&line}, 40, [&] { FAKE(fake_verbs_raise)("fake0", event, 0); }));
    CHECK(line.x_queue_pair() == before);
  }
  const uint32_t before = line.x_queue_pair();
  CHECK(carry({&a, &b}, {&line}, 40,
              [&] { FAKE(fake_verbs_raise)(nullptr, IBV_EVENT_COMM_EST, line.x_queue_pair()); }));
  CHECK(line.x_queue_pair() == before);
}

FAULT_TEST("a device that gets another address is reached there when the path is made again") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0);
  for (const bool connecting : {true, false}) {
    CHECK(carry({&a, &b}, {&line}, 100, [&] {
      const char* device = connecting ? "fake0" : "fake1";
      FAKE(fake_verbs_set_address)(device, connecting ? 0xc6336401 : 0xc6336402);
      FAKE(fake_verbs_raise)(device, IBV_EVENT_GID_CHANGE, 0);
      // What goes to the old address is not answered.
      FAKE(fake_verbs_complete)(connecting ? line.y_queue_pair() : line.x_queue_pair(),
                                IBV_WC_RETRY_EXC_ERR, 0, false);
    }));
  }
  CHECK(a.fabric->describe().find("198.51.100.1") != std::string::npos);
  CHECK(b.fabric->describe().find("198.51.100.2") != std::string::npos);
}

FAULT_TEST("whatever breaks whenever, no letter is lost, changed or doubled") {
  Devices devices;
  Node a(on("fake0")), b(on("fake1")), c(on("fake0"));
  Line first(a, b, 0), second(b, a, 1), third(c, b, 2);
  const int rounds = std::getenv("TEST_LONG") != nullptr ? 1000 : 20;
  std::minstd_rand random(3);
  const std::array<Line*, 3> lines{&first, &second, &third};
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    REQUIRE(carry({&a, &b, &c}, {&first, &second, &third}, 60, [&] {
      // One fault, or several at once.
      for (uint32_t i = 0; i <= random() % 3; ++i)
        break_somehow(*lines[random() % lines.size()], random);
    }));
  }
}

// ---- The engines.

namespace {

constexpr size_t kElements = 5000;
constexpr size_t kPartitionBytes = 1024;
constexpr int kTimeoutMs = 20'000;

TransportOptions over(const VerbsOptions& verbs) {
  TransportOptions options;
  options.name = "verbs";
  options.verbs = verbs;
  return options;
}

std::vector<std::byte> token_of(uint32_t worker) {
  std::vector<std::byte> token(Hello::kTokenBytes);
  token[0] = static_cast<std::byte>(worker + 1);
  return token;
}

/// One server, on fake1, and workers, on fake0; `striped`: all on both.
struct Job {
  explicit Job(uint32_t count, bool connected = true, bool striped = false) {
    spec.mode = FlowMode::kAverage;
    spec.leaves.push_back({DType::kFloat32, kElements});
    constexpr uint64_t kPiece = kPartitionBytes / sizeof(float);
    for (uint64_t begin = 0; begin < kElements; begin += kPiece)
      spec.partitions.push_back({0, 0, begin, std::min<uint64_t>(kPiece, kElements - begin)});
    ServerOptions options;
    options.workers = count;
    options.job = "faults";
    options.partition_bytes = kPartitionBytes;
    options.slots_per_worker = 4;
    options.transport = over(striped ? on({"fake1", "fake0"}) : on("fake1"));
    auto made = ServerEngine::create(options);
    REQUIRE_MESSAGE(made.ok(), made.status().message());
    server = made.value();
    REQUIRE(server->add_flow(spec).ok());
    for (uint32_t w = 0; w < count; ++w) {
      REQUIRE(server->admit(w, 1, token_of(w)).ok());
      WorkerOptions worker;
      worker.worker = w;
      worker.job = "faults";
      worker.incarnation = 1;
      worker.transport = over(striped ? on({"fake0", "fake1"}) : on("fake0"));
      workers.push_back(WorkerEngine::create(worker).value());
      if (!connected) continue;
      const Status status = connect(w);
      REQUIRE_MESSAGE(status.ok(), status.message());
      REQUIRE(workers[w]->add_flow(spec).ok());
    }
  }
  Status connect(uint32_t worker) {
    return workers[worker]->connect({{server->address(), token_of(worker)}}, kTimeoutMs);
  }
  ~Job() {
    for (auto& worker : workers) worker->close();
    server->close();
  }
  FlowSpec spec;
  std::shared_ptr<ServerEngine> server;
  std::vector<std::shared_ptr<WorkerEngine>> workers;
};

/// One exchange of a worker, and the wait for its end.
class Exchange {
 public:
  Exchange(WorkerEngine& engine, int64_t step, float value) : values(kElements, value) {
    call_.start(engine, OperationKind::kExchange, step, &values, &values);
  }
  Status wait() { return call_.wait(kTimeoutMs); }
  std::vector<float> values;

 private:
  testing::Call call_;
};

}  // namespace

/// Step 0 of everybody: a server may know of a connection later than its worker does.
static void step_together(Job& job) {
  std::vector<std::unique_ptr<Exchange>> all;
  for (auto& worker : job.workers) all.push_back(std::make_unique<Exchange>(*worker, 0, 1.0f));
  for (auto& each : all) REQUIRE(each->wait().ok());
}

FAULT_TEST("steps go on over a port that goes down and comes back") {
  for (const bool striped : {false, true}) {
    CAPTURE(striped);
    Devices devices;
    Job job(2, /*connected=*/true, striped);
    for (int64_t step = 0; step < 30; ++step) {
      Exchange first(*job.workers[0], step, 1.0f), second(*job.workers[1], step, 3.0f);
      if (step % 10 == 5) {
        const char* device = step % 20 == 5 ? "fake0" : "fake1";
        FAKE(fake_verbs_raise)(device, IBV_EVENT_PORT_ERR, 0);
        FAKE(fake_verbs_raise)(device, IBV_EVENT_PORT_ACTIVE, 0);
      }
      for (Exchange* one : {&first, &second}) {
        const Status status = one->wait();
        REQUIRE_MESSAGE(status.ok(), status.message());
        CHECK(one->values == std::vector<float>(kElements, 2.0f));
      }
    }
  }
}

FAULT_TEST("a server whose device dies is named by every worker that waits for it") {
  Devices devices;
  Job job(2);
  step_together(job);
  Exchange waits(*job.workers[0], 1, 1.0f);  // for worker 1
  FAKE(fake_verbs_raise)("fake1", IBV_EVENT_DEVICE_FATAL, 0);
  for (auto& worker : job.workers) {
    REQUIRE(worker->wait_failure(kTimeoutMs));
    check_says(worker->status(),
               {"server 0", job.server->address(), "fake1", "local catastrophic error"});
  }
  // The coordinator's verdict, which is awaited for a while.
  job.workers[0]->fail(Status(Code::kPeerFailed, "server 0 failed"));
  CHECK(waits.wait().message() == "server 0 failed");
  for (int i = 0; i < 2; ++i) {
    const ServerEvent event = job.server->wait_event(kTimeoutMs);
    CHECK(event.kind == ServerEvent::Kind::kWorkerLost);
    check_says(Status(Code::kUnavailable, event.text), {"worker ", "fake1", "catastrophic"});
  }
}

FAULT_TEST("a worker whose device dies is named by the server, and told so itself") {
  Devices devices;
  Job job(1);
  step_together(job);
  FAKE(fake_verbs_raise)("fake0", IBV_EVENT_DEVICE_FATAL, 0);
  REQUIRE(job.workers[0]->wait_failure(kTimeoutMs));
  check_says(job.workers[0]->status(),
             {"server 0", job.server->address(), "fake0", "local catastrophic error"});
  const ServerEvent event = job.server->wait_event(kTimeoutMs);
  CHECK(event.kind == ServerEvent::Kind::kWorkerLost);
  check_says(Status(Code::kUnavailable, event.text), {"worker 0", "fake0"});
}

FAULT_TEST("a send queue that is full amid a step ends the step with the server's name") {
  Devices devices;
  Job job(1);
  REQUIRE(Exchange(*job.workers[0], 0, 1.0f).wait().ok());
  FAKE(fake_verbs_fail)(FakeVerbsCall::kPostSend, "fake0", 7, 1, ENOMEM);
  Exchange broken(*job.workers[0], 1, 1.0f);
  REQUIRE(job.workers[0]->wait_failure(kTimeoutMs));
  const Status status = job.workers[0]->status();
  check_says(status, {"server 0", job.server->address(), "fake0", "Cannot allocate memory"});
  job.workers[0]->fail(status);
  CHECK(broken.wait().message() == status.message());
}

FAULT_TEST("engines that can register no memory say so at once, with the cure") {
  Devices devices;
  Job job(1, /*connected=*/false);
  FAKE(fake_verbs_fail)(FakeVerbsCall::kRegMr, nullptr, 0, 2, ENOMEM);
  check_says(job.server->admit(0, 1, token_of(0)), {"fake1", "did not register", "lock"});
  check_says(job.connect(0), {"fake0", "did not register", "lock"});
}

FAULT_TEST("a worker that leaves while its connection is being made is waited for") {
  Devices devices;
  Job job(2, /*connected=*/false);
  REQUIRE(job.connect(1).ok());
  REQUIRE(job.workers[1]->add_flow(job.spec).ok());
  Exchange waits(*job.workers[1], 0, 3.0f);
  const auto deadline = Clock::now() + kPatience;
  while (job.server->stats().bytes_pushed == 0 && Clock::now() < deadline)
    std::this_thread::yield();
  FAKE(fake_verbs_stall_rtr)(true);
  std::thread leaver([&] {
    while (FAKE(fake_verbs_stalled)() < 2 && Clock::now() < deadline) std::this_thread::yield();
    job.server->mark_left(0);
    FAKE(fake_verbs_stall_rtr)(false);
  });
  const Status connected = job.connect(0);
  leaver.join();
  REQUIRE_MESSAGE(connected.ok(), connected.message());
  REQUIRE(job.workers[0]->add_flow(job.spec).ok());
  Exchange last(*job.workers[0], 0, 1.0f);
  for (Exchange* one : {&last, &waits}) {
    CHECK(one->wait().ok());
    CHECK(one->values == std::vector<float>(kElements, 2.0f));
  }
  const ServerEvent event = job.server->wait_event(0);
  CAPTURE(event.text);
  CHECK(event.kind == ServerEvent::Kind::kNone);
}

// ---- Libraries that lack symbols.

TEST_CASE("a libibverbs without the newer functions is enough" *
          doctest::skip(variant() != "old")) {
  Devices devices;
  Node a(on("fake0")), b(on("fake1"));
  Line line(a, b, 0);
  CHECK(carry({&a, &b}, {&line}, 100));
  CHECK(a.fabric->describe().find("192.0.2.1") != std::string::npos);
}

TEST_CASE("a library that is no libibverbs is named, with what it lacks" *
          doctest::skip(variant() != "incomplete")) {
  const auto made = make_verbs_fabric({}, on(""));
  REQUIRE(!made.ok());
  CHECK(made.status().code() == Code::kUnavailable);
  check_says(made.status(),
             {std::getenv("JAXRDMA_IBVERBS_LIB"), "ibv_query_qp@IBVERBS_1.1", "install rdma-core"});
  CHECK(verbs::library_path().empty());
}

#endif
