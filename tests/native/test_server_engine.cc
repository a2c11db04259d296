/* tests/native/test_server_engine.cc: the server's engine against peers that speak the fabric and
   the wire format by hand, so that they can also break the rules. */
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/reduce.h"
#include "engine/server.h"
#include "engine/wire.h"
#include "peer.h"

using namespace jaxrdma;
using namespace testing;

namespace {

/// Gradients of any type as the bytes that are pushed, and as the numbers they stand for.
struct Gradient {
  std::vector<std::byte> bytes;
  std::vector<double> values;
};
Gradient random_gradient(DType dtype, size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Gradient made;
  made.bytes.resize(n * dtype_bytes(dtype));
  for (size_t i = 0; i < n; ++i) {
    std::byte* at = made.bytes.data() + i * dtype_bytes(dtype);
    double value = normal(random);
    if (dtype == DType::kFloat64) {
      std::memcpy(at, &value, sizeof(value));
    } else {
      float single = static_cast<float>(value);
      if (dtype == DType::kFloat32) {
        std::memcpy(at, &single, sizeof(single));
      } else {
        narrow(dtype, &single, at, 1);
        widen(dtype, at, &single, 1);
      }
      value = single;
    }
    made.values.push_back(value);
  }
  return made;
}
std::vector<double> numbers(DType dtype, const std::byte* data, size_t n) {
  std::vector<double> values(n);
  for (size_t i = 0; i < n; ++i) {
    const std::byte* at = data + i * dtype_bytes(dtype);
    if (dtype == DType::kFloat64) {
      std::memcpy(&values[i], at, sizeof(double));
    } else {
      float single;
      if (dtype == DType::kFloat32) {
        std::memcpy(&single, at, sizeof(single));
      } else {
        widen(dtype, at, &single, 1);
      }
      values[i] = single;
    }
  }
  return values;
}
/// ((g0 + g1) + g2) / n, in the accumulator's type, rounded to `dtype` at the end.
std::vector<double> mean_in_order(DType dtype, const std::vector<Gradient>& gradients) {
  const size_t n = gradients[0].values.size();
  std::vector<double> means(n);
  for (size_t i = 0; i < n; ++i) {
    if (accumulator_dtype(dtype) == DType::kFloat64) {
      double sum = gradients[0].values[i];
      for (size_t w = 1; w < gradients.size(); ++w) sum += gradients[w].values[i];
      means[i] = sum / static_cast<double>(gradients.size());
      continue;
    }
    float sum = static_cast<float>(gradients[0].values[i]);
    for (size_t w = 1; w < gradients.size(); ++w) sum += static_cast<float>(gradients[w].values[i]);
    sum /= static_cast<float>(gradients.size());
    if (dtype != DType::kFloat32) {
      std::byte bits[2];
      narrow(dtype, &sum, bits, 1);
      widen(dtype, bits, &sum, 1);
    }
    means[i] = sum;
  }
  return means;
}
double unit_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 0x1p-52;
    case DType::kFloat32:
      return 0x1p-23;
    case DType::kFloat16:
      return 0x1p-10;
    case DType::kBFloat16:
      return 0x1p-7;
  }
  return 0;
}

constexpr DType kAllDtypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16,
                                DType::kBFloat16};

/// An update flow of one worker whose parameters have been published at step 0.
struct UpdateJob {
  explicit UpdateJob(uint32_t workers, size_t partitions = 1, size_t elements = 16,
                     uint32_t held = 0, uint32_t receive_depth = 4096)
      : server(make_server(options_for(workers))) {
    FlowSpec spec = flow_of(FlowMode::kUpdate, DType::kFloat32, partitions, elements);
    spec.held = held;
    REQUIRE(server->add_flow(spec).ok());
    for (uint32_t worker = 0; worker < workers; ++worker) {
      peers.push_back(std::make_unique<Peer>(worker, 1 << 16, 64, receive_depth));
      REQUIRE(peers.back()->connect(*server));
    }
    for (uint32_t i = 0; i < partitions; ++i) {
      wire::Header header = peers[0]->header(wire::Kind::kInit, i, 0, i);
      header.bytes = elements * sizeof(float);
      peers[0]->send(header, floats(elements, 5.0f).data());
    }
    expect_event(*server, ServerEvent::Kind::kInitialised);
    REQUIRE(server->publish(0, 0).ok());
    for (uint32_t i = 0; i < partitions; ++i) peers[0]->answer();
  }
  std::shared_ptr<ServerEngine> server;
  std::vector<std::unique_ptr<Peer>> peers;
};

}  // namespace

// --- Means.

TEST_CASE("a mean goes back to every worker, right for every type and number of workers") {
  for (const bool ordered : {false, true}) {
    for (const DType dtype : kAllDtypes) {
      for (const uint32_t workers : {1u, 2u, 3u}) {
        CAPTURE(ordered);
        CAPTURE(dtype_name(dtype));
        CAPTURE(workers);
        ServerOptions options = options_for(workers);
        options.ordered = ordered;
        auto server = make_server(options);
        const size_t n = 1001;  // no multiple of anything
        REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, dtype, 2, n)).ok());
        std::vector<std::unique_ptr<Peer>> peers;
        for (uint32_t worker = 0; worker < workers; ++worker) {
          peers.push_back(std::make_unique<Peer>(worker));
          REQUIRE(peers.back()->connect(*server));
        }
        for (int64_t step = 4; step < 7; ++step) {
          for (uint32_t partition = 0; partition < 2; ++partition) {
            std::vector<Gradient> gradients;
            for (uint32_t worker = 0; worker < workers; ++worker) {
              gradients.push_back(random_gradient(
                  dtype, n, static_cast<uint32_t>(step) * 100 + partition * 10 + worker));
            }
            // The last worker first: in replica order it has to wait.
            for (uint32_t worker = workers; worker-- > 0;) {
              peers[worker]->push(partition, step, partition, gradients[worker].bytes, dtype);
              wait_stats(*server, [&](const ServerStats& stats) {
                const uint64_t pushes = static_cast<uint64_t>(step - 4) * 2 * workers +
                                        partition * workers + (workers - worker);
                return stats.bytes_pushed == pushes * gradients[0].bytes.size();
              });
            }
            const std::vector<double> exact = mean_in_order(dtype, gradients);
            for (auto& peer : peers) {
              peer->expect(wire::Answer::kResult, partition);
              const std::vector<double> got = numbers(dtype, peer->result(partition), n);
              if (ordered || workers < 3) {  // a sum of two does not depend on the order
                CHECK(got == exact);
              }
              double worst = 0;
              for (size_t i = 0; i < n; ++i) {
                double mean = 0;
                double size = 0;
                for (const Gradient& each : gradients) {
                  mean += each.values[i] / workers;
                  size += std::abs(each.values[i]);
                }
                worst = std::max(worst, std::abs(got[i] - mean) / (size * unit_of(dtype)));
              }
              CHECK(worst <= 2);
            }
          }
        }
        const ServerStats stats = server->stats();
        CHECK(stats.steps == 3);
        CHECK(stats.accepted == std::vector<uint64_t>(workers, 3));
        CHECK(stats.duplicates == 0);
        expect_silence(*server);
      }
    }
  }
}

