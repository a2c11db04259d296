/* fabric/verbs/endpoint.h: one verbs connection: how it comes about, what it carries, how it
   survives a broken link, how it ends.

   Beside the queue pair there is a signalling connection of the tcp fabric, made first: its hello
   authenticates the peer and exchanges the connection parameters; then each side connects its queue
   pair and says that it is ready, and only then is anything posted. It stays open: the end of a
   peer's process is learnt from it at once, and the passive side of a queue pair learns of a broken
   link from nothing else.

   Every write is kept until its completion. When the path breaks, the connecting side makes a new
   queue pair and asks the other to do so; each tells how many writes it has received, and the rest
   is posted again, in order: nothing is lost and nothing is delivered twice.

   Writes are RDMA WRITE WITH IMMEDIATE, with the low bits of their number above the owner's
   immediate. The receiver ignores one that its device delivers again, and where one is missing the
   link is made anew. Soft-RoCE of Linux before 6.10 does deliver an empty message twice: its
   requester may take the position of a repetition from one message and the sequence number from the
   next, while its completer goes from one to the other (req_retry and complete_wqe in
   drivers/infiniband/sw/rxe).

   Credits come back as empty SENDs WITH IMMEDIATE, which
   carry the total ever granted, so that a lost one does no harm. */
#pragma once

#include "fabric/verbs/library.h"

#if JAXRDMA_HAVE_VERBS

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/tcp/endpoint.h"
#include "fabric/tcp/ring.h"
#include "fabric/verbs/frame.h"
#include "fabric/verbs/queue_pair.h"
#include "fabric/verbs/rail.h"

namespace jaxrdma::fabric::verbs {

class Bundle;
class VerbsFabric;

using tcp::kNever;

/// Used under the lock of the fabric's owner only. Lives in its fabric; has the id of its
/// signalling connection.
class VerbsEndpoint final : public Endpoint {
 public:
  /// Link `link` of a connection, over `rail`; `bundle`: the peer's number of that connection.
  VerbsEndpoint(VerbsFabric& fabric, Rail& rail, bool accepted, std::string peer, uint32_t link = 0,
                uint32_t bundle = 0);
  ~VerbsEndpoint() override;

  EndpointId id() const override { return id_; }
  const std::string& peer_address() const override { return peer_; }
  Status write(std::span<const Slice> local, RemoteSlice remote, Immediate immediate,
               RequestId request, Solicit solicit) override;
  Status read(Slice local, RemoteSlice remote, RequestId request) override;
  size_t credits() const override { return granted_by_peer_ - posted_total(); }
  void release(size_t count) override;
  size_t outstanding() const override { return outstanding_; }
  void close(Status why, bool flush) override;
  uint64_t bytes_sent() const override { return bytes_sent_; }
  uint64_t bytes_received() const override { return bytes_received_; }

  // For the fabric.
  /// Makes the first queue pair, for a peer with this GID if it is known.
  Status prepare(const RawGid* peer);
  ConnectionParameters parameters() const;
  void set_id(EndpointId id) { id_ = id; }
  /// What happens is told to `bundle` from now on, the end of a connection that never was too.
  void join(Bundle& bundle);
  uint32_t link() const { return link_; }
  const Rail& rail() const { return rail_; }
  /// Of writes that are not known to be complete.
  uint64_t bytes_under_way() const { return bytes_under_way_; }
  void set_deadline(int64_t deadline_ns);
  /// The peer's first parameters, before on_signalling_open.
  void set_peer(const ConnectionParameters& peer) { remote_ = peer; }
  void on_signalling_open(std::shared_ptr<const Hello> hello);
  void on_signalling_closed(const Status& why);
  void on_message(uint32_t slot, uint64_t bytes);
  void on_setup(uint32_t generation, const Status& status);
  void on_completions(std::span<const ibv_wc> completions);
  /// An asynchronous event of the queue pair.
  void on_queue_pair_event(const std::string& what, ibv_event_type type);
  /// The port on this side went down, or came back.
  void on_port_lost();
  void on_port_active();
  void on_deadline();
  int64_t deadline_ns() const { return deadline_ns_; }
  /// Its kConnected has been told.
  bool connected() const { return connected_; }
  /// That its link broke, and why, until it works again; else empty.
  std::string trouble() const;
  /// What is written goes out now.
  bool working() const { return state_ == State::kOpen; }
  bool dead() const { return state_ == State::kDead; }
  /// Its end has been told.
  bool ended() const { return ended_; }
  bool buried() const { return buried_; }
  void bury() { buried_ = true; }
  const std::shared_ptr<QueuePair>& queue_pair() const { return queue_pair_; }
  /// Whether something cannot go on before what is posted has completed.
  bool needs_completions() const;
  void fail(Status why) { end(std::move(why)); }

 private:
  enum class State : uint8_t {
    kSignalling,  ///< the signalling connection is being made
    kPairing,     ///< the queue pairs are being connected
    kOpen,
    kDraining,  ///< the link broke: the completions of the old queue pair are awaited
    kBroken,    ///< connecting side: waits to try again; accepting side: for the peer's request
    kAsked,     ///< connecting side: kRebuild is sent, kRebuilt awaited
    kClosing,   ///< ends: waits for the signalling connection to end
    kDead,
  };

