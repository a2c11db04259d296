/* tests/native/test_fabric.cc: what every transport promises, and what hostile bytes on a tcp
   connection must not do.

   TEST_TRANSPORT says which; see transports.h. */
#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/tcp/frame.h"
#include "transports.h"

namespace {

using namespace jaxrdma;
using namespace jaxrdma::fabric;
using Clock = std::chrono::steady_clock;
using Kind = Event::Kind;

struct Transport {
  const char* name;
  Result<std::unique_ptr<Fabric>> (*make_fabric)(const Options&);
  const char* listen;
  uint32_t max_depth;  ///< of receives
};
const Transport kTcp{"tcp", make_tcp_fabric, "127.0.0.1:0", UINT32_MAX};

Result<std::unique_ptr<Fabric>> make_verbs(const Options& options) {
  return make_fabric(testing::next_transport(), options);
}
const Transport kVerbs{"verbs", make_verbs, "127.0.0.1:0", 512};

/// What the promises are tested on.
const Transport& transport_under_test() { return testing::transport() == "verbs" ? kVerbs : kTcp; }
/// A test case of what every transport promises.
#define TRANSPORT_TEST(title) DOCTEST_TEST_CASE_TRANSPORT(DOCTEST_ANONYMOUS(transport_test_), title)
#define DOCTEST_TEST_CASE_TRANSPORT(function, title)     \
  static void function(const Transport& transport);      \
  TEST_CASE(title) { function(transport_under_test()); } \
  static void function([[maybe_unused]] const Transport& transport)

// Far beyond what any of this takes, so that only a hang hits it, under sanitizers too.
constexpr auto kPatience = std::chrono::seconds(30);

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

std::vector<std::byte> pattern(size_t bytes, uint32_t seed) {
  std::vector<std::byte> data(bytes);
  uint32_t x = seed * 2654435761u + 1;
  for (auto& b : data) {
    x = x * 1664525u + 1013904223u;
    b = static_cast<std::byte>(x >> 24);
  }
  return data;
}

const std::vector<std::byte> kToken = bytes_of("0123456789abcdef");

Hello hello_of(uint32_t worker) {
  Hello hello;
  hello.job = "a job";
  hello.protocol_version = 7;
  hello.worker = worker;
  hello.incarnation = 99;
  hello.token = kToken;
  hello.payload = bytes_of("from the worker");
  return hello;
}

Result<std::vector<std::byte>> strict(EndpointId, const Hello& hello) {
  if (hello.token != kToken)
    return Status(Code::kPermissionDenied,
                  "wrong token for worker " + std::to_string(hello.worker));
  return bytes_of("from the server");
}

/// One process's end.
struct Side {
  std::unique_ptr<Fabric> fabric;
  std::vector<Event> events;
  EndpointId id = 0;

