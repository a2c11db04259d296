/* engine/server.cc: see server.h. What is remembered of a flow stands in aggregate.h, the
 * arithmetic in reduce.h. */
#include "engine/server.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <sstream>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/secret.h"
#include "engine/aggregate.h"
#include "engine/landing.h"
#include "engine/reduce.h"
#include "engine/served_table.h"
#include "engine/wait.h"
#include "engine/wire.h"

namespace jaxrdma {
namespace {

using Clock = std::chrono::steady_clock;
using fabric::EndpointId;
using fabric::RequestId;

/// Below this a partition is summed where it is noticed: handing it to another thread would take
/// longer.
constexpr size_t kInlineReductionBytes = 64 << 10;
constexpr uint32_t kMaxWorkers = 1024;
constexpr uint16_t kEveryPeer = 0xffff;  ///< in a Record that is about no one worker
/// The control plane's word that a worker left may overtake its last pushes: they are awaited until
/// its connection ends, or so long.
constexpr auto kLeaveGrace = std::chrono::milliseconds(1000);
/// Requests of one follower that may be under way: enough for the wire, few enough that workers'
/// answers, which share it, wait for little.
constexpr uint32_t kFollowerSlots = 4;
/// Partitions on their way to one follower; how far completions may lag behind the follower's
/// questions.
constexpr uint32_t kMostTakes = 4096;
/// Steps of a peer beyond this are refused: nothing that is added to one overflows.
constexpr int64_t kLastStep = int64_t{1} << 62;
/// Pulls of one partition by one worker that may wait for a step: a worker has one open for each
/// operation. What a peer can make a server remember is bounded.
constexpr ptrdiff_t kMostPulls = 1024;
/// Answers that may wait until one peer takes those before, beside four for each partition here: a
/// step's own, and what else it may have asked for.
constexpr size_t kMostAnswers = 4096;

bool is_follower(uint32_t peer) { return peer >= wire::kFirstFollower; }

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

/// As people call whoever says in its hello that it is this worker.
std::string name_of_peer(uint32_t peer) {
  return is_follower(peer) ? text("follower ", peer - wire::kFirstFollower) : text("worker ", peer);
}

/// The progress lock. The progress thread, which takes it again at once after every turn, lets the
/// others go first.
class ProgressLock {
 public:
  void lock() {
    waiting_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }
  void lock_last() {
    while (waiting_.load(std::memory_order_relaxed) > 0) std::this_thread::yield();
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
  std::atomic<int> waiting_{0};
};

/// A write that waits for a credit of the fabric.
struct Outgoing {
  fabric::Slice source;  ///< no bytes: the immediate alone
  fabric::RemoteSlice target;
  fabric::Immediate immediate;
  RequestId request;
  fabric::Solicit solicit = fabric::Solicit::kYes;
};

/// A write of data between its posting and its kWriteDone. Index + 1 is its RequestId.
struct Write {
  EndpointId endpoint = 0;
  Piece* piece = nullptr;            ///< the source is its result
  std::shared_ptr<Landing> landing;  ///< the source is one of its slots
  std::shared_ptr<Version> version;  ///< the source is in it
  bool taken = false;                ///< answers a kKeep or kTake of `flow`
  uint16_t flow = 0;
};

/// What a reducing thread is given: a piece whose contributions it sums, or, with a gradient that
/// is held, one contribution that it brings there; or a table whose current task it does.
struct Job {
  Piece* piece = nullptr;
  HeldGradient* gradient = nullptr;
  Contribution from;
  ServedTable* table = nullptr;
};

/// What is done for followers, on a thread of its own, so that no sum waits for it: room is made
/// for a copy of the parameters; they are copied; what was copied is summed up.
struct Errand {
  enum class Kind : uint8_t { kRoom, kCopy, kSum };
  Kind kind;
  Aggregate* flow;
  std::shared_ptr<Version> version;  ///< made by kRoom
  Status status;                     ///< of kRoom
};

/// What who follows a flow is given of it: a follower, or a worker that comes late.
struct Keeping {
  uint64_t asked = 0;                ///< number of its newest kKeep
  std::optional<Reply> wanted;       ///< that, while it waits
  std::shared_ptr<Version> version;  ///< what is kept for it
  uint32_t taking = 0;               ///< writes to it that are not done
};

struct Connection {
  EndpointId id = 0;
  uint32_t worker = 0;  ///< or a follower
  uint64_t incarnation = 0;
  std::string address;
  std::shared_ptr<Landing> landing;
  std::deque<Outgoing> outgoing;
  std::vector<Keeping> keeping;  ///< of who follows, by flow
  bool closing = false;          ///< nothing from it counts any more
  bool explained = false;        ///< that it ends is known, or was told already
};

/// What is known of a worker, or a follower, beside its connection.
struct Member {
  bool admitted = false;
  uint64_t incarnation = 0;
  std::vector<std::byte> token;
  std::shared_ptr<Landing> landing;  ///< for its next connection, or of the present one
  Connection* connection = nullptr;
  EndpointId pending = 0;  ///< whose hello is accepted; over verbs the rest takes a while
  bool left = false;
  bool departed = false;  ///< left, and nothing more will come
  Clock::time_point departs;
};

/// Where `from` waits for a partition to reach step `wanted`.
Reply reply_to(const Connection& from, const wire::Header& header, uint32_t slot, int64_t wanted) {
  return {from.worker,      from.id, {header.reply_address, header.reply_key},
          header.reply_tag, wanted,  slot};
}

class Engine final : public ServerEngine {
 public:
  Engine(ServerOptions options, std::unique_ptr<fabric::Fabric> fabric)
      : options_(std::move(options)),
        recorder_(options_.recorder_capacity),
        fabric_(std::move(fabric)),
        transport_(fabric_->describe()),
        members_(options_.workers),
        dropped_(options_.workers),
        gradients_dropped_(options_.workers) {}
  ~Engine() override { close(); }

  Status start();

  const std::string& address() const override { return address_; }
  Status admit(uint32_t worker, uint64_t incarnation, std::vector<std::byte> token) override;
  Status admit_follower(uint32_t follower, uint64_t incarnation,
                        std::vector<std::byte> token) override;
  void dismiss_follower(uint32_t follower, std::string why) override;
  Status add_flow(FlowSpec spec) override;
  Status add_table(TableSpec spec) override;
  ServerEvent wait_event(int timeout_ms) override;
  void wake() override;
  Result<LeafShard> gradient(uint16_t flow, uint32_t leaf) override;
  Result<LeafShard> parameters(uint16_t flow, uint32_t leaf) override;
  Status publish(uint16_t flow, int64_t step) override;
  Status refresh(uint16_t flow) override;
  Status aggregate(uint16_t flow, int64_t step, const std::vector<GradientId>& set) override;
  Status drop(uint16_t flow, const GradientId& gradient) override;
  Status answer(uint16_t flow, const GradientId& gradient, int64_t step, bool accepted) override;
  void mark_left(uint32_t worker) override;
  void expel(uint32_t worker, const std::string& why) override;
  ServerStats stats() const override;
  std::vector<Lack> lacking(size_t limit) const override;
  std::vector<Record> records() const override { return recorder_.snapshot(); }
  RecordCounts record_counts() const override { return recorder_.counts(); }
  std::string transport() const override { return transport_; }
  void close() override;

 private:
  // Everything below but the threads' functions and the events needs the progress lock.

  void progress();
  void reduce_queued();
  void run_errands();
  void handle(const fabric::Event& event);
  Result<std::vector<std::byte>> gate(EndpointId endpoint, const fabric::Hello& hello);
  Status compare(const fabric::Hello& hello) const;
  Status check_token(uint32_t peer, const std::vector<std::byte>& token) const;
  /// The worker, or follower, of this index; null if there is none.
  Member* find_member(uint32_t peer);
  const Member* find_member(uint32_t peer) const {
    return const_cast<Engine*>(this)->find_member(peer);
  }
  /// The end of a connection that never was is no event: it shows in the fabric alone.
  bool connecting(const Member& member) const {
    return member.pending != 0 && fabric_->endpoint(member.pending) != nullptr;
  }
  Result<std::shared_ptr<Landing>> make_landing(uint32_t peer) const;
  void connected(const fabric::Event& event);
  void disconnected(const fabric::Event& event);
  void received(Connection& from, const fabric::Event& event);
  /// Empty, or which field is wrong and how.
  std::string check(const Connection& from, const wire::Header& header,
                    uint64_t payload_bytes) const;
  /// Of a kKeep or kTake: what is wrong with a header of which the rest is in order.
  std::string check_keeping(const Connection& from, const wire::Header& header) const;
  void violation(Connection& from, const std::string& what);
  void send_away(Connection& follower, Status why);
  void end(Connection& connection, Status why, bool flush);

  void push(Connection& from, const wire::Header& header, uint32_t slot, Piece& piece);
  void pull(Connection& from, const wire::Header& header, uint32_t slot, Piece& piece);
  void init(Connection& from, const wire::Header& header, uint32_t slot, Piece& piece);
  void locate(Connection& from, const wire::Header& header, uint32_t slot, Piece& piece);
  void verdict(Connection& from, const wire::Header& header, uint32_t slot, Aggregate& flow);
  void refuse(Connection& from, const wire::Header& header, uint32_t slot, wire::Answer why);

  void received_rows(Connection& from, const wire::Header& header, const wire::Rows& rows,
                     uint32_t slot);
  void push_rows(Connection& from, const wire::Header& header, RowTask task, ServedTable& table);
  void work_rows(ServedTable& table);
  void finish_rows(ServedTable& table);
  void publish_rows(ServedTable& table);

  void keep(Connection& from, const wire::Header& header, uint32_t slot, Aggregate& flow);
  void take(Connection& from, const wire::Header& header, uint32_t slot, Piece& piece);
  void give_to(Connection& to, const Aggregate& flow, const Reply& reply,
               const fabric::Slice& source);
  void serve_followers(Aggregate& flow);
  void give_version(Aggregate& flow, const std::shared_ptr<Version>& version);
  template <typename Do>
  void for_waiting(const Aggregate& flow, int64_t reached, Do act);
  void give(Errand::Kind kind, Aggregate& flow, std::shared_ptr<Version> version = nullptr);
  void run(Errand& errand) const;
  void finish(Errand& errand);
  void refuse_room(const Aggregate& flow, const Status& status);

  void hold(Connection& from, const wire::Header& header, uint32_t slot, Piece& piece);
  HeldGradient* landing_gradient(Connection& from, const wire::Header& header, Aggregate& flow);
  void whole_maybe(Aggregate& flow, HeldGradient& gradient);
  void form_mean(Aggregate& flow);
  void mean_formed(Aggregate& flow);
  void answer_maybe(Aggregate& flow, HeldGradient& gradient);
  /// The flow, if it holds gradients.
  Result<Aggregate*> holding(uint16_t id);

