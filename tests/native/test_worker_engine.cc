/* test_worker_engine.cc: the worker's engine against real servers' engines, in one process. */
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "call.h"
#include "cluster.h"
#include "engine/crew.h"
#include "engine/server.h"
#include "engine/worker.h"
#include "transports.h"

namespace jaxrdma {
namespace {

using namespace testing;

TEST_CASE("the mean of two workers over two servers comes back on both, step after step") {
  constexpr size_t kElements = 5000;  // 20 partitions, more than the slots
  Cluster cluster(2, 2, striped(kElements, 2));
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int w = 0; w < 2; ++w) {
    threads.emplace_back([&cluster, &right, w] {
      std::vector<float> result(kElements);
      for (int64_t step = 0; step < 50; ++step) {
        const std::vector<float> mine = pattern(kElements, w, step);
        Call call;
        call.start(cluster.worker(w), OperationKind::kExchange, step, &mine, &result);
        if (!call.wait().ok()) return;
        const std::vector<float> first = pattern(kElements, 0, step);
        const std::vector<float> second = pattern(kElements, 1, step);
        for (size_t i = 0; i < kElements; ++i) {
          if (result[i] != static_cast<float>((double{first[i]} + double{second[i]}) / 2)) return;
        }
      }
      ++right;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(right == 2);
  const WorkerStats stats = cluster.worker(0).stats();
  CHECK(stats.steps == 50);
  CHECK(stats.gradients_accepted == 50);
  CHECK(stats.bytes_pushed == 50 * kElements * sizeof(float));
  CHECK(stats.bytes_pulled == 50 * kElements * sizeof(float));
  CHECK(stats.last_step == 50);
  CHECK(cluster.worker(0).in_flight() == 0);
}

TEST_CASE("an exchange may return into the buffer it came from") {
  Cluster cluster(1, 1, striped(3000, 1));
  for (int64_t step = 0; step < 10; ++step) {
    std::vector<float> buffer = pattern(3000, 0, step);
    Call call;
    call.start(cluster.worker(0), OperationKind::kExchange, step, &buffer, &buffer);
    CHECK(call.wait().ok());
    CHECK(buffer == pattern(3000, 0, step));
  }
}

TEST_CASE("push returns when the source is free, pull when the answers are there") {
  Cluster cluster(2, 1, striped(3000, 2));
  for (int64_t step = 0; step < 10; ++step) {
    std::vector<float> source = pattern(3000, 0, step);
    Call push;
    push.start(cluster.worker(0), OperationKind::kPush, step, &source, nullptr);
    REQUIRE(push.wait().ok());
    std::fill(source.begin(), source.end(), -1.0f);
    std::vector<float> target(3000);
    Call pull;
    pull.start(cluster.worker(0), OperationKind::kPull, step, nullptr, &target);
    REQUIRE(pull.wait().ok());
    CHECK(target == pattern(3000, 0, step));
  }
  CHECK(cluster.worker(0).stats().steps == 10);
}

TEST_CASE("a pull without its push, and a push before the last pull, are refused") {
  Cluster cluster(1, 1, striped(300, 1));
  std::vector<float> buffer(300);
  Call early;
  early.start(cluster.worker(0), OperationKind::kPull, 0, nullptr, &buffer);
  CHECK(early.wait().code() == Code::kInvalidArgument);
  Call push;
  push.start(cluster.worker(0), OperationKind::kPush, 0, &buffer, nullptr);
  CHECK(push.wait().ok());
  Call again;
  again.start(cluster.worker(0), OperationKind::kPush, 1, &buffer, nullptr);
  CHECK(again.wait().code() == Code::kInvalidArgument);
  Call pull;
  pull.start(cluster.worker(0), OperationKind::kPull, 0, nullptr, &buffer);
  CHECK(pull.wait().ok());
}

TEST_CASE("a step that was aggregated already is stale, and counted") {
  Cluster cluster(1, 1, striped(3000, 1));
  std::vector<float> buffer(3000, 1.0f);
  for (int64_t step : {0, 1}) {
    Call call;
    call.start(cluster.worker(0), OperationKind::kExchange, step, &buffer, &buffer);
    CHECK(call.wait().ok());
  }
  Call stale;
  stale.start(cluster.worker(0), OperationKind::kExchange, 0, &buffer, &buffer);
  CHECK(stale.wait().code() == Code::kStale);
  CHECK(cluster.worker(0).stats().gradients_dropped == 1);
  Call next;
  next.start(cluster.worker(0), OperationKind::kExchange, 2, &buffer, &buffer);
  CHECK(next.wait().ok());
}

TEST_CASE("two steps of one model at once are refused, the first goes on") {
  Cluster cluster(1, 2, striped(300, 1));
  std::vector<float> a(300, 1.0f), b(300, 3.0f), result(300), other(300);
  Call first, second;
  first.start(cluster.worker(0), OperationKind::kExchange, 0, &a, &result);
  second.start(cluster.worker(0), OperationKind::kExchange, 0, &a, &other);
  CHECK(second.wait().code() == Code::kInvalidArgument);
  Call peer;
  peer.start(cluster.worker(1), OperationKind::kExchange, 0, &b, &other);
  CHECK(first.wait().ok());
  CHECK(peer.wait().ok());
  CHECK(result[0] == 2.0f);
}

TEST_CASE("what waits names its server, step and stage, and ends with the reason given") {
  Cluster cluster(2, 2, striped(3000, 2));
  std::vector<float> buffer(3000, 1.0f);
  Call call;
  call.start(cluster.worker(0), OperationKind::kExchange, 0, &buffer, &buffer);
  CHECK_FALSE(call.ended());
  const std::vector<Pending> pending = cluster.worker(0).pending(100);
  CHECK(pending.size() == 12);
  CHECK(pending[0].step == 0);
  cluster.worker(0).fail(Status(Code::kPeerFailed, "worker 1 died"));
  const Status status = call.wait();
  CHECK(status.code() == Code::kPeerFailed);
  CHECK(status.message() == "worker 1 died");
  Call later;
  later.start(cluster.worker(0), OperationKind::kExchange, 0, &buffer, &buffer);
  CHECK(later.wait().message() == "worker 1 died");
  cluster.worker(0).fail(Status(Code::kInternal, "too late"));
  CHECK(cluster.worker(0).status().message() == "worker 1 died");
}

TEST_CASE("closing ends what waits; interrupting does too") {
  for (const bool interrupt : {false, true}) {
    Cluster cluster(1, 2, striped(3000, 1));
    std::vector<float> buffer(3000, 1.0f);
    Call call;
    call.start(cluster.worker(0), OperationKind::kExchange, 0, &buffer, &buffer);
    if (interrupt) {
      cluster.worker(0).interrupt();
    } else {
      cluster.worker(0).close();
    }
    CHECK(call.wait().code() == Code::kCancelled);
  }
}

TEST_CASE("a lost server is noticed at once") {
  Cluster cluster(1, 1, striped(300, 1));
  std::thread closer([&cluster] { cluster.server(0).close(); });
  CHECK(cluster.worker(0).wait_failure(kTimeoutMs));
  closer.join();
  CHECK(cluster.worker(0).status().message().find("server 0") != std::string::npos);
}

TEST_CASE("the chief's parameters reach everybody, and the update's result comes back") {
  Cluster cluster(1, 2, striped(3000, 1, FlowMode::kUpdate));
  const std::vector<float> start = pattern(3000, 5, 0);
  std::vector<float> chief(3000), other(3000);
  Call init, fetch;
  fetch.start(cluster.worker(1), OperationKind::kFetch, 0, nullptr, &other);
  init.start(cluster.worker(0), OperationKind::kInit, 0, &start, &chief);
  ServerEvent event = cluster.server(0).wait_event(kTimeoutMs);
  REQUIRE(event.kind == ServerEvent::Kind::kInitialised);
  REQUIRE(cluster.server(0).publish(0, 0).ok());
  CHECK(init.wait().ok());
  CHECK(fetch.wait().ok());
  CHECK(chief == start);
  CHECK(other == start);

  std::vector<float> one(3000, 1.0f), three(3000, 3.0f);
  Call a, b;
  a.start(cluster.worker(0), OperationKind::kExchange, 0, &one, &chief);
  b.start(cluster.worker(1), OperationKind::kExchange, 0, &three, &other);
  event = cluster.server(0).wait_event(kTimeoutMs);
  REQUIRE(event.kind == ServerEvent::Kind::kStepReady);
  auto gradient = cluster.server(0).gradient(0, 0);
  auto parameters = cluster.server(0).parameters(0, 0);
  REQUIRE(gradient.ok());
  REQUIRE(parameters.ok());
  const auto* mean = reinterpret_cast<const float*>(gradient.value().data);
  auto* values = reinterpret_cast<float*>(parameters.value().data);
  for (size_t i = 0; i < 3000; ++i) values[i] -= 0.5f * mean[i];
  REQUIRE(cluster.server(0).publish(0, 1).ok());
  CHECK(a.wait().ok());
  CHECK(b.wait().ok());
  CHECK(chief == other);
  for (size_t i = 0; i < 3000; ++i) REQUIRE(chief[i] == start[i] - 1.0f);
}

bool over_verbs() { return testing::transport() == "verbs"; }

void fill(ServerEngine& server, float value) {
  auto parameters = server.parameters(0, 0);
  REQUIRE(parameters.ok());
  auto* values = reinterpret_cast<float*>(parameters.value().data);
  std::fill_n(values, parameters.value().elements, value);
}

TEST_CASE("tcp does not read in a server's memory, and says so") {
  if (over_verbs()) return;
  Cluster cluster(1, 1, striped(3000, 1, FlowMode::kUpdate));
  std::vector<float> buffer(3000);
  Call read;
  read.start(cluster.worker(0), OperationKind::kRead, 0, nullptr, &buffer);
  const Status status = read.wait();
  CHECK(status.code() == Code::kInvalidArgument);
  CHECK(status.message().find("pull instead") != std::string::npos);
}

TEST_CASE("verbs: parameters are read in the servers' memory, of one version or not at all") {
  if (!over_verbs()) return;
  constexpr uint32_t kServers = 2;
  Cluster cluster(kServers, 2, striped(3000, kServers, FlowMode::kUpdate));
  const std::vector<float> start = pattern(3000, 5, 0);
  std::vector<float> chief(3000), reader(3000);
  const auto read = [&](int64_t step) {
    Call call;
    call.start(cluster.worker(1), OperationKind::kRead, step, nullptr, &reader);
    return call.wait();
  };
  CHECK(read(0).code() == Code::kStale);  // nothing has been published

  Call init;
  init.start(cluster.worker(0), OperationKind::kInit, 0, &start, &chief);
  for (uint32_t s = 0; s < kServers; ++s) {
    REQUIRE(cluster.server(s).wait_event(kTimeoutMs).kind == ServerEvent::Kind::kInitialised);
    REQUIRE(cluster.server(s).publish(0, 0).ok());
  }
  REQUIRE(init.wait().ok());
  REQUIRE(read(0).ok());
  CHECK(reader == start);
  CHECK(cluster.worker(1).stats().last_read == 0);
  CHECK(read(1).code() == Code::kStale);

  std::vector<float> one(3000, 1.0f), other(3000);
  Call a, b;
  a.start(cluster.worker(0), OperationKind::kExchange, 0, &one, &chief);
  b.start(cluster.worker(1), OperationKind::kExchange, 0, &one, &other);
  for (uint32_t s = 0; s < kServers; ++s)
    REQUIRE(cluster.server(s).wait_event(kTimeoutMs).kind == ServerEvent::Kind::kStepReady);
  CHECK(read(0).code() == Code::kStale);  // they may be being overwritten
  fill(cluster.server(0), 7.0f);
  REQUIRE(cluster.server(0).publish(0, 1).ok());
  CHECK(read(0).code() == Code::kStale);  // half of them
  fill(cluster.server(1), 7.0f);
  REQUIRE(cluster.server(1).publish(0, 1).ok());
  REQUIRE(a.wait().ok());
  REQUIRE(b.wait().ok());
  REQUIRE(read(1).ok());
  CHECK(reader == std::vector<float>(3000, 7.0f));
  CHECK(cluster.worker(1).stats().last_read == 1);
}

TEST_CASE("verbs: what is read while servers step is never of two versions") {
  if (!over_verbs()) return;
  constexpr int64_t kSteps = 40;
  constexpr size_t kElements = 20000;
  Cluster cluster(1, 1, striped(kElements, 1, FlowMode::kUpdate));
  ServerEngine& server = cluster.server(0);
  // Every value of a version is its step.
  std::thread updater([&] {
    while (true) {
      const ServerEvent event = server.wait_event(kTimeoutMs);
      if (event.kind == ServerEvent::Kind::kStepReady) {
        fill(server, static_cast<float>(event.step + 1));
        REQUIRE(server.publish(0, event.step + 1).ok());
      } else if (event.kind == ServerEvent::Kind::kInitialised) {
        REQUIRE(server.publish(0, 0).ok());
      } else {
        return;
      }
    }
  });
  const std::vector<float> zero(kElements, 0.0f);
  std::vector<float> result(kElements), copy(kElements);
  Call init;
  init.start(cluster.worker(0), OperationKind::kInit, 0, &zero, &result);
  REQUIRE(init.wait().ok());
  int64_t newest = 0;
  int read_well = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    Call exchange;
    exchange.start(cluster.worker(0), OperationKind::kExchange, step, &zero, &result);
    while (!exchange.ended()) {
      Call read;
      read.start(cluster.worker(0), OperationKind::kRead, 0, nullptr, &copy);
      const Status status = read.wait();
      if (status.code() == Code::kStale) continue;
      REQUIRE(status.ok());
      ++read_well;
      const int64_t found = cluster.worker(0).stats().last_read;
      CHECK(found >= newest);
      newest = found;
      REQUIRE(copy == std::vector<float>(kElements, static_cast<float>(found)));
    }
    REQUIRE(exchange.wait().ok());
  }
  CHECK(read_well > 0);
  server.wake();
  updater.join();
}

TEST_CASE("a flow without elements is done at once") {
  FlowSpec spec;
  spec.mode = FlowMode::kAverage;
  spec.leaves.push_back({DType::kFloat32, 0});
  Cluster cluster(1, 2, spec);
  std::vector<float> nothing;
  Call call;
  call.start(cluster.worker(0), OperationKind::kExchange, 0, &nothing, &nothing);
  CHECK(call.wait().ok());
}

TEST_CASE("callbacks that wait for each other never share a thread") {
  constexpr int kTasks = 8;
  std::mutex lock;
  std::condition_variable changed;
  int arrived = 0;
  bool all = true;
  int given = 0;  // of who leads
  std::atomic<int> leaders = 0;
  bool alone = true;
  Crew crew("test-crew", [&]() -> Crew::Task {
    alone = ++leaders == 1 && alone;
    const bool more = given++ < kTasks;
    --leaders;
    if (!more) return {};
    return [&] {
      std::unique_lock guard(lock);
      ++arrived;
      changed.notify_all();
      if (!changed.wait_for(guard, std::chrono::milliseconds(kTimeoutMs),
                            [&] { return arrived == kTasks; })) {
        all = false;
      }
    };
  });
  crew.join();
  CHECK(arrived == kTasks);
  CHECK(all);
  CHECK(alone);
}

}  // namespace
}  // namespace jaxrdma
