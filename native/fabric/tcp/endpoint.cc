/* fabric/tcp/endpoint.cc: one tcp connection: how it comes about, what it carries, how it ends. */
#include "fabric/tcp/endpoint.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "fabric/tcp/fabric.h"

namespace jaxrdma::fabric::tcp {

namespace {

constexpr int64_t kMillisecond = 1'000'000;

// How much one call moves per direction before the other connections have their turn.
constexpr size_t kBudgetBytes = 1 << 20;
// Pieces of one sendmsg: a dozen small writes leave in one call; more would gain little.
constexpr int kMaxPieces = 64;
// A refused attempt on one machine costs microseconds, so the first retries are quick; peers that
// are slow to start take seconds, and are not disturbed more than twice a second.
constexpr int64_t kFirstBackoffNs = 10 * kMillisecond;
constexpr int64_t kLastBackoffNs = 500 * kMillisecond;
// One of several addresses of a host that does not answer must not eat all of the time.
constexpr int64_t kAttemptNs = 3000 * kMillisecond;

// A machine that is up, and reached, would refuse.
constexpr char kSilence[] = "no answer from the host";
constexpr char kNoAnswer[] = "no answer from the host; does a firewall drop what is sent there?";

std::string seconds_since(int64_t began_ns) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s",
                static_cast<double>(monotonic_ns() - began_ns) * 1e-9);
  return text;
}

const char* type_name(FrameType type) {
  switch (type) {
    case FrameType::kHello:
      return "hello";
    case FrameType::kHelloReply:
      return "hello reply";
    case FrameType::kWrite:
      return "write";
    case FrameType::kCredit:
      return "credit";
    case FrameType::kClose:
      return "close";
  }
  return "unknown";
}

/// What a close frame says of whose fault it is.
uint32_t blame(const Status& why) { return why.code() == Code::kProtocol ? kBlame : 0; }

}  // namespace

TcpEndpoint::TcpEndpoint(TcpFabric& fabric, EndpointId id, std::string address, HostPort where,
                         const Hello& hello, int timeout_ms)
    : fabric_(fabric),
      id_(id),
      accepted_(false),
      state_(State::kBackoff),
      announced_(true),
      peer_(std::move(address)),
      where_(std::move(where)),
      hello_(hello),
      began_ns_(monotonic_ns()),
      give_up_ns_(began_ns_ + std::max(timeout_ms, 0) * kMillisecond),
      backoff_ns_(kFirstBackoffNs) {}

TcpEndpoint::TcpEndpoint(TcpFabric& fabric, EndpointId id, Fd socket, const SocketAddress& peer,
                         size_t listener)
    : fabric_(fabric),
      id_(id),
      accepted_(true),
      listener_(listener),
      state_(State::kAwaitHello),
      announced_(false),
      peer_(peer.text()),
      socket_(std::move(socket)),
      began_ns_(monotonic_ns()) {}

TcpEndpoint::~TcpEndpoint() = default;

// ---- Coming about.

void TcpEndpoint::start() {
  if (accepted_) {
    tune(socket_.get(), fabric_.options().silence_timeout_ms);
    set_deadline(began_ns_ + fabric_.options().hello_timeout_ms * kMillisecond);
    watch_socket();
    return;
  }
  auto numeric = resolve(where_, /*numeric=*/true, /*passive=*/false);
  numeric_ = numeric.ok() && !numeric.value().empty();
  if (numeric_) addresses_ = std::move(numeric.value());
  resolve_and_try();
}

void TcpEndpoint::resolve_and_try() {
  next_address_ = 0;
  if (numeric_) {
    try_next_address();
    return;
  }
  // Asked again for every round: a peer that starts late may only then get its name.
  state_ = State::kResolving;
  set_deadline(give_up_ns_);
  fabric_.ask_resolver(id_, where_);
}

