/* engine/worker.cc: see worker.h. */
#include "engine/worker.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <limits>
#include <list>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "engine/checksum.h"
#include "engine/crew.h"
#include "engine/landing.h"
#include "engine/pack.h"
#include "engine/wait.h"
#include "engine/wire.h"

namespace jaxrdma {
namespace {

using Clock = std::chrono::steady_clock;
using fabric::Endpoint;
using fabric::EndpointId;
using fabric::Event;
using fabric::MemoryRegion;

/// After a lost connection the control plane is given this long to say what really happened before
/// the operations fail with what the connection itself knows.
constexpr auto kVerdictGrace = std::chrono::seconds(8);
/// Parameters that were overwritten while they were read are read again, so often.
constexpr int kReadTries = 100;
/// When servers went on between two questions so often, the next question is for a step that none
/// of them has reached, so that each keeps exactly that.
constexpr int kRoundsBehind = 2;
/// It is so many steps ahead at most; and if training rests before it, the newest will do.
constexpr int64_t kMostAhead = 64;
constexpr auto kAheadPatience = std::chrono::milliseconds(500);
/// Slots that a server may grant a follower.
constexpr uint32_t kMostFollowSlots = 64;

/// Buffers of tables' calls and of packs that are kept for the next ones, by table or flow.
constexpr size_t kMostSpareBuffers = 4;

size_t partition_bytes(const Partition& partition, DType dtype) {
  return static_cast<size_t>(partition.elements) * dtype_bytes(dtype);
}

/// What travels for an operation on a table: payloads of requests, and after them the rows that are
/// asked for, each once.
struct RowCall {
  RowBatch batch;
  Slab buffer;
  size_t values_at = 0;  ///< in `buffer`
  float* values() const { return reinterpret_cast<float*>(buffer.pages.data() + values_at); }
};

/// An operation between `start` and its callback.
struct Active {
  explicit Active(Operation what) : operation(std::move(what)) {}
  Operation operation;
  std::shared_ptr<RowCall> rows;  ///< of an operation on a table
  bool done = false;              ///< its callback was called; the answers are still awaited
  size_t unsent = 0;              ///< writes whose source is still in use
  size_t unanswered = 0;          ///< partitions that have not come back
  Status failure;
  std::vector<std::unique_ptr<MemoryRegion>> sources;  ///< by leaf
  std::vector<std::unique_ptr<MemoryRegion>> targets;  ///< by leaf
};

/// One partition on its way to a server and back. Its index in the server's table is the tag on the
/// wire.
struct Request {
  Active* active = nullptr;  ///< null: nobody waits (answers of a push land in the flow's memory)
  uint16_t flow = 0;
  uint32_t partition = 0;
  int64_t step = 0;
  wire::Kind kind = wire::Kind::kPush;
  Stage stage = Stage::kQueued;
  Clock::time_point since;
  uint32_t slot = 0;  ///< the last one that it was written from
  bool live = false;
  bool sent = false;  ///< its source is not needed any more
  bool answered = false;
};

struct Slot {
  uint32_t tag = 0;
  bool writing = false;  ///< its kWriteDone is still to come
  bool granted = true;   ///< the server allows it to be written
  bool borrows = false;  ///< while `writing`: from memory of the operation, which lasts as long
};

struct Server {
  std::string address;
  EndpointId endpoint = 0;
  bool connecting = false;
  bool connected = false;
  bool gone = false;
  wire::LandingGrant grant{};
  /// One piece per slot, source of writes: a header, and where buffers of others cannot be
  /// registered for one transfer, a copy of the payload after it.
  Slab outgoing;
  size_t outgoing_stride = 0;
  std::vector<Slot> slots;
  std::vector<uint32_t> free_slots;
  std::deque<Request> requests;  ///< a deque: references stay valid as it grows
  std::vector<uint32_t> free_tags;
  std::deque<uint32_t> queue;  ///< tags not yet posted, in order
};

/// Answers of a kPush that its kPull has not fetched yet.
struct Staged {
  bool active = false;
  int64_t step = 0;
  size_t unanswered = 0;
  Status failure;
  std::list<Active>::iterator pull;
  bool pulled = false;  ///< `pull` is set
};

/// Registered memory with room for every leaf of a flow; made when it is first needed.
using Mirror = std::vector<Slab>;

/// A kRead between its beginning and its end.
struct Reading {
  bool active = false;
  std::list<Active>::iterator operation;
  size_t outstanding = 0;  ///< reads that are not done
  int tries = 0;
  Status failure;  ///< of one that could not be asked for
};

/// What one server has told in a kFollow.
struct Told {
  uint32_t tag = 0;  ///< of the last question
  bool answered = true;
  wire::Kept kept{};
  uint64_t checksum = 0;  ///< of what came
};

/// A kFollow between its beginning and its end. First every server is asked to keep its newest
/// version; those that are behind the others are asked again, until all keep the same. Then that is
/// taken.
struct Following {
  bool active = false;
  std::list<Active>::iterator operation;
  bool taking = false;
  bool late = false;  ///< the time is over: what is not there now does not count
  int rounds = 0;
  std::vector<Told> servers;
  std::optional<Clock::time_point> look_again;  ///< what is waited for may never come
  std::optional<Clock::time_point> deadline;
};

/// A table, in its place among the flows.
struct RowTable {
  TableSpec spec;
  std::vector<uint32_t> chunk;  ///< rows of a full message, by server
  std::vector<Slab> spare;      ///< buffers of calls that have ended
  int64_t next = 0;             ///< the step of this worker's next push
  /// Of the push that is not answered yet. What is of a later step waits for that in `held`: at the
  /// server it would keep a slot, which others may need so that the answer can come.
  std::optional<int64_t> pushing;
  std::list<std::list<Active>::iterator> held;
  Status failure;  ///< of a push that was done before

  bool holds(const Operation& what) const {
    return pushing.has_value() && (what.kind == OperationKind::kPushRows || what.step > *pushing);
  }
};

struct Flow {
  FlowSpec spec;
  std::unique_ptr<RowTable> table;                   ///< then nothing else is used
  std::vector<std::vector<uint32_t>> partitions_of;  ///< by server
  std::unique_ptr<const Packing> packing;            ///< of a flow that has packs
  std::vector<std::shared_ptr<Pages>> spare;         ///< buffers of packs that are in no use
  Mirror staging;  ///< answers of a kPush land here, until its kPull
  /// Answers of everything else land here where the buffers that they are for cannot be registered.
  Mirror bounce;
  Staged staged;
  Mirror copies;         ///< what was read lands here until it is known to be of one version
  Slab locations;        ///< wire::Location of every partition, as the servers told
  Slab seals;            ///< wire::Seal before and after, of every server
  int64_t newest = -1;   ///< version of the parameters that came back last
  uint32_t dropped = 0;  ///< gradients that were not counted
  Slab verdicts;         ///< wire::Verdict of every server, where gradients are held
  bool located = false;
  Reading reading;
  Slab kept;               ///< wire::Kept, by server and slot
  uint64_t questions = 0;  ///< that servers were asked by a kKeep
  Following following;

  const wire::Location& location(size_t partition) const {
    return reinterpret_cast<const wire::Location*>(locations.pages.data())[partition];
  }
  const wire::Verdict& verdict_of(size_t server) const {
    return reinterpret_cast<const wire::Verdict*>(verdicts.pages.data())[server];
  }
  const wire::Seal* seals_of(size_t server) const {
    return reinterpret_cast<const wire::Seal*>(seals.pages.data()) + 2 * server;
  }
};

class Engine final : public WorkerEngine {
 public:
  Engine(WorkerOptions options, std::unique_ptr<fabric::Fabric> fabric)
      : options_(std::move(options)),
        fabric_(std::move(fabric)),
        cheap_(fabric_->registration_is_cheap()),
        wait_(std::chrono::microseconds(options_.spin_us)),
        recorder_(options_.recorder_capacity) {}
  ~Engine() override { close(); }

  Status connect(const std::vector<ServerAddress>& servers, int timeout_ms) override;
  Status add_flow(FlowSpec spec) override;
  Status add_table(TableSpec spec) override;
  void start(Operation operation) override;
  void fail(Status why) override;
  void stop_waiting() override;
  Status await_sent() override;
  void interrupt() override {
    fail(Status(Code::kCancelled, "interrupted: this worker was told to stop while it waited"));
  }
  size_t in_flight() const override;
  std::vector<Pending> pending(size_t limit) const override;
  WorkerStats stats() const override;
  std::vector<Record> records() const override { return recorder_.snapshot(); }
  RecordCounts record_counts() const override { return recorder_.counts(); }
  std::string transport() const override {
    std::lock_guard guard(progress_lock_);
    return fabric_->describe();
  }
  std::string notice() const override {
    std::lock_guard guard(progress_lock_);
    return fabric_->notice();
  }
  std::string trouble() const override {
    std::lock_guard guard(progress_lock_);
    const Status& why = failure_.ok() ? loss_ : failure_;
    return why.ok() ? fabric_->trouble() : why.message();
  }
  Status status() const override;
  bool wait_failure(int timeout_ms) override;
  void close() override;

