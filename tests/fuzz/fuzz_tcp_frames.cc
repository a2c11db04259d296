/* tests/fuzz/fuzz_tcp_frames.cc: a tcp fabric against a peer that sends whatever it likes: as a
   stranger, as one that was let in, and as the one that was connected to. Whatever comes, it writes
   nowhere but where it may, gets no more through than it has credits for, and is gone at its end.
 */
#include <algorithm>
#include <memory>
#include <vector>

#include "input.h"
#include "raw.h"

using namespace jaxrdma;
using namespace jaxrdma::fabric;
using fuzz::Input;
using fuzz::require;

namespace {

constexpr uint32_t kDepth = 8;
constexpr size_t kBytes = 256;
constexpr auto kUntouched = std::byte{0x5a};

Hello hello_of(Input& input) {
  Hello hello;
  hello.job = "job";
  hello.token = std::vector<std::byte>(Hello::kTokenBytes, std::byte{1});
  hello.payload = fuzz::bytes_of(input.text(input.take<uint8_t>()));
  return hello;
}

/// The side that is tested.
class Side {
 public:
  Side() : fabric_(std::move(make_tcp_fabric(options()).value())) {
    std::fill(memory_.begin(), memory_.end(), kUntouched);
    const auto piece = [this](size_t at, Access access) {
      return std::move(fabric_->register_memory(memory_.data() + at, kBytes, access).value());
    };
    writable_ = piece(kBytes, Access::kRemoteWrite);
    readable_ = piece(3 * kBytes, Access::kRemoteRead);
    source_ = piece(5 * kBytes, Access::kLocal);
  }

