/* tests/fuzz/fuzz_worker_engine.cc: a worker's engine against a server that answers whatever it
   likes. Every operation ends, with what was asked for or a reason, and nothing is written where it
   was not asked for. */
#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "engine/wire.h"
#include "engine/worker.h"
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

constexpr uint32_t kRows = 3, kColumns = 4;  // in one message
constexpr int kAnswerMs = 3;                 // for a request that may never come

TableSpec table(uint16_t id, bool sync) {
  TableSpec spec;
  spec.id = id;
  spec.name = "table";
  spec.rows = 9;
  spec.columns = kColumns;
  spec.policy = sync ? RowPolicy::kSync : RowPolicy::kAsync;
  return spec;
}

/// The server. Runs on a thread of its own, since `connect` waits for it.
void serve(fuzz::Listener& listener, Input input) {
  fuzz::Socket worker = listener.accept();
  if (!worker.receive(10'000).has_value()) return;
  fabric::Hello hello;
  hello.job = "job";
  wire::LandingGrant grant{};
  grant.address = input.mostly<uint64_t>(1 << 20);
  grant.slot_stride = input.mostly<uint64_t>(sizeof(wire::Header) + 64);
  // Its memory is the worker's: as many as it takes, and fewer than would only be slow.
  grant.slots = input.pick<uint32_t>({4, 4, 1, 2, 0, uint32_t{1} << 31});
  grant.key[0] = input.mostly<uint32_t>(7);
  std::string payload = fuzz::text_of(grant);
  if (input.take<uint8_t>() % 16 == 15) payload.pop_back();
  hello.payload = fuzz::bytes_of(payload);
  const uint32_t credits = input.pick<uint32_t>({100, 1, 3});
  worker.send(fuzz::frame(tcp::FrameType::kHelloReply, tcp::encode_hello(hello), credits));

  std::vector<wire::Header> asked;
  for (size_t said = 0; input.more() && said < fuzz::kMostBytes;) {
    const auto what = input.take<uint8_t>() % 8;
    if (what == 0 || asked.empty()) {
      const auto frame = worker.receive(kAnswerMs);
      if (!frame.has_value()) break;
      if (frame->body.size() < sizeof(wire::Header)) continue;
      wire::Header header;
      std::memcpy(&header, frame->body.data(), sizeof(header));
      asked.push_back(header);
      continue;
    }
    const wire::Header& to = asked[input.take<uint8_t>() % asked.size()];
    const auto kind = input.pick<uint8_t>({1, 5, 1, 5, 2, 3, 4, input.take<uint8_t>()});
    const uint32_t tag = kind == 2 ? input.take<uint8_t>() % 4 : to.reply_tag;
    size_t bytes = kElements * sizeof(float);
    if (to.kind == wire::Kind::kVerdict) bytes = sizeof(wire::Verdict);
    if (to.kind == wire::Kind::kKeep) bytes = sizeof(wire::Kept);
    if (to.kind == wire::Kind::kPushRows || (kind >= 2 && kind <= 4)) bytes = 0;
    if (to.kind == wire::Kind::kPullRows) bytes = kRows * kColumns * sizeof(float);
    std::string body = input.text(bytes);
    body.resize(input.take<uint8_t>() % 16 == 15 ? input.take<uint8_t>() : bytes);
    tcp::FrameHeader frame;
    frame.type = tcp::FrameType::kWrite;
    frame.credits = input.mostly<uint32_t>(0);
    frame.immediate = input.mostly<uint32_t>(wire::answer(static_cast<wire::Answer>(kind), tag));
    frame.key = input.mostly<uint32_t>(to.reply_key[0]);
    frame.address = input.mostly<uint64_t>(to.reply_address);
    frame.length = body.size();
    const std::string whole = fuzz::text_of(frame) + body;
    worker.send(whole);
    said += whole.size();
  }
  worker.end();
  fuzz::until("the worker closes", [&] {
    worker.wait(1);
    return worker.closed();
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  Input input(data, bytes);
  const auto bits = input.take<uint8_t>();
  const auto kind = static_cast<OperationKind>(
      input.pick({OperationKind::kExchange, OperationKind::kExchange, OperationKind::kInit,
                  OperationKind::kFetch, OperationKind::kFollow, OperationKind::kPush,
                  OperationKind::kPushRows, OperationKind::kPullRows}));
  fuzz::Listener listener;
  WorkerOptions options;
  options.job = "job";
  options.follows = kind == OperationKind::kFollow && (bits & 1) != 0;
  auto worker = std::move(WorkerEngine::create(options).value());
  std::thread server([&listener, input] { serve(listener, input); });

  // What lies around what may be written to stays as it is.
  std::array<std::array<float, 2 * kElements>, 3> source{}, target{};
  std::atomic<int> ended{0};
  int begun = 0;
  const std::vector<std::byte> token(fabric::Hello::kTokenBytes, std::byte{1});
  if (worker->connect({{listener.address(), token}}, 5000).ok()) {
    (void)worker->add_flow(flow(0, FlowMode::kUpdate, DType::kFloat32, (bits & 2) != 0 ? 2 : 0));
    (void)worker->add_table(table(1, (bits & 2) != 0));
    const auto start = [&](OperationKind what) {
      Operation operation;
      operation.kind = what;
      operation.flow = 0;
      operation.step = bits >> 4;
      operation.timeout_ms = (bits & 4) != 0 ? 1 : -1;
      LeafBuffers leaf;
      leaf.source = reinterpret_cast<const std::byte*>(source[1].data());
      leaf.target = reinterpret_cast<std::byte*>(target[1].data());
      operation.leaves.push_back(leaf);
      operation.done = [&ended](const Status&) { ++ended; };
      ++begun;
      worker->start(std::move(operation));
    };
    const std::array<int32_t, kRows> ids{7, 0, 4};
    const auto start_rows = [&](OperationKind what, int64_t step) {
      Operation operation;
      operation.kind = what;
      operation.flow = 1;
      operation.step = step;
      operation.rows.ids = {reinterpret_cast<const std::byte*>(ids.data()), RowIds::Type::kInt32,
                            ids.size()};
      operation.rows.columns = kColumns;
      operation.rows.gradients = source[1].data();
      operation.rows.target = target[1].data();
      operation.done = [&ended](const Status&) { ++ended; };
      ++begun;
      worker->start(std::move(operation));
    };
    if (kind == OperationKind::kPushRows) {
      for (int64_t step = 0; step < 3; ++step) start_rows(kind, step);
      start_rows(OperationKind::kPullRows, 2);
    } else if (kind == OperationKind::kPullRows) {
      start_rows(kind, 0);
    } else {
      start(kind);
    }
    if (kind == OperationKind::kPush) start(OperationKind::kPull);
    if ((bits & 8) != 0) worker->stop_waiting();
    // A connection that is lost waits for the control plane's word.
    worker->wait_failure(10'000);
    worker->fail(Status(Code::kPeerFailed, "the coordinator says so"));
  }
  fuzz::until("every operation ends", [&] {
    std::this_thread::yield();
    return ended == begun;
  });
  worker->close();
  server.join();
  for (const size_t at : {0, 2}) {
    for (const float value : target[at]) require(value == 0.0f, "nothing is written elsewhere");
  }
  return 0;
}
