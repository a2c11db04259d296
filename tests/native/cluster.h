/* tests/native/cluster.h: real servers' and workers' engines of one job, in one process. */
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/server.h"
#include "engine/worker.h"
#include "transports.h"

namespace testing {

using namespace jaxrdma;

inline constexpr size_t kPartitionBytes = 1024;
inline constexpr int kTimeoutMs = 10000;

inline std::vector<std::byte> token(uint32_t worker, uint32_t server) {
  std::vector<std::byte> bytes(fabric::Hello::kTokenBytes);
  bytes[0] = static_cast<std::byte>(worker + 1);
  bytes[1] = static_cast<std::byte>(server + 1);
  return bytes;
}

/// One leaf of `elements` float32, cut into partitions that go to the servers in turn.
inline FlowSpec striped(uint64_t elements, uint32_t servers, FlowMode mode = FlowMode::kAverage) {
  FlowSpec spec;
  spec.mode = mode;
  spec.leaves.push_back({DType::kFloat32, elements});
  const uint64_t piece = kPartitionBytes / sizeof(float);
  for (uint64_t begin = 0, i = 0; begin < elements; begin += piece, ++i) {
    spec.partitions.push_back(
        {0, static_cast<uint32_t>(i % servers), begin, std::min(piece, elements - begin)});
  }
  return spec;
}

/// What shall go wrong, to order, in the transport of one of them: "worker 1" or "server 0".
struct OrderedFault {
  std::string whose;
  std::string what;
  std::string of(const char* role, uint32_t index) const {
    return whose == role + std::string(" ") + std::to_string(index) ? what : "";
  }
};

/// Servers and workers of one job.
class Cluster {
 public:
  Cluster(uint32_t servers, uint32_t workers, const FlowSpec& spec,
          const OrderedFault& fault = {}) {
    for (uint32_t s = 0; s < servers; ++s) {
      ServerOptions options;
      options.server = s;
      options.servers = servers;
      options.workers = workers;
      options.job = "test";
      options.partition_bytes = kPartitionBytes;
      options.slots_per_worker = 4;
      options.ordered = true;
      options.transport = next_transport();
      options.transport.fault = fault.of("server", s);
      auto server = ServerEngine::create(options);
      REQUIRE(server.ok());
      servers_.push_back(server.value());
      for (uint32_t w = 0; w < workers; ++w)
        REQUIRE(servers_[s]->admit(w, 100 + w, token(w, s)).ok());
      REQUIRE(servers_[s]->add_flow(spec).ok());
    }
    for (uint32_t w = 0; w < workers; ++w) {
      WorkerOptions options;
      options.worker = w;
      options.job = "test";
      options.incarnation = 100 + w;
      options.transport = next_transport();
      options.transport.fault = fault.of("worker", w);
      options.sent_timeout_ms = 1000;
      auto worker = WorkerEngine::create(options);
      REQUIRE(worker.ok());
      workers_.push_back(worker.value());
      std::vector<ServerAddress> addresses;
      for (uint32_t s = 0; s < servers; ++s)
        addresses.push_back({servers_[s]->address(), token(w, s)});
      const Status connected = workers_[w]->connect(addresses, kTimeoutMs);
      REQUIRE_MESSAGE(connected.ok(), connected.message());
      REQUIRE(workers_[w]->add_flow(spec).ok());
    }
  }
  ~Cluster() {
    for (auto& worker : workers_) worker->close();
    for (auto& server : servers_) server->close();
  }

  WorkerEngine& worker(size_t index) { return *workers_[index]; }
  ServerEngine& server(size_t index) { return *servers_[index]; }

 private:
  std::vector<std::shared_ptr<ServerEngine>> servers_;
  std::vector<std::shared_ptr<WorkerEngine>> workers_;
};

inline std::vector<float> pattern(size_t elements, int worker, int64_t step) {
  std::vector<float> values(elements);
  for (size_t i = 0; i < elements; ++i)
    values[i] = static_cast<float>((i * 13 + worker * 7 + step) % 97) / 8.0f;
  return values;
}

}  // namespace testing