  std::string listen() {
    return fabric_
        ->listen(fuzz::free_address(),
                 [](EndpointId, const Hello& hello) -> Result<std::vector<std::byte>> {
                   if (hello.token != std::vector<std::byte>(Hello::kTokenBytes, std::byte{1}))
                     return Status(Code::kPermissionDenied, "a stranger");
                   return fuzz::bytes_of("welcome");
                 })
        .value();
  }
  void connect(const std::string& address, const Hello& hello) {
    require(fabric_->connect(address, hello, 10'000).ok(), "connecting begins");
  }
  void turn(int timeout_ms = 0) {
    if (timeout_ms > 0) fabric_->wait(timeout_ms);
    std::vector<Event> events;
    fabric_->poll(events);
    for (const Event& event : events) handle(event);
  }
  bool over() const { return ended_ || fabric_->turned_away() > 0; }
  void finish() {
    fuzz::until("the connection ends", [this] {
      turn(over() ? 0 : 1);
      return over();
    });
    turn();
    for (size_t at = 0; at < memory_.size(); ++at) {
      const bool may = at >= kBytes && at < 2 * kBytes;
      require(may || memory_[at] == kUntouched, "nothing is written where nobody may");
    }
  }
  /// What the owner does now and then.
  void answer(Input& input) {
    Endpoint* endpoint = id_ == 0 ? nullptr : fabric_->endpoint(id_);
    if (endpoint == nullptr) return;
    const Slice slice{source_.get(), source_->data(), input.take<uint8_t>()};
    const size_t credits = endpoint->credits();
    const Status written = endpoint->write({&slice, 1}, {1, {2}}, 3, 4);
    require(credits > 0 || !written.ok(), "nothing is written without a credit");
  }
  uint32_t key(Input& input) const {
    return input.pick({writable_->remote_key()[0], writable_->remote_key()[0],
                       writable_->remote_key()[0], readable_->remote_key()[0], uint32_t{0},
                       input.take<uint32_t>()});
  }
  uint64_t address(Input& input) const {
    const auto base = reinterpret_cast<uintptr_t>(writable_->data());
    const auto other = reinterpret_cast<uintptr_t>(readable_->data());
    return input.pick<uint64_t>({base, base + input.take<uint8_t>(), base - 1, other, 0,
                                 base + kBytes, input.take<uint64_t>()});
  }

 private:
  static Options options() {
    Options options;
    options.receive_depth = kDepth;
    return options;
  }
  void handle(const Event& event) {
    require(!ended_, "nothing follows the end");
    switch (event.kind) {
      case Event::Kind::kConnected:
        require(id_ == 0, "one connection");
        id_ = event.endpoint;
        may_receive_ = kDepth;
        break;
      case Event::Kind::kDisconnected:
        ended_ = true;
        break;
      case Event::Kind::kReceived:
        require(may_receive_-- > 0, "no more comes through than there are credits");
        require(event.bytes <= kBytes, "what came fits the region");
        if (Endpoint* endpoint = fabric_->endpoint(id_);
            endpoint != nullptr && event.bytes % 2 == 0) {
          endpoint->release(1);
          ++may_receive_;
        }
        break;
      default:
        break;
    }
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(7 * kBytes);
  std::unique_ptr<Fabric> fabric_;
  std::unique_ptr<MemoryRegion> writable_, readable_, source_;
  EndpointId id_ = 0;
  uint32_t may_receive_ = 0;
  bool ended_ = false;
};

std::string any_frame(Input& input, const Side& side) {
  tcp::FrameHeader header;
  header.type = static_cast<tcp::FrameType>(
      input.pick<uint8_t>({3, 3, 3, 4, 5, 1, 2, input.take<uint8_t>()}));
  const bool write = header.type == tcp::FrameType::kWrite;
  header.credits = input.mostly<uint32_t>(input.take<uint8_t>() % 4);
  header.immediate = input.mostly<uint32_t>(0);
  if (write) {
    header.key = side.key(input);
    header.address = side.address(input);
  }
  const std::string body = input.text(input.take<uint8_t>());
  header.length =
      input.mostly<uint64_t>(write || header.type == tcp::FrameType::kClose ? body.size() : 0);
  header.magic = input.mostly<uint32_t>(tcp::kFrameMagic);
  if (input.take<uint8_t>() == 255) header.reserved1 = 1;
  return fuzz::text_of(header) + body;
}

void say(Input& input, Side& side, fuzz::Socket& peer) {
  size_t said = 0;
  const auto send = [&](const std::string& bytes) {
    peer.send(bytes);
    said += bytes.size();
  };
  while (input.more() && said < fuzz::kMostBytes) {
    switch (input.take<uint8_t>() % 8) {
      case 0:
        send(input.text(input.take<uint8_t>()));
        break;
      case 1:
        side.turn();
        break;
      case 2:
        side.answer(input);
        break;
      default:
        send(any_frame(input, side));
    }
  }
  peer.end();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  Input input(data, bytes);
  const uint8_t mode = input.take<uint8_t>() % 3;
  Side side;
  if (mode == 2) {
    fuzz::Listener listener;
    side.connect(listener.address(), hello_of(input));
    fuzz::Socket peer = listener.accept();
    side.turn();
    const std::string reply = tcp::encode_hello(hello_of(input));
    if (input.take<uint8_t>() % 4 != 0)
      peer.send(fuzz::frame(tcp::FrameType::kHelloReply, reply, input.mostly<uint32_t>(4)));
    say(input, side, peer);
    // It would be tried again until somebody answers.
    for (int i = 0; i < 4 && !side.over(); ++i) side.turn();
    if (!side.over()) return 0;
    side.finish();
    return 0;
  }
  fuzz::Socket peer = fuzz::Socket::connect(side.listen());
  if (mode == 1) {
    peer.send(fuzz::frame(tcp::FrameType::kHello, tcp::encode_hello(hello_of(input)), 4));
    side.turn();
  }
  say(input, side, peer);
  // Who is told why it is sent away has to take that before the connection is over.
  fuzz::until("the peer sees the end", [&] {
    side.turn(1);
    return peer.closed();
  });
  side.finish();
  return 0;
}