void TcpEndpoint::resolved(Result<std::vector<SocketAddress>> addresses) {
  if (state_ != State::kResolving) return;
  if (!addresses.ok()) {
    addresses_.clear();
    attempt_failed(addresses.status().message());
    return;
  }
  addresses_ = std::move(addresses.value());
  try_next_address();
}

void TcpEndpoint::try_next_address() {
  if (next_address_ >= addresses_.size()) {
    attempt_failed("the host has no address");
    return;
  }
  const SocketAddress& address = addresses_[next_address_++];
  ++attempts_;
  socket_ = Fd(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket_.open()) {
    attempt_failed("no socket: " + errno_text(errno));
    return;
  }
  tune(socket_.get(), fabric_.options().silence_timeout_ms);
  state_ = State::kConnecting;
  if (::connect(socket_.get(), address.get(), address.bytes) == 0) {
    on_connected();
    return;
  }
  if (errno != EINPROGRESS && errno != EINTR) {
    attempt_failed(errno_text(errno));
    return;
  }
  const bool others = addresses_.size() > 1;
  set_deadline(others ? std::min(give_up_ns_, monotonic_ns() + kAttemptNs) : give_up_ns_);
  watch_socket();
}

void TcpEndpoint::attempt_failed(std::string reason) {
  last_error_ = std::move(reason);
  if (watched_ != 0) fabric_.unwatch(socket_.get());
  watched_ = 0;
  socket_.reset();
  queue_.truncate(0);
  front_sent_ = 0;
  next_have_ = 0;
  in_body_ = false;
  send_error_ = 0;
  if (next_address_ < addresses_.size()) {
    try_next_address();
    return;
  }
  state_ = State::kBackoff;
  set_deadline(std::min(give_up_ns_, monotonic_ns() + backoff_ns_));
  backoff_ns_ = std::min(backoff_ns_ * 2, kLastBackoffNs);
}

/// A peer was met: no other of its addresses is tried, but the same ones again, in a while.
void TcpEndpoint::try_later(std::string reason) {
  next_address_ = addresses_.size();
  attempt_failed(std::move(reason));
}

void TcpEndpoint::on_connected() {
  // A connection to a free port of the ephemeral range can meet itself.
  SocketAddress local, remote;
  local.bytes = remote.bytes = sizeof(sockaddr_storage);
  getsockname(socket_.get(), local.get(), &local.bytes);
  getpeername(socket_.get(), remote.get(), &remote.bytes);
  if (local.text() == remote.text()) {
    attempt_failed(errno_text(ECONNREFUSED));
    return;
  }
  state_ = State::kAwaitReply;
  set_deadline(give_up_ns_);
  peer_credits_ = fabric_.options().receive_depth;
  enqueue(FrameType::kHello, 0, encode_hello(hello_));
  queue_.back().header.credits = peer_credits_;
  flush();
}

std::string TcpEndpoint::last_attempt() const {
  if (state_ == State::kAwaitReply) return "it took the connection, but did not answer the hello";
  return last_error_.empty() ? kNoAnswer : last_error_;
}

void TcpEndpoint::give_up() {
  die({Code::kUnavailable, "could not connect to " + peer_ + " within " + seconds_since(began_ns_) +
                               " (" + std::to_string(attempts_) +
                               (attempts_ == 1 ? " attempt" : " attempts") +
                               "; the last: " + last_attempt() +
                               "). Is the peer running, and is this the address it listens at?"});
}

std::string TcpEndpoint::trouble() const {
  const bool connects =
      !accepted_ && (state_ == State::kResolving || state_ == State::kConnecting ||
                     state_ == State::kBackoff || state_ == State::kAwaitReply);
  if (!connects) return {};
  const std::string why =
      state_ == State::kResolving ? "its name is being resolved" : last_attempt();
  return "no connection to " + peer_ + " for " + seconds_since(began_ns_) + ": " + why;
}

