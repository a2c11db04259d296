/* test_held.cc: gradients that are held until it is decided which of them form a mean: the engines
   of servers and workers, in one process; this file decides. */
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "call.h"
#include "cluster.h"
#include "engine/server.h"
#include "engine/worker.h"

namespace {

using namespace testing;
using Kind = ServerEvent::Kind;

constexpr size_t kElements = 3000;  // 12 partitions, more than the slots

FlowSpec holding(uint32_t held, uint32_t servers, uint64_t elements = kElements) {
  FlowSpec spec = striped(elements, servers, FlowMode::kUpdate);
  spec.held = held;
  return spec;
}

std::vector<float> all(float value, size_t elements = kElements) {
  return std::vector<float>(elements, value);
}

/// A job whose parameters are published at step 0, all `start`; the update is p -= mean.
class Job {
 public:
  Job(uint32_t servers, uint32_t workers, uint32_t held, uint64_t elements = kElements,
      float start = 0.0f)
      : cluster_(servers, workers, holding(held, servers, elements)), servers_(servers) {
    std::vector<float> parameters = all(start, elements), back(elements);
    Call init;
    init.start(cluster_.worker(0), OperationKind::kInit, 0, &parameters, &back);
    for (uint32_t s = 0; s < servers; ++s) {
      expect(s, Kind::kInitialised);
      REQUIRE(server(s).publish(0, 0).ok());
    }
    REQUIRE(init.wait().ok());
    for (uint32_t w = 1; w < workers; ++w) {
      Call fetch;
      fetch.start(worker(w), OperationKind::kFetch, 0, nullptr, &back);
      REQUIRE(fetch.wait().ok());
      REQUIRE(back == parameters);
    }
  }

  ServerEngine& server(size_t index) { return cluster_.server(index); }
  WorkerEngine& worker(size_t index) { return cluster_.worker(index); }

  ServerEvent expect(uint32_t index, Kind kind) {
    const ServerEvent event = server(index).wait_event(kTimeoutMs);
    CAPTURE(event.text);
    REQUIRE(static_cast<int>(event.kind) == static_cast<int>(kind));
    return event;
  }
  /// The next gradient that is whole on every server.
  GradientId gradient(int64_t step) {
    std::optional<GradientId> id;
    for (uint32_t s = 0; s < servers_; ++s) {
      const ServerEvent event = expect(s, Kind::kGradient);
      CHECK(event.step == step);
      CHECK(event.flow == 0);
      CHECK(event.gradient.worker == event.worker);
      if (id.has_value()) CHECK(*id == event.gradient);
      id = event.gradient;
    }
    return *id;
  }
  void aggregate(int64_t step, const std::vector<GradientId>& set) {
    for (uint32_t s = 0; s < servers_; ++s) {
      const Status status = server(s).aggregate(0, step, set);
      REQUIRE_MESSAGE(status.ok(), status.message());
    }
  }
  void drop(const GradientId& id) {
    for (uint32_t s = 0; s < servers_; ++s) REQUIRE(server(s).drop(0, id).ok());
  }
  void answer(const GradientId& id, int64_t step, bool accepted = true) {
    for (uint32_t s = 0; s < servers_; ++s) {
      const Status status = server(s).answer(0, id, step, accepted);
      REQUIRE_MESSAGE(status.ok(), status.message());
    }
  }
  /// Runs the update of a mean that was asked for; returns the mean.
  std::vector<float> step(int64_t step) {
    std::vector<float> means;
    for (uint32_t s = 0; s < servers_; ++s) {
      CHECK(expect(s, Kind::kStepReady).step == step);
      const LeafShard mean = server(s).gradient(0, 0).value();
      const LeafShard parameters = server(s).parameters(0, 0).value();
      const auto* from = reinterpret_cast<const float*>(mean.data);
      auto* to = reinterpret_cast<float*>(parameters.data);
      for (size_t i = 0; i < mean.elements; ++i) to[i] -= from[i];
      means.insert(means.end(), from, from + mean.elements);
      REQUIRE(server(s).publish(0, step + 1).ok());
    }
    return means;
  }