  void advance(Piece& piece);
  Reduction reduction(const Job& job, Source& source) const;
  void give(Job job);
  void finish(Job& job);
  void finish(Piece& piece);
  void complete(Piece& piece);
  void publish_mean(Piece& piece);
  void ready(Aggregate& flow);
  void send_replies(Piece& piece);
  void send_slot(Piece& piece);
  wire::Answer give_back(Piece& piece, const Reply& to);

  void free_slot(const std::shared_ptr<Landing>& landing, uint32_t slot, EndpointId endpoint);
  void say(EndpointId endpoint, wire::Answer what, uint32_t tag);
  void post(EndpointId endpoint, Outgoing outgoing);
  void drain(Connection& connection);
  RequestId begin_write(Write write);
  void end_write(RequestId request);
  /// Ends the writes that will never have a kWriteDone. Not done where they are lost: that is amid
  /// sending others.
  void settle();

  /// Nothing waits for the completion of a write, or for credits: only pushes need wake anybody.
  bool patient() const;
  /// Wakes the progress thread if it sleeps too patiently for what was done beside it.
  void hurry();

  void depart(uint32_t worker);
  /// How long until someone departs, at most; -1: nobody is about to.
  int depart_due();
  void check_stranded(const Piece& piece);
  void check_stranded(ServedTable& table);
  void tell(ServerEvent event);

  Connection* find(EndpointId id);
  Aggregate* find_flow(uint16_t id) const {
    return id < flows_.size() ? flows_[id].get() : nullptr;
  }
  ServedTable* find_table(uint16_t id) const {
    return id < tables_.size() ? tables_[id].get() : nullptr;
  }
  /// What a slot has room for beside the header.
  size_t slot_payload_bytes() const {
    return Landing::stride(options_.partition_bytes) - sizeof(wire::Header);
  }
  Result<LeafShard> shard(uint16_t flow, uint32_t array, bool gradient);
  Status is_closed() const {
    return Status(Code::kCancelled, text("server ", options_.server, " is closed"));
  }

  const ServerOptions options_;
  Recorder recorder_;
  // Memory outlives the fabric: members are destroyed from the last to the first.
  std::vector<std::unique_ptr<Aggregate>> flows_;     ///< by id
  std::vector<std::unique_ptr<ServedTable>> tables_;  ///< by id
  std::unique_ptr<fabric::Fabric> fabric_;
  const std::string transport_;
  std::string address_;

  mutable ProgressLock progress_lock_;
  std::vector<Member> members_;
  std::unordered_map<uint32_t, Member> followers_;  ///< by what they say in their hello
  std::unordered_map<EndpointId, Connection> connections_;
  std::vector<Write> writes_;
  std::vector<RequestId> free_writes_;
  std::vector<RequestId> lost_writes_;
  size_t pieces_ = 0;  ///< of all flows, and messages of one call for each table
  std::vector<uint32_t> departed_;
  bool awaits_writes_ = false;     ///< a sum or an update waits until answers have gone out
  bool sleeps_patiently_ = false;  ///< the progress thread, if it sleeps
  bool leaving_ = false;           ///< somebody is about to depart
  bool closed_ = false;
  uint64_t bytes_pushed_ = 0;
  uint64_t bytes_pulled_ = 0;
  uint64_t duplicates_ = 0;
  uint64_t refused_ = 0;  ///< in all; once closed
  uint64_t bytes_followed_ = 0;
  uint64_t copies_ = 0;
  std::vector<uint64_t> dropped_;
  std::vector<uint64_t> gradients_dropped_;

  std::mutex event_lock_;
  std::condition_variable event_added_;
  std::deque<ServerEvent> events_;
  bool woken_ = false;
  bool events_closed_ = false;

  std::mutex reduce_lock_;  ///< taken inside the progress lock
  std::condition_variable reduce_added_;
  std::deque<Job> reduce_queue_;
  bool reduce_stop_ = false;

  std::mutex errand_lock_;  ///< taken inside the progress lock
  std::condition_variable errand_added_;
  std::deque<Errand> errands_;
  bool errands_stop_ = false;