TEST_CASE("partitions large enough for the reducing threads come back right, one after the other") {
  const uint32_t workers = 3;
  ServerOptions options = options_for(workers);
  options.partition_bytes = 1 << 20;
  options.ordered = true;
  auto server = make_server(options);
  const size_t n = (1 << 18) - 3;
  const size_t partitions = 3;
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, partitions, n)).ok());
  std::vector<std::unique_ptr<Peer>> peers;
  for (uint32_t worker = 0; worker < workers; ++worker) {
    peers.push_back(std::make_unique<Peer>(worker, 1 << 20, partitions));
    REQUIRE(peers.back()->connect(*server));
  }
  for (int64_t step = 0; step < 2; ++step) {
    std::vector<std::vector<Gradient>> gradients(partitions);
    for (uint32_t partition = 0; partition < partitions; ++partition) {
      for (uint32_t worker = 0; worker < workers; ++worker) {
        gradients[partition].push_back(random_gradient(DType::kFloat32, n, partition * 8 + worker));
        peers[worker]->push(partition, step, partition, gradients[partition].back().bytes);
        for (auto& peer : peers) peer->pump();
      }
    }
    for (size_t i = 0; i < partitions; ++i) {
      for (auto& peer : peers) peer->answer();
    }
    for (uint32_t partition = 0; partition < partitions; ++partition) {
      const std::vector<double> exact = mean_in_order(DType::kFloat32, gradients[partition]);
      for (auto& peer : peers) {
        CHECK(numbers(DType::kFloat32, peer->result(partition), n) == exact);
      }
    }
  }
}

TEST_CASE("more partitions than slots go through, for one worker and for two") {
  for (const uint32_t workers : {1u, 2u}) {
    ServerOptions options = options_for(workers);
    options.slots_per_worker = 2;
    auto server = make_server(options);
    const uint32_t partitions = 50;
    REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, partitions, 10)).ok());
    std::vector<std::unique_ptr<Peer>> peers;
    for (uint32_t worker = 0; worker < workers; ++worker) {
      peers.push_back(std::make_unique<Peer>(worker));
      REQUIRE(peers.back()->connect(*server));
    }
    for (uint32_t i = 0; i < partitions; ++i) {
      for (auto& peer : peers)
        peer->push(i, 0, i, floats(10, static_cast<float>(i + peer->worker)));
    }
    for (uint32_t i = 0; i < partitions; ++i) {
      for (auto& peer : peers) peer->answer();
    }
    for (uint32_t i = 0; i < partitions; ++i) {
      const float mean = static_cast<float>(i) + (workers == 2 ? 0.5f : 0.0f);
      for (auto& peer : peers) CHECK(peer->result_as<float>(i, 10) == floats(10, mean));
    }
    // Every slot came back, and none twice.
    for (auto& peer : peers) {
      peer->wait([&] { return peer->free_slots.size() >= 2; });
      CHECK(peer->free_slots.size() == 2);
    }
  }
}

TEST_CASE("answers wait for the fabric's credits, and none is lost") {
  auto server = make_server(options_for(1));
  const uint32_t partitions = 20;
  REQUIRE(server->add_flow(flow_of(FlowMode::kUpdate, DType::kFloat32, partitions, 10)).ok());
  Peer peer(0, 1 << 16, 64, /*receive_depth=*/3);
  REQUIRE(peer.connect(*server));
  for (uint32_t i = 0; i < partitions; ++i) {
    wire::Header header = peer.header(wire::Kind::kInit, i, 0, i);
    header.bytes = 40;
    peer.send(header, floats(10, static_cast<float>(i)).data());
  }
  peer.wait([&] { return peer.free_slots.size() == 4; });
  expect_event(*server, ServerEvent::Kind::kInitialised);
  peer.hold_releases = true;
  REQUIRE(server->publish(0, 0).ok());
  const uint32_t most = 3 * testing::links();  // may be on their way
  peer.wait([&] { return peer.held == most; });
  const auto until = Clock::now() + std::chrono::milliseconds(20);
  while (Clock::now() < until) peer.pump();
  CHECK(peer.held == most);
  peer.hold_releases = false;
  peer.release(peer.held);
  std::set<fabric::Immediate> answers;  // over several devices they come in any order
  for (uint32_t i = 0; i < partitions; ++i) answers.insert(peer.answer());
  for (uint32_t i = 0; i < partitions; ++i) {
    CHECK(answers.contains(wire::answer(wire::Answer::kResult, i)));
    CHECK(peer.result_as<float>(i, 10) == floats(10, static_cast<float>(i)));
  }
}

TEST_CASE("a mean that is still being sent is not overwritten by the next step") {
  ServerOptions options = options_for(2);
  options.partition_bytes = 16 << 20;  // more than the sockets between them hold
  options.slots_per_worker = 1;
  auto server = make_server(options);
  const size_t n = 4 << 20;
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, n)).ok());
  Peer quick(0, options.partition_bytes, 2);
  Peer slow(1, options.partition_bytes, 2);
  REQUIRE(quick.connect(*server));
  REQUIRE(slow.connect(*server));
  slow.push(0, 0, 0, floats(n, 1.0f));
  wait_stats(*server, [&](const ServerStats& stats) {
    if (stats.bytes_pushed == 0) slow.pump();
    return stats.bytes_pushed > 0;
  });
  quick.push(0, 0, 0, floats(n, 3.0f));
  quick.expect(wire::Answer::kResult, 0);
  quick.push(0, 1, 1, floats(n, 100.0f));
  wait_stats(*server, [&](const ServerStats& stats) {
    quick.pump();
    return stats.bytes_pushed == 3 * n * sizeof(float);
  });
  CHECK(quick.free_slots.empty());  // it waits for the slow one to have read the mean
  slow.expect(wire::Answer::kResult, 0);
  CHECK(slow.result_as<float>(0, n) == floats(n, 2.0f));
  quick.wait([&] { return !quick.free_slots.empty(); });
}

