/* tests/native/test_rows.cc: tables of which single rows are looked up and trained: what reaches
   the servers, what they make of it, what comes back, and what broken peers are told. The numbers
   are compared with float64 arithmetic of this file. */
#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <numbers>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cluster.h"
#include "engine/server.h"
#include "engine/table.h"
#include "engine/touched.h"
#include "engine/worker.h"
#include "peer.h"

namespace {

using namespace testing;
using Matrix = std::map<int64_t, std::vector<double>>;  ///< rows by id

constexpr uint16_t kTable = 1;    // flow 0 is the cluster's own
constexpr uint32_t kColumns = 8;  // 28 rows to a message of a cluster

TableSpec spec_of(RowRule rule = RowRule::kSgd, uint64_t rows = 1000) {
  TableSpec spec;
  spec.id = kTable;
  spec.name = "words";
  spec.rows = rows;
  spec.columns = kColumns;
  spec.optimizer.rule = rule;
  spec.optimizer.rate = 0.125f;
  spec.start = {RowInit::kUniform, -1.0f, 2.0f, 42};
  return spec;
}

/// One operation on a table.
class Rows {
 public:
  Rows(WorkerEngine& engine, OperationKind kind, int64_t step, std::vector<int32_t> ids,
       std::vector<float> gradients = {}, uint16_t table = kTable)
      : ids_(std::move(ids)), values(ids_.size() * kColumns, -1000.0f), gradients_(gradients) {
    Operation operation;
    operation.kind = kind;
    operation.flow = table;
    operation.step = step;
    operation.rows.ids = {reinterpret_cast<const std::byte*>(ids_.data()), RowIds::Type::kInt32,
                          ids_.size()};
    operation.rows.gradients = gradients_.data();
    operation.rows.target = values.data();
    operation.rows.columns = kColumns;
    operation.outcome = outcome_;
    operation.done = [this](const Status& status) {
      std::lock_guard guard(lock_);
      status_ = status;
      changed_.notify_all();
    };
    engine.start(std::move(operation));
  }
  Status wait() {
    std::unique_lock guard(lock_);
    REQUIRE(changed_.wait_for(guard, std::chrono::milliseconds(kTimeoutMs),
                              [this] { return status_.has_value(); }));
    return *status_;
  }
  bool ended() {
    std::lock_guard guard(lock_);
    return status_.has_value();
  }
  int64_t version() const { return outcome_->version; }
  const std::vector<int32_t>& ids() const { return ids_; }
  const std::vector<float>& gradients() const { return gradients_; }

 private:
  std::vector<int32_t> ids_;

 public:
  std::vector<float> values;

 private:
  std::vector<float> gradients_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::optional<Status> status_;
  std::shared_ptr<Outcome> outcome_ = std::make_shared<Outcome>();
};

/// Servers and workers that know a table.
class Job {
 public:
  Job(uint32_t servers, uint32_t workers, const TableSpec& spec, const OrderedFault& fault = {})
      : cluster_(servers, workers, striped(300, servers), fault) {
    for (uint32_t s = 0; s < servers; ++s) REQUIRE(cluster_.server(s).add_table(spec).ok());
    for (uint32_t w = 0; w < workers; ++w) REQUIRE(cluster_.worker(w).add_table(spec).ok());
  }
  WorkerEngine& worker(size_t index) { return cluster_.worker(index); }
  ServerEngine& server(size_t index) { return cluster_.server(index); }
  std::vector<float> pull(size_t worker, int64_t step, const std::vector<int32_t>& ids) {
    Rows rows(cluster_.worker(worker), OperationKind::kPullRows, step, ids);
    const Status status = rows.wait();
    REQUIRE_MESSAGE(status.ok(), status.message());
    return rows.values;
  }

