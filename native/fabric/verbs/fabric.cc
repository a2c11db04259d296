/* fabric/verbs/fabric.cc: the event loop of the verbs fabric. */
#include "fabric/verbs/fabric.h"

#if JAXRDMA_HAVE_VERBS

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <iterator>

#include "base/secret.h"
#include "fabric/verbs/explain.h"

namespace jaxrdma::fabric {

Result<std::unique_ptr<Fabric>> make_verbs_fabric(const Options& options,
                                                  const VerbsOptions& verbs) {
  return verbs::VerbsFabric::create(options, verbs);
}

namespace verbs {

namespace {

// Between two polls of the signalling connections while there is traffic: each is a system call.
constexpr uint32_t kPollsPerSignalling = 16;
constexpr size_t kBatch = 32;
// The signalling connections cross the same network as the links. They bear its silence as long,
// and a little longer: a side that has noticed its broken link gives the better reason.
constexpr int kSilenceBeyondLinkMs = 1000;
// For the queue pairs, after the signalling connection has used up its time.
constexpr int64_t kBeyondConnectNs = 2'000'000'000;

int64_t now_ns() { return tcp::monotonic_ns(); }

/// Whether two hellos are of one incarnation of one worker that was let in.
bool same_peer(const Hello& a, const Hello& b) {
  return a.job == b.job && a.protocol_version == b.protocol_version && a.worker == b.worker &&
         a.incarnation == b.incarnation && equal_in_constant_time(a.token, b.token);
}

}  // namespace

Result<std::unique_ptr<Fabric>> VerbsFabric::create(const Options& options,
                                                    const VerbsOptions& verbs) {
  if (options.receive_depth == 0)
    return Status(Code::kInvalidArgument, "receive_depth must not be 0");
  const bool port_fits = std::all_of(verbs.sources.begin(), verbs.sources.end(),
                                     [](const VerbsSource& s) { return s.port <= 255; });
  if (verbs.timeout > 31 || verbs.retry_count > 7 || verbs.service_level > 15 ||
      verbs.traffic_class > 255 || !port_fits) {
    return Status(Code::kInvalidArgument,
                  "verbs options out of range: timeout 0 to 31, retry_count 0 to 7, service_level "
                  "0 to 15, traffic_class 0 to 255, port 0 (any) to 255");
  }
  if (verbs.sources.empty() || verbs.sources.size() > kMostDevices) {
    return Status(Code::kInvalidArgument, std::to_string(verbs.sources.size()) +
                                              " devices to spread traffic over: 1 to " +
                                              std::to_string(kMostDevices) + " are possible");
  }
  std::unique_ptr<VerbsFabric> made(new VerbsFabric(options, verbs));
  for (uint32_t i = 0; i < verbs.sources.size(); ++i) {
    auto rail = Rail::open(made->options_, made->verbs_, i);
    if (!rail.ok()) return rail.status();
    const std::string& name = rail.value()->device()->name();
    for (const auto& other : made->rails_) {
      if (other->device()->name() == name) {
        return Status(Code::kInvalidArgument,
                      "device " + name + " is named twice: traffic is spread over different ones");
      }
    }
    made->rails_.push_back(std::move(rail.value()));
  }
  Options signalling = options;
  signalling.receive_depth = kMailboxSlots;
  signalling.silence_timeout_ms = verbs.link_timeout_ms + kSilenceBeyondLinkMs;
  auto tcp = tcp::TcpFabric::create(signalling);
  if (!tcp.ok()) return tcp.status();
  made->signalling_ = std::move(tcp.value());
  for (const auto& rail : made->rails_) {
    for (const int fd : {rail->channel().fd(), rail->device()->context()->async_fd}) {
      if (const int error = made->signalling_->watch_foreign(fd); error != 0) {
        return Status(Code::kResource, "could not watch a descriptor of device " +
                                           rail->device()->name() + ": " + errno_text(error));
      }
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
  bundles_.clear();
  endpoints_.clear();
  const std::lock_guard lock(completions_mutex_);
  polled_.clear();
}

std::string VerbsFabric::describe() const {
  std::string text = "verbs";
  for (const auto& rail : rails_) text += (rail == rails_.front() ? ", " : "; ") + rail->describe();
  return text;
}

std::string VerbsFabric::notice() const {
  std::string text;
  for (const auto& rail : rails_) {
    const std::string more = rail->notice();
    text += (text.empty() || more.empty() ? "" : "; ") + more;
  }
  return text;
}

std::string VerbsFabric::trouble() const {
  std::string text = signalling_->trouble();
  for (const auto& [id, endpoint] : endpoints_) {
    const std::string more = endpoint->trouble();
    text += (text.empty() || more.empty() ? "" : "; ") + more;
  }
  return text;
}

Result<std::unique_ptr<MemoryRegion>> VerbsFabric::register_memory(std::byte* data, size_t bytes,
                                                                   Access access) {
  return VerbsMemoryRegion::create(rails_, data, bytes, access);
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
  if (decoded.ok() && peer.link > 0) return admit_link(id, hello, peer);
  auto payload = gatekeeper(id, decoded.ok() ? inner : hello);
  if (!payload.ok()) return payload;
  if (!decoded.ok()) return decoded;
  auto endpoint = accept(id, peer);
  if (!endpoint.ok()) return endpoint.status();
  if (const uint32_t links = links_with(peer); links > 1) {
    inner.payload.clear();
    auto bundle = std::make_unique<Bundle>(*this, id, /*accepted=*/true, links, std::move(inner));
    bundle->add(0, *endpoint.value());
    bundles_[id] = std::move(bundle);
  }
  return encode_payload(endpoint.value()->parameters(), payload.value());
}

/// A further link of a connection whose first hello the owner has accepted.
Result<std::vector<std::byte>> VerbsFabric::admit_link(EndpointId id, const Hello& hello,
                                                       const ConnectionParameters& peer) {
  const auto found = bundles_.find(peer.bundle);
  if (found == bundles_.end() || !same_peer(hello, found->second->hello())) {
    return Status(Code::kPermissionDenied,
                  "a link of a connection that there is not, or of another worker");
  }
  Bundle& bundle = *found->second;
  if (!bundle.lacks(peer.link)) {
    return Status(Code::kProtocol,
                  "link " + std::to_string(peer.link) + " of this connection is not expected now");
  }
  auto endpoint = accept(id, peer);
  if (!endpoint.ok()) {
    bundle.fail(endpoint.status());
    return endpoint.status();
  }
  bundle.add(peer.link, *endpoint.value());
  return encode_payload(endpoint.value()->parameters(), {});
}

/// The accepting side of a link, in the table.
Result<VerbsEndpoint*> VerbsFabric::accept(EndpointId id, const ConnectionParameters& peer) {
  Rail& rail = rail_of(peer.link);
  auto endpoint =
      std::make_unique<VerbsEndpoint>(*this, rail, /*accepted=*/true, std::string(), peer.link);
  endpoint->set_id(id);
  meet(*endpoint, rail, peer);
  RawGid gid{};
  std::copy(peer.gid.begin(), peer.gid.end(), gid.begin());
  if (Status prepared = endpoint->prepare(&gid); !prepared.ok()) return prepared;
  return (endpoints_[id] = std::move(endpoint)).get();
}

void VerbsFabric::meet(VerbsEndpoint& endpoint, Rail& rail, const ConnectionParameters& peer) {
  endpoint.set_peer(peer);
  rail.meet(128u << peer.mtu);
}

Result<EndpointId> VerbsFabric::connect(const std::string& address, const Hello& hello,
                                        int timeout_ms) {
  const int64_t deadline_ns = now_ns() + int64_t{timeout_ms} * 1'000'000;
  auto made = connect_link(address, hello, deadline_ns, /*link=*/0, /*bundle=*/0);
  if (!made.ok()) return made.status();
  const EndpointId id = made.value()->id();
  asked_[id] = {address, hello, deadline_ns};
  return id;
}

/// The connecting side of a link, in the table.
Result<VerbsEndpoint*> VerbsFabric::connect_link(const std::string& address, const Hello& hello,
                                                 int64_t deadline_ns, uint32_t link,
                                                 uint32_t bundle) {
  auto endpoint = std::make_unique<VerbsEndpoint>(*this, rail_of(link), /*accepted=*/false, address,
                                                  link, bundle);
  if (Status prepared = endpoint->prepare(nullptr); !prepared.ok()) return prepared;
  Hello outer = hello;
  outer.payload = encode_payload(endpoint->parameters(), hello.payload);
  const int64_t left_ms = std::max<int64_t>(1, (deadline_ns - now_ns() + 999'999) / 1'000'000);
  auto id = signalling_->connect(address, outer, static_cast<int>(left_ms));
  if (!id.ok()) return id.status();
  endpoint->set_id(id.value());
  start_polling(id.value(), endpoint->queue_pair());
  endpoint->set_deadline(deadline_ns + kBeyondConnectNs);
  return (endpoints_[id.value()] = std::move(endpoint)).get();
}

/// The first link has met a peer: makes the others.
void VerbsFabric::make_links(VerbsEndpoint& first, const ConnectionParameters& peer) {
  Asked asked = std::move(asked_[first.id()]);
  asked_.erase(first.id());
  const uint32_t links = links_with(peer);
  if (links == 1) return;
  asked.hello.payload.clear();
  auto made = std::make_unique<Bundle>(*this, first.id(), /*accepted=*/false, links, asked.hello);
  Bundle& bundle = *(bundles_[first.id()] = std::move(made));
  bundle.add(0, first);
  for (uint32_t link = 1; link < links; ++link) {
    auto next = connect_link(asked.address, asked.hello, asked.deadline_ns, link, peer.bundle);
    if (!next.ok()) {
      bundle.fail(next.status());
      return;
    }
    bundle.add(link, *next.value());
  }
}

Endpoint* VerbsFabric::endpoint(EndpointId id) {
  // The one that people have of a bundle hides its first link, which has the same id.
  if (const auto bundle = bundles_.find(id); bundle != bundles_.end()) return bundle->second.get();
  const auto found = endpoints_.find(id);
  return found == endpoints_.end() || found->second->buried() ? nullptr : found->second.get();
}

Result<std::shared_ptr<QueuePair>> VerbsFabric::make_queue_pair(EndpointId id, Rail& rail,
                                                                const RawGid* peer) {
  auto made = rail.make_queue_pair(peer);
  if (made.ok() && id != 0) start_polling(id, made.value());
  return made;
}

void VerbsFabric::start_polling(EndpointId id, std::shared_ptr<QueuePair> queue_pair) {
  const std::lock_guard lock(completions_mutex_);
  polled_.push_back({id, std::move(queue_pair)});
}

void VerbsFabric::stop_polling(const QueuePair& queue_pair) {
  const std::lock_guard lock(completions_mutex_);
  std::erase_if(polled_, [&](const Polled& p) { return p.queue_pair.get() == &queue_pair; });
  std::erase_if(found_, [&](const Found& f) { return f.queue_pair == queue_pair.serial(); });
}

std::vector<ibv_wc> VerbsFabric::drain(EndpointId id, QueuePair& queue_pair) {
  const std::lock_guard lock(completions_mutex_);
  std::vector<ibv_wc> drained;
  for (const Found& found : found_) {
    if (found.endpoint == id && found.queue_pair == queue_pair.serial())
      drained.push_back(found.completion);
  }
  std::erase_if(found_, [&](const Found& f) { return f.queue_pair == queue_pair.serial(); });
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
  signalling_->wake();  // in `poll` too: another thread may sleep for too long now
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
  // An owner that spins does without, as `wait` returns at once where there is something.
  const bool look =
      (idle && (slept_ || signalling_->has_news())) || ++polls_ >= kPollsPerSignalling;
  if (look && slept_.exchange(false)) {
    read_channel();
    for (const auto& rail : rails_) read_async_events(*rail);
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
  std::erase_if(bundles_, [](const auto& entry) { return entry.second->over(); });
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
        working_.push_back({polled.endpoint, polled.queue_pair->serial(), batch[i]});
    }
  }
  for (size_t i = 0; i < working_.size();) {
    // All of one queue pair's together: receives are posted again in one go.
    size_t last = i + 1;
    while (last < working_.size() && working_[last].queue_pair == working_[i].queue_pair) ++last;
    const auto found = endpoints_.find(working_[i].endpoint);
    const QueuePair* current =
        found == endpoints_.end() ? nullptr : found->second->queue_pair().get();
    if (current != nullptr && current->serial() == working_[i].queue_pair) {
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
      meet(endpoint, rail_of(endpoint.link()), peer);
      endpoint.on_signalling_open(std::move(inner));
      if (asked_.contains(event.endpoint) && !endpoint.ended()) make_links(endpoint, peer);
      return;
    }
    case Event::Kind::kDisconnected:
      asked_.erase(event.endpoint);
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
  for (const auto& rail : rails_) {
    while (ibv_get_cq_event(rail->channel().get(), &queue, &context) == 0) {
      ibv_ack_cq_events(queue, 1);
      for (const Polled& polled : polled_) {
        if (polled.queue_pair->completion_queue() == queue)
          polled.queue_pair->armed = QueuePair::Armed::kNot;
      }
    }
  }
}

void VerbsFabric::read_async_events(Rail& rail) {
  ibv_async_event event{};
  while (ibv_get_async_event(rail.device()->context(), &event) == 0) {
    const std::string what =
        "device " + rail.device()->name() + " " + explain_event(event.event_type);
    const bool of_queue_pair = event.event_type == IBV_EVENT_QP_FATAL ||
                               event.event_type == IBV_EVENT_QP_REQ_ERR ||
                               event.event_type == IBV_EVENT_QP_ACCESS_ERR;
    const uint32_t number = of_queue_pair ? event.element.qp->qp_num : 0;
    // Before anything is done about it: whoever destroys a queue waits until every event of it is
    // acknowledged.
    ibv_ack_async_event(&event);
    const auto for_each = [&](const auto& act) {
      for (auto& [id, endpoint] : endpoints_) {
        if (&endpoint->rail() == &rail) act(*endpoint);
      }
    };
    switch (event.event_type) {
      case IBV_EVENT_PORT_ERR:
        if (event.element.port_num != rail.port().number) break;
        rail.port_changed(/*active=*/false);
        for_each([](VerbsEndpoint& endpoint) { endpoint.on_port_lost(); });
        break;
      case IBV_EVENT_PORT_ACTIVE:
        if (event.element.port_num != rail.port().number) break;
        rail.port_changed(/*active=*/true);
        for_each([](VerbsEndpoint& endpoint) { endpoint.on_port_active(); });
        break;
      case IBV_EVENT_QP_FATAL:
      case IBV_EVENT_QP_REQ_ERR:
      case IBV_EVENT_QP_ACCESS_ERR:
        for_each([&](VerbsEndpoint& endpoint) {
          if (endpoint.queue_pair() != nullptr && endpoint.queue_pair()->number() == number)
            endpoint.on_queue_pair_event(what, event.event_type);
        });
        break;
      case IBV_EVENT_CQ_ERR:
      case IBV_EVENT_DEVICE_FATAL:
        for_each([&](VerbsEndpoint& endpoint) {
          // Each link has a completion queue of its own.
          if (event.event_type == IBV_EVENT_CQ_ERR &&
              (endpoint.queue_pair() == nullptr ||
               endpoint.queue_pair()->completion_queue() != event.element.cq)) {
            return;
          }
          endpoint.fail({Code::kUnavailable,
                         "the connection to " + endpoint.peer_address() + " failed: " + what});
        });
        break;
      default:
        break;
    }
  }
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
        found_.push_back({polled.endpoint, polled.queue_pair->serial(), batch[i]});
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
  for (auto& [id, bundle] : bundles_) {
    if (bundle->deadline_ns() <= now) bundle->on_deadline();
    next = std::min(next, bundle->deadline_ns());
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
