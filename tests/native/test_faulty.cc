/* test_faulty.cc: a fault to order in the transport of one process, and what the engines then say
   they wait for. */
#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "call.h"
#include "cluster.h"
#include "fabric/faulty/fault.h"

namespace jaxrdma {
namespace {

using namespace testing;

// Four partitions: 0 and 2 on server 0, written first, then 1 and 3 on server 1.
constexpr size_t kElements = kPartitionBytes;

bool eventually(const std::function<bool()>& holds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kTimeoutMs);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

/// Steps of two workers over two servers; the last may not end.
class Steps {
 public:
  explicit Steps(const OrderedFault& fault) : cluster(2, 2, striped(kElements, 2), fault) {}

  void begin(int64_t step) {
    for (int w = 0; w < 2; ++w) {
      gradients_[w] = pattern(kElements, w, step);
      results_[w].resize(kElements);
      calls.at(w) = std::make_unique<Call>();
      calls.at(w)->start(cluster.worker(w), OperationKind::kExchange, step, &gradients_[w],
                         &results_[w]);
    }
  }
  /// Whether both have the mean.
  bool end() {
    for (int w = 0; w < 2; ++w) {
      if (!calls.at(w)->wait().ok()) return false;
      for (size_t i = 0; i < kElements; ++i) {
        const double mean = (double{gradients_[0][i]} + double{gradients_[1][i]}) / 2;
        if (results_[w][i] != static_cast<float>(mean)) return false;
      }
    }
    return true;
  }
  /// Whether exactly this partition, at its server, is what `worker` waits for, at this stage.
  bool waits(size_t worker, uint32_t partition, Stage stage) {
    const std::vector<Pending> pending = cluster.worker(worker).pending(16);
    return pending.size() == 1 && pending[0].partition == partition &&
           pending[0].server == partition % 2 && pending[0].stage == stage;
  }
  bool lacks(size_t server, uint32_t worker, int64_t step, uint32_t partition) {
    const std::vector<Lack> lacking = cluster.server(server).lacking(16);
    return lacking.size() == 1 && lacking[0].worker == worker && lacking[0].step == step &&
           lacking[0].partition == partition && lacking[0].seconds >= 0;
  }

