/* engine/worker.h: the worker's engine: pushes partitions to servers, receives what comes back,
   completes operations.

   Threads. Those of one crew (crew.h): the one that leads makes progress, the others run callbacks,
   never with a lock held: XLA runs the rest of its program inside them. `start` may be called from
   any thread: it takes the progress lock, posts what can be posted at once, and returns. */
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/recorder.h"
#include "base/status.h"
#include "engine/flow.h"
#include "engine/table_spec.h"
#include "engine/touched.h"
#include "fabric/fabric.h"

namespace jaxrdma {

struct WorkerOptions {
  uint32_t worker = 0;   ///< index of this worker, or number of this follower
  bool follows = false;  ///< is a follower: all that it can do is kFollow
  std::string job;
  uint64_t incarnation = 0;
  fabric::TransportOptions transport;
  int spin_us = 0;  ///< how long the leading thread looks at most before it sleeps (wait.h)
  /// `await_sent` gives up when nothing was sent for so long, all was posted and all connections
  /// work.
  int sent_timeout_ms = 10'000;
  size_t recorder_capacity = 1 << 14;
};

/// A server as the control plane describes it.
struct ServerAddress {
  std::string address;           ///< "host:port" of its data listener
  std::vector<std::byte> token;  ///< fabric::Hello::kTokenBytes
};

/// The buffers of one array in one operation. Null where the operation does not use them, or the
/// array is empty.
struct LeafBuffers {
  const std::byte* source = nullptr;  ///< gradient (push) or parameter (init)
  DType source_dtype = DType::kFloat32;
  std::byte* target =
      nullptr;  ///< result, of the array's dtype; may be `source` where the dtypes are equal
};

enum class OperationKind : uint8_t {
  kExchange = 0,  ///< push, and wait for the answers, which land in `target`
  kPush = 1,      ///< push; answers land in memory of the flow; done when the sources may be reused
  kPull = 2,      ///< wait for the answers of an earlier kPush of `step`, copy them to `target`
  kInit = 3,      ///< the chief's parameters go to the servers, and come back as version `step`
  kFetch = 4,     ///< no source: the parameters as soon as they have reached `step`
  /// No source: the parameters as they are, of `step` or later, read out of the servers' memory
  /// without their doing; one version, WorkerStats::last_read tells which. Fails with kStale if
  /// they changed every time. Where the fabric can read.
  kRead = 5,
  /// No source: one version of the parameters, `step` or a later one, the newest as soon as there
  /// is one; Outcome::version tells which. Every server keeps a copy of it until it has been taken,
  /// and has told its checksum. All that a follower does, and what a worker begins with that takes
  /// the place of another.
  kFollow = 6,
  /// Of a table: the gradients of rows. Done once they are on their way, their buffer is not needed
  /// any more. Of a table that takes one mean of all workers they are of the next step, or none.
  kPushRows = 7,
  /// Of a table: rows, as they are at `step` or later, into the target. Waits until what this
  /// worker pushed before that step is applied; if it was refused, this fails.
  kPullRows = 8,
};
constexpr bool of_rows(OperationKind kind) {
  return kind == OperationKind::kPushRows || kind == OperationKind::kPullRows;
}

/// What an operation on a table is given.
struct RowBuffers {
  RowIds ids;
  const float* gradients = nullptr;  ///< of each id, in a kPushRows
  float* target = nullptr;           ///< for each id, in a kPullRows
  uint32_t columns = 0;              ///< of both
};

/// What an operation brought beside the parameters.
struct Outcome {
  /// Of the parameters. `step` + 1 after an exchange or a pull, but of a flow whose gradients are
  /// held, where it may be any. Of a kFollow `step` or more.
  int64_t version = 0;
  /// So many gradients that this worker pushed for this flow are in no mean.
  uint32_t dropped = 0;
};

struct Operation {
  OperationKind kind;
  uint16_t flow;
  int64_t step;
  std::vector<LeafBuffers> leaves;  ///< by array of the caller's
  RowBuffers rows{};                ///< of an operation on a table, which has no leaves
  /// Of a kFollow: after so long the servers are asked for the newest that they have, and it fails
  /// with kDeadline if that is not new enough; 0: at once; -1: never. The way of the parameters to
  /// here is not reckoned.
  int timeout_ms = -1;
  /// Filled before `done` is called, if that ends well and parameters came. Null: nobody asks.
  std::shared_ptr<Outcome> outcome;
  /// Called exactly once, on a thread of its own.
  std::function<void(const Status&)> done;
};

/// What an operation still waits for; one per partition not yet back.
struct Pending {
  uint32_t server;
  uint16_t flow;
  int64_t step;
  uint32_t partition;
  Stage stage;
  double seconds;  ///< since it entered that stage
};

struct WorkerStats {
  uint64_t bytes_pushed = 0;  ///< gradient payload
  uint64_t bytes_pulled = 0;  ///< parameter payload
  uint64_t steps = 0;         ///< exchanges and pulls that ended well
  uint64_t gradients_accepted = 0;
  uint64_t gradients_dropped = 0;         ///< pushes a server called stale, or did not count
  std::vector<uint32_t> dropped_of_flow;  ///< pushes that were not counted, by flow
  int64_t last_step = -1;                 ///< the newest step that came back
  int64_t last_read = -1;                 ///< the step that the last kRead found
};

class WorkerEngine {
 public:
  static Result<std::shared_ptr<WorkerEngine>> create(WorkerOptions options);
  virtual ~WorkerEngine() = default;  ///< closes