void TcpEndpoint::on_hello() {
  auto decoded = decode_hello(body_);
  if (!decoded.ok() || header_.credits == 0 || header_.credits > kMaxReceiveDepth) {
    violation("a malformed hello");
    return;
  }
  Hello& hello = decoded.value();
  auto payload = fabric_.gatekeeper(listener_)(id_, hello);
  Hello reply;
  reply.job = hello.job;
  reply.protocol_version = hello.protocol_version;
  reply.worker = hello.worker;
  reply.incarnation = hello.incarnation;
  Status verdict = payload.status();
  if (verdict.ok()) {
    reply.payload = std::move(payload.value());
    verdict = check_hello(reply);
  }
  if (!verdict.ok()) {
    fabric_.turn_away();
    enqueue(FrameType::kHelloReply, static_cast<Immediate>(verdict.code()),
            printable(verdict.message()));
    begin_flushing();
    return;
  }
  peer_depth_ = credits_ = header_.credits;
  peer_credits_ = fabric_.options().receive_depth;
  enqueue(FrameType::kHelloReply, 0, encode_hello(reply));
  queue_.back().header.credits = peer_credits_;
  announced_ = true;
  fabric_.hello_finished();
  open(std::move(hello));
  flush();
}

void TcpEndpoint::on_reply() {
  if (header_.immediate != 0) {
    const bool known = header_.immediate <= static_cast<Immediate>(Code::kInternal);
    const Code code = known ? static_cast<Code>(header_.immediate) : Code::kPermissionDenied;
    const std::string text = printable({reinterpret_cast<const char*>(body_.data()), body_.size()});
    if (code == Code::kUnavailable) return try_later("it refused for now: " + text);
    die({code, "the peer at " + peer_ + " refused the connection: " + text});
    return;
  }
  auto decoded = decode_hello(body_);
  if (!decoded.ok() || header_.credits == 0 || header_.credits > kMaxReceiveDepth) {
    violation("a malformed hello reply");
    return;
  }
  peer_depth_ = credits_ = header_.credits;
  open(std::move(decoded.value()));
}

void TcpEndpoint::open(Hello peer) {
  state_ = State::kOpen;
  set_deadline(kNever);
  Event event{};
  event.kind = Event::Kind::kConnected;
  event.endpoint = id_;
  event.hello = std::make_shared<const Hello>(std::move(peer));
  fabric_.emit(std::move(event));
}

// ---- Sending.

Status TcpEndpoint::write(std::span<const Slice> local, RemoteSlice remote, Immediate immediate,
                          RequestId request, Solicit /*solicit*/) {
  if (state_ != State::kOpen || send_error_ != 0) {
    return {Code::kUnavailable, "the connection to " + peer_ + " is not open"};
  }
  if (local.size() > kMaxSlices)
    return {Code::kInvalidArgument, "a write of more than kMaxSlices slices"};
  if (immediate >> kImmediateBits != 0)
    return {Code::kInvalidArgument, "an immediate of more than kImmediateBits bits"};
  if (credits_ == 0) return {Code::kResource, "no credit to write to " + peer_};
  for (const Slice& slice : local) {
    if (slice.bytes == 0) continue;
    const std::byte* begin = slice.region == nullptr ? nullptr : slice.region->data();
    if (begin == nullptr || slice.data < begin || slice.bytes > slice.region->bytes() ||
        static_cast<size_t>(slice.data - begin) > slice.region->bytes() - slice.bytes) {
      return {Code::kInvalidArgument, "a slice of a write leaves its region"};
    }
  }

  const bool idle = queue_.empty();
  Queued& frame = queue_.push();
  frame.header = FrameHeader{};
  frame.header.type = FrameType::kWrite;
  frame.header.credits = take_credits_to_return();
  frame.header.immediate = immediate;
  frame.header.key = remote.key[0];
  frame.header.address = remote.address;
  frame.slice_count = 0;
  frame.request = request;
  for (const Slice& slice : local) {
    if (slice.bytes == 0) continue;
    frame.slices[frame.slice_count++] = {const_cast<std::byte*>(slice.data), slice.bytes};
    frame.header.length += slice.bytes;
  }
  --credits_;
  ++outstanding_;
  if (idle) flush();
  return {};
}

