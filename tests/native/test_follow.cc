/* tests/native/test_follow.cc: followers: one version from every server, whatever the servers do
   meanwhile, and whatever followers do to the servers. */
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "call.h"
#include "engine/checksum.h"
#include "engine/server.h"
#include "engine/wire.h"
#include "engine/worker.h"
#include "peer.h"

using namespace jaxrdma;
using namespace testing;

namespace {

constexpr size_t kPieceElements = 64;
constexpr int64_t kNone = -1;

/// Partitions of one leaf that go to `servers` in turn.
FlowSpec dealt(uint32_t servers, size_t count, uint32_t held = 0) {
  FlowSpec spec = flow_of(FlowMode::kUpdate, DType::kFloat32, count, kPieceElements);
  for (size_t i = 0; i < count; ++i) spec.partitions[i].server = static_cast<uint32_t>(i % servers);
  spec.held = held;
  return spec;
}

/// Every element of a version is its step.
void publish(ServerEngine& server, int64_t step) {
  auto parameters = server.parameters(0, 0);
  REQUIRE(parameters.ok());
  auto* values = reinterpret_cast<float*>(parameters.value().data);
  std::fill_n(values, parameters.value().elements, static_cast<float>(step));
  const Status status = server.publish(0, step);
  REQUIRE_MESSAGE(status.ok(), status.message());
}

/// Servers that nobody writes to yet. Who publishes by himself does it while no copy is being made.
std::vector<std::shared_ptr<ServerEngine>> make_servers(uint32_t count, const FlowSpec& spec,
                                                        uint32_t workers = 1) {
  std::vector<std::shared_ptr<ServerEngine>> servers;
  for (uint32_t i = 0; i < count; ++i) {
    ServerOptions options = options_for(workers);
    options.server = i;
    options.servers = count;
    servers.push_back(make_server(options));
    REQUIRE(servers[i]->add_flow(spec).ok());
  }
  return servers;
}

/// Connected to servers that let it in by the token of `token`.
std::shared_ptr<WorkerEngine> join(WorkerOptions options, uint32_t token,
                                   const std::vector<std::shared_ptr<ServerEngine>>& servers,
                                   const FlowSpec& spec) {
  options.job = "job";
  options.incarnation = kIncarnation;
  options.transport = next_transport();
  auto made = WorkerEngine::create(options);
  REQUIRE(made.ok());
  std::vector<ServerAddress> addresses;
  for (const auto& server : servers) addresses.push_back({server->address(), token_of(token)});
  const Status connected = made.value()->connect(addresses, 10000);
  REQUIRE_MESSAGE(connected.ok(), connected.message());
  REQUIRE(made.value()->add_flow(spec).ok());
  return made.value();
}

std::shared_ptr<WorkerEngine> make_follower(
    uint32_t number, const std::vector<std::shared_ptr<ServerEngine>>& servers,
    const FlowSpec& spec) {
  for (const auto& server : servers) {
    REQUIRE(server->admit_follower(number, kIncarnation, token_of(200 + number)).ok());
  }
  WorkerOptions options;
  options.worker = number;
  options.follows = true;
  return join(options, 200 + number, servers, spec);
}

std::shared_ptr<WorkerEngine> make_worker(const std::vector<std::shared_ptr<ServerEngine>>& servers,
                                          const FlowSpec& spec) {
  return join(WorkerOptions(), 0, servers, spec);
}

/// What the Python side of a server does for one worker, until it is woken: parameters are written
/// only when it is their time.
void serve(ServerEngine& server) {
  using Kind = ServerEvent::Kind;
  while (true) {
    const ServerEvent event = server.wait_event(20000);
    if (event.kind == Kind::kInitialised) {
      publish(server, 0);
    } else if (event.kind == Kind::kStepReady) {
      publish(server, event.step + 1);
    } else if (event.kind == Kind::kGradient) {
      REQUIRE(server.aggregate(0, event.step, {event.gradient}).ok());
      REQUIRE(server.answer(0, event.gradient, event.step + 1, true).ok());
    } else if (event.kind == Kind::kWoken || event.kind == Kind::kNone) {
      return;
    }
  }
}

/// A kFollow and what it brings.
struct Pull {
  Pull(WorkerEngine& engine, const FlowSpec& spec, int64_t step, int timeout_ms = -1)
      : values(spec.leaves[0].elements, kNone), outcome(std::make_shared<Outcome>()) {
    Operation operation;
    operation.kind = OperationKind::kFollow;
    operation.flow = 0;
    operation.step = step;
    operation.timeout_ms = timeout_ms;
    operation.leaves.push_back(
        {nullptr, DType::kFloat32, reinterpret_cast<std::byte*>(values.data())});
    operation.outcome = outcome;
    operation.done = [this](const Status& why) {
      status = why;
      ended.store(true);
    };
    engine.start(std::move(operation));
  }
  Status wait() {
    const auto deadline = Clock::now() + kPatience;
    while (!ended.load()) {
      REQUIRE(Clock::now() < deadline);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return status;
  }
  /// That it ends well, with one version.
  int64_t step() {
    const Status end = wait();
    REQUIRE_MESSAGE(end.ok(), end.message());
    const bool one = std::all_of(values.begin(), values.end(), [&](float value) {
      return value == static_cast<float>(outcome->version);
    });
    CHECK_MESSAGE(one, "not one version: ", outcome->version);
    return outcome->version;
  }
  std::vector<float> values;
  std::shared_ptr<Outcome> outcome;
  Status status;
  std::atomic<bool> ended{false};
};

/// A follower that writes its requests by hand.
std::unique_ptr<Peer> raw_follower(ServerEngine& server, uint32_t number) {
  auto peer = std::make_unique<Peer>(wire::kFirstFollower + number);
  REQUIRE(server.admit_follower(number, kIncarnation, peer->hello.token).ok());
  REQUIRE(peer->connect(server));
  return peer;
}

/// A server by hand, of one partition: it keeps `values`, and tells this checksum of them.
class Told {
 public:
  Told(const std::vector<float>& values, uint64_t checksum)
      : slots_(kSlots * sizeof(wire::Header)),
        sent_(sizeof(wire::Kept) + values.size() * sizeof(float)),
        fabric_(std::move(fabric::make_fabric(next_transport(), {}).value())) {
    const wire::Kept kept{3, checksum};
    std::memcpy(sent_.data(), &kept, sizeof(kept));
    std::memcpy(sent_.data() + sizeof(kept), values.data(), values.size() * sizeof(float));
    const auto enrol = [&](std::vector<std::byte>& memory, fabric::Access access) {
      return std::move(fabric_->register_memory(memory.data(), memory.size(), access).value());
    };
    landing_ = enrol(slots_, fabric::Access::kRemoteWrite);
    source_ = enrol(sent_, fabric::Access::kLocal);
    address = fabric_
                  ->listen("127.0.0.1:0",
                           [this](fabric::EndpointId, const fabric::Hello&) {
                             wire::LandingGrant grant{};
                             grant.address = reinterpret_cast<uintptr_t>(slots_.data());
                             grant.slot_stride = sizeof(wire::Header);
                             grant.key = landing_->remote_key();
                             grant.slots = kSlots;
                             std::vector<std::byte> payload(sizeof(grant));
                             std::memcpy(payload.data(), &grant, sizeof(grant));
                             return Result<std::vector<std::byte>>(payload);
                           })
                  .value();
    thread_ = std::thread([this] {
      while (!stop_.load()) {
        std::vector<fabric::Event> events;
        if (!fabric_->poll(events)) fabric_->wait(10);
        for (const fabric::Event& event : events)
          if (event.kind == fabric::Event::Kind::kReceived) answer(event);
      }
    });
  }
  ~Told() {
    stop_.store(true);
    thread_.join();
    source_.reset();
    landing_.reset();
  }

