/* fabric/verbs/bundle.cc: see bundle.h. */
#include "fabric/verbs/bundle.h"

#if JAXRDMA_HAVE_VERBS

#include <array>
#include <utility>

#include "fabric/verbs/endpoint.h"
#include "fabric/verbs/fabric.h"

namespace jaxrdma::fabric::verbs {

namespace {

constexpr int64_t kMillisecond = 1'000'000;
// The accepting side waits so long for the links that it has not heard of: their hellos follow the
// first one's at once.
constexpr int64_t kLinksNs = 40'000 * kMillisecond;

/// Whether a write is likely to be done sooner on `a` than on `b`.
bool sooner(const VerbsEndpoint& a, const VerbsEndpoint& b) {
  if (a.working() != b.working()) return a.working();
  return a.bytes_under_way() < b.bytes_under_way();
}

}  // namespace

Bundle::Bundle(VerbsFabric& fabric, EndpointId id, bool accepted, uint32_t links, Hello hello)
    : fabric_(fabric), id_(id), accepted_(accepted), hello_(std::move(hello)), links_(links) {
  if (accepted_) set_deadline(tcp::monotonic_ns() + kLinksNs);
}

bool Bundle::lacks(uint32_t link) const {
  // In any order: each hello has a connection of its own.
  return !ending_ && link < links_.size() && !made_[link];
}

void Bundle::add(uint32_t link, VerbsEndpoint& endpoint) {
  links_[link] = &endpoint;
  endpoint.join(*this);
  if (link == 0) peer_ = endpoint.peer_address();
  made_[link] = true;
  ++alive_;
}

// ---- What the owner asks for.

Status Bundle::write(std::span<const Slice> local, RemoteSlice remote, Immediate immediate,
                     RequestId request, Solicit solicit) {
  VerbsEndpoint* best = nullptr;
  for (size_t i = 0; open_ && !ending_ && i < links_.size(); ++i) {
    VerbsEndpoint* link = links_[(next_ + i) % links_.size()];
    if (link->credits() == 0) continue;
    if (best == nullptr || sooner(*link, *best)) best = link;
  }
  if (best == nullptr) {
    if (open_ && !ending_) return {Code::kResource, "no credit to write to " + peer_};
    return {Code::kUnavailable, "the connection to " + peer_ + " is not open"};
  }
  ++next_;
  return best->write(local, remote, immediate, request, solicit);
}

Status Bundle::read(Slice local, RemoteSlice remote, RequestId request) {
  if (!open_ || ending_) return {Code::kUnavailable, "the connection to " + peer_ + " is not open"};
  return links_[0]->read(local, remote, request);
}

size_t Bundle::credits() const {
  if (!open_ || ending_) return 0;
  return sum([](const VerbsEndpoint& link) -> uint64_t { return link.credits(); });
}

void Bundle::release(size_t count) {
  // Those that came first are released first: each link gets back what it is owed.
  std::array<size_t, kMostDevices> of_link{};
  for (; count > 0 && !arrived_.empty(); --count) {
    ++of_link[arrived_.front()];
    arrived_.pop_front();
  }
  for (size_t i = 0; i < links_.size(); ++i) {
    if (links_[i] != nullptr && of_link[i] > 0) links_[i]->release(of_link[i]);
  }
}

uint64_t Bundle::sum(uint64_t (*of)(const VerbsEndpoint&)) const {
  uint64_t total = 0;
  for (const VerbsEndpoint* link : links_) total += link == nullptr ? 0 : of(*link);
  return total;
}

size_t Bundle::outstanding() const {
  return sum([](const VerbsEndpoint& link) -> uint64_t { return link.outstanding(); });
}

uint64_t Bundle::bytes_sent() const {
  return bytes_sent_ + sum([](const VerbsEndpoint& link) { return link.bytes_sent(); });
}

uint64_t Bundle::bytes_received() const {
  return bytes_received_ + sum([](const VerbsEndpoint& link) { return link.bytes_received(); });
}

void Bundle::close(Status why, bool flush) {
  if (ending_) return;
  ending_ = true;
  reason_ = std::move(why);
  set_deadline(tcp::kNever);
  // A link that ends at once becomes null here.
  for (VerbsEndpoint*& link : links_) {
    if (link != nullptr) link->close(reason_, flush);
  }
  finish_maybe();
}

// ---- What happens on the links.

void Bundle::on_event(VerbsEndpoint& link, Event event) {
  event.endpoint = id_;
  switch (event.kind) {
    case Event::Kind::kConnected:
      if (link.link() == 0) {
        reply_ = std::move(event.hello);
        peer_ = link.peer_address();
      }
      ++connected_;
      if (connected_ == links_.size()) open();
      return;
    case Event::Kind::kDisconnected:
      on_ended(link, event.status);
      return;
    case Event::Kind::kReceived:
      arrived_.push_back(static_cast<uint8_t>(link.link()));
      break;
    case Event::Kind::kCredits:
      if (credits() != link.credits()) return;  // another link has some, or none are of use
      break;
    case Event::Kind::kWriteDone:
    case Event::Kind::kReadDone:
      break;
  }
  // The peer may have seen all links connected before this side has.
  if (open_) {
    fabric_.emit(std::move(event));
  } else {
    early_.push_back(std::move(event));
  }
}

void Bundle::open() {
  open_ = true;
  if (!ending_) set_deadline(tcp::kNever);
  Event event{};
  event.kind = Event::Kind::kConnected;
  event.endpoint = id_;
  event.hello = std::move(reply_);
  fabric_.emit(std::move(event));
  for (Event& early : std::exchange(early_, {})) fabric_.emit(std::move(early));
}

void Bundle::on_ended(VerbsEndpoint& link, const Status& why) {
  bytes_sent_ += link.bytes_sent();
  bytes_received_ += link.bytes_received();
  links_[link.link()] = nullptr;
  --alive_;
  if (!ending_) {
    ending_ = true;
    reason_ = why;
    hearsay_ = link.dead() && link.connected();
    if (hearsay_) {
      // The peer ended it, and so ends the others, once what it wrote before has arrived. If it saw
      // all links open, this side is yet to see that.
      set_deadline(tcp::monotonic_ns() + fabric_.options().close_timeout_ms * kMillisecond);
    } else {
      fail_links();
    }
  } else if (hearsay_ && !link.dead()) {
    // Its own completions say why, such as a refused write, after which the peer has closed all
    // links; the word of another link was only heard earlier.
    hearsay_ = false;
    reason_ = why;
  }
  finish_maybe();
}

void Bundle::on_deadline() {
  set_deadline(tcp::kNever);
  if (over_) return;
  if (!ending_) {
    fail({Code::kUnavailable, "the connection to " + peer_ +
                                  " was not made in time: " + std::to_string(connected_) +
                                  " of its " + std::to_string(links_.size()) + " links were"});
    return;
  }
  fail_links();
}

void Bundle::fail(const Status& why) {
  if (ending_) return;
  ending_ = true;
  reason_ = why;
  fail_links();
  finish_maybe();
}

void Bundle::fail_links() {
  set_deadline(tcp::kNever);
  for (VerbsEndpoint*& link : links_) {
    if (link != nullptr) link->fail(reason_);
  }
}

void Bundle::finish_maybe() {
  if (!ending_ || alive_ > 0 || over_) return;
  over_ = true;
  set_deadline(tcp::kNever);
  if (accepted_ && !open_) return;
  Event event{};
  event.kind = Event::Kind::kDisconnected;
  event.endpoint = id_;
  event.status = reason_;
  fabric_.emit(std::move(event));
}

void Bundle::set_deadline(int64_t deadline_ns) {
  deadline_ns_ = deadline_ns;
  fabric_.deadline_changed(deadline_ns);
}

}  // namespace jaxrdma::fabric::verbs

#endif