TEST_CASE(
    "a partition pushed twice in a step is counted and summed once, and the later address is "
    "answered") {
  auto server = make_server(options_for(2));
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8)).ok());
  Peer first(0);
  Peer second(1);
  REQUIRE(first.connect(*server));
  REQUIRE(second.connect(*server));
  first.push(0, 0, 1, floats(8, 1.0f));
  wait_stats(*server, [](const ServerStats& stats) { return stats.bytes_pushed > 0; });
  first.push(0, 0, 2, floats(8, 100.0f));
  wait_stats(*server, [](const ServerStats& stats) { return stats.duplicates == 1; });
  second.push(0, 0, 3, floats(8, 2.0f));
  second.expect(wire::Answer::kResult, 3);
  first.expect(wire::Answer::kResult, 2);
  CHECK(first.result_as<float>(2, 8) == floats(8, 1.5f));
  CHECK(first.result_as<float>(1, 8) == floats(8, 0.0f));
  first.wait([&] { return first.free_slots.size() == 4; });
  CHECK(first.answers.empty());
}

TEST_CASE("an answer brings its slot back where that became free with it") {
  for (const uint32_t workers : {1u, 2u}) {
    CAPTURE(workers);
    auto server = make_server(options_for(workers));
    REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8)).ok());
    Peer early(0);
    Peer late(workers - 1);
    if (workers == 2) {
      REQUIRE(early.connect(*server));
      early.push(0, 0, 1, floats(8, 1.0f));
      early.wait([&] { return early.free_slots.size() == 4; });  // it may push more already
    }
    REQUIRE(late.connect(*server));
    for (int64_t step = 0; step < 2; ++step) {
      if (workers == 2 && step == 1) break;
      late.push(0, step, 7, floats(8, 1.0f));
      late.expect(wire::Answer::kResult, 7);
      CHECK(late.free_slots.size() == 4);
      CHECK(late.messages == step + 1);
    }
    if (workers == 2) early.expect(wire::Answer::kResult, 1);
    CHECK(early.messages == (workers == 2 ? 2 : 0));
  }
}

TEST_CASE("a stale gradient is counted, not applied, and its worker is told") {
  auto server = make_server(options_for(1));
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8)).ok());
  Peer peer(0);
  REQUIRE(peer.connect(*server));
  peer.push(0, 5, 1, floats(8, 1.0f));
  peer.expect(wire::Answer::kResult, 1);
  peer.push(0, 5, 2, floats(8, 9.0f));
  peer.expect(wire::Answer::kStale, 2);
  peer.push(0, 4, 3, floats(8, 9.0f));
  peer.expect(wire::Answer::kStale, 3);
  const ServerStats stats = server->stats();
  CHECK(stats.dropped == std::vector<uint64_t>{2});
  CHECK(stats.accepted == std::vector<uint64_t>{1});
  peer.wait([&] { return peer.free_slots.size() == 4; });
}

TEST_CASE("a gradient ahead of its step is sent back") {
  auto server = make_server(options_for(2));
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8)).ok());
  Peer first(0);
  Peer second(1);
  REQUIRE(first.connect(*server));
  REQUIRE(second.connect(*server));
  first.push(0, 0, 1, floats(8, 1.0f));
  wait_stats(*server, [](const ServerStats& stats) { return stats.bytes_pushed > 0; });
  second.push(0, 1, 2, floats(8, 1.0f));
  second.expect(wire::Answer::kAhead, 2);
  second.push(0, 0, 3, floats(8, 3.0f));
  second.expect(wire::Answer::kResult, 3);
  first.expect(wire::Answer::kResult, 1);
  CHECK(first.result_as<float>(1, 8) == floats(8, 2.0f));
}

// --- Updates.

TEST_CASE("the chief's parameters come back to it and to all who asked, once published") {
  auto server = make_server(options_for(2));
  FlowSpec spec = flow_of(FlowMode::kUpdate, DType::kBFloat16, 2, 8);
  REQUIRE(server->add_flow(spec).ok());
  Peer chief(0);
  Peer other(1);
  REQUIRE(chief.connect(*server));
  REQUIRE(other.connect(*server));
  for (uint32_t i = 0; i < 2; ++i) other.send(other.header(wire::Kind::kPull, i, 0, i));
  const std::vector<uint16_t> twos(8, 0x4000);
  for (uint32_t i = 0; i < 2; ++i) {
    wire::Header header = chief.header(wire::Kind::kInit, i, 7, i);
    header.dtype = static_cast<uint8_t>(DType::kBFloat16);
    header.bytes = 16;
    chief.send(header, twos.data());
  }
  const ServerEvent event = expect_event(*server, ServerEvent::Kind::kInitialised);
  CHECK(event.flow == 0);
  CHECK(event.step == 7);
  CHECK(other.answers.empty());
  const LeafShard shard = server->parameters(0, 0).value();
  CHECK(shard.elements == 16);
  CHECK(shard.dtype == DType::kBFloat16);
  CHECK(std::memcmp(shard.data, twos.data(), 16) == 0);
  REQUIRE(server->publish(0, 7).ok());
  for (Peer* peer : {&chief, &other}) {
    for (uint32_t i = 0; i < 2; ++i) {
      peer->expect(wire::Answer::kResult, i);
      CHECK(peer->result_as<uint16_t>(i, 8) == twos);
    }
  }
  // And a pull that comes later is answered at once.
  other.send(other.header(wire::Kind::kPull, 1, 3, 9));
  other.expect(wire::Answer::kResult, 9);
  CHECK(other.result_as<uint16_t>(9, 8) == twos);
}

TEST_CASE("an update sees the mean of gradients of mixed types, and its parameters go back") {
  UpdateJob job(3, /*partitions=*/2);
  for (uint32_t i = 0; i < 2; ++i) {
    job.peers[0]->push(i, 0, i, floats(16, 1.0f));
    job.peers[1]->push(i, 0, i, std::vector<uint16_t>(16, 0x4000), DType::kFloat16);   // 2
    job.peers[2]->push(i, 0, i, std::vector<uint16_t>(16, 0x40c0), DType::kBFloat16);  // 6
  }
  CHECK(expect_event(*job.server, ServerEvent::Kind::kStepReady).step == 0);
  const LeafShard mean = job.server->gradient(0, 0).value();
  CHECK(mean.dtype == DType::kFloat32);
  CHECK(mean.elements == 32);
  CHECK(numbers(mean.dtype, mean.data, 32) == std::vector<double>(32, 3.0));
  const LeafShard shard = job.server->parameters(0, 0).value();
  CHECK(numbers(shard.dtype, shard.data, 32) == std::vector<double>(32, 5.0));
  // A pull amid the update gets what the update makes.
  job.peers[0]->send(job.peers[0]->header(wire::Kind::kPull, 0, 0, 5));
  job.peers[0]->wait([&] { return job.peers[0]->free_slots.size() == 4; });
  CHECK(job.peers[0]->answers.empty());
  const std::vector<float> updated = floats(32, 4.5f);
  std::memcpy(shard.data, updated.data(), 32 * sizeof(float));
  REQUIRE(job.server->publish(0, 1).ok());
  for (auto& peer : job.peers) {
    for (int i = 0; i < (peer->worker == 0 ? 3 : 2); ++i) {
      CHECK(wire::answer_kind(peer->answer()) == wire::Answer::kResult);
    }
    for (uint32_t i = 0; i < 2; ++i) CHECK(peer->result_as<float>(i, 16) == floats(16, 4.5f));
  }
  CHECK(job.peers[0]->result_as<float>(5, 16) == floats(16, 4.5f));
  const ServerStats stats = job.server->stats();
  CHECK(stats.steps == 1);
  CHECK(stats.accepted == std::vector<uint64_t>{1, 1, 1});
}

