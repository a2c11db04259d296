/* tests/native/peer.h: peers of a server's engine that speak the fabric and the wire format by
   hand, so that they can also break the rules; and what tests with them have in common. */
#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine/server.h"
#include "engine/wire.h"
#include "transports.h"

namespace testing {

using namespace jaxrdma;
using Clock = std::chrono::steady_clock;

inline constexpr auto kPatience = std::chrono::seconds(20);
inline constexpr uint64_t kIncarnation = 77;

inline std::vector<std::byte> token_of(uint32_t worker) {
  return std::vector<std::byte>(fabric::Hello::kTokenBytes, std::byte(worker + 1));
}

/// A worker's side of one connection. The reply of tag t is asked to land in `result(t)`.
class Peer {
 public:
  explicit Peer(uint32_t worker, size_t partition_bytes = 1 << 16, size_t tags = 64,
                uint32_t receive_depth = 4096)
      : worker(worker), result_bytes_(partition_bytes), results_(partition_bytes * tags) {
    fabric::Options options;
    options.receive_depth = receive_depth;
    fabric_ = std::move(fabric::make_fabric(next_transport(), options).value());
    results_region_ = std::move(
        fabric_->register_memory(results_.data(), results_.size(), fabric::Access::kRemoteWrite)
            .value());
    hello.job = "job";
    hello.protocol_version = wire::kProtocolVersion;
    hello.worker = worker;
    hello.incarnation = kIncarnation;
    hello.token = token_of(worker);
  }
  ~Peer() { close(); }

  /// Ends the connection in good order, once what was posted is sent.
  void close() { end(true); }
  /// Ends it as a process that dies.
  void die() { end(false); }

  void begin_connect(const std::string& address) {
    endpoint_ = fabric_->connect(address, hello, 10000).value();
  }
  /// Connects and learns the slots; false where the server refuses.
  bool connect(const ServerEngine& server) {
    begin_connect(server.address());
    wait([&] { return connected || ended; });
    return connected;
  }

  /// Says who it is, and looks at nothing that comes: over verbs it is not connected by that.
  void say_hello(const ServerEngine& server) {
    begin_connect(server.address());
    const auto deadline = Clock::now() + kPatience;
    while (fabric_->trouble().find("did not answer the hello") == std::string::npos) {
      REQUIRE(Clock::now() < deadline);
      pump();
    }
  }

  template <typename Done>
  void wait(Done done) {
    const auto deadline = Clock::now() + kPatience;
    while (!done()) {
      REQUIRE_MESSAGE(Clock::now() < deadline, "worker ", worker, " waited in vain");
      if (!pump()) fabric_->wait(20);
    }
  }
  bool pump() {
    std::vector<fabric::Event> events;
    const bool moved = fabric_->poll(events);
    for (const fabric::Event& event : events) handle(event);
    return moved || !events.empty();
  }

  wire::Header header(wire::Kind kind, uint32_t partition, int64_t step, uint32_t tag) {
    wire::Header made{};
    made.magic = wire::kHeaderMagic;
    made.kind = kind;
    made.partition = partition;
    made.step = step;
    made.incarnation = hello.incarnation;
    made.reply_address = reinterpret_cast<uintptr_t>(result(tag));
    made.reply_key = results_region_->remote_key();
    made.reply_tag = tag;
    return made;
  }
  template <typename T>
  wire::Header push_header(uint32_t partition, int64_t step, uint32_t tag,
                           const std::vector<T>& values, DType dtype = DType::kFloat32) {
    wire::Header made = header(wire::Kind::kPush, partition, step, tag);
    made.dtype = static_cast<uint8_t>(dtype);
    made.bytes = values.size() * sizeof(T);
    return made;
  }

  /// Writes into `slot` whatever its state, as a broken peer would.
  void write(uint32_t slot, const wire::Header& what, const void* payload, size_t bytes,
             uint32_t immediate) {
    slot_of_tag_[what.reply_tag] = slot;
    std::vector<std::byte>& source = sources_.emplace_back(sizeof(what));
    std::memcpy(source.data(), &what, sizeof(what));
    source.resize(sizeof(what) + bytes);
    if (payload != nullptr) std::memcpy(source.data() + sizeof(what), payload, bytes);
    write_raw(slot, source, immediate);
  }
  void write_raw(uint32_t slot, const std::vector<std::byte>& source, uint32_t immediate) {
    regions_.push_back(std::move(fabric_
                                     ->register_memory(const_cast<std::byte*>(source.data()),
                                                       source.size(), fabric::Access::kLocal)
                                     .value()));
    const fabric::Slice slice{regions_.back().get(), source.data(), source.size()};
    fabric::Endpoint* endpoint = fabric_->endpoint(endpoint_);
    if (endpoint == nullptr) return;
    const fabric::RemoteSlice target{grant.address + slot * grant.slot_stride, grant.key};
    REQUIRE(endpoint->write({&slice, 1}, target, immediate, 1).ok());
  }
  /// Takes a free slot, waiting for one if need be.
  uint32_t take_slot() {
    wait([&] { return !free_slots.empty() || ended; });
    REQUIRE(!ended);
    const uint32_t slot = free_slots.front();
    free_slots.pop_front();
    return slot;
  }
  void send(const wire::Header& what, const void* payload = nullptr) {
    const uint32_t slot = take_slot();
    write(slot, what, payload, what.kind == wire::Kind::kKeep ? 0 : what.bytes, slot);
  }
  template <typename T>
  void push(uint32_t partition, int64_t step, uint32_t tag, const std::vector<T>& values,
            DType dtype = DType::kFloat32) {
    send(push_header(partition, step, tag, values, dtype), values.data());
  }