 private:
  Cluster cluster_;
  const uint32_t servers_;
};

/// One exchange of a worker with its result.
struct Exchange {
  Exchange(Job& job, size_t worker, int64_t step, float value, uint64_t elements = kElements)
      : source(all(value, elements)), result(elements, -1000.0f) {
    call.start(job.worker(worker), OperationKind::kExchange, step, &source, &result);
  }
  int64_t version() {
    const Status status = call.wait();
    REQUIRE_MESSAGE(status.ok(), status.message());
    return call.version();
  }
  std::vector<float> source, result;
  Call call;
};

}  // namespace

TEST_CASE("held: the gradients that are named form the mean, and each worker is told of its own") {
  Job job(2, 3, 1);
  Exchange first(job, 0, 0, 1.0f), second(job, 1, 0, 20.0f), third(job, 2, 0, 5.0f);
  std::array<GradientId, 3> ids{};
  for (uint32_t s = 0; s < 2; ++s) {
    for (int i = 0; i < 3; ++i) {
      const ServerEvent event = job.expect(s, Kind::kGradient);
      CHECK(event.gradient.sequence == 0);
      CHECK(event.gradient.incarnation == 100 + event.worker);
      ids[event.worker] = event.gradient;
    }
  }
  CHECK(!first.call.ended());
  job.aggregate(0, {ids[0], ids[2]});
  job.drop(ids[1]);
  job.answer(ids[0], 1);
  job.answer(ids[1], 1, /*accepted=*/false);
  job.answer(ids[2], 1);
  CHECK(job.step(0) == all(3.0f));
  for (Exchange* each : {&first, &second, &third}) {
    CHECK(each->version() == 1);
    CHECK(each->result == all(-3.0f));
  }
  CHECK(job.worker(0).stats().gradients_accepted == 1);
  CHECK(job.worker(1).stats().gradients_accepted == 0);
  CHECK(job.worker(1).stats().gradients_dropped == 1);
  CHECK(job.worker(1).stats().last_step == 1);
  CHECK(second.call.dropped() == 1);
  CHECK(third.call.dropped() == 0);
  const ServerStats stats = job.server(0).stats();
  CHECK(stats.accepted == std::vector<uint64_t>{1, 0, 1});
  CHECK(stats.gradients_dropped == std::vector<uint64_t>{0, 1, 0});
  CHECK(stats.steps == 1);
}

TEST_CASE("held: a worker that was late goes on from the newest version") {
  Job job(1, 2, 1);
  for (int64_t step = 0; step < 5; ++step) {
    Exchange fast(job, 0, step, 1.0f);
    const GradientId id = job.gradient(step);
    CHECK(id.sequence == step);
    job.aggregate(step, {id});
    job.answer(id, step + 1);
    job.step(step);
    CHECK(fast.version() == step + 1);
  }
  Exchange late(job, 1, 0, 100.0f);
  const GradientId id = job.gradient(0);
  job.drop(id);
  job.answer(id, 5, false);  // published already: at once
  CHECK(late.version() == 5);
  CHECK(late.result == all(-5.0f));
}

TEST_CASE("held: several gradients of one worker form a mean, and it is answered before") {
  Job job(2, 2, 2);
  Exchange first(job, 0, 0, 1.0f);
  const GradientId a = job.gradient(0);
  job.answer(a, 0);
  CHECK(first.version() == 0);
  CHECK(first.result == all(0.0f));
  Exchange second(job, 0, 0, 2.0f);
  const GradientId b = job.gradient(0);
  CHECK(b.sequence == 1);
  Exchange other(job, 1, 0, 6.0f);
  const GradientId c = job.gradient(0);
  job.aggregate(0, {a, b, c});
  job.answer(b, 1);
  job.answer(c, 1);
  CHECK(job.step(0) == all(3.0f));
  CHECK(second.version() == 1);
  CHECK(other.version() == 1);
  CHECK(job.worker(0).stats().gradients_accepted == 2);
  CHECK(job.server(1).stats().accepted == std::vector<uint64_t>{2, 1});
}

