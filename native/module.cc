/* module.cc: the Python face of the engines, jaxrdma._native. Nothing here decides anything; every
   call that may wait gives the interpreter's lock back. */
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "base/exit_code.h"
#include "engine/server.h"
#include "engine/wire.h"
#include "engine/worker.h"
#include "fabric/verbs/device.h"
#include "fabric/verbs/explain.h"
#include "fabric/verbs/library.h"
#include "ffi/registry.h"

namespace nb = nanobind;

namespace jaxrdma {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::numpy, nb::ndim<1>, nb::device::cpu>;
using BytesIn = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ReadOnlyBytesIn = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

/// See engine/wait.h. More than an answer takes over Soft-RoCE in an emulated machine, as the
/// slowest of the transports; a fast one is not looked for longer than twice what it takes.
constexpr int kDefaultSpinUs = 1000;

template <typename T>
std::variant<T, Status> to_variant(Result<T> result) {
  if (result.ok()) return std::move(result.value());
  return result.status();
}

std::vector<std::byte> to_vector(const nb::bytes& bytes) {
  const auto* data = static_cast<const std::byte*>(bytes.data());
  return {data, data + bytes.size()};
}

nb::bytes to_bytes(const std::vector<Record>& records) {
  return nb::bytes(records.data(), records.size() * sizeof(Record));
}

/// A `sys.excepthook` that calls `hook(kind, error, trace, interrupted)`. A signal that came while
/// the failed call was native is still pending; in a hook of Python its handler would raise before
/// the first line, where nothing can catch it. Here it raises in the open.
nb::object exception_hook(nb::callable hook) {
  return nb::cpp_function(
      [hook = std::move(hook)](nb::object kind, nb::object error, nb::object trace) {
        const bool interrupted = PyErr_CheckSignals() != 0;
        if (interrupted) PyErr_Clear();
        hook(std::move(kind), std::move(error), std::move(trace), interrupted);
      });
}

using Sources = std::vector<std::optional<ReadOnlyBytesIn>>;
using Targets = std::vector<std::optional<BytesIn>>;

Result<Operation> make_operation(OperationKind kind, uint16_t flow, int64_t step,
                                 const Sources& sources, const Targets& targets,
                                 const FlowSpec& spec) {
  Operation operation;
  operation.kind = kind;
  operation.flow = flow;
  operation.step = step;
  operation.leaves.resize(spec.arrays());
  for (uint32_t i = 0; i < operation.leaves.size(); ++i) {
    const LeafMember member = spec.member(i);
    LeafBuffers& buffers = operation.leaves[i];
    buffers.source_dtype = spec.leaves[member.leaf].dtype;
    const size_t bytes = member.elements * dtype_bytes(buffers.source_dtype);
    if (i < sources.size() && sources[i]) {
      // A gradient may come as it is summed.
      const DType wide = accumulator_dtype(buffers.source_dtype);
      if (sources[i]->size() != bytes &&
          sources[i]->size() == member.elements * dtype_bytes(wide)) {
        buffers.source_dtype = wide;
      } else if (sources[i]->size() != bytes) {
        return Status(Code::kInvalidArgument, "a source buffer has the wrong size");
      }
      buffers.source = reinterpret_cast<const std::byte*>(sources[i]->data());
    }
    if (i < targets.size() && targets[i]) {
      if (targets[i]->size() != bytes)
        return Status(Code::kInvalidArgument, "a target buffer has the wrong size");
      buffers.target = reinterpret_cast<std::byte*>(targets[i]->data());
    }
  }
  return operation;
}

/// Sleeps until it is done; `ended` becomes when that was.
Status run(WorkerEngine& engine, Operation operation,
           std::chrono::steady_clock::time_point* ended = nullptr) {
  std::mutex lock;
  std::condition_variable changed;
  std::optional<Status> outcome;
  operation.done = [&](const Status& status) {
    std::lock_guard guard(lock);
    if (ended != nullptr) *ended = std::chrono::steady_clock::now();
    outcome = status;
    changed.notify_one();  // under the lock: the waiter destroys `changed` as soon as it may
  };
  engine.start(std::move(operation));
  std::unique_lock guard(lock);
  changed.wait(guard, [&] { return outcome.has_value(); });
  return *outcome;
}

/// Runs an operation that has no custom call around it.
Status run_operation(WorkerEngine& engine, OperationKind kind, uint16_t flow, int64_t step,
                     const Sources& sources, const Targets& targets, const FlowSpec& spec) {
  auto operation = make_operation(kind, flow, step, sources, targets, spec);
  if (!operation.ok()) return operation.status();
  nb::gil_scoped_release unlocked;
  return run(engine, std::move(operation.value()));
}

/// Waits for a version of `step` or later, and brings it; returns its step.
std::variant<int64_t, Status> follow(WorkerEngine& engine, uint16_t flow, int64_t step,
                                     const Targets& targets, const FlowSpec& spec, int timeout_ms) {
  auto operation = make_operation(OperationKind::kFollow, flow, step, {}, targets, spec);
  if (!operation.ok()) return operation.status();
  const auto outcome = std::make_shared<Outcome>();
  operation.value().outcome = outcome;
  operation.value().timeout_ms = timeout_ms;
  nb::gil_scoped_release unlocked;
  if (Status status = run(engine, std::move(operation.value())); !status.ok()) return status;
  return outcome->version;
}

/// For measurements: runs it `count` times, of consecutive steps, one after the other; returns how
/// long each took, in seconds, up to where a custom call would be complete.
std::variant<std::vector<double>, Status> repeat_operation(WorkerEngine& engine, OperationKind kind,
                                                           uint16_t flow, int64_t first_step,
                                                           size_t count, const Sources& sources,
                                                           const Targets& targets,
                                                           const FlowSpec& spec) {
  auto operation = make_operation(kind, flow, first_step, sources, targets, spec);
  if (!operation.ok()) return operation.status();
  nb::gil_scoped_release unlocked;
  std::vector<double> seconds;
  for (size_t i = 0; i < count; ++i) {
    const auto began = std::chrono::steady_clock::now();
    auto ended = began;
    if (Status status = run(engine, operation.value(), &ended); !status.ok()) return status;
    seconds.push_back(std::chrono::duration<double>(ended - began).count());
    ++operation.value().step;
  }
  return seconds;
}

void bind_common(nb::module_& m) {
  nb::enum_<Code>(m, "Code")
      .value("OK", Code::kOk)
      .value("INVALID_ARGUMENT", Code::kInvalidArgument)
      .value("UNAVAILABLE", Code::kUnavailable)
      .value("PERMISSION_DENIED", Code::kPermissionDenied)
      .value("PROTOCOL", Code::kProtocol)
      .value("RESOURCE", Code::kResource)
      .value("STALE", Code::kStale)
      .value("DEADLINE", Code::kDeadline)
      .value("CANCELLED", Code::kCancelled)
      .value("PEER_FAILED", Code::kPeerFailed)
      .value("INTERNAL", Code::kInternal);
  nb::class_<Status>(m, "Status")
      .def(nb::init<Code, std::string>(), nb::arg("code"), nb::arg("message"))
      .def_prop_ro("ok", &Status::ok)
      .def_prop_ro("code", &Status::code)
      .def_prop_ro("message", &Status::message);
  nb::enum_<DType>(m, "DType")
      .value("float32", DType::kFloat32)
      .value("float64", DType::kFloat64)
      .value("float16", DType::kFloat16)
      .value("bfloat16", DType::kBFloat16);
  nb::enum_<FlowMode>(m, "FlowMode")
      .value("AVERAGE", FlowMode::kAverage)
      .value("UPDATE", FlowMode::kUpdate)
      .value("SHOW", FlowMode::kShow);
  nb::class_<FlowSpec>(m, "FlowSpec")
      .def(
          "__init__",
          [](FlowSpec* self, uint16_t id, FlowMode mode, const std::vector<DType>& dtypes,
             const std::vector<uint64_t>& elements,
             const std::vector<std::vector<uint64_t>>& partitions, uint32_t held,
             const std::vector<std::vector<uint64_t>>& members) {
            FlowSpec spec;
            spec.id = id;
            spec.mode = mode;
            spec.held = held;
            for (size_t i = 0; i < dtypes.size() && i < elements.size(); ++i) {
              spec.leaves.push_back({dtypes[i], elements[i]});
            }
            for (const std::vector<uint64_t>& p : partitions) {
              if (p.size() != 4)
                throw nb::value_error("a partition is (leaf, server, begin, elements)");
              spec.partitions.push_back(
                  {static_cast<uint32_t>(p[0]), static_cast<uint32_t>(p[1]), p[2], p[3]});
            }
            for (const std::vector<uint64_t>& member : members) {
              if (member.size() != 3) throw nb::value_error("a member is (leaf, begin, elements)");
              spec.members.push_back({static_cast<uint32_t>(member[0]), member[1], member[2]});
            }
            new (self) FlowSpec(std::move(spec));
          },
          nb::arg("id"), nb::arg("mode"), nb::arg("dtypes"), nb::arg("elements"),
          nb::arg("partitions"), nb::arg("held") = 0,
          nb::arg("members") = std::vector<std::vector<uint64_t>>())
      .def_ro("id", &FlowSpec::id);
  nb::enum_<RowRule>(m, "RowRule")
      .value("SGD", RowRule::kSgd)
      .value("MOMENTUM", RowRule::kMomentum)
      .value("ADAGRAD", RowRule::kAdagrad)
      .value("ADAM", RowRule::kAdam);
  nb::enum_<RowInit>(m, "RowInit")
      .value("CONSTANT", RowInit::kConstant)
      .value("UNIFORM", RowInit::kUniform)
      .value("NORMAL", RowInit::kNormal);
  nb::class_<TableSpec>(m, "TableSpec")
      .def(
          "__init__",
          [](TableSpec* self, uint16_t id, std::string name, uint64_t rows, uint32_t columns,
             RowRule rule, float rate, float momentum, float decay, float epsilon,
             float accumulator, RowInit init, float a, float b, uint64_t seed, bool asynchronous) {
            TableSpec spec;
            spec.id = id;
            spec.name = std::move(name);
            spec.rows = rows;
            spec.columns = columns;
            spec.optimizer = {rule, rate, momentum, decay, epsilon, accumulator};
            spec.start = {init, a, b, seed};
            spec.policy = asynchronous ? RowPolicy::kAsync : RowPolicy::kSync;
            new (self) TableSpec(std::move(spec));
          },
          nb::kw_only(), nb::arg("id"), nb::arg("name"), nb::arg("rows"), nb::arg("columns"),
          nb::arg("rule"), nb::arg("rate"), nb::arg("momentum"), nb::arg("decay"),
          nb::arg("epsilon"), nb::arg("accumulator"), nb::arg("init"), nb::arg("a"), nb::arg("b"),
          nb::arg("seed"), nb::arg("asynchronous"))
      .def_ro("id", &TableSpec::id);
  m.def("check_table", &check_table, nb::arg("spec"), nb::arg("slot_payload_bytes"));
  m.attr("MOST_ROWS") = kMostRows;
  const auto set_gid = [](fabric::VerbsSource& self, const nb::bytes& gid) {
    if (gid.size() != self.gid.size()) throw nb::value_error("a GID has 16 bytes");
    std::memcpy(self.gid.data(), gid.data(), gid.size());
  };
  nb::class_<fabric::VerbsSource>(m, "VerbsSource")
      .def(
          "__init__",
          [set_gid](fabric::VerbsSource* self, const std::string& device, uint32_t port,
                    int gid_index, const nb::bytes& gid, const std::string& gid_type) {
            new (self) fabric::VerbsSource{device, port, gid_index, {}, gid_type};
            set_gid(*self, gid);
          },
          nb::arg("device") = "", nb::arg("port") = 0, nb::arg("gid_index") = -1,
          nb::arg("gid") = nb::bytes("\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 16),
          nb::arg("gid_type") = "")
      .def_rw("device", &fabric::VerbsSource::device)
      .def_rw("port", &fabric::VerbsSource::port)
      .def_rw("gid_index", &fabric::VerbsSource::gid_index)
      .def_prop_rw(
          "gid",
          [](const fabric::VerbsSource& self) {
            return nb::bytes(self.gid.data(), self.gid.size());
          },
          set_gid)
      .def_rw("gid_type", &fabric::VerbsSource::gid_type);
  nb::class_<fabric::VerbsOptions>(m, "VerbsOptions")
      .def(nb::init<>())
      .def_rw("sources", &fabric::VerbsOptions::sources)
      .def_rw("pkey_index", &fabric::VerbsOptions::pkey_index)
      .def_rw("traffic_class", &fabric::VerbsOptions::traffic_class)
      .def_rw("service_level", &fabric::VerbsOptions::service_level)
      .def_rw("timeout", &fabric::VerbsOptions::timeout)
      .def_rw("retry_count", &fabric::VerbsOptions::retry_count)
      .def_rw("link_timeout_ms", &fabric::VerbsOptions::link_timeout_ms);
  m.attr("DEFAULT_SPIN_US") = kDefaultSpinUs;
  m.attr("MOST_DEVICES") = static_cast<int>(fabric::kMostDevices);
  m.attr("PROTOCOL_VERSION") = static_cast<int>(wire::kProtocolVersion);
  m.attr("TOKEN_BYTES") = static_cast<int>(fabric::Hello::kTokenBytes);
  m.def("stage_name", [](int stage) { return std::string(stage_name(static_cast<Stage>(stage))); });
}

void bind_worker(nb::module_& m) {
  nb::enum_<OperationKind>(m, "OperationKind")
      .value("EXCHANGE", OperationKind::kExchange)
      .value("PUSH", OperationKind::kPush)
      .value("PULL", OperationKind::kPull)
      .value("INIT", OperationKind::kInit)
      .value("FETCH", OperationKind::kFetch)
      .value("READ", OperationKind::kRead)
      .value("FOLLOW", OperationKind::kFollow)
      .value("PUSH_ROWS", OperationKind::kPushRows)
      .value("PULL_ROWS", OperationKind::kPullRows);
  nb::class_<Pending>(m, "Pending")
      .def_ro("server", &Pending::server)
      .def_ro("flow", &Pending::flow)
      .def_ro("step", &Pending::step)
      .def_ro("partition", &Pending::partition)
      .def_prop_ro("stage", [](const Pending& p) { return std::string(stage_name(p.stage)); })
      .def_ro("seconds", &Pending::seconds);
  nb::class_<WorkerStats>(m, "WorkerStats")
      .def_ro("bytes_pushed", &WorkerStats::bytes_pushed)
      .def_ro("bytes_pulled", &WorkerStats::bytes_pulled)
      .def_ro("steps", &WorkerStats::steps)
      .def_ro("gradients_accepted", &WorkerStats::gradients_accepted)
      .def_ro("gradients_dropped", &WorkerStats::gradients_dropped)
      .def_ro("dropped_of_flow", &WorkerStats::dropped_of_flow)
      .def_ro("last_step", &WorkerStats::last_step)
      .def_ro("last_read", &WorkerStats::last_read);
  nb::class_<WorkerEngine>(m, "WorkerEngine")
      .def_static(
          "create",
          [](uint32_t worker, std::string job, uint64_t incarnation, int spin_us,
             const std::string& transport, const fabric::VerbsOptions& verbs, bool follows,
             const std::string& fault, int sent_timeout_ms) {
            WorkerOptions options;
            options.worker = worker;
            options.follows = follows;
            options.job = std::move(job);
            options.incarnation = incarnation;
            options.spin_us = spin_us;
            options.sent_timeout_ms = sent_timeout_ms;
            options.transport = {transport, verbs, fault};
            return to_variant(WorkerEngine::create(std::move(options)));
          },
          nb::arg("worker"), nb::arg("job"), nb::arg("incarnation"), nb::arg("spin_us") = 0,
          nb::arg("transport") = "tcp", nb::arg("verbs") = fabric::VerbsOptions{},
          nb::arg("follows") = false, nb::arg("fault") = "",
          nb::arg("sent_timeout_ms") = WorkerOptions{}.sent_timeout_ms, Unlocked())
      .def(
          "connect",
          [](WorkerEngine& self, const std::vector<std::string>& addresses,
             const std::vector<nb::bytes>& tokens, int timeout_ms) {
            std::vector<ServerAddress> servers;
            for (size_t i = 0; i < addresses.size() && i < tokens.size(); ++i) {
              servers.push_back({addresses[i], to_vector(tokens[i])});
            }
            nb::gil_scoped_release unlocked;
            return self.connect(servers, timeout_ms);
          },
          nb::arg("addresses"), nb::arg("tokens"), nb::arg("timeout_ms"))
      .def("add_flow", &WorkerEngine::add_flow, nb::arg("spec"), Unlocked())
      .def("add_table", &WorkerEngine::add_table, nb::arg("spec"), Unlocked())
      .def("run_operation", &run_operation, nb::arg("kind"), nb::arg("flow"), nb::arg("step"),
           nb::arg("sources"), nb::arg("targets"), nb::arg("spec"))
      .def("follow", &follow, nb::arg("flow"), nb::arg("step"), nb::arg("targets"), nb::arg("spec"),
           nb::arg("timeout_ms") = -1)
      .def("stop_waiting", &WorkerEngine::stop_waiting, Unlocked())
      .def("repeat_operation", &repeat_operation, nb::arg("kind"), nb::arg("flow"),
           nb::arg("first_step"), nb::arg("count"), nb::arg("sources"), nb::arg("targets"),
           nb::arg("spec"))
      .def("fail", &WorkerEngine::fail, nb::arg("why"), Unlocked())
      .def("interrupt", &WorkerEngine::interrupt, Unlocked())
      .def("await_sent", &WorkerEngine::await_sent, Unlocked())
      .def("in_flight", &WorkerEngine::in_flight, Unlocked())
      .def("pending", &WorkerEngine::pending, nb::arg("limit") = 16, Unlocked())
      .def("stats", &WorkerEngine::stats, Unlocked())
      .def("records", [](const WorkerEngine& self) { return to_bytes(self.records()); })
      .def("record_counts",
           [](const WorkerEngine& self) {
             const RecordCounts counts = self.record_counts();
             return std::tuple(counts.added, counts.lost);
           })
      .def_prop_ro("transport", [](const WorkerEngine& self) { return self.transport(); })
      .def_prop_ro("notice", [](const WorkerEngine& self) { return self.notice(); })
      .def_prop_ro("trouble", [](const WorkerEngine& self) { return self.trouble(); })
      .def_prop_ro("status", &WorkerEngine::status)
      .def("wait_failure", &WorkerEngine::wait_failure, nb::arg("timeout_ms") = -1, Unlocked())
      .def("close", &WorkerEngine::close, Unlocked());
  m.def("register_session", &ffi::register_session, nb::arg("session"), nb::arg("engine"),
        Unlocked());
  m.def("forget_session", &ffi::forget_session, nb::arg("session"), Unlocked());
  m.def("take_end", &ffi::take_end, nb::arg("session"), Unlocked());
  m.def("exit_with", &exit_with, nb::arg("code"));
  m.def("cpu_handler", [] { return nb::capsule(ffi::cpu_handler()); });
  m.def("rows_handler", [] { return nb::capsule(ffi::rows_handler()); });
  m.def("exception_hook", &exception_hook, nb::arg("hook"));
}

/// A leaf's piece as bytes; the view keeps the engine alive.
std::variant<Bytes, Status> view(nb::handle engine, Result<LeafShard> shard) {
  if (!shard.ok()) return shard.status();
  const LeafShard& piece = shard.value();
  const size_t bytes = piece.elements * dtype_bytes(piece.dtype);
  return Bytes(piece.data, {bytes}, engine);
}

/// A gradient as Python names it: worker, incarnation, sequence.
using GradientName = std::tuple<uint32_t, uint64_t, uint32_t>;
GradientId gradient_id(const GradientName& name) {
  return {std::get<0>(name), std::get<1>(name), std::get<2>(name)};
}

void bind_server(nb::module_& m) {
  nb::class_<ServerEvent> event(m, "ServerEvent");
  nb::enum_<ServerEvent::Kind>(event, "Kind")
      .value("NONE", ServerEvent::Kind::kNone)
      .value("INITIALISED", ServerEvent::Kind::kInitialised)
      .value("STEP_READY", ServerEvent::Kind::kStepReady)
      .value("WORKER_LOST", ServerEvent::Kind::kWorkerLost)
      .value("VIOLATION", ServerEvent::Kind::kViolation)
      .value("STRANDED", ServerEvent::Kind::kStranded)
      .value("WOKEN", ServerEvent::Kind::kWoken)
      .value("CLOSED", ServerEvent::Kind::kClosed)
      .value("GRADIENT", ServerEvent::Kind::kGradient)
      .value("FOLLOWER_REFUSED", ServerEvent::Kind::kFollowerRefused);
  event.def_ro("kind", &ServerEvent::kind)
      .def_ro("flow", &ServerEvent::flow)
      .def_ro("step", &ServerEvent::step)
      .def_ro("worker", &ServerEvent::worker)
      .def_ro("incarnation", &ServerEvent::incarnation)
      .def_ro("text", &ServerEvent::text)
      .def_prop_ro("gradient", [](const ServerEvent& self) {
        const GradientId& id = self.gradient;
        return std::tuple(id.worker, id.incarnation, id.sequence);
      });
  nb::class_<ServerStats>(m, "ServerStats")
      .def_ro("bytes_pushed", &ServerStats::bytes_pushed)
      .def_ro("bytes_pulled", &ServerStats::bytes_pulled)
      .def_ro("steps", &ServerStats::steps)
      .def_ro("accepted", &ServerStats::accepted)
      .def_ro("dropped", &ServerStats::dropped)
      .def_ro("gradients_dropped", &ServerStats::gradients_dropped)
      .def_ro("duplicates", &ServerStats::duplicates)
      .def_ro("refused", &ServerStats::refused)
      .def_ro("bytes_followed", &ServerStats::bytes_followed)
      .def_ro("copies", &ServerStats::copies);
  nb::class_<Lack>(m, "Lack")
      .def_ro("worker", &Lack::worker)
      .def_ro("flow", &Lack::flow)
      .def_ro("step", &Lack::step)
      .def_ro("partition", &Lack::partition)
      .def_ro("seconds", &Lack::seconds);
  nb::class_<ServerEngine>(m, "ServerEngine")
      .def_static(
          "create",
          [](uint32_t server, uint32_t servers, uint32_t workers, std::string job,
             std::string listen, size_t partition_bytes, uint32_t slots_per_worker,
             uint32_t reduce_threads, bool ordered, int spin_us, const std::string& transport,
             const fabric::VerbsOptions& verbs, uint32_t followers, const std::string& fault) {
            ServerOptions options;
            options.followers = followers;
            options.server = server;
            options.servers = servers;
            options.workers = workers;
            options.job = std::move(job);
            options.listen = std::move(listen);
            options.partition_bytes = partition_bytes;
            options.slots_per_worker = slots_per_worker;
            options.reduce_threads = reduce_threads;
            options.ordered = ordered;
            options.spin_us = spin_us;
            options.transport = {transport, verbs, fault};
            return to_variant(ServerEngine::create(std::move(options)));
          },
          nb::arg("server"), nb::arg("servers"), nb::arg("workers"), nb::arg("job"),
          nb::arg("listen"), nb::arg("partition_bytes"), nb::arg("slots_per_worker") = 16,
          nb::arg("reduce_threads") = 2, nb::arg("ordered") = false, nb::arg("spin_us") = 0,
          nb::arg("transport") = "tcp", nb::arg("verbs") = fabric::VerbsOptions{},
          nb::arg("followers") = 64, nb::arg("fault") = "", Unlocked())
      .def_prop_ro("address", &ServerEngine::address)
      .def(
          "admit",
          [](ServerEngine& self, uint32_t worker, uint64_t incarnation, const nb::bytes& token) {
            return self.admit(worker, incarnation, to_vector(token));
          },
          nb::arg("worker"), nb::arg("incarnation"), nb::arg("token"))
      .def(
          "admit_follower",
          [](ServerEngine& self, uint32_t follower, uint64_t incarnation, const nb::bytes& token) {
            return self.admit_follower(follower, incarnation, to_vector(token));
          },
          nb::arg("follower"), nb::arg("incarnation"), nb::arg("token"))
      .def("dismiss_follower", &ServerEngine::dismiss_follower, nb::arg("follower"), nb::arg("why"),
           Unlocked())
      .def("add_flow", &ServerEngine::add_flow, nb::arg("spec"), Unlocked())
      .def("add_table", &ServerEngine::add_table, nb::arg("spec"), Unlocked())
      .def("wait_event", &ServerEngine::wait_event, nb::arg("timeout_ms") = -1, Unlocked())
      .def("wake", &ServerEngine::wake, Unlocked())
      .def(
          "gradient",
          [](nb::handle_t<ServerEngine> self, uint16_t flow, uint32_t leaf) {
            return view(self, nb::cast<ServerEngine&>(self).gradient(flow, leaf));
          },
          nb::arg("flow"), nb::arg("leaf"))
      .def(
          "parameters",
          [](nb::handle_t<ServerEngine> self, uint16_t flow, uint32_t leaf) {
            return view(self, nb::cast<ServerEngine&>(self).parameters(flow, leaf));
          },
          nb::arg("flow"), nb::arg("leaf"))
      .def("publish", &ServerEngine::publish, nb::arg("flow"), nb::arg("step"), Unlocked())
      .def("refresh", &ServerEngine::refresh, nb::arg("flow"), Unlocked())
      .def(
          "aggregate",
          [](ServerEngine& self, uint16_t flow, int64_t step,
             const std::vector<GradientName>& set) {
            std::vector<GradientId> ids;
            for (const GradientName& name : set) ids.push_back(gradient_id(name));
            return self.aggregate(flow, step, ids);
          },
          nb::arg("flow"), nb::arg("step"), nb::arg("gradients"), Unlocked())
      .def(
          "drop",
          [](ServerEngine& self, uint16_t flow, const GradientName& gradient) {
            return self.drop(flow, gradient_id(gradient));
          },
          nb::arg("flow"), nb::arg("gradient"), Unlocked())
      .def(
          "answer",
          [](ServerEngine& self, uint16_t flow, const GradientName& gradient, int64_t step,
             bool accepted) { return self.answer(flow, gradient_id(gradient), step, accepted); },
          nb::arg("flow"), nb::arg("gradient"), nb::arg("step"), nb::arg("accepted"), Unlocked())
      .def("mark_left", &ServerEngine::mark_left, nb::arg("worker"), Unlocked())
      .def("expel", &ServerEngine::expel, nb::arg("worker"), nb::arg("why"), Unlocked())
      .def("stats", &ServerEngine::stats, Unlocked())
      .def("lacking", &ServerEngine::lacking, nb::arg("limit") = 16, Unlocked())
      .def("records", [](const ServerEngine& self) { return to_bytes(self.records()); })
      .def("record_counts",
           [](const ServerEngine& self) {
             const RecordCounts counts = self.record_counts();
             return std::tuple(counts.added, counts.lost);
           })
      .def_prop_ro("transport", [](const ServerEngine& self) { return self.transport(); })
      .def("close", &ServerEngine::close, Unlocked());
}

std::variant<std::string, Status> ibverbs_path() {
  if (Status loaded = fabric::verbs::load_library(); !loaded.ok()) return loaded;
  return fabric::verbs::library_path();
}

void bind_devices(nb::module_& m) {
  m.def("ibverbs_path", &ibverbs_path, Unlocked());
#if JAXRDMA_HAVE_VERBS
  using fabric::verbs::DeviceInfo;
  using fabric::verbs::GidEntry;
  using fabric::verbs::PortInfo;
  nb::class_<GidEntry>(m, "RdmaGid")
      .def_ro("index", &GidEntry::index)
      .def_prop_ro("gid",
                   [](const GidEntry& self) { return nb::bytes(self.gid.data(), self.gid.size()); })
      .def_ro("type", &GidEntry::type)
      .def_ro("net_device", &GidEntry::net_device);
  nb::class_<PortInfo>(m, "RdmaPort")
      .def_ro("number", &PortInfo::number)
      .def_ro("state", &PortInfo::state)
      .def_ro("link_layer", &PortInfo::link_layer)
      .def_ro("active_mtu", &PortInfo::active_mtu)
      .def_ro("max_message", &PortInfo::max_message)
      .def_ro("lid", &PortInfo::lid)
      .def_ro("pkeys", &PortInfo::pkeys)
      .def_ro("gids", &PortInfo::gids);
  nb::class_<DeviceInfo>(m, "RdmaDevice")
      .def_ro("name", &DeviceInfo::name)
      .def_ro("firmware", &DeviceInfo::firmware)
      .def_ro("max_qp", &DeviceInfo::max_qp)
      .def_ro("max_qp_wr", &DeviceInfo::max_qp_wr)
      .def_ro("max_cqe", &DeviceInfo::max_cqe)
      .def_ro("max_mr_size", &DeviceInfo::max_mr_size)
      .def_ro("ports", &DeviceInfo::ports)
      .def_ro("problem", &DeviceInfo::problem);
  m.def("rdma_devices", [] { return to_variant(fabric::verbs::list_devices()); }, Unlocked());
  m.def("explain_no_device", &fabric::verbs::explain_no_device, Unlocked());
  m.def("explain_open", &fabric::verbs::explain_open, nb::arg("device"), nb::arg("error"));
#else
  // Built without the header: the one status that says so.
  m.def("rdma_devices", &fabric::verbs::load_library);
  m.def("explain_no_device", [] { return fabric::verbs::load_library().message(); });
  m.def(
      "explain_open",
      [](const std::string&, int) { return fabric::verbs::load_library().message(); },
      nb::arg("device"), nb::arg("error"));
#endif
}

}  // namespace
}  // namespace jaxrdma

NB_MODULE(_native, m) {
  // A program that ends by an exception leaves whatever its frames hold; that is no news to its
  // user.
  nb::set_leak_warnings(false);
  m.doc() = "The native engines of jaxrdma. Not a public interface.";
  jaxrdma::bind_common(m);
  jaxrdma::bind_worker(m);
  jaxrdma::bind_server(m);
  jaxrdma::bind_devices(m);
}