  /// Connects to every server, in order of index, and returns when all are connected, or with the
  /// first failure.
  virtual Status connect(const std::vector<ServerAddress>& servers, int timeout_ms) = 0;
  virtual Status add_flow(FlowSpec spec) = 0;
  /// Takes the next number, as a flow does.
  virtual Status add_table(TableSpec spec) = 0;
  /// Begins an operation. Any failure, an impossible argument too, goes to `operation.done`.
  virtual void start(Operation operation) = 0;

  /// Fails every operation, now and later, with `why`. Called when the control plane learns that
  /// the job cannot go on. The first reason stays.
  virtual void fail(Status why) = 0;
  /// Fails the operations that wait now with kCancelled, later ones go on failing: the job is
  /// inconsistent after it.
  virtual void interrupt() = 0;
  /// Fails with kCancelled what waits for a version to follow. Later operations go well.
  virtual void stop_waiting() = 0;
  /// Waits until all gradients of rows whose kPushRows is done have been sent, or it fails. Ends
  /// with kDeadline, and says what is missing, when nothing goes on (sent_timeout_ms).
  virtual Status await_sent() = 0;
  /// Operations begun and not yet done; in `await_sent` those that it waits for, too.
  virtual size_t in_flight() const = 0;
  /// The longest-waiting first, at most `limit`.
  virtual std::vector<Pending> pending(size_t limit) const = 0;
  virtual WorkerStats stats() const = 0;
  virtual std::vector<Record> records() const = 0;
  virtual RecordCounts record_counts() const = 0;
  /// The transport, and what it chose, for people.
  virtual std::string transport() const = 0;
  /// What people should know of the connections; empty if nothing.
  virtual std::string notice() const = 0;
  /// Which connections do not work just now, and why; why it failed, if it has; empty if all is
  /// well.
  virtual std::string trouble() const = 0;
  /// First reason for failure, or ok.
  virtual Status status() const = 0;
  /// Blocks until a data connection is lost or `fail` is called (true), or until `timeout_ms` has
  /// passed or `close` is called (false).
  virtual bool wait_failure(int timeout_ms) = 0;
  /// Fails what waits with kCancelled, closes the connections, joins every thread. Idempotent.
  virtual void close() = 0;
};

}  // namespace jaxrdma
