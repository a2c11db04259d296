/* fabric/verbs/endpoint.cc: see endpoint.h. */
#include "fabric/verbs/endpoint.h"

#if JAXRDMA_HAVE_VERBS

#include <arpa/inet.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "fabric/verbs/bundle.h"
#include "fabric/verbs/explain.h"
#include "fabric/verbs/fabric.h"

namespace jaxrdma::fabric::verbs {

namespace {

constexpr int64_t kMillisecond = 1'000'000;
// Long enough for a kernel that looks for a neighbour's address, several times.
constexpr int64_t kPairingNs = 20'000 * kMillisecond;
// A queue pair that its device has given up may flush nothing: what it has delivered is there by
// then. Any other is waited for as long as the link: what it delivers while nobody counts would be
// sent, and delivered, again.
constexpr int64_t kDrainNs = 1000 * kMillisecond;
// Between two attempts to make a broken link work again.
constexpr int64_t kRebuildPauseNs = 500 * kMillisecond;
// The accepting side gives up after the connecting side, so that the latter's reason is told.
constexpr int64_t kLastWordNs = 2000 * kMillisecond;
// Sequence failures before a write completes or arrives: what fails so often will never work.
constexpr uint32_t kMostStrikes = 3;
constexpr uint64_t kReceive = UINT64_MAX;  // the number of every receive
// Immediates of SENDs: with this bit, how many segments of the next write have no immediate of
// their own; without it, the total of writes granted.
constexpr uint32_t kSegmentsBit = 1u << 31;
constexpr uint32_t kImmediateMask = (1u << kImmediateBits) - 1;

int64_t now_ns() { return tcp::monotonic_ns(); }

}  // namespace

VerbsEndpoint::VerbsEndpoint(VerbsFabric& fabric, Rail& rail, bool accepted, std::string peer,
                             uint32_t link, uint32_t bundle)
    : fabric_(fabric),
      rail_(rail),
      link_(link),
      bundle_of_peer_(bundle),
      accepted_(accepted),
      announced_(!accepted),
      peer_(std::move(peer)),
      send_depth_(rail.send_depth()),
      receive_depth_(rail.receive_depth()),
      granted_(receive_depth_),
      granted_told_(receive_depth_),
      inbox_(kMailboxSlots),
      outbox_(kMailboxSlots) {}

VerbsEndpoint::~VerbsEndpoint() { drop_queue_pair(); }

void VerbsEndpoint::join(Bundle& bundle) {
  bundle_ = &bundle;
  announced_ = true;
}

void VerbsEndpoint::emit(Event event) {
  event.endpoint = id_;
  if (bundle_ != nullptr) {
    bundle_->on_event(*this, std::move(event));
  } else {
    fabric_.emit(std::move(event));
  }
}

// ---- Coming about.

Status VerbsEndpoint::prepare(const RawGid* peer) {
  const auto enrol = [this](std::vector<Message>& box, Access access,
                            std::unique_ptr<MemoryRegion>& region) {
    auto made = fabric_.signalling().register_memory(reinterpret_cast<std::byte*>(box.data()),
                                                     box.size() * sizeof(Message), access);
    if (made.ok()) region = std::move(made.value());
    return made.status();
  };
  if (Status s = enrol(inbox_, Access::kRemoteWrite, inbox_region_); !s.ok()) return s;
  if (Status s = enrol(outbox_, Access::kLocal, outbox_region_); !s.ok()) return s;
  if (accepted_) {
    state_ = State::kPairing;
    set_deadline(now_ns() + kPairingNs);
  }
  return new_queue_pair(peer);
}

Status VerbsEndpoint::new_queue_pair(const RawGid* peer) {
  auto made = fabric_.make_queue_pair(id_, rail_, peer);
  if (!made.ok()) return made.status();
  queue_pair_ = std::move(made.value());
  max_inline_ = queue_pair_->max_inline();
  on_wire_ = reads_on_wire_ = 0;
  last_work_request_ = done_work_request_ = signalled_work_request_ = 0;
  receives_posted_ = 0;
  local_ready_ = remote_ready_ = failed_ = fatal_ = false;
  const uint32_t wanted = receives_wanted(receive_depth_);
  segments_before_ = 0;
  if (Status posted = queue_pair_->post_receives(wanted); !posted.ok()) return posted;
  receives_posted_ = wanted;
  return {};
}

void VerbsEndpoint::drop_queue_pair() {
  if (queue_pair_ == nullptr) return;
  // The set-up thread may still hold it: it stops using memory now, not when that lets go.
  queue_pair_->fail();
  fabric_.stop_polling(*queue_pair_);
  queue_pair_.reset();
}

ConnectionParameters VerbsEndpoint::parameters() const {
  ConnectionParameters mine;
  const PortInfo& port = rail_.port();
  mine.queue_pair = queue_pair_->number();
  mine.packet_sequence = queue_pair_->packet_sequence();
  mine.receive_depth = receive_depth_;
  std::copy(queue_pair_->gid().gid.begin(), queue_pair_->gid().gid.end(), mine.gid.begin());
  mine.mailbox_address = reinterpret_cast<uint64_t>(inbox_region_->data());
  mine.mailbox_key = inbox_region_->remote_key()[0];
  mine.max_message = port.max_message;
  mine.lid = port.lid;
  const uint32_t pkey_index = fabric_.verbs_options().pkey_index;
  mine.pkey = pkey_index < port.pkeys.size() ? port.pkeys[pkey_index] : 0;
  mine.mtu = static_cast<uint8_t>(mtu_of(port.active_mtu));
  mine.ethernet = port.link_layer == "Ethernet" ? 1 : 0;
  mine.rails = static_cast<uint8_t>(fabric_.rails().size());
  mine.link = static_cast<uint8_t>(link_);
  mine.bundle = accepted_ ? id_ : bundle_of_peer_;
  mine.reads = QueuePair::reads(*rail_.device());
  const std::string device = rail_.device()->name() + " port " + std::to_string(port.number) +
                             " GID " + gid_text(queue_pair_->gid().gid);
  std::copy_n(device.begin(), std::min(device.size(), mine.device.size() - 1), mine.device.begin());
  return mine;
}

void VerbsEndpoint::on_signalling_open(std::shared_ptr<const Hello> hello) {
  if (dead() || ended_) return;
  if (Endpoint* signalling = fabric_.signalling().endpoint(id_)) peer_ = signalling->peer_address();
  hello_ = std::move(hello);
  granted_by_peer_ = remote_.receive_depth;
  state_ = State::kPairing;
  set_deadline(now_ns() + kPairingNs);
  fabric_.ask_setup(id_, generation_, queue_pair_, remote_);
}

void VerbsEndpoint::on_setup(uint32_t generation, const Status& status) {
  if (dead() || ended_ || generation != generation_ || failed_) return;
  if (!status.ok()) {
    if (!connected_) {
      end({status.code(), not_made(" could not be made: " + status.message())});
      return;
    }
    rebuild_why_ = status.message();
    break_link(rebuild_why_);
    return;
  }
  local_ready_ = true;
  if (!send(MessageType::kReady)) return;
  maybe_open();
}

void VerbsEndpoint::maybe_open() {
  if (state_ != State::kPairing || !local_ready_ || !remote_ready_) return;
  state_ = State::kOpen;
  set_deadline(kNever);
  if (!connected_) {
    connected_ = announced_ = true;
    Event event{};
    event.kind = Event::Kind::kConnected;
    event.hello = std::move(hello_);
    emit(std::move(event));
    return;
  }
  // The first message over a link made anew proves that it works, though nobody else may have
  // anything to send.
  send_grant(true);
  pump();
  flushed_maybe();
}

// ---- Sending.

Status VerbsEndpoint::write(std::span<const Slice> local, RemoteSlice remote, Immediate immediate,
                            RequestId request, Solicit solicit) {
  if (!connected_ || !accepts_writes())
    return {Code::kUnavailable, "the connection to " + peer_ + " is not open"};
  if (local.size() > kMaxSlices)
    return {Code::kInvalidArgument, "a write of more than kMaxSlices slices"};
  if (immediate >> kImmediateBits != 0)
    return {Code::kInvalidArgument, "an immediate of more than kImmediateBits bits"};
  if (credits() == 0) return {Code::kResource, "no credit to write to " + peer_};
  uint64_t total = 0;
  for (const Slice& slice : local) {
    if (slice.bytes == 0) continue;
    const std::byte* begin = slice.region == nullptr ? nullptr : slice.region->data();
    if (begin == nullptr || slice.data < begin || slice.bytes > slice.region->bytes() ||
        static_cast<size_t>(slice.data - begin) > slice.region->bytes() - slice.bytes) {
      return {Code::kInvalidArgument, "a slice of a write leaves its region"};
    }
    total += slice.bytes;
  }
  if (total / segment_bytes() >= send_depth_ / 2) {
    return {Code::kInvalidArgument, "a write of " + std::to_string(total) + " bytes to " + peer_ +
                                        " is longer than " + std::to_string(send_depth_ / 2) +
                                        " messages of the device"};
  }

  Kept& kept = kept_.push();
  kept.slice_count = 0;
  kept.remote = remote;
  kept.immediate = immediate;
  kept.request = request;
  kept.bytes = total;
  bytes_under_way_ += total;
  bytes_sent_ += total;
  kept.work_request = 0;
  kept.solicit = solicit;
  kept.is_inline = total <= std::min<uint64_t>(max_inline_, kept.copy.size());
  if (kept.is_inline) {
    size_t at = 0;
    for (const Slice& slice : local) {
      if (slice.bytes == 0) continue;
      std::memcpy(kept.copy.data() + at, slice.data, slice.bytes);
      at += slice.bytes;
    }
    // The copy is the source from here on.
    Event event{};
    event.kind = Event::Kind::kWriteDone;
    event.request = request;
    event.bytes = total;
    emit(std::move(event));
  } else {
    for (const Slice& slice : local) {
      if (slice.bytes == 0) continue;
      const auto* region = static_cast<const VerbsMemoryRegion*>(slice.region);
      kept.slices[kept.slice_count++] = {reinterpret_cast<uint64_t>(slice.data),
                                         static_cast<uint32_t>(slice.bytes),
                                         region->local_key(rail_.index())};
    }
    ++outstanding_;
  }
  pump();
  if (needs_completions()) fabric_.completions_needed();
  return {};
}

Status VerbsEndpoint::read(Slice local, RemoteSlice remote, RequestId request) {
  if (!connected_ || !accepts_writes())
    return {Code::kUnavailable, "the connection to " + peer_ + " is not open"};
  const std::byte* begin = local.region == nullptr ? nullptr : local.region->data();
  if (begin == nullptr || local.bytes == 0 || local.data < begin ||
      local.bytes > local.region->bytes() ||
      static_cast<size_t>(local.data - begin) > local.region->bytes() - local.bytes) {
    return {Code::kInvalidArgument, "a read leaves its region"};
  }
  if (remote_.reads == 0)
    return {Code::kInvalidArgument, "the device of " + peer_ + " answers no RDMA READ"};
  if (local.bytes / segment_bytes() >= send_depth_ / 2) {
    return {Code::kInvalidArgument,
            "a read of " + std::to_string(local.bytes) + " bytes from " + peer_ +
                " is longer than " + std::to_string(send_depth_ / 2) + " messages of the device"};
  }
  Read& read = reads_.push();
  read.local = local;
  read.remote = remote;
  read.request = request;
  read.work_request = 0;
  ++outstanding_;
  pump();
  fabric_.completions_needed();
  return {};
}

bool VerbsEndpoint::needs_completions() const {
  return state_ != State::kOpen || !proven_ || flushing_ || grant_due_ || on_wire_ < kept_.size() ||
         !reads_.empty();
}

/// Work requests that may still be posted; two are kept for grants.
uint32_t VerbsEndpoint::send_room() const {
  const uint64_t used = last_work_request_ - done_work_request_;
  return used + 2 >= send_depth_ ? 0 : send_depth_ - 2 - static_cast<uint32_t>(used);
}

/// What both devices take in one message.
uint64_t VerbsEndpoint::segment_bytes() const {
  return std::min(rail_.port().max_message, remote_.max_message);
}

void VerbsEndpoint::pump() {
  if (state_ != State::kOpen) return;
  while (on_wire_ < kept_.size()) {
    Kept& kept = kept_[on_wire_];
    const uint32_t number = first_kept_ + static_cast<uint32_t>(on_wire_);
    const uint64_t segment = segment_bytes();
    const uint64_t before = kept.bytes == 0 ? 0 : (kept.bytes - 1) / segment;
    if (send_room() < before + (before > 0 ? 2 : 1)) return;
    // Longer than one message: plain writes, then the rest with the immediate. The receiver learns
    // of the length by the completion of the rest, and by a message of how many came before.
    if (before > 0) {
      ibv_send_wr request{};
      request.opcode = IBV_WR_SEND_WITH_IMM;
      request.imm_data = htonl(kSegmentsBit | static_cast<uint32_t>(before));
      if (!post(request, false)) return;
    }
    for (uint64_t i = 0; i <= before; ++i) {
      const bool last = i == before;
      const uint64_t begin = i * segment;
      const uint64_t bytes = last ? kept.bytes - begin : segment;
      std::array<ibv_sge, kMaxSlices> slices;
      ibv_send_wr request{};
      request.opcode = last ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
      request.imm_data = htonl(kept.immediate | number << kImmediateBits);
      if (last && kept.solicit == Solicit::kYes) request.send_flags |= IBV_SEND_SOLICITED;
      if (bytes > 0) {
        request.wr.rdma.remote_addr = kept.remote.address + begin;
        request.wr.rdma.rkey = key(kept.remote);
        request.sg_list = slices.data();
        request.num_sge = kept.cut(begin, bytes, slices);
        if (kept.is_inline) request.send_flags |= IBV_SEND_INLINE;
      }
      // Nobody waits for the completion of what was copied; now and then one says that the queue
      // has room again.
      if (!post(request, last && !kept.is_inline)) return;
    }
    kept.work_request = last_work_request_;
    ++on_wire_;
  }
  pump_reads();
}

void VerbsEndpoint::pump_reads() {
  while (reads_on_wire_ < reads_.size()) {
    Read& read = reads_[reads_on_wire_];
    const uint64_t segment = segment_bytes();
    if (send_room() < (read.local.bytes + segment - 1) / segment) return;
    const auto* region = static_cast<const VerbsMemoryRegion*>(read.local.region);
    for (uint64_t begin = 0; begin < read.local.bytes; begin += segment) {
      const uint64_t bytes = std::min(segment, read.local.bytes - begin);
      ibv_sge slice{reinterpret_cast<uint64_t>(read.local.data) + begin,
                    static_cast<uint32_t>(bytes), region->local_key(rail_.index())};
      ibv_send_wr request{};
      request.opcode = IBV_WR_RDMA_READ;
      request.sg_list = &slice;
      request.num_sge = 1;
      request.wr.rdma.remote_addr = read.remote.address + begin;
      request.wr.rdma.rkey = key(read.remote);
      if (!post(request, begin + bytes == read.local.bytes)) return;
    }
    read.work_request = last_work_request_;
    ++reads_on_wire_;
  }
}

int VerbsEndpoint::Kept::cut(uint64_t begin, uint64_t length,
                             std::span<ibv_sge, kMaxSlices> into) const {
  if (is_inline) {
    into[0] = {reinterpret_cast<uint64_t>(copy.data()), static_cast<uint32_t>(bytes), 0};
    return 1;
  }
  int count = 0;
  for (uint32_t i = 0; i < slice_count && length > 0; ++i) {
    if (begin >= slices[i].length) {
      begin -= slices[i].length;
      continue;
    }
    const uint64_t taken = std::min<uint64_t>(slices[i].length - begin, length);
    into[static_cast<size_t>(count++)] = {slices[i].addr + begin, static_cast<uint32_t>(taken),
                                          slices[i].lkey};
    length -= taken;
    begin = 0;
  }
  return count;
}

bool VerbsEndpoint::post(ibv_send_wr& request, bool signalled) {
  request.wr_id = ++last_work_request_;
  if (signalled || last_work_request_ - signalled_work_request_ >= send_depth_ / 4) {
    request.send_flags |= IBV_SEND_SIGNALED;
    signalled_work_request_ = last_work_request_;
  }
  if (Status posted = queue_pair_->post(request); !posted.ok()) {
    end({posted.code(), "writing to " + peer_ + " failed: " + posted.message()});
    return false;
  }
  return true;
}

/// Everything up to `work_request` is complete.
void VerbsEndpoint::retire(uint64_t work_request) {
  done_work_request_ = work_request;
  while (on_wire_ > 0 && kept_.front().work_request <= work_request) {
    --on_wire_;
    pop_kept();
  }
  while (reads_on_wire_ > 0 && reads_.front().work_request <= work_request) {
    const Read& read = reads_.front();
    Event event{};
    event.kind = Event::Kind::kReadDone;
    event.request = read.request;
    event.bytes = read.local.bytes;
    bytes_received_ += read.local.bytes;
    --reads_on_wire_;
    --outstanding_;
    reads_.pop();
    emit(std::move(event));
  }
}

void VerbsEndpoint::pop_kept() {
  Kept& kept = kept_.front();
  bytes_under_way_ -= kept.bytes;
  ++first_kept_;
  strikes_ = 0;
  if (!kept.is_inline) {
    --outstanding_;
    Event event{};
    event.kind = Event::Kind::kWriteDone;
    event.request = kept.request;
    event.bytes = kept.bytes;
    emit(std::move(event));
  }
  kept_.pop();
}

void VerbsEndpoint::release(size_t count) {
  if (ended_) return;
  const auto released = static_cast<uint32_t>(std::min<size_t>(count, unreleased_));
  unreleased_ -= released;
  granted_ += released;
  grant_if_due();
}

/// A grant is worth its message when the peer has no credit left, or when half of all it can have
/// are here.
void VerbsEndpoint::grant_if_due() {
  const uint32_t untold = granted_ - granted_told_;
  const bool peer_has_none = granted_told_ == received_;
  if (untold == 0 || (!peer_has_none && untold < std::max<uint32_t>(1, receive_depth_ / 2))) return;
  send_grant(false);
}

void VerbsEndpoint::send_grant(bool signalled) {
  grant_due_ = state_ != State::kOpen || last_work_request_ - done_work_request_ >= send_depth_;
  if (grant_due_) return;
  ibv_send_wr request{};
  request.opcode = IBV_WR_SEND_WITH_IMM;
  request.imm_data = htonl(granted_ & ~kSegmentsBit);
  request.send_flags = IBV_SEND_SOLICITED;  // the peer may wait for it
  granted_told_ = granted_;
  post(request, signalled);
}

// ---- Completions.

void VerbsEndpoint::on_completions(std::span<const ibv_wc> completions) {
  for (const ibv_wc& completion : completions) {
    if (dead() || queue_pair_ == nullptr) return;
    if (completion.wr_id == kReceive) {
      --receives_posted_;
      if (completion.status == IBV_WC_SUCCESS) {
        on_proof();
        on_received(completion);
      } else if (!failed_) {
        on_send_failed(completion);
      }
    } else if (completion.status == IBV_WC_SUCCESS) {
      acknowledged_ = true;
      on_proof();
      retire(completion.wr_id);
    } else {
      done_work_request_ = std::max<uint64_t>(done_work_request_, completion.wr_id);
      if (!failed_) on_send_failed(completion);
    }
  }
  if (dead() || queue_pair_ == nullptr) return;
  // Every receive comes back, used or flushed. Of the writes nothing needs to be known: the peer
  // says how many it has received.
  if (state_ == State::kDraining && receives_posted_ == 0) on_drained();
  if (failed_ || queue_pair_ == nullptr) return;
  post_receives();
  if (state_ != State::kOpen) return;
  pump();
  if (state_ == State::kOpen && grant_due_) send_grant(false);
  flushed_maybe();
}

void VerbsEndpoint::post_receives() {
  const uint32_t missing = receives_wanted(receive_depth_) - receives_posted_;
  if (missing == 0) return;
  if (Status posted = queue_pair_->post_receives(missing); !posted.ok()) {
    end({posted.code(), "receiving from " + peer_ + " failed: " + posted.message()});
    return;
  }
  receives_posted_ += missing;
}

void VerbsEndpoint::on_received(const ibv_wc& completion) {
  // The peer posts only once it knows that this side is ready and is so itself: its word for it may
  // be slower than its first write.
  if (state_ == State::kPairing && local_ready_) {
    remote_ready_ = true;
    maybe_open();
  }
  const Immediate immediate = ntohl(completion.imm_data);
  if (completion.opcode == IBV_WC_RECV) {
    if ((immediate & kSegmentsBit) != 0) {
      segments_before_ = immediate & ~kSegmentsBit;
      return;
    }
    // The upper bit of the total is not sent.
    const uint32_t more = (immediate - granted_by_peer_) & ~kSegmentsBit;
    if (more > remote_.receive_depth || credits() + more > remote_.receive_depth) {
      end({Code::kProtocol, "the peer at " + peer_ + " granted more writes than it receives"});
      return;
    }
    const bool had_none = credits() == 0;
    granted_by_peer_ += more;
    if (had_none && more > 0 && state_ == State::kOpen) {
      Event event{};
      event.kind = Event::Kind::kCredits;
      emit(std::move(event));
    }
    return;
  }
  if (!in_turn(immediate)) return;
  if (received_ == granted_told_) {
    end({Code::kProtocol, "the peer at " + peer_ + " wrote without a credit"});
    return;
  }
  ++received_;
  strikes_ = 0;
  ++unreleased_;
  const uint64_t bytes = std::exchange(segments_before_, 0) * segment_bytes() + completion.byte_len;
  bytes_received_ += bytes;
  Event event{};
  event.kind = Event::Kind::kReceived;
  event.immediate = immediate & kImmediateMask;
  event.bytes = bytes;
  emit(std::move(event));
}

/// Whether this is the write that comes next.
bool VerbsEndpoint::in_turn(uint32_t immediate) {
  constexpr uint32_t kNumbers = 1u << (32 - kImmediateBits);
  const uint32_t ahead = ((immediate >> kImmediateBits) - received_) % kNumbers;
  if (ahead == 0) return true;
  segments_before_ = 0;
  // Delivered again; or the gap before it is known, and it will come again.
  if (ahead >= kNumbers / 2 || failed_) return false;
  const std::string why = rail_.device()->name() + " delivered write " +
                          std::to_string(received_ + ahead) + " before write " +
                          std::to_string(received_);
  if (++strikes_ <= kMostStrikes) {
    break_link(why);
  } else {
    end({Code::kProtocol, "the connection to " + peer_ + " failed: " + why});
  }
  return false;
}

/// The first bad completion of a queue pair; the others say nothing.
void VerbsEndpoint::on_send_failed(const ibv_wc& completion) {
  const VerbsOptions& options = fabric_.verbs_options();
  const std::string why =
      explain_completion(completion.status, completion.vendor_err,
                         static_cast<int>(options.timeout), static_cast<int>(options.retry_count));
  if (path_failure(completion.status) ||
      (sequence_failure(completion.status) && ++strikes_ <= kMostStrikes)) {
    break_link(why);
  } else {
    end({completion.status == IBV_WC_REM_ACCESS_ERR ? Code::kProtocol : Code::kUnavailable,
         "a write between " + rail_.device()->name() + " here and " + peer_ + " (" +
             device_text(remote_) + ") failed: " + why});
  }
}

void VerbsEndpoint::on_queue_pair_event(const std::string& what, ibv_event_type type) {
  if (dead() || ended_) return;
  fatal_ = true;
  if (state_ == State::kDraining) set_drain_deadline();
  if (failed_) return;
  if (type == IBV_EVENT_QP_FATAL || (type == IBV_EVENT_QP_REQ_ERR && ++strikes_ <= kMostStrikes)) {
    break_link(what);
  } else {
    end({Code::kProtocol, "the connection to " + peer_ + " failed: " + what});
  }
}

void VerbsEndpoint::on_port_lost() {
  // Its queue pairs might repeat their last message for as long as it is down; and the side that
  // has nothing to send would never notice.
  if (state_ != State::kOpen && state_ != State::kPairing) return;
  if (!connected_ || failed_) return;
  break_link("its port went down");
}

void VerbsEndpoint::on_port_active() {
  if (state_ == State::kBroken && !accepted_) rebuild();
}

// ---- A broken link.

std::string VerbsEndpoint::link_name() const {
  return "the link between " + rail_.device()->name() + " port " +
         std::to_string(rail_.port().number) + " here and " + peer_ + " (" + device_text(remote_) +
         ")";
}

std::string VerbsEndpoint::not_made(const std::string& why) const {
  return "the verbs connection to " + peer_ + why + " (this side: " + rail_.describe() +
         (remote_.queue_pair == 0 ? std::string() : "; the peer: " + device_text(remote_)) + ")";
}

std::string VerbsEndpoint::link_text() const {
  const std::string port = rail_.port_text();
  return link_name() + " broke: " + broken_why_ + port +
         (rebuild_why_.empty() || !port.empty() ? "" : "; making it anew failed: " + rebuild_why_);
}

std::string VerbsEndpoint::never_acknowledged() const {
  // The signalling connection went through, and so may go another way than the device's packets.
  const bool ethernet = rail_.port().link_layer == "Ethernet";
  return "; nothing that this side sent was ever acknowledged (this side: " + rail_.describe() +
         ")" + (ethernet ? ": does a firewall drop what RoCE sends, to UDP port 4791?" : "");
}

std::string VerbsEndpoint::trouble() const {
  return broken_why_.empty() ? std::string() : link_text();
}

void VerbsEndpoint::break_link(const std::string& why) {
  // Of one that closes there is no queue pair left to break.
  if (dead() || ended_ || state_ == State::kDraining || state_ == State::kClosing) return;
  if (!connected_) {
    end({Code::kUnavailable, not_made(" could not be made: " + why)});
    return;
  }
  if (broken_why_.empty()) broken_why_ = why;
  if (flushing_) {
    finish(/*flush=*/true);
    return;
  }
  if (link_deadline_ns_ == kNever) {
    link_deadline_ns_ = now_ns() + fabric_.verbs_options().link_timeout_ms * kMillisecond +
                        (accepted_ ? kLastWordNs : 0);
  }
  if (now_ns() >= link_deadline_ns_) {
    on_deadline();
    return;
  }
  state_ = State::kDraining;
  if (!failed_) {
    failed_ = true;
    queue_pair_->fail();
  }
  // What was delivered before counts as received, so it has to be seen: `poll` goes on until all
  // that was posted has come back.
  set_drain_deadline();
}

void VerbsEndpoint::set_drain_deadline() {
  set_deadline(fatal_ ? std::min(link_deadline_ns_, now_ns() + kDrainNs) : link_deadline_ns_);
}

/// Everything that the old queue pair delivered has been seen.
void VerbsEndpoint::on_drained() {
  drop_queue_pair();
  state_ = State::kBroken;
  // A link that is made, and breaks before anything has crossed it, is no reason to hurry.
  const bool hurry = std::exchange(proven_, false);
  if (accepted_) {
    set_deadline(link_deadline_ns_);
    if (asked_.has_value()) {
      answer_rebuild();
    } else {
      send(MessageType::kBroken);
    }
    return;
  }
  if (hurry) {
    rebuild();
  } else {
    rebuild_later();
  }
}

void VerbsEndpoint::on_proof() {
  if (proven_ || state_ != State::kOpen || failed_) return;
  proven_ = true;
  link_deadline_ns_ = kNever;
  broken_why_.clear();
  rebuild_why_.clear();
}

void VerbsEndpoint::rebuild_later() {
  drop_queue_pair();
  state_ = State::kBroken;
  set_deadline(std::min(link_deadline_ns_, now_ns() + kRebuildPauseNs));
}

/// The connecting side's attempt.
void VerbsEndpoint::rebuild() {
  ++generation_;
  RawGid gid{};
  std::copy(remote_.gid.begin(), remote_.gid.end(), gid.begin());
  if (Status made = new_queue_pair(&gid); !made.ok()) {
    rebuild_why_ = made.message();
    rebuild_later();
    return;
  }
  state_ = State::kAsked;
  set_deadline(link_deadline_ns_);
  send(MessageType::kRebuild);
}

/// The accepting side's answer.
void VerbsEndpoint::answer_rebuild() {
  const Message theirs = *asked_;
  asked_.reset();
  generation_ = theirs.generation;
  RawGid gid{};
  std::copy(theirs.parameters.gid.begin(), theirs.parameters.gid.end(), gid.begin());
  if (Status made = new_queue_pair(&gid); !made.ok()) {
    rebuild_why_ = made.message();
    drop_queue_pair();
    send(MessageType::kBroken);
    return;
  }
  if (send(MessageType::kRebuilt)) resume(theirs);
}

/// Drops what the peer has received, and connects the new queue pair; the rest is posted again once
/// both are ready.
void VerbsEndpoint::resume(const Message& theirs) {
  if (theirs.received - first_kept_ > kept_.size() ||
      theirs.granted - posted_total() > theirs.parameters.receive_depth) {
    end({Code::kProtocol, "the peer at " + peer_ + " counts writes that were never sent"});
    return;
  }
  while (first_kept_ != theirs.received) pop_kept();
  const bool had_none = credits() == 0;
  remote_ = theirs.parameters;
  granted_by_peer_ = theirs.granted;
  granted_told_ = granted_;  // the message just sent told it
  if (had_none && credits() > 0) {
    Event event{};
    event.kind = Event::Kind::kCredits;
    emit(std::move(event));
  }
  state_ = State::kPairing;
  set_deadline(link_deadline_ns_);
  fabric_.ask_setup(id_, generation_, queue_pair_, remote_);
}

bool VerbsEndpoint::send(MessageType type) {
  Endpoint* signalling = fabric_.signalling().endpoint(id_);
  if (signalling == nullptr) return false;  // its end is on the way
  const uint32_t slot = next_slot_++ % kMailboxSlots;
  Message& message = outbox_[slot];
  message = Message{};
  message.type = type;
  message.generation = generation_;
  message.received = received_;
  message.granted = granted_;
  if (queue_pair_ != nullptr) message.parameters = parameters();
  const Slice slice{outbox_region_.get(), reinterpret_cast<const std::byte*>(&message),
                    sizeof(message)};
  const RemoteSlice there{remote_.mailbox_address + slot * sizeof(Message), {remote_.mailbox_key}};
  Status sent = signalling->write(std::span(&slice, 1), there, slot, slot);
  if (!sent.ok()) {
    end({Code::kUnavailable,
         "the signalling connection to " + peer_ + " failed: " + sent.message()});
    return false;
  }
  return true;
}

void VerbsEndpoint::on_message(uint32_t slot, uint64_t bytes) {
  Endpoint* signalling = fabric_.signalling().endpoint(id_);
  if (signalling != nullptr) signalling->release(1);
  if (dead() || ended_) return;
  if (slot >= kMailboxSlots || bytes != sizeof(Message)) {
    end({Code::kProtocol, "the peer at " + peer_ + " sent a malformed verbs message"});
    return;
  }
  const Message message = inbox_[slot];
  switch (message.type) {
    case MessageType::kReady:
      if (message.generation != generation_ || failed_) return;  // of a life that is over
      remote_ready_ = true;
      maybe_open();
      return;
    case MessageType::kBroken:
      if (accepted_ || message.generation != generation_) return;
      if (state_ == State::kAsked) {
        // The peer could not make a queue pair yet.
        rebuild_later();
      } else if (state_ == State::kOpen || state_ == State::kPairing) {
        break_link("the peer's side saw it fail");
      }
      return;
    case MessageType::kRebuild:
      if (!accepted_ || !connected_ || !check_parameters(message.parameters).ok() ||
          message.generation - generation_ - 1 > 1u << 20) {
        end({Code::kProtocol, "the peer at " + peer_ + " sent a malformed verbs message"});
        return;
      }
      asked_ = message;
      if (state_ == State::kBroken) {
        answer_rebuild();
      } else {
        break_link("the peer's side saw it fail");
      }
      return;
    case MessageType::kRebuilt:
      if (accepted_ || message.generation != generation_ || state_ != State::kAsked) return;
      if (!check_parameters(message.parameters).ok()) {
        end({Code::kProtocol, "the peer at " + peer_ + " sent a malformed verbs message"});
        return;
      }
      resume(message);
      return;
  }
  end({Code::kProtocol, "the peer at " + peer_ + " sent an unknown verbs message"});
}

void VerbsEndpoint::on_deadline() {
  set_deadline(kNever);
  if (dead() || ended_) return;
  if (state_ == State::kClosing) return;
  if (flushing_) {
    finish(/*flush=*/true);
    return;
  }
  if (!connected_) {
    end({Code::kUnavailable, not_made(" was not made in time")});
    return;
  }
  if (link_deadline_ns_ != kNever && now_ns() >= link_deadline_ns_) {
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%g", fabric_.verbs_options().link_timeout_ms * 1e-3);
    end({Code::kUnavailable, link_text() + "; it did not come back within " + seconds + " s" +
                                 (acknowledged_ ? std::string() : never_acknowledged())});
    return;
  }
  if (state_ == State::kDraining) {
    // Whoever calls `poll` may have been kept from it for longer than this took.
    on_completions(fabric_.drain(id_, *queue_pair_));
    if (state_ == State::kDraining) on_drained();
  } else if (state_ == State::kBroken && !accepted_) {
    rebuild();
  }
}

// ---- The end.

void VerbsEndpoint::close(Status why, bool flush) {
  if (dead() || ended_ || flushing_ || state_ == State::kClosing) return;
  close_reason_ = std::move(why);
  if (close_reason_.code() == Code::kProtocol && generation_ > 0) {
    close_reason_ = {Code::kProtocol, close_reason_.message() + " (" + link_name() +
                                          " had been made anew before, " +
                                          std::to_string(generation_) + " times)"};
  }
  if (flush && state_ == State::kOpen && !kept_.empty()) {
    flushing_ = true;
    fabric_.completions_needed();
    set_deadline(now_ns() + fabric_.options().close_timeout_ms * kMillisecond);
    flushed_maybe();
    return;
  }
  finish(flush);
}

void VerbsEndpoint::flushed_maybe() {
  if (!flushing_ || state_ != State::kOpen) return;
  if (kept_.empty()) {
    finish(/*flush=*/true);
    return;
  }
  // The last writes may have asked for no completion.
  if (on_wire_ == kept_.size() && signalled_work_request_ < kept_[on_wire_ - 1].work_request) {
    send_grant(true);
  }
}

/// Ends for the owner's reason, as soon as the signalling connection has ended.
void VerbsEndpoint::finish(bool flush) {
  drop_queue_pair();
  state_ = State::kClosing;
  set_deadline(kNever);
  Endpoint* signalling = fabric_.signalling().endpoint(id_);
  if (signalling == nullptr) {
    on_signalling_closed({});
    return;
  }
  signalling->close(close_reason_, flush);
}

/// Ends for a reason of our own, which the peer is told.
void VerbsEndpoint::end(Status why) {
  // One that closes ends with its owner's reason.
  if (dead() || ended_ || state_ == State::kClosing) return;
  drop_queue_pair();
  state_ = State::kClosing;
  set_deadline(kNever);
  if (Endpoint* signalling = fabric_.signalling().endpoint(id_))
    signalling->close(why, /*flush=*/true);
  announce_end(std::move(why));
}

void VerbsEndpoint::on_signalling_closed(const Status& why) {
  if (dead()) return;
  // What the peer wrote before it said goodbye is in the completion queue.
  if (queue_pair_ != nullptr && state_ == State::kOpen)
    on_completions(fabric_.drain(id_, *queue_pair_));
  if (dead()) return;
  const bool ours = state_ == State::kClosing;
  drop_queue_pair();
  state_ = State::kDead;
  set_deadline(kNever);
  Status reason = ours ? close_reason_ : why;
  if (!ours && !broken_why_.empty()) {
    reason = {why.code(), link_text() + "; then the signalling connection ended: " + why.message()};
  } else if (!ours && connected_ && !why.ok()) {
    // The passive side may have had nothing on the way, and so not have noticed that the link
    // broke.
    reason = {why.code(), why.message() + ", and with it " + link_name() + rail_.port_text()};
  } else if (!ours && remote_.queue_pair == 0 && why.code() == Code::kUnavailable) {
    // Nothing has come from the peer that would name this device.
    reason = {why.code(), why.message() + " (this side: " + rail_.describe() + ")"};
  }
  announce_end(std::move(reason));
}

void VerbsEndpoint::announce_end(Status why) {
  fabric_.retire(id_);
  if (ended_) return;
  ended_ = true;
  outstanding_ = 0;
  kept_.truncate(0);
  bytes_under_way_ = 0;
  reads_.truncate(0);
  on_wire_ = reads_on_wire_ = 0;
  granted_by_peer_ = first_kept_;
  if (!announced_) return;
  Event event{};
  event.kind = Event::Kind::kDisconnected;
  event.status = std::move(why);
  emit(std::move(event));
}

void VerbsEndpoint::set_deadline(int64_t deadline_ns) {
  deadline_ns_ = deadline_ns;
  fabric_.deadline_changed(deadline_ns);
}

}  // namespace jaxrdma::fabric::verbs

#endif