TEST_CASE("a step is ready only when every partition is") {
  UpdateJob job(2, /*partitions=*/2);
  job.peers[0]->push(0, 0, 0, floats(16, 1.0f));
  job.peers[1]->push(0, 0, 0, floats(16, 3.0f));
  job.peers[0]->push(1, 0, 1, floats(16, 1.0f));
  wait_stats(*job.server,
             [](const ServerStats& stats) { return stats.bytes_pushed == (2 + 3) * 64; });
  expect_silence(*job.server);
  job.peers[1]->push(1, 0, 1, floats(16, 3.0f));
  expect_event(*job.server, ServerEvent::Kind::kStepReady);
  // A gradient of the step in the making is a duplicate; of the next one, too early.
  job.peers[1]->push(1, 0, 1, floats(16, 3.0f));
  wait_stats(*job.server, [](const ServerStats& stats) { return stats.duplicates == 1; });
  job.peers[1]->push(1, 1, 2, floats(16, 3.0f));
  job.peers[1]->expect(wire::Answer::kAhead, 2);
  REQUIRE(job.server->publish(0, 1).ok());
  for (auto& peer : job.peers) {
    for (int i = 0; i < 2; ++i) CHECK(wire::answer_kind(peer->answer()) == wire::Answer::kResult);
  }
}

TEST_CASE("parameters can be published without a chief, from a checkpoint") {
  auto server = make_server(options_for(1));
  REQUIRE(server->add_flow(flow_of(FlowMode::kUpdate, DType::kFloat32, 1, 8)).ok());
  const LeafShard shard = server->parameters(0, 0).value();
  std::memcpy(shard.data, floats(8, 2.5f).data(), 32);
  REQUIRE(server->publish(0, 40).ok());
  Peer peer(0);
  REQUIRE(peer.connect(*server));
  peer.send(peer.header(wire::Kind::kPull, 0, 40, 1));
  peer.expect(wire::Answer::kResult, 1);
  CHECK(peer.result_as<float>(1, 8) == floats(8, 2.5f));
}

TEST_CASE("what cannot be published or read is refused with the reason") {
  UpdateJob job(2);
  CHECK(job.server->publish(0, 0).message().find("has reached step 0") != std::string::npos);
  CHECK(job.server->publish(9, 1).code() == Code::kInvalidArgument);
  job.peers[0]->push(0, 0, 0, floats(16, 1.0f));
  wait_stats(*job.server, [](const ServerStats& stats) { return stats.bytes_pushed == 2 * 64; });
  CHECK(job.server->publish(0, 1).message().find("still landing") != std::string::npos);
  CHECK(job.server->gradient(0, 1).status().code() == Code::kInvalidArgument);
  CHECK(job.server->add_flow(flow_of(FlowMode::kUpdate, DType::kFloat32, 1, 8))
            .message()
            .find("already") != std::string::npos);
  CHECK(!job.server->add_flow(flow_of(FlowMode::kUpdate, DType::kFloat32, 1, 1 << 20)).ok());
  FlowSpec mean = flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8);
  mean.id = 1;
  REQUIRE(job.server->add_flow(mean).ok());
  CHECK(job.server->gradient(1, 0).status().message().find("averages") != std::string::npos);
}

TEST_CASE("a server that holds nothing of a flow works beside it") {
  ServerOptions options = options_for(1);
  options.servers = 2;
  auto server = make_server(options);
  FlowSpec empty = flow_of(FlowMode::kUpdate, DType::kFloat32, 1, 8);
  empty.partitions[0].server = 1;
  REQUIRE(server->add_flow(empty).ok());
  CHECK(server->parameters(0, 0).value().elements == 0);
  CHECK(server->publish(0, 0).ok());
  FlowSpec spec = flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8);
  spec.id = 1;
  REQUIRE(server->add_flow(spec).ok());
  Peer peer(0);
  REQUIRE(peer.connect(*server));
  wire::Header header = peer.push_header(0, 0, 1, floats(8, 1.0f));
  header.flow = 1;
  peer.send(header, floats(8, 1.0f).data());
  peer.expect(wire::Answer::kResult, 1);
  server->mark_left(0);
  expect_silence(*server);
}

// --- Who may speak, and how.

TEST_CASE("nobody gets in who was not admitted as he says he is") {
  auto server = make_server(options_for(1));
  uint64_t refused = 0;
  const auto check_refused = [&](auto change, const std::string& because) {
    Peer peer(0);
    change(peer.hello);
    CHECK_FALSE(peer.connect(*server));
    CAPTURE(peer.end_status.message());
    CHECK(peer.end_status.message().find(because) != std::string::npos);
    CHECK(server->stats().refused == ++refused);
  };
  check_refused([](fabric::Hello& hello) { hello.token[15] = std::byte{0}; }, "not admitted");
  check_refused([](fabric::Hello& hello) { hello.incarnation = 76; }, "not admitted");
  check_refused([](fabric::Hello& hello) { hello.worker = 1; }, "the job has 1 workers");
  check_refused([](fabric::Hello& hello) { hello.job = "another"; }, "another job");
  check_refused([](fabric::Hello& hello) { ++hello.protocol_version; },
                "speaks protocol " + std::to_string(wire::kProtocolVersion + 1));
  Peer peer(0);
  CHECK(peer.connect(*server));
  CHECK(server->admit(1, 1, token_of(1)).code() == Code::kInvalidArgument);
  CHECK(server->admit(0, 1, {}).code() == Code::kInvalidArgument);
}

TEST_CASE("a newer incarnation takes the place of the older") {
  auto server = make_server(options_for(1));
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8)).ok());
  Peer old(0);
  REQUIRE(old.connect(*server));
  REQUIRE(server->admit(0, kIncarnation + 1, token_of(5)).ok());
  old.wait([&] { return old.ended; });
  Peer older(0);
  CHECK_FALSE(older.connect(*server));
  Peer fresh(0);
  fresh.hello.incarnation = kIncarnation + 1;
  fresh.hello.token = token_of(5);
  REQUIRE(fresh.connect(*server));
  fresh.push(0, 0, 1, floats(8, 1.0f));
  fresh.expect(wire::Answer::kResult, 1);
  expect_silence(*server);
}