 private:
  // Everything below needs progress_lock_ but lead(), pack() and prepare_rows().
  Crew::Task lead();
  Status pack(Operation& operation);
  Result<std::shared_ptr<RowCall>> prepare_rows(const Operation& operation);
  bool progress();
  void begin(Operation operation, std::shared_ptr<RowCall> rows);
  void handle(const Event& event);
  void connected(Server& server, const Event& event);
  void disconnected(size_t index, const Event& event);
  void received(size_t index, const Event& event);
  bool credit(size_t index, uint32_t slot);
  Status stepped(const Operation& operation, Flow& flow, Status status);
  void write_done(size_t index, uint32_t slot);
  void sent(Server& server, uint32_t tag);
  const Request* unsent() const;
  void violation(size_t index, const std::string& text);
  void lose(Status why);
  void give_up();
  /// No connection can touch the buffers of an operation any more.
  bool quiet() const {
    return std::all_of(servers_.begin(), servers_.end(),
                       [](const Server& s) { return s.gone || !s.connecting; });
  }
  /// Nothing waits but for answers: credits, and completions of writes, need wake nobody.
  bool patient() const {
    return !closing_ && failure_.ok() && loss_.ok() && borrowed_ == 0 &&
           std::all_of(servers_.begin(), servers_.end(),
                       [](const Server& s) { return s.connected && s.queue.empty(); });
  }
  /// All that was begun is done, and what is still to be sent of it is in the fabric's hands.
  bool idle() const {
    return std::all_of(active_.begin(), active_.end(),
                       [](const Active& each) { return each.done; }) &&
           std::all_of(servers_.begin(), servers_.end(),
                       [](const Server& s) { return s.queue.empty(); });
  }
  void close_connections(const Status& why, bool flush);
  void pump(size_t index);
  bool post(size_t index, uint32_t tag, uint32_t slot, std::span<const fabric::Slice> slices);
  bool post_rows(size_t index, uint32_t tag, uint32_t slot);
  void begin_rows(std::list<Active>::iterator active);
  void ask_rows(std::list<Active>::iterator active);
  void ask_held(RowTable& table);
  void answered_rows(size_t index, uint32_t tag, wire::Answer what, const Event& event);
  void settle_rows(std::list<Active>::iterator active, Status status);
  void keep_buffer(RowTable& table, Slab buffer);
  Status refused(size_t index, const Request& request, wire::Answer why);
  Status prepare(Active& active, Flow& flow);
  Status make_mirror(Mirror& mirror, const FlowSpec& spec, const char* what);
  void begin_pull(std::list<Active>::iterator active, Flow& flow);
  void begin_read(std::list<Active>::iterator active, Flow& flow);
  Status prepare_read(const Operation& what, Flow& flow);
  void read_servers(Flow& flow);
  void read_done(Flow& flow);
  void end_read(Flow& flow, Status status);
  void begin_follow(std::list<Active>::iterator active, Flow& flow);
  Status prepare_follow(Active& active, Flow& flow);
  void ask_all(Flow& flow, int64_t step);
  void ask_to_keep(Flow& flow, size_t index, int64_t step);
  void kept(Flow& flow, size_t index, uint32_t slot);
  void agree(Flow& flow);
  void take(Flow& flow, int64_t step);
  Status compare_checksums(const Flow& flow) const;
  void forget_questions(Flow& flow);
  void stop_following(Flow& flow, Status why);
  int follow_timeout();
  void enqueue(Active& active, uint32_t partition, wire::Kind kind, int64_t step);
  void enqueue(Active& active, uint32_t partition, wire::Kind kind, int64_t step, uint32_t index);
  void retire(Server& server, uint32_t tag);
  void answered(Request& request, const Status& status);
  void settle(Active* active);
  void finish(std::list<Active>::iterator active, Status status, std::function<void()> before = {});
  void finish_pull(Flow& flow);
  size_t server_of(EndpointId endpoint) const;
  /// Where the answer to a question that was written from `slot` stands in a flow's `kept`.
  size_t kept_index(size_t server, uint32_t slot) const { return server * most_slots_ + slot; }
  std::string server_name(size_t index) const {
    return "server " + std::to_string(index) + " (" + servers_[index].address + ")";
  }