  std::mutex close_lock_;
  std::atomic<bool> stop_{false};
  std::vector<std::thread> reduce_threads_;
  std::thread errand_thread_;
  std::thread progress_thread_;
};

// --- Life.

Status Engine::start() {
  auto address = fabric_->listen(
      options_.listen,
      [this](EndpointId endpoint, const fabric::Hello& hello) { return gate(endpoint, hello); });
  if (!address.ok()) return address.status();
  address_ = address.value();
  for (uint32_t i = 0; i < options_.reduce_threads; ++i) {
    reduce_threads_.emplace_back([this] { reduce_queued(); });
    pthread_setname_np(reduce_threads_.back().native_handle(), text("jaxrdma-sum-", i).c_str());
  }
  errand_thread_ = std::thread([this] { run_errands(); });
  pthread_setname_np(errand_thread_.native_handle(), "jaxrdma-keep");
  progress_thread_ = std::thread([this] { progress(); });
  pthread_setname_np(progress_thread_.native_handle(), "jaxrdma-prog");
  return Status();
}

void Engine::progress() {
  std::vector<fabric::Event> events;
  Wait wait(std::chrono::microseconds(options_.spin_us));
  while (!stop_.load(std::memory_order_acquire)) {
    progress_lock_.lock_last();
    events.clear();
    const bool moved = fabric_->poll(events);
    for (const fabric::Event& event : events) handle(event);
    const int wait_ms = leaving_ ? depart_due() : -1;
    settle();
    const bool busy = moved || !events.empty();
    const bool patiently = !busy && patient();
    sleeps_patiently_ = patiently;
    progress_lock_.unlock();
    if (busy) {
      wait.worked(Clock::now());
    } else if (wait.look_again(Clock::now())) {
      std::this_thread::yield();
    } else {
      fabric_->wait(wait_ms, patiently);
    }
  }
}

void Engine::reduce_queued() {
  std::unique_lock guard(reduce_lock_);
  while (true) {
    reduce_added_.wait(guard, [this] { return reduce_stop_ || !reduce_queue_.empty(); });
    if (reduce_stop_) return;
    Job job = std::move(reduce_queue_.front());
    reduce_queue_.pop_front();
    guard.unlock();
    Source source{};
    if (job.table != nullptr) {
      job.table->work();
    } else {
      reduce(reduction(job, source));
    }
    {
      std::lock_guard progress(progress_lock_);
      finish(job);
      job = Job();  // it may be the last to share in a Landing, whose end needs the lock
      settle();
      hurry();
    }
    guard.lock();
  }
}

void Engine::close() {
  std::lock_guard guard(close_lock_);
  if (stop_.load()) return;
  stop_.store(true, std::memory_order_release);
  fabric_->wake();
  if (progress_thread_.joinable()) progress_thread_.join();
  {
    std::lock_guard reducing(reduce_lock_);
    reduce_stop_ = true;
  }
  reduce_added_.notify_all();
  for (std::thread& thread : reduce_threads_) thread.join();
  {
    std::lock_guard guard(errand_lock_);
    errands_stop_ = true;
  }
  errand_added_.notify_all();
  if (errand_thread_.joinable()) errand_thread_.join();

  std::unique_lock progress(progress_lock_);
  closed_ = true;
  for (auto& [id, connection] : connections_) {
    connection.explained = true;
    // What a follower does not take it goes without: nobody waits for one.
    end(connection, is_closed(), /*flush=*/!is_follower(connection.worker));
  }
  // The fabric ends every connection within its close timeout; the margin is for a busy machine.
  const auto deadline = Clock::now() +
                        std::chrono::milliseconds(fabric::Options().close_timeout_ms) +
                        std::chrono::seconds(1);
  std::vector<fabric::Event> events;
  while (!connections_.empty() && Clock::now() < deadline) {
    events.clear();
    if (!fabric_->poll(events)) fabric_->wait(100);
    for (const fabric::Event& event : events) {
      if (event.kind == fabric::Event::Kind::kDisconnected) connections_.erase(event.endpoint);
      if (event.kind == fabric::Event::Kind::kConnected) {
        // Null: its end is among these events too.
        if (fabric::Endpoint* endpoint = fabric_->endpoint(event.endpoint))
          endpoint->close(is_closed(), false);
      }
    }
  }
  connections_.clear();
  for (auto& flow : flows_) {
    if (flow == nullptr) continue;
    for (Piece& piece : flow->pieces) {
      piece.waiting.clear();
      piece.reducing.clear();
      piece.owed.clear();
    }
    flow->accumulators.withdraw();
    flow->results.withdraw();
    if (flow->held != nullptr) flow->held->withdraw();
    flow->coming.clear();
    flow->copies.withdraw();
  }
  for (auto& table : tables_) {
    if (table == nullptr) continue;
    table->tasks.clear();
    table->current = RowTask();
  }
  reduce_queue_.clear();
  writes_.clear();
  members_.clear();
  followers_.clear();
  refused_ = fabric_->turned_away();
  fabric_.reset();
  progress.unlock();
  {
    std::lock_guard events_guard(event_lock_);
    events_closed_ = true;
  }
  event_added_.notify_all();
}

// --- Events for Python.

void Engine::tell(ServerEvent event) {
  {
    std::lock_guard guard(event_lock_);
    events_.push_back(std::move(event));
  }
  event_added_.notify_one();
}

ServerEvent Engine::wait_event(int timeout_ms) {
  std::unique_lock guard(event_lock_);
  const auto something = [this] { return !events_.empty() || woken_ || events_closed_; };
  if (timeout_ms < 0) {
    event_added_.wait(guard, something);
  } else {
    event_added_.wait_for(guard, std::chrono::milliseconds(timeout_ms), something);
  }
  ServerEvent event;
  if (!events_.empty()) {
    event = std::move(events_.front());
    events_.pop_front();
  } else if (woken_) {
    woken_ = false;
    event.kind = ServerEvent::Kind::kWoken;
  } else if (events_closed_) {
    event.kind = ServerEvent::Kind::kClosed;
  }
  return event;
}

void Engine::wake() {
  {
    std::lock_guard guard(event_lock_);
    woken_ = true;
  }
  event_added_.notify_one();
}

// --- Who may connect.

Status Engine::admit(uint32_t worker, uint64_t incarnation, std::vector<std::byte> token) {
  if (worker >= options_.workers) {
    return Status(
        Code::kInvalidArgument,
        text("worker ", worker, " cannot be admitted: the job has ", options_.workers, " workers"));
  }
  if (Status status = check_token(worker, token); !status.ok()) return status;
  // Touching so much memory takes milliseconds: not under the lock.
  auto landing = make_landing(worker);
  if (!landing.ok()) return landing.status();
  std::lock_guard guard(progress_lock_);
  if (closed_) return is_closed();
  if (Status status = landing.value()->slab.enrol(*fabric_, fabric::Access::kRemoteWrite);
      !status.ok()) {
    return status;
  }
  Member& member = members_[worker];
  if (member.connection == nullptr || member.incarnation != incarnation) {
    member.landing = std::move(landing.value());
  } else {
    landing.value().reset();  // while the lock is held
  }
  if (member.connection != nullptr && member.incarnation != incarnation) {
    member.connection->explained = true;
    end(*member.connection,
        Status(Code::kPermissionDenied, text("worker ", worker, " was started anew elsewhere")),
        false);
  }
  member.admitted = true;
  member.pending = 0;
  member.incarnation = incarnation;
  member.token = std::move(token);
  member.left = false;
  member.departed = false;
  std::erase(departed_, worker);
  return Status();
}

Status Engine::check_token(uint32_t peer, const std::vector<std::byte>& token) const {
  if (token.size() == fabric::Hello::kTokenBytes) return Status();
  return Status(Code::kInvalidArgument,
                text("the token of ", name_of_peer(peer), " has ", token.size(),
                     " bytes instead of ", fabric::Hello::kTokenBytes));
}

Result<std::shared_ptr<Landing>> Engine::make_landing(uint32_t peer) const {
  if (is_follower(peer)) return Landing::create(kFollowerSlots, 0, name_of_peer(peer));
  return Landing::create(options_.slots_per_worker, options_.partition_bytes, name_of_peer(peer));
}

Member* Engine::find_member(uint32_t peer) {
  if (!is_follower(peer)) return peer < members_.size() ? &members_[peer] : nullptr;
  const auto found = followers_.find(peer);
  return found == followers_.end() ? nullptr : &found->second;
}

Status Engine::admit_follower(uint32_t follower, uint64_t incarnation,
                              std::vector<std::byte> token) {
  const uint32_t peer = wire::kFirstFollower + follower;
  if (peer < wire::kFirstFollower) {
    return Status(Code::kInvalidArgument, text("follower ", follower, ": no number is so high"));
  }
  if (Status status = check_token(peer, token); !status.ok()) return status;
  std::lock_guard guard(progress_lock_);
  if (closed_) return is_closed();
  if (followers_.contains(peer)) {
    return Status(Code::kInvalidArgument, text("follower ", follower, " was admitted before"));
  }
  if (followers_.size() >= options_.followers) {
    return Status(Code::kResource, text("follower ", follower, " cannot be admitted: there are ",
                                        followers_.size(), " already, which is the most"));
  }
  Member& member = followers_[peer];
  member.admitted = true;
  member.incarnation = incarnation;
  member.token = std::move(token);
  return Status();
}

void Engine::dismiss_follower(uint32_t follower, std::string why) {
  std::lock_guard guard(progress_lock_);
  const auto found = followers_.find(wire::kFirstFollower + follower);
  if (closed_ || found == followers_.end()) return;
  Connection* connection = found->second.connection;
  followers_.erase(found);
  if (connection != nullptr)
    end(*connection, Status(Code::kUnavailable, std::move(why)), /*flush=*/false);
}

Status Engine::compare(const fabric::Hello& hello) const {
  const auto refuse_with = [&](Code code, const auto&... parts) {
    return Status(code, text("server ", options_.server, " (", address_, ") refuses ",
                             name_of_peer(hello.worker), ": ", parts...));
  };
  const auto refuse = [&](const auto&... parts) {
    return refuse_with(Code::kPermissionDenied, parts...);
  };
  if (hello.protocol_version != wire::kProtocolVersion) {
    return refuse("it speaks protocol ", hello.protocol_version, ", the server ",
                  wire::kProtocolVersion, "; install the same jaxrdma everywhere");
  }
  if (hello.job != options_.job) return refuse("it belongs to another job; check the addresses");
  if (!is_follower(hello.worker) && hello.worker >= members_.size())
    return refuse("the job has ", members_.size(), " workers");
  const Member* member = find_member(hello.worker);
  // One answer for all that a stranger might probe.
  if (member == nullptr || !equal_in_constant_time(member->token, hello.token) ||
      !member->admitted || member->incarnation != hello.incarnation) {
    return refuse(
        "it was not admitted with this incarnation and token; is it a process of an earlier "
        "start?");
  }
  if (member->left) return refuse("it has left the job");
  // Who has read a hello off the wire could say it again, and so end the connection of its owner.
  if (member->connection != nullptr && !member->connection->closing)
    return refuse("it is connected already; is this a copy of its hello?");
  // Not for good: it may be its owner's, whose connection broke amid that, and who asks again until
  // that is known here.
  if (connecting(*member)) {
    return refuse_with(Code::kUnavailable,
                       "it is being connected already; is this a copy of its hello?");
  }
  return Status();
}

Result<std::vector<std::byte>> Engine::gate(EndpointId endpoint, const fabric::Hello& hello) {
  if (Status status = compare(hello); !status.ok()) return status;
  Member& member = *find_member(hello.worker);
  if (member.landing == nullptr || member.landing->used) {
    // The slots of the connection before may still hold contributions, or receive what it had in
    // flight.
    auto landing = make_landing(hello.worker);
    if (!landing.ok()) return landing.status();
    Status status = landing.value()->slab.enrol(*fabric_, fabric::Access::kRemoteWrite);
    if (!status.ok()) return status;
    member.landing = std::move(landing.value());
  }
  member.pending = endpoint;
  const wire::LandingGrant grant = member.landing->grant();
  std::vector<std::byte> payload(sizeof(grant));
  std::memcpy(payload.data(), &grant, sizeof(grant));
  return payload;
}

Connection* Engine::find(EndpointId id) {
  const auto found = connections_.find(id);
  return found == connections_.end() ? nullptr : &found->second;
}

void Engine::connected(const fabric::Event& event) {
  fabric::Endpoint* endpoint =
      fabric_->endpoint(event.endpoint);             // null: its end is among these events too
  Member* found = find_member(event.hello->worker);  // null: dismissed meanwhile
  if (found == nullptr || found->incarnation != event.hello->incarnation || !found->admitted) {
    if (endpoint != nullptr) {
      endpoint->close(Status(Code::kPermissionDenied, "started anew or left out meanwhile"), false);
    }
    return;
  }
  Member& member = *found;
  if (member.connection != nullptr) {
    member.connection->explained = true;
    end(*member.connection,
        Status(Code::kUnavailable, text(name_of_peer(event.hello->worker), " connected again")),
        false);
  }
  Connection& connection = connections_[event.endpoint];
  connection.id = event.endpoint;
  connection.worker = event.hello->worker;
  connection.incarnation = event.hello->incarnation;
  connection.address = endpoint != nullptr ? endpoint->peer_address() : "already gone";
  connection.landing = member.landing;
  connection.landing->used = true;
  member.connection = &connection;
  member.pending = 0;
}

void Engine::disconnected(const fabric::Event& event) {
  Connection* connection = find(event.endpoint);
  if (connection == nullptr) return;
  const uint32_t worker = connection->worker;
  for (const Outgoing& outgoing : connection->outgoing) {
    if (outgoing.request != 0) lost_writes_.push_back(outgoing.request);
  }
  connection->outgoing.clear();
  for (size_t i = 0; i < writes_.size(); ++i) {
    const bool queued =
        std::find(lost_writes_.begin(), lost_writes_.end(), i + 1) != lost_writes_.end();
    if (writes_[i].endpoint == event.endpoint && !queued) lost_writes_.push_back(i + 1);
  }
  if (is_follower(worker)) {
    if (Member* member = find_member(worker);
        member != nullptr && member->connection == connection) {
      member->connection = nullptr;
    }
    connections_.erase(event.endpoint);
    return;
  }
  Member& member = members_[worker];
  const bool present = member.connection == connection;
  if (present) member.connection = nullptr;
  if (present && !member.left && !connection->explained) {
    ServerEvent lost{ServerEvent::Kind::kWorkerLost, 0, 0, worker,
                     text("server ", options_.server, " lost its connection to worker ", worker,
                          " (", connection->address, "): ", event.status.message())};
    lost.incarnation = connection->incarnation;
    tell(std::move(lost));
  }
  connections_.erase(event.endpoint);
  for (const auto& flow : flows_) {
    if (flow != nullptr && flow->held != nullptr) flow->held->orphan(event.endpoint);
  }
  if (present && member.left) depart(worker);
}

void Engine::end(Connection& connection, Status why, bool flush) {
  connection.closing = true;
  if (fabric::Endpoint* endpoint = fabric_->endpoint(connection.id))
    endpoint->close(std::move(why), flush);
}

void Engine::violation(Connection& from, const std::string& what) {
  const std::string message = text(
      name_of_peer(from.worker), " (", from.address, ") broke the protocol towards server ",
      options_.server, ": ", what, "; it was disconnected; do all processes run the same jaxrdma?");
  if (is_follower(from.worker)) return send_away(from, Status(Code::kProtocol, message));
  from.explained = true;
  tell({ServerEvent::Kind::kViolation, 0, 0, from.worker, message});
  end(from, Status(Code::kProtocol, message), false);
}

/// A follower's end is nobody else's.
void Engine::send_away(Connection& follower, Status why) {
  ServerEvent event{ServerEvent::Kind::kFollowerRefused, 0, 0, 0, why.message()};
  event.worker = follower.worker - wire::kFirstFollower;
  tell(std::move(event));
  end(follower, std::move(why), false);
}

// --- What lands.

void Engine::handle(const fabric::Event& event) {
  using Kind = fabric::Event::Kind;
  switch (event.kind) {
    case Kind::kConnected:
      connected(event);
      break;
    case Kind::kDisconnected:
      disconnected(event);
      break;
    case Kind::kWriteDone:
      if (event.request != 0) end_write(event.request);
      break;
    case Kind::kReceived:
      if (Connection* from = find(event.endpoint); from != nullptr && !from->closing)
        received(*from, event);
      break;
    case Kind::kCredits:
      if (Connection* to = find(event.endpoint); to != nullptr) drain(*to);
      break;
    case Kind::kReadDone:
      break;  // a server reads nothing
  }
}

std::string Engine::check(const Connection& from, const wire::Header& header,
                          uint64_t payload_bytes) const {
  const auto wrong = [](const char* field, const auto& expected, const auto& got) {
    return text("header field ", field, ": expected ", expected, ", got ", got);
  };
  if (header.magic != wire::kHeaderMagic) return wrong("magic", wire::kHeaderMagic, header.magic);
  const int kind = static_cast<int>(header.kind);
  const bool follows = is_follower(from.worker);
  if (kind < static_cast<int>(follows ? wire::Kind::kKeep : wire::Kind::kPush) ||
      kind > static_cast<int>(follows ? wire::Kind::kTake : wire::Kind::kPullRows)) {
    return wrong("kind", follows ? "6 or 7, from a follower" : "1 to 9", kind);
  }
  if (header.incarnation != from.incarnation) {
    return wrong("incarnation", from.incarnation, header.incarnation);
  }
  if (header.step < 0 || header.step > kLastStep)
    return wrong("step", text("0 to ", kLastStep), header.step);
  if (header.reply_tag > wire::kTagMask) {
    return wrong("reply_tag", text("at most ", wire::kTagMask), header.reply_tag);
  }
  if (wire::of_rows(header.kind)) {
    if (find_table(header.flow) == nullptr) return wrong("flow", "an agreed table", header.flow);
    return "";
  }
  const Aggregate* flow = find_flow(header.flow);
  if (flow == nullptr) return wrong("flow", "an agreed flow", header.flow);
  if (header.partition >= flow->spec.partitions.size()) {
    return wrong("partition", text("less than ", flow->spec.partitions.size()), header.partition);
  }
  if (flow->piece_of[header.partition] < 0) {
    return wrong(
        "partition", text("one of server ", options_.server),
        text(header.partition, " of server ", flow->spec.partitions[header.partition].server));
  }
  const Piece& piece = flow->pieces[static_cast<size_t>(flow->piece_of[header.partition])];
  if (header.dtype > static_cast<uint8_t>(DType::kBFloat16)) {
    return wrong("dtype", "0 to 3", static_cast<int>(header.dtype));
  }
  const DType dtype = static_cast<DType>(header.dtype);
  uint64_t bytes = 0;
  if (header.kind == wire::Kind::kPush || header.kind == wire::Kind::kInit) {
    const bool any = header.kind == wire::Kind::kPush && flow->update();
    if (any && accumulator_dtype(dtype) != accumulator_dtype(piece.dtype)) {
      return wrong("dtype",
                   text("one that is summed in ", dtype_name(accumulator_dtype(piece.dtype))),
                   dtype_name(dtype));
    }
    if (!any && dtype != piece.dtype)
      return wrong("dtype", dtype_name(piece.dtype), dtype_name(dtype));
    bytes = piece.elements * dtype_bytes(dtype);
  }
  // That of a kKeep is its number.
  if (header.kind != wire::Kind::kKeep && header.bytes != bytes)
    return wrong("bytes", bytes, header.bytes);
  if (payload_bytes != bytes)
    return wrong("bytes", text(bytes, " after the header"), payload_bytes);
  if (header.kind != wire::Kind::kPush && !flow->update()) {
    return wrong("kind", "a push: this flow averages gradients, servers hold no parameters of it",
                 kind);
  }
  if (header.kind >= wire::Kind::kKeep) return check_keeping(from, header);
  if (flow->shows())
    return wrong("kind", "6 or 7, from a follower: nothing comes from workers of this flow", kind);
  if (header.kind == wire::Kind::kVerdict && flow->held == nullptr)
    return wrong("kind", "1 to 4: this flow holds no gradients", kind);
  if (header.kind != wire::Kind::kInit) return "";
  if (from.worker != 0)
    return wrong("kind", "init from worker 0 alone", text("init from worker ", from.worker));
  if (piece.initialised || piece.published >= 0) {
    return wrong("kind", "one init per partition", text("another of partition ", header.partition));
  }
  if (flow->init_step >= 0 && header.step != flow->init_step) {
    return wrong("step", text(flow->init_step, " like the init of the other partitions"),
                 header.step);
  }
  return "";
}

std::string Engine::check_keeping(const Connection& from, const wire::Header& header) const {
  if (header.kind != wire::Kind::kTake) return "";
  const Keeping* kept = header.flow < from.keeping.size() ? &from.keeping[header.flow] : nullptr;
  if (kept == nullptr || kept->version == nullptr) {
    return text("header field kind: expected 6, for nothing of flow ", header.flow,
                " is kept for it, got 7");
  }
  if (header.step != kept->version->step) {
    return text("header field step: expected ", kept->version->step, ", which is kept, got ",
                header.step);
  }
  if (kept->taking >= kMostTakes) {
    return text("write: expected it to receive what it asked for, but ", kept->taking,
                " partitions are on their way to it");
  }
  return "";
}

void Engine::received(Connection& from, const fabric::Event& event) {
  if (fabric::Endpoint* endpoint = fabric_->endpoint(from.id)) endpoint->release(1);
  Landing& landing = *from.landing;
  const uint32_t slot = event.immediate;
  if (slot >= landing.slots()) {
    return violation(from,
                     text("immediate: expected a slot below ", landing.slots(), ", got ", slot));
  }
  if (landing.occupied(slot)) {
    return violation(from, text("immediate: expected a free slot, got ", slot,
                                ", which has not been given back"));
  }
  if (event.bytes < sizeof(wire::Header)) {
    return violation(from, text("write: expected a header of ", sizeof(wire::Header),
                                " bytes, got ", event.bytes, " bytes"));
  }
  // A copy: the peer could go on writing into the slot.
  wire::Header header;
  std::memcpy(&header, landing.header(slot), sizeof(header));
  const uint64_t payload_bytes = event.bytes - sizeof(header);
  wire::Rows rows{};
  std::string wrong = check(from, header, payload_bytes);
  if (wrong.empty() && wire::of_rows(header.kind)) {
    if (payload_bytes >= sizeof(rows)) std::memcpy(&rows, landing.payload(slot), sizeof(rows));
    wrong = find_table(header.flow)->check(header, rows, payload_bytes);
  }
  if (!wrong.empty()) return violation(from, text("slot ", slot, ", ", wrong));
  landing.occupy(slot);
  if (wire::of_rows(header.kind)) return received_rows(from, header, rows, slot);
  Aggregate& flow = *find_flow(header.flow);
  Piece& piece = flow.pieces[static_cast<size_t>(flow.piece_of[header.partition])];
  switch (header.kind) {
    case wire::Kind::kPush:
      return flow.held != nullptr ? hold(from, header, slot, piece)
                                  : push(from, header, slot, piece);
    case wire::Kind::kPull:
      return pull(from, header, slot, piece);
    case wire::Kind::kInit:
      return init(from, header, slot, piece);
    case wire::Kind::kLocate:
      return locate(from, header, slot, piece);
    case wire::Kind::kVerdict:
      return verdict(from, header, slot, flow);
    case wire::Kind::kKeep:
      return keep(from, header, slot, flow);
    case wire::Kind::kTake:
      return take(from, header, slot, piece);
    case wire::Kind::kPushRows:
    case wire::Kind::kPullRows:
      return;  // was dealt with above
  }
}

void Engine::refuse(Connection& from, const wire::Header& header, uint32_t slot, wire::Answer why) {
  ++dropped_[from.worker];
  recorder_.add(Stage::kDropped, header.flow, header.step, header.partition,
                static_cast<uint16_t>(from.worker));
  say(from.id, why, header.reply_tag);
  free_slot(from.landing, slot, from.id);
}

void Engine::push(Connection& from, const wire::Header& header, uint32_t slot, Piece& piece) {
  Aggregate& flow = *piece.flow;
  bytes_pushed_ += header.bytes;
  if (!flow.update() && piece.version < 0) {
    for (Piece& each : flow.pieces)
      each.begin(header.step);  // an average begins wherever its workers do
  }
  if (header.step < piece.version) return refuse(from, header, slot, wire::Answer::kStale);
  if (header.step > piece.version) return refuse(from, header, slot, wire::Answer::kAhead);

  const Reply reply = reply_to(from, header, slot, header.step + 1);
  if (piece.contributed[from.worker]) {
    ++duplicates_;
    recorder_.add(Stage::kDropped, header.flow, header.step, header.partition,
                  static_cast<uint16_t>(from.worker));
    const auto known =
        std::find_if(piece.replies.begin(), piece.replies.end(), [&](const Reply& each) {
          return each.worker == from.worker && each.wanted == reply.wanted;
        });
    if (known != piece.replies.end()) {
      *known = reply;
    } else {
      piece.replies.push_back(reply);
    }
    return free_slot(from.landing, slot, from.id);
  }
  recorder_.add(Stage::kLanded, header.flow, header.step, header.partition,
                static_cast<uint16_t>(from.worker));
  piece.contributed[from.worker] = true;
  if (++piece.arrived == 1) piece.since = Clock::now();
  piece.replies.push_back(reply);
  piece.waiting.push_back(
      {from.worker, static_cast<DType>(header.dtype), from.landing, slot, from.id});
  if (!departed_.empty()) check_stranded(piece);
  advance(piece);
}

void Engine::pull(Connection& from, const wire::Header& header, uint32_t slot, Piece& piece) {
  const auto waiting = std::count_if(piece.replies.begin(), piece.replies.end(),
                                     [&](const Reply& each) { return each.worker == from.worker; });
  if (waiting >= kMostPulls)
    return violation(from, text("pull: expected at most ", kMostPulls, " that wait for partition ",
                                header.partition, ", got another"));
  piece.replies.push_back(reply_to(from, header, slot, header.step));
  free_slot(from.landing, slot, from.id);
  send_replies(piece);
}

void Engine::locate(Connection& from, const wire::Header& header, uint32_t slot, Piece& piece) {
  free_slot(from.landing, slot, from.id);
  post(from.id, {piece.flow->location_slice(piece),
                 {header.reply_address, header.reply_key},
                 wire::answer(wire::Answer::kResult, header.reply_tag),
                 0});
}

void Engine::init(Connection& from, const wire::Header& header, uint32_t slot, Piece& piece) {
  Aggregate& flow = *piece.flow;
  bytes_pushed_ += header.bytes;
  recorder_.add(Stage::kLanded, header.flow, header.step, header.partition,
                static_cast<uint16_t>(from.worker));
  std::memcpy(piece.result, from.landing->payload(slot), piece.bytes());
  piece.initialised = true;
  flow.init_step = header.step;
  piece.replies.push_back(reply_to(from, header, slot, header.step));
  free_slot(from.landing, slot, from.id);
  if (++flow.initialised == flow.pieces.size()) {
    flow.updating = true;
    tell({ServerEvent::Kind::kInitialised, flow.spec.id, header.step, 0, ""});
  }
}

// --- The sum.

void Engine::advance(Piece& piece) {
  if (piece.busy || piece.waiting.empty()) return;
  if (!piece.flow->update()) {
    // The mean of the step before is still being read where this sum would go.
    if (piece.replies_in_flight > 0) {
      awaits_writes_ = true;
      return;
    }
    if (options_.workers == 1) return send_slot(piece);
  }
  piece.take(options_.ordered);
  if (piece.reducing.empty()) return;
  piece.busy = true;
  give({&piece, nullptr, {}, nullptr});
}

/// Has a job done: here if that is sooner, else by a reducing thread.
void Engine::give(Job job) {
  Source source{};
  const Reduction task = reduction(job, source);
  if (reduce_threads_.empty() || reduction_bytes(task) <= kInlineReductionBytes) {
    reduce(task);
    return finish(job);
  }
  {
    std::lock_guard guard(reduce_lock_);
    reduce_queue_.push_back(std::move(job));
  }
  reduce_added_.notify_one();
}

/// `source`: room for one, which the reduction refers to.
Reduction Engine::reduction(const Job& job, Source& source) const {
  Piece& piece = *job.piece;
  if (job.gradient == nullptr && piece.flow->held == nullptr)
    return piece.reduction(options_.workers);
  Reduction task;
  task.elements = piece.elements;
  task.accumulator_dtype = accumulator_dtype(piece.dtype);
  task.first = true;
  if (job.gradient != nullptr) {
    source = {job.from.landing->payload(job.from.slot), job.from.dtype};
    task.accumulator = piece.flow->value(*job.gradient, piece);
    task.sources = {&source, 1};
  } else {
    task.accumulator = piece.accumulator;
    task.sources = piece.sources;
    task.divisor = static_cast<uint32_t>(piece.sources.size());
  }
  return task;
}

void Engine::finish(Job& job) {
  if (job.table != nullptr) {
    finish_rows(*job.table);
    return work_rows(*job.table);
  }
  Piece& piece = *job.piece;
  Aggregate& flow = *piece.flow;
  if (job.gradient != nullptr) {
    HeldGradient& gradient = *job.gradient;
    free_slot(job.from.landing, job.from.slot, job.from.endpoint);
    --gradient.busy;
    --gradient.missing;
    whole_maybe(flow, gradient);
  } else if (flow.held != nullptr) {
    piece.busy = false;
    recorder_.add(Stage::kReduced, flow.spec.id, piece.version, piece.partition, kEveryPeer);
    if (++flow.complete == flow.pieces.size()) mean_formed(flow);
  } else {
    finish(piece);
  }
}

void Engine::finish(Piece& piece) {
  piece.busy = false;
  piece.summed += static_cast<uint32_t>(piece.reducing.size());
  for (Contribution& each : piece.reducing) {
    recorder_.add(Stage::kConsumed, piece.flow->spec.id, piece.version, piece.partition,
                  static_cast<uint16_t>(each.worker));
    piece.owed.push_back(std::move(each));
  }
  piece.reducing.clear();
  if (piece.summed == options_.workers) {
    complete(piece);
  } else {
    advance(piece);
  }
  // After the answers, for which everybody waits, and which have given some back.
  for (const Contribution& each : piece.owed) free_slot(each.landing, each.slot, each.endpoint);
  piece.owed.clear();
}

void Engine::complete(Piece& piece) {
  Aggregate& flow = *piece.flow;
  recorder_.add(Stage::kReduced, flow.spec.id, piece.version, piece.partition, kEveryPeer);
  for (uint64_t& summed : flow.summed_of_worker) ++summed;  // the quorum is all replicas
  if (flow.update()) {
    ++flow.complete;
    return ready(flow);
  }
  publish_mean(piece);
  send_replies(piece);
}

/// Average: the mean of this step is there, the next step begins.
void Engine::publish_mean(Piece& piece) {
  ++piece.flow->means;
  piece.begin(piece.version + 1);
  piece.published = piece.version;
  recorder_.add(Stage::kPublished, piece.flow->spec.id, piece.published, piece.partition,
                kEveryPeer);
}

void Engine::ready(Aggregate& flow) {
  // Python will overwrite the parameters: nothing may be reading them any more.
  if (!flow.update() || flow.updating || flow.complete < flow.pieces.size()) return;
  if (flow.copying) return;  // who copies looks again
  if (flow.replies_in_flight > 0) {
    awaits_writes_ = true;
    return;
  }
  flow.updating = true;
  flow.break_seal();
  recorder_.add(Stage::kUpdating, flow.spec.id, flow.pieces.front().version,
                flow.pieces.front().partition, kEveryPeer);
  tell({ServerEvent::Kind::kStepReady, flow.spec.id, flow.pieces.front().version, 0, ""});
}

void Engine::send_slot(Piece& piece) {
  Aggregate& flow = *piece.flow;
  const Contribution from = std::move(piece.waiting.front());
  const Reply to = piece.replies.front();
  piece.waiting.clear();
  piece.replies.clear();
  recorder_.add(Stage::kReduced, flow.spec.id, piece.version, piece.partition,
                static_cast<uint16_t>(from.worker));
  ++flow.summed_of_worker[from.worker];
  publish_mean(piece);
  bytes_pulled_ += piece.bytes();
  Write write;
  write.endpoint = to.endpoint;
  write.landing = from.landing;
  // The worker writes into the slot again once it has the whole answer: what is sent is not needed
  // then, whether or not kWriteDone has come. A device that repeats it for a lost acknowledgement
  // is not listened to (InfiniBand specification, duplicate requests).
  from.landing->free(from.slot);
  post(to.endpoint,
       {from.landing->slab.slice(from.landing->payload(from.slot), piece.bytes()), to.target,
        wire::answer(wire::Answer::kResultAndCredit, to.tag), begin_write(std::move(write))});
}

void Engine::send_replies(Piece& piece) {
  Aggregate& flow = *piece.flow;
  if (!flow.readable()) return;
  const auto due =
      std::stable_partition(piece.replies.begin(), piece.replies.end(),
                            [&](const Reply& each) { return each.wanted > piece.published; });
  for (auto reply = due; reply != piece.replies.end(); ++reply) {
    if (Connection* to = find(reply->endpoint); to == nullptr || to->closing) continue;
    Write write;
    write.endpoint = reply->endpoint;
    if (flow.held != nullptr) {
      write.version = flow.held->current;
    } else {
      write.piece = &piece;
      ++piece.replies_in_flight;
      ++flow.replies_in_flight;
    }
    bytes_pulled_ += piece.bytes();
    post(reply->endpoint,
         {flow.result_slice(piece), reply->target,
          wire::answer(give_back(piece, *reply), reply->tag), begin_write(std::move(write))});
  }
  piece.replies.erase(due, piece.replies.end());
}

/// As what `to` is answered: together with its slot, where that has only now become free.
wire::Answer Engine::give_back(Piece& piece, const Reply& to) {
  const auto found =
      std::find_if(piece.owed.begin(), piece.owed.end(), [&](const Contribution& each) {
        return each.endpoint == to.endpoint && each.slot == to.slot;
      });
  if (found == piece.owed.end()) return wire::Answer::kResult;
  found->landing->free(found->slot);
  piece.owed.erase(found);
  return wire::Answer::kResultAndCredit;
}

// --- Tables.

void Engine::received_rows(Connection& from, const wire::Header& header, const wire::Rows& rows,
                           uint32_t slot) {
  ServedTable& table = *find_table(header.flow);
  RowTask task;
  task.rows = rows;
  task.last = header.partition + 1 == rows.chunks;
  task.reply = reply_to(from, header, slot, header.step + 1);
  task.landing = from.landing;
  bytes_pushed_ += header.bytes;
  if (header.kind == wire::Kind::kPushRows) return push_rows(from, header, std::move(task), table);
  // What was told to this worker is there, so that nobody who holds a slot waits for another.
  if (table.sync() && header.step > table.version)
    return refuse(from, header, slot, wire::Answer::kAhead);
  task.kind = RowTask::Kind::kRead;
  table.tasks.push_back(std::move(task));
  work_rows(table);
}

void Engine::push_rows(Connection& from, const wire::Header& header, RowTask task,
                       ServedTable& table) {
  const uint32_t slot = task.reply.slot;
  if (!table.sync()) {
    recorder_.add(Stage::kLanded, header.flow, header.step, header.partition,
                  static_cast<uint16_t>(from.worker));
    task.kind = RowTask::Kind::kApplyNow;
    table.tasks.push_back(std::move(task));
    return work_rows(table);
  }
  if (header.step < table.version) return refuse(from, header, slot, wire::Answer::kStale);
  if (header.step > table.version) return refuse(from, header, slot, wire::Answer::kAhead);
  RowShare& share = table.shares[from.worker];
  if (!share.begun()) {
    share.replies.resize(task.rows.chunks);
    share.missing = task.rows.chunks;
    if (++table.begun == 1) table.since = Clock::now();
  }
  if (share.replies.size() != task.rows.chunks) {
    return violation(
        from, text("rows of table '", table.spec().name, "', chunks: expected ",
                   share.replies.size(), " as in the rest of this step, got ", task.rows.chunks));
  }
  std::optional<Reply>& reply = share.replies[header.partition];
  const bool again = reply.has_value();
  reply = task.reply;
  if (again) {
    ++duplicates_;
    return free_slot(from.landing, slot, from.id);
  }
  recorder_.add(Stage::kLanded, header.flow, header.step, header.partition,
                static_cast<uint16_t>(from.worker));
  task.kind = RowTask::Kind::kSum;
  table.tasks.push_back(std::move(task));
  if (--share.missing == 0 && ++table.whole == options_.workers) table.tasks.emplace_back();
  if (!departed_.empty()) check_stranded(table);
  work_rows(table);
}

/// Does what is to be done, up to what is worth another thread.
void Engine::work_rows(ServedTable& table) {
  while (!table.busy && !table.tasks.empty()) {
    const bool here =
        reduce_threads_.empty() || table.work_bytes(table.tasks.front()) <= kInlineReductionBytes;
    table.current = std::move(table.tasks.front());
    table.tasks.pop_front();
    table.busy = true;
    if (!here) {
      {
        std::lock_guard guard(reduce_lock_);
        reduce_queue_.push_back({nullptr, nullptr, {}, &table});
      }
      reduce_added_.notify_one();
      return;
    }
    table.work();
    finish_rows(table);
  }
}

void Engine::finish_rows(ServedTable& table) {
  table.busy = false;
  RowTask task = std::exchange(table.current, RowTask());
  const Reply& to = task.reply;
  if (!task.wrong.empty()) {
    if (Connection* from = find(to.endpoint); from != nullptr && !from->closing)
      violation(*from, text("slot ", to.slot, ", ", task.wrong));
    return;
  }
  switch (task.kind) {
    case RowTask::Kind::kRead: {
      const size_t bytes = wire::values_bytes(task.rows.count, table.spec().columns);
      bytes_pulled_ += bytes;
      Write write;
      write.endpoint = to.endpoint;
      write.landing = task.landing;
      task.landing->free(to.slot);  // as send_slot does
      post(to.endpoint,
           {task.landing->slab.slice(task.landing->payload(to.slot), bytes), to.target,
            wire::answer(wire::Answer::kResultAndCredit, to.tag), begin_write(std::move(write))});
      return;
    }
    case RowTask::Kind::kSum:
      return free_slot(task.landing, to.slot, to.endpoint);
    case RowTask::Kind::kApplyNow:
      if (task.last) {
        ++table.version;
        ++table.applied[to.worker];
      }
      task.landing->free(to.slot);
      return say(to.endpoint, wire::Answer::kResultAndCredit, to.tag);
    case RowTask::Kind::kApply:
      return publish_rows(table);
  }
}

/// The step of a table is applied: tells everybody who has a part in it, and begins the next.
void Engine::publish_rows(ServedTable& table) {
  recorder_.add(Stage::kPublished, table.spec().id, ++table.version, 0, kEveryPeer);
  table.begun = table.whole = 0;
  for (uint64_t& applied : table.applied) ++applied;
  for (RowShare& share : table.shares) {
    for (const auto& reply : std::exchange(share.replies, {}))
      say(reply->endpoint, wire::Answer::kResult, reply->tag);
  }
}

Status Engine::add_table(TableSpec spec) {
  auto table = ServedTable::create(std::move(spec), options_.server, options_.servers,
                                   options_.workers, slot_payload_bytes());
  if (!table.ok()) return table.status();
  const uint16_t id = table.value()->spec().id;
  std::lock_guard guard(progress_lock_);
  if (closed_) return is_closed();
  if (find_flow(id) != nullptr || find_table(id) != nullptr) {
    return Status(Code::kInvalidArgument,
                  text("server ", options_.server, " has a flow or a table ", id, " already"));
  }
  pieces_ += wire::chunks_of(table.value()->table->rows(), table.value()->chunk);
  if (tables_.size() <= id) tables_.resize(id + size_t{1});
  tables_[id] = std::move(table.value());
  return Status();
}

// --- Followers.

void Engine::keep(Connection& from, const wire::Header& header, uint32_t slot, Aggregate& flow) {
  const uint16_t id = header.flow;
  if (from.keeping.size() <= id) from.keeping.resize(id + size_t{1});
  Keeping& keeping = from.keeping[id];
  if (header.bytes < keeping.asked) {  // was overtaken
    say(from.id, wire::Answer::kStale, header.reply_tag);
    return free_slot(from.landing, slot, from.id);
  }
  keeping.asked = header.bytes;
  if (keeping.wanted.has_value()) {
    say(from.id, wire::Answer::kStale, keeping.wanted->tag);
    free_slot(from.landing, keeping.wanted->slot, from.id);
  }
  keeping.version.reset();
  keeping.wanted = reply_to(from, header, slot, header.step);
  serve_followers(flow);
}

void Engine::take(Connection& from, const wire::Header& header, uint32_t slot, Piece& piece) {
  const Version& version = *from.keeping[header.flow].version;
  bytes_followed_ += piece.bytes();
  give_to(from, *piece.flow, reply_to(from, header, slot, header.step),
          piece.flow->version_slice(version, piece));
}

/// Answers with a part of the version that is kept, and gives the slot back.
void Engine::give_to(Connection& to, const Aggregate& flow, const Reply& reply,
                     const fabric::Slice& source) {
  Keeping& keeping = to.keeping[flow.spec.id];
  Write write;
  write.endpoint = to.id;
  write.version = keeping.version;
  write.taken = true;
  write.flow = flow.spec.id;
  ++keeping.taking;
  to.landing->free(reply.slot);
  post(to.id, {source, reply.target, wire::answer(wire::Answer::kResultAndCredit, reply.tag),
               begin_write(std::move(write))});
}

/// Calls `act` with each follower that waits for a version up to `reached`, and what it wants. What
/// it took before must have gone out: so there is one version for each at most.
template <typename Do>
void Engine::for_waiting(const Aggregate& flow, int64_t reached, Do act) {
  for (auto& [id, connection] : connections_) {
    if (connection.closing || connection.keeping.size() <= flow.spec.id) continue;
    Keeping& keeping = connection.keeping[flow.spec.id];
    if (!keeping.wanted.has_value() || keeping.wanted->wanted > reached) continue;
    if (keeping.taking > 0) {
      awaits_writes_ = true;
    } else {
      act(connection, keeping);
    }
  }
}

/// Sees to it that whoever waits for what is there will get it.
void Engine::serve_followers(Aggregate& flow) {
  if (flow.published() < 0) return;
  int64_t wanted = -1;  // the most that somebody waits for, and is not on its way
  for_waiting(flow, flow.published(), [&](Connection&, Keeping& keeping) {
    const bool comes =
        std::any_of(flow.coming.begin(), flow.coming.end(),
                    [&](const auto& version) { return version->step >= keeping.wanted->wanted; });
    if (!comes) wanted = std::max(wanted, keeping.wanted->wanted);
  });
  if (wanted < 0) return;
  if (flow.held != nullptr) {
    if (flow.held->current->summed) return give_version(flow, flow.held->current);
    flow.coming.push_back(flow.held->current);
    return give(Errand::Kind::kSum, flow, flow.held->current);
  }
  if (auto known = flow.copies.find(flow.published()); known != nullptr)
    return give_version(flow, known);
  if (flow.copying || flow.making_room) return;  // who does looks again
  std::shared_ptr<Version> version = flow.copies.spare();
  if (version == nullptr) {
    flow.making_room = true;
    return give(Errand::Kind::kRoom, flow);
  }
  if (!flow.readable()) return;  // the next one will do
  ++copies_;
  flow.copying = true;
  version->begin(flow.published());
  flow.coming.push_back(version);
  give(Errand::Kind::kCopy, flow, std::move(version));
}

void Engine::give_version(Aggregate& flow, const std::shared_ptr<Version>& version) {
  for_waiting(flow, version->step, [&](Connection& to, Keeping& keeping) {
    const Reply reply = *std::exchange(keeping.wanted, std::nullopt);
    keeping.version = version;
    const auto* kept = reinterpret_cast<const std::byte*>(version->kept());
    give_to(to, flow, reply, version->slab.slice(kept, sizeof(wire::Kept)));
  });
}

void Engine::give(Errand::Kind kind, Aggregate& flow, std::shared_ptr<Version> version) {
  {
    std::lock_guard guard(errand_lock_);
    errands_.push_back({kind, &flow, std::move(version), {}});
  }
  errand_added_.notify_one();
}

void Engine::run_errands() {
  std::unique_lock guard(errand_lock_);
  while (true) {
    errand_added_.wait(guard, [this] { return errands_stop_ || !errands_.empty(); });
    if (errands_stop_) return;
    Errand errand = std::move(errands_.front());
    errands_.pop_front();
    guard.unlock();
    run(errand);
    {
      std::lock_guard progress(progress_lock_);
      finish(errand);
      settle();
      hurry();
    }
    guard.lock();
  }
}

/// Without a lock.
void Engine::run(Errand& errand) const {
  if (errand.kind == Errand::Kind::kCopy) return errand.flow->copy_parameters(*errand.version);
  if (errand.kind == Errand::Kind::kSum) return errand.flow->sum_parameters(*errand.version);
  auto made = Versions::make(errand.flow->parameter_bytes(),
                             " of flow " + std::to_string(errand.flow->spec.id));
  errand.status = made.status();
  if (made.ok()) errand.version = std::move(made.value());
}

void Engine::finish(Errand& errand) {
  Aggregate& flow = *errand.flow;
  switch (errand.kind) {
    case Errand::Kind::kCopy:
      flow.copying = false;
      ready(flow);
      return give(Errand::Kind::kSum, flow, std::move(errand.version));
    case Errand::Kind::kSum:
      errand.version->summed = true;
      std::erase(flow.coming, errand.version);
      give_version(flow, errand.version);
      errand.version.reset();  // it may be spare now
      break;
    case Errand::Kind::kRoom:
      flow.making_room = false;
      if (errand.status.ok()) errand.status = flow.copies.add(*fabric_, std::move(errand.version));
      if (!errand.status.ok()) refuse_room(flow, errand.status);
  }
  serve_followers(flow);
}

void Engine::refuse_room(const Aggregate& flow, const Status& status) {
  const Status why(Code::kResource,
                   text("server ", options_.server,
                        " cannot keep a version of the parameters: ", status.message()));
  for_waiting(flow, flow.published(), [&](Connection& to, Keeping&) {
    if (is_follower(to.worker)) return send_away(to, why);
    end(to, why, false);
  });
}

// --- Gradients that are held.

void Engine::hold(Connection& from, const wire::Header& header, uint32_t slot, Piece& piece) {
  Aggregate& flow = *piece.flow;
  bytes_pushed_ += header.bytes;
  HeldGradient* gradient = landing_gradient(from, header, flow);
  if (gradient == nullptr) return;
  std::optional<Reply>& reply = gradient->replies[static_cast<size_t>(&piece - flow.pieces.data())];
  const bool again = reply.has_value();
  reply = reply_to(from, header, slot, header.step);
  if (again) {
    ++duplicates_;
    return free_slot(from.landing, slot, from.id);
  }
  recorder_.add(Stage::kLanded, header.flow, header.step, header.partition,
                static_cast<uint16_t>(from.worker));
  ++gradient->busy;
  give({&piece,
        gradient,
        {from.worker, static_cast<DType>(header.dtype), from.landing, slot, from.id},
        nullptr});
}

void Engine::verdict(Connection& from, const wire::Header& header, uint32_t slot, Aggregate& flow) {
  HeldGradient* gradient = landing_gradient(from, header, flow);
  if (gradient == nullptr) return;
  const bool again = gradient->verdict.has_value();
  gradient->verdict = reply_to(from, header, slot, header.step);
  free_slot(from.landing, slot, from.id);
  if (again) {
    ++duplicates_;
    return;
  }
  --gradient->missing;
  whole_maybe(flow, *gradient);
}

/// That of which this is a part. Null: there can be none, and the worker was told so.
HeldGradient* Engine::landing_gradient(Connection& from, const wire::Header& header,
                                       Aggregate& flow) {
  const auto where = [&] { return text("partition ", header.partition, ", header field step: "); };
  auto gradient = flow.held->landing(from.worker, from.incarnation, from.id, header.step);
  if (!gradient.ok()) {
    violation(from, gradient.status().message());
    return nullptr;
  }
  HeldGradient& found = *gradient.value();
  if (header.step != found.step) {
    violation(from, text(where(), "expected ", found.step, " as in the rest of this gradient, got ",
                         header.step));
    return nullptr;
  }
  if (header.step > flow.published()) {
    violation(from, text(where(), "expected at most ", flow.published(),
                         ", the version of the parameters, got ", header.step));
    return nullptr;
  }
  return &found;
}

void Engine::whole_maybe(Aggregate& flow, HeldGradient& gradient) {
  if (gradient.orphan) {
    gradient.spent = true;  // nobody will be told of it, so nobody can want it
    return flow.held->sweep();
  }
  if (!gradient.whole()) return;
  ServerEvent event{ServerEvent::Kind::kGradient, flow.spec.id, gradient.step,
                    gradient.id.worker,           "",           gradient.id};
  tell(std::move(event));
}

/// Begins the next mean that was asked for, if its time has come.
void Engine::form_mean(Aggregate& flow) {
  Held& held = *flow.held;
  if (held.forming || flow.updating || held.means.empty() ||
      held.means.front().step != flow.published()) {
    return;
  }
  const Held::Mean mean = std::move(held.means.front());
  held.means.pop_front();
  held.forming = true;
  held.summing.clear();
  for (const GradientId& id : mean.set) held.summing.push_back(held.find(id));
  for (HeldGradient* each : held.summing)
    flow.summed_of_worker[each->id.worker] += flow.pieces.size();
  for (Piece& piece : flow.pieces) {
    piece.sources.clear();
    for (const HeldGradient* each : held.summing) {
      piece.sources.push_back({flow.value(*each, piece), accumulator_dtype(piece.dtype)});
    }
    piece.busy = true;
  }
  for (Piece& piece : flow.pieces) give({&piece, nullptr, {}, nullptr});
}

void Engine::mean_formed(Aggregate& flow) {
  for (HeldGradient* each : flow.held->summing) each->spent = true;
  flow.held->summing.clear();
  flow.held->sweep();
  ready(flow);
}

/// Answers a worker whose gradient was decided about, once the version is there.
void Engine::answer_maybe(Aggregate& flow, HeldGradient& gradient) {
  Held& held = *flow.held;
  if (!gradient.decided.has_value() || gradient.answered || held.current == nullptr ||
      held.current->step < gradient.decided->step) {
    return;
  }
  gradient.answered = true;
  if (gradient.orphan) return;
  const auto send = [&](const Reply& to, const fabric::Slice& source) {
    Write write;
    write.endpoint = to.endpoint;
    write.version = held.current;
    post(to.endpoint, {source, to.target, wire::answer(wire::Answer::kResult, to.tag),
                       begin_write(std::move(write))});
  };
  const wire::Verdict* verdict = held.current->verdicts() + (gradient.decided->accepted ? 1 : 0);
  send(*gradient.verdict,
       held.current->slab.slice(reinterpret_cast<const std::byte*>(verdict), sizeof(*verdict)));
  for (const Piece& piece : flow.pieces) {
    const Reply& reply = *gradient.replies[static_cast<size_t>(&piece - flow.pieces.data())];
    bytes_pulled_ += piece.bytes();
    send(reply, flow.result_slice(piece));
  }
}

Result<Aggregate*> Engine::holding(uint16_t id) {
  if (closed_) return is_closed();
  Aggregate* flow = find_flow(id);
  if (flow == nullptr || flow->held == nullptr) {
    return Status(Code::kInvalidArgument,
                  text("server ", options_.server, " has no flow ", id, " that holds gradients"));
  }
  return flow;
}

Status Engine::aggregate(uint16_t id, int64_t step, const std::vector<GradientId>& set) {
  std::lock_guard guard(progress_lock_);
  auto found = holding(id);
  if (!found.ok()) return found.status();
  Aggregate& flow = *found.value();
  Held& held = *flow.held;
  const auto refuse = [&](const auto&... parts) {
    return Status(Code::kInvalidArgument, text("server ", options_.server, " cannot form the mean ",
                                               "of step ", step, " of flow ", id, ": ", parts...));
  };
  const int64_t next = std::max(held.newest_mean + 1, flow.published());
  if (flow.published() < 0) return refuse("it has no parameters here");
  if (step != next) {
    return refuse("the next one is of step ", next,
                  step > next ? ", and what was decided of that was not told here" : "");
  }
  if (set.empty()) return refuse("it is over no gradient");
  for (size_t i = 0; i < set.size(); ++i) {
    if (std::find(set.begin(), set.begin() + static_cast<ptrdiff_t>(i), set[i]) !=
        set.begin() + static_cast<ptrdiff_t>(i)) {
      return refuse(name_of(set[i]), " is named twice");
    }
  }
  for (const GradientId& gradient : set) {
    const HeldGradient* each = held.find(gradient);
    if (each == nullptr || !each->whole()) return refuse(name_of(gradient), " is not here");
    if (each->named) return refuse(name_of(gradient), " was decided about before");
  }
  for (const GradientId& gradient : set) {
    held.find(gradient)->named = true;
  }
  held.newest_mean = step;
  held.means.push_back({step, set});
  form_mean(flow);
  settle();
  hurry();
  return Status();
}

Status Engine::drop(uint16_t id, const GradientId& gradient) {
  std::lock_guard guard(progress_lock_);
  auto found = holding(id);
  if (!found.ok()) return found.status();
  Aggregate& flow = *found.value();
  HeldGradient* each = flow.held->find(gradient);
  if (each == nullptr) return Status();
  if (each->named) {
    return Status(Code::kInvalidArgument, text("server ", options_.server, " cannot drop ",
                                               name_of(gradient), ": it was decided about before"));
  }
  each->named = true;
  each->spent = true;
  ++gradients_dropped_[gradient.worker];
  recorder_.add(Stage::kDropped, id, each->step, 0, static_cast<uint16_t>(gradient.worker));
  flow.held->sweep();
  return Status();
}

Status Engine::answer(uint16_t id, const GradientId& gradient, int64_t step, bool accepted) {
  std::lock_guard guard(progress_lock_);
  auto found = holding(id);
  if (!found.ok()) return found.status();
  Aggregate& flow = *found.value();
  HeldGradient* each = flow.held->find(gradient);
  if (each == nullptr || each->orphan) return Status();
  const auto refuse = [&](const auto&... parts) {
    return Status(Code::kInvalidArgument,
                  text("server ", options_.server, " cannot answer ", name_of(gradient), " with ",
                       "step ", step, ": ", parts...));
  };
  if (!each->whole()) return refuse("it is not here");
  if (each->decided.has_value()) return refuse("it was answered before");
  if (step < flow.published()) return refuse("the parameters have reached step ", flow.published());
  each->decided = {step, accepted};
  answer_maybe(flow, *each);
  flow.held->sweep();
  settle();
  hurry();
  return Status();
}

// --- What goes out.

void Engine::free_slot(const std::shared_ptr<Landing>& landing, uint32_t slot,
                       EndpointId endpoint) {
  landing->free(slot);
  say(endpoint, wire::Answer::kCredit, slot);
}

void Engine::say(EndpointId endpoint, wire::Answer what, uint32_t tag) {
  // A worker that waits for slots does not sleep patiently.
  const auto solicit = what == wire::Answer::kCredit ? fabric::Solicit::kNo : fabric::Solicit::kYes;
  post(endpoint, {{nullptr, nullptr, 0}, {0, {}}, wire::answer(what, tag), 0, solicit});
}

void Engine::post(EndpointId endpoint, Outgoing outgoing) {
  Connection* to = find(endpoint);
  if (to == nullptr || to->closing) {
    if (outgoing.request != 0) lost_writes_.push_back(outgoing.request);
    return;
  }
  if (to->outgoing.size() >= kMostAnswers + 4 * pieces_) {
    if (outgoing.request != 0) lost_writes_.push_back(outgoing.request);
    return violation(*to, text("credits: expected it to take its answers, ", to->outgoing.size(),
                               " of which wait"));
  }
  to->outgoing.push_back(outgoing);
  if (to->outgoing.size() == 1) drain(*to);
}

void Engine::drain(Connection& connection) {
  fabric::Endpoint* endpoint = fabric_->endpoint(connection.id);
  while (endpoint != nullptr && !connection.closing && !connection.outgoing.empty() &&
         endpoint->credits() > 0) {
    const Outgoing outgoing = connection.outgoing.front();
    connection.outgoing.pop_front();
    const size_t slices = outgoing.source.bytes > 0 ? 1 : 0;
    Status status = endpoint->write({&outgoing.source, slices}, outgoing.target, outgoing.immediate,
                                    outgoing.request, outgoing.solicit);
    if (!status.ok()) {
      if (outgoing.request != 0) lost_writes_.push_back(outgoing.request);
      end(connection, std::move(status), false);
    }
  }
}

RequestId Engine::begin_write(Write write) {
  if (free_writes_.empty()) {
    writes_.emplace_back();
    free_writes_.push_back(writes_.size());
  }
  const RequestId request = free_writes_.back();
  free_writes_.pop_back();
  writes_[request - 1] = std::move(write);
  return request;
}

void Engine::end_write(RequestId request) {
  Write write = std::move(writes_[request - 1]);
  writes_[request - 1] = Write();
  free_writes_.push_back(request);
  if (free_writes_.size() == writes_.size()) awaits_writes_ = false;
  if (write.taken) {
    write.version.reset();  // it may be spare now
    Connection* to = find(write.endpoint);
    if (to != nullptr && --to->keeping[write.flow].taking == 0)
      serve_followers(*find_flow(write.flow));
    return;
  }
  if (write.piece == nullptr) return;
  Aggregate& flow = *write.piece->flow;
  if (const Connection* to = find(write.endpoint); to != nullptr) {
    recorder_.add(Stage::kAnswered, flow.spec.id, write.piece->published, write.piece->partition,
                  static_cast<uint16_t>(to->worker));
  }
  --flow.replies_in_flight;
  if (--write.piece->replies_in_flight == 0) advance(*write.piece);
  ready(flow);
}

void Engine::settle() {
  while (!lost_writes_.empty()) {
    const RequestId request = lost_writes_.back();
    lost_writes_.pop_back();
    end_write(request);
  }
}

bool Engine::patient() const {
  return !awaits_writes_ &&
         std::all_of(connections_.begin(), connections_.end(),
                     [](const auto& entry) { return entry.second.outgoing.empty(); });
}

void Engine::hurry() {
  if (!sleeps_patiently_ || patient()) return;
  sleeps_patiently_ = false;
  fabric_->wake();
}

// --- Flows.

Status Engine::add_flow(FlowSpec spec) {
  if (Status status = check_flow(spec, options_.servers, options_.partition_bytes); !status.ok())
    return status;
  const uint16_t id = spec.id;
  auto flow = Aggregate::create(std::move(spec), options_.server, options_.workers);
  if (!flow.ok()) return flow.status();
  std::lock_guard guard(progress_lock_);
  if (closed_) return is_closed();
  if (find_flow(id) != nullptr || find_table(id) != nullptr) {
    return Status(Code::kInvalidArgument,
                  text("server ", options_.server, " has a flow or a table ", id, " already"));
  }
  const auto results =
      flow.value()->update() ? fabric::Access::kRemoteRead : fabric::Access::kLocal;
  Status enrolled = flow.value()->accumulators.enrol(*fabric_, fabric::Access::kLocal);
  if (enrolled.ok()) enrolled = flow.value()->results.enrol(*fabric_, results);
  if (!enrolled.ok()) {
    flow.value().reset();  // while the lock is held
    return enrolled;
  }
  pieces_ += flow.value()->pieces.size();
  if (flows_.size() <= id) flows_.resize(id + size_t{1});
  flows_[id] = std::move(flow.value());
  return Status();
}

Result<LeafShard> Engine::shard(uint16_t id, uint32_t array, bool gradient) {
  std::lock_guard guard(progress_lock_);
  const Aggregate* flow = find_flow(id);
  if (flow == nullptr || array >= flow->spec.arrays()) {
    return Status(Code::kInvalidArgument,
                  text("server ", options_.server, " knows no leaf ", array, " of a flow ", id));
  }
  if (!flow->update()) {
    return Status(Code::kInvalidArgument,
                  text("flow ", id, " averages: its servers run no update"));
  }
  if (gradient && flow->shows()) {
    return Status(Code::kInvalidArgument, text("flow ", id, " has no gradients"));
  }
  const LeafMember member = flow->spec.member(array);
  const uint32_t leaf = member.leaf;
  LeafShard shard;
  shard.data = gradient ? flow->accumulator_of_leaf[leaf] : flow->result_of_leaf[leaf];
  shard.dtype =
      gradient ? accumulator_dtype(flow->spec.leaves[leaf].dtype) : flow->spec.leaves[leaf].dtype;
  shard.elements = flow->elements_of_leaf[leaf];
  if (member.elements < flow->spec.leaves[leaf].elements && shard.elements > 0) {
    // Of a pack, which is here as a whole.
    shard.data += member.begin * dtype_bytes(shard.dtype);
    shard.elements = member.elements;
  }
  return shard;
}

Result<LeafShard> Engine::gradient(uint16_t flow, uint32_t array) {
  return shard(flow, array, true);
}
Result<LeafShard> Engine::parameters(uint16_t flow, uint32_t array) {
  return shard(flow, array, false);
}

Status Engine::publish(uint16_t id, int64_t step) {
  std::unique_lock guard(progress_lock_);
  if (closed_) return is_closed();
  Aggregate* flow = find_flow(id);
  std::shared_ptr<Version> version;
  if (flow != nullptr && flow->held != nullptr) {
    auto spare = flow->held->spare(*fabric_);
    if (!spare.ok()) return spare.status();
    version = std::move(spare.value());
    version->begin(step);
    // The parameters are the caller's until they are published, and may be many.
    guard.unlock();
    flow->copy_parameters(*version);
    guard.lock();
    if (closed_) return is_closed();
  }
  const auto refuse = [&](const auto&... parts) {
    return Status(Code::kInvalidArgument,
                  text("flow ", id, " cannot be published at step ", step, ": ", parts...));
  };
  if (flow == nullptr || !flow->update()) return refuse("there is no such flow with an update");
  if (step <= flow->published()) return refuse("it has reached step ", flow->published());
  const bool begun = flow->initialised > 0 && flow->published() < 0;
  const bool summing = (flow->held != nullptr && flow->held->forming) ||
                       std::any_of(flow->pieces.begin(), flow->pieces.end(),
                                   [](const Piece& piece) { return piece.arrived > 0; });
  if (!flow->updating && (begun || summing))
    return refuse("its parameters or gradients are still landing");
  if (flow->complete > 0 && !flow->shows()) ++flow->steps;
  flow->complete = 0;
  flow->updating = false;
  flow->set_seal(step);
  for (Piece& piece : flow->pieces) {
    piece.begin(step);
    piece.published = step;
    recorder_.add(Stage::kPublished, id, step, piece.partition, kEveryPeer);
  }
  if (flow->held != nullptr) {
    flow->held->current = std::move(version);
    flow->held->forming = false;
    for (HeldGradient& gradient : flow->held->all()) answer_maybe(*flow, gradient);
    flow->held->sweep();
  }
  for (Piece& piece : flow->pieces) send_replies(piece);
  serve_followers(*flow);
  if (flow->held != nullptr) form_mean(*flow);
  settle();
  hurry();
  return Status();
}

Status Engine::refresh(uint16_t id) {
  std::lock_guard guard(progress_lock_);
  if (closed_) return is_closed();
  Aggregate* flow = find_flow(id);
  if (flow == nullptr || !flow->shows())
    return Status(Code::kInvalidArgument, text("flow ", id, " is none that shows"));
  if (flow->pieces.empty()) return Status();
  if (flow->published() < 0)
    return Status(Code::kInvalidArgument, text("flow ", id, " has no version to be replaced"));
  // As if a mean had been formed.
  flow->complete = flow->pieces.size();
  ready(*flow);
  return Status();
}

// --- Who is gone.

void Engine::mark_left(uint32_t worker) {
  std::lock_guard guard(progress_lock_);
  if (closed_ || worker >= members_.size() || members_[worker].left) return;
  Member& member = members_[worker];
  member.left = true;
  if (member.connection == nullptr && !connecting(member)) return depart(worker);
  member.departs = Clock::now() + kLeaveGrace;
  leaving_ = true;
  fabric_->wake();
}

void Engine::expel(uint32_t worker, const std::string& why) {
  std::lock_guard guard(progress_lock_);
  if (closed_ || worker >= members_.size()) return;
  Member& member = members_[worker];
  member.left = true;
  member.admitted = false;
  if (member.connection == nullptr) return depart(worker);
  end(*member.connection, Status(Code::kPeerFailed, why), false);
  fabric_->wake();
}

int Engine::depart_due() {
  using std::chrono::milliseconds;
  milliseconds left = milliseconds::max();
  leaving_ = false;
  for (uint32_t worker = 0; worker < members_.size(); ++worker) {
    const Member& member = members_[worker];
    if (!member.left || member.departed) continue;
    const auto remaining = std::chrono::ceil<milliseconds>(member.departs - Clock::now());
    if (remaining.count() <= 0) {
      depart(worker);
    } else {
      leaving_ = true;
      left = std::min(left, remaining);
    }
  }
  return leaving_ ? static_cast<int>(left.count()) : -1;
}

void Engine::depart(uint32_t worker) {
  if (std::exchange(members_[worker].departed, true)) return;
  departed_.push_back(worker);
  for (const auto& flow : flows_) {
    if (flow == nullptr) continue;
    for (const Piece& piece : flow->pieces) check_stranded(piece);
  }
  for (const auto& table : tables_) {
    if (table != nullptr) check_stranded(*table);
  }
}

void Engine::check_stranded(const Piece& piece) {
  Aggregate& flow = *piece.flow;
  for (const uint32_t worker : departed_) {
    if (flow.stranded || !piece.misses(worker)) continue;
    flow.stranded = true;
    tell({ServerEvent::Kind::kStranded, flow.spec.id, piece.version, worker,
          text("worker ", worker, " left the job, but ", piece.arrived, " of ", options_.workers,
               " workers wait for its contribution to step ", piece.version, " of model ",
               flow.spec.id, "; all workers must run the same number of steps")});
  }
}

void Engine::check_stranded(ServedTable& table) {
  for (const uint32_t worker : departed_) {
    if (table.stranded || !table.misses(worker)) continue;
    table.stranded = true;
    tell({ServerEvent::Kind::kStranded, table.spec().id, table.version, worker,
          text("worker ", worker, " left the job, but ", table.begun, " of ", options_.workers,
               " workers wait for what it pushes in step ", table.version, " of table '",
               table.spec().name,
               "'; all workers must push the same number of times, no rows where ",
               "they have none")});
  }
}

std::vector<Lack> Engine::lacking(size_t limit) const {
  std::vector<Lack> result;
  std::lock_guard guard(progress_lock_);
  const auto now = Clock::now();
  const auto add = [&](uint32_t worker, const Piece& piece, int64_t step, Clock::time_point since) {
    const std::chrono::duration<double> waited = now - since;
    result.push_back({worker, piece.flow->spec.id, step, piece.partition, waited.count()});
  };
  for (const auto& table : tables_) {
    for (uint32_t i = 0; table != nullptr && i < options_.workers; ++i) {
      if (!table->misses(i)) continue;
      const std::chrono::duration<double> waited = now - table->since;
      result.push_back({i, table->spec().id, table->version, 0, waited.count()});
    }
  }
  for (const auto& flow : flows_) {
    if (flow == nullptr) continue;
    for (const Piece& piece : flow->pieces) {
      for (uint32_t i = 0; flow->held == nullptr && i < options_.workers; ++i)
        if (piece.misses(i)) add(i, piece, piece.version, piece.since);
    }
    if (flow->held == nullptr) continue;
    for (const HeldGradient& gradient : flow->held->all()) {
      for (size_t i = 0; !gradient.orphan && !gradient.whole() && i < flow->pieces.size(); ++i) {
        if (!gradient.replies[i].has_value())
          add(gradient.id.worker, flow->pieces[i], gradient.step, gradient.since);
      }
    }
  }
  std::stable_sort(result.begin(), result.end(),
                   [](const Lack& a, const Lack& b) { return a.seconds > b.seconds; });
  if (result.size() > limit) result.resize(limit);
  return result;
}

ServerStats Engine::stats() const {
  std::lock_guard guard(progress_lock_);
  ServerStats stats;
  stats.bytes_pushed = bytes_pushed_;
  stats.bytes_pulled = bytes_pulled_;
  stats.duplicates = duplicates_;
  stats.refused = fabric_ == nullptr ? refused_ : fabric_->turned_away();
  stats.bytes_followed = bytes_followed_;
  stats.copies = copies_;
  stats.dropped = dropped_;
  stats.gradients_dropped = gradients_dropped_;
  stats.accepted.resize(options_.workers);
  for (const auto& flow : flows_) {
    if (flow == nullptr || flow->pieces.empty()) continue;
    stats.steps += flow->steps + flow->means / flow->pieces.size();
    for (uint32_t worker = 0; worker < options_.workers; ++worker) {
      stats.accepted[worker] += flow->summed_of_worker[worker] / flow->pieces.size();
    }
  }
  for (const auto& table : tables_) {
    if (table == nullptr) continue;
    stats.steps += static_cast<uint64_t>(table->version);
    for (uint32_t worker = 0; worker < options_.workers; ++worker)
      stats.accepted[worker] += table->applied[worker];
  }
  return stats;
}

}  // namespace

Result<std::shared_ptr<ServerEngine>> ServerEngine::create(ServerOptions options) {
  const auto refuse = [&](const auto&... parts) {
    return Status(Code::kInvalidArgument,
                  text("server ", options.server, " cannot be: ", parts...));
  };
  if (options.server >= options.servers) return refuse("the job has ", options.servers, " servers");
  if (options.workers == 0 || options.workers > kMaxWorkers) {
    return refuse(options.workers, " workers, from 1 to ", kMaxWorkers, " are possible");
  }
  static_assert(fabric::kMaxReceiveDepth <= wire::kTagMask);
  if (options.slots_per_worker == 0 || options.slots_per_worker > fabric::kMaxReceiveDepth) {
    return refuse(options.slots_per_worker, " landing slots per worker, from 1 to ",
                  fabric::kMaxReceiveDepth, " are possible");
  }
  if (options.partition_bytes < sizeof(double)) {
    return refuse("partitions of ", options.partition_bytes,
                  " bytes hold no element of every type");
  }
  fabric::Options fabric_options;
  // A worker writes into a slot it was given, so that many writes must never wait for a receive.
  fabric_options.receive_depth = std::max(fabric_options.receive_depth, options.slots_per_worker);
  auto fabric = fabric::make_fabric(options.transport, fabric_options);
  if (!fabric.ok()) return fabric.status();
  auto engine = std::make_shared<Engine>(std::move(options), std::move(fabric.value()));
  if (Status status = engine->start(); !status.ok()) return status;
  return std::shared_ptr<ServerEngine>(std::move(engine));
}

}  // namespace jaxrdma