TEST_CASE("a worker that connects again and repeats its push is answered at its new address") {
  auto server = make_server(options_for(2));
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8)).ok());
  Peer other(1);
  REQUIRE(other.connect(*server));
  auto first = std::make_unique<Peer>(0);
  REQUIRE(first->connect(*server));
  first->push(0, 0, 1, floats(8, 1.0f));
  wait_stats(*server, [](const ServerStats& stats) { return stats.bytes_pushed > 0; });
  first->die();
  expect_event(*server, ServerEvent::Kind::kWorkerLost);
  Peer again(0);
  REQUIRE(again.connect(*server));
  again.push(0, 0, 2, floats(8, 1.0f));
  wait_stats(*server, [](const ServerStats& stats) { return stats.duplicates == 1; });
  other.push(0, 0, 3, floats(8, 2.0f));
  again.expect(wire::Answer::kResult, 2);
  other.expect(wire::Answer::kResult, 3);
  CHECK(again.result_as<float>(2, 8) == floats(8, 1.5f));
  expect_silence(*server);
}

TEST_CASE("a copy of the hello of somebody who is connected is refused, and disturbs nobody") {
  auto server = make_server(options_for(1));
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8)).ok());
  Peer peer(0);
  REQUIRE(peer.connect(*server));
  for (uint64_t copies = 1; copies <= 3; ++copies) {
    Peer copy(0);
    CHECK_FALSE(copy.connect(*server));
    CHECK(copy.end_status.message().find("connected already") != std::string::npos);
    CHECK(server->stats().refused == copies);
  }
  peer.push(0, 0, 1, floats(8, 1.0f));
  peer.expect(wire::Answer::kResult, 1);
  expect_silence(*server);
}

TEST_CASE("verbs: a copy of a hello is refused while its owner is being connected" *
          doctest::skip(testing::transport() != "verbs")) {
  auto server = make_server(options_for(1));
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8)).ok());
  Peer owner(0), copy(0);
  owner.say_hello(*server);
  copy.begin_connect(server->address());
  wait_stats(*server, [&](const ServerStats& stats) {
    copy.pump();
    return stats.refused > 1;  // and asked again
  });
  CHECK(!copy.ended);
  owner.wait([&] { return owner.connected || owner.ended; });
  REQUIRE(owner.connected);
  copy.wait([&] { return copy.connected || copy.ended; });
  CHECK(!copy.connected);
  CHECK(copy.end_status.message().find("connected already") != std::string::npos);
  owner.push(0, 0, 1, floats(8, 1.0f));
  owner.expect(wire::Answer::kResult, 1);
  expect_silence(*server);
}

TEST_CASE("verbs: a worker whose connection broke amid its making gets in once that is known" *
          doctest::skip(testing::transport() != "verbs")) {
  auto server = make_server(options_for(1));
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8)).ok());
  Peer broken(0), again(0);
  broken.say_hello(*server);
  again.begin_connect(server->address());
  wait_stats(*server, [&](const ServerStats& stats) {
    again.pump();
    return stats.refused > 0;
  });
  broken.die();
  again.wait([&] { return again.connected || again.ended; });
  REQUIRE_MESSAGE(again.connected, again.end_status.message());
  again.push(0, 0, 1, floats(8, 1.0f));
  again.expect(wire::Answer::kResult, 1);
  expect_silence(*server);
}

TEST_CASE("pulls that wait for a step that does not come are bounded") {
  auto server = make_server(options_for(1));
  REQUIRE(server->add_flow(flow_of(FlowMode::kUpdate, DType::kFloat32, 1, 8)).ok());
  Peer peer(0);
  REQUIRE(peer.connect(*server));
  for (int i = 0; i < 1024; ++i) peer.send(peer.header(wire::Kind::kPull, 0, 5, 1));
  expect_silence(*server);
  peer.send(peer.header(wire::Kind::kPull, 0, 5, 1));
  const ServerEvent event = expect_event(*server, ServerEvent::Kind::kViolation);
  CHECK(event.text.find("at most 1024 that wait for partition 0") != std::string::npos);
  peer.wait([&] { return peer.ended; });
}

TEST_CASE("answers to a worker that does not take them are bounded") {
  auto server = make_server(options_for(1));
  REQUIRE(server->add_flow(flow_of(FlowMode::kUpdate, DType::kFloat32, 1, 8)).ok());
  REQUIRE(server->publish(0, 0).ok());
  Peer peer(0, 1 << 16, 64, /*receive_depth=*/2);
  peer.hold_releases = true;
  REQUIRE(peer.connect(*server));
  ServerEvent event;
  for (uint64_t asked = 1; asked < 4000 && event.kind == ServerEvent::Kind::kNone; ++asked) {
    const uint32_t slot = asked % 4;
    peer.write(slot, peer.header(wire::Kind::kPull, 0, 0, 1), nullptr, 0, slot);
    peer.pump();
    // It is not told when a slot is free again, but can know.
    wait_stats(*server, [&](const ServerStats& stats) {
      event = server->wait_event(0);
      return stats.bytes_pulled == 32 * asked || event.kind != ServerEvent::Kind::kNone;
    });
  }
  CAPTURE(event.text);
  REQUIRE(event.kind == ServerEvent::Kind::kViolation);
  CHECK(event.text.find("expected it to take its answers") != std::string::npos);
  peer.wait([&] { return peer.ended; });
}