TEST_CASE("held: means that are asked for early are formed one after the other") {
  Job job(1, 3, 1);
  std::vector<std::unique_ptr<Exchange>> exchanges;
  std::vector<GradientId> ids;
  for (size_t w = 0; w < 3; ++w) {
    exchanges.push_back(std::make_unique<Exchange>(job, w, 0, static_cast<float>(w + 1)));
    ids.push_back(job.gradient(0));
  }
  for (int64_t i = 0; i < 3; ++i) {
    job.aggregate(i, {ids[static_cast<size_t>(i)]});
    job.answer(ids[static_cast<size_t>(i)], i + 1);
  }
  float sum = 0;
  for (int64_t i = 0; i < 3; ++i) {
    const auto own = static_cast<float>(i + 1);
    CHECK(job.step(i) == all(own));
    CHECK(exchanges[static_cast<size_t>(i)]->version() == i + 1);
    sum += own;
    CHECK(exchanges[static_cast<size_t>(i)]->result == all(-sum));
  }
}

TEST_CASE("held: push and pull are the halves of an exchange") {
  Job job(2, 1, 1);
  std::vector<float> gradient = all(2.0f), back(kElements);
  for (int64_t step = 0; step < 3; ++step) {
    Call push, pull;
    push.start(job.worker(0), OperationKind::kPush, step, &gradient, nullptr);
    REQUIRE(push.wait().ok());
    const GradientId id = job.gradient(step);
    job.aggregate(step, {id});
    job.answer(id, step + 1);
    job.step(step);
    pull.start(job.worker(0), OperationKind::kPull, step, nullptr, &back);
    REQUIRE(pull.wait().ok());
    CHECK(pull.version() == step + 1);
    CHECK(back == all(-2.0f * static_cast<float>(step + 1)));
  }
}

TEST_CASE("held: means of random sets are those of a sum in the same order, over many steps") {
  constexpr uint64_t kMany = 100'000;  // 400 partitions, and many slots' turns
  constexpr uint32_t kWorkers = 4;
  Job job(2, kWorkers, 1, kMany);
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<double> parameters(kMany);
  std::array<int64_t, kWorkers> version{};
  for (int64_t step = 0; step < 12; ++step) {
    std::vector<std::unique_ptr<Exchange>> exchanges;
    std::vector<GradientId> ids(kWorkers);
    for (size_t w = 0; w < kWorkers; ++w) {
      auto each = std::make_unique<Exchange>(job, w, version[w], normal(random), kMany);
      exchanges.push_back(std::move(each));
      ids[w] = job.gradient(version[w]);
    }
    const size_t count = 1 + random() % kWorkers;
    std::vector<size_t> order{0, 1, 2, 3};
    std::shuffle(order.begin(), order.end(), random);
    std::vector<GradientId> set;
    float sum = 0;
    for (size_t i = 0; i < count; ++i) {
      set.push_back(ids[order[i]]);
      sum += exchanges[order[i]]->source[0];
    }
    job.aggregate(step, set);
    for (size_t i = 0; i < kWorkers; ++i) {
      if (i >= count) job.drop(ids[order[i]]);
      job.answer(ids[order[i]], step + 1, i < count);
    }
    const float mean = sum / static_cast<float>(count);
    REQUIRE(job.step(step) == all(mean, kMany));
    const float before = static_cast<float>(parameters[0]);
    std::fill(parameters.begin(), parameters.end(), before - mean);
    for (size_t w = 0; w < kWorkers; ++w) {
      version[w] = exchanges[w]->version();
      CHECK(version[w] == step + 1);
      REQUIRE(exchanges[w]->result == all(static_cast<float>(parameters[0]), kMany));
    }
  }
}

