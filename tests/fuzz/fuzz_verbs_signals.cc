/* tests/fuzz/fuzz_verbs_signals.cc: what a peer of the verbs fabric says beside its queue pairs:
   the parameters in its hello, and the messages in its mailbox, which make queue pairs anew. The
   devices are those of the fake libibverbs (tests/native/fake_verbs/). Whatever comes, the
   connection ends with it, and nothing is left in the library that was not given back. */
#include "fabric/verbs/library.h"

#if JAXRDMA_HAVE_VERBS

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <vector>

#include "fabric/verbs/frame.h"
#include "fake_verbs/fake_verbs.h"
#include "input.h"
#include "raw.h"

using namespace jaxrdma;
using namespace jaxrdma::fabric;
using fuzz::Input;
using fuzz::require;

namespace {

template <typename Function>
Function* fake(const char* name) {
  static void* const library = [] {
    setenv("JAXRDMA_IBVERBS_LIB", JAXRDMA_FAKE_VERBS, 1);
    return dlopen(JAXRDMA_FAKE_VERBS, RTLD_NOW | RTLD_LOCAL);
  }();
  require(library != nullptr, "the fake library opens");
  return reinterpret_cast<Function*>(dlsym(library, name));
}
#define FAKE(name) fake<decltype(name)>(#name)

VerbsOptions options(bool striped) {
  VerbsOptions options;
  options.sources.assign(striped ? 2 : 1, {});
  options.sources[0].device = "fake0";
  if (striped) options.sources[1].device = "fake1";
  options.link_timeout_ms = 50;
  return options;
}

verbs::ConnectionParameters parameters(Input& input) {
  verbs::ConnectionParameters made;
  made.magic = input.mostly<uint32_t>(verbs::kParametersMagic);
  made.queue_pair = input.mostly<uint32_t>(input.take<uint8_t>());
  made.packet_sequence = input.mostly<uint32_t>(1);
  made.receive_depth = input.mostly<uint32_t>(16);
  made.gid[15] = 1;  // as the address 0.0.0.1, mapped
  made.gid[10] = made.gid[11] = 0xff;
  if (input.take<uint8_t>() % 8 == 7) made.gid = input.take<decltype(made.gid)>();
  made.mailbox_address = input.mostly<uint64_t>(1 << 20);
  made.mailbox_key = input.mostly<uint32_t>(9);
  made.max_message = input.mostly<uint32_t>(1 << 20);
  made.mtu = input.mostly<uint8_t>(3);
  made.ethernet = input.mostly<uint8_t>(1);
  made.rails = input.mostly<uint8_t>(1 + input.take<uint8_t>() % 2);
  made.bundle = input.take<uint8_t>() % 4;
  made.link = input.mostly<uint8_t>(0);
  made.device = input.mostly(decltype(made.device){'f', 'a', 'k', 'e'});
  return made;
}

Hello hello_of(Input& input) {
  Hello hello;
  hello.job = "job";
  hello.token = std::vector<std::byte>(Hello::kTokenBytes, std::byte{1});
  hello.payload = verbs::encode_payload(parameters(input), {});
  if (input.take<uint8_t>() % 16 == 15) hello.payload.resize(input.take<uint8_t>());
  return hello;
}

std::string message(Input& input, const verbs::ConnectionParameters& to) {
  verbs::Message made;
  made.type =
      static_cast<verbs::MessageType>(input.mostly<uint32_t>(1 + input.take<uint8_t>() % 4));
  made.generation = input.mostly<uint32_t>(input.take<uint8_t>() % 3);
  made.received = input.mostly<uint32_t>(input.take<uint8_t>() % 3);
  made.granted = input.mostly<uint32_t>(input.take<uint8_t>() % 20);
  made.parameters = parameters(input);
  const uint32_t slot = input.mostly<uint32_t>(input.take<uint8_t>() % verbs::kMailboxSlots);
  std::string body = fuzz::text_of(made);
  body.resize(input.take<uint8_t>() % 16 == 15 ? input.take<uint8_t>() : body.size());
  tcp::FrameHeader frame;
  frame.type = tcp::FrameType::kWrite;
  frame.credits = input.mostly<uint32_t>(1);
  frame.immediate = input.mostly<uint32_t>(slot);
  frame.key = to.mailbox_key;
  frame.address = input.mostly<uint64_t>(to.mailbox_address + slot * sizeof(made));
  frame.length = body.size();
  return fuzz::text_of(frame) + body;
}

/// The side that is tested.
struct Side {
  explicit Side(bool striped)
      : fabric(std::move(make_verbs_fabric({}, options(striped)).value())),
        region(std::move(
            fabric->register_memory(memory.data(), memory.size(), Access::kRemoteWrite).value())) {}