TEST_CASE("whoever breaks the protocol is named and disconnected, and the others go on") {
  auto server = make_server([] {
    ServerOptions options = options_for(2);
    options.servers = 2;
    return options;
  }());
  FlowSpec update = flow_of(FlowMode::kUpdate, DType::kFloat32, 2, 8);
  update.partitions[1].server = 1;
  REQUIRE(server->add_flow(update).ok());
  FlowSpec average = flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8);
  average.id = 1;
  REQUIRE(server->add_flow(average).ok());
  Peer witness(0);
  REQUIRE(witness.connect(*server));

  const std::vector<float> values = floats(64, 1.0f);
  const auto check_violation = [&](const std::string& because, auto misbehave) {
    Peer peer(1);
    REQUIRE(peer.connect(*server));
    misbehave(peer);
    const ServerEvent event = expect_event(*server, ServerEvent::Kind::kViolation);
    CAPTURE(event.text);
    CHECK(event.worker == 1);
    CHECK(event.text.find("worker 1 (127.0.0.1:") != std::string::npos);
    CHECK(event.text.find(because) != std::string::npos);
    peer.wait([&] { return peer.ended; });
    // Gone without a further word, and the next connection is as good as any.
    expect_silence(*server);
  };
  const auto check_header = [&](const std::string& because, auto change) {
    check_violation(because, [&](Peer& peer) {
      wire::Header header = peer.push_header(0, 0, 1, floats(8, 1.0f));
      change(header);
      peer.write(0, header, values.data(), 32, 0);
    });
  };
  check_header("magic", [](wire::Header& header) { header.magic = 1; });
  check_header("kind: expected 1 to 9, got 0",
               [](wire::Header& header) { header.kind = wire::Kind{0}; });
  check_header("kind: expected 1 to 9, got 200",
               [](wire::Header& header) { header.kind = wire::Kind{200}; });
  check_header("incarnation: expected 77, got 78",
               [](wire::Header& header) { header.incarnation = 78; });
  check_header("flow: expected an agreed flow, got 2",
               [](wire::Header& header) { header.flow = 2; });
  check_header("flow: expected an agreed flow, got 65535",
               [](wire::Header& header) { header.flow = 65535; });
  check_header("partition: expected less than 2",
               [](wire::Header& header) { header.partition = 2; });
  check_header("got 1 of server 1", [](wire::Header& header) { header.partition = 1; });
  check_header("dtype: expected 0 to 3, got 4", [](wire::Header& header) { header.dtype = 4; });
  check_header("one that is summed in float32, got float64",
               [](wire::Header& header) { header.dtype = static_cast<uint8_t>(DType::kFloat64); });
  check_header("bytes: expected 32, got 36", [](wire::Header& header) { header.bytes = 36; });
  check_header("bytes: expected 16, got 32",
               [](wire::Header& header) { header.dtype = static_cast<uint8_t>(DType::kBFloat16); });
  check_header("step: expected 0 to ", [](wire::Header& header) { header.step = -1; });
  check_header("step: expected 0 to ", [](wire::Header& header) { header.step = INT64_MAX; });
  check_header("reply_tag", [](wire::Header& header) { header.reply_tag = 1 << 24; });
  check_header("bytes: expected 0", [](wire::Header& header) { header.kind = wire::Kind::kPull; });
  check_header("init from worker 0 alone",
               [](wire::Header& header) { header.kind = wire::Kind::kInit; });
  check_header("dtype: expected float32, got float16", [](wire::Header& header) {
    header.flow = 1;
    header.dtype = static_cast<uint8_t>(DType::kFloat16);
  });
  check_header("servers hold no parameters", [](wire::Header& header) {
    header.flow = 1;
    header.kind = wire::Kind::kInit;
  });
  check_violation("expected 32 after the header, got 28", [&](Peer& peer) {
    peer.write(0, peer.push_header(0, 0, 1, floats(8, 1.0f)), values.data(), 28, 0);
  });
  check_violation("expected a slot below 4, got 4", [&](Peer& peer) {
    peer.write(0, peer.push_header(0, 0, 1, floats(8, 1.0f)), values.data(), 32, 4);
  });
  check_violation("expected a header of 64 bytes, got 63", [&](Peer& peer) {
    const std::vector<std::byte> some(63);
    peer.write_raw(0, some, 0);
    peer.wait([&] { return peer.ended; });
  });
  // The chief may initialise only once.
  wire::Header init = witness.header(wire::Kind::kInit, 0, 0, 1);
  init.bytes = 32;
  witness.send(init, values.data());
  expect_event(*server, ServerEvent::Kind::kInitialised);
  REQUIRE(server->publish(0, 0).ok());
  witness.expect(wire::Answer::kResult, 1);
  CHECK(witness.result_as<float>(1, 8) == floats(8, 1.0f));
  witness.send(init, values.data());
  CHECK(expect_event(*server, ServerEvent::Kind::kViolation).text.find("another of partition 0") !=
        std::string::npos);
}

// --- Gradients that are held.

/// Two peers of a flow that holds one gradient of each; its parameters are all 5, at step 0.
struct HoldingJob : UpdateJob {
  static constexpr uint32_t kPartitions = 20;
  explicit HoldingJob(uint32_t receive_depth = 4096)
      : UpdateJob(2, kPartitions, 16, /*held=*/1, receive_depth) {}

  /// A whole gradient whose answers have tags from `tag` on; the verdict's comes last.
  GradientId push(Peer& peer, int64_t step, uint32_t tag, float value) {
    for (uint32_t i = 0; i < kPartitions; ++i) peer.push(i, step, tag + i, floats(16, value));
    peer.send(peer.header(wire::Kind::kVerdict, 0, step, tag + kPartitions));
    return expect_event(*server, ServerEvent::Kind::kGradient).gradient;
  }
  void step(const GradientId& of, int64_t step, float parameters) {
    REQUIRE(server->aggregate(0, step, {of}).ok());
    REQUIRE(server->answer(0, of, step + 1, true).ok());
    expect_event(*server, ServerEvent::Kind::kStepReady);
    auto* values = reinterpret_cast<float*>(server->parameters(0, 0).value().data);
    std::fill_n(values, kPartitions * 16, parameters);
    REQUIRE(server->publish(0, step + 1).ok());
  }
  void check_answers(Peer& peer, int64_t step, uint32_t tag, float parameters) {
    for (uint32_t i = 0; i <= kPartitions; ++i) peer.answer();
    for (uint32_t i = 0; i < kPartitions; ++i)
      CHECK(peer.result_as<float>(tag + i, 16) == floats(16, parameters));
    const auto verdict = peer.result_as<wire::Verdict>(tag + kPartitions, 1).front();
    CHECK(verdict.step == step);
    CHECK(verdict.accepted == 1);
  }
};

TEST_CASE("held: who reads slowly gets the version it was promised, and delays no update") {
  HoldingJob job(/*receive_depth=*/6);
  Peer& slow = *job.peers[1];
  const GradientId first = job.push(slow, 0, 30, 1.0f);
  slow.wait([&] { return slow.free_slots.size() == 4; });
  slow.hold_releases = true;
  job.step(first, 0, 10.0f);
  for (int64_t step = 1; step < 6; ++step) {
    job.step(job.push(*job.peers[0], step, 0, 1.0f), step, 10.0f + static_cast<float>(step));
    job.check_answers(*job.peers[0], step + 1, 0, 10.0f + static_cast<float>(step));
  }
  CHECK(slow.answers.size() < HoldingJob::kPartitions);
  slow.hold_releases = false;
  slow.release(slow.held);
  job.check_answers(slow, 1, 30, 10.0f);
  // And it may push again.
  job.step(job.push(slow, 1, 30, 1.0f), 6, 20.0f);
  job.check_answers(slow, 7, 30, 20.0f);
}

