/* tests/native/test_gather.cc: calls of several devices become one operation. */
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/gather.h"

namespace {

using namespace jaxrdma;

constexpr size_t kLeaves = 3, kElements = 4;

/// What a device brings, and what it is told.
struct Device {
  std::array<std::array<float, kElements>, kLeaves> source{}, target{};
  std::shared_ptr<Outcome> outcome = std::make_shared<Outcome>();
  std::optional<Status> ended;

  DeviceCall call(int64_t step, OperationKind kind = OperationKind::kExchange) {
    DeviceCall made;
    made.operation.kind = kind;
    made.operation.flow = 2;
    made.operation.step = step;
    made.operation.outcome = outcome;
    made.operation.done = [this](const Status& status) { ended = status; };
    for (size_t i = 0; i < kLeaves; ++i) {
      LeafBuffers leaf;
      leaf.source = reinterpret_cast<const std::byte*>(source[i].data());
      if (kind != OperationKind::kPush)
        leaf.target = reinterpret_cast<std::byte*>(target[i].data());
      made.operation.leaves.push_back(leaf);
      made.bytes.push_back(leaf.target == nullptr ? 0 : sizeof(target[i]));
    }
    return made;
  }
};

/// The engine: twice the gradient comes back.
struct Engine {
  std::vector<Operation> begun;

  void finish(const Status& status) {
    Operation operation = std::move(begun.front());
    begun.erase(begun.begin());
    for (const LeafBuffers& leaf : operation.leaves) {
      if (leaf.target == nullptr) continue;
      const auto* from = reinterpret_cast<const float*>(leaf.source);
      auto* to = reinterpret_cast<float*>(leaf.target);
      for (size_t i = 0; i < kElements; ++i) to[i] = 2 * from[i];
    }
    *operation.outcome = {operation.step + 1, 7};
    operation.done(status);
  }
};

struct Case {
  Engine engine;
  Gather gather{[this](Operation all) { engine.begun.push_back(std::move(all)); }};
  std::array<Device, 4> devices;

  Case() {
    for (Device& device : devices) {
      for (size_t leaf = 0; leaf < kLeaves; ++leaf) {
        for (size_t i = 0; i < kElements; ++i)
          device.source[leaf][i] = static_cast<float>(10 * leaf + i);
      }
    }
  }
};

}  // namespace

TEST_CASE("the last device begins one operation, and all get what it brings") {
  Case c;
  for (int64_t step = 0; step < 3; ++step) {
    for (size_t i : {2, 0, 3, 1}) {
      CHECK(c.engine.begun.empty());
      c.gather.add(4, c.devices[i].call(step));
    }
    REQUIRE(c.engine.begun.size() == 1);
    const Operation& all = c.engine.begun[0];
    CHECK(all.step == step);
    CHECK(all.flow == 2);
    // Each device carries its part.
    CHECK(all.leaves[0].source == reinterpret_cast<std::byte*>(c.devices[2].source[0].data()));
    CHECK(all.leaves[1].source == reinterpret_cast<std::byte*>(c.devices[0].source[1].data()));
    CHECK(all.leaves[2].source == reinterpret_cast<std::byte*>(c.devices[3].source[2].data()));
    c.engine.finish({});
    for (Device& device : c.devices) {
      REQUIRE(device.ended.has_value());
      CHECK(device.ended->ok());
      CHECK(device.outcome->version == step + 1);
      CHECK(device.outcome->dropped == 7);
      for (size_t leaf = 0; leaf < kLeaves; ++leaf) {
        for (size_t i = 0; i < kElements; ++i)
          CHECK(device.target[leaf][i] == 2 * device.source[leaf][i]);
      }
      device.ended.reset();
      device.target = {};
    }
  }
}

TEST_CASE("a push and its pull are gathered each by itself") {
  Case c;
  c.gather.add(2, c.devices[0].call(5, OperationKind::kPush));
  c.gather.add(2, c.devices[0].call(5, OperationKind::kPull));
  CHECK(c.engine.begun.empty());
  c.gather.add(2, c.devices[1].call(5, OperationKind::kPush));
  REQUIRE(c.engine.begun.size() == 1);
  CHECK(c.engine.begun[0].kind == OperationKind::kPush);
  c.engine.finish({});
  c.gather.add(2, c.devices[1].call(5, OperationKind::kPull));
  REQUIRE(c.engine.begun.size() == 1);
  CHECK(c.engine.begun[0].kind == OperationKind::kPull);
  c.engine.finish({});
  CHECK(c.devices[1].target[1][3] == 26);
}

TEST_CASE("a failure is told to every device, which keeps what it had") {
  Case c;
  c.gather.add(2, c.devices[0].call(1));
  c.gather.add(2, c.devices[1].call(1));
  c.engine.finish({Code::kPeerFailed, "worker 3 died"});
  for (size_t i : {0, 1}) CHECK(c.devices[i].ended->message() == "worker 3 died");
  CHECK(c.devices[0].target[1][0] == 0);
}

TEST_CASE("devices that disagree are all told, and nobody waits for the rest") {
  Case c;
  c.gather.add(3, c.devices[0].call(1));
  c.gather.add(3, c.devices[1].call(2));
  c.gather.add(3, c.devices[2].call(1));
  for (size_t i : {0, 1, 2}) {
    REQUIRE(c.devices[i].ended.has_value());
    CHECK(c.devices[i].ended->code() == Code::kInvalidArgument);
    CHECK(c.devices[i].ended->message().find("step 2") != std::string::npos);
  }
  CHECK(c.engine.begun.empty());
}

TEST_CASE("who waits for other devices is told when the session is closed") {
  Case c;
  c.gather.add(2, c.devices[0].call(1));
  c.gather.close({Code::kCancelled, "closed"});
  CHECK(c.devices[0].ended->code() == Code::kCancelled);
  c.gather.add(2, c.devices[1].call(1));
  CHECK(c.devices[1].ended->message() == "closed");
}

TEST_CASE("devices come at the same time, from threads of their own") {
  constexpr int kSteps = 500;
  Case c;
  std::atomic<int> begun = 0;
  Gather gather{[&](Operation all) {
    ++begun;
    all.done({});
  }};
  std::vector<std::thread> threads;
  std::array<std::atomic<int>, 4> done{};
  for (size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int step = 0; step < kSteps; ++step) {
        DeviceCall call = c.devices[i].call(step);
        call.operation.done = [&, i](const Status& status) {
          CHECK(status.ok());
          ++done[i];
        };
        gather.add(4, std::move(call));
        while (done[i] != step + 1) std::this_thread::yield();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(begun == kSteps);
}