  void turn(int timeout_ms = 0) {
    if (timeout_ms > 0) fabric->wait(timeout_ms);
    std::vector<Event> events;
    fabric->poll(events);
    for (const Event& event : events) {
      require(!ended, "nothing follows the end");
      if (event.kind == Event::Kind::kConnected) id = event.endpoint;
      if (event.kind == Event::Kind::kDisconnected) ended = true;
    }
  }
  /// What the owner does: a write, which waits where there is no link.
  void write() {
    Endpoint* endpoint = id == 0 ? nullptr : fabric->endpoint(id);
    if (endpoint == nullptr || endpoint->credits() == 0) return;
    const Slice slice{region.get(), memory.data(), 16};
    (void)endpoint->write({&slice, 1}, {1, {2, 2, 2, 2}}, 3, 4);
  }

  std::vector<std::byte> memory = std::vector<std::byte>(4096);
  std::unique_ptr<Fabric> fabric;
  std::unique_ptr<MemoryRegion> region;
  EndpointId id = 0;
  bool ended = false;
};

void talk(Input& input, Side& side, fuzz::Socket& peer) {
  const auto first = peer.receive(0);
  verbs::ConnectionParameters to;
  std::vector<std::byte> rest;
  if (first.has_value()) {
    const auto hello = tcp::decode_hello(fuzz::bytes_of(first->body));
    if (hello.ok()) (void)verbs::decode_payload(hello.value().payload, to, rest);
  }
  for (size_t said = 0; input.more() && said < fuzz::kMostBytes;) {
    switch (input.take<uint8_t>() % 8) {
      case 0:
        side.write();
        break;
      case 1:
        side.turn(1);
        break;
      default:
        const std::string frame = message(input, to);
        peer.send(frame);
        said += frame.size();
        side.turn();
    }
  }
  peer.end();
}

void play(Input input) {
  const auto bits = input.take<uint8_t>();
  Side side((bits & 1) != 0);
  if ((bits & 2) != 0) {
    fuzz::Listener listener;
    Hello hello;
    hello.job = "job";
    hello.token = std::vector<std::byte>(Hello::kTokenBytes, std::byte{1});
    side.id = side.fabric->connect(listener.address(), hello, 300).value();
    fuzz::Socket peer = listener.accept();
    side.turn();
    const Hello reply = hello_of(input);
    peer.send(fuzz::frame(tcp::FrameType::kHelloReply, tcp::encode_hello(reply), 8));
    side.turn();
    talk(input, side, peer);
    fuzz::until("the connection ends", [&] {
      side.turn(1);
      (void)peer.closed();
      return side.ended;
    });
    return;
  }
  const std::string address =
      side.fabric
          ->listen(fuzz::free_address(),
                   [](EndpointId, const Hello&) -> Result<std::vector<std::byte>> {
                     return fuzz::bytes_of("welcome");
                   })
          .value();
  fuzz::Socket peer = fuzz::Socket::connect(address);
  peer.send(fuzz::frame(tcp::FrameType::kHello, tcp::encode_hello(hello_of(input)), 8));
  side.turn();
  talk(input, side, peer);
  fuzz::until("the peer sees the end", [&] {
    side.turn(1);
    return peer.closed();
  });
  for (int i = 0; i < 4; ++i) side.turn();
  require(side.id == 0 || side.ended, "who was connected is told of the end");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  FAKE(fake_verbs_reset)();
  play(Input(data, bytes));
  const FakeVerbsAlive alive = FAKE(fake_verbs_alive)();
  require(alive.contexts + alive.pds + alive.regions + alive.channels + alive.cqs + alive.qps == 0,
          "all is given back");
  require(*FAKE(fake_verbs_misuse)() == '\0', FAKE(fake_verbs_misuse)());
  return 0;
}

#else

extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }

#endif