TEST_CASE("held: whoever pushes what cannot be is named and disconnected, and the others go on") {
  HoldingJob job;
  const auto check_violation = [&](const std::string& because, auto misbehave) {
    Peer peer(1);
    REQUIRE(peer.connect(*job.server));
    misbehave(peer);
    const ServerEvent event = expect_event(*job.server, ServerEvent::Kind::kViolation);
    CAPTURE(event.text);
    CHECK(event.text.find("worker 1 (127.0.0.1:") != std::string::npos);
    CHECK(event.text.find(because) != std::string::npos);
    peer.wait([&] { return peer.ended; });
  };
  job.peers.pop_back();
  expect_event(*job.server, ServerEvent::Kind::kWorkerLost);
  check_violation("step: expected 0 as in the rest of this gradient, got 1", [](Peer& peer) {
    peer.push(0, 0, 0, floats(16, 1.0f));
    peer.push(1, 1, 1, floats(16, 1.0f));
  });
  check_violation("step: expected at most 0, the version of the parameters, got 1",
                  [](Peer& peer) { peer.push(0, 1, 0, floats(16, 1.0f)); });
  check_violation("bytes: expected 0, got 64", [](Peer& peer) {
    wire::Header header = peer.header(wire::Kind::kVerdict, 0, 0, 0);
    header.bytes = 64;
    peer.send(header, floats(16, 1.0f).data());
  });
  // As many as both workers may have.
  check_violation("has 2 gradients here that nothing is decided about, and pushes another",
                  [&](Peer& peer) {
                    job.push(peer, 0, 0, 1.0f);
                    job.push(peer, 0, 0, 1.0f);
                    peer.push(0, 0, 30, floats(16, 1.0f));
                  });
  // A partition that comes twice is counted, and a partition that was pushed to one that is gone
  // belongs to no gradient of the next connection.
  Peer again(1);
  REQUIRE(again.connect(*job.server));
  again.push(0, 0, 0, floats(16, 7.0f));
  const GradientId id = job.push(again, 0, 0, 2.0f);
  CHECK(job.server->stats().duplicates == 1);
  job.step(id, 0, 3.0f);
  job.check_answers(again, 1, 0, 3.0f);
  again.die();
  expect_event(*job.server, ServerEvent::Kind::kWorkerLost);

  FlowSpec other = flow_of(FlowMode::kUpdate, DType::kFloat32, 1, 8);
  other.id = 1;
  REQUIRE(job.server->add_flow(other).ok());
  check_violation("kind: expected 1 to 4: this flow holds no gradients, got 5", [](Peer& peer) {
    wire::Header header = peer.header(wire::Kind::kVerdict, 0, 0, 0);
    header.flow = 1;
    peer.send(header);
  });
}

TEST_CASE("held: slots of a connection that is gone stay until nothing is summed from them") {
  // Which lock they end under is for ThreadSanitizer to see: the next connection writes meanwhile.
  ServerOptions options = options_for(1);
  options.partition_bytes = 4 << 20;
  options.reduce_threads = 1;
  auto server = make_server(options);
  const uint32_t partitions = 4;
  const size_t n = 1 << 20;
  FlowSpec spec = flow_of(FlowMode::kUpdate, DType::kFloat32, partitions, n);
  spec.held = 1;
  REQUIRE(server->add_flow(spec).ok());
  REQUIRE(server->publish(0, 0).ok());
  const std::vector<uint16_t> gradient(n, 0x3f80);  // 1, in half the bytes: widening takes longer
  uint64_t pushed = 0;
  const auto push = [&](Peer& peer) {
    for (uint32_t i = 0; i < partitions; ++i) peer.push(i, 0, i, gradient, DType::kBFloat16);
    pushed += partitions * n * sizeof(uint16_t);
    wait_stats(*server, [&](const ServerStats& stats) {
      peer.pump();
      return stats.bytes_pushed == pushed;
    });
  };
  for (int life = 0; life < 3; ++life) {
    Peer peer(0, 64);
    REQUIRE(peer.connect(*server));
    push(peer);
    peer.die();
    expect_event(*server, ServerEvent::Kind::kWorkerLost);
  }
  Peer last(0, 64);
  REQUIRE(last.connect(*server));
  push(last);
  last.send(last.header(wire::Kind::kVerdict, 0, 0, partitions));
  const GradientId id = expect_event(*server, ServerEvent::Kind::kGradient).gradient;
  REQUIRE(server->aggregate(0, 0, {id}).ok());
  expect_event(*server, ServerEvent::Kind::kStepReady);
  const LeafShard mean = server->gradient(0, 0).value();
  const auto* values = reinterpret_cast<const float*>(mean.data);
  CHECK(std::vector<float>(values, values + mean.elements) == floats(partitions * n, 1.0f));
}

TEST_CASE("a slot that has not been given back may not be written again") {
  ServerOptions options = options_for(2);
  options.ordered = true;  // so that the contribution of worker 1 has to wait in its slot
  auto server = make_server(options);
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8)).ok());
  Peer peer(1);
  REQUIRE(peer.connect(*server));
  const std::vector<float> values = floats(8, 1.0f);
  for (int i = 0; i < 2; ++i)
    peer.write(2, peer.push_header(0, 0, 1, values), values.data(), 32, 2);
  const ServerEvent event = expect_event(*server, ServerEvent::Kind::kViolation);
  CHECK(event.text.find("expected a free slot, got 2") != std::string::npos);
  peer.wait([&] { return peer.ended; });
}

// --- Who is gone.

TEST_CASE("a worker that dies amid a step is told of once, and its partner is still served") {
  UpdateJob job(2);
  job.peers[0]->push(0, 0, 1, floats(16, 1.0f));
  job.peers[1]->push(0, 0, 1, floats(16, 3.0f));
  expect_event(*job.server, ServerEvent::Kind::kStepReady);
  job.peers[1]->die();
  const ServerEvent event = expect_event(*job.server, ServerEvent::Kind::kWorkerLost);
  CHECK(event.worker == 1);
  CHECK(event.text.find("worker 1 (127.0.0.1:") != std::string::npos);
  REQUIRE(job.server->publish(0, 1).ok());
  job.peers[0]->expect(wire::Answer::kResult, 1);
  job.peers[0]->push(0, 1, 2, floats(16, 1.0f));
  job.peers[0]->send(job.peers[0]->header(wire::Kind::kPull, 0, 1, 3));
  job.peers[0]->expect(wire::Answer::kResult, 3);
  expect_silence(*job.server);
}

TEST_CASE("answers to a worker that died on the way do not keep memory busy") {
  ServerOptions options = options_for(2);
  options.partition_bytes = 4 << 20;
  auto server = make_server(options);
  const size_t n = 1 << 20;
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, n)).ok());
  Peer first(0, 4 << 20, 4);
  REQUIRE(first.connect(*server));
  {
    Peer second(1, 4 << 20, 4);
    REQUIRE(second.connect(*server));
    first.push(0, 0, 1, floats(n, 1.0f));
    second.push(0, 0, 1, floats(n, 3.0f));
    wait_stats(*server, [&](const ServerStats& stats) {
      first.pump();
      if (stats.bytes_pushed < 2 * n * sizeof(float)) second.pump();
      return stats.steps == 1;
    });
    first.expect(wire::Answer::kResult, 1);
    second.die();  // it has not looked at its answer: most of it is still to be sent
  }
  expect_event(*server, ServerEvent::Kind::kWorkerLost);
  Peer again(1, 4 << 20, 4);
  REQUIRE(again.connect(*server));
  first.push(0, 1, 2, floats(n, 5.0f));
  again.push(0, 1, 2, floats(n, 7.0f));
  for (Peer* peer : {&first, &again}) {
    const auto deadline = Clock::now() + kPatience;
    while (first.answers.empty() || again.answers.empty()) {
      REQUIRE(Clock::now() < deadline);
      first.pump();
      again.pump();
    }
    peer->pump();
  }
  first.expect(wire::Answer::kResult, 2);
  again.expect(wire::Answer::kResult, 2);
  CHECK(first.result_as<float>(2, n) == floats(n, 6.0f));
}