void TcpEndpoint::enqueue(FrameType type, Immediate immediate, std::string body) {
  Queued& frame = queue_.push();
  frame.header = FrameHeader{};
  frame.header.type = type;
  frame.header.immediate = immediate;
  frame.header.length = body.size();
  frame.body = std::move(body);
  frame.slice_count = 0;
}

bool TcpEndpoint::flush() {
  bool moved = false;
  size_t budget = kBudgetBytes;
  while (!queue_.empty() && budget > 0 && send_error_ == 0) {
    std::array<iovec, kMaxPieces> pieces;
    int count = 0;
    size_t asked = 0;
    size_t skip = front_sent_;
    const auto add = [&](const void* data, size_t bytes) {
      if (skip >= bytes) {
        skip -= bytes;
        return;
      }
      const size_t left = std::min(bytes - skip, budget - asked);
      if (left == 0) return;
      pieces[count++] = {const_cast<char*>(static_cast<const char*>(data)) + skip, left};
      asked += left;
      skip = 0;
    };
    for (size_t i = 0; i < queue_.size() && asked < budget; ++i) {
      if (count + 1 + static_cast<int>(kMaxSlices) > kMaxPieces) break;
      Queued& frame = queue_[i];
      add(&frame.header, sizeof(frame.header));
      if (frame.header.type != FrameType::kWrite) {
        add(frame.body.data(), frame.body.size());
      } else {
        for (uint32_t k = 0; k < frame.slice_count; ++k)
          add(frame.slices[k].iov_base, frame.slices[k].iov_len);
      }
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = static_cast<size_t>(count);
    const ssize_t sent = sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) break;
      // The peer's last words may lie unread in the socket; the next `poll` takes them first.
      send_error_ = errno;
      set_deadline(monotonic_ns());
      return moved;
    }
    moved = true;
    advance(static_cast<size_t>(sent));
    if (static_cast<size_t>(sent) < asked) break;
    budget -= asked;
  }
  if (state_ == State::kFlushing && queue_.empty()) {
    shutdown(socket_.get(), SHUT_WR);
    state_ = State::kDraining;
  }
  watch_socket();
  return moved;
}

void TcpEndpoint::advance(size_t sent) {
  front_sent_ += sent;
  while (!queue_.empty()) {
    Queued& frame = queue_.front();
    const size_t total = sizeof(frame.header) + frame.header.length;
    if (front_sent_ < total) return;
    front_sent_ -= total;
    if (frame.header.type == FrameType::kWrite) {
      --outstanding_;
      bytes_sent_ += frame.header.length;
      Event event{};
      event.kind = Event::Kind::kWriteDone;
      event.endpoint = id_;
      event.request = frame.request;
      event.bytes = frame.header.length;
      queue_.pop();
      fabric_.emit(std::move(event));
    } else {
      queue_.pop();
    }
  }
}

void TcpEndpoint::release(size_t count) {
  if (state_ != State::kOpen) return;
  const auto released = static_cast<uint32_t>(std::min<size_t>(count, unreleased_));
  unreleased_ -= released;
  credits_to_return_ += released;
  return_credits_if_due();
}

uint32_t TcpEndpoint::take_credits_to_return() {
  peer_credits_ += credits_to_return_;
  return std::exchange(credits_to_return_, 0);
}

void TcpEndpoint::return_credits_if_due() {
  // Writes of our own carry credits for nothing. A frame of their own is worth it when the peer has
  // none left, or when half of all it can have are here.
  const uint32_t half = std::max<uint32_t>(1, fabric_.options().receive_depth / 2);
  if (credits_to_return_ == 0 || (peer_credits_ != 0 && credits_to_return_ < half)) return;
  const bool idle = queue_.empty();
  enqueue(FrameType::kCredit, 0, {});
  queue_.back().header.credits = take_credits_to_return();
  if (idle) flush();
}