  std::string address;

 private:
  void answer(const fabric::Event& event) {
    fabric::Endpoint* endpoint = fabric_->endpoint(event.endpoint);
    if (endpoint == nullptr) return;
    endpoint->release(1);
    wire::Header asked;
    std::memcpy(&asked, slots_.data() + event.immediate * sizeof(asked), sizeof(asked));
    const size_t head = sizeof(wire::Kept);
    const fabric::Slice slice =
        asked.kind == wire::Kind::kKeep
            ? fabric::Slice{source_.get(), sent_.data(), head}
            : fabric::Slice{source_.get(), sent_.data() + head, sent_.size() - head};
    REQUIRE(endpoint
                ->write({&slice, 1}, {asked.reply_address, asked.reply_key},
                        wire::answer(wire::Answer::kResultAndCredit, asked.reply_tag), 1)
                .ok());
  }

  static constexpr uint32_t kSlots = 2;
  std::vector<std::byte> slots_;
  std::vector<std::byte> sent_;
  std::unique_ptr<fabric::Fabric> fabric_;
  std::unique_ptr<fabric::MemoryRegion> landing_;
  std::unique_ptr<fabric::MemoryRegion> source_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

wire::Kept kept_by(Peer& peer, int64_t step, uint32_t tag = 0) {
  peer.send(peer.header(wire::Kind::kKeep, 0, step, tag));
  peer.expect(wire::Answer::kResult, tag);
  wire::Kept kept;
  std::memcpy(&kept, peer.result(tag), sizeof(kept));
  return kept;
}

}  // namespace

TEST_CASE("a follower gets one version from every server, and the newest") {
  for (const uint32_t held : {0u, 1u}) {
    const FlowSpec spec = dealt(3, 20, held);
    auto servers = make_servers(3, spec);
    auto follower = make_follower(0, servers, spec);
    Pull early(*follower, spec, 0);  // before there is one
    for (auto& server : servers) publish(*server, 5);
    CHECK(early.step() == 5);
    CHECK(Pull(*follower, spec, 0).step() == 5);
    for (auto& server : servers) publish(*server, 6);
    CHECK(Pull(*follower, spec, 6).step() == 6);
    follower->close();
  }
}

TEST_CASE("a follower that waits for a newer version gets it when every server has it") {
  const FlowSpec spec = dealt(2, 9, 1);
  auto servers = make_servers(2, spec);
  auto follower = make_follower(0, servers, spec);
  for (auto& server : servers) publish(*server, 1);
  publish(*servers[0], 2);
  publish(*servers[0], 3);
  Pull newer(*follower, spec, 2);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  publish(*servers[1], 2);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(!newer.ended.load());  // server 1 has no 3 yet
  publish(*servers[1], 3);
  CHECK(newer.step() == 3);
  follower->close();
}

TEST_CASE("a wait for a version ends in time, or when it is told to, and the next pull goes well") {
  const FlowSpec spec = dealt(2, 9);
  auto servers = make_servers(2, spec);
  auto follower = make_follower(0, servers, spec);
  for (auto& server : servers) publish(*server, 1);
  CHECK(Pull(*follower, spec, 2, 30).wait().code() == Code::kDeadline);
  CHECK(Pull(*follower, spec, 2, 0).wait().code() == Code::kDeadline);
  CHECK(Pull(*follower, spec, 1, 0).step() == 1);
  CHECK(Pull(*follower, spec, 1, 5000).step() == 1);
  Pull stopped(*follower, spec, 2);
  follower->stop_waiting();
  CHECK(stopped.wait().code() == Code::kCancelled);
  for (auto& server : servers) publish(*server, 2);
  CHECK(Pull(*follower, spec, 2).step() == 2);
  follower->close();
}

TEST_CASE("a flow that shows is refreshed while nobody reads it, and takes nothing of a worker") {
  FlowSpec spec = dealt(2, 40);
  spec.mode = FlowMode::kShow;
  auto servers = make_servers(2, spec);
  for (auto& server : servers) {
    CHECK(server->refresh(0).code() == Code::kInvalidArgument);  // there is no version yet
    CHECK(server->refresh(1).code() == Code::kInvalidArgument);
    CHECK(server->gradient(0, 0).status().code() == Code::kInvalidArgument);
    publish(*server, 0);
  }
  auto follower = make_follower(0, servers, spec);
  CHECK(Pull(*follower, spec, 0).step() == 0);
  // Versions as fast as it goes, while it follows.
  constexpr int64_t kVersions = 300;
  std::vector<std::thread> updaters;
  for (auto& server : servers) {
    updaters.emplace_back([&server = *server] {
      for (int64_t step = 1; step <= kVersions; ++step) {
        REQUIRE(server.refresh(0).ok());
        REQUIRE(server.refresh(0).ok());  // no second event for it
        expect_event(server, ServerEvent::Kind::kStepReady);
        publish(server, step);
      }
    });
  }
  int64_t last = 0;
  while (last < kVersions) {
    const int64_t step = Pull(*follower, spec, last + 1).step();
    CHECK(step > last);
    last = step;
  }
  for (std::thread& updater : updaters) updater.join();
  for (auto& server : servers) {
    expect_silence(*server);
    CHECK(server->stats().steps == 0);
  }
  follower->close();

  Peer peer(0);
  REQUIRE(servers[0]->admit(0, kIncarnation, peer.hello.token).ok());
  REQUIRE(peer.connect(*servers[0]));
  peer.send(peer.header(wire::Kind::kPull, 0, 0, 0));
  const ServerEvent event = expect_event(*servers[0], ServerEvent::Kind::kViolation);
  CHECK(event.text.find("nothing comes from workers of this flow") != std::string::npos);
}

TEST_CASE("what follows while training goes as fast as it can is always one version") {
  constexpr int kPulls = 40;
  constexpr size_t kPieces = 40;
  for (const uint32_t held : {0u, 1u}) {
    const FlowSpec spec = dealt(3, kPieces, held);
    auto servers = make_servers(3, spec);
    std::vector<std::thread> updaters;
    for (auto& server : servers) updaters.emplace_back([&server] { serve(*server); });
    auto worker = make_worker(servers, spec);
    std::vector<float> values(kPieces * kPieceElements, 0.0f);
    Call init;
    init.start(*worker, OperationKind::kInit, 0, &values, &values);
    REQUIRE(init.wait().ok());
    std::atomic<bool> stop{false};
    std::atomic<int64_t> reached{0};
    std::thread trainer([&] {
      while (!stop.load()) {
        Call step;
        step.start(*worker, OperationKind::kExchange, reached.load(), &values, &values);
        REQUIRE(step.wait().ok());
        ++reached;
      }
    });
    auto one = make_follower(0, servers, spec);
    auto other = make_follower(1, servers, spec);
    int64_t last = -1;
    for (int i = 0; i < kPulls; ++i) {
      Pull a(*one, spec, last + 1);
      Pull b(*other, spec, 0);
      const int64_t step = a.step();
      b.step();
      CHECK(step > last);
      last = step;
    }
    // Training rests where nobody is told of: the newest will do.
    stop.store(true);
    trainer.join();
    CHECK(Pull(*one, spec, 0).step() == reached.load());
    one->close();
    other->close();
    worker->close();
    for (auto& server : servers) server->wake();
    for (std::thread& updater : updaters) updater.join();
  }
}

TEST_CASE("the checksum that a server tells is that of what it sends") {
  for (const uint32_t held : {0u, 1u}) {
    const FlowSpec spec = dealt(1, 3, held);
    auto server = make_servers(1, spec)[0];
    auto peer = raw_follower(*server, 7);
    publish(*server, 4);
    const wire::Kept kept = kept_by(*peer, 0);
    CHECK(kept.step == 4);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < 3; ++i) {
      peer->send(peer->header(wire::Kind::kTake, i, 4, 1 + i));
      peer->expect(wire::Answer::kResult, 1 + i);
      CHECK(peer->result_as<float>(1 + i, kPieceElements) == floats(kPieceElements, 4.0f));
      sum += partition_checksum(i, peer->result(1 + i), kPieceElements * sizeof(float));
    }
    CHECK(sum == kept.checksum);
    CHECK(server->stats().bytes_followed == 3 * kPieceElements * sizeof(float));
    CHECK(server->stats().copies == (held > 0 ? 0 : 1));
  }
}

TEST_CASE("a follower refuses parameters that are not those of the checksum it was told") {
  const FlowSpec spec = dealt(1, 1);
  const std::vector<float> values = floats(kPieceElements, 3.0f);
  const uint64_t right = partition_checksum(0, reinterpret_cast<const std::byte*>(values.data()),
                                            values.size() * sizeof(float));
  for (const uint64_t wrong : {0u, 1u}) {
    Told server(values, right + wrong);
    WorkerOptions options;
    options.follows = true;
    options.job = "job";
    options.transport = next_transport();
    auto follower = WorkerEngine::create(options).value();
    REQUIRE(follower->connect({{server.address, token_of(0)}}, 10000).ok());
    REQUIRE(follower->add_flow(spec).ok());
    Pull pull(*follower, spec, 0);
    if (wrong == 0) {
      CHECK(pull.step() == 3);
    } else {
      CHECK(pull.wait().code() == Code::kProtocol);
      CHECK(pull.status.message().find("of step 3 that came from server 0") != std::string::npos);
      CHECK(pull.status.message().find("the checksums differ") != std::string::npos);
    }
    follower->close();
  }
}

TEST_CASE("a checksum notices one bit, an exchange of words, of partitions, and a length") {
  std::vector<std::byte> bytes(1000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte(i * 7 % 251);
  const auto sum = [&](uint32_t partition = 3) {
    return partition_checksum(partition, bytes.data(), bytes.size());
  };
  const uint64_t right = sum();
  CHECK(sum() == right);
  CHECK(sum(4) != right);
  for (size_t i = 0; i < bytes.size(); i += 37) {
    bytes[i] ^= std::byte{0x10};
    CHECK(sum() != right);
    bytes[i] ^= std::byte{0x10};
  }
  std::swap_ranges(bytes.begin(), bytes.begin() + 32, bytes.begin() + 64);
  CHECK(sum() != right);
  std::swap_ranges(bytes.begin(), bytes.begin() + 32, bytes.begin() + 64);
  CHECK(sum() == right);
  CHECK(partition_checksum(3, bytes.data(), 999) != right);
  bytes.assign(1000, std::byte{0});
  CHECK(partition_checksum(3, bytes.data(), 999) != sum());
}

TEST_CASE("a version that is kept outlives the steps that follow, and no update waits for it") {
  for (const uint32_t held : {0u, 1u}) {
    const FlowSpec spec = dealt(1, 2, held);
    auto server = make_servers(1, spec)[0];
    auto slow = raw_follower(*server, 1);
    publish(*server, 0);
    REQUIRE(kept_by(*slow, 0).step == 0);
    // Nothing that is asked for is received, while the server goes on.
    slow->hold_releases = true;
    for (uint32_t tag = 1; tag < 3; ++tag)
      slow->send(slow->header(wire::Kind::kTake, tag - 1, 0, tag));
    for (int64_t step = 1; step < 20; ++step) publish(*server, step);
    // Over several devices in any order.
    CHECK(wire::answer_tag(slow->answer()) + wire::answer_tag(slow->answer()) == 1 + 2);
    for (uint32_t tag = 1; tag < 3; ++tag) {
      CHECK(slow->result_as<float>(tag, kPieceElements) == floats(kPieceElements, 0.0f));
    }
    slow->hold_releases = false;
    slow->release(slow->held);
    CHECK(kept_by(*slow, 0, 5).step == 19);
  }
}

TEST_CASE("followers of one step share a copy, and copies are used again") {
  const FlowSpec spec = dealt(1, 2);
  auto server = make_servers(1, spec)[0];
  std::vector<std::unique_ptr<Peer>> peers;
  for (uint32_t i = 0; i < 4; ++i) peers.push_back(raw_follower(*server, i));
  publish(*server, 0);
  for (auto& peer : peers) CHECK(kept_by(*peer, 0).step == 0);
  CHECK(server->stats().copies == 1);
  publish(*server, 1);
  for (auto& peer : peers) CHECK(kept_by(*peer, 1).step == 1);
  CHECK(server->stats().copies == 2);
}

TEST_CASE("a second question takes the place of the first, which is answered too") {
  const FlowSpec spec = dealt(1, 2);
  auto server = make_servers(1, spec)[0];
  auto peer = raw_follower(*server, 1);
  publish(*server, 3);
  for (const auto& [number, step] : {std::pair(1, 9), std::pair(2, 0)}) {
    wire::Header header = peer->header(wire::Kind::kKeep, 0, step, static_cast<uint32_t>(number));
    header.bytes = static_cast<uint64_t>(number);  // either may arrive first
    peer->send(header);
  }
  peer->expect(wire::Answer::kStale, 1);
  peer->expect(wire::Answer::kResult, 2);
  peer->wait([&] { return peer->free_slots.size() == peer->grant.slots; });
}

TEST_CASE("a question that a newer one has overtaken takes nothing from it") {
  const FlowSpec spec = dealt(1, 2);
  auto server = make_servers(1, spec)[0];
  auto peer = raw_follower(*server, 1);
  publish(*server, 3);
  const auto ask = [&](uint64_t number, int64_t step, uint32_t tag) {
    wire::Header header = peer->header(wire::Kind::kKeep, 0, step, tag);
    header.bytes = number;
    peer->send(header);
  };
  ask(2, 0, 2);
  peer->expect(wire::Answer::kResult, 2);
  ask(1, 0, 1);
  peer->expect(wire::Answer::kStale, 1);
  peer->send(peer->header(wire::Kind::kTake, 0, 3, 3));  // is still kept
  peer->expect(wire::Answer::kResult, 3);
  ask(4, 9, 4);
  ask(3, 9, 5);
  peer->expect(wire::Answer::kStale, 5);
  publish(*server, 9);
  peer->expect(wire::Answer::kResult, 4);
}

TEST_CASE("a follower that breaks the protocol is named and disconnected, and training goes on") {
  const FlowSpec spec = dealt(1, 2);
  auto server = make_servers(1, spec)[0];
  publish(*server, 3);
  uint32_t number = 0;
  const auto check_refused = [&](const std::string& because, auto misbehave) {
    CAPTURE(because);
    auto peer = raw_follower(*server, ++number);
    misbehave(*peer);
    const ServerEvent event = expect_event(*server, ServerEvent::Kind::kFollowerRefused);
    CHECK(event.worker == number);
    CHECK_MESSAGE(event.text.find(because) != std::string::npos, event.text);
    CHECK(event.text.find("follower " + std::to_string(number)) != std::string::npos);
    peer->wait([&] { return peer->ended; });
  };
  check_refused("kind: expected 6 or 7, from a follower, got 1",
                [](Peer& peer) { peer.push(0, 3, 1, std::vector<float>()); });
  check_refused("kind: expected 6 or 7, from a follower, got 2",
                [](Peer& peer) { peer.send(peer.header(wire::Kind::kPull, 0, 3, 1)); });
  check_refused("kind: expected 6, for nothing of flow 0 is kept for it, got 7",
                [](Peer& peer) { peer.send(peer.header(wire::Kind::kTake, 0, 3, 1)); });
  check_refused("step: expected 3, which is kept, got 4", [](Peer& peer) {
    kept_by(peer, 0);
    peer.send(peer.header(wire::Kind::kTake, 0, 4, 1));
  });
  check_refused("incarnation: expected 77, got 78", [](Peer& peer) {
    wire::Header header = peer.header(wire::Kind::kKeep, 0, 3, 1);
    header.incarnation = 78;
    peer.send(header);
  });
  check_refused("flow: expected an agreed flow, got 1", [](Peer& peer) {
    wire::Header header = peer.header(wire::Kind::kKeep, 0, 3, 1);
    header.flow = 1;
    peer.send(header);
  });
  check_refused("partition: expected less than 2, got 2",
                [](Peer& peer) { peer.send(peer.header(wire::Kind::kKeep, 2, 3, 1)); });
  check_refused("step: expected 0 to 4611686018427387904, got -1",
                [](Peer& peer) { peer.send(peer.header(wire::Kind::kKeep, 0, -1, 1)); });
  check_refused("expected a slot below 4, got 4", [](Peer& peer) {
    peer.write(0, peer.header(wire::Kind::kKeep, 0, 0, 1), nullptr, 0, 4);
  });
  // A worker that does so is named as one.
  Peer worker(0);
  REQUIRE(worker.connect(*server));
  worker.send(worker.header(wire::Kind::kTake, 0, 0, 1));
  const ServerEvent event = expect_event(*server, ServerEvent::Kind::kViolation);
  CHECK(event.text.find("worker 0") != std::string::npos);
  CHECK(event.text.find("kind: expected 6, for nothing of flow 0 is kept") != std::string::npos);
}

TEST_CASE("a worker takes one version as followers do, among them, and of any flow") {
  for (const uint32_t held : {0u, 1u}) {
    const FlowSpec spec = dealt(3, 40, held);
    auto servers = make_servers(3, spec);
    auto worker = make_worker(servers, spec);
    auto follower = make_follower(0, servers, spec);
    for (auto& server : servers) publish(*server, 5);
    Pull theirs(*follower, spec, 0);
    CHECK(Pull(*worker, spec, 0).step() == 5);
    CHECK(theirs.step() == 5);
    CHECK(Pull(*worker, spec, 6, 30).wait().code() == Code::kDeadline);
    Pull newer(*worker, spec, 6);
    for (auto& server : servers) publish(*server, 6);
    CHECK(newer.step() == 6);
    CHECK(worker->stats().last_step == 6);
    worker->close();
    follower->close();
  }
}

TEST_CASE("random requests of followers never harm a server") {
  const FlowSpec spec = dealt(1, 3);
  auto server = make_servers(1, spec)[0];
  std::mt19937 random(11);
  int64_t step = 0;
  publish(*server, step);
  for (uint32_t number = 0; number < 60; ++number) {
    auto peer = raw_follower(*server, number);
    for (int i = 0; i < 8 && !peer->ended; ++i) {
      wire::Header header = peer->header(random() % 2 ? wire::Kind::kKeep : wire::Kind::kTake,
                                         random() % 3, random() % 2 ? step : 0, random() % 60);
      if (random() % 4 == 0) {
        // Not the address: where an answer goes in the follower's memory is its own affair.
        const size_t at = random() % offsetof(wire::Header, reply_address);
        reinterpret_cast<std::byte*>(&header)[at] ^= std::byte(1 + random() % 255);
      }
      const uint32_t slot = random() % peer->grant.slots;
      peer->write(slot, header, nullptr, 0, random() % 16 == 0 ? random() % 999 : slot);
      // Without a new value: a copy may just be made, for which an update would wait.
      if (random() % 3 == 0) REQUIRE(server->publish(0, ++step).ok());
      peer->pump();
    }
    if (random() % 2) peer->die();
    peer.reset();
    server->dismiss_follower(number, "the test goes on");
  }
  auto good = raw_follower(*server, 1000);
  CHECK(kept_by(*good, step).step == step);
}

TEST_CASE("a follower gets in only by its token, while it is admitted, and so many at a time") {
  const FlowSpec spec = dealt(1, 1);
  ServerOptions options = options_for(1);
  options.followers = 2;
  auto server = make_server(options);
  REQUIRE(server->add_flow(spec).ok());
  Peer stranger(wire::kFirstFollower + 5);
  CHECK(!stranger.connect(*server));
  CHECK(stranger.end_status.message().find("refuses follower 5") != std::string::npos);
  REQUIRE(server->admit_follower(5, kIncarnation, stranger.hello.token).ok());
  CHECK(server->admit_follower(5, kIncarnation, stranger.hello.token).code() ==
        Code::kInvalidArgument);
  CHECK(server->admit_follower(6, kIncarnation, {}).code() == Code::kInvalidArgument);
  Peer wrong(wire::kFirstFollower + 5);
  wrong.hello.token[0] ^= std::byte{1};
  CHECK(!wrong.connect(*server));
  Peer right(wire::kFirstFollower + 5);
  REQUIRE(right.connect(*server));
  REQUIRE(server->admit_follower(6, kIncarnation, stranger.hello.token).ok());
  const Status full = server->admit_follower(7, kIncarnation, stranger.hello.token);
  CHECK(full.code() == Code::kResource);
  CHECK(full.message().find("there are 2 already") != std::string::npos);
  server->dismiss_follower(5, "it was silent");
  right.wait([&] { return right.ended; });
  Peer again(wire::kFirstFollower + 5);
  CHECK(!again.connect(*server));
  CHECK(server->admit_follower(7, kIncarnation, stranger.hello.token).ok());
  expect_silence(*server);  // nobody else is concerned
}

TEST_CASE("closing a server ends its followers, and their wait") {
  const FlowSpec spec = dealt(1, 2);
  auto servers = make_servers(1, spec);
  auto follower = make_follower(0, servers, spec);
  publish(*servers[0], 0);
  CHECK(Pull(*follower, spec, 0).step() == 0);
  Pull newer(*follower, spec, 1);
  servers[0]->close();
  follower->fail(Status(Code::kPeerFailed, "the job is over"));
  CHECK(newer.wait().message() == "the job is over");
  follower->close();
}
