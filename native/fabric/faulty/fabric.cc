/* fabric/faulty/fabric.cc: see fabric.h. */
#include "fabric/faulty/fabric.h"

#include <algorithm>
#include <chrono>

namespace jaxrdma::fabric::faulty {

namespace {

constexpr int64_t kMillisecond = 1'000'000;
// So long the write that is to be overtaken waits for another.
constexpr int kOvertakenMs = 1000;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

size_t total_bytes(std::span<const Slice> local) {
  size_t bytes = 0;
  for (const Slice& slice : local) bytes += slice.bytes;
  return bytes;
}

}  // namespace

// ---- What is sent.

Status FaultyEndpoint::write(std::span<const Slice> local, RemoteSlice remote, Immediate immediate,
                             RequestId request, Solicit solicit) {
  if (!held_.empty() && fabric_.fault_.kind == Kind::kReordered) {
    Status written = inner_.write(local, remote, immediate, request, solicit);
    let_go();
    return written;
  }
  if (!held_.empty()) return keep(local, remote, immediate, request, solicit);
  const size_t bytes = total_bytes(local);
  if (bytes == 0 && fabric_.uncredited_) return lose(request);
  if (!fabric_.strikes_sent(bytes)) return inner_.write(local, remote, immediate, request, solicit);
  switch (fabric_.fault_.kind) {
    case Kind::kWithheld:
      ++never_;
      return {};
    case Kind::kLost:
      return lose(request);
    case Kind::kDelayed:
      until_ns_ = now_ns() + fabric_.fault_.delay_ms * kMillisecond;
      return keep(local, remote, immediate, request, solicit);
    case Kind::kReordered:
      until_ns_ = now_ns() + kOvertakenMs * kMillisecond;
      return keep(local, remote, immediate, request, solicit);
    case Kind::kSwallowed:
      fabric_.swallowed_ = {id(), request};
      break;
    case Kind::kDuplicated:
    case Kind::kUncredited:
      break;
  }
  return inner_.write(local, remote, immediate, request, solicit);
}

Status FaultyEndpoint::lose(RequestId request) {
  Event done;
  done.kind = Event::Kind::kWriteDone;
  done.endpoint = id();
  done.request = request;
  fabric_.made_up_.push_back(std::move(done));
  fabric_.wake();
  return {};
}

Status FaultyEndpoint::keep(std::span<const Slice> local, RemoteSlice remote, Immediate immediate,
                            RequestId request, Solicit solicit) {
  held_.push_back({{local.begin(), local.end()}, remote, immediate, request, solicit});
  fabric_.due_ns_ = until_ns_;
  fabric_.wake();
  return {};
}

void FaultyEndpoint::let_go() {
  while (!held_.empty() && inner_.credits() > 0) {
    const HeldWrite& next = held_.front();
    // What fails now, fails with its connection.
    (void)inner_.write(next.local, next.remote, next.immediate, next.request, next.solicit);
    held_.pop_front();
  }
}

size_t FaultyEndpoint::credits() const {
  const size_t credits = inner_.credits();
  return credits > held_.size() ? credits - held_.size() : 0;
}

void FaultyEndpoint::release(size_t count) {
  if (!fabric_.uncredited_) inner_.release(count);
}

void FaultyEndpoint::close(Status why, bool flush) {
  held_.clear();
  inner_.close(std::move(why), flush);
}

bool FaultyFabric::strikes_sent(size_t bytes) {
  const bool of_sent = fault_.kind != Kind::kDuplicated && fault_.kind != Kind::kUncredited;
  const bool strikes = of_sent && bytes > kSmall && ++sent_ == fault_.nth;
  struck_ = struck_ || strikes;
  return strikes;
}

// ---- What comes.

Endpoint* FaultyFabric::endpoint(EndpointId id) {
  Endpoint* inner = inner_->endpoint(id);
  if (inner == nullptr) return nullptr;
  std::unique_ptr<FaultyEndpoint>& outer = endpoints_[id];
  if (outer == nullptr) outer = std::make_unique<FaultyEndpoint>(*this, *inner);
  return outer.get();
}

bool FaultyFabric::poll(std::vector<Event>& events) {
  const size_t before = events.size();
  bool moved = inner_->poll(events);
  for (size_t i = before; i < events.size(); ++i) {
    const Event& event = events[i];
    if (event.kind == Event::Kind::kDisconnected) {
      endpoints_.erase(event.endpoint);
    } else if (event.kind == Event::Kind::kWriteDone) {
      if (swallowed_ != std::pair{event.endpoint, event.request}) continue;
      swallowed_.reset();
      if (FaultyEndpoint* of = static_cast<FaultyEndpoint*>(endpoint(event.endpoint))) ++of->never_;
      events.erase(events.begin() + static_cast<ptrdiff_t>(i--));
    } else if (event.kind == Event::Kind::kReceived && event.bytes > kSmall) {
      if (++received_ < fault_.nth) continue;
      uncredited_ = fault_.kind == Kind::kUncredited;
      struck_ = struck_ || uncredited_ || fault_.kind == Kind::kDuplicated;
      if (received_ > fault_.nth || fault_.kind != Kind::kDuplicated) continue;
      events.insert(events.begin() + static_cast<ptrdiff_t>(i++), Event(event));
    }
  }
  if (due_ns_ != 0) {
    bool holds = false;
    for (auto& [id, endpoint] : endpoints_) {
      if (!endpoint->held_.empty() && now_ns() >= endpoint->until_ns_) endpoint->let_go();
      holds = holds || !endpoint->held_.empty();
    }
    if (!holds) due_ns_ = 0;
  }
  moved = moved || !made_up_.empty();
  for (Event& event : made_up_) events.push_back(std::move(event));
  made_up_.clear();
  return moved;
}

void FaultyFabric::wait(int timeout_ms, bool patient) {
  if (const int64_t due = due_ns_; due != 0) {
    const auto left = static_cast<int>(std::max<int64_t>((due - now_ns()) / kMillisecond + 1, 1));
    timeout_ms = timeout_ms < 0 ? left : std::min(timeout_ms, left);
  }
  inner_->wait(timeout_ms, patient);
}

}  // namespace jaxrdma::fabric::faulty
