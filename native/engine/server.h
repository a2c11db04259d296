/* engine/server.h: the server's engine: landing slots, fp32 reduction, and what goes back.

   Threads. One progress thread, `reduce_threads` reducing threads; Python calls from threads of its
   own. Lock order: progress lock, then event lock. Reducing runs without any lock: a partition in
   the hands of a reducing thread is marked busy. */
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/recorder.h"
#include "base/status.h"
#include "engine/flow.h"
#include "engine/held.h"
#include "fabric/fabric.h"

namespace jaxrdma {

struct ServerOptions {
  uint32_t server = 0;  ///< index of this server
  uint32_t servers = 1;
  uint32_t workers = 1;  ///< replicas in the mean
  std::string job;
  std::string listen = "127.0.0.1:0";
  fabric::TransportOptions transport;
  size_t partition_bytes = 1 << 20;  ///< payload of a landing slot
  uint32_t slots_per_worker = 16;
  uint32_t reduce_threads = 2;
  bool ordered = false;  ///< sum in replica order: the same bits on every run
  int spin_us = 0;
  size_t recorder_capacity = 1 << 14;
};

/// What the Python side of a server must know of.
struct ServerEvent {
  enum class Kind : uint8_t {
    kNone = 0,
    kInitialised = 1,  ///< all of the chief's parameters of `flow` have landed: run the update's
                       ///< init, then publish
    kStepReady = 2,    ///< every mean of `flow` at `step` is there: run the update, then publish
    kWorkerLost = 3,   ///< the data connection of `worker` ended without its having left
    kViolation = 4,    ///< `worker` broke the protocol and was disconnected
    kStranded = 5,     ///< `worker` left, others wait for its contribution to `step`
    kWoken = 6,        ///< wake() was called
    kClosed = 7,
    kGradient = 8,  ///< all of `gradient` of `flow` is held here; it was computed on the
                    ///< parameters of `step`
  };
  Kind kind = Kind::kNone;
  uint16_t flow = 0;
  int64_t step = 0;
  uint32_t worker = 0;
  std::string text;
  GradientId gradient{};
};

/// Where one leaf's piece lies: this server's partitions of it, one after the other, without gaps.
struct LeafShard {
  std::byte* data = nullptr;
  DType dtype = DType::kFloat32;
  uint64_t elements = 0;  ///< 0 where this server holds nothing of the leaf
};

struct ServerStats {
  uint64_t bytes_pushed = 0;
  uint64_t bytes_pulled = 0;
  uint64_t steps = 0;                       ///< whole steps published, over all flows
  std::vector<uint64_t> accepted;           ///< per worker: whole gradients in a mean
  std::vector<uint64_t> dropped;            ///< per worker: stale pushes, in partitions
  std::vector<uint64_t> gradients_dropped;  ///< per worker: held gradients that are in no mean
  uint64_t duplicates = 0;                  ///< partitions that came twice
  uint64_t refused = 0;                     ///< connections turned away
};

class ServerEngine {
 public:
  static Result<std::shared_ptr<ServerEngine>> create(ServerOptions options);
  virtual ~ServerEngine() = default;

  virtual const std::string& address() const = 0;
  /// From now on a worker with this index, incarnation and token may connect; an older incarnation
  /// no more.
  virtual Status admit(uint32_t worker, uint64_t incarnation, std::vector<std::byte> token) = 0;
  virtual Status add_flow(FlowSpec spec) = 0;

  /// Sleeps until something happened or `timeout_ms` has passed (kNone).
  virtual ServerEvent wait_event(int timeout_ms) = 0;
  virtual void wake() = 0;

  /// The mean gradients of the step that kStepReady named; readable until `publish`.
  virtual Result<LeafShard> gradient(uint16_t flow, uint32_t leaf) = 0;
  /// The parameters, which the update overwrites between kStepReady or kInitialised and `publish`.
  virtual Result<LeafShard> parameters(uint16_t flow, uint32_t leaf) = 0;
  /// The parameters are those of `step`: answers everybody who waits for them.
  virtual Status publish(uint16_t flow, int64_t step) = 0;

  // What is decided about the gradients of a flow that holds them. All servers are told the same,
  // in the same order.

  /// The mean of the gradients of `set`, summed in this order, shall make step + 1: kStepReady
  /// follows, once the parameters have reached `step`. Not in any other mean.
  virtual Status aggregate(uint16_t flow, int64_t step, const std::vector<GradientId>& set) = 0;
  /// `gradient` is in no mean. Counted. One that is not known is none: its worker is gone.
  virtual Status drop(uint16_t flow, const GradientId& gradient) = 0;
  /// The worker of `gradient` is answered with the parameters of `step` once they are published,
  /// and told whether its gradient counts. Nothing where it is gone.
  virtual Status answer(uint16_t flow, const GradientId& gradient, int64_t step, bool accepted) = 0;

  /// `worker` has closed its session in good order: its connection may end, and steps that need it
  /// are stranded.
  virtual void mark_left(uint32_t worker) = 0;
  virtual ServerStats stats() const = 0;
  virtual std::vector<Record> records() const = 0;
  /// The transport, and what it chose, for people.
  virtual std::string transport() const = 0;
  virtual void close() = 0;
};

}  // namespace jaxrdma