 private:
  Cluster cluster_;
};

/// What SplitMix64's output number `index` from `seed` is, by walking there.
uint64_t walked(uint64_t seed, uint64_t index) {
  uint64_t state = seed, out = 0;
  for (uint64_t i = 0; i <= index; ++i) {
    state += 0x9e3779b97f4a7c15u;
    out = state;
    out = (out ^ (out >> 30)) * 0xbf58476d1ce4e5b9u;
    out = (out ^ (out >> 27)) * 0x94d049bb133111ebu;
    out ^= out >> 31;
  }
  return out;
}

double started(const RowStart& start, int64_t row, uint32_t column) {
  const uint64_t bits = walked(start.seed, static_cast<uint64_t>(row) * kColumns + column);
  if (start.kind == RowInit::kUniform)
    return start.a + (start.b - start.a) * (static_cast<double>(bits >> 11) / std::pow(2.0, 53));
  const double radius = (static_cast<double>(bits >> 32) + 0.5) / std::pow(2.0, 32);
  const double angle = static_cast<double>(bits & 0xffffffff) / std::pow(2.0, 32);
  return start.a +
         start.b * std::sqrt(-2 * std::log(radius)) * std::cos(2 * std::numbers::pi * angle);
}

/// The table in float64, every step over all that was pushed in it.
class Reference {
 public:
  explicit Reference(TableSpec spec) : spec_(std::move(spec)) {}
  void push(const std::vector<int32_t>& ids, const std::vector<float>& gradients) {
    Matrix mine;
    for (size_t i = 0; i < ids.size(); ++i) {
      auto& sum = mine.try_emplace(ids[i], kColumns, 0.0).first->second;
      for (size_t c = 0; c < kColumns; ++c) sum[c] += gradients[i * kColumns + c];
    }
    for (const auto& [id, sum] : mine) {
      auto& all = sums_.try_emplace(id, kColumns, 0.0).first->second;
      for (size_t c = 0; c < kColumns; ++c) all[c] += sum[c];
      ++counts_[id];
    }
  }
  void step() {
    const RowOptimizer& o = spec_.optimizer;
    for (auto& [id, sum] : sums_) {
      auto& w = row(id);
      auto& m = first_.try_emplace(id, kColumns, o.rule == RowRule::kAdagrad ? o.accumulator : 0.0)
                    .first->second;
      auto& v = second_.try_emplace(id, kColumns, 0.0).first->second;
      const int t = ++times_[id];
      for (size_t c = 0; c < kColumns; ++c) {
        const double g = sum[c] / counts_[id];
        switch (o.rule) {
          case RowRule::kSgd:
            w[c] -= o.rate * g;
            break;
          case RowRule::kMomentum:
            m[c] = o.momentum * m[c] + g;
            w[c] -= o.rate * m[c];
            break;
          case RowRule::kAdagrad:
            m[c] += g * g;
            w[c] -= o.rate * g / std::sqrt(m[c] + o.epsilon);
            break;
          case RowRule::kAdam:
            m[c] = o.momentum * m[c] + (1.0 - o.momentum) * g;
            v[c] = o.decay * v[c] + (1.0 - o.decay) * g * g;
            w[c] -= o.rate * m[c] / (1 - std::pow(o.momentum, t)) /
                    (std::sqrt(v[c] / (1 - std::pow(o.decay, t))) + o.epsilon);
            break;
        }
      }
    }
    sums_.clear();
    counts_.clear();
  }
  std::vector<double>& row(int64_t id) {
    auto [found, fresh] = rows_.try_emplace(id, kColumns, 0.0);
    for (uint32_t c = 0; fresh && c < kColumns; ++c) found->second[c] = started(spec_.start, id, c);
    return found->second;
  }
  void check(const std::vector<int32_t>& ids, const std::vector<float>& values, double within) {
    double worst = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      for (uint32_t c = 0; c < kColumns; ++c)
        worst = std::max(worst, std::abs(values[i * kColumns + c] - row(ids[i])[c]));
    }
    CHECK(worst <= within);
  }

 private:
  TableSpec spec_;
  Matrix rows_, first_, second_, sums_;
  std::map<int64_t, int> counts_, times_;
};

/// `count` ids, some of them more than once, and gradients for them.
struct Drawn {
  Drawn(std::minstd_rand& random, size_t count, uint64_t rows) {
    for (size_t i = 0; i < count; ++i) {
      ids.push_back(
          static_cast<int32_t>(i % 5 == 4 ? static_cast<uint64_t>(ids[i - 3]) : random() % rows));
      for (uint32_t c = 0; c < kColumns; ++c)
        gradients.push_back(static_cast<float>(random() % 2001) / 1000.0f - 1.0f);
    }
  }
  std::vector<int32_t> ids;
  std::vector<float> gradients;
};

std::vector<int32_t> every(uint64_t rows) {
  std::vector<int32_t> ids(rows);
  for (size_t i = 0; i < rows; ++i) ids[i] = static_cast<int32_t>(i);
  return ids;
}

}  // namespace

