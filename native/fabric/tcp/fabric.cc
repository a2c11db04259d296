/* fabric/tcp/fabric.cc: the event loop of the tcp fabric. */
#include "fabric/tcp/fabric.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <utility>

namespace jaxrdma::fabric {

Result<std::unique_ptr<Fabric>> make_tcp_fabric(const Options& options) {
  auto made = tcp::TcpFabric::create(options);
  if (!made.ok()) return made.status();
  return std::unique_ptr<Fabric>(std::move(made.value()));
}

namespace tcp {

namespace {

// What epoll gives back. Endpoints are tagged with their id, which is 32 bits wide.
constexpr uint64_t kEventTag = uint64_t{1} << 32;
constexpr uint64_t kListenerTag = uint64_t{1} << 33;
constexpr uint64_t kForeignTag = uint64_t{1} << 34;

constexpr int kMaxReady = 64;
constexpr int kAcceptsPerPoll = 16;
// Out of descriptors: the backlog keeps the peers, and asking at once again would only burn the
// processor.
constexpr int64_t kListenPauseNs = 100'000'000;
constexpr int kBacklog = 512;

}  // namespace

Result<std::unique_ptr<TcpFabric>> TcpFabric::create(const Options& options) {
  if (options.receive_depth == 0 || options.receive_depth > kMaxReceiveDepth) {
    return Status(Code::kInvalidArgument,
                  "receive_depth is " + std::to_string(options.receive_depth) +
                      ", not between 1 and " + std::to_string(kMaxReceiveDepth));
  }
  Fd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.open()) return Status(Code::kResource, "no epoll descriptor: " + errno_text(errno));
  Fd event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event.open()) return Status(Code::kResource, "no event descriptor: " + errno_text(errno));
  epoll_event wanted{};
  wanted.events = EPOLLIN;
  wanted.data.u64 = kEventTag;
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, event.get(), &wanted) != 0) {
    return Status(Code::kResource, "could not watch the event descriptor: " + errno_text(errno));
  }
  return std::unique_ptr<TcpFabric>(new TcpFabric(options, std::move(epoll), std::move(event)));
}

TcpFabric::TcpFabric(const Options& options, Fd epoll, Fd event)
    : options_(options), epoll_(std::move(epoll)), event_(std::move(event)), resolver_([this] {
        have_names_ = true;
        notify();
      }) {}

TcpFabric::~TcpFabric() = default;

Result<std::unique_ptr<MemoryRegion>> TcpFabric::register_memory(std::byte* data, size_t bytes,
                                                                 Access access) {
  if (data == nullptr || bytes == 0) {
    return Status(Code::kInvalidArgument, "memory to register must not be null or empty");
  }
  return std::unique_ptr<MemoryRegion>(new TcpMemoryRegion(memory_, data, bytes, access));
}

Result<std::string> TcpFabric::listen(const std::string& address, Gatekeeper gatekeeper) {
  auto where = split_address(address);
  if (!where.ok()) return where.status();
  // A listening address is our own: looked up here, once, before any traffic.
  auto found = resolve(where.value(), /*numeric=*/false, /*passive=*/true);
  if (!found.ok()) return found.status();
  std::string reason = "no address found";
  for (SocketAddress& candidate : found.value()) {
    Fd socket(::socket(candidate.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int on = 1;
    if (socket.open()) setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (!socket.open() || bind(socket.get(), candidate.get(), candidate.bytes) != 0 ||
        ::listen(socket.get(), kBacklog) != 0) {
      reason = errno_text(errno);
      continue;
    }
    SocketAddress real;
    real.bytes = sizeof(real.storage);
    getsockname(socket.get(), real.get(), &real.bytes);
    epoll_event wanted{};
    wanted.events = EPOLLIN;
    wanted.data.u64 = kListenerTag | listeners_.size();
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket.get(), &wanted) != 0) {
      reason = errno_text(errno);
      continue;
    }
    listeners_.push_back({std::move(socket), std::move(gatekeeper), real.text()});
    return listeners_.back().address;
  }
  return Status(Code::kResource, "could not listen at " + address + ": " + reason);
}