  explicit Side(const Transport& transport, const Options& options = {}) {
    auto made = transport.make_fabric(options);
    REQUIRE_MESSAGE(made.ok(), made.status().message());
    fabric = std::move(made.value());
  }
  Endpoint& endpoint() { return *fabric->endpoint(id); }
  size_t count(Kind kind) const {
    return static_cast<size_t>(std::count_if(events.begin(), events.end(),
                                             [&](const Event& e) { return e.kind == kind; }));
  }
  const Event* find(Kind kind) const {
    const auto found =
        std::find_if(events.begin(), events.end(), [&](const Event& e) { return e.kind == kind; });
    return found == events.end() ? nullptr : &*found;
  }
  std::unique_ptr<MemoryRegion> region(std::vector<std::byte>& memory,
                                       Access access = Access::kLocal) {
    auto made = fabric->register_memory(memory.data(), memory.size(), access);
    REQUIRE(made.ok());
    return std::move(made.value());
  }
};

/// Turns all sides until `done`; false after kPatience.
bool turn(const std::vector<Side*>& sides, const std::function<bool()>& done) {
  const auto deadline = Clock::now() + kPatience;
  while (!done()) {
    bool moved = false;
    for (Side* side : sides) moved |= side->fabric->poll(side->events);
    if (!moved && !done()) {
      if (Clock::now() > deadline) return false;
      for (Side* side : sides) side->fabric->wait(1);
    }
  }
  return true;
}

/// A connected pair: `a` connected to `b`.
struct Pair {
  Side a, b;
  std::string address;
  explicit Pair(const Transport& transport, const Options& a_options = {},
                const Options& b_options = {}, const char* listen = nullptr)
      : a(transport, a_options), b(transport, b_options) {
    auto listening = b.fabric->listen(listen == nullptr ? transport.listen : listen, strict);
    REQUIRE_MESSAGE(listening.ok(), listening.status().message());
    address = listening.value();
    auto id = a.fabric->connect(address, hello_of(3), 20'000);
    REQUIRE(id.ok());
    a.id = id.value();
    REQUIRE(
        turn([this] { return a.count(Kind::kConnected) == 1 && b.count(Kind::kConnected) == 1; }));
    b.id = b.find(Kind::kConnected)->endpoint;
  }
  bool turn(const std::function<bool()>& done) { return ::turn({&a, &b}, done); }
};

RemoteSlice target(const MemoryRegion& region, size_t offset = 0) {
  return {reinterpret_cast<uintptr_t>(region.data()) + offset, region.remote_key()};
}

}  // namespace

// ---- What every transport promises.

TRANSPORT_TEST("a connection tells each side who the other is") {
  Pair pair(transport);
  const Event* at_b = pair.b.find(Kind::kConnected);
  REQUIRE(at_b->hello);
  CHECK(at_b->hello->job == "a job");
  CHECK(at_b->hello->protocol_version == 7);
  CHECK(at_b->hello->worker == 3);
  CHECK(at_b->hello->incarnation == 99);
  CHECK(at_b->hello->payload == bytes_of("from the worker"));
  const Event* at_a = pair.a.find(Kind::kConnected);
  REQUIRE(at_a->hello);
  CHECK(at_a->hello->payload == bytes_of("from the server"));
  CHECK(at_a->hello->token.empty());
  const uint32_t depth = testing::links() * std::min(Options{}.receive_depth, transport.max_depth);
  CHECK(pair.a.endpoint().credits() == depth);
  CHECK(pair.b.endpoint().credits() == depth);
  CHECK(pair.a.endpoint().peer_address() == pair.address);
}

TRANSPORT_TEST("bytes arrive as they were sent, in all sizes, from several slices at odd places") {
  Pair pair(transport);
  uint32_t request = 0;
  for (const size_t bytes :
       {size_t{0}, size_t{1}, size_t{63}, size_t{4096}, size_t{1} << 20, (size_t{64} << 20) + 5}) {
    CAPTURE(bytes);
    ++request;
    auto source = pattern(bytes + 7, request);
    std::vector<std::byte> memory(bytes + 100, std::byte{0xee});
    const auto from = pair.a.region(source);
    const auto to = pair.b.region(memory, Access::kRemoteWrite);
    // Four slices: one byte, a third, nothing, the rest; they begin at offset 3.
    const size_t first = std::min<size_t>(1, bytes), second = (bytes - first) / 3;
    const std::byte* begin = source.data() + 3;
    const Slice slices[] = {{from.get(), begin, first},
                            {from.get(), begin + first, second},
                            {from.get(), begin, 0},
                            {from.get(), begin + first + second, bytes - first - second}};
    pair.a.events.clear();
    pair.b.events.clear();
    const Status posted = pair.a.endpoint().write(slices, target(*to, 13), request, request * 10);
    REQUIRE_MESSAGE(posted.ok(), posted.message());
    REQUIRE(pair.turn(
        [&] { return pair.b.count(Kind::kReceived) == 1 && pair.a.count(Kind::kWriteDone) == 1; }));
    CHECK(pair.b.find(Kind::kReceived)->immediate == request);
    CHECK(pair.b.find(Kind::kReceived)->bytes == bytes);
    CHECK(pair.a.find(Kind::kWriteDone)->request == request * 10);
    CHECK(std::equal(begin, begin + bytes, memory.begin() + 13));
    CHECK(std::all_of(memory.begin(), memory.begin() + 13,
                      [](std::byte b) { return b == std::byte{0xee}; }));
    CHECK(std::all_of(memory.begin() + 13 + static_cast<ptrdiff_t>(bytes), memory.end(),
                      [](std::byte b) { return b == std::byte{0xee}; }));
    CHECK(pair.a.endpoint().outstanding() == 0);
  }
  CHECK(pair.a.endpoint().bytes_sent() == pair.b.endpoint().bytes_received());
}

TRANSPORT_TEST("writes arrive in the order posted, in both directions at once") {
  Pair pair(transport);
  constexpr uint32_t kWrites = 500;
  constexpr size_t kBytes = 3000;
  auto source = pattern(kBytes * kWrites, 1);
  std::vector<std::byte> at_a(source.size()), at_b(source.size());
  const auto from_a = pair.a.region(source), from_b = pair.b.region(source);
  const auto to_a = pair.a.region(at_a, Access::kRemoteWrite),
             to_b = pair.b.region(at_b, Access::kRemoteWrite);
  for (uint32_t i = 0; i < kWrites; ++i) {
    const size_t offset = i * kBytes;
    const Slice slice_a{from_a.get(), source.data() + offset, kBytes},
        slice_b{from_b.get(), source.data() + offset, kBytes};
    REQUIRE(pair.a.endpoint().write({&slice_a, 1}, target(*to_b, offset), i, i).ok());
    REQUIRE(pair.b.endpoint().write({&slice_b, 1}, target(*to_a, offset), i, i).ok());
  }
  REQUIRE(pair.turn([&] {
    return pair.a.count(Kind::kReceived) == kWrites && pair.b.count(Kind::kReceived) == kWrites &&
           pair.a.count(Kind::kWriteDone) == kWrites && pair.b.count(Kind::kWriteDone) == kWrites;
  }));
  for (const Side* side : {&pair.a, &pair.b}) {
    uint32_t received = 0, done = 0;
    bool ordered = true;
    for (const Event& event : side->events) {
      if (event.kind == Kind::kReceived) ordered &= event.immediate == received++;
      if (event.kind == Kind::kWriteDone) ordered &= event.request == done++;
    }
    CHECK(ordered);
  }
  CHECK(at_a == source);
  CHECK(at_b == source);
}

TRANSPORT_TEST("credits run out, stop the writer, and come back when the receiver releases") {
  for (const uint32_t depth : {1u, 2u, 5u, 16u}) {
    CAPTURE(depth);
    Options shallow;
    shallow.receive_depth = depth;
    Pair pair(transport, {}, shallow);
    const uint32_t most = depth * testing::links();
    CHECK(pair.a.endpoint().credits() == most);
    for (uint32_t i = 0; i < most; ++i) REQUIRE(pair.a.endpoint().write({}, {}, i, i).ok());
    CHECK(pair.a.endpoint().credits() == 0);
    CHECK(pair.a.endpoint().write({}, {}, 77, 77).code() == Code::kResource);
    REQUIRE(pair.turn([&] { return pair.b.count(Kind::kReceived) == most; }));
    CHECK(pair.a.count(Kind::kCredits) == 0);
    // Whoever keeps all but one must still let the writer go on by that one.
    pair.b.endpoint().release(1);
    REQUIRE(pair.turn([&] { return pair.a.count(Kind::kCredits) == 1; }));
    CHECK(pair.a.endpoint().credits() == 1);
    for (uint32_t i = 0; i < 100; ++i) {
      const size_t before = pair.b.count(Kind::kReceived);
      REQUIRE(pair.turn([&] { return pair.a.endpoint().credits() > 0; }));
      REQUIRE(pair.a.endpoint().write({}, {}, i, i).ok());
      REQUIRE(pair.turn([&] { return pair.b.count(Kind::kReceived) > before; }));
      pair.b.endpoint().release(1);
    }
    CHECK(pair.a.count(Kind::kDisconnected) == 0);
  }
}

TRANSPORT_TEST("credits come back with writes of the other direction too") {
  Options shallow;
  shallow.receive_depth = 4;
  Pair pair(transport, shallow, shallow);
  for (uint32_t i = 0; i < 200; ++i) {
    pair.a.events.clear();
    pair.b.events.clear();
    REQUIRE(pair.turn([&] { return pair.a.endpoint().credits() > 0; }));
    REQUIRE(pair.a.endpoint().write({}, {}, i, i).ok());
    REQUIRE(pair.turn([&] { return pair.b.count(Kind::kReceived) == 1; }));
    pair.b.endpoint().release(1);
    REQUIRE(pair.b.endpoint().write({}, {}, i, i).ok());
    REQUIRE(pair.turn([&] { return pair.a.count(Kind::kReceived) == 1; }));
    pair.a.endpoint().release(1);
  }
}

TRANSPORT_TEST("a peer that dies is reported once, with its address") {
  Pair pair(transport);
  pair.b.fabric.reset();
  REQUIRE(turn({&pair.a}, [&] { return pair.a.count(Kind::kDisconnected) == 1; }));
  const Event* event = pair.a.find(Kind::kDisconnected);
  CHECK(event->status.code() == Code::kUnavailable);
  CHECK(event->status.message().find(pair.address) != std::string::npos);
  CHECK(pair.a.fabric->endpoint(pair.a.id) == nullptr);
}

TRANSPORT_TEST("a peer that dies under traffic is reported to the writer") {
  Pair pair(transport);
  auto source = pattern(8 << 20, 1);
  std::vector<std::byte> memory(source.size());
  const auto from = pair.a.region(source);
  const auto to = pair.b.region(memory, Access::kRemoteWrite);
  const Slice slice{from.get(), source.data(), source.size()};
  for (uint32_t i = 0; i < 4; ++i)
    REQUIRE(pair.a.endpoint().write({&slice, 1}, target(*to), i, i).ok());
  pair.b.fabric.reset();
  REQUIRE(turn({&pair.a}, [&] { return pair.a.count(Kind::kDisconnected) == 1; }));
  CHECK(pair.a.find(Kind::kDisconnected)->status.code() == Code::kUnavailable);
  CHECK(pair.a.events.back().kind == Kind::kDisconnected);
}

TRANSPORT_TEST("a wrong token is refused, and the refused side is told why") {
  Side a(transport), b(transport);
  auto address = b.fabric->listen(transport.listen, strict);
  REQUIRE(address.ok());
  Hello wrong = hello_of(5);
  wrong.token = bytes_of("fedcba9876543210");
  auto id = a.fabric->connect(address.value(), wrong, 20'000);
  REQUIRE(id.ok());
  REQUIRE(turn({&a, &b}, [&] { return a.count(Kind::kDisconnected) == 1; }));
  CHECK(a.find(Kind::kDisconnected)->status.code() == Code::kPermissionDenied);
  CHECK(a.find(Kind::kDisconnected)->status.message().find("wrong token for worker 5") !=
        std::string::npos);
  CHECK(a.events.size() == 1);
  CHECK(b.events.empty());
}

TRANSPORT_TEST("who is refused for now asks again, and is told why once its time is up") {
  Side a(transport), b(transport);
  int refusals = 2;
  auto address = b.fabric->listen(
      transport.listen, [&](EndpointId id, const Hello& hello) -> Result<std::vector<std::byte>> {
        if (refusals-- > 0) return Status(Code::kUnavailable, "somebody else is about to come");
        return strict(id, hello);
      });
  REQUIRE(address.ok());
  REQUIRE(a.fabric->connect(address.value(), hello_of(1), 20'000).ok());
  REQUIRE(turn({&a, &b}, [&] { return a.count(Kind::kConnected) == 1; }));
  CHECK(refusals == -1);
  CHECK(b.fabric->turned_away() == 2);
  refusals = 1 << 20;
  REQUIRE(a.fabric->connect(address.value(), hello_of(2), 300).ok());
  REQUIRE(turn({&a, &b}, [&] { return a.count(Kind::kDisconnected) == 1; }));
  const Status& status = a.find(Kind::kDisconnected)->status;
  CAPTURE(status.message());
  CHECK(status.code() == Code::kUnavailable);
  CHECK(status.message().find("refused for now: somebody else") != std::string::npos);
  CHECK(status.message().find("could not connect to") != std::string::npos);
}

TRANSPORT_TEST("hellos beyond the bounds, bad addresses and empty memory are refused at once") {
  Side a(transport);
  Hello big = hello_of(0);
  big.job = std::string(65, 'x');
  CHECK(a.fabric->connect("127.0.0.1:1", big, 1000).status().code() == Code::kInvalidArgument);
  big = hello_of(0);
  big.payload.resize(4097);
  CHECK(a.fabric->connect("127.0.0.1:1", big, 1000).status().code() == Code::kInvalidArgument);
  big = hello_of(0);
  big.token.resize(15);
  CHECK(a.fabric->connect("127.0.0.1:1", big, 1000).status().code() == Code::kInvalidArgument);
  for (const char* address : {"", "host", ":1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536",
                              "::1:5", "[::1", "[]:1"}) {
    CAPTURE(address);
    CHECK(a.fabric->connect(address, hello_of(0), 1000).status().code() == Code::kInvalidArgument);
    CHECK(a.fabric->listen(address, strict).status().code() == Code::kInvalidArgument);
  }
  std::byte byte{};
  CHECK(!a.fabric->register_memory(&byte, 0, Access::kLocal).ok());
  CHECK(!a.fabric->register_memory(nullptr, 1, Access::kLocal).ok());
}

TRANSPORT_TEST(
    "a write outside of what the peer granted ends the connection on both sides and touches "
    "nothing") {
  struct Case {
    const char* title;
    size_t bytes;
    std::function<RemoteSlice(const MemoryRegion& granted, const MemoryRegion& local_only)> where;
  };
  const Case cases[] = {
      {"unknown key", 8,
       [](auto& granted, auto&) {
         return RemoteSlice{target(granted).address, {granted.remote_key()[0] + 1}};
       }},
      {"key 0", 8, [](auto& granted, auto&) { return RemoteSlice{target(granted).address, {}}; }},
      {"before the region", 8,
       [](auto& granted, auto&) {
         return RemoteSlice{target(granted).address - 1, granted.remote_key()};
       }},
      {"beyond the region", 8, [](auto& granted, auto&) { return target(granted, 4096 - 7); }},
      {"longer than the region", 8192, [](auto& granted, auto&) { return target(granted); }},
      {"address that overflows", 8,
       [](auto& granted, auto&) { return RemoteSlice{UINT64_MAX - 3, granted.remote_key()}; }},
      {"region for reading only", 8, [](auto&, auto& other) { return target(other); }},
  };
  for (const Case& wrong : cases) {
    CAPTURE(wrong.title);
    Pair pair(transport);
    auto source = pattern(8192, 1);
    std::vector<std::byte> memory(4096), other(4096);
    const auto from = pair.a.region(source);
    const auto to = pair.b.region(memory, Access::kRemoteWrite);
    const auto readable = pair.b.region(other, Access::kRemoteRead);
    const Slice slice{from.get(), source.data(), wrong.bytes};
    REQUIRE(pair.a.endpoint().write({&slice, 1}, wrong.where(*to, *readable), 1, 1).ok());
    REQUIRE(pair.turn([&] {
      return pair.a.count(Kind::kDisconnected) == 1 && pair.b.count(Kind::kDisconnected) == 1;
    }));
    // Over verbs the device refuses it, and may tell the writer alone; the other hears it from
    // there.
    CAPTURE(pair.a.find(Kind::kDisconnected)->status.message());
    CAPTURE(pair.b.find(Kind::kDisconnected)->status.message());
    CHECK(pair.a.find(Kind::kDisconnected)->status.code() == Code::kProtocol);
    CHECK(pair.b.find(Kind::kDisconnected)->status.code() == Code::kProtocol);
    CHECK(pair.b.count(Kind::kReceived) == 0);
    CHECK(memory == std::vector<std::byte>(4096));
    CHECK(other == std::vector<std::byte>(4096));
  }
}

TRANSPORT_TEST("slices that leave their region, or are too many, are refused at once") {
  Pair pair(transport);
  std::vector<std::byte> source(64);
  const auto from = pair.a.region(source);
  const Slice beyond{from.get(), source.data() + 1, 64};
  const Slice nowhere{nullptr, source.data(), 1};
  const std::vector<Slice> many(Endpoint::kMaxSlices + 1, Slice{from.get(), source.data(), 1});
  CHECK(pair.a.endpoint().write({&beyond, 1}, {}, 1, 1).code() == Code::kInvalidArgument);
  CHECK(pair.a.endpoint().write({&nowhere, 1}, {}, 1, 1).code() == Code::kInvalidArgument);
  CHECK(pair.a.endpoint().write(many, {}, 1, 1).code() == Code::kInvalidArgument);
  CHECK(pair.a.endpoint().credits() ==
        testing::links() * std::min(Options{}.receive_depth, transport.max_depth));
}

TEST_CASE("tcp: memory withdrawn while a write into it arrives is not touched again") {
  Pair pair(kTcp);
  auto source = pattern(32 << 20, 1);
  auto memory = std::make_unique<std::vector<std::byte>>(source.size());
  const auto from = pair.a.region(source);
  auto to = pair.b.region(*memory, Access::kRemoteWrite);
  const Slice slice{from.get(), source.data(), source.size()};
  REQUIRE(pair.a.endpoint().write({&slice, 1}, target(*to), 1, 1).ok());
  REQUIRE(pair.turn([&] { return pair.b.endpoint().bytes_received() > 0; }));
  REQUIRE(pair.b.count(Kind::kReceived) == 0);
  to.reset();
  memory.reset();  // a later byte into it would be a use after free
  REQUIRE(pair.turn([&] {
    return pair.b.count(Kind::kDisconnected) == 1 && pair.a.count(Kind::kDisconnected) == 1;
  }));
  CHECK(pair.b.find(Kind::kDisconnected)->status.code() == Code::kProtocol);
}

TRANSPORT_TEST("a withdrawn key does not come back") {
  Side a(transport);
  std::vector<std::byte> memory(64);
  std::vector<uint32_t> keys;
  for (int i = 0; i < 100; ++i)  // of a million such runs one may draw a key twice
    keys.push_back(a.region(memory, Access::kRemoteWrite)->remote_key()[0]);
  std::sort(keys.begin(), keys.end());
  CHECK(std::adjacent_find(keys.begin(), keys.end()) == keys.end());
}

TEST_CASE("tcp: keys say nothing of those that come before or after") {
  Side a(kTcp);
  std::vector<std::byte> memory(64);
  std::vector<std::unique_ptr<MemoryRegion>> regions;
  for (int i = 0; i < 200; ++i) regions.push_back(a.region(memory, Access::kRemoteWrite));
  std::vector<uint32_t> steps;
  for (size_t i = 1; i < regions.size(); ++i)
    steps.push_back(regions[i]->remote_key()[0] - regions[i - 1]->remote_key()[0]);
  std::sort(steps.begin(), steps.end());
  const auto same = std::unique(steps.begin(), steps.end());
  CHECK(std::distance(steps.begin(), same) > 190);
}

TRANSPORT_TEST("a region may outlive its fabric") {
  std::vector<std::byte> memory(64);
  std::unique_ptr<MemoryRegion> region;
  {
    Side a(transport);
    region = a.region(memory, Access::kRemoteWrite);
  }
  region.reset();
}

namespace {

/// A port that refuses, and that no other process is given meanwhile: bound, and not listened at.
struct Closed {
  explicit Closed(const std::string& listen) {
    const std::string host = listen.substr(0, listen.rfind(':'));
    sockaddr_in name{};
    name.sin_family = AF_INET;
    REQUIRE(inet_pton(AF_INET, host.c_str(), &name.sin_addr) == 1);
    const int yes = 1;  // so that a fabric can still listen there
    REQUIRE(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) == 0);
    REQUIRE(bind(fd, reinterpret_cast<sockaddr*>(&name), sizeof(name)) == 0);
    socklen_t length = sizeof(name);
    REQUIRE(getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length) == 0);
    address = host + ":" + std::to_string(ntohs(name.sin_port));
  }
  Closed(const Closed&) = delete;
  Closed& operator=(const Closed&) = delete;
  ~Closed() { close(fd); }

  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::string address;
};

}  // namespace

TRANSPORT_TEST("a peer that does not listen yet is waited for") {
  const Closed closed(transport.listen);
  const std::string& address = closed.address;
  Side a(transport), b(transport);
  a.id = a.fabric->connect(address, hello_of(0), 20'000).value();
  const auto until = Clock::now() + std::chrono::milliseconds(60);
  REQUIRE(turn({&a}, [&] { return Clock::now() > until; }));
  CHECK(a.events.empty());
  REQUIRE(b.fabric->listen(address, strict).ok());
  REQUIRE(turn({&a, &b},
               [&] { return a.count(Kind::kConnected) == 1 && b.count(Kind::kConnected) == 1; }));
}

TRANSPORT_TEST("a peer that never listens is given up in time, with the reason") {
  const Closed closed(transport.listen);
  const std::string& address = closed.address;
  Side a(transport);
  const auto began = Clock::now();
  REQUIRE(a.fabric->connect(address, hello_of(0), 100).ok());
  REQUIRE(turn({&a}, [&] { return a.count(Kind::kDisconnected) == 1; }));
  CHECK(Clock::now() - began >= std::chrono::milliseconds(100));
  CHECK(Clock::now() - began < std::chrono::seconds(5));
  const Status& status = a.find(Kind::kDisconnected)->status;
  CHECK(status.code() == Code::kUnavailable);
  CHECK(status.message().find(address) != std::string::npos);
  CHECK(status.message().find("refused") != std::string::npos);
  CHECK(a.events.size() == 1);
}

TRANSPORT_TEST("close with flush delivers everything posted, and the reason") {
  Options options;
  options.close_timeout_ms = 20'000;  // an emulated machine moves so much in a second or two
  Pair pair(transport, options);
  auto source = pattern(20 << 20, 9);
  std::vector<std::byte> memory(source.size());
  const auto from = pair.a.region(source);
  const auto to = pair.b.region(memory, Access::kRemoteWrite);
  const Slice slice{from.get(), source.data(), source.size()};
  REQUIRE(pair.a.endpoint().write({&slice, 1}, target(*to), 1, 1).ok());
  // The other direction is busy too, and nobody will read it.
  std::vector<std::byte> back_memory(source.size());
  const auto back_to = pair.a.region(back_memory, Access::kRemoteWrite);
  const auto back_from = pair.b.region(source);
  const Slice back{back_from.get(), source.data(), source.size()};
  REQUIRE(pair.b.endpoint().write({&back, 1}, target(*back_to), 1, 1).ok());
  pair.a.endpoint().close({Code::kCancelled, "session closed"}, /*flush=*/true);
  pair.a.endpoint().close({Code::kInternal, "twice"}, /*flush=*/true);
  CHECK(!pair.a.endpoint().write({}, {}, 2, 2).ok());
  REQUIRE(pair.turn([&] {
    return pair.a.count(Kind::kDisconnected) == 1 && pair.b.count(Kind::kDisconnected) == 1;
  }));
  CHECK(pair.a.count(Kind::kWriteDone) == 1);
  CHECK(pair.a.find(Kind::kDisconnected)->status.message() == "session closed");
  CHECK(pair.b.count(Kind::kReceived) == 1);
  CHECK(memory == source);
  CHECK(pair.b.find(Kind::kDisconnected)->status.code() == Code::kUnavailable);
  CHECK(pair.b.find(Kind::kDisconnected)->status.message().find("session closed") !=
        std::string::npos);
}

TRANSPORT_TEST("close with flush gives up on a peer that does not read") {
  Options hasty;
  hasty.close_timeout_ms = 50;
  Pair pair(transport, hasty);
  auto source = pattern(32 << 20, 9);
  std::vector<std::byte> memory(source.size());
  const auto from = pair.a.region(source);
  const auto to = pair.b.region(memory, Access::kRemoteWrite);
  const Slice slice{from.get(), source.data(), source.size()};
  REQUIRE(pair.a.endpoint().write({&slice, 1}, target(*to), 1, 1).ok());
  pair.a.endpoint().close({Code::kCancelled, "enough"}, /*flush=*/true);
  REQUIRE(turn({&pair.a}, [&] { return pair.a.count(Kind::kDisconnected) == 1; }));
  CHECK(pair.a.find(Kind::kDisconnected)->status.message() == "enough");
}

TRANSPORT_TEST("close without flush ends at once, and tells the peer") {
  Pair pair(transport);
  pair.a.endpoint().close({Code::kPeerFailed, "server 2 failed"}, /*flush=*/false);
  pair.a.fabric->poll(pair.a.events);
  CHECK(pair.a.count(Kind::kDisconnected) == 1);
  CHECK(pair.a.fabric->endpoint(pair.a.id) == nullptr);
  REQUIRE(pair.turn([&] { return pair.b.count(Kind::kDisconnected) == 1; }));
  CHECK(pair.b.find(Kind::kDisconnected)->status.message().find("server 2 failed") !=
        std::string::npos);
}

TRANSPORT_TEST("closing while connecting ends the attempt") {
  Side a(transport);
  a.id = a.fabric->connect("127.0.0.1:1", hello_of(0), 20'000).value();
  CHECK(!a.endpoint().write({}, {}, 1, 1).ok());
  a.endpoint().close({Code::kCancelled, "no more"}, /*flush=*/true);
  a.fabric->poll(a.events);
  REQUIRE(a.events.size() == 1);
  CHECK(a.events[0].status.message() == "no more");
}

TRANSPORT_TEST("a host name is looked up") {
  Side a(transport), b(transport);
  const std::string address = b.fabric->listen("127.0.0.1:0", strict).value();
  a.id = a.fabric->connect("localhost" + address.substr(address.rfind(':')), hello_of(0), 20'000)
             .value();
  REQUIRE(turn({&a, &b}, [&] { return a.count(Kind::kConnected) == 1; }));
}

TRANSPORT_TEST("a wake before or during wait ends it") {
  Side a(transport);
  a.fabric->wake();
  a.fabric->wait(-1);
  std::thread waker([&] { a.fabric->wake(); });
  a.fabric->wait(-1);
  waker.join();
}

TRANSPORT_TEST("a wake is not lost to another thread that polls meanwhile") {
  Side a(transport);
  constexpr uint32_t kWakes = 3000;
  std::atomic<uint32_t> waits{0};
  std::thread sleeper([&] {
    while (waits < kWakes) {
      a.fabric->wait(-1);
      ++waits;
    }
  });
  std::vector<Event> events;
  bool lost = false;
  for (uint32_t seen = 0; seen < kWakes && !lost; seen = waits) {
    a.fabric->wake();
    // What wakes a thread that is about to sleep must not be taken here.
    const auto deadline = Clock::now() + kPatience;
    while (waits == seen && !lost) {
      a.fabric->poll(events);
      lost = Clock::now() >= deadline;
    }
  }
  CHECK(!lost);
  waits = kWakes;
  a.fabric->wake();
  sleeper.join();
}

TRANSPORT_TEST("one thread posts while another waits and polls") {
  Pair pair(transport);
  constexpr uint32_t kWrites = 2000;
  constexpr size_t kBytes = 1000;
  auto source = pattern(kBytes, 1);
  std::vector<std::byte> memory(kBytes);
  const auto from = pair.a.region(source);
  const auto to = pair.b.region(memory, Access::kRemoteWrite);
  const Slice slice{from.get(), source.data(), kBytes};

  std::mutex lock;  // of a's fabric
  std::atomic<uint32_t> done{0};
  std::atomic<bool> stop{false};
  std::thread progress([&] {
    std::vector<Event> events;
    while (!stop) {
      {
        const std::lock_guard held(lock);
        pair.a.fabric->poll(events);
      }
      for (const Event& event : events) done += event.kind == Kind::kWriteDone;
      if (events.empty()) pair.a.fabric->wait(-1);
      events.clear();
    }
  });
  std::atomic<uint32_t> received{0};
  std::thread receiver([&] {
    std::vector<Event> events;
    while (received < kWrites) {
      pair.b.fabric->poll(events);
      for (const Event& event : events) {
        if (event.kind != Kind::kReceived) continue;
        ++received;
        pair.b.endpoint().release(1);
      }
      if (events.empty()) pair.b.fabric->wait(-1);
      events.clear();
    }
  });
  for (uint32_t i = 0; i < kWrites;) {
    const std::lock_guard held(lock);
    if (pair.a.endpoint().credits() == 0) continue;
    if (!pair.a.endpoint().write({&slice, 1}, target(*to), i, i).ok()) break;
    ++i;
  }
  const auto deadline = Clock::now() + kPatience;
  while ((done < kWrites || received < kWrites) && Clock::now() < deadline)
    std::this_thread::yield();
  CHECK(done == kWrites);
  CHECK(received == kWrites);
  stop = true;
  pair.a.fabric->wake();
  progress.join();
  receiver.join();
  CHECK(memory == source);
}

// ---- tcp: addresses, and hostile bytes.

namespace {

/// A peer that speaks bytes, not the protocol. Blocking.
class RawClient {
 public:
  explicit RawClient(const std::string& address) {
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in where{};
    where.sin_family = AF_INET;
    where.sin_port =
        htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(connect(fd_, reinterpret_cast<sockaddr*>(&where), sizeof(where)) == 0);
    const int on = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  ~RawClient() { ::close(fd_); }
  void send(const void* data, size_t bytes) { (void)!::send(fd_, data, bytes, MSG_NOSIGNAL); }
  void send(const std::string& text) { send(text.data(), text.size()); }
  void send(const tcp::FrameHeader& header) { send(&header, sizeof(header)); }
  bool closed_by_peer() {
    char byte[256];
    ssize_t got;
    while ((got = recv(fd_, byte, sizeof(byte), MSG_DONTWAIT)) > 0) {
    }
    return got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
  }

 private:
  int fd_;
};

/// A server, and a raw client that has got through the hello.
struct RawPair {
  Side b;
  std::string address;
  std::unique_ptr<RawClient> client;
  std::vector<std::byte> memory = std::vector<std::byte>(4096);
  std::unique_ptr<MemoryRegion> region;

  explicit RawPair(const Options& options = {}, bool hello = true) : b(kTcp, options) {
    address = b.fabric->listen(kTcp.listen, strict).value();
    region = b.region(memory, Access::kRemoteWrite);
    client = std::make_unique<RawClient>(address);
    if (!hello) return;
    const std::string body = tcp::encode_hello(hello_of(1));
    tcp::FrameHeader header;
    header.type = tcp::FrameType::kHello;
    header.credits = 100;
    header.length = body.size();
    client->send(header);
    client->send(body);
    REQUIRE(turn({&b}, [&] { return b.count(Kind::kConnected) == 1; }));
    b.id = b.find(Kind::kConnected)->endpoint;
  }
  tcp::FrameHeader write_header(uint64_t length) {
    tcp::FrameHeader header;
    header.type = tcp::FrameType::kWrite;
    header.key = region->remote_key()[0];
    header.address = target(*region).address;
    header.length = length;
    return header;
  }
  /// The server still serves others.
  void check_alive() {
    Side a(kTcp);
    REQUIRE(a.fabric->connect(address, hello_of(2), 20'000).ok());
    REQUIRE(turn({&a, &b}, [&] { return a.count(Kind::kConnected) == 1; }));
  }
  void check_violation() {
    REQUIRE(turn({&b}, [&] { return b.count(Kind::kDisconnected) == 1; }));
    CHECK(b.find(Kind::kDisconnected)->status.code() == Code::kProtocol);
    CHECK(memory == std::vector<std::byte>(4096));
    check_alive();
  }
};

}  // namespace

TEST_CASE("tcp: IPv6 works") { Pair pair(kTcp, {}, {}, "[::1]:0"); }

TEST_CASE("tcp: a raw client that keeps to the protocol is served") {
  RawPair pair;
  pair.client->send(pair.write_header(5));
  pair.client->send("hello");
  REQUIRE(turn({&pair.b}, [&] { return pair.b.count(Kind::kReceived) == 1; }));
  CHECK(std::memcmp(pair.memory.data(), "hello", 5) == 0);
}

TEST_CASE("tcp: a frame that comes byte by byte is put together") {
  RawPair pair;
  const tcp::FrameHeader header = pair.write_header(3);
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes += "abc";
  for (const char c : bytes) {
    pair.client->send(&c, 1);
    pair.b.fabric->wait(1000);
    pair.b.fabric->poll(pair.b.events);
  }
  REQUIRE(turn({&pair.b}, [&] { return pair.b.count(Kind::kReceived) == 1; }));
  CHECK(std::memcmp(pair.memory.data(), "abc", 3) == 0);
}

TEST_CASE("tcp: more writes than credits are a violation") {
  Options shallow;
  shallow.receive_depth = 3;
  RawPair pair(shallow);
  for (int i = 0; i < 4; ++i) pair.client->send(pair.write_header(0));
  pair.check_violation();
  CHECK(pair.b.count(Kind::kReceived) == 3);
}

TEST_CASE("tcp: released writes are credits again, and no more than those") {
  Options deep;
  deep.receive_depth = 8;
  RawPair pair(deep);
  for (int i = 0; i < 8; ++i) pair.client->send(pair.write_header(0));
  REQUIRE(turn({&pair.b}, [&] { return pair.b.count(Kind::kReceived) == 8; }));
  pair.b.endpoint().release(8);
  for (int i = 0; i < 9; ++i) pair.client->send(pair.write_header(0));
  pair.check_violation();
  CHECK(pair.b.count(Kind::kReceived) == 16);
}

TEST_CASE("tcp: frames that break the protocol end the connection, not the process") {
  struct Case {
    const char* title;
    std::function<void(tcp::FrameHeader&)> spoil;
  };
  const Case cases[] = {
      {"wrong magic", [](auto& h) { h.magic ^= 1; }},
      {"unknown type", [](auto& h) { h.type = static_cast<tcp::FrameType>(200); }},
      {"type 0", [](auto& h) { h.type = static_cast<tcp::FrameType>(0); }},
      {"second hello", [](auto& h) { h.type = tcp::FrameType::kHello; }},
      {"hello reply", [](auto& h) { h.type = tcp::FrameType::kHelloReply; }},
      {"reserved bytes", [](auto& h) { h.reserved0[2] = 1; }},
      {"reserved word", [](auto& h) { h.reserved1 = 1; }},
      {"huge length", [](auto& h) { h.length = UINT64_MAX; }},
      {"length beyond the region", [](auto& h) { h.length = 4097; }},
      {"length that wraps around", [](auto& h) { h.length = UINT64_MAX - h.address + 1; }},
      {"close of a gigabyte",
       [](auto& h) {
         h.type = tcp::FrameType::kClose;
         h.length = 1 << 30;
       }},
      {"credit with a body",
       [](auto& h) {
         h.type = tcp::FrameType::kCredit;
         h.length = 8;
       }},
      {"credits beyond the depth", [](auto& h) { h.credits = 1; }},
      {"credits that overflow", [](auto& h) { h.credits = UINT32_MAX; }},
  };
  for (const Case& wrong : cases) {
    CAPTURE(wrong.title);
    RawPair pair;
    tcp::FrameHeader header = pair.write_header(16);
    wrong.spoil(header);
    pair.client->send(header);
    pair.client->send(std::string(64, 'x'));
    pair.check_violation();
    REQUIRE(turn({&pair.b}, [&] { return pair.client->closed_by_peer(); }));
  }
}

TEST_CASE("tcp: a peer is believed to receive so many writes, and no more") {
  RawPair pair({}, /*hello=*/false);
  const auto say_hello = [](RawClient& client, uint32_t credits) {
    const std::string body = tcp::encode_hello(hello_of(1));
    tcp::FrameHeader header;
    header.type = tcp::FrameType::kHello;
    header.credits = credits;
    header.length = body.size();
    client.send(header);
    client.send(body);
  };
  for (const uint32_t credits : {0u, kMaxReceiveDepth + 1, UINT32_MAX}) {
    RawClient greedy(pair.address);
    say_hello(greedy, credits);
    REQUIRE(turn({&pair.b}, [&] { return greedy.closed_by_peer(); }));
  }
  CHECK(pair.b.events.empty());
  CHECK(pair.b.fabric->turned_away() == 3);
  say_hello(*pair.client, kMaxReceiveDepth);
  REQUIRE(turn({&pair.b}, [&] { return pair.b.count(Kind::kConnected) == 1; }));
  pair.b.id = pair.b.find(Kind::kConnected)->endpoint;
  CHECK(pair.b.endpoint().credits() == kMaxReceiveDepth);
  // What it took may be given back to the last, and nothing beyond that.
  for (uint32_t i = 0; i < kMaxReceiveDepth; ++i)
    REQUIRE(pair.b.endpoint().write({}, {}, i & 0xff, i).ok());
  CHECK(pair.b.endpoint().write({}, {}, 0, 0).code() == Code::kResource);
  tcp::FrameHeader credit;
  credit.credits = kMaxReceiveDepth;
  pair.client->send(credit);
  REQUIRE(turn({&pair.b}, [&] {
    pair.client->closed_by_peer();  // takes what was written
    return pair.b.endpoint().credits() == kMaxReceiveDepth;
  }));
  credit.credits = 1;
  pair.client->send(credit);
  pair.check_violation();
}

TEST_CASE("tcp: a frame cut off in the middle is a lost connection") {
  RawPair pair;
  SUBCASE("in the header") {
    const auto header = pair.write_header(100);
    pair.client->send(&header, 17);
  }
  SUBCASE("in the body") {
    pair.client->send(pair.write_header(100));
    pair.client->send(std::string(50, 'x'));
  }
  CHECK(!pair.client->closed_by_peer());  // takes the hello reply: unread, it would turn the end
                                          // into a reset
  pair.client.reset();
  REQUIRE(turn({&pair.b}, [&] { return pair.b.count(Kind::kDisconnected) == 1; }));
  CHECK(pair.b.find(Kind::kDisconnected)->status.code() == Code::kUnavailable);
  CHECK(pair.b.find(Kind::kDisconnected)->status.message().find("middle of a frame") !=
        std::string::npos);
  CHECK(pair.b.count(Kind::kReceived) == 0);
  pair.check_alive();
}

TEST_CASE("tcp: strangers are turned away without a trace") {
  RawPair pair({}, /*hello=*/false);
  std::vector<std::string> openings{"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n",
                                    std::string(4096, '\0'), std::string(4096, '\xff')};
  tcp::FrameHeader header;
  header.type = tcp::FrameType::kWrite;
  openings.emplace_back(reinterpret_cast<const char*>(&header), sizeof(header));
  header.type = tcp::FrameType::kHello;
  header.length = uint64_t{1} << 40;
  openings.emplace_back(reinterpret_cast<const char*>(&header), sizeof(header));
  header.length = 0;
  openings.emplace_back(reinterpret_cast<const char*>(&header), sizeof(header));
  // Hellos whose inner lengths lie.
  for (size_t at = 8; at < 24; ++at) {
    std::string body = tcp::encode_hello(hello_of(1));
    body[at] = static_cast<char>(body[at] ^ 0x55);
    if (at < 14) body.pop_back();
    header.length = body.size();
    header.credits = 10;
    std::string opening(reinterpret_cast<const char*>(&header), sizeof(header));
    if (at < 20) openings.push_back(opening + body);
  }
  for (const std::string& opening : openings) {
    RawClient stranger(pair.address);
    stranger.send(opening);
    REQUIRE(turn({&pair.b}, [&] { return stranger.closed_by_peer(); }));
  }
  CHECK(pair.b.events.empty());
  // The silent one of `pair` is still awaited.
  CHECK(pair.b.fabric->turned_away() == openings.size());
  pair.check_alive();
}

TEST_CASE("tcp: random bytes after a good hello never crash") {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    CAPTURE(seed);
    RawPair pair;
    auto noise = pattern(200, seed);
    tcp::FrameHeader header = pair.write_header(16);
    // Half of the time the noise begins like a frame.
    if (seed % 2 == 0) std::memcpy(noise.data(), &header, 8 + seed % 32);
    pair.client->send(noise.data(), noise.size());
    pair.client.reset();
    REQUIRE(turn({&pair.b}, [&] { return pair.b.count(Kind::kDisconnected) == 1; }));
  }
}

TEST_CASE("tcp: a hello that does not come in time is dropped") {
  Options hasty;
  hasty.hello_timeout_ms = 50;
  RawPair pair(hasty, /*hello=*/false);
  SUBCASE("nothing") {}
  SUBCASE("half of it") {
    tcp::FrameHeader header;
    header.type = tcp::FrameType::kHello;
    header.length = 100;
    pair.client->send(header);
    pair.client->send("some");
  }
  REQUIRE(turn({&pair.b}, [&] { return pair.client->closed_by_peer(); }));
  CHECK(pair.b.events.empty());
  CHECK(pair.b.fabric->turned_away() == 1);
  pair.check_alive();
  CHECK(pair.b.fabric->turned_away() == 1);
}

TEST_CASE(
    "tcp: silent strangers beyond the bound are refused, and ours get in when they are gone") {
  Options narrow;
  narrow.max_pending_hellos = 2;
  narrow.hello_timeout_ms = 200;
  Side b(kTcp, narrow), a(kTcp);
  const std::string address = b.fabric->listen(kTcp.listen, strict).value();
  RawClient first(address), second(address), third(address);
  REQUIRE(turn({&b}, [&] { return third.closed_by_peer(); }));
  CHECK(!first.closed_by_peer());
  CHECK(b.fabric->turned_away() == 1);
  REQUIRE(a.fabric->connect(address, hello_of(0), 20'000).ok());
  REQUIRE(turn({&a, &b}, [&] { return a.count(Kind::kConnected) == 1; }));
}

TEST_CASE(
    "tcp: without descriptors left, a listener waits instead of spinning, and goes on later") {
  Side b(kTcp), a(kTcp);
  const std::string address = b.fabric->listen(kTcp.listen, strict).value();
  RawClient early(address);
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  rlimit none = before;
  none.rlim_cur = 3;
  REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
  int polls = 0;
  const auto until = Clock::now() + std::chrono::milliseconds(50);
  while (Clock::now() < until) {
    b.fabric->poll(b.events);
    b.fabric->wait(
        static_cast<int>(
            std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count()) +
        1);
    ++polls;
  }
  REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(polls < 20);
  REQUIRE(a.fabric->connect(address, hello_of(0), 20'000).ok());
  REQUIRE(turn({&a, &b}, [&] { return a.count(Kind::kConnected) == 1; }));
}

TEST_CASE("tcp: something that listens but does not speak the protocol is named") {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(bind(listener, reinterpret_cast<sockaddr*>(&where), sizeof(where)) == 0);
  REQUIRE(listen(listener, 8) == 0);
  socklen_t bytes = sizeof(where);
  getsockname(listener, reinterpret_cast<sockaddr*>(&where), &bytes);
  const std::string address = "127.0.0.1:" + std::to_string(ntohs(where.sin_port));

  Side a(kTcp);
  Code expected = Code::kUnavailable;
  std::string text;
  int accepted = -1;
  SUBCASE("silent") {
    text = "did not answer the hello";
    REQUIRE(a.fabric->connect(address, hello_of(0), 200).ok());
  }
  SUBCASE("babbling") {
    expected = Code::kProtocol;
    text = "no frame of this version";
    REQUIRE(a.fabric->connect(address, hello_of(0), 20'000).ok());
    accepted = accept(listener, nullptr, nullptr);
    const std::string reply = "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
    (void)!send(accepted, reply.data(), reply.size(), MSG_NOSIGNAL);
  }
  REQUIRE(turn({&a}, [&] { return a.count(Kind::kDisconnected) == 1; }));
  CHECK(a.find(Kind::kDisconnected)->status.code() == expected);
  CHECK(a.find(Kind::kDisconnected)->status.message().find(text) != std::string::npos);
  if (accepted >= 0) close(accepted);
  close(listener);
}