TEST_CASE("rows: before it is trained, a row is what its seed says, on any number of servers") {
  for (const RowStart start :
       {RowStart{RowInit::kConstant, 0.25f, 0.0f, 1}, RowStart{RowInit::kUniform, -1.0f, 2.0f, 42},
        RowStart{RowInit::kNormal, 0.5f, 0.1f, 7}}) {
    TableSpec spec = spec_of();
    spec.start = start;
    for (const uint32_t servers : {1u, 3u}) {
      Job job(servers, 1, spec);
      const auto ids = every(spec.rows);
      const std::vector<float> values = job.pull(0, 0, ids);
      double worst = 0;
      for (size_t i = 0; i < values.size(); ++i) {
        const double expected = start.kind == RowInit::kConstant
                                    ? start.a
                                    : started(start, ids[i / kColumns], i % kColumns);
        worst = std::max(worst, std::abs(values[i] - expected));
      }
      CHECK(worst <= 1e-6);
    }
  }
}

TEST_CASE("rows: each is averaged over the workers that touched it, what comes twice is summed") {
  Job job(2, 3, spec_of());
  // Row 7 by all, twice by the first; row 8 by one; nothing by the last but row 7.
  const auto ones = [](size_t rows, float value) { return floats(rows * kColumns, value); };
  const auto before = job.pull(0, 0, {7, 8, 9});
  Rows a(job.worker(0), OperationKind::kPushRows, 0, {7, 8, 7}, ones(3, 1.0f));
  Rows b(job.worker(1), OperationKind::kPushRows, 0, {7}, ones(1, 4.0f));
  // What is pushed is copied, and done; what is looked up then waits until everybody has pushed.
  REQUIRE(a.wait().ok());
  REQUIRE(b.wait().ok());
  Rows early(job.worker(0), OperationKind::kPullRows, 1, {7});
  Rows before_that(job.worker(0), OperationKind::kPullRows, 0, {7});
  REQUIRE(before_that.wait().ok());
  CHECK(before_that.values == std::vector<float>(before.begin(), before.begin() + kColumns));
  CHECK(!early.ended());
  CHECK(job.worker(0).in_flight() == 1);
  CHECK(job.worker(1).in_flight() == 0);
  CHECK(job.worker(0).pending(10).size() == 2);  // of both servers
  CHECK(job.worker(1).pending(10).empty());      // it waits for nothing
  Rows c(job.worker(2), OperationKind::kPushRows, 0, {7}, ones(1, 6.0f));
  for (Rows* each : {&a, &b, &c}) {
    REQUIRE(each->wait().ok());
    CHECK(each->version() == 1);
  }
  const auto after = job.pull(2, 1, {7, 8, 9});
  for (size_t i = 0; i < kColumns; ++i) {
    CHECK(after[i] == doctest::Approx(before[i] - 0.125 * (2.0 + 4.0 + 6.0) / 3));
    CHECK(after[kColumns + i] == doctest::Approx(before[kColumns + i] - 0.125));
    CHECK(after[2 * kColumns + i] == before[2 * kColumns + i]);
  }
  REQUIRE(early.wait().ok());
  CHECK(early.values == std::vector<float>(after.begin(), after.begin() + kColumns));
  CHECK(job.server(0).stats().steps + job.server(1).stats().steps == 2);
  CHECK(job.worker(0).stats().steps == 1);
}

TEST_CASE("rows: every optimizer is that of float64 on the rows that are touched") {
  constexpr uint32_t kWorkers = 3;
  for (const RowRule rule :
       {RowRule::kSgd, RowRule::kMomentum, RowRule::kAdagrad, RowRule::kAdam}) {
    CAPTURE(static_cast<int>(rule));
    TableSpec spec = spec_of(rule);
    spec.optimizer.momentum = 0.9f;
    spec.optimizer.decay = 0.99f;
    if (rule == RowRule::kAdagrad) spec.optimizer.epsilon = 1e-7f;
    Job job(2, kWorkers, spec);
    Reference reference(spec);
    std::minstd_rand random(5);
    for (int64_t step = 0; step < 6; ++step) {
      std::vector<std::unique_ptr<Rows>> calls;
      for (uint32_t w = 0; w < kWorkers; ++w) {
        // More messages than slots; sometimes none.
        const Drawn drawn(random, step == 3 && w == 1 ? 0 : 400, spec.rows);
        reference.push(drawn.ids, drawn.gradients);
        calls.push_back(std::make_unique<Rows>(job.worker(w), OperationKind::kPushRows, step,
                                               drawn.ids, drawn.gradients));
      }
      for (const auto& call : calls) {
        const Status status = call->wait();
        REQUIRE_MESSAGE(status.ok(), status.message());
      }
      reference.step();
      const auto ids = every(spec.rows);
      reference.check(ids, job.pull(static_cast<size_t>(step) % kWorkers, step + 1, ids), 2e-5);
    }
  }
}