  const WorkerOptions options_;
  mutable std::mutex progress_lock_;
  std::unique_ptr<fabric::Fabric> fabric_;
  const bool cheap_;  ///< XLA's buffers are registered for one operation; else they are copied
  std::condition_variable state_changed_;
  std::vector<Server> servers_;
  size_t most_slots_ = 0;  ///< that a server has granted
  std::vector<std::unique_ptr<Flow>> flows_;
  std::list<Active> active_;
  std::vector<Event> events_;
  Status failure_;  ///< operations end with it
  Status loss_;     ///< a connection ended; the verdict of the control plane is awaited
  Clock::time_point loss_time_;
  bool closing_ = false;
  bool sleeps_patiently_ = false;  ///< who leads, if it sleeps
  Wait wait_;                      ///< of who leads; not guarded
  bool handling_ = false;          ///< events_
  Clock::time_point last_sent_;    ///< when a write was done last
  size_t awaited_ = 0;             ///< threads that wait for what is done to be sent
  size_t borrowed_ = 0;            ///< slots that borrow, over fabrics where others hold a copy
  WorkerStats stats_;
  Recorder recorder_;
  /// Callbacks of operations that have ended, for the crew to run.
  std::deque<Crew::Task> finished_;
  std::once_flag joined_;
  Crew crew_{"jaxrdma-prog", [this] { return lead(); }};  // last: its threads use the above
};

Status Engine::connect(const std::vector<ServerAddress>& servers, int timeout_ms) {
  std::unique_lock guard(progress_lock_);
  if (!servers_.empty()) return Status(Code::kInvalidArgument, "this engine is connected already");
  servers_.resize(servers.size());
  for (size_t i = 0; i < servers.size(); ++i) {
    fabric::Hello hello;
    hello.job = options_.job;
    hello.protocol_version = wire::kProtocolVersion;
    hello.worker = (options_.follows ? wire::kFirstFollower : 0) + options_.worker;
    hello.incarnation = options_.incarnation;
    hello.token = servers[i].token;
    servers_[i].address = servers[i].address;
    Result<EndpointId> endpoint = fabric_->connect(servers[i].address, hello, timeout_ms);
    if (!endpoint.ok()) return endpoint.status();
    servers_[i].endpoint = endpoint.value();
    servers_[i].connecting = true;
  }
  fabric_->wake();
  auto settled = [this] {
    return closing_ || !failure_.ok() || !loss_.ok() ||
           std::all_of(servers_.begin(), servers_.end(),
                       [](const Server& s) { return s.connected; });
  };
  // The fabric ends every attempt within timeout_ms; the margin only covers a busy machine.
  if (!state_changed_.wait_for(guard, std::chrono::milliseconds(timeout_ms + 10000), settled)) {
    return Status(Code::kDeadline,
                  "servers did not answer within " + std::to_string(timeout_ms) + " ms");
  }
  if (closing_) return Status(Code::kCancelled, "closed while connecting to the servers");
  if (!failure_.ok()) return failure_;
  return loss_;
}

Status Engine::add_flow(FlowSpec spec) {
  std::lock_guard guard(progress_lock_);
  if (servers_.empty())
    return Status(Code::kInvalidArgument, "connect to the servers before adding a flow");
  for (const Server& server : servers_) {
    // A follower pushes nothing.
    const size_t payload = options_.follows ? std::numeric_limits<size_t>::max()
                                            : server.grant.slot_stride - sizeof(wire::Header);
    if (Status checked = check_flow(spec, static_cast<uint32_t>(servers_.size()), payload);
        !checked.ok()) {
      return checked;
    }
  }
  if (spec.id != flows_.size()) {
    return Status(Code::kInvalidArgument, "flow " + std::to_string(spec.id) +
                                              " was added when flow " +
                                              std::to_string(flows_.size()) + " was the next");
  }
  auto flow = std::make_unique<Flow>();
  flow->spec = std::move(spec);
  auto packing = std::make_unique<const Packing>(flow->spec);
  if (packing->bytes() > 0) flow->packing = std::move(packing);
  flow->partitions_of.resize(servers_.size());
  for (uint32_t i = 0; i < flow->spec.partitions.size(); ++i)
    flow->partitions_of[flow->spec.partitions[i].server].push_back(i);
  if (flow->spec.held > 0 && !options_.follows) {
    auto pages = Pages::allocate(servers_.size() * sizeof(wire::Verdict), "verdicts");
    if (!pages.ok()) return pages.status();
    flow->verdicts.pages = std::move(pages.value());
    Status enrolled = flow->verdicts.enrol(*fabric_, fabric::Access::kRemoteWrite);
    if (!enrolled.ok()) return enrolled;
  }
  flows_.push_back(std::move(flow));
  return {};
}

Status Engine::add_table(TableSpec spec) {
  std::lock_guard guard(progress_lock_);
  if (servers_.empty())
    return Status(Code::kInvalidArgument, "connect to the servers before adding a table");
  auto table = std::make_unique<RowTable>();
  for (const Server& server : servers_) {
    const size_t payload = server.grant.slot_stride - sizeof(wire::Header);
    if (Status checked = check_table(spec, payload); !checked.ok()) return checked;
    table->chunk.push_back(wire::chunk_rows(spec.columns, payload));
  }
  if (spec.id != flows_.size()) {
    return Status(Code::kInvalidArgument, "table " + std::to_string(spec.id) +
                                              " was added when number " +
                                              std::to_string(flows_.size()) + " was the next");
  }
  auto flow = std::make_unique<Flow>();
  flow->spec.id = spec.id;
  flow->spec.mode = FlowMode::kShow;
  flow->partitions_of.resize(servers_.size());
  table->spec = std::move(spec);
  flow->table = std::move(table);
  flows_.push_back(std::move(flow));
  return {};
}

void Engine::start(Operation operation) {
  std::shared_ptr<RowCall> rows;
  if (of_rows(operation.kind)) {
    auto prepared = prepare_rows(operation);
    if (!prepared.ok()) {
      operation.done(prepared.status());
      return;
    }
    rows = std::move(prepared.value());
  } else if (Status packed = pack(operation); !packed.ok()) {
    operation.done(packed);
    return;
  }
  std::unique_lock guard(progress_lock_);
  if (!failure_.ok() || closing_) {
    // On this thread: the crew may have ended already.
    const Status why = failure_.ok() ? Status(Code::kCancelled, "the session is closed") : failure_;
    rows.reset();  // while the lock is held
    guard.unlock();
    operation.done(why);
    return;
  }
  const bool follows = operation.kind == OperationKind::kFollow;
  begin(std::move(operation), std::move(rows));
  // Who leads may sleep, and has not seen what ended here, or what waits for more than answers now.
  const bool hurry = sleeps_patiently_ && (!patient() || follows);
  if (hurry) sleeps_patiently_ = false;
  if (hurry || !finished_.empty()) fabric_->wake();
}

/// Makes an operation on arrays one on leaves. Takes the lock for moments only: the copies are made
/// by who starts the operation, and by who is told that it is done.
Status Engine::pack(Operation& operation) {
  std::unique_lock guard(progress_lock_);
  if (operation.flow >= flows_.size()) return {};  // which `begin` says
  Flow& flow = *flows_[operation.flow];
  if (flow.packing == nullptr || operation.leaves.size() != flow.spec.arrays()) return {};
  std::shared_ptr<Pages> buffer;
  if (!flow.spare.empty()) {
    buffer = std::move(flow.spare.back());
    flow.spare.pop_back();
  }
  guard.unlock();  // a flow stays where it is, and its packing as it is
  if (buffer == nullptr) {
    auto pages = Pages::allocate(flow.packing->bytes(),
                                 "the packs of flow " + std::to_string(operation.flow));
    if (!pages.ok()) return pages.status();
    buffer = std::make_shared<Pages>(std::move(pages.value()));
  }
  auto leaves = flow.packing->pack(operation.kind, operation.leaves, buffer->data());
  if (!leaves.ok()) return leaves.status();
  const bool receives = operation.kind != OperationKind::kPush;
  operation.done = [this, &flow, receives, buffer = std::move(buffer),
                    arrays = std::exchange(operation.leaves, std::move(leaves.value())),
                    done = std::move(operation.done)](const Status& status) mutable {
    if (status.ok() && receives) flow.packing->unpack(buffer->data(), arrays);
    {
      std::lock_guard returned(progress_lock_);
      if (flow.spare.size() < kMostSpareBuffers) flow.spare.push_back(std::move(buffer));
    }
    done(status);
  };
  return {};
}

void Engine::begin(Operation operation, std::shared_ptr<RowCall> rows) {
  active_.emplace_back(std::move(operation));
  auto active = std::prev(active_.end());
  const Operation& what = active->operation;
  if (rows != nullptr) {
    active->rows = std::move(rows);
    return begin_rows(active);
  }
  if (what.flow >= flows_.size() || what.leaves.size() != flows_[what.flow]->spec.leaves.size()) {
    finish(active,
           Status(Code::kInvalidArgument, "operation on flow " + std::to_string(what.flow) +
                                              " with " + std::to_string(what.leaves.size()) +
                                              " leaves: no such flow of this session"));
    return;
  }
  Flow& flow = *flows_[what.flow];
  if (flow.table != nullptr) {
    finish(active, Status(Code::kInvalidArgument, "flow " + std::to_string(what.flow) +
                                                      " is a table: rows are pushed and pulled"));
    return;
  }
  if (options_.follows && what.kind != OperationKind::kFollow) {
    finish(active, Status(Code::kInvalidArgument, "a follower does nothing but follow"));
    return;
  }
  if (what.kind == OperationKind::kFollow) {
    begin_follow(active, flow);
    return;
  }
  if (what.kind == OperationKind::kPull) {
    begin_pull(active, flow);
    return;
  }
  if (what.kind == OperationKind::kRead) {
    begin_read(active, flow);
    return;
  }
  const auto same_place = [&](const Operation& other) {
    if (other.flow != what.flow || other.kind == OperationKind::kPull) return false;
    // Where buffers are copied, answers of all but pushes land at one place.
    if (other.kind == OperationKind::kPush || other.kind == OperationKind::kRead) return false;
    return !cheap_ || other.kind == OperationKind::kExchange;
  };
  if (same_place(what) && std::count_if(active_.begin(), active_.end(), [&](const Active& other) {
                            return same_place(other.operation);
                          }) > 1) {
    finish(
        active,
        Status(
            Code::kInvalidArgument,
            "two steps of one model at once (step " + std::to_string(what.step) +
                "): thread the state from one ps_step to the next, and call it from one device"));
    return;
  }
  const bool pushes = what.kind == OperationKind::kExchange || what.kind == OperationKind::kPush;
  if (flow.spec.held > 0 && pushes && what.step > flow.newest) {
    // The servers would take it for a broken peer.
    const Status ahead(Code::kStale,
                       "step " + std::to_string(what.step) + " is ahead of step " +
                           std::to_string(flow.newest) +
                           ", the newest that came back to this worker: use the state of "
                           "session.init or of the last ps_step, with its step unchanged");
    finish(active, ahead);
    return;
  }
  if (Status prepared = prepare(*active, flow); !prepared.ok()) {
    finish(active, std::move(prepared));
    return;
  }
  const wire::Kind kind = what.kind == OperationKind::kInit    ? wire::Kind::kInit
                          : what.kind == OperationKind::kFetch ? wire::Kind::kPull
                                                               : wire::Kind::kPush;
  const auto ask = [&](uint32_t partition, wire::Kind for_what) {
    ++(what.kind == OperationKind::kPush ? flow.staged.unanswered : active->unanswered);
    enqueue(*active, partition, for_what, what.step);
  };
  for (uint32_t i = 0; i < flow.spec.partitions.size(); ++i) ask(i, kind);
  if (flow.spec.held > 0 && kind == wire::Kind::kPush) {
    for (const std::vector<uint32_t>& partitions : flow.partitions_of) {
      if (!partitions.empty()) ask(partitions[0], wire::Kind::kVerdict);
    }
  }
  if (active->unsent == 0) {
    settle(&*active);
    return;
  }
  for (size_t i = 0; i < servers_.size(); ++i) pump(i);
  // Delivers the completions of what went out at once, without waking the crew for it.
  progress();
}

/// One more request that `pump` will post.
void Engine::enqueue(Active& active, uint32_t partition, wire::Kind kind, int64_t step) {
  const FlowSpec& spec = flows_[active.operation.flow]->spec;
  enqueue(active, partition, kind, step, spec.partitions[partition].server);
}

void Engine::enqueue(Active& active, uint32_t partition, wire::Kind kind, int64_t step,
                     uint32_t index) {
  const uint16_t flow = active.operation.flow;
  Server& server = servers_[index];
  uint32_t tag;
  if (!server.free_tags.empty()) {
    tag = server.free_tags.back();
    server.free_tags.pop_back();
  } else {
    tag = static_cast<uint32_t>(server.requests.size());
    server.requests.emplace_back();
  }
  Request& request = server.requests[tag];
  request = Request{};
  request.active = &active;
  request.flow = flow;
  request.partition = partition;
  request.step = step;
  request.kind = kind;
  request.since = Clock::now();
  request.live = true;
  ++active.unsent;
  recorder_.add(Stage::kQueued, flow, step, partition, static_cast<uint16_t>(index));
  server.queue.push_back(tag);
}

/// Checks the buffers against the flow and registers them.
Status Engine::prepare(Active& active, Flow& flow) {
  const Operation& what = active.operation;
  const bool sends = what.kind != OperationKind::kFetch && what.kind != OperationKind::kFollow;
  const bool staged = what.kind == OperationKind::kPush;
  if (staged) {
    if (flow.staged.active) {
      return Status(Code::kInvalidArgument,
                    "push of step " + std::to_string(what.step) + " before the pull of step " +
                        std::to_string(flow.staged.step) + ": pull what was pushed first");
    }
    if (Status s = make_mirror(flow.staging, flow.spec, "pushed"); !s.ok()) return s;
  } else if (!cheap_) {
    if (Status s = make_mirror(flow.bounce, flow.spec, "returning"); !s.ok()) return s;
  }
  active.sources.resize(what.leaves.size());
  active.targets.resize(what.leaves.size());
  for (size_t i = 0; i < what.leaves.size(); ++i) {
    const LeafBuffers& buffers = what.leaves[i];
    const Leaf& leaf = flow.spec.leaves[i];
    if (leaf.elements == 0) continue;
    const std::string name = "leaf " + std::to_string(i) + " of flow " + std::to_string(what.flow);
    if (sends) {
      if (buffers.source == nullptr)
        return Status(Code::kInvalidArgument, name + " has no source buffer");
      if (accumulator_dtype(buffers.source_dtype) != accumulator_dtype(leaf.dtype)) {
        return Status(Code::kInvalidArgument,
                      name + " is " + dtype_name(leaf.dtype) + ", its gradient " +
                          dtype_name(buffers.source_dtype) + ": cast the gradient");
      }
      if (cheap_) {
        // The fabric only reads from a source.
        auto region = fabric_->register_memory(const_cast<std::byte*>(buffers.source),
                                               leaf.elements * dtype_bytes(buffers.source_dtype),
                                               fabric::Access::kLocal);
        if (!region.ok()) return region.status();
        active.sources[i] = std::move(region.value());
      }
    }
    if (!staged) {
      if (buffers.target == nullptr)
        return Status(Code::kInvalidArgument, name + " has no target buffer");
      if (!cheap_) continue;
      auto region = fabric_->register_memory(
          buffers.target, leaf.elements * dtype_bytes(leaf.dtype), fabric::Access::kRemoteWrite);
      if (!region.ok()) return region.status();
      active.targets[i] = std::move(region.value());
    }
  }
  if (staged) {
    flow.staged = Staged{};
    flow.staged.active = true;
    flow.staged.step = what.step;
  }
  return {};
}

Status Engine::make_mirror(Mirror& mirror, const FlowSpec& spec, const char* what) {
  if (!mirror.empty()) return {};
  Mirror made(spec.leaves.size());
  for (size_t i = 0; i < spec.leaves.size(); ++i) {
    const Leaf& leaf = spec.leaves[i];
    auto pages = Pages::allocate(leaf.elements * dtype_bytes(leaf.dtype),
                                 std::string("the ") + what + " parameters of leaf " +
                                     std::to_string(i) + " of flow " + std::to_string(spec.id));
    if (!pages.ok()) return pages.status();
    made[i].pages = std::move(pages.value());
    if (leaf.elements == 0) continue;
    if (Status s = made[i].enrol(*fabric_, fabric::Access::kRemoteWrite); !s.ok()) return s;
  }
  mirror = std::move(made);
  return {};
}

/// Posts what the server's slots and credits allow.
void Engine::pump(size_t index) {
  Server& server = servers_[index];
  if (!server.connected || server.gone) return;
  Endpoint* endpoint = fabric_->endpoint(server.endpoint);
  if (endpoint == nullptr) return;
  while (!server.queue.empty() && !server.free_slots.empty() && endpoint->credits() > 0) {
    const uint32_t tag = server.queue.front();
    server.queue.pop_front();
    const uint32_t index_of_slot = server.free_slots.back();
    server.free_slots.pop_back();
    Request& request = server.requests[tag];
    if (wire::of_rows(request.kind)) {
      if (!post_rows(index, tag, index_of_slot)) return;
      continue;
    }
    const Operation& what = request.active->operation;
    Flow& flow = *flows_[request.flow];
    const Partition& partition = flow.spec.partitions[request.partition];
    const LeafBuffers& buffers = what.leaves[partition.leaf];
    const DType leaf_dtype = flow.spec.leaves[partition.leaf].dtype;
    const bool staged = what.kind == OperationKind::kPush;
    const bool payload = request.kind == wire::Kind::kPush || request.kind == wire::Kind::kInit;
    const bool locating = request.kind == wire::Kind::kLocate;
    const bool judging = request.kind == wire::Kind::kVerdict;
    const bool keeping = request.kind == wire::Kind::kKeep;

    const MemoryRegion* target_region = locating  ? flow.locations.region.get()
                                        : keeping ? flow.kept.region.get()
                                        : judging ? flow.verdicts.region.get()
                                        : staged  ? flow.staging[partition.leaf].region.get()
                                        : cheap_  ? request.active->targets[partition.leaf].get()
                                                  : flow.bounce[partition.leaf].region.get();
    const size_t target_offset = locating  ? request.partition * sizeof(wire::Location)
                                 : keeping ? kept_index(index, index_of_slot) * sizeof(wire::Kept)
                                 : judging ? index * sizeof(wire::Verdict)
                                           : partition.begin * dtype_bytes(leaf_dtype);
    std::byte* const piece = server.outgoing.pages.data() + index_of_slot * server.outgoing_stride;
    wire::Header header{};
    header.magic = wire::kHeaderMagic;
    header.flow = request.flow;
    header.kind = request.kind;
    header.dtype = static_cast<uint8_t>(payload ? buffers.source_dtype : leaf_dtype);
    header.partition = request.partition;
    header.step = request.step;
    header.incarnation = options_.incarnation;
    header.bytes = payload   ? partition_bytes(partition, buffers.source_dtype)
                   : keeping ? ++flow.questions
                             : 0;
    header.reply_address = reinterpret_cast<uint64_t>(target_region->data()) + target_offset;
    header.reply_key = target_region->remote_key();
    header.reply_tag = tag;

    std::memcpy(piece, &header, sizeof(header));
    const size_t begin = partition.begin * dtype_bytes(buffers.source_dtype);
    fabric::Slice slices[2];
    size_t slice_count = 1;
    slices[0] = server.outgoing.slice(piece, sizeof(header));
    if (payload && cheap_) {
      const MemoryRegion* source = request.active->sources[partition.leaf].get();
      slices[slice_count++] = {source, source->data() + begin, header.bytes};
    } else if (payload) {
      std::memcpy(piece + sizeof(header), buffers.source + begin, header.bytes);
      slices[0].bytes += header.bytes;
    }
    stats_.bytes_pushed += header.bytes;
    server.slots[index_of_slot].borrows = cheap_;
    if (!post(index, tag, index_of_slot, std::span(slices, slice_count))) return;
    if (!cheap_) sent(server, tag);  // the slot has a copy
  }
}

/// Writes a request into a slot of the server; false if the connection is lost by that.
bool Engine::post(size_t index, uint32_t tag, uint32_t slot_index,
                  std::span<const fabric::Slice> slices) {
  Server& server = servers_[index];
  Request& request = server.requests[tag];
  Slot& slot = server.slots[slot_index];
  slot.tag = tag;
  slot.writing = true;
  slot.granted = false;
  request.slot = slot_index;
  request.stage = Stage::kPosted;
  request.since = Clock::now();
  recorder_.add(Stage::kPosted, request.flow, request.step, request.partition,
                static_cast<uint16_t>(index));
  const fabric::RemoteSlice remote{server.grant.address + slot_index * server.grant.slot_stride,
                                   server.grant.key};
  Endpoint* endpoint = fabric_->endpoint(server.endpoint);
  Status posted = endpoint->write(slices, remote, slot_index, slot_index);
  if (posted.ok()) return true;
  lose(std::move(posted));
  return false;
}

void Engine::begin_pull(std::list<Active>::iterator active, Flow& flow) {
  const int64_t step = active->operation.step;
  if (!flow.staged.active || flow.staged.step != step || flow.staged.pulled) {
    finish(active, Status(Code::kInvalidArgument,
                          "pull of step " + std::to_string(step) +
                              (flow.staged.active ? ", but the last push was of step " +
                                                        std::to_string(flow.staged.step)
                                                  : std::string(" without a push before it"))));
    return;
  }
  flow.staged.pull = active;
  flow.staged.pulled = true;
  if (flow.staged.unanswered == 0) finish_pull(flow);
}

void Engine::finish_pull(Flow& flow) {
  auto active = flow.staged.pull;
  Status status = flow.staged.failure;
  flow.staged = Staged{};
  status = stepped(active->operation, flow, std::move(status));
  // The copy may be long: it runs with the callback. Nobody writes into the staging memory
  // until the next push of this flow, which needs the step that this operation returns.
  Flow* source = &flow;
  std::vector<LeafBuffers> leaves = active->operation.leaves;
  std::function<void()> copy;
  if (status.ok()) {
    copy = [source, leaves = std::move(leaves)] {
      for (size_t i = 0; i < leaves.size(); ++i) {
        const Pages& pages = source->staging[i].pages;
        if (pages.bytes() > 0 && leaves[i].target != nullptr)
          std::memcpy(leaves[i].target, pages.data(), pages.bytes());
      }
    };
  }
  finish(active, std::move(status), std::move(copy));
}

Status Engine::prepare_read(const Operation& what, Flow& flow) {
  if (!fabric_->can_read()) {
    return Status(Code::kInvalidArgument,
                  std::string(fabric_->name()) + " cannot read in a server's memory: pull instead");
  }
  if (flow.reading.active)
    return Status(Code::kInvalidArgument, "two reads of one model at once: await the first");
  if (flow.spec.mode == FlowMode::kAverage)
    return Status(Code::kInvalidArgument, "servers hold no parameters of a flow that averages");
  for (size_t i = 0; i < what.leaves.size(); ++i) {
    if (flow.spec.leaves[i].elements > 0 && what.leaves[i].target == nullptr)
      return Status(Code::kInvalidArgument, "leaf " + std::to_string(i) + " has no target buffer");
  }
  if (Status s = make_mirror(flow.copies, flow.spec, "read"); !s.ok()) return s;
  const auto table = [&](Slab& slab, size_t bytes, const char* name) -> Status {
    if (slab.region != nullptr) return {};
    auto pages = Pages::allocate(bytes, name);
    if (!pages.ok()) return pages.status();
    slab.pages = std::move(pages.value());
    return slab.enrol(*fabric_, fabric::Access::kRemoteWrite);
  };
  const size_t bytes = flow.spec.partitions.size() * sizeof(wire::Location);
  if (Status s = table(flow.locations, bytes, "where to read"); !s.ok()) return s;
  return table(flow.seals, 2 * servers_.size() * sizeof(wire::Seal), "versions read");
}

void Engine::begin_read(std::list<Active>::iterator active, Flow& flow) {
  if (flow.spec.partitions.empty()) return finish(active, {});
  if (Status prepared = prepare_read(active->operation, flow); !prepared.ok())
    return finish(active, std::move(prepared));
  flow.reading = Reading{};
  flow.reading.active = true;
  flow.reading.operation = active;
  if (flow.located) {
    read_servers(flow);
  } else {
    for (uint32_t i = 0; i < flow.spec.partitions.size(); ++i) {
      ++active->unanswered;
      enqueue(*active, i, wire::Kind::kLocate, 0);
    }
    for (size_t i = 0; i < servers_.size(); ++i) pump(i);
  }
  progress();
}

/// Asks every server for its seal, its partitions, and its seal again.
void Engine::read_servers(Flow& flow) {
  Reading& reading = flow.reading;
  for (size_t index = 0; index < servers_.size(); ++index) {
    const std::vector<uint32_t>& partitions = flow.partitions_of[index];
    if (partitions.empty()) continue;
    Endpoint* endpoint = fabric_->endpoint(servers_[index].endpoint);
    const wire::Location& seal = flow.location(partitions[0]);
    const auto read = [&](const fabric::Slice& local, uint64_t address,
                          const fabric::RemoteKey& key) {
      if (endpoint == nullptr) return;  // its end is on the way, and ends this operation
      const Status status = endpoint->read(local, {address, key}, flow.spec.id);
      if (status.ok()) {
        ++reading.outstanding;
        return;
      }
      endpoint = nullptr;
      if (status.code() == Code::kInvalidArgument) {
        // The connection is as good as before.
        if (reading.failure.ok()) reading.failure = status;
      } else {
        lose(Status(status.code(), "reading from " + server_name(index) + ": " + status.message()));
      }
    };
    const auto read_seal = [&](size_t which) {
      const auto* local = reinterpret_cast<const std::byte*>(flow.seals_of(index) + which);
      read(flow.seals.slice(local, sizeof(wire::Seal)), seal.seal_address, seal.key);
    };
    read_seal(0);
    for (const uint32_t i : partitions) {
      const Partition& partition = flow.spec.partitions[i];
      const wire::Location& there = flow.location(i);
      const Slab& copy = flow.copies[partition.leaf];
      const DType dtype = flow.spec.leaves[partition.leaf].dtype;
      read(copy.slice(copy.pages.data() + partition.begin * dtype_bytes(dtype), there.bytes),
           there.address, there.key);
    }
    read_seal(1);
  }
  if (reading.outstanding == 0 && !reading.failure.ok()) end_read(flow, reading.failure);
}

void Engine::read_done(Flow& flow) {
  Reading& reading = flow.reading;
  if (!reading.active || --reading.outstanding > 0) return;
  if (!reading.failure.ok()) return end_read(flow, reading.failure);
  auto active = reading.operation;
  const Operation& what = active->operation;
  int64_t step = -1;
  bool whole = true;
  for (size_t index = 0; index < servers_.size() && whole; ++index) {
    if (flow.partitions_of[index].empty()) continue;
    const wire::Seal* seals = flow.seals_of(index);
    whole = seals[0].sequence == seals[1].sequence && seals[0].sequence % 2 == 0 &&
            seals[0].step >= what.step && (step < 0 || seals[0].step == step);
    step = seals[0].step;
  }
  if (!whole) {
    if (++reading.tries < kReadTries) return read_servers(flow);
    end_read(flow, Status(Code::kStale, "the parameters did not rest at step " +
                                            std::to_string(what.step) +
                                            " or later while they "
                                            "were read, " +
                                            std::to_string(kReadTries) + " times"));
    return;
  }
  for (size_t i = 0; i < what.leaves.size(); ++i) {
    const Pages& pages = flow.copies[i].pages;
    if (pages.bytes() > 0) std::memcpy(what.leaves[i].target, pages.data(), pages.bytes());
    stats_.bytes_pulled += pages.bytes();
  }
  stats_.last_read = step;
  end_read(flow, {});
}

void Engine::end_read(Flow& flow, Status status) {
  const auto active = flow.reading.operation;
  flow.reading = Reading{};
  finish(active, std::move(status));
}

// --- Tables.

/// Sorts and packs what an operation on a table sends. Takes the lock for moments only.
Result<std::shared_ptr<RowCall>> Engine::prepare_rows(const Operation& what) {
  std::unique_lock guard(progress_lock_);
  if (closing_) return Status(Code::kCancelled, "the session is closed");
  if (!failure_.ok()) return failure_;
  RowTable* const table = what.flow < flows_.size() ? flows_[what.flow]->table.get() : nullptr;
  if (table == nullptr) {
    return Status(Code::kInvalidArgument,
                  "rows of flow " + std::to_string(what.flow) + ", which is no table");
  }
  guard.unlock();  // a table stays where it is, and but for its buffers as it is

  if (what.rows.columns != table->spec.columns) {
    return Status(Code::kInvalidArgument,
                  "table '" + table->spec.name + "' has " + std::to_string(table->spec.columns) +
                      " columns, and was given " + std::to_string(what.rows.columns));
  }
  const bool pushes = what.kind == OperationKind::kPushRows;
  const void* const buffer =
      pushes ? static_cast<const void*>(what.rows.gradients) : what.rows.target;
  if (what.rows.ids.count > 0 && (buffer == nullptr || what.rows.ids.data == nullptr))
    return Status(Code::kInvalidArgument, "table '" + table->spec.name + "' was given no buffer");
  auto batch = RowBatch::create(table->spec, what.rows.ids, table->chunk);
  if (!batch.ok()) return batch.status();
  auto call = std::make_shared<RowCall>();
  call->batch = std::move(batch.value());
  call->batch.lay_out(pushes);
  call->values_at = call->batch.payload_bytes();
  const size_t values = pushes ? 0 : wire::values_bytes(call->batch.rows(), table->spec.columns);
  const size_t need = call->values_at + values;

  guard.lock();
  for (Slab& spare : table->spare) {
    if (spare.pages.bytes() < need) continue;
    std::swap(spare, table->spare.back());
    call->buffer = std::move(table->spare.back());
    table->spare.pop_back();
    break;
  }
  if (call->buffer.region == nullptr && need > 0) {
    guard.unlock();
    // With room to spare: calls touch now more rows, now fewer, and registering may be dear.
    constexpr size_t kGrain = 64 << 10;
    const size_t grain = std::max(kGrain, std::bit_ceil(need) / 8);
    auto pages = Pages::allocate((need + grain - 1) / grain * grain,
                                 "rows of table '" + table->spec.name + "' on their way");
    if (!pages.ok()) return pages.status();
    call->buffer.pages = std::move(pages.value());
    guard.lock();
    Status enrolled = call->buffer.enrol(*fabric_, fabric::Access::kRemoteWrite);
    if (!enrolled.ok()) return enrolled;
  }
  guard.unlock();
  std::byte* const payloads = call->buffer.pages.data();
  if (pushes) {
    call->batch.pack_push(what.rows.gradients, payloads);
  } else {
    call->batch.pack_pull(payloads);
  }
  return call;
}

void Engine::begin_rows(std::list<Active>::iterator active) {
  const Operation& what = active->operation;
  RowTable& table = *flows_[what.flow]->table;
  const bool pushes = what.kind == OperationKind::kPushRows;
  if (!table.failure.ok()) return finish(active, table.failure);
  if (table.spec.policy == RowPolicy::kSync) {
    if (pushes ? what.step != table.next : what.step < 0 || what.step > table.next) {
      const std::string expected = (pushes ? "" : "at most ") + std::to_string(table.next);
      return finish(
          active, Status(Code::kStale, std::string(pushes ? "push to" : "lookup in") + " table '" +
                                           table.spec.name + "' at step " +
                                           std::to_string(what.step) + ", expected " + expected +
                                           ": go on from the table that the last push returned, "
                                           "and call it from one device"));
    }
    if (pushes) ++table.next;
  }
  if (table.holds(what)) {
    table.held.push_back(active);
    return;
  }
  ask_rows(active);
}

/// What waited for the answer to a push that has come.
void Engine::ask_held(RowTable& table) {
  auto held = std::exchange(table.held, {});
  for (const auto& active : held) {
    if (!table.failure.ok()) {
      finish(active, table.failure);
    } else if (table.holds(active->operation)) {
      table.held.push_back(active);
    } else {
      ask_rows(active);
    }
  }
}

void Engine::ask_rows(std::list<Active>::iterator active) {
  const Operation& what = active->operation;
  RowTable& table = *flows_[what.flow]->table;
  const bool pushes = what.kind == OperationKind::kPushRows;
  const wire::Kind kind = pushes ? wire::Kind::kPushRows : wire::Kind::kPullRows;
  // That a worker has touched nothing is news where all are waited for.
  const bool tells_none = pushes && table.spec.policy == RowPolicy::kSync;
  for (uint32_t index = 0; index < servers_.size(); ++index) {
    const std::vector<RowChunk>& chunks = active->rows->batch.chunks(index);
    for (uint32_t i = 0; i < chunks.size(); ++i) {
      if (chunks[i].count == 0 && !tells_none) continue;
      ++active->unanswered;
      enqueue(*active, i, kind, what.step, index);
    }
  }
  if (pushes) {
    // The gradients were copied.
    if (what.outcome != nullptr) what.outcome->version = what.step + 1;
    active->done = true;
    finished_.push_back([done = std::move(active->operation.done)] { done({}); });
    table.pushing = what.step;
  }
  if (active->unanswered == 0) return settle(&*active);
  for (size_t i = 0; i < servers_.size(); ++i) pump(i);
  // Delivers the completions of what went out at once, without waking the crew for it.
  if (!handling_) progress();
}

/// Writes the request of this tag into a slot; false if the connection is lost by that.
bool Engine::post_rows(size_t index, uint32_t tag, uint32_t slot) {
  Server& server = servers_[index];
  Request& request = server.requests[tag];
  const RowCall& call = *request.active->rows;
  const RowChunk& chunk = call.batch.chunks(static_cast<uint32_t>(index))[request.partition];
  const uint32_t columns = flows_[request.flow]->table->spec.columns;
  const bool pushes = request.kind == wire::Kind::kPushRows;
  wire::Header header{};
  header.magic = wire::kHeaderMagic;
  header.flow = request.flow;
  header.kind = request.kind;
  header.dtype = static_cast<uint8_t>(DType::kFloat32);
  header.partition = request.partition;
  header.step = request.step;
  header.incarnation = options_.incarnation;
  header.bytes = pushes ? wire::push_bytes(chunk.count, columns) : wire::pull_bytes(chunk.count);
  header.reply_tag = tag;
  if (!pushes) {
    const size_t before = wire::values_bytes(chunk.first, columns);
    header.reply_address =
        reinterpret_cast<uint64_t>(call.buffer.pages.data()) + call.values_at + before;
  }
  header.reply_key = call.buffer.region->remote_key();
  std::byte* const piece = server.outgoing.pages.data() + slot * server.outgoing_stride;
  std::memcpy(piece, &header, sizeof(header));
  const fabric::Slice slices[] = {
      server.outgoing.slice(piece, sizeof(header)),
      call.buffer.slice(call.buffer.pages.data() + chunk.offset, header.bytes)};
  stats_.bytes_pushed += header.bytes;
  server.slots[slot].borrows = true;
  if (!cheap_) ++borrowed_;
  return post(index, tag, slot, slices);
}

void Engine::answered_rows(size_t index, uint32_t tag, wire::Answer what, const Event& event) {
  Server& server = servers_[index];
  Request& request = server.requests[tag];
  const RowChunk& chunk =
      request.active->rows->batch.chunks(static_cast<uint32_t>(index))[request.partition];
  Status status;
  if (what == wire::Answer::kResult || what == wire::Answer::kResultAndCredit) {
    const TableSpec& spec = flows_[request.flow]->table->spec;
    const size_t expected =
        request.kind == wire::Kind::kPullRows ? wire::values_bytes(chunk.count, spec.columns) : 0;
    if (event.bytes != expected) {
      return violation(index, "rows of table '" + spec.name + "' were answered with " +
                                  std::to_string(event.bytes) + " bytes instead of " +
                                  std::to_string(expected));
    }
    stats_.bytes_pulled += event.bytes;
    recorder_.add(Stage::kConsumed, request.flow, request.step, request.partition,
                  static_cast<uint16_t>(index));
  } else if (what == wire::Answer::kStale || what == wire::Answer::kAhead) {
    status = refused(index, request, what);
  } else {
    return violation(index, "unknown answer " + std::to_string(static_cast<uint32_t>(what)));
  }
  if (what == wire::Answer::kResultAndCredit && !credit(index, request.slot)) return;
  request.answered = true;
  Active* const active = request.active;
  if (active->done) state_changed_.notify_all();  // what is answered has been sent, too
  if (request.sent) retire(server, tag);
  if (!status.ok() && active->failure.ok()) active->failure = status;
  --active->unanswered;
  settle(active);
}

void Engine::settle_rows(std::list<Active>::iterator active, Status status) {
  const Operation& what = active->operation;
  RowTable& table = *flows_[what.flow]->table;
  auto call = std::move(active->rows);
  if (what.kind == OperationKind::kPushRows) {
    if (status.ok()) {
      ++stats_.steps;
      ++stats_.gradients_accepted;
      stats_.last_step = std::max(stats_.last_step, what.step + 1);
    } else {
      ++stats_.gradients_dropped;
      if (table.failure.ok()) table.failure = status;
    }
    keep_buffer(table, std::move(call->buffer));
    table.pushing.reset();
    finish(active, std::move(status));
    return ask_held(table);
  }
  if (what.outcome != nullptr) what.outcome->version = what.step;
  if (!status.ok()) {
    keep_buffer(table, std::move(call->buffer));
    return finish(active, std::move(status));
  }
  // The copy may be long: it runs with the callback.
  finish(active, {}, [this, &table, call = std::move(call), target = what.rows.target] {
    call->batch.scatter(call->values(), target);
    std::lock_guard guard(progress_lock_);
    keep_buffer(table, std::move(call->buffer));
  });
}

/// For the next call. The smallest goes, if there are enough.
void Engine::keep_buffer(RowTable& table, Slab buffer) {
  if (buffer.region == nullptr) return;
  table.spare.push_back(std::move(buffer));
  if (table.spare.size() <= kMostSpareBuffers) return;
  table.spare.erase(std::min_element(
      table.spare.begin(), table.spare.end(),
      [](const Slab& a, const Slab& b) { return a.pages.bytes() < b.pages.bytes(); }));
}

// --- Following.

Status Engine::prepare_follow(Active& active, Flow& flow) {
  if (flow.following.active)
    return Status(Code::kInvalidArgument, "two pulls of one model at once: await the first");
  if (flow.spec.mode == FlowMode::kAverage)
    return Status(Code::kInvalidArgument, "servers hold no parameters of a flow that averages");
  if (flow.kept.region == nullptr) {
    const size_t bytes = kept_index(servers_.size(), 0) * sizeof(wire::Kept);
    auto pages = Pages::allocate(bytes, "what servers keep");
    if (!pages.ok()) return pages.status();
    flow.kept.pages = std::move(pages.value());
    if (Status s = flow.kept.enrol(*fabric_, fabric::Access::kRemoteWrite); !s.ok()) return s;
  }
  return prepare(active, flow);
}

void Engine::begin_follow(std::list<Active>::iterator active, Flow& flow) {
  const Operation& what = active->operation;
  if (flow.spec.partitions.empty()) {
    if (what.outcome != nullptr) what.outcome->version = what.step;
    flow.newest = what.step;
    return finish(active, {});
  }
  if (Status prepared = prepare_follow(*active, flow); !prepared.ok())
    return finish(active, std::move(prepared));
  Following& following = flow.following;
  following = Following{};
  following.active = true;
  following.operation = active;
  following.servers.resize(servers_.size());
  following.late = what.timeout_ms == 0;
  if (what.timeout_ms > 0)
    following.deadline = Clock::now() + std::chrono::milliseconds(what.timeout_ms);
  ++active->unanswered;  // it is not over before something is taken
  ask_all(flow, following.late ? 0 : what.step);
  progress();
}

void Engine::ask_all(Flow& flow, int64_t step) {
  for (size_t i = 0; i < servers_.size(); ++i) ask_to_keep(flow, i, step);
  for (size_t i = 0; i < servers_.size(); ++i) pump(i);
}

/// `pump` is to follow.
void Engine::ask_to_keep(Flow& flow, size_t index, int64_t step) {
  const std::vector<uint32_t>& partitions = flow.partitions_of[index];
  if (partitions.empty()) return;
  enqueue(*flow.following.operation, partitions[0], wire::Kind::kKeep, step);
  flow.following.servers[index].tag = servers_[index].queue.back();
  flow.following.servers[index].answered = false;
}

/// A server's answer, in `slot`.
void Engine::kept(Flow& flow, size_t index, uint32_t slot) {
  Told& told = flow.following.servers[index];
  told.answered = true;
  const auto* table = reinterpret_cast<const wire::Kept*>(flow.kept.pages.data());
  told.kept = table[kept_index(index, slot)];
  agree(flow);
}

/// Once every server has answered: takes what they keep if that is of one step, or asks again.
void Engine::agree(Flow& flow) {
  Following& following = flow.following;
  int64_t least = std::numeric_limits<int64_t>::max();
  int64_t most = -1;
  for (size_t i = 0; i < servers_.size(); ++i) {
    if (flow.partitions_of[i].empty()) continue;
    const Told& told = following.servers[i];
    if (!told.answered) return;
    least = std::min(least, told.kept.step);
    most = std::max(most, told.kept.step);
  }
  following.look_again.reset();
  if (most < following.operation->operation.step)
    return stop_following(flow, Status(Code::kDeadline, "no version came in time"));
  if (least == most) return take(flow, most);
  ++following.rounds;
  if (following.rounds <= kRoundsBehind) {
    // What one server has reached all will reach: it is decided.
    for (size_t i = 0; i < servers_.size(); ++i) {
      if (!flow.partitions_of[i].empty() && following.servers[i].kept.step < most)
        ask_to_keep(flow, i, most);
    }
    for (size_t i = 0; i < servers_.size(); ++i) pump(i);
  } else {
    const int64_t ahead =
        std::min(int64_t{1} << std::min(following.rounds - kRoundsBehind, 20), kMostAhead);
    following.look_again = Clock::now() + kAheadPatience;
    ask_all(flow, most + ahead);
  }
}

void Engine::take(Flow& flow, int64_t step) {
  Following& following = flow.following;
  Active& active = *following.operation;
  following.taking = true;
  if (active.operation.outcome != nullptr) active.operation.outcome->version = step;
  for (uint32_t i = 0; i < flow.spec.partitions.size(); ++i) {
    ++active.unanswered;
    enqueue(active, i, wire::Kind::kTake, step);
  }
  --active.unanswered;
  for (size_t i = 0; i < servers_.size(); ++i) pump(i);
}

Status Engine::compare_checksums(const Flow& flow) const {
  for (size_t i = 0; i < servers_.size(); ++i) {
    if (flow.partitions_of[i].empty()) continue;
    const Told& told = flow.following.servers[i];
    if (told.checksum == told.kept.checksum) continue;
    return Status(Code::kProtocol, "the parameters of step " + std::to_string(told.kept.step) +
                                       " that came from " + server_name(i) +
                                       " are not those that it keeps: the checksums differ");
  }
  return {};
}

/// No answer to what the servers were asked concerns anybody any more.
void Engine::forget_questions(Flow& flow) {
  Following& following = flow.following;
  Active& active = *following.operation;
  for (size_t i = 0; i < servers_.size(); ++i) {
    if (following.servers[i].answered) continue;
    Server& server = servers_[i];
    const uint32_t tag = following.servers[i].tag;
    Request& request = server.requests[tag];
    if (!request.sent) --active.unsent;
    request.active = nullptr;
    following.servers[i].answered = true;
    // Over some fabrics a question that is posted is sent later; one that is not, never.
    if (std::erase(server.queue, tag) > 0) retire(server, tag);
  }
}

/// Ends a kFollow that waits for a version.
void Engine::stop_following(Flow& flow, Status why) {
  if (!flow.following.active || flow.following.taking) return;
  forget_questions(flow);
  const auto active = flow.following.operation;
  flow.following = Following{};
  finish(active, std::move(why));
}

void Engine::stop_waiting() {
  std::lock_guard guard(progress_lock_);
  for (const auto& flow : flows_)
    stop_following(*flow, Status(Code::kCancelled, "interrupted while it waited for a version"));
  fabric_->wake();
}

/// Does what is due, and tells in how many milliseconds the next is; -1: nothing will be.
int Engine::follow_timeout() {
  using std::chrono::milliseconds;
  std::optional<Clock::time_point> next;
  for (const auto& flow : flows_) {
    Following& following = flow->following;
    if (!following.active || following.taking) continue;
    const auto now = Clock::now();
    const bool late = following.deadline.has_value() && now >= *following.deadline;
    if (late || (following.look_again.has_value() && now >= *following.look_again)) {
      following.late |= late;
      if (late) following.deadline.reset();
      following.look_again.reset();
      following.rounds = 0;
      forget_questions(*flow);
      ask_all(*flow, following.late ? 0 : following.operation->operation.step);
    }
    for (const auto& due : {following.deadline, following.look_again})
      if (due.has_value() && (!next.has_value() || *due < *next)) next = due;
  }
  if (!next.has_value()) return -1;
  const auto left = std::chrono::ceil<milliseconds>(*next - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

/// Makes progress until an operation has ended, and returns its callback; an empty one once the
/// engine is closed and all of them have run.
Crew::Task Engine::lead() {
  while (true) {
    bool moved = false;
    bool patiently = false;
    int timeout_ms = -1;
    {
      std::lock_guard guard(progress_lock_);
      const bool over = closing_ && quiet();
      if (over) give_up();
      if (!finished_.empty()) {
        Crew::Task task = std::move(finished_.front());
        finished_.pop_front();
        return task;
      }
      if (over) return {};
      moved = progress();
      if (failure_.ok()) timeout_ms = follow_timeout();
      if (!loss_.ok() && failure_.ok()) {
        const auto deadline = loss_time_ + kVerdictGrace;
        if (Clock::now() >= deadline) {
          failure_ = loss_;
          close_connections(failure_, false);
          moved = true;
        } else {
          const int left = static_cast<int>(
              std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now())
                  .count() +
              1);
          timeout_ms = timeout_ms < 0 ? left : std::min(left, timeout_ms);
        }
      }
      if (!failure_.ok()) give_up();
      moved |= !finished_.empty();
      sleeps_patiently_ = !moved && patient();
      patiently = sleeps_patiently_;
    }
    if (moved) {
      wait_.worked(Clock::now());
    } else if (wait_.look_again(Clock::now())) {
      std::this_thread::yield();
    } else {
      fabric_->wait(timeout_ms, patiently);
    }
  }
}

bool Engine::progress() {
  events_.clear();
  const bool moved = fabric_->poll(events_);
  // handle() never polls, so events_ stays as it is meanwhile.
  handling_ = true;
  for (const Event& event : events_) handle(event);
  handling_ = false;
  return moved || !events_.empty();
}

void Engine::handle(const Event& event) {
  const size_t index = server_of(event.endpoint);
  if (index >= servers_.size()) return;
  switch (event.kind) {
    case Event::Kind::kConnected:
      connected(servers_[index], event);
      break;
    case Event::Kind::kDisconnected:
      disconnected(index, event);
      break;
    case Event::Kind::kWriteDone:
      write_done(index, static_cast<uint32_t>(event.request));
      pump(index);
      break;
    case Event::Kind::kReceived:
      received(index, event);
      pump(index);
      break;
    case Event::Kind::kCredits:
      pump(index);
      break;
    case Event::Kind::kReadDone:
      if (failure_.ok()) read_done(*flows_[event.request]);
      break;
  }
}

void Engine::connected(Server& server, const Event& event) {
  const size_t index = static_cast<size_t>(&server - servers_.data());
  wire::LandingGrant grant;
  if (event.hello == nullptr || event.hello->payload.size() != sizeof(grant)) {
    violation(index, "its hello carries no landing grant");
    return;
  }
  std::memcpy(&grant, event.hello->payload.data(), sizeof(grant));
  if (grant.slots == 0 || grant.slots > (options_.follows ? kMostFollowSlots : 1u << 20) ||
      grant.slot_stride < sizeof(wire::Header) + (options_.follows ? 0 : 1) ||
      grant.slot_stride > (uint64_t{1} << 40)) {
    violation(index, "its landing grant is impossible");
    return;
  }
  server.grant = grant;
  most_slots_ = std::max<size_t>(most_slots_, grant.slots);
  server.outgoing_stride = cheap_ ? sizeof(wire::Header) : grant.slot_stride;
  auto pages = Pages::allocate(grant.slots * server.outgoing_stride,
                               "what is on its way to " + server_name(index));
  Status enrolled = pages.status();
  if (enrolled.ok()) {
    server.outgoing.pages = std::move(pages.value());
    enrolled = server.outgoing.enrol(*fabric_, fabric::Access::kLocal);
  }
  if (!enrolled.ok()) {
    lose(std::move(enrolled));
    return;
  }
  server.slots.assign(grant.slots, Slot{});
  for (uint32_t slot = grant.slots; slot-- > 0;) server.free_slots.push_back(slot);
  server.connected = true;
  state_changed_.notify_all();
  pump(index);
}

void Engine::disconnected(size_t index, const Event& event) {
  Server& server = servers_[index];
  server.gone = true;
  state_changed_.notify_all();
  if (closing_ || !failure_.ok()) return;
  const bool was_connected = server.connected;
  lose(Status(event.status.code() == Code::kOk ? Code::kUnavailable : event.status.code(),
              (was_connected ? "lost the data connection to " : "cannot connect to ") +
                  server_name(index) + ": " + event.status.message()));
}

void Engine::violation(size_t index, const std::string& text) {
  lose(Status(Code::kProtocol, server_name(index) + " broke the protocol: " + text +
                                   "; are all processes of one jaxrdma version?"));
}

/// A connection is of no use any more. The reason is kept; the verdict comes by `fail`, or after a
/// grace.
void Engine::lose(Status why) {
  if (!loss_.ok()) return;
  loss_ = std::move(why);
  loss_time_ = Clock::now();
  state_changed_.notify_all();
  fabric_->wake();
}

void Engine::received(size_t index, const Event& event) {
  Server& server = servers_[index];
  if (Endpoint* endpoint = fabric_->endpoint(server.endpoint)) endpoint->release(1);
  if (!failure_.ok()) return;
  const wire::Answer what = wire::answer_kind(event.immediate);
  const uint32_t value = wire::answer_tag(event.immediate);
  if (what == wire::Answer::kCredit) {
    if (event.bytes == 0) {
      credit(index, value);
    } else {
      violation(index, "credit with data");
    }
    return;
  }
  if (value >= server.requests.size() || !server.requests[value].live ||
      server.requests[value].answered || server.requests[value].stage == Stage::kQueued) {
    violation(index,
              "answer to request " + std::to_string(value) + ", which does not wait for one");
    return;
  }
  Request& request = server.requests[value];
  if (wire::of_rows(request.kind)) return answered_rows(index, value, what, event);
  const Flow& flow = *flows_[request.flow];
  const Partition& partition = flow.spec.partitions[request.partition];
  Status status;
  if (what == wire::Answer::kResult || what == wire::Answer::kResultAndCredit) {
    const size_t bytes = partition_bytes(partition, flow.spec.leaves[partition.leaf].dtype);
    const bool locating = request.kind == wire::Kind::kLocate;
    const bool judging = request.kind == wire::Kind::kVerdict;
    const bool keeping = request.kind == wire::Kind::kKeep;
    const size_t expected = locating  ? sizeof(wire::Location)
                            : keeping ? sizeof(wire::Kept)
                            : judging ? sizeof(wire::Verdict)
                                      : bytes;
    if (event.bytes != expected) {
      violation(index, "partition " + std::to_string(request.partition) + " came back with " +
                           std::to_string(event.bytes) + " bytes instead of " +
                           std::to_string(expected));
      return;
    }
    if (locating && flow.location(request.partition).bytes != bytes) {
      violation(index,
                "partition " + std::to_string(request.partition) + " has another size there");
      return;
    }
    if (request.kind == wire::Kind::kTake) {
      Flow& followed = *flows_[request.flow];
      const size_t begin = partition.begin * dtype_bytes(flow.spec.leaves[partition.leaf].dtype);
      const std::byte* came = cheap_ ? request.active->operation.leaves[partition.leaf].target
                                     : flow.bounce[partition.leaf].pages.data();
      followed.following.servers[index].checksum +=
          partition_checksum(request.partition, came + begin, bytes);
    }
    if (!cheap_ && !locating && !judging && !keeping && request.active != nullptr &&
        request.active->operation.kind != OperationKind::kPush) {
      const size_t begin = partition.begin * dtype_bytes(flow.spec.leaves[partition.leaf].dtype);
      std::memcpy(request.active->operation.leaves[partition.leaf].target + begin,
                  flow.bounce[partition.leaf].pages.data() + begin, expected);
    }
    if (!judging && !keeping) stats_.bytes_pulled += event.bytes;
    recorder_.add(Stage::kConsumed, request.flow, request.step, request.partition,
                  static_cast<uint16_t>(index));
  } else if (what == wire::Answer::kStale && request.kind == wire::Kind::kKeep) {
    if (request.active != nullptr) {
      violation(index, "refused the question that was asked last");
      return;
    }
  } else if (what == wire::Answer::kStale || what == wire::Answer::kAhead) {
    status = refused(index, request, what);
  } else {
    violation(index, "unknown answer " + std::to_string(static_cast<uint32_t>(what)));
    return;
  }
  if (what == wire::Answer::kResultAndCredit && !credit(index, request.slot)) return;
  request.answered = true;
  if (request.kind == wire::Kind::kKeep) {
    const bool asked = request.active != nullptr;
    const uint32_t slot = request.slot;
    Flow& followed = *flows_[request.flow];
    if (request.sent) retire(server, value);
    if (asked) kept(followed, index, slot);
    return;
  }
  answered(request, status);
  if (request.sent) retire(server, value);
}

/// What the server says to a gradient that is not of the step that it aggregates.
Status Engine::refused(size_t index, const Request& request, wire::Answer why) {
  const std::string step = "step " + std::to_string(request.step);
  if (why == wire::Answer::kAhead) {
    return Status(Code::kStale,
                  step + " is ahead of the step that " + server_name(index) +
                      " aggregates: use the state of session.init, with its step unchanged");
  }
  recorder_.add(Stage::kDropped, request.flow, request.step, request.partition,
                static_cast<uint16_t>(index));
  return Status(Code::kStale, step + " was already aggregated without this gradient (" +
                                  server_name(index) +
                                  "): go on from the state that the last ps_step returned");
}

/// All answers to a gradient are there: which version they are, and whether it counts.
Status Engine::stepped(const Operation& operation, Flow& flow, Status status) {
  int64_t version = operation.step + 1;
  bool accepted = true;
  bool judged = flow.spec.held == 0;
  for (size_t i = 0; i < servers_.size() && status.ok() && flow.spec.held > 0; ++i) {
    if (flow.partitions_of[i].empty()) continue;
    const wire::Verdict& verdict = flow.verdict_of(i);
    if (judged && (verdict.step != version || (verdict.accepted != 0) != accepted)) {
      return Status(Code::kInternal, "servers answered step " + std::to_string(operation.step) +
                                         " differently: step " + std::to_string(version) + " and " +
                                         std::to_string(verdict.step) + ", counted " +
                                         std::to_string(accepted) + " and " +
                                         std::to_string(verdict.accepted));
    }
    version = verdict.step;
    accepted = verdict.accepted != 0;
    judged = true;
  }
  if (status.ok()) {
    ++stats_.steps;
    ++(accepted ? stats_.gradients_accepted : stats_.gradients_dropped);
    stats_.last_step = flow.newest = version;
    if (!accepted) ++flow.dropped;
    if (operation.outcome != nullptr) *operation.outcome = {version, flow.dropped};
  } else if (status.code() == Code::kStale) {
    ++stats_.gradients_dropped;
  }
  return status;
}

/// The server allows a slot to be written again; false if it was not in its hands.
bool Engine::credit(size_t index, uint32_t slot) {
  Server& server = servers_[index];
  if (slot >= server.slots.size() || server.slots[slot].granted) {
    violation(index, "credit for slot " + std::to_string(slot) + ", which was not in its hands");
    return false;
  }
  server.slots[slot].granted = true;
  if (!server.slots[slot].writing) server.free_slots.push_back(slot);
  return true;
}

/// Counts an answer for whoever waits for it.
void Engine::answered(Request& request, const Status& status) {
  Flow& flow = *flows_[request.flow];
  if (request.active != nullptr && request.active->operation.kind != OperationKind::kPush) {
    Active* active = request.active;
    if (!status.ok() && active->failure.ok()) active->failure = status;
    --active->unanswered;
    settle(active);
    return;
  }
  Staged& staged = flow.staged;
  if (!status.ok() && staged.failure.ok()) staged.failure = status;
  if (--staged.unanswered == 0 && staged.pulled) finish_pull(flow);
}

void Engine::write_done(size_t index, uint32_t slot_index) {
  Server& server = servers_[index];
  Slot& slot = server.slots[slot_index];
  slot.writing = false;
  last_sent_ = Clock::now();
  if (slot.granted) server.free_slots.push_back(slot_index);
  Request& request = server.requests[slot.tag];
  // Once it has been sent and answered, its tag may be another's.
  if (request.slot == slot_index && request.live && !request.answered) {
    request.stage = Stage::kCompleted;
    request.since = last_sent_;
    recorder_.add(Stage::kCompleted, request.flow, request.step, request.partition,
                  static_cast<uint16_t>(index));
  }
  if (!std::exchange(slot.borrows, false)) return;
  if (!cheap_) --borrowed_;
  sent(server, slot.tag);
}

/// The source of a request's write is not in use any more.
void Engine::sent(Server& server, uint32_t tag) {
  Request& request = server.requests[tag];
  request.sent = true;
  Active* active = request.active;
  if (active != nullptr && --active->unsent == 0 && active->done) state_changed_.notify_all();
  if (request.answered) {
    retire(server, tag);
  } else if (active != nullptr && active->operation.kind == OperationKind::kPush) {
    request.active = nullptr;  // the push may end before its answers come
  }
  if (active != nullptr) settle(active);
}

void Engine::retire(Server& server, uint32_t tag) {
  server.requests[tag].live = false;
  server.requests[tag].active = nullptr;
  server.free_tags.push_back(tag);
}

/// Ends an operation that waits for nothing any more.
void Engine::settle(Active* active) {
  if (active->unsent > 0 || active->unanswered > 0 || !failure_.ok()) return;
  auto found = std::find_if(active_.begin(), active_.end(),
                            [active](const Active& a) { return &a == active; });
  const OperationKind kind = active->operation.kind;
  Status status = active->failure;
  if (of_rows(kind)) return settle_rows(found, std::move(status));
  if (kind == OperationKind::kRead) {
    Flow& flow = *flows_[active->operation.flow];
    if (!status.ok()) return end_read(flow, std::move(status));
    flow.located = true;
    read_servers(flow);
    return;
  }
  if (kind == OperationKind::kFollow) {
    Flow& flow = *flows_[active->operation.flow];
    if (status.ok()) status = compare_checksums(flow);
    if (status.ok() && active->operation.outcome != nullptr)
      stats_.last_step = flow.newest = active->operation.outcome->version;
    flow.following = Following{};
  } else if (kind == OperationKind::kExchange) {
    Flow& flow = *flows_[active->operation.flow];
    status = stepped(active->operation, flow, std::move(status));
  } else if (kind != OperationKind::kPush && status.ok()) {
    Flow& flow = *flows_[active->operation.flow];
    stats_.last_step = flow.newest = active->operation.step;
    if (active->operation.outcome != nullptr)
      *active->operation.outcome = {active->operation.step, flow.dropped};
  }
  finish(found, std::move(status));
}

void Engine::finish(std::list<Active>::iterator active, Status status,
                    std::function<void()> before) {
  // The keys of its buffers are withdrawn before the owner may free them.
  active->sources.clear();
  active->targets.clear();
  auto done = std::move(active->operation.done);
  const bool was_done = active->done;
  active_.erase(active);
  if (was_done) return;
  finished_.push_back(
      [done = std::move(done), status = std::move(status), before = std::move(before)] {
        if (before) before();
        done(status);
      });
}

/// Once no connection can touch their buffers any more, fails every operation.
void Engine::give_up() {
  if (!quiet()) return;
  const Status why =
      failure_.ok() ? Status(Code::kCancelled, "the session was closed while this was in flight")
                    : failure_;
  for (const auto& flow : flows_) {
    flow->reading = Reading{};
    flow->following = Following{};
    if (flow->table != nullptr) flow->table->held.clear();
  }
  while (!active_.empty()) finish(active_.begin(), why);
  for (Server& server : servers_) {
    server.queue.clear();
    server.requests.clear();
    server.free_tags.clear();
  }
}

void Engine::close_connections(const Status& why, bool flush) {
  for (Server& server : servers_) {
    if (Endpoint* endpoint = fabric_->endpoint(server.endpoint)) endpoint->close(why, flush);
  }
}

void Engine::fail(Status why) {
  std::lock_guard guard(progress_lock_);
  if (!failure_.ok() || closing_) return;
  failure_ = std::move(why);
  close_connections(failure_, false);
  state_changed_.notify_all();
  fabric_->wake();
}

/// Of a push that is done, a message that may not have been sent: neither its completion nor its
/// answer has come. One that waits for its turn, if there is one; null: there is none.
const Request* Engine::unsent() const {
  const Request* found = nullptr;
  for (const Server& server : servers_) {
    for (const Request& request : server.requests) {
      if (!request.live || request.sent || request.answered) continue;
      if (request.active == nullptr || !request.active->done) continue;
      if (request.stage == Stage::kQueued) return &request;
      found = &request;
    }
  }
  return found;
}

Status Engine::await_sent() {
  std::unique_lock guard(progress_lock_);
  const auto patience = std::chrono::milliseconds(options_.sent_timeout_ms);
  auto since = Clock::now();
  while (failure_.ok() && loss_.ok() && !closing_) {
    const Request* missing = unsent();
    if (missing == nullptr) return {};
    const auto now = Clock::now();
    since = std::max(since, last_sent_);
    // Who has no turn may wait for other workers, as long as a step may take. A link that is broken
    // is made anew, or its connection ends, within limits of the fabric's.
    if (missing->stage == Stage::kQueued || !fabric_->trouble().empty()) since = now;
    if (now - since >= patience) {
      return Status(Code::kDeadline, "what was pushed to table '" +
                                         flows_[missing->flow]->table->spec.name + "' in step " +
                                         std::to_string(missing->step) +
                                         " was posted, and is not known to have been sent");
    }
    ++awaited_;
    state_changed_.wait_until(guard, since + patience);
    --awaited_;
  }
  return failure_.ok() ? loss_ : failure_;
}

size_t Engine::in_flight() const {
  std::lock_guard guard(progress_lock_);
  return static_cast<size_t>(std::count_if(
      active_.begin(), active_.end(),
      [this](const Active& each) { return !each.done || (awaited_ > 0 && each.unsent > 0); }));
}

std::vector<Pending> Engine::pending(size_t limit) const {
  std::vector<Pending> result;
  {
    std::lock_guard guard(progress_lock_);
    const auto now = Clock::now();
    for (uint32_t i = 0; i < servers_.size(); ++i) {
      for (const Request& request : servers_[i].requests) {
        // An answer may come before the completion of what was asked with.
        if (!request.live || (request.answered && request.sent)) continue;
        // Nor is a push that is done waited for, before somebody wants to know what it led to.
        const RowTable* table = flows_[request.flow]->table.get();
        const bool done = request.active != nullptr && request.active->done;
        const bool awaited = awaited_ > 0 && !request.sent && !request.answered;
        if (done && !awaited && (table == nullptr || table->held.empty())) continue;
        result.push_back({i, request.flow, request.step, request.partition, request.stage,
                          std::chrono::duration<double>(now - request.since).count()});
      }
    }
  }
  std::sort(result.begin(), result.end(),
            [](const Pending& a, const Pending& b) { return a.seconds > b.seconds; });
  if (result.size() > limit) result.resize(limit);
  return result;
}

WorkerStats Engine::stats() const {
  std::lock_guard guard(progress_lock_);
  WorkerStats stats = stats_;
  for (const auto& flow : flows_) stats.dropped_of_flow.push_back(flow->dropped);
  return stats;
}

Status Engine::status() const {
  std::lock_guard guard(progress_lock_);
  return failure_.ok() ? loss_ : failure_;
}

bool Engine::wait_failure(int timeout_ms) {
  std::unique_lock guard(progress_lock_);
  auto happened = [this] { return closing_ || !failure_.ok() || !loss_.ok(); };
  if (timeout_ms < 0) {
    state_changed_.wait(guard, happened);
  } else {
    state_changed_.wait_for(guard, std::chrono::milliseconds(timeout_ms), happened);
  }
  return !closing_ && (!failure_.ok() || !loss_.ok());
}

void Engine::close() {
  {
    std::lock_guard guard(progress_lock_);
    closing_ = true;
    close_connections(Status(Code::kCancelled, "the worker closed its session"), idle());
    state_changed_.notify_all();
    fabric_->wake();
  }
  std::call_once(joined_, [this] { crew_.join(); });
}

size_t Engine::server_of(EndpointId endpoint) const {
  // A handful of servers: a search beats a map.
  for (size_t i = 0; i < servers_.size(); ++i) {
    if (servers_[i].connecting && servers_[i].endpoint == endpoint) return i;
  }
  return servers_.size();
}

}  // namespace

Result<std::shared_ptr<WorkerEngine>> WorkerEngine::create(WorkerOptions options) {
  auto fabric = fabric::make_fabric(options.transport, fabric::Options{});
  if (!fabric.ok()) return fabric.status();
  return std::shared_ptr<WorkerEngine>(
      std::make_shared<Engine>(std::move(options), std::move(fabric.value())));
}

}  // namespace jaxrdma