  // Before the engines that write into it, which are closed first.
  std::array<std::vector<float>, 2> gradients_, results_;
  std::array<std::unique_ptr<Call>, 2> calls;
  Cluster cluster;
};

TEST_CASE("a write that is lost is lacked by the server, and waited for by both workers") {
  Steps steps({"worker 1", "lost 7"});
  steps.begin(0);
  REQUIRE(steps.end());
  CHECK(steps.cluster.server(1).lacking(16).empty());
  steps.begin(1);
  CHECK(eventually([&] { return steps.waits(1, 1, Stage::kCompleted); }));
  CHECK(eventually([&] { return steps.waits(0, 1, Stage::kCompleted); }));
  CHECK(eventually([&] { return steps.lacks(1, 1, 1, 1); }));
  CHECK(steps.cluster.server(0).lacking(16).empty());
}

TEST_CASE("a write that is never made stays posted") {
  Steps steps({"worker 0", "withheld 2"});
  steps.begin(0);
  CHECK(eventually([&] { return steps.waits(0, 2, Stage::kPosted); }));
  CHECK(eventually([&] { return steps.lacks(0, 0, 0, 2); }));
}

// Where the data is copied on its way, nobody waits for the completion but the slot.
TEST_CASE("tcp: a completion that never comes leaves an answered request posted") {
  Steps steps({"worker 1", "swallowed 3"});
  steps.begin(0);
  CHECK(eventually([&] { return steps.waits(1, 1, Stage::kPosted); }));
  CHECK(eventually([&] { return steps.calls[0]->ended(); }));
  CHECK(steps.cluster.server(1).lacking(16).empty());
}

TEST_CASE("a worker whose completion never comes closes within the close time limit") {
  Steps steps({"worker 1", "swallowed 7"});
  steps.begin(0);
  REQUIRE(steps.end());
  steps.begin(1);
  // Where it has a copy of what is sent, the worker has the mean; else it waits until it closes.
  if (transport() == "verbs") REQUIRE(steps.end());
  CHECK(eventually([&] {
    return steps.cluster.worker(1).transport().ends_with("with a fault to order, which has come");
  }));
  CHECK(eventually([&] { return steps.calls[0]->ended(); }));
  const auto began = std::chrono::steady_clock::now();
  steps.cluster.worker(1).close();
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
  CHECK(took.count() < fabric::Options().close_timeout_ms + 1000);
  CHECK(steps.calls[1]->ended());
}

TEST_CASE("an answer that is lost is waited for by one worker, and lacked by no server") {
  Steps steps({"server 0", "lost 2"});
  steps.begin(0);
  // Once the other one has every mean, the server has had every gradient.
  const auto waits_alone = [&](size_t worker) {
    const bool waits =
        steps.waits(worker, 0, Stage::kCompleted) || steps.waits(worker, 2, Stage::kCompleted);
    return waits && steps.calls[1 - worker]->ended();
  };
  CHECK(eventually([&] { return waits_alone(0) || waits_alone(1); }));
  CHECK(steps.cluster.server(0).lacking(16).empty());
}

TEST_CASE("without credits requests are queued") {
  Steps steps({"server 0", "uncredited 1"});
  bool stuck = false;
  for (int64_t step = 0; step < 50 && !stuck; ++step) {
    steps.begin(step);
    CHECK(eventually([&] {
      for (size_t w = 0; w < 2; ++w) {
        for (const Pending& each : steps.cluster.worker(w).pending(16))
          stuck = stuck || (each.stage == Stage::kQueued && each.server == 0 && each.seconds > 0.2);
      }
      return stuck || (steps.calls[0]->ended() && steps.calls[1]->ended());
    }));
  }
  CHECK(stuck);
}

TEST_CASE("what is delayed or overtaken changes no number") {
  for (const char* what : {"delayed 9 100", "reordered 9"}) {
    for (const char* whose : {"worker 1", "server 1"}) {
      CAPTURE(what);
      CAPTURE(whose);
      Steps steps({whose, what});
      for (int64_t step = 0; step < 10; ++step) {
        steps.begin(step);
        REQUIRE(steps.end());
      }
    }
  }
}

TEST_CASE("a write that is delivered twice is a broken peer") {
  Steps steps({"server 1", "duplicated 3"});
  steps.begin(0);
  const ServerEvent event = steps.cluster.server(1).wait_event(kTimeoutMs);
  CAPTURE(event.text);
  CHECK(event.kind == ServerEvent::Kind::kViolation);
  // Whether the server has the first one in its hands still, or is done with it.
  CHECK(event.text.find("broke the protocol towards server 1: ") != std::string::npos);
  CHECK(event.text.find("slot") != std::string::npos);
}

TEST_CASE("a fault is read, or refused with what is expected") {
  using fabric::faulty::Kind;
  using fabric::faulty::parse;
  auto delayed = parse("delayed 40 2000");
  REQUIRE(delayed.ok());
  CHECK(delayed.value().kind == Kind::kDelayed);
  CHECK(delayed.value().nth == 40);
  CHECK(delayed.value().delay_ms == 2000);
  CHECK(parse("lost 1").ok());
  for (const char* bad : {"", "lost", "lost 0", "lost -1", "lost x", "lost 1 2", "delayed 1",
                          "delayed 1 -5", "delayed 1 99999999", "mislaid 1"}) {
    CAPTURE(bad);
    auto parsed = parse(bad);
    REQUIRE_FALSE(parsed.ok());
    CHECK(parsed.status().message().find("withheld, lost, swallowed") != std::string::npos);
  }
}

}  // namespace
}  // namespace jaxrdma
