/* test_pack.cc: small arrays travel as one leaf, and their owner sees each by itself. */
#include <doctest/doctest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "call.h"
#include "cluster.h"
#include "engine/pack.h"

namespace jaxrdma {
namespace {

using namespace testing;

/// Two packs on two servers with a leaf of its own between them, and an array of the second pack
/// before the first: 3 + 5 and 4 + 2 elements, and 600.
FlowSpec packed(FlowMode mode) {
  FlowSpec spec;
  spec.mode = mode;
  spec.leaves = {{DType::kFloat32, 6}, {DType::kFloat32, 600}, {DType::kFloat32, 8}};
  spec.partitions = {{0, 1, 0, 6}, {1, 0, 0, 256}, {1, 1, 256, 256}, {1, 0, 512, 88}, {2, 0, 0, 8}};
  spec.members = {{0, 0, 4}, {2, 0, 3}, {1, 0, 600}, {2, 3, 5}, {0, 4, 2}};
  return spec;
}

using Arrays = std::vector<std::vector<float>>;

/// Each element of each array is another number.
Arrays numbers(int worker, int64_t step) {
  Arrays arrays;
  for (const LeafMember& member : packed(FlowMode::kAverage).members) {
    arrays.push_back(pattern(member.elements, worker + 3 * static_cast<int>(arrays.size()), step));
  }
  return arrays;
}

Arrays zeros() {
  Arrays arrays = numbers(0, 0);
  for (auto& array : arrays) std::fill(array.begin(), array.end(), 0.0f);
  return arrays;
}

/// An operation on all arrays.
Status run(WorkerEngine& engine, OperationKind kind, int64_t step, const Arrays* sources,
           Arrays* targets) {
  Operation operation;
  operation.kind = kind;
  operation.flow = 0;
  operation.step = step;
  const size_t arrays = (sources != nullptr ? sources : targets)->size();
  for (size_t i = 0; i < arrays; ++i) {
    LeafBuffers& buffers = operation.leaves.emplace_back();
    if (sources != nullptr)
      buffers.source = reinterpret_cast<const std::byte*>((*sources)[i].data());
    if (targets != nullptr) buffers.target = reinterpret_cast<std::byte*>((*targets)[i].data());
  }
  std::mutex lock;
  std::condition_variable changed;
  std::optional<Status> outcome;
  operation.done = [&](const Status& status) {
    std::lock_guard guard(lock);
    outcome = status;
    changed.notify_all();
  };
  engine.start(std::move(operation));
  std::unique_lock guard(lock);
  REQUIRE(changed.wait_for(guard, std::chrono::seconds(10), [&] { return outcome.has_value(); }));
  return *outcome;
}

}  // namespace

TEST_CASE("the mean of packed arrays comes back to each of them") {
  Cluster cluster(2, 2, packed(FlowMode::kAverage));
  for (int64_t step = 0; step < 10; ++step) {
    Arrays results[2] = {zeros(), zeros()};
    std::vector<std::thread> threads;
    Status ended[2];
    for (int w = 0; w < 2; ++w) {
      threads.emplace_back([&, w] {
        const Arrays mine = numbers(w, step);
        ended[w] = run(cluster.worker(w), OperationKind::kExchange, step, &mine, &results[w]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    REQUIRE(ended[0].ok());
    REQUIRE(ended[1].ok());
    const Arrays a = numbers(0, step), b = numbers(1, step);
    for (size_t i = 0; i < a.size(); ++i) {
      for (size_t j = 0; j < a[i].size(); ++j)
        REQUIRE(results[0][i][j] == static_cast<float>((double{a[i][j]} + double{b[i][j]}) / 2));
    }
    CHECK(results[0] == results[1]);
  }
  const WorkerStats stats = cluster.worker(0).stats();
  CHECK(stats.bytes_pushed == 10 * 614 * sizeof(float));
  CHECK(cluster.worker(0).in_flight() == 0);
}

TEST_CASE("pushed arrays may be overwritten at once, and are pulled one by one") {
  Cluster cluster(2, 1, packed(FlowMode::kAverage));
  for (int64_t step = 0; step < 5; ++step) {
    Arrays arrays = numbers(0, step);
    REQUIRE(run(cluster.worker(0), OperationKind::kPush, step, &arrays, nullptr).ok());
    arrays = zeros();
    REQUIRE(run(cluster.worker(0), OperationKind::kPull, step, nullptr, &arrays).ok());
    CHECK(arrays == numbers(0, step));
  }
}

TEST_CASE("a server sees each array of a pack in its place, and what it writes there comes back") {
  Cluster cluster(2, 1, packed(FlowMode::kUpdate));
  const Arrays start = numbers(5, 0);
  Arrays result = zeros();
  Status initialised;
  std::thread chief(
      [&] { initialised = run(cluster.worker(0), OperationKind::kInit, 0, &start, &result); });
  for (size_t s = 0; s < 2; ++s) {
    REQUIRE(cluster.server(s).wait_event(kTimeoutMs).kind == ServerEvent::Kind::kInitialised);
    REQUIRE(cluster.server(s).publish(0, 0).ok());
  }
  chief.join();
  REQUIRE(initialised.ok());
  CHECK(result == start);

  const Arrays gradients = numbers(1, 1);
  Status exchanged;
  std::thread worker([&] {
    exchanged = run(cluster.worker(0), OperationKind::kExchange, 0, &gradients, &result);
  });
  const size_t held[2][5] = {{0, 3, 344, 5, 0}, {4, 0, 256, 0, 2}};
  for (size_t s = 0; s < 2; ++s) {
    REQUIRE(cluster.server(s).wait_event(kTimeoutMs).kind == ServerEvent::Kind::kStepReady);
    for (uint32_t i = 0; i < 5; ++i) {
      const auto mean = cluster.server(s).gradient(0, i), own = cluster.server(s).parameters(0, i);
      REQUIRE(mean.ok());
      REQUIRE(own.ok());
      CHECK(mean.value().elements == held[s][i]);
      REQUIRE(own.value().elements == held[s][i]);
      auto* values = reinterpret_cast<float*>(own.value().data);
      const auto* gradient = reinterpret_cast<const float*>(mean.value().data);
      for (size_t j = 0; j < held[s][i]; ++j)
        values[j] = 2 * values[j] - static_cast<float>(i + 1) * gradient[j];
    }
    CHECK(!cluster.server(s).parameters(0, 5).ok());
    REQUIRE(cluster.server(s).publish(0, 1).ok());
  }
  worker.join();
  REQUIRE(exchanged.ok());
  for (size_t i = 0; i < 5; ++i) {
    for (size_t j = 0; j < start[i].size(); ++j)
      REQUIRE(result[i][j] == 2 * start[i][j] - static_cast<float>(i + 1) * gradients[i][j]);
  }
}

TEST_CASE("arrays that are pushed in several types are widened to the one they are summed in") {
  FlowSpec spec;
  spec.leaves = {{DType::kBFloat16, 4}, {DType::kBFloat16, 3}};
  spec.partitions = {{0, 0, 0, 4}, {1, 0, 0, 3}};
  spec.members = {{0, 0, 1}, {0, 1, 2}, {1, 0, 3}, {0, 3, 1}};
  REQUIRE(check_flow(spec, 1, 1024).ok());
  const Packing packing(spec);
  CHECK(packing.bytes() == 64);  // of the first leaf alone
  alignas(64) std::byte buffer[64];
  const uint16_t brain = 0x4040, half = 0xc000;  // 3 and -2
  const float plain[] = {0.1f, 7.0f};
  uint16_t results[4] = {};
  std::vector<LeafBuffers> arrays(4);
  arrays[0] = {reinterpret_cast<const std::byte*>(&brain), DType::kBFloat16, nullptr};
  arrays[1] = {reinterpret_cast<const std::byte*>(plain), DType::kFloat32, nullptr};
  arrays[2].source = reinterpret_cast<const std::byte*>(plain);
  arrays[3] = {reinterpret_cast<const std::byte*>(&half), DType::kFloat16, nullptr};

  auto leaves = packing.pack(OperationKind::kPush, arrays, buffer);
  REQUIRE(leaves.ok());
  REQUIRE(leaves.value().size() == 2);
  CHECK(leaves.value()[0].source_dtype == DType::kFloat32);
  CHECK(leaves.value()[0].target == nullptr);
  CHECK(leaves.value()[1].source == arrays[2].source);
  float sent[4];
  std::memcpy(sent, leaves.value()[0].source, sizeof(sent));
  CHECK(sent[0] == 3.0f);
  CHECK(sent[1] == 0.1f);
  CHECK(sent[2] == 7.0f);
  CHECK(sent[3] == -2.0f);

  // All of one type: they travel as they are.
  for (size_t i : {1, 3}) arrays[i] = arrays[0];
  const uint16_t pair[] = {0x3f80, 0x4000};
  arrays[1].source = reinterpret_cast<const std::byte*>(pair);
  leaves = packing.pack(OperationKind::kPush, arrays, buffer);
  REQUIRE(leaves.ok());
  CHECK(leaves.value()[0].source_dtype == DType::kBFloat16);
  CHECK(std::memcmp(buffer, "\x40\x40\x80\x3f\x00\x40\x40\x40", 8) == 0);

  // And what comes is of the parameters' type.
  size_t at[] = {3, 0, 0, 2};
  for (size_t i : {0, 1, 3}) arrays[i].target = reinterpret_cast<std::byte*>(results + at[i]);
  packing.unpack(buffer, arrays);
  CHECK(results[3] == 0x4040);
  CHECK(results[0] == 0x3f80);
  CHECK(results[1] == 0x4000);
  CHECK(results[2] == 0x4040);
}

TEST_CASE("an array of a pack without a buffer, or with a gradient of another kind, is refused") {
  const FlowSpec spec = packed(FlowMode::kAverage);
  const Packing packing(spec);
  std::vector<std::byte> buffer(packing.bytes());
  Arrays values = zeros();
  std::vector<LeafBuffers> arrays(5);
  for (size_t i = 0; i < 5; ++i) {
    arrays[i].source = reinterpret_cast<const std::byte*>(values[i].data());
    arrays[i].target = reinterpret_cast<std::byte*>(values[i].data());
  }
  CHECK(packing.pack(OperationKind::kExchange, arrays, buffer.data()).ok());
  arrays[3].source_dtype = DType::kFloat64;
  auto refused = packing.pack(OperationKind::kExchange, arrays, buffer.data());
  CHECK(refused.status().message() ==
        "array 3 of flow 0 is float32, its gradient float64: cast the gradient");
  arrays[3] = {};
  refused = packing.pack(OperationKind::kPush, arrays, buffer.data());
  CHECK(refused.status().message() == "array 3 of flow 0 has no source buffer");
  refused = packing.pack(OperationKind::kFetch, arrays, buffer.data());
  CHECK(refused.status().message() == "array 3 of flow 0 has no target buffer");
}

}  // namespace jaxrdma