TEST_CASE("rows: the order in which workers come changes no bit") {
  const auto mean_of = [](const std::vector<float>& gradients) {
    Touched touched = std::move(Touched::create(10, 1, "a test").value());
    for (const float& gradient : gradients) touched.add(3, &gradient);
    float mean = 0;
    REQUIRE(touched.size() == 1);
    touched.mean(0, &mean);
    return mean;
  };
  const float mean = mean_of({0.1f, 1e5f, -0.7f, 3e-3f});
  CHECK(mean_of({3e-3f, -0.7f, 1e5f, 0.1f}) == mean);
  CHECK(mean_of({1e5f, 3e-3f, 0.1f, -0.7f}) == mean);
}

TEST_CASE("rows: only what was trained takes memory") {
  TableSpec spec = spec_of(RowRule::kAdam, kMostRows);
  auto table = Table::create(spec, 1, 2);
  REQUIRE_MESSAGE(table.ok(), table.status().message());
  CHECK(table.value()->rows() == kMostRows / 2);
  std::array<float, kColumns> row{};
  table.value()->read(table.value()->rows() - 1, row.data());
  CHECK(table.value()->trained() == 0);
  table.value()->apply(table.value()->rows() - 1, row.data());
  table.value()->apply(5, row.data());
  table.value()->apply(5, row.data());
  CHECK(table.value()->trained() == 2);
}

TEST_CASE("rows: what is asynchronous is applied as it comes, and nobody is waited for") {
  TableSpec spec = spec_of();
  spec.policy = RowPolicy::kAsync;
  Job job(2, 2, spec);
  Reference reference(spec);
  std::minstd_rand random(9);
  for (int64_t step = 0; step < 4; ++step) {
    const Drawn drawn(random, 200, spec.rows);
    Rows push(job.worker(0), OperationKind::kPushRows, step, drawn.ids, drawn.gradients);
    REQUIRE(push.wait().ok());
    reference.push(drawn.ids, drawn.gradients);
    reference.step();
  }
  reference.check(every(spec.rows), job.pull(0, 4, every(spec.rows)), 1e-5);
  reference.check(every(spec.rows), job.pull(1, 0, every(spec.rows)), 1e-5);
  Rows none(job.worker(1), OperationKind::kPushRows, 0, {});
  REQUIRE(none.wait().ok());
}

TEST_CASE("rows: an id that is no row is refused where it is given, by table, id and rows") {
  Job job(2, 1, spec_of());
  for (const int32_t id : {-1, 1000, INT32_MAX, INT32_MIN}) {
    for (const auto kind : {OperationKind::kPullRows, OperationKind::kPushRows}) {
      Rows rows(job.worker(0), kind, 0, {5, id}, floats(2 * kColumns, 0.0f));
      const std::string message = rows.wait().message();
      CAPTURE(message);
      CHECK(rows.wait().code() == Code::kInvalidArgument);
      CHECK(message.find("'words'") != std::string::npos);
      CHECK(message.find("0 to 999") != std::string::npos);
      CHECK(message.find("is " + std::to_string(id)) != std::string::npos);
    }
  }
  job.pull(0, 0, {999});  // as before
  Rows model(job.worker(0), OperationKind::kPullRows, 0, {1}, {}, 0);
  CHECK(model.wait().message().find("no table") != std::string::npos);
}

TEST_CASE("rows: a step that is over, or not yet begun, is refused") {
  Job job(1, 1, spec_of());
  const auto zeros = floats(kColumns, 0.0f);
  Rows first(job.worker(0), OperationKind::kPushRows, 0, {1}, zeros);
  REQUIRE(first.wait().ok());
  Rows stale(job.worker(0), OperationKind::kPushRows, 0, {1}, zeros);
  CHECK(stale.wait().code() == Code::kStale);
  Rows ahead(job.worker(0), OperationKind::kPushRows, 2, {1}, zeros);
  CHECK(ahead.wait().code() == Code::kStale);
  CHECK(ahead.wait().message().find("at step 2, expected 1") != std::string::npos);
  Rows early(job.worker(0), OperationKind::kPullRows, 2, {1});
  CHECK(early.wait().code() == Code::kStale);
  Rows next(job.worker(0), OperationKind::kPushRows, 1, {1}, zeros);
  CHECK(next.wait().ok());
}