void TcpEndpoint::watch_socket() {
  uint32_t wanted = EPOLLIN;
  if (state_ == State::kConnecting) wanted = EPOLLOUT;
  if (!queue_.empty() && send_error_ == 0) wanted |= EPOLLOUT;
  if (wanted == watched_) return;
  const int error = fabric_.watch(socket_.get(), id_, wanted, watched_ == 0);
  watched_ = wanted;
  if (error != 0)
    die({Code::kResource, "could not watch the connection to " + peer_ + ": " + errno_text(error)});
}

// ---- Receiving.

bool TcpEndpoint::on_ready(uint32_t epoll_events) {
  bool moved = false;
  const bool broken = (epoll_events & (EPOLLERR | EPOLLHUP)) != 0;
  if (state_ == State::kConnecting) {
    int error = 0;
    socklen_t bytes = sizeof(error);
    getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
    if (error != 0) {
      attempt_failed(errno_text(error));
    } else if ((epoll_events & EPOLLOUT) != 0) {
      on_connected();
    }
    return true;
  }
  if (receives()) {
    if (broken || (epoll_events & EPOLLIN) != 0) moved = receive(broken);
    if (receives() && (epoll_events & EPOLLOUT) != 0) moved |= flush();
  } else if (state_ == State::kFlushing || state_ == State::kDraining) {
    if ((epoll_events & EPOLLOUT) != 0) moved = flush();
    if (!dead() && (broken || (epoll_events & EPOLLIN) != 0)) moved |= discard();
  }
  return moved;
}

bool TcpEndpoint::receive(bool until_error) {
  bool moved = false;
  size_t budget = kBudgetBytes;
  while (receives() && budget > 0) {
    std::array<iovec, 2> pieces;
    size_t count = 0;
    size_t asked = 0;
    size_t rest = 0;  // of the body
    if (in_body_) {
      // Looked up each time: the region may have been withdrawn between two pieces of one body.
      const char* why = nullptr;
      std::byte* target = body_target(&why);
      if (target == nullptr) {
        violation(std::string("a write whose key ") + why);
        return true;
      }
      rest = header_.length - body_have_;
      asked = std::min(rest, budget);
      pieces[count++] = {target + body_have_, asked};
    }
    if (asked == rest) {
      // The header of the next frame rides along, so that a stream of frames costs one call each.
      pieces[count++] = {next_.data() + next_have_, next_.size() - next_have_};
      asked += next_.size() - next_have_;
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = count;
    const ssize_t result = recvmsg(socket_.get(), &message, MSG_DONTWAIT);
    if (result < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) lost(errno_text(errno));
      return moved;
    }
    if (result == 0) {
      lost(in_body_ || next_have_ > 0 ? "it closed the connection in the middle of a frame"
                                      : "it closed the connection");
      return true;
    }
    moved = true;
    const auto got = static_cast<size_t>(result);
    const size_t of_body = std::min(got, rest);
    budget -= std::min(budget, got);
    next_have_ += got - of_body;
    if (in_body_) {
      body_have_ += of_body;
      if (header_.type == FrameType::kWrite) bytes_received_ += of_body;
      if (body_have_ == header_.length) {
        in_body_ = false;
        on_body();
      }
    }
    if (receives() && next_have_ == next_.size()) on_header();
    if (got < asked && !until_error) break;  // the socket is empty
  }
  return moved;
}

std::byte* TcpEndpoint::body_target(const char** why) {
  if (header_.type != FrameType::kWrite) return body_.data();
  return fabric_.memory().find({header_.address, {header_.key}}, header_.length, why);
}

