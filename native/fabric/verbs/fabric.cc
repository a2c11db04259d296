/* fabric/verbs/fabric.cc: the event loop of the verbs fabric. */
#include "fabric/verbs/fabric.h"

#if JAXRDMA_HAVE_VERBS

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <iterator>

#include "fabric/verbs/explain.h"

namespace jaxrdma::fabric {

Result<std::unique_ptr<Fabric>> make_verbs_fabric(const Options& options,
                                                  const VerbsOptions& verbs) {
  return verbs::VerbsFabric::create(options, verbs);
}

namespace verbs {

namespace {

// Answers and credits of a step for one peer fit well; a work queue entry of a write takes 64 to
// 256 bytes of pinned memory.
constexpr uint32_t kMaxDepth = 512;
// Between two polls of the signalling connections while there is traffic: each is a system call.
constexpr uint32_t kPollsPerSignalling = 16;
constexpr size_t kBatch = 32;
// The signalling connections cross the same network as the links. They bear its silence as long,
// and a little longer: a side that has noticed its broken link gives the better reason.
constexpr int kSilenceBeyondLinkMs = 1000;

int64_t now_ns() { return tcp::monotonic_ns(); }

}  // namespace

Result<std::unique_ptr<Fabric>> VerbsFabric::create(const Options& options,
                                                    const VerbsOptions& verbs) {
  if (options.receive_depth == 0)
    return Status(Code::kInvalidArgument, "receive_depth must not be 0");
  if (verbs.timeout > 31 || verbs.retry_count > 7 || verbs.service_level > 15 ||
      verbs.traffic_class > 255 || verbs.port > 255) {
    return Status(Code::kInvalidArgument,
                  "verbs options out of range: timeout 0 to 31, retry_count 0 to 7, service_level "
                  "0 to 15, traffic_class 0 to 255, port 0 (any) to 255");
  }
  std::unique_ptr<VerbsFabric> made(new VerbsFabric(options, verbs));
  auto device = Device::open(verbs.device);
  if (!device.ok()) return device.status();
  made->device_ = std::move(device.value());
  auto port = made->device_->port(static_cast<uint8_t>(verbs.port));
  if (!port.ok()) return port.status();
  made->port_ = std::move(port.value());
  if (!made->port_.active) {
    return Status(Code::kUnavailable,
                  "port " + std::to_string(made->port_.number) + " of device " +
                      made->device_->name() + " is " + made->port_.state +
                      ", not ACTIVE: check the cable, the switch, and `ip link` of its network "
                      "device");
  }
  if (verbs.pkey_index != 0 && verbs.pkey_index >= made->port_.pkeys.size()) {
    return Status(Code::kInvalidArgument, "pkey index " + std::to_string(verbs.pkey_index) +
                                              " of " + made->device_->name() + ": the table has " +
                                              std::to_string(made->port_.pkeys.size()) +
                                              " entries");
  }
  auto gid = choose_gid(made->device_->name(), made->port_, verbs, nullptr);
  if (!gid.ok()) return gid.status();
  made->gid_ = gid.value();

  const auto most = static_cast<uint32_t>(std::max(64, made->device_->attributes().max_qp_wr));
  made->receive_depth_ =
      std::min({options.receive_depth, kMaxDepth, (most - kReservedReceives) / 2});
  made->send_depth_ = std::min(kMaxDepth, most);

  auto channel = CompletionChannel::create(made->device_);
  if (!channel.ok()) return channel.status();
  made->channel_ = std::move(channel.value());
  Options signalling = options;
  signalling.receive_depth = kMailboxSlots;
  signalling.silence_timeout_ms = verbs.link_timeout_ms + kSilenceBeyondLinkMs;
  auto tcp = tcp::TcpFabric::create(signalling);
  if (!tcp.ok()) return tcp.status();
  made->signalling_ = std::move(tcp.value());
  for (const int fd : {made->channel_->fd(), made->device_->context()->async_fd}) {
    if (const int error = made->signalling_->watch_foreign(fd); error != 0) {
      return Status(Code::kResource, "could not watch a descriptor of device " +
                                         made->device_->name() + ": " + errno_text(error));
    }
  }
  return std::unique_ptr<Fabric>(std::move(made));
}

VerbsFabric::VerbsFabric(const Options& options, const VerbsOptions& verbs)
    : options_(options), verbs_(verbs), setup_([this] {
        have_answers_ = true;
        signalling_->wake();
      }) {}

VerbsFabric::~VerbsFabric() {
  // Queue pairs stop before anything that their completions would touch is gone.
  endpoints_.clear();
  const std::lock_guard lock(completions_mutex_);
  polled_.clear();
}

std::string VerbsFabric::describe() const {
  const uint32_t used = std::min(port_.active_mtu, peer_mtu_);
  return "verbs, " + device_->name() + " port " + std::to_string(port_.number) + ", GID " +
         gid_text(gid_.gid) + " (index " + std::to_string(gid_.index) + ", " + gid_.type +
         "), MTU " + std::to_string(used) +
         (used < port_.active_mtu ? ", the peer's (" + std::to_string(port_.active_mtu) + " here)"
                                  : "");
}

std::string VerbsFabric::notice() const {
  if (peer_mtu_ == kNoPeer || peer_mtu_ == port_.active_mtu) return {};
  return "MTU " + std::to_string(std::min(port_.active_mtu, peer_mtu_)) +
         " is used: " + device_->name() + " port " + std::to_string(port_.number) + " has " +
         std::to_string(port_.active_mtu) + ", the peer " + std::to_string(peer_mtu_) +
         "; the same on both ends is faster";
}

void VerbsFabric::meet(VerbsEndpoint& endpoint, const ConnectionParameters& peer) {
  endpoint.set_peer(peer);
  peer_mtu_ = std::min(peer_mtu_, 128u << peer.mtu);
}

Result<std::unique_ptr<MemoryRegion>> VerbsFabric::register_memory(std::byte* data, size_t bytes,
                                                                   Access access) {
  return VerbsMemoryRegion::create(device_, data, bytes, access);
}

Result<std::string> VerbsFabric::listen(const std::string& address, Gatekeeper gatekeeper) {
  return signalling_->listen(
      address, [this, gatekeeper = std::move(gatekeeper)](EndpointId id, const Hello& hello) {
        return admit(gatekeeper, id, hello);
      });
}

Result<std::vector<std::byte>> VerbsFabric::admit(const Gatekeeper& gatekeeper, EndpointId id,
                                                  const Hello& hello) {
  ConnectionParameters peer;
  Hello inner = hello;
  // The peer is asked for its token before its parameters are looked at any further, and before a
  // queue pair is spent on it.
  Status decoded = decode_payload(hello.payload, peer, inner.payload);
  auto payload = gatekeeper(id, decoded.ok() ? inner : hello);
  if (!payload.ok()) return payload;
  if (!decoded.ok()) return decoded;
  auto endpoint = std::make_unique<VerbsEndpoint>(*this, /*accepted=*/true, std::string());
  endpoint->set_id(id);
  meet(*endpoint, peer);
  RawGid gid{};
  std::copy(peer.gid.begin(), peer.gid.end(), gid.begin());
  if (Status prepared = endpoint->prepare(&gid); !prepared.ok()) return prepared;
  auto body = encode_payload(endpoint->parameters(), payload.value());
  endpoints_[id] = std::move(endpoint);
  return body;
}

Result<EndpointId> VerbsFabric::connect(const std::string& address, const Hello& hello,
                                        int timeout_ms) {
  auto endpoint = std::make_unique<VerbsEndpoint>(*this, /*accepted=*/false, address);
  if (Status prepared = endpoint->prepare(nullptr); !prepared.ok()) return prepared;
  Hello outer = hello;
  outer.payload = encode_payload(endpoint->parameters(), hello.payload);
  auto id = signalling_->connect(address, outer, timeout_ms);
  if (!id.ok()) return id;
  endpoint->set_id(id.value());
  start_polling(id.value(), endpoint->queue_pair());
  endpoint->set_deadline(now_ns() + (int64_t{timeout_ms} + 2000) * 1'000'000);
  endpoints_[id.value()] = std::move(endpoint);
  return id;
}

Endpoint* VerbsFabric::endpoint(EndpointId id) {
  const auto found = endpoints_.find(id);
  return found == endpoints_.end() || found->second->buried() ? nullptr : found->second.get();
}

Result<std::shared_ptr<QueuePair>> VerbsFabric::make_queue_pair(EndpointId id, const RawGid* peer) {
  // Asked anew each time: a link that comes back may have another MTU, and its GIDs elsewhere.
  auto port = device_->port(port_.number);
  if (!port.ok()) return port.status();
  if (!port.value().active) {
    return Status(Code::kUnavailable, "port " + std::to_string(port_.number) + " of " +
                                          device_->name() + " is " + port.value().state);
  }
  auto gid = choose_gid(device_->name(), port.value(), verbs_, peer);
  if (!gid.ok()) return gid.status();
  port_ = std::move(port.value());
  gid_ = std::move(gid.value());
  auto made = QueuePair::create(device_, port_, gid_, *channel_, verbs_, send_depth_,
                                receives_wanted(receive_depth_));
  if (made.ok() && id != 0) start_polling(id, made.value());
  return made;
}

void VerbsFabric::start_polling(EndpointId id, std::shared_ptr<QueuePair> queue_pair) {
  const std::lock_guard lock(completions_mutex_);
  polled_.push_back({id, std::move(queue_pair)});
}

void VerbsFabric::stop_polling(const QueuePair* queue_pair) {
  const std::lock_guard lock(completions_mutex_);
  std::erase_if(polled_, [=](const Polled& p) { return p.queue_pair.get() == queue_pair; });
  std::erase_if(found_, [=](const Found& f) { return f.queue_pair == queue_pair; });
}

std::vector<ibv_wc> VerbsFabric::drain(EndpointId id, QueuePair& queue_pair) {
  const std::lock_guard lock(completions_mutex_);
  std::vector<ibv_wc> drained;
  for (const Found& found : found_) {
    if (found.endpoint == id && found.queue_pair == &queue_pair)
      drained.push_back(found.completion);
  }
  std::erase_if(found_, [&](const Found& f) { return f.queue_pair == &queue_pair; });
  std::array<ibv_wc, kBatch> batch;
  for (int count = queue_pair.poll(batch); count > 0; count = queue_pair.poll(batch))
    drained.insert(drained.end(), batch.begin(), batch.begin() + count);
  return drained;
}

void VerbsFabric::emit(Event event) {
  if (polling_ != nullptr) {
    polling_->push_back(std::move(event));
    return;
  }
  later_.push_back(std::move(event));
  have_later_ = true;
  signalling_->wake();
}

void VerbsFabric::completions_needed() {
  if (polling_ != nullptr) return;  // `poll` looks for itself
  impatient_ = true;
  signalling_->wake();
}

void VerbsFabric::deadline_changed(int64_t deadline_ns) {
  if (deadline_ns >= next_deadline_ns_) return;
  next_deadline_ns_ = deadline_ns;
  if (polling_ == nullptr) signalling_->wake();
}

bool VerbsFabric::poll(std::vector<Event>& events) {
  const size_t before = events.size();
  if (have_later_) {
    have_later_ = false;
    std::move(later_.begin(), later_.end(), std::back_inserter(events));
    later_.clear();
  }
  polling_ = &events;
  // What has arrived goes to the owner first; what takes system calls can wait until nothing has.
  // What is left in an armed queue raises no event: there must be another `poll` before `wait`.
  bool moved = poll_completions();
  const bool idle = events.size() == before;
  const bool look = idle || ++polls_ >= kPollsPerSignalling;
  if (look && slept_.exchange(false)) {
    read_channel();
    read_async_events();
    moved |= poll_completions();
  }
  if (look) {
    polls_ = 0;
    signals_.clear();
    moved |= signalling_->poll(signals_);
    // Handling may add to the signalling fabric's events, never to these.
    for (const Event& event : signals_) signalled(event);
  }
  if (have_answers_.exchange(false)) {
    for (const Setup::Answer& answer : setup_.take()) {
      const auto found = endpoints_.find(answer.endpoint);
      if (found != endpoints_.end()) found->second->on_setup(answer.generation, answer.status);
      moved = true;
    }
  }
  if (next_deadline_ns_ != kNever && now_ns() >= next_deadline_ns_) run_deadlines();
  for (const EndpointId id : retired_) {
    const auto found = endpoints_.find(id);
    if (found == endpoints_.end()) continue;
    found->second->bury();
    if (found->second->dead()) endpoints_.erase(found);
  }
  retired_.clear();
  const bool needed = std::any_of(endpoints_.begin(), endpoints_.end(), [](const auto& entry) {
    return entry.second->needs_completions();
  });
  // Another thread of the owner may be asleep, and too patiently now.
  if (needed && !impatient_.exchange(true)) signalling_->wake();
  if (!needed) impatient_ = false;
  polling_ = nullptr;
  return moved || events.size() != before;
}

bool VerbsFabric::poll_completions() {
  bool more = false;
  working_.clear();
  {
    const std::lock_guard lock(completions_mutex_);
    working_.swap(found_);
    std::array<ibv_wc, kBatch> batch;
    for (const Polled& polled : polled_) {
      const int count = polled.queue_pair->poll(batch);
      more |= count == static_cast<int>(batch.size());
      for (int i = 0; i < count; ++i)
        working_.push_back({polled.endpoint, polled.queue_pair.get(), batch[i]});
    }
  }
  for (size_t i = 0; i < working_.size();) {
    // All of one queue pair's together: receives are posted again in one go.
    size_t last = i + 1;
    while (last < working_.size() && working_[last].queue_pair == working_[i].queue_pair) ++last;
    const auto found = endpoints_.find(working_[i].endpoint);
    if (found != endpoints_.end() && found->second->queue_pair().get() == working_[i].queue_pair) {
      batch_.clear();
      for (size_t k = i; k < last; ++k) batch_.push_back(working_[k].completion);
      found->second->on_completions(batch_);
    }
    i = last;
  }
  return more;
}

void VerbsFabric::signalled(const Event& event) {
  const auto found = endpoints_.find(event.endpoint);
  if (found == endpoints_.end()) return;
  VerbsEndpoint& endpoint = *found->second;
  switch (event.kind) {
    case Event::Kind::kConnected: {
      auto inner = std::make_shared<Hello>(*event.hello);
      ConnectionParameters peer;
      Status decoded = decode_payload(event.hello->payload, peer, inner->payload);
      if (!decoded.ok()) {
        endpoint.fail(std::move(decoded));
        return;
      }
      meet(endpoint, peer);
      endpoint.on_signalling_open(std::move(inner));
      return;
    }
    case Event::Kind::kDisconnected:
      endpoint.on_signalling_closed(event.status);
      return;
    case Event::Kind::kReceived:
      endpoint.on_message(event.immediate, event.bytes);
      return;
    case Event::Kind::kWriteDone:
    case Event::Kind::kReadDone:
    case Event::Kind::kCredits:
      return;
  }
}

void VerbsFabric::read_channel() {
  const std::lock_guard lock(completions_mutex_);
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  while (ibv_get_cq_event(channel_->get(), &queue, &context) == 0) {
    ibv_ack_cq_events(queue, 1);
    for (const Polled& polled : polled_) {
      if (polled.queue_pair->completion_queue() == queue)
        polled.queue_pair->armed = QueuePair::Armed::kNot;
    }
  }
}

void VerbsFabric::read_async_events() {
  ibv_async_event event{};
  while (ibv_get_async_event(device_->context(), &event) == 0) {
    const std::string what = "device " + device_->name() + " " + explain_event(event.event_type);
    const bool of_queue_pair = event.event_type == IBV_EVENT_QP_FATAL ||
                               event.event_type == IBV_EVENT_QP_REQ_ERR ||
                               event.event_type == IBV_EVENT_QP_ACCESS_ERR;
    const uint32_t number = of_queue_pair ? event.element.qp->qp_num : 0;
    // Before anything is done about it: whoever destroys a queue waits until every event of it is
    // acknowledged.
    ibv_ack_async_event(&event);
    switch (event.event_type) {
      case IBV_EVENT_PORT_ERR:
        if (event.element.port_num != port_.number) break;
        port_lost_ns_ = now_ns();
        for (auto& [id, endpoint] : endpoints_) endpoint->on_port_lost();
        break;
      case IBV_EVENT_PORT_ACTIVE:
        if (event.element.port_num != port_.number) break;
        port_lost_ns_ = kNever;
        for (auto& [id, endpoint] : endpoints_) endpoint->on_port_active();
        break;
      case IBV_EVENT_QP_FATAL:
      case IBV_EVENT_QP_REQ_ERR:
      case IBV_EVENT_QP_ACCESS_ERR:
        for (auto& [id, endpoint] : endpoints_) {
          if (endpoint->queue_pair() != nullptr && endpoint->queue_pair()->number() == number)
            endpoint->on_queue_pair_event(what, event.event_type);
        }
        break;
      case IBV_EVENT_CQ_ERR:
      case IBV_EVENT_DEVICE_FATAL:
        for (auto& [id, endpoint] : endpoints_) {
          // Each connection has a completion queue of its own.
          if (event.event_type == IBV_EVENT_CQ_ERR &&
              (endpoint->queue_pair() == nullptr ||
               endpoint->queue_pair()->completion_queue() != event.element.cq)) {
            continue;
          }
          endpoint->fail({Code::kUnavailable,
                          "the connection to " + endpoint->peer_address() + " failed: " + what});
        }
        break;
      default:
        break;
    }
  }
}

std::string VerbsFabric::port_text() const {
  if (port_lost_ns_ == kNever) return {};
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.1f",
                static_cast<double>(now_ns() - port_lost_ns_) * 1e-9);
  return "; port " + std::to_string(port_.number) + " of " + device_->name() +
         " on this side went down " + seconds + " s ago";
}

void VerbsFabric::wait(int timeout_ms, bool patient) {
  if (have_later_ || have_answers_ || timeout_ms == 0) {
    slept_ = true;
    return;
  }
  {
    const std::lock_guard lock(completions_mutex_);
    using Armed = QueuePair::Armed;
    const Armed wanted = patient && !impatient_ ? Armed::kSolicited : Armed::kAll;
    std::array<ibv_wc, kBatch> batch;
    for (const Polled& polled : polled_) {
      if (polled.queue_pair->armed >= wanted) continue;
      if (polled.queue_pair->arm(wanted)) polled.queue_pair->armed = wanted;
      // What completed before it was armed raises no event.
      const int count = polled.queue_pair->poll(batch);
      for (int i = 0; i < count; ++i)
        found_.push_back({polled.endpoint, polled.queue_pair.get(), batch[i]});
    }
    if (!found_.empty()) return;
  }
  if (const int64_t deadline = next_deadline_ns_; deadline != kNever) {
    const int64_t left_ms = std::max<int64_t>(0, (deadline - now_ns() + 999'999) / 1'000'000);
    if (timeout_ms < 0 || left_ms < timeout_ms)
      timeout_ms = static_cast<int>(std::min<int64_t>(left_ms, 3'600'000));
  }
  signalling_->wait(timeout_ms, false);
  slept_ = true;
}

void VerbsFabric::run_deadlines() {
  const int64_t now = now_ns();
  next_deadline_ns_ = kNever;
  int64_t next = kNever;
  for (auto& [id, endpoint] : endpoints_) {
    if (endpoint->deadline_ns() <= now) endpoint->on_deadline();
    next = std::min(next, endpoint->deadline_ns());
  }
  next_deadline_ns_ = next;
}

}  // namespace verbs
}  // namespace jaxrdma::fabric

#else  // JAXRDMA_HAVE_VERBS

#include "fabric/fabric.h"

namespace jaxrdma::fabric {

Result<std::unique_ptr<Fabric>> make_verbs_fabric(const Options&, const VerbsOptions&) {
  return verbs::load_library();
}

}  // namespace jaxrdma::fabric

#endif