TEST_CASE("held: decisions that cannot be are refused, and change nothing") {
  Job job(1, 2, 2);
  ServerEngine& server = job.server(0);
  const auto refused = [](const Status& status, const char* why) {
    CAPTURE(status.message());
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK(status.message().find(why) != std::string::npos);
  };
  Exchange first(job, 0, 0, 1.0f);
  const GradientId a = job.gradient(0);
  GradientId other = a, elder = a;
  other.sequence = 1;
  elder.incarnation -= 1;
  refused(server.aggregate(1, 0, {a}), "no flow 1 that holds");
  refused(server.aggregate(0, 1, {a}), "the next one is of step 0");
  refused(server.aggregate(0, 0, {}), "over no gradient");
  refused(server.aggregate(0, 0, {a, a}), "named twice");
  refused(server.aggregate(0, 0, {a, other}), "gradient 1 of worker 0 (incarnation 100) is not");
  refused(server.aggregate(0, 0, {elder}), "(incarnation 99) is not here");
  CHECK(server.drop(0, other).ok());
  CHECK(server.answer(0, elder, 1, true).ok());
  refused(server.drop(3, a), "no flow 3");
  job.aggregate(0, {a});
  refused(server.aggregate(0, 0, {a}), "the next one is of step 1");
  refused(server.aggregate(0, 1, {a}), "was decided about before");
  refused(server.drop(0, a), "was decided about before");
  job.answer(a, 1);
  refused(server.answer(0, a, 1, true), "was answered before");
  refused(server.publish(0, 0), "it has reached step 0");
  job.step(0);
  CHECK(first.version() == 1);
  CHECK(first.result == all(-1.0f));
  Exchange second(job, 1, 0, 1.0f);
  const GradientId b = job.gradient(0);
  refused(server.answer(0, b, 0, true), "the parameters have reached step 1");
  job.drop(b);
  job.answer(b, 1, false);
  CHECK(second.version() == 1);

  FlowSpec averaging = striped(100, 1, FlowMode::kAverage);
  averaging.id = 1;
  averaging.held = 1;
  refused(server.add_flow(averaging), "held for an update alone");
  averaging.mode = FlowMode::kUpdate;
  averaging.held = 100'000;
  refused(server.add_flow(averaging), "100000 gradients of each worker held, at most");
}

TEST_CASE("held: a step that this worker never had is refused where it is pushed") {
  Job job(1, 1, 1);
  Exchange ahead(job, 0, 1, 1.0f);
  const Status status = ahead.call.wait();
  CHECK(status.code() == Code::kStale);
  CHECK(status.message().find("step 1 is ahead of step 0") != std::string::npos);
  Exchange next(job, 0, 0, 1.0f);
  const GradientId id = job.gradient(0);
  job.aggregate(0, {id});
  job.answer(id, 1);
  job.step(0);
  CHECK(next.version() == 1);
}

TEST_CASE("held: a dead worker's whole gradient may count, and nobody waits for the dead") {
  Job job(1, 2, 1);
  const GradientId gone = [&] {
    auto exchange = std::make_unique<Exchange>(job, 1, 0, 4.0f);
    const GradientId id = job.gradient(0);
    job.worker(1).close();
    CHECK(!exchange->call.wait().ok());
    return id;
  }();
  CHECK(job.expect(0, Kind::kWorkerLost).worker == 1);
  Exchange alive(job, 0, 0, 2.0f);
  const GradientId id = job.gradient(0);
  job.aggregate(0, {id, gone});
  job.answer(gone, 1);
  job.answer(id, 1);
  CHECK(job.step(0) == all(3.0f));
  CHECK(alive.version() == 1);
  CHECK(job.server(0).answer(0, gone, 1, true).ok());  // it is forgotten
  CHECK(job.server(0).drop(0, gone).ok());
}