TEST_CASE("a worker that left strands a step that has begun, and is told of once") {
  auto server = make_server(options_for(2));
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 2, 8)).ok());
  Peer first(0);
  auto second = std::make_unique<Peer>(1);
  REQUIRE(first.connect(*server));
  REQUIRE(second->connect(*server));
  SUBCASE("left after the others pushed") {
    first.push(0, 3, 1, floats(8, 1.0f));
    wait_stats(*server, [](const ServerStats& stats) { return stats.bytes_pushed > 0; });
    server->mark_left(1);
    second.reset();
  }
  SUBCASE("left before the others pushed") {
    server->mark_left(1);
    second.reset();
    first.push(0, 3, 1, floats(8, 1.0f));
  }
  SUBCASE("left and keeps its connection") {
    server->mark_left(1);
    first.push(0, 3, 1, floats(8, 1.0f));
  }
  const ServerEvent event = expect_event(*server, ServerEvent::Kind::kStranded);
  CHECK(event.worker == 1);
  CHECK(event.step == 3);
  CHECK(event.flow == 0);
  CHECK(event.text.find("worker 1 left") != std::string::npos);
  first.push(1, 3, 2, floats(8, 1.0f));
  wait_stats(*server, [](const ServerStats& stats) { return stats.bytes_pushed == 64; });
  expect_silence(*server);
}

TEST_CASE(
    "the last pushes of a worker that leaves count, though the word of its leaving came first") {
  auto server = make_server(options_for(2));
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8)).ok());
  Peer first(0);
  Peer second(1);
  REQUIRE(first.connect(*server));
  REQUIRE(second.connect(*server));
  first.push(0, 0, 1, floats(8, 1.0f));
  wait_stats(*server, [](const ServerStats& stats) { return stats.bytes_pushed > 0; });
  server->mark_left(1);
  second.push(0, 0, 1, floats(8, 3.0f));
  second.close();
  first.expect(wire::Answer::kResult, 1);
  CHECK(first.result_as<float>(1, 8) == floats(8, 2.0f));
  expect_silence(*server);
}

// --- Events and the end.

TEST_CASE("wake interrupts a wait, and time does") {
  auto server = make_server(options_for(1));
  CHECK(server->wait_event(1).kind == ServerEvent::Kind::kNone);
  std::thread waker([&] { server->wake(); });
  expect_event(*server, ServerEvent::Kind::kWoken);
  waker.join();
  expect_silence(*server);
}

TEST_CASE("closing ends waits and connections, and everything after it says so") {
  auto server = make_server(options_for(2));
  REQUIRE(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8)).ok());
  Peer peer(0);
  REQUIRE(peer.connect(*server));
  peer.push(0, 0, 1, floats(8, 1.0f));
  wait_stats(*server, [](const ServerStats& stats) { return stats.bytes_pushed > 0; });
  std::thread waiter([&] { CHECK(server->wait_event(-1).kind == ServerEvent::Kind::kClosed); });
  std::thread closer([&] { server->close(); });
  peer.wait([&] { return peer.ended; });
  closer.join();
  waiter.join();
  server->close();
  CHECK(server->wait_event(-1).kind == ServerEvent::Kind::kClosed);
  CHECK(server->admit(0, 1, token_of(0)).code() == Code::kCancelled);
  CHECK(server->add_flow(flow_of(FlowMode::kAverage, DType::kFloat32, 1, 8)).code() ==
        Code::kCancelled);
  CHECK(server->publish(0, 1).code() == Code::kCancelled);
  server->mark_left(0);
  CHECK(server->stats().bytes_pushed == 32);
  CHECK(server->transport().starts_with(testing::transport()));
}

TEST_CASE("the flight recorder keeps what became of a partition") {
  auto server = make_server(options_for(1));
  REQUIRE(server->add_flow(flow_of(FlowMode::kUpdate, DType::kFloat32, 1, 8)).ok());
  REQUIRE(server->publish(0, 0).ok());
  Peer peer(0);
  REQUIRE(peer.connect(*server));
  peer.push(0, 0, 1, floats(8, 1.0f));
  expect_event(*server, ServerEvent::Kind::kStepReady);
  REQUIRE(server->publish(0, 1).ok());
  peer.expect(wire::Answer::kResult, 1);
  peer.push(0, 0, 2, floats(8, 1.0f));
  peer.expect(wire::Answer::kStale, 2);
  std::vector<Stage> stages;
  for (const Record& record : server->records()) stages.push_back(record.stage);
  // The fabric may be done with the answer before or after the second push comes.
  std::erase(stages, Stage::kAnswered);
  CHECK(stages == std::vector<Stage>{Stage::kPublished, Stage::kLanded, Stage::kConsumed,
                                     Stage::kReduced, Stage::kUpdating, Stage::kPublished,
                                     Stage::kDropped});
}

TEST_CASE("options that cannot work are refused") {
  const auto refused = [](auto change) {
    ServerOptions options = options_for(1);
    change(options);
    return !ServerEngine::create(options).ok();
  };
  CHECK(refused([](ServerOptions& options) { options.workers = 0; }));
  CHECK(refused([](ServerOptions& options) { options.workers = 1025; }));
  CHECK(refused([](ServerOptions& options) { options.server = 1; }));
  CHECK(refused([](ServerOptions& options) { options.slots_per_worker = 0; }));
  CHECK(refused(
      [](ServerOptions& options) { options.slots_per_worker = fabric::kMaxReceiveDepth + 1; }));
  CHECK(refused([](ServerOptions& options) { options.partition_bytes = 4; }));
  CHECK(refused([](ServerOptions& options) { options.listen = "nonsense"; }));
}

TEST_CASE("memory that is not to be had is an error that names the amount") {
  ServerOptions options = options_for(1);
  options.partition_bytes = size_t{1} << 46;
  auto server = ServerEngine::create(options).value();
  const Status status = server->admit(0, 1, token_of(0));
  CHECK(status.code() == Code::kResource);
  CHECK(status.message().find("landing slots") != std::string::npos);
}