  /// Waits for the next answer that is no credit.
  fabric::Immediate answer() {
    wait([&] { return !answers.empty() || ended; });
    REQUIRE(!answers.empty());
    const fabric::Immediate immediate = answers.front();
    answers.pop_front();
    return immediate;
  }
  void expect(wire::Answer what, uint32_t tag) {
    const fabric::Immediate got = answer();
    CHECK(static_cast<int>(wire::answer_kind(got)) == static_cast<int>(what));
    CHECK(wire::answer_tag(got) == tag);
  }
  std::byte* result(uint32_t tag) { return results_.data() + tag * result_bytes_; }
  template <typename T>
  std::vector<T> result_as(uint32_t tag, size_t elements) {
    std::vector<T> values(elements);
    std::memcpy(values.data(), result(tag), elements * sizeof(T));
    return values;
  }
  void release(size_t count) {
    if (fabric::Endpoint* endpoint = fabric_->endpoint(endpoint_)) endpoint->release(count);
  }

  const uint32_t worker;
  fabric::Hello hello;
  wire::LandingGrant grant{};
  std::deque<uint32_t> free_slots;
  uint32_t messages = 0;  ///< answers and credits
  std::deque<fabric::Immediate> answers;
  bool connected = false;
  bool ended = false;
  Status end_status;
  bool hold_releases = false;  ///< keep the fabric's credits
  size_t held = 0;

 private:
  void end(bool flush) {
    if (fabric_ == nullptr) return;
    if (fabric::Endpoint* endpoint = fabric_->endpoint(endpoint_)) {
      endpoint->close(Status(Code::kCancelled, "closed by the test"), flush);
      const auto deadline = Clock::now() + std::chrono::seconds(5);
      while (!ended && Clock::now() < deadline) {
        if (!pump()) fabric_->wait(20);
      }
    }
    regions_.clear();
    results_region_.reset();
    fabric_.reset();
  }
  void handle(const fabric::Event& event) {
    using Kind = fabric::Event::Kind;
    switch (event.kind) {
      case Kind::kConnected:
        REQUIRE(event.hello->payload.size() == sizeof(grant));
        std::memcpy(&grant, event.hello->payload.data(), sizeof(grant));
        for (uint32_t i = 0; i < grant.slots; ++i) free_slots.push_back(i);
        connected = true;
        break;
      case Kind::kDisconnected:
        ended = true;
        end_status = event.status;
        break;
      case Kind::kReceived:
        if (wire::answer_kind(event.immediate) == wire::Answer::kCredit) {
          free_slots.push_back(wire::answer_tag(event.immediate));
        } else if (wire::answer_kind(event.immediate) == wire::Answer::kResultAndCredit) {
          const uint32_t tag = wire::answer_tag(event.immediate);
          REQUIRE(slot_of_tag_.contains(tag));
          free_slots.push_back(slot_of_tag_[tag]);
          answers.push_back(wire::answer(wire::Answer::kResult, tag));
        } else {
          answers.push_back(event.immediate);
        }
        ++messages;
        if (hold_releases) {
          ++held;
        } else {
          release(1);
        }
        break;
      default:
        break;
    }
  }

  std::unordered_map<uint32_t, uint32_t> slot_of_tag_;  ///< where it was last asked
  size_t result_bytes_;
  std::vector<std::byte> results_;
  std::deque<std::vector<std::byte>> sources_;
  std::unique_ptr<fabric::Fabric> fabric_;
  std::unique_ptr<fabric::MemoryRegion> results_region_;
  std::vector<std::unique_ptr<fabric::MemoryRegion>> regions_;
  fabric::EndpointId endpoint_ = 0;
};

inline ServerOptions options_for(uint32_t workers) {
  ServerOptions options;
  options.workers = workers;
  options.job = "job";
  options.partition_bytes = 1 << 16;
  options.slots_per_worker = 4;
  options.transport = next_transport();
  return options;
}

inline std::shared_ptr<ServerEngine> make_server(const ServerOptions& options) {
  auto server = ServerEngine::create(options);
  REQUIRE_MESSAGE(server.ok(), server.status().message());
  for (uint32_t worker = 0; worker < options.workers; ++worker) {
    REQUIRE(server.value()->admit(worker, kIncarnation, token_of(worker)).ok());
  }
  return server.value();
}

/// `count` partitions of one leaf.
inline FlowSpec flow_of(FlowMode mode, DType dtype, size_t count, uint64_t elements) {
  FlowSpec spec;
  spec.mode = mode;
  spec.leaves = {{dtype, count * elements}};
  for (size_t i = 0; i < count; ++i) spec.partitions.push_back({0, 0, i * elements, elements});
  return spec;
}

/// The engine's next event, which must be of this kind.
inline ServerEvent expect_event(ServerEngine& server, ServerEvent::Kind kind) {
  const ServerEvent event = server.wait_event(20000);
  CAPTURE(event.text);
  REQUIRE(static_cast<int>(event.kind) == static_cast<int>(kind));
  return event;
}
inline void expect_silence(ServerEngine& server) {
  const ServerEvent event = server.wait_event(0);
  CAPTURE(event.text);
  CHECK(event.kind == ServerEvent::Kind::kNone);
}

/// Waits until the server has said something of itself.
template <typename Done>
void wait_stats(const ServerEngine& server, Done done) {
  const auto deadline = Clock::now() + kPatience;
  while (!done(server.stats())) {
    REQUIRE(Clock::now() < deadline);
    std::this_thread::yield();
  }
}

inline std::vector<float> floats(size_t n, float value) { return std::vector<float>(n, value); }

}  // namespace testing