Result<EndpointId> TcpFabric::connect(const std::string& address, const Hello& hello,
                                      int timeout_ms) {
  auto where = split_address(address);
  if (!where.ok()) return where.status();
  Status fits = check_hello(hello);
  if (!fits.ok()) return fits;
  const EndpointId id = next_id_++;
  auto endpoint = std::make_unique<TcpEndpoint>(*this, id, address, std::move(where.value()), hello,
                                                timeout_ms);
  TcpEndpoint& placed = *endpoint;
  endpoints_.emplace(id, std::move(endpoint));
  placed.start();
  return id;
}

std::string TcpFabric::trouble() const {
  std::string text;
  for (const auto& [id, endpoint] : endpoints_) {
    const std::string more = endpoint->trouble();
    text += (text.empty() || more.empty() ? "" : "; ") + more;
  }
  return text;
}

Endpoint* TcpFabric::endpoint(EndpointId id) {
  const auto found = endpoints_.find(id);
  return found == endpoints_.end() || found->second->buried() ? nullptr : found->second.get();
}

void TcpFabric::emit(Event event) {
  if (polling_ != nullptr) {
    polling_->push_back(std::move(event));
    return;
  }
  later_.push_back(std::move(event));
  have_later_ = true;
  notify();
}

int TcpFabric::watch(int fd, EndpointId id, uint32_t epoll_events, bool add) {
  epoll_event wanted{};
  wanted.events = epoll_events;
  wanted.data.u64 = id;
  return epoll_ctl(epoll_.get(), add ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &wanted) == 0 ? 0 : errno;
}

int TcpFabric::watch_foreign(int fd) {
  epoll_event wanted{};
  wanted.events = EPOLLIN;
  wanted.data.u64 = kForeignTag;
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &wanted) == 0 ? 0 : errno;
}

