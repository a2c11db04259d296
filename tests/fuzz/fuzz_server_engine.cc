/* tests/fuzz/fuzz_server_engine.cc: a server's engine against a worker, or a follower, that was let
   in and says whatever it likes. The server disconnects it, says so, and serves on; what Python
   does in jaxrdma/server.py is done here too. */
#include <memory>
#include <string>
#include <vector>

#include "engine/server.h"
#include "engine/wire.h"
#include "flow.h"
#include "input.h"
#include "raw.h"

using namespace jaxrdma;
using fuzz::flow;
using fuzz::Input;
using fuzz::kElements;
using fuzz::require;
namespace tcp = jaxrdma::fabric::tcp;

namespace {

constexpr uint64_t kIncarnation = 77;
constexpr uint16_t kAverage = 0, kUpdate = 1, kHeld = 2, kShow = 3, kSync = 4, kAsync = 5;
constexpr uint32_t kColumns = 2;
constexpr size_t kPartitionBytes = 64;  // 4 rows to a message

const std::vector<std::byte> kToken(fabric::Hello::kTokenBytes, std::byte{1});

TableSpec table(uint16_t id, RowPolicy policy, RowRule rule) {
  TableSpec spec;
  spec.id = id;
  spec.name = "table";
  spec.rows = 21;
  spec.columns = kColumns;
  spec.policy = policy;
  spec.optimizer.rule = rule;
  return spec;
}

std::shared_ptr<ServerEngine> make_server(uint32_t workers, bool ordered, uint32_t threads) {
  ServerOptions options;
  options.workers = workers;
  options.job = "job";
  options.listen = fuzz::free_address();
  options.partition_bytes = kPartitionBytes;
  options.slots_per_worker = 4;
  options.ordered = ordered;
  options.reduce_threads = threads;
  auto server = std::move(ServerEngine::create(options).value());
  for (uint32_t worker = 0; worker < workers; ++worker)
    require(server->admit(worker, kIncarnation, kToken).ok(), "a worker is admitted");
  require(server->admit_follower(0, kIncarnation, kToken).ok(), "a follower is admitted");
  for (const FlowSpec& spec : {flow(kAverage, FlowMode::kAverage, DType::kFloat32),
                               flow(kUpdate, FlowMode::kUpdate, DType::kFloat32),
                               flow(kHeld, FlowMode::kUpdate, DType::kBFloat16, 2),
                               flow(kShow, FlowMode::kShow, DType::kFloat64)}) {
    require(server->add_flow(spec).ok(), "a flow is added");
  }
  for (const TableSpec& spec : {table(kSync, RowPolicy::kSync, RowRule::kAdam),
                                table(kAsync, RowPolicy::kAsync, RowRule::kAdagrad)}) {
    require(server->add_table(spec).ok(), "a table is added");
  }
  return server;
}

/// As the server's Python and its coordinator would, or nearly: `drops` some gradients.
void act(ServerEngine& server, const ServerEvent& event, bool drops, int64_t& made) {
  using Kind = ServerEvent::Kind;
  if (event.kind == Kind::kInitialised) {
    (void)server.publish(event.flow, event.step);
  } else if (event.kind == Kind::kStepReady) {
    (void)server.publish(event.flow, event.step + (event.flow == kShow ? 0 : 1));
  } else if (event.kind == Kind::kGradient) {
    if (drops) {
      (void)server.drop(event.flow, event.gradient);
      (void)server.answer(event.flow, event.gradient, event.step, false);
    } else if (server.aggregate(event.flow, made, {event.gradient}).ok()) {
      (void)server.answer(event.flow, event.gradient, ++made, true);
    }
  }
}

/// Where the server lets it write.
struct Grant {
  wire::LandingGrant at;
  uint64_t incarnation;
};

/// The frame that writes `body` into the next slot, mostly.
std::string written(Input& input, const Grant& grant, uint32_t& slot, const std::string& body) {
  slot = input.take<uint8_t>() % 4 == 3 ? input.take<uint8_t>() % 4 : (slot + 1) % 4;
  tcp::FrameHeader frame;
  frame.type = tcp::FrameType::kWrite;
  frame.credits = input.mostly<uint32_t>(0);
  frame.immediate = input.mostly<uint32_t>(slot);
  frame.key = grant.at.key[0];
  frame.address = grant.at.address + slot * grant.at.slot_stride;
  frame.length = body.size();
  return fuzz::text_of(frame) + body;
}

/// Rows of a table.
std::string row_request(Input& input, const Grant& grant, uint32_t& slot) {
  wire::Header header{};
  header.magic = input.mostly<uint32_t>(wire::kHeaderMagic);
  header.flow = input.mostly<uint16_t>(kSync + input.take<uint8_t>() % 2);
  header.kind = static_cast<wire::Kind>(input.mostly<uint8_t>(8 + input.take<uint8_t>() % 2));
  header.dtype = input.mostly<uint8_t>(0);
  header.reply_tag = input.mostly<uint32_t>(input.take<uint8_t>());
  header.step = input.pick<int64_t>({0, 0, 0, 1, 2, INT64_MAX, -1, input.take<int64_t>()});
  header.incarnation = grant.incarnation;
  header.reply_address = input.take<uint64_t>();
  wire::Rows rows{};
  rows.chunks = input.mostly<uint32_t>(1 + input.take<uint8_t>() % 6);
  header.partition = input.mostly<uint32_t>(input.take<uint8_t>() % 6);
  const bool last = header.partition + 1 == rows.chunks;
  const uint32_t count = last ? input.take<uint8_t>() % 5 : 4;
  rows.count = input.mostly<uint32_t>(count);
  std::string body = fuzz::text_of(rows);
  uint32_t row = 0;
  for (uint32_t i = 0; i < count; ++i) {
    body += fuzz::text_of(input.mostly<uint32_t>(row));
    row += 1 + input.take<uint8_t>() % 4;
  }
  if (header.kind == wire::Kind::kPushRows) {
    const size_t bytes = body.size() + count * kColumns * sizeof(float);
    body += input.text(bytes - body.size());
    body.resize(bytes);
  }
  header.bytes = input.mostly<uint64_t>(body.size());
  return written(input, grant, slot, fuzz::text_of(header) + body);
}

std::string request(Input& input, const Grant& grant, uint32_t& slot) {
  wire::Header header{};
  header.magic = input.mostly<uint32_t>(wire::kHeaderMagic);
  header.flow = input.mostly<uint16_t>(input.take<uint8_t>() % 4);
  header.kind = static_cast<wire::Kind>(input.mostly<uint8_t>(1 + input.take<uint8_t>() % 7));
  header.dtype = input.mostly<uint8_t>(header.flow == kHeld ? 3 : header.flow == kShow ? 1 : 0);
  header.partition = input.mostly<uint32_t>(input.take<uint8_t>() % 2);
  header.reply_tag = input.mostly<uint32_t>(input.take<uint8_t>());
  header.step = input.pick<int64_t>(
      {0, 0, 0, 1, 2, INT64_MAX, INT64_MIN, -1, int64_t{1} << 62, input.take<int64_t>()});
  header.incarnation = input.mostly<uint64_t>(grant.incarnation);
  header.reply_address = input.take<uint64_t>();
  header.reply_key[0] = input.take<uint32_t>();
  const bool carries = header.kind == wire::Kind::kPush || header.kind == wire::Kind::kInit;
  const size_t bytes = carries ? kElements * (header.dtype == 3   ? 2
                                              : header.dtype == 1 ? 8
                                                                  : 4)
                               : 0;
  header.bytes = input.mostly<uint64_t>(bytes);
  std::string body = fuzz::text_of(header) + input.text(bytes);
  body.resize(input.take<uint8_t>() % 16 == 15 ? input.take<uint8_t>() : sizeof(header) + bytes);
  return written(input, grant, slot, body);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  Input input(data, bytes);
  const auto bits = input.take<uint8_t>();
  const bool follows = (bits & 1) != 0, published = (bits & 2) != 0, drops = (bits & 4) != 0;
  const bool tables = (bits & 64) != 0;
  auto server = make_server(1 + ((bits & 8) >> 3), (bits & 16) != 0, (bits & 32) >> 5);
  int64_t made = 0;
  if (published) {
    for (const uint16_t id : {kUpdate, kHeld, kShow}) (void)server->publish(id, 0);
  }

  fuzz::Socket peer = fuzz::Socket::connect(server->address());
  fabric::Hello hello;
  hello.job = "job";
  hello.protocol_version = wire::kProtocolVersion;
  hello.worker = follows ? wire::kFirstFollower : 0;
  hello.incarnation = kIncarnation;
  hello.token = kToken;
  // How many answers it takes without saying that it can take more.
  const uint32_t credits = input.pick<uint32_t>({100, 1, 3});
  peer.send(fuzz::frame(tcp::FrameType::kHello, tcp::encode_hello(hello), credits));
  const auto reply = peer.receive(10'000);
  require(reply.has_value() && reply->header.immediate == 0, "it is let in");
  const auto welcome = tcp::decode_hello(fuzz::bytes_of(reply->body));
  Grant grant{{}, kIncarnation};
  require(welcome.ok() && welcome.value().payload.size() == sizeof(grant.at), "a grant");
  std::memcpy(&grant.at, welcome.value().payload.data(), sizeof(grant.at));

  uint32_t slot = 3;
  for (size_t said = 0; input.more() && said < fuzz::kMostBytes;) {
    const bool rows = tables && input.take<uint8_t>() % 4 != 0;
    const std::string frame = (rows ? row_request : request)(input, grant, slot);
    peer.send(frame);
    said += frame.size();
  }
  peer.end();
  fuzz::until("the server sees the end", [&] {
    for (ServerEvent event = server->wait_event(0); event.kind != ServerEvent::Kind::kNone;
         event = server->wait_event(0)) {
      act(*server, event, drops, made);
    }
    if (peer.closed()) return true;
    peer.wait(1);
    return false;
  });

  // Whoever comes next is served.
  fuzz::Socket next = fuzz::Socket::connect(server->address());
  hello.worker = wire::kFirstFollower;
  next.send(fuzz::frame(tcp::FrameType::kHello, tcp::encode_hello(hello), 4));
  require(next.receive(10'000).has_value(), "the server answers the next");
  server->close();
  return 0;
}