  /// A write that is not known to be complete.
  struct Kept {
    std::array<ibv_sge, kMaxSlices> slices;
    uint32_t slice_count;
    RemoteSlice remote;
    Immediate immediate;
    RequestId request;
    uint64_t bytes;
    uint64_t work_request;  ///< its number on the current queue pair
    Solicit solicit;
    bool is_inline;  ///< `copy` is the source, and the owner has been told that it is done
    std::array<std::byte, 256> copy;
    /// Its bytes [begin, begin + length) as scatter list; returns how many pieces.
    int cut(uint64_t begin, uint64_t length, std::span<ibv_sge, kMaxSlices> into) const;
  };

  /// A read that is not complete. Done again, it does no harm.
  struct Read {
    Slice local;
    RemoteSlice remote;
    RequestId request;
    uint64_t work_request;  ///< its last one on the current queue pair
  };

  uint32_t posted_total() const { return first_kept_ + static_cast<uint32_t>(kept_.size()); }
  bool accepts_writes() const {
    return !flushing_ && announced_ &&
           (state_ == State::kPairing || state_ == State::kOpen || state_ == State::kDraining ||
            state_ == State::kBroken || state_ == State::kAsked);
  }
  uint32_t send_room() const;
  uint64_t segment_bytes() const;
  void pump();
  void pump_reads();
  bool post(ibv_send_wr& request, bool signalled);
  void retire(uint64_t work_request);
  void pop_kept();
  void grant_if_due();
  void send_grant(bool signalled);
  void on_received(const ibv_wc& completion);
  bool in_turn(uint32_t immediate);
  void on_send_failed(const ibv_wc& completion);
  void post_receives();

  void maybe_open();
  void break_link(const std::string& why);
  void set_drain_deadline();
  void on_drained();
  void rebuild();
  void rebuild_later();
  void on_proof();
  void answer_rebuild();
  void resume(const Message& theirs);
  Status new_queue_pair(const RawGid* peer);
  void drop_queue_pair();
  bool send(MessageType type);

  void end(Status why);
  void flushed_maybe();
  void finish(bool flush);
  void announce_end(Status why);
  void emit(Event event);
  /// Of the peer's keys, the one for its device.
  uint32_t key(const RemoteSlice& remote) const { return remote.key[link_ % remote_.rails]; }
  std::string link_name() const;
  std::string link_text() const;
  /// Of a link that is given up, and by which this side has never got anything across.
  std::string never_acknowledged() const;
  /// Of a connection that never was: `why` goes on from its name; both devices are told.
  std::string not_made(const std::string& why) const;

  VerbsFabric& fabric_;
  Rail& rail_;
  const uint32_t link_;
  const uint32_t bundle_of_peer_;
  Bundle* bundle_ = nullptr;  ///< null: this is the whole connection
  EndpointId id_ = 0;
  const bool accepted_;
  State state_ = State::kSignalling;
  bool announced_ = false;  ///< the owner has seen kConnected, or asked for the connection
  bool connected_ = false;  ///< kConnected has been emitted
  bool ended_ = false;
  bool buried_ = false;
  std::string peer_;
  std::shared_ptr<const Hello> hello_;
  int64_t deadline_ns_ = kNever;
  Status close_reason_;
  bool flushing_ = false;

  // The queue pair, and its making.
  std::shared_ptr<QueuePair> queue_pair_;
  ConnectionParameters remote_;
  uint32_t generation_ = 0;
  bool local_ready_ = false;
  bool remote_ready_ = false;
  bool failed_ = false;  ///< the queue pair is in ERR
  bool fatal_ = false;   ///< and its device may flush nothing of it
  bool proven_ = true;   ///< something has crossed the link since it was last made
  /// The peer's device has ever acknowledged something. What it sends may come while it does not.
  bool acknowledged_ = false;
  uint32_t strikes_ = 0;  ///< sequence failures since a write last got across
  std::string broken_why_;
  std::string rebuild_why_;  ///< why the last attempt to make it work again failed
  int64_t link_deadline_ns_ = kNever;
  std::optional<Message> asked_;  ///< accepting side: the rebuilding that the peer wants

  // Sending.
  uint32_t send_depth_ = 0;
  uint32_t max_inline_ = 0;
  tcp::Ring<Kept> kept_;
  size_t on_wire_ = 0;       ///< how many of kept_, from the front, are posted to the queue pair
  uint32_t first_kept_ = 0;  ///< writes complete so far, modulo 2^32
  uint32_t granted_by_peer_ = 0;    ///< writes that we may have sent in total, modulo 2^32
  uint64_t last_work_request_ = 0;  ///< of the current queue pair
  uint64_t done_work_request_ = 0;
  uint64_t signalled_work_request_ = 0;
  size_t outstanding_ = 0;
  uint64_t bytes_sent_ = 0;
  uint64_t bytes_under_way_ = 0;

  tcp::Ring<Read> reads_;
  size_t reads_on_wire_ = 0;  ///< how many of reads_, from the front, are posted

  // Receiving.
  uint32_t receive_depth_ = 0;
  uint32_t receives_posted_ = 0;
  uint32_t received_ = 0;    ///< writes delivered, modulo 2^32
  uint32_t unreleased_ = 0;  ///< delivered, and not released
  uint32_t granted_ = 0;     ///< writes that the peer may have sent in total, modulo 2^32
  uint32_t granted_told_ = 0;
  uint32_t segments_before_ = 0;  ///< of the write that comes next
  bool grant_due_ = false;        ///< a grant waits for room in the send queue
  uint64_t bytes_received_ = 0;

  // Signalling.
  std::vector<Message> inbox_, outbox_;
  std::unique_ptr<MemoryRegion> inbox_region_, outbox_region_;
  uint32_t next_slot_ = 0;
};

}  // namespace jaxrdma::fabric::verbs

#endif
