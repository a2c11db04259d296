/* engine/server.h: the server's engine: landing slots, fp32 reduction, and what goes back.

   Threads. One progress thread, `reduce_threads` reducing threads, one that copies parameters for
   followers; Python calls from threads of its own. Lock order: progress lock, then any other.
   Reducing and copying run without any lock: a partition in the hands of a reducing thread is
   marked busy, a flow of which parameters are being copied `copying`. */
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
#include "engine/table_spec.h"
#include "fabric/fabric.h"

namespace jaxrdma {

struct ServerOptions {
  uint32_t server = 0;  ///< index of this server
  uint32_t servers = 1;
  uint32_t workers = 1;     ///< replicas in the mean
  uint32_t followers = 64;  ///< admitted at a time, at most
  std::string job;
  std::string listen = "127.0.0.1:0";
  fabric::TransportOptions transport;
  size_t partition_bytes = 1 << 20;  ///< payload of a landing slot
  uint32_t slots_per_worker = 16;
  uint32_t reduce_threads = 2;
  bool ordered = false;  ///< sum in replica order: the same bits on every run
  int spin_us = 0;       ///< how long the progress thread looks at most before it sleeps (wait.h)
  size_t recorder_capacity = 1 << 14;
};

/// What the Python side of a server must know of.
struct ServerEvent {
  enum class Kind : uint8_t {
    kNone = 0,
    kInitialised = 1,  ///< all of the chief's parameters of `flow` have landed: run the update's
                       ///< init, then publish
    kStepReady = 2,    ///< every mean of `flow` at `step` is there: run the update, then publish;
                       ///< or the answer to refresh()
    kWorkerLost = 3,   ///< the data connection of `worker`, in the life `incarnation`, ended
                       ///< without its having left
    kViolation = 4,    ///< `worker` broke the protocol and was disconnected
    kStranded = 5,     ///< `worker` left, others wait for its contribution to `step`
    kWoken = 6,        ///< wake() was called
    kClosed = 7,
    kGradient = 8,         ///< all of `gradient` of `flow` is held here; it was computed on the
                           ///< parameters of `step`
    kFollowerRefused = 9,  ///< follower number `worker` broke the protocol, or there was no memory
                           ///< for it: it was disconnected, which concerns nobody else
  };
  Kind kind = Kind::kNone;
  uint16_t flow = 0;
  int64_t step = 0;
  uint32_t worker = 0;
  std::string text;
  GradientId gradient{};
  uint64_t incarnation = 0;
};

/// Where one array's piece lies: this server's partitions of it, one after the other, without gaps;
/// or, if it is in a pack, its place there.
struct LeafShard {
  std::byte* data = nullptr;
  DType dtype = DType::kFloat32;
  uint64_t elements = 0;  ///< 0 where this server holds nothing of the array
};

struct ServerStats {
  uint64_t bytes_pushed = 0;
  uint64_t bytes_pulled = 0;
  uint64_t steps = 0;                       ///< whole steps published, over all flows
  std::vector<uint64_t> accepted;           ///< per worker: whole gradients in a mean
  std::vector<uint64_t> dropped;            ///< per worker: stale pushes, in partitions
  std::vector<uint64_t> gradients_dropped;  ///< per worker: held gradients that are in no mean
  uint64_t duplicates = 0;                  ///< partitions that came twice
  uint64_t refused = 0;         ///< connections turned away before their hello was accepted
  uint64_t bytes_followed = 0;  ///< parameters that followers took
  uint64_t copies = 0;          ///< of parameters, made for followers alone
};

/// A partition of a gradient of which others have come: of the other workers for that step, or,
/// where gradients are held, of the same gradient.
struct Lack {
  uint32_t worker;
  uint16_t flow;
  int64_t step;
  uint32_t partition;
  double seconds;  ///< since the first of the others came
};

class ServerEngine {
 public:
  static Result<std::shared_ptr<ServerEngine>> create(ServerOptions options);
  virtual ~ServerEngine() = default;

  virtual const std::string& address() const = 0;
  /// From now on a worker with this index, incarnation and token may connect; an older incarnation
  /// no more. At any time: also in the place of one that was expelled.
  virtual Status admit(uint32_t worker, uint64_t incarnation, std::vector<std::byte> token) = 0;
  /// From now on a follower of this number may connect, and be given versions of the parameters,
  /// until it is dismissed. However slow it is, it delays no step by more than one copy of the
  /// parameters, of which there is at most one for each follower.
  virtual Status admit_follower(uint32_t follower, uint64_t incarnation,
                                std::vector<std::byte> token) = 0;
  /// It is gone, or has to go. Nothing if it is not known.
  virtual void dismiss_follower(uint32_t follower, std::string why) = 0;
  virtual Status add_flow(FlowSpec spec) = 0;
  /// Its rows are trained here, with no help of Python. Numbers are shared with flows.
  virtual Status add_table(TableSpec spec) = 0;

  /// Sleeps until something happened or `timeout_ms` has passed (kNone).
  virtual ServerEvent wait_event(int timeout_ms) = 0;
  virtual void wake() = 0;

  /// The mean gradients of the step that kStepReady named; readable until `publish`.
  virtual Result<LeafShard> gradient(uint16_t flow, uint32_t array) = 0;
  /// The parameters, which the update overwrites between kStepReady or kInitialised and `publish`.
  virtual Result<LeafShard> parameters(uint16_t flow, uint32_t array) = 0;
  /// The parameters are those of `step`: answers everybody who waits for them.
  virtual Status publish(uint16_t flow, int64_t step) = 0;
  /// Of a flow that shows, once a first version was published: kStepReady follows as soon as nobody
  /// reads the parameters, once however often this is called before. Then they may be overwritten,
  /// until the next version is published.
  virtual Status refresh(uint16_t flow) = 0;

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
  /// `worker` is none any more, whatever it does: its connection ends, of which it is told `why`,
  /// and what still comes of it is not listened to. Only while every flow holds gradients.
  virtual void expel(uint32_t worker, const std::string& why) = 0;
  virtual ServerStats stats() const = 0;
  /// What this server waits for, the longest-waiting first, at most `limit`.
  virtual std::vector<Lack> lacking(size_t limit) const = 0;
  virtual std::vector<Record> records() const = 0;
  virtual RecordCounts record_counts() const = 0;
  /// The transport, and what it chose, for people.
  virtual std::string transport() const = 0;
  virtual void close() = 0;
};

}  // namespace jaxrdma