void TcpEndpoint::on_header() {
  std::memcpy(&header_, next_.data(), sizeof(header_));
  next_have_ = 0;
  static constexpr uint8_t kZeros[sizeof(header_.reserved0)] = {};
  if (header_.magic != kFrameMagic || header_.reserved1 != 0 ||
      std::memcmp(header_.reserved0, kZeros, sizeof(kZeros)) != 0) {
    violation("bytes that are no frame of this version");
    return;
  }
  const bool expected = state_ == State::kAwaitHello   ? header_.type == FrameType::kHello
                        : state_ == State::kAwaitReply ? header_.type == FrameType::kHelloReply
                                                       : header_.type == FrameType::kWrite ||
                                                             header_.type == FrameType::kCredit ||
                                                             header_.type == FrameType::kClose;
  if (!expected) {
    violation(std::string("a frame of type ") + type_name(header_.type) + " where none belongs");
    return;
  }
  if (header_.type != FrameType::kWrite && header_.length > kMaxBodyBytes) {
    violation("a " + std::string(type_name(header_.type)) + " of " +
              std::to_string(header_.length) + " bytes");
    return;
  }
  if (state_ == State::kOpen) {
    if (header_.credits > peer_depth_ - credits_) {
      violation("credits for more writes than it said it can receive");
      return;
    }
    const bool none = credits_ == 0;
    credits_ += header_.credits;
    if (none && credits_ > 0) {
      Event event{};
      event.kind = Event::Kind::kCredits;
      event.endpoint = id_;
      fabric_.emit(std::move(event));
    }
    if (header_.type == FrameType::kWrite) {
      if (peer_credits_ == 0) {
        violation("more writes than it had credits for");
        return;
      }
      --peer_credits_;
      if (header_.length > 0) {
        const char* why = nullptr;
        if (fabric_.memory().find({header_.address, {header_.key}}, header_.length, &why) ==
            nullptr) {
          violation("a write of " + std::to_string(header_.length) + " bytes whose key " + why);
          return;
        }
      }
    } else if (header_.type == FrameType::kCredit && header_.length != 0) {
      violation("a credit frame with a body");
      return;
    }
  }
  if (header_.length == 0) {
    body_.clear();
    on_body();
    return;
  }
  in_body_ = true;
  body_have_ = 0;
  if (header_.type != FrameType::kWrite) body_.resize(header_.length);
}

void TcpEndpoint::on_body() {
  switch (header_.type) {
    case FrameType::kHello:
      on_hello();
      return;
    case FrameType::kHelloReply:
      on_reply();
      return;
    case FrameType::kWrite: {
      ++unreleased_;
      Event event{};
      event.kind = Event::Kind::kReceived;
      event.endpoint = id_;
      event.immediate = header_.immediate;
      event.bytes = header_.length;
      fabric_.emit(std::move(event));
      return_credits_if_due();
      return;
    }
    case FrameType::kCredit:
      return;
    case FrameType::kClose: {
      const std::string text =
          printable({reinterpret_cast<const char*>(body_.data()), body_.size()});
      die({header_.immediate == kBlame ? Code::kProtocol : Code::kUnavailable,
           "the peer at " + peer_ + " closed the connection" + (text.empty() ? "" : ": " + text)});
      return;
    }
  }
}