void TcpFabric::unwatch(int fd) { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void TcpFabric::deadline_changed(int64_t deadline_ns) {
  if (deadline_ns >= next_deadline_ns_) return;
  next_deadline_ns_ = deadline_ns;
  notify();
}

bool TcpFabric::poll(std::vector<Event>& events) {
  const size_t before = events.size();
  bool moved = false;
  // Events that came about outside of `poll` are mostly writes that the socket took at once. Asking
  // the kernel can then wait for the next call, but not for ever: an owner may answer each event
  // with another such write.
  const bool deliver_only = have_later_ && !delivered_only_;
  delivered_only_ = deliver_only;
  if (have_later_) {
    have_later_ = false;
    std::move(later_.begin(), later_.end(), std::back_inserter(events));
    later_.clear();
  }
  polling_ = &events;

  {
    const std::lock_guard lock(ready_mutex_);
    working_.swap(ready_);
  }
  if (working_.empty() && !deliver_only) {
    std::array<epoll_event, kMaxReady> found;
    const int count = epoll_wait(epoll_.get(), found.data(), kMaxReady, 0);
    for (int i = 0; i < count; ++i) working_.push_back({found[i].data.u64, found[i].events});
  }
  for (const Ready& ready : working_) {
    if (ready.tag == kEventTag || ready.tag == kForeignTag) continue;
    if ((ready.tag & kListenerTag) != 0) {
      moved |= accept(ready.tag & ~kListenerTag);
      continue;
    }
    const auto found = endpoints_.find(static_cast<EndpointId>(ready.tag));
    if (found != endpoints_.end() && !found->second->dead())
      moved |= found->second->on_ready(ready.epoll_events);
  }
  working_.clear();

  if (have_names_) {
    have_names_ = false;
    for (Resolver::Answer& answer : resolver_.take()) {
      const auto found = endpoints_.find(answer.endpoint);
      if (found != endpoints_.end()) found->second->resolved(std::move(answer.addresses));
      moved = true;
    }
  }
  if (next_deadline_ns_ != kNever && monotonic_ns() >= next_deadline_ns_) moved |= run_deadlines();

  // Everything that ended has been told by now: `later_` went first.
  for (const EndpointId id : retired_) {
    const auto found = endpoints_.find(id);
    if (found == endpoints_.end()) continue;
    found->second->bury();
    if (found->second->dead()) endpoints_.erase(found);
  }
  retired_.clear();
  polling_ = nullptr;
  return moved || events.size() != before;
}

void TcpFabric::wait(int timeout_ms, bool /*patient*/) {
  sleeping_ = true;
  const auto reason = [this] { return woken_ || has_news(); };
  if (!reason() && timeout_ms != 0) {
    const int64_t deadline = next_deadline_ns_;
    if (deadline != kNever) {
      const int64_t left_ms =
          std::max<int64_t>(0, (deadline - monotonic_ns() + 999'999) / 1'000'000);
      if (timeout_ms < 0 || left_ms < timeout_ms)
        timeout_ms = static_cast<int>(std::min<int64_t>(left_ms, 3'600'000));
    }
    std::array<epoll_event, kMaxReady> found;
    const int count = epoll_wait(epoll_.get(), found.data(), kMaxReady, timeout_ms);
    if (count > 0) {
      const std::lock_guard lock(ready_mutex_);
      ready_.clear();
      for (int i = 0; i < count; ++i) {
        if (found[i].data.u64 == kEventTag) {
          eventfd_t wakes;
          eventfd_read(event_.get(), &wakes);
        } else {
          ready_.push_back({found[i].data.u64, found[i].events});
        }
      }
    }
  }
  sleeping_ = false;
  woken_ = false;
}

void TcpFabric::wake() {
  woken_ = true;
  notify();
}

void TcpFabric::notify() {
  if (sleeping_) eventfd_write(event_.get(), 1);
}

bool TcpFabric::accept(size_t index) {
  Listener& listener = listeners_[index];
  if (listener.paused) return false;
  bool moved = false;
  for (int i = 0; i < kAcceptsPerPoll; ++i) {
    SocketAddress peer;
    peer.bytes = sizeof(peer.storage);
    Fd socket(
        accept4(listener.socket.get(), peer.get(), &peer.bytes, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket.open()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EAGAIN) {
        epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener.socket.get(), nullptr);
        listener.paused = true;
        resume_listening_ns_ = monotonic_ns() + kListenPauseNs;
        deadline_changed(resume_listening_ns_);
      }
      return moved;
    }
    moved = true;
    if (pending_hellos_ >= options_.max_pending_hellos) {
      ++turned_away_;
      continue;  // closes it; a peer of ours tries again
    }
    ++pending_hellos_;
    const EndpointId id = next_id_++;
    auto endpoint = std::make_unique<TcpEndpoint>(*this, id, std::move(socket), peer, index);
    TcpEndpoint& placed = *endpoint;
    endpoints_.emplace(id, std::move(endpoint));
    placed.start();
  }
  return moved;
}

void TcpFabric::resume_listeners() {
  resume_listening_ns_ = kNever;
  for (size_t i = 0; i < listeners_.size(); ++i) {
    if (!std::exchange(listeners_[i].paused, false)) continue;
    epoll_event wanted{};
    wanted.events = EPOLLIN;
    wanted.data.u64 = kListenerTag | i;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listeners_[i].socket.get(), &wanted);
  }
}

bool TcpFabric::run_deadlines() {
  const int64_t now = monotonic_ns();
  bool moved = false;
  next_deadline_ns_ = kNever;
  if (resume_listening_ns_ <= now) resume_listeners();
  int64_t next = resume_listening_ns_;
  for (auto& [id, endpoint] : endpoints_) {
    if (endpoint->deadline_ns() <= now) {
      endpoint->on_deadline();
      moved = true;
    }
    next = std::min(next, endpoint->deadline_ns());
  }
  next_deadline_ns_ = next;
  return moved;
}

}  // namespace tcp
}  // namespace jaxrdma::fabric