TEST_CASE("rows: many at once, from many threads") {
  constexpr uint32_t kWorkers = 3;
  const TableSpec spec = spec_of(RowRule::kAdagrad);
  Job job(2, kWorkers, spec);
  Reference reference(spec);
  constexpr int64_t kSteps = 12;
  std::vector<std::vector<Drawn>> drawn(kWorkers);
  std::minstd_rand random(11);
  for (int64_t step = 0; step < kSteps; ++step) {
    for (uint32_t w = 0; w < kWorkers; ++w) {
      drawn[w].emplace_back(random, 250, spec.rows);
      reference.push(drawn[w].back().ids, drawn[w].back().gradients);
    }
    reference.step();
  }
  std::vector<std::thread> threads;
  std::array<int, kWorkers> good{};
  for (uint32_t w = 0; w < kWorkers; ++w) {
    threads.emplace_back([&, w] {
      for (int64_t step = 0; step < kSteps; ++step) {
        const Drawn& mine = drawn[w][static_cast<size_t>(step)];
        Rows one(job.worker(w), OperationKind::kPullRows, step, mine.ids);
        Rows two(job.worker(w), OperationKind::kPullRows, step, every(spec.rows));
        good[w] += one.wait().ok() && two.wait().ok();
        Rows push(job.worker(w), OperationKind::kPushRows, step, mine.ids, mine.gradients);
        good[w] += push.wait().ok();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int each : good) CHECK(each == 2 * kSteps);
  reference.check(every(spec.rows), job.pull(0, kSteps, every(spec.rows)), 2e-5);
  // Each row once, each with its id; 8 bytes for each message.
  const WorkerStats stats = job.worker(0).stats();
  uint64_t pushed = 0, pulled = 0;
  for (const Drawn& mine : drawn[0]) {
    const uint64_t distinct = std::map<int32_t, int>([&] {
                                std::map<int32_t, int> seen;
                                for (const int32_t id : mine.ids) ++seen[id];
                                return seen;
                              }())
                                  .size();
    pushed += distinct * (4 + 4 * kColumns) + (distinct + spec.rows) * 4;
    pulled += (distinct + spec.rows) * 4 * kColumns;
  }
  pushed += spec.rows * 4;
  pulled += spec.rows * 4 * kColumns;
  CHECK(stats.bytes_pulled == pulled);
  CHECK(stats.bytes_pushed >= pushed);
  CHECK(static_cast<double>(stats.bytes_pushed) < 1.05 * static_cast<double>(pushed));
}

TEST_CASE("rows: what is long is done by another thread, while others look rows up") {
  const TableSpec spec = spec_of(RowRule::kAdam, 6000);
  Job job(1, 2, spec);
  Reference reference(spec);
  const auto ids = every(spec.rows);
  std::minstd_rand random(3);
  std::vector<std::unique_ptr<Rows>> calls;
  for (int64_t step = 0; step < 3; ++step) {
    for (uint32_t w = 0; w < 2; ++w) {
      std::vector<float> gradients;
      for (size_t i = 0; i < spec.rows * kColumns; ++i)
        gradients.push_back(static_cast<float>(random() % 2001) / 1000.0f - 1.0f);
      reference.push(ids, gradients);
      calls.push_back(
          std::make_unique<Rows>(job.worker(w), OperationKind::kPushRows, step, ids, gradients));
      // Of a step before that, so that nothing is waited for.
      calls.push_back(std::make_unique<Rows>(job.worker(w), OperationKind::kPullRows, 0, ids));
    }
    reference.step();
  }
  for (const auto& call : calls) REQUIRE(call->wait().ok());
  reference.check(ids, job.pull(1, 3, ids), 2e-5);
}

TEST_CASE("rows: pushes and lookups wait for the push before them, in any order of calls") {
  Job job(2, 2, spec_of());
  std::vector<std::unique_ptr<Rows>> calls;
  const auto push = [&](size_t worker, int64_t step) {
    calls.push_back(std::make_unique<Rows>(job.worker(worker), OperationKind::kPushRows, step,
                                           std::vector<int32_t>{1, 2}, floats(2 * kColumns, 1.0f)));
  };
  for (int64_t step = 0; step < 5; ++step) push(0, step);
  Rows last(job.worker(0), OperationKind::kPullRows, 5, {1});
  Rows first(job.worker(0), OperationKind::kPullRows, 0, {3});
  REQUIRE(first.wait().ok());
  CHECK(calls[0]->wait().ok());
  CHECK(!calls[1]->ended());
  CHECK(!last.ended());
  const auto before = job.pull(1, 0, {1});
  for (int64_t step = 0; step < 5; ++step) push(1, step);
  for (const auto& call : calls) CHECK(call->wait().ok());
  REQUIRE(last.wait().ok());
  CHECK(last.values[0] == doctest::Approx(before[0] - 5 * 0.125));
}

TEST_CASE("rows: who leaves after a push has given it") {
  Job job(1, 2, spec_of());
  const auto before = job.pull(0, 0, {1});
  Rows push(job.worker(1), OperationKind::kPushRows, 0, every(1000), floats(1000 * kColumns, 1.0f));
  REQUIRE(push.wait().ok());
  REQUIRE(job.worker(1).await_sent().ok());
  job.server(0).mark_left(1);
  job.worker(1).close();
  Rows mine(job.worker(0), OperationKind::kPushRows, 0, {1}, floats(kColumns, 3.0f));
  REQUIRE(mine.wait().ok());
  CHECK(job.pull(0, 1, {1})[0] == doctest::Approx(before[0] - 0.125 * 2.0));
}

/// As `WorkerEngine::await_sent`; one that does not end is a failure, and ended.
Status await_sent(WorkerEngine& engine) {
  auto sent = std::async(std::launch::async, [&] { return engine.await_sent(); });
  const auto limit = std::chrono::milliseconds(kTimeoutMs);
  const bool ended = sent.wait_for(limit) == std::future_status::ready;
  CHECK(ended);
  if (!ended) engine.close();
  return sent.get();
}

TEST_CASE("rows: who leaves does not wait for a completion that never comes") {
  // The other worker has pushed, so that there is an answer, or has not.
  for (const bool answered : {true, false}) {
    CAPTURE(answered);
    Job job(1, 2, spec_of(), {"worker 1", "swallowed 1"});
    const auto before = job.pull(0, 0, {1});
    Rows mine(job.worker(1), OperationKind::kPushRows, 0, {1, 900}, floats(2 * kColumns, 1.0f));
    REQUIRE(mine.wait().ok());
    Rows other(job.worker(0), OperationKind::kPushRows, answered ? 0 : 1, {1},
               floats(kColumns, 3.0f));
    CHECK(other.wait().ok() == answered);
    const Status sent = await_sent(job.worker(1));
    CAPTURE(sent.message());
    CHECK(static_cast<int>(sent.code()) ==
          static_cast<int>(answered ? Code::kOk : Code::kDeadline));
    if (answered) {
      CHECK(job.pull(0, 1, {1})[0] == doctest::Approx(before[0] - 0.125 * 2.0));
    } else {
      CHECK(sent.message().find("pushed to table 'words' in step 0 was posted") !=
            std::string::npos);
    }
    job.server(0).mark_left(1);
    job.worker(1).close();
  }
}

TEST_CASE("rows: what waits to be sent is shown while it is waited for, and no longer than that") {
  Job job(1, 1, spec_of(), {"worker 0", "withheld 1"});
  Rows push(job.worker(0), OperationKind::kPushRows, 0, {1}, floats(kColumns, 1.0f));
  REQUIRE(push.wait().ok());
  CHECK(job.worker(0).in_flight() == 0);
  CHECK(job.worker(0).pending(10).empty());
  std::thread leaves([&] {
    CHECK(static_cast<int>(await_sent(job.worker(0)).code()) == static_cast<int>(Code::kDeadline));
  });
  while (job.worker(0).in_flight() == 0) std::this_thread::yield();
  const std::vector<Pending> pending = job.worker(0).pending(10);
  leaves.join();
  REQUIRE(pending.size() == 1);
  CHECK(pending[0].flow == kTable);
  CHECK(static_cast<int>(pending[0].stage) == static_cast<int>(Stage::kPosted));
  CHECK(job.worker(0).in_flight() == 0);
}

TEST_CASE("rows: it is told whose push is lacking, and that it left") {
  Job job(1, 2, spec_of());
  Rows push(job.worker(0), OperationKind::kPushRows, 0, {1}, floats(kColumns, 1.0f));
  REQUIRE(push.wait().ok());
  wait_stats(job.server(0), [](const ServerStats& stats) { return stats.bytes_pushed > 0; });
  const std::vector<Lack> lacks = job.server(0).lacking(10);
  REQUIRE(lacks.size() == 1);
  CHECK(lacks[0].worker == 1);
  CHECK(lacks[0].flow == kTable);
  CHECK(lacks[0].step == 0);
  job.server(0).mark_left(1);
  job.worker(1).close();
  const ServerEvent event = job.server(0).wait_event(kTimeoutMs);
  REQUIRE(static_cast<int>(event.kind) == static_cast<int>(ServerEvent::Kind::kStranded));
  CHECK(event.worker == 1);
  CHECK(event.text.find("'words'") != std::string::npos);
}

TEST_CASE("rows: a table that cannot be is refused, on both sides") {
  Job job(1, 1, spec_of());
  TableSpec spec = spec_of();
  spec.id = 2;
  const auto refused = [&](const TableSpec& wrong, const char* says) {
    for (const Status& status : {job.server(0).add_table(wrong), job.worker(0).add_table(wrong)}) {
      CAPTURE(status.message());
      CHECK(status.message().find(says) != std::string::npos);
    }
  };
  TableSpec wrong = spec;
  wrong.rows = 0;
  refused(wrong, "rows are possible");
  wrong = spec;
  wrong.rows = kMostRows + 1;
  refused(wrong, "rows are possible");
  wrong = spec;
  wrong.columns = 1000;
  refused(wrong, "JAXRDMA_PARTITION_BYTES");
  wrong = spec;
  wrong.optimizer.rate = std::nanf("");
  refused(wrong, "not finite");
  wrong = spec;
  wrong.optimizer.rule = static_cast<RowRule>(9);
  refused(wrong, "no such optimizer");
  CHECK(job.server(0).add_table(spec_of()).message().find("already") != std::string::npos);
  CHECK(job.worker(0).add_table(spec_of()).message().find("was the next") != std::string::npos);
}

// --- Peers that speak by hand.

namespace {

/// The payload of a message for a table.
std::vector<std::byte> payload_of(const wire::Rows& rows, const std::vector<uint32_t>& ids,
                                  const std::vector<float>& values) {
  std::vector<std::byte> bytes(sizeof(rows) + 4 * ids.size() + 4 * values.size());
  std::memcpy(bytes.data(), &rows, sizeof(rows));
  if (!ids.empty()) std::memcpy(bytes.data() + sizeof(rows), ids.data(), 4 * ids.size());
  if (!values.empty())
    std::memcpy(bytes.data() + sizeof(rows) + 4 * ids.size(), values.data(), 4 * values.size());
  return bytes;
}

struct Said {
  wire::Header header;
  std::vector<std::byte> payload;
};
Said said(Peer& peer, wire::Kind kind, const wire::Rows& rows, const std::vector<uint32_t>& ids,
          int64_t step = 0, uint32_t chunk = 0, uint32_t tag = 0) {
  const bool pushes = kind == wire::Kind::kPushRows;
  Said made{peer.header(kind, chunk, step, tag),
            payload_of(rows, ids, floats(pushes ? ids.size() * kColumns : 0, 1.0f))};
  made.header.flow = kTable;
  made.header.bytes = made.payload.size();
  return made;
}
void send(Peer& peer, const Said& what) { peer.send(what.header, what.payload.data()); }

}  // namespace

TEST_CASE("rows: a peer that breaks the rules is disconnected and told what it broke") {
  ServerOptions options = options_for(1);
  options.partition_bytes = 1024;  // 28 rows to a message, so 36 messages at most
  auto server = make_server(options);
  REQUIRE(server->add_table(spec_of()).ok());
  Peer peer(0);
  REQUIRE(peer.connect(*server));
  const auto full = [] {
    std::vector<uint32_t> ids(28);
    for (uint32_t i = 0; i < 28; ++i) ids[i] = i;
    return ids;
  };
  Said what = said(peer, wire::Kind::kPushRows, {2, 1}, {4, 6});
  std::string expected;
  SUBCASE("another table") {
    what.header.flow = 0;
    expected = "an agreed table";
  }
  SUBCASE("another type") {
    what.header.dtype = 1;
    expected = "dtype";
  }
  SUBCASE("rows of another server, or of none") {
    what = said(peer, wire::Kind::kPushRows, {2, 1}, {4, 1000});
    expected = "expected less than 1000, got 1000";
  }
  SUBCASE("rows of none, pulled") {
    what = said(peer, wire::Kind::kPullRows, {1, 1}, {UINT32_MAX});
    expected = "expected less than 1000";
  }
  SUBCASE("a row twice") {
    what = said(peer, wire::Kind::kPushRows, {2, 1}, {4, 4});
    expected = "expected more than 4";
  }
  SUBCASE("more rows than there are bytes") {
    what = said(peer, wire::Kind::kPushRows, {3, 1}, {4, 6});
    expected = "bytes";
  }
  SUBCASE("more rows than a message has") {
    what = said(peer, wire::Kind::kPullRows, {29, 1}, full());
    expected = "count";
  }
  SUBCASE("a message that is not full, and not the last") {
    what = said(peer, wire::Kind::kPushRows, {2, 2}, {4, 6});
    expected = "count";
  }
  SUBCASE("more messages than the table has rows for") {
    what = said(peer, wire::Kind::kPushRows, {28, 37}, full());
    expected = "chunks";
  }
  SUBCASE("no message") {
    what = said(peer, wire::Kind::kPushRows, {0, 0}, {});
    expected = "chunks";
  }
  SUBCASE("a message beyond the last") {
    what = said(peer, wire::Kind::kPushRows, {2, 1}, {4, 6}, 0, 1);
    expected = "partition";
  }
  SUBCASE("another number of messages than before") {
    send(peer, said(peer, wire::Kind::kPushRows, {28, 2}, full()));
    what = said(peer, wire::Kind::kPushRows, {28, 3}, full(), 0, 1);
    expected = "as in the rest of this step";
  }
  SUBCASE("no payload") {
    what.header.bytes = 0;
    expected = "at least 8 bytes";
  }
  SUBCASE("a step below 0") {
    what.header.step = -1;
    expected = "step";
  }
  send(peer, what);
  const ServerEvent event = expect_event(*server, ServerEvent::Kind::kViolation);
  CAPTURE(event.text);
  CHECK(event.text.find(expected) != std::string::npos);
  peer.wait([&] { return peer.ended; });
}

TEST_CASE("rows: what a peer pushes of another step is refused") {
  auto server = make_server(options_for(1));
  REQUIRE(server->add_table(spec_of()).ok());
  Peer peer(0);
  REQUIRE(peer.connect(*server));
  send(peer, said(peer, wire::Kind::kPushRows, {1, 1}, {4}, 0, 0, 1));
  peer.expect(wire::Answer::kResult, 1);
  send(peer, said(peer, wire::Kind::kPushRows, {1, 1}, {4}, 0, 0, 2));
  peer.expect(wire::Answer::kStale, 2);
  send(peer, said(peer, wire::Kind::kPushRows, {1, 1}, {4}, 2, 0, 3));
  peer.expect(wire::Answer::kAhead, 3);
  send(peer, said(peer, wire::Kind::kPullRows, {1, 1}, {4}, 2, 0, 4));
  peer.expect(wire::Answer::kAhead, 4);
  CHECK(server->stats().dropped[0] == 3);
}

TEST_CASE("rows: what comes twice counts once, and the later is answered") {
  auto server = make_server(options_for(2));
  REQUIRE(server->add_table(spec_of()).ok());
  Peer a(0), b(1);
  REQUIRE(a.connect(*server));
  REQUIRE(b.connect(*server));
  send(a, said(a, wire::Kind::kPullRows, {1, 1}, {4}, 0, 0, 9));
  a.expect(wire::Answer::kResult, 9);
  const auto before = a.result_as<float>(9, kColumns);
  const Said first = said(a, wire::Kind::kPushRows, {1, 1}, {4}, 0, 0, 1);
  const uint64_t pushed = server->stats().bytes_pushed;
  send(a, first);
  wait_stats(*server, [&](const ServerStats& stats) {  // over several links the second may overtake
    return stats.bytes_pushed == pushed + first.payload.size();
  });
  send(a, said(a, wire::Kind::kPushRows, {1, 1}, {4}, 0, 0, 2));
  wait_stats(*server, [](const ServerStats& stats) { return stats.duplicates == 1; });
  send(b, said(b, wire::Kind::kPushRows, {0, 1}, {}, 0, 0, 3));
  a.expect(wire::Answer::kResult, 2);
  b.expect(wire::Answer::kResult, 3);
  send(a, said(a, wire::Kind::kPullRows, {1, 1}, {4}, 1, 0, 5));
  a.expect(wire::Answer::kResult, 5);
  CHECK(a.result_as<float>(5, kColumns)[0] == doctest::Approx(before[0] - 0.125));
}

TEST_CASE("rows: a follower may not touch them") {
  auto server = make_server(options_for(1));
  REQUIRE(server->add_table(spec_of()).ok());
  REQUIRE(server->admit_follower(0, kIncarnation, token_of(0)).ok());
  Peer follower(wire::kFirstFollower);
  follower.hello.token = token_of(0);
  REQUIRE(follower.connect(*server));
  Said what = said(follower, wire::Kind::kPullRows, {0, 1}, {});
  follower.write(follower.take_slot(), what.header, nullptr, 0, 0);
  const ServerEvent event = expect_event(*server, ServerEvent::Kind::kFollowerRefused);
  CHECK(event.text.find("6 or 7, from a follower") != std::string::npos);
}