bool TcpEndpoint::discard() {
  std::array<std::byte, 16384> scrap;
  for (size_t budget = kBudgetBytes; budget > 0;) {
    const ssize_t got = recv(socket_.get(), scrap.data(), scrap.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return true;
    if (got <= 0) {
      finish();
      return true;
    }
    budget -= std::min(budget, static_cast<size_t>(got));
  }
  return true;
}

// ---- The end.

void TcpEndpoint::on_deadline() {
  deadline_ns_ = kNever;
  switch (state_) {
    case State::kBackoff:
      if (monotonic_ns() >= give_up_ns_) {
        give_up();
      } else {
        resolve_and_try();
      }
      return;
    case State::kConnecting:
      if (monotonic_ns() < give_up_ns_) {
        attempt_failed("no answer from " + addresses_[next_address_ - 1].text());
        return;
      }
      // Who rejects may do so seldom, and not answer in between.
      if (!last_error_.empty())
        last_error_ = std::string(kSilence) + "; before that: " + last_error_;
      give_up();
      return;
    case State::kResolving:
      last_error_ = "the name service did not answer";
      give_up();
      return;
    case State::kAwaitReply:
      if (send_error_ == 0 || monotonic_ns() >= give_up_ns_) {
        give_up();
        return;
      }
      [[fallthrough]];
    case State::kOpen:
      while (receives() && receive(/*until_error=*/true)) {
      }
      if (receives()) lost(errno_text(send_error_));
      return;
    case State::kAwaitHello:
      die({Code::kProtocol, "no hello in time"});
      return;
    case State::kFlushing:
    case State::kDraining:
      finish();
      return;
    case State::kDead:
      return;
  }
}

void TcpEndpoint::violation(const std::string& what) {
  const Status why(
      Code::kProtocol,
      "the peer at " + peer_ + " broke the protocol of the data connection: it sent " + what);
  // Strangers get no answer: they may not even speak this protocol.
  if (state_ == State::kOpen) {
    end(why, "protocol violation: you sent " + what);
  } else {
    die(why);
  }
}

void TcpEndpoint::lost(const std::string& how) {
  if (state_ == State::kAwaitReply) {
    // Before its hello the peer may be one that just starts, or ends, or has its hands full: tried
    // again.
    try_later("before it answered the hello, " + how);
    return;
  }
  die({Code::kUnavailable, "lost the connection to " + peer_ + ": " + how});
}

void TcpEndpoint::close(Status why, bool flush_first) {
  if (ended_ || state_ == State::kFlushing || state_ == State::kDraining || state_ == State::kDead)
    return;
  const std::string text = printable(why.message());
  if (state_ != State::kOpen || !flush_first || send_error_ != 0) {
    end(std::move(why), text);
    return;
  }
  close_reason_ = std::move(why);
  enqueue(FrameType::kClose, blame(close_reason_), text);
  begin_flushing();
}

void TcpEndpoint::end(Status why, const std::string& text) {
  if (state_ != State::kOpen || send_error_ != 0 || (front_sent_ > 0 && !queue_.empty())) {
    die(std::move(why));
    return;
  }
  // Nothing that belongs to the owner is touched from here on; the peer is told why if it listens.
  queue_.truncate(0);
  const uint32_t blamed = blame(why);
  announce_end(std::move(why));
  enqueue(FrameType::kClose, blamed, text);
  begin_flushing();
}

void TcpEndpoint::begin_flushing() {
  // Closing a socket that holds unread bytes resets the connection, and a reset takes what was sent
  // before along. So the sending direction is shut, what comes is read and dropped, and the peer
  // closes first.
  state_ = State::kFlushing;
  set_deadline(monotonic_ns() + fabric_.options().close_timeout_ms * kMillisecond);
  flush();
}

void TcpEndpoint::finish() { die(close_reason_); }

void TcpEndpoint::die(Status why) {
  if (state_ == State::kDead) return;
  if (state_ == State::kAwaitHello) fabric_.turn_away();
  state_ = State::kDead;
  set_deadline(kNever);
  if (watched_ != 0) fabric_.unwatch(socket_.get());
  watched_ = 0;
  socket_.reset();
  queue_.truncate(0);
  if (accepted_ && !announced_) fabric_.hello_finished();
  announce_end(std::move(why));
}

void TcpEndpoint::announce_end(Status why) {
  fabric_.retire(id_);
  if (ended_) return;
  ended_ = true;
  outstanding_ = 0;
  credits_ = 0;
  if (!announced_) return;
  Event event{};
  event.kind = Event::Kind::kDisconnected;
  event.endpoint = id_;
  event.status = std::move(why);
  fabric_.emit(std::move(event));
}

void TcpEndpoint::set_deadline(int64_t deadline_ns) {
  deadline_ns_ = deadline_ns;
  fabric_.deadline_changed(deadline_ns);
}

}  // namespace jaxrdma::fabric::tcp