TEST_CASE("held: a worker that is expelled is told why, counts no more and cannot come back") {
  Job job(2, 3, 1);
  Exchange one(job, 0, 0, 1.0f);
  const GradientId of_one = job.gradient(0);
  Exchange other(job, 1, 0, 4.0f);
  const GradientId of_other = job.gradient(0);
  Exchange late(job, 2, 0, 16.0f);
  const GradientId of_late = job.gradient(0);
  for (uint32_t s = 0; s < 2; ++s) job.server(s).expel(2, "worker 2 was silent for 12 s");
  const Status told = late.call.wait();
  CHECK(!told.ok());
  CHECK(told.message().find("worker 2 was silent for 12 s") != std::string::npos);
  job.drop(of_late);
  job.aggregate(0, {of_one, of_other});
  job.answer(of_one, 1);
  job.answer(of_other, 1);
  CHECK(job.step(0) == all(2.5f));
  CHECK(one.version() == 1);
  CHECK(other.version() == 1);
  // No word of its end, which everybody knows: the next event is of the next gradient.
  Exchange next(job, 0, 1, 1.0f);
  const GradientId of_next = job.gradient(1);
  CHECK(of_next.worker == 0);
  job.aggregate(1, {of_next});
  job.answer(of_next, 2);
  CHECK(job.step(1) == all(1.0f));
  CHECK(next.version() == 2);
  job.server(0).expel(2, "again");
  job.server(0).expel(99, "nobody");
  // Unless it is admitted anew, its token lets nobody in.
  WorkerOptions options;
  options.worker = 2;
  options.job = "test";
  options.incarnation = 102;
  options.transport = next_transport();
  auto again = WorkerEngine::create(options);
  REQUIRE(again.ok());
  std::vector<ServerAddress> addresses;
  for (uint32_t s = 0; s < 2; ++s) addresses.push_back({job.server(s).address(), token(2, s)});
  CHECK(!again.value()->connect(addresses, 2000).ok());
  again.value()->close();
}

TEST_CASE("held: who takes the place of an expelled worker begins with one version, and counts") {
  Job job(2, 2, 1);
  Exchange alive(job, 0, 0, 1.0f);
  const GradientId of_alive = job.gradient(0);
  Exchange late(job, 1, 0, 4.0f);
  const GradientId of_late = job.gradient(0);
  for (uint32_t s = 0; s < 2; ++s) job.server(s).expel(1, "worker 1 died");
  job.drop(of_late);
  job.aggregate(0, {of_alive});
  job.answer(of_alive, 1);
  // Admitted while nobody knows whether the connection before has ended.
  for (uint32_t s = 0; s < 2; ++s) REQUIRE(job.server(s).admit(1, 200, token(1, s)).ok());
  const auto start = [&](uint64_t incarnation) {
    WorkerOptions options;
    options.worker = 1;
    options.job = "test";
    options.incarnation = incarnation;
    options.transport = next_transport();
    return WorkerEngine::create(options).value();
  };
  std::vector<ServerAddress> addresses;
  for (uint32_t s = 0; s < 2; ++s) addresses.push_back({job.server(s).address(), token(1, s)});
  auto stale = start(101);
  CHECK(!stale->connect(addresses, 2000).ok());
  stale->close();
  auto next = start(200);
  REQUIRE(next->connect(addresses, kTimeoutMs).ok());
  REQUIRE(next->add_flow(holding(1, 2)).ok());
  // It asks before there is what it shall begin with.
  std::vector<float> back(kElements);
  Call follow;
  follow.start(*next, OperationKind::kFollow, 1, nullptr, &back);
  CHECK(job.step(0) == all(1.0f));
  const Status begun = follow.wait();
  REQUIRE_MESSAGE(begun.ok(), begun.message());
  CHECK(follow.version() == 1);
  CHECK(back == all(-1.0f));
  CHECK(alive.version() == 1);
  CHECK(!late.call.wait().ok());
  // Its gradients are numbered anew, and no sum is over those of the other life.
  const std::vector<float> source = all(16.0f);
  Call push;
  push.start(*next, OperationKind::kExchange, 1, &source, &back);
  const GradientId of_next = job.gradient(1);
  CHECK(of_next == GradientId{1, 200, 0});
  Exchange other(job, 0, 1, 2.0f);
  const GradientId of_other = job.gradient(1);
  job.aggregate(1, {of_other, of_next});
  job.answer(of_other, 2);
  job.answer(of_next, 2);
  CHECK(job.step(1) == all(9.0f));
  const Status pushed = push.wait();
  REQUIRE_MESSAGE(pushed.ok(), pushed.message());
  CHECK(push.version() == 2);
  CHECK(back == all(-10.0f));
  CHECK(other.version() == 2);
  // That a life ended is told with its number.
  next->close();
  for (uint32_t s = 0; s < 2; ++s) {
    const ServerEvent lost = job.expect(s, Kind::kWorkerLost);
    CHECK(lost.worker == 1);
    CHECK(lost.incarnation == 200);
  }
}
