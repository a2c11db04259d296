/* benchmarks/native/fabric_echo.cc: push, then pull, through the tcp fabric: what the engines can
   at best reach.

   Two processes on loopback. The client writes a buffer in chunks; the server writes each chunk
   back as soon as it has arrived (with --add: after adding it to an fp32 accumulator, as a server
   does). Prints the median, the 99th percentile and the processor time of one round trip per size.

   usage: fabric_echo [--add] [--spin MICROSECONDS] [SIZE[:CHUNK]...] */
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "fabric/fabric.h"

namespace {

using namespace jaxrdma;
using namespace jaxrdma::fabric;
using Clock = std::chrono::steady_clock;

constexpr size_t kLimit = size_t{256} << 20;
size_t buffer_bytes = 0;  // of the largest job; set before the processes part

struct Grant {
  uint64_t address;
  RemoteKey key;
};

struct Job {
  size_t bytes;
  size_t chunk;
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "fabric_echo: %s\n", what.c_str());
  std::exit(1);
}

std::byte* allocate(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("no memory");
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 1, bytes);
  return static_cast<std::byte*>(memory);
}

double cpu_seconds() {
  rusage own{};
  getrusage(RUSAGE_SELF, &own);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(own.ru_utime) + seconds(own.ru_stime);
}

/// Polls; after `spin_us` without events, sleeps.
void next(Fabric& fabric, std::vector<Event>& events, int spin_us) {
  events.clear();
  const auto began = Clock::now();
  while (true) {
    fabric.poll(events);
    if (!events.empty()) return;
    if (spin_us > 0 && Clock::now() - began < std::chrono::microseconds(spin_us)) continue;
    fabric.wait(-1);
  }
}

std::vector<std::byte> encode(const Grant& grant) {
  std::vector<std::byte> bytes(sizeof(grant));
  std::memcpy(bytes.data(), &grant, sizeof(grant));
  return bytes;
}

/// The immediate is the chunk's index; the chunk's size comes with the event.
int serve(int address_pipe, bool add, int spin_us, size_t chunk_of_first) {
  auto fabric = std::move(make_tcp_fabric({}).value());
  std::byte* landing = allocate(buffer_bytes);
  float* sum = reinterpret_cast<float*>(add ? allocate(buffer_bytes) : landing);
  auto region =
      std::move(fabric->register_memory(landing, buffer_bytes, Access::kRemoteWrite).value());
  auto results = std::move(
      fabric->register_memory(reinterpret_cast<std::byte*>(sum), buffer_bytes, Access::kLocal)
          .value());
  const Grant own{reinterpret_cast<uintptr_t>(landing), region->remote_key()};
  auto address =
      fabric->listen("127.0.0.1:0", [&](EndpointId, const Hello&) { return encode(own); });
  if (!address.ok()) fail(address.status().message());
  if (::write(address_pipe, address.value().c_str(), address.value().size() + 1) < 0) fail("pipe");

  Grant peer{};
  size_t chunk = chunk_of_first;
  std::vector<Event> events;
  while (true) {
    next(*fabric, events, spin_us);
    for (const Event& event : events) {
      if (event.kind == Event::Kind::kConnected)
        std::memcpy(&peer, event.hello->payload.data(), sizeof(peer));
      if (event.kind == Event::Kind::kDisconnected) return 0;
      if (event.kind != Event::Kind::kReceived) continue;
      Endpoint& endpoint = *fabric->endpoint(event.endpoint);
      if (event.immediate >> 31) {  // the client tells the chunk size of what follows
        chunk = event.immediate & 0x7fffffff;
        endpoint.release(1);
        continue;
      }
      const size_t offset = event.immediate * chunk;
      if (add) {
        const float* in = reinterpret_cast<const float*>(landing + offset);
        float* out = sum + offset / sizeof(float);
        for (size_t i = 0; i < event.bytes / sizeof(float); ++i) out[i] += in[i];
      }
      const Slice slice{results.get(), reinterpret_cast<std::byte*>(sum) + offset, event.bytes};
      endpoint.release(1);
      const Status status =
          endpoint.write({&slice, 1}, {peer.address + offset, peer.key}, event.immediate, 0);
      if (!status.ok()) fail(status.message());
    }
  }
}

void drive(const std::string& address, const std::vector<Job>& jobs, int spin_us) {
  auto fabric = std::move(make_tcp_fabric({}).value());
  std::byte* source = allocate(buffer_bytes);
  std::byte* result = allocate(buffer_bytes);
  auto from = std::move(fabric->register_memory(source, buffer_bytes, Access::kLocal).value());
  auto to = std::move(fabric->register_memory(result, buffer_bytes, Access::kRemoteWrite).value());
  Hello hello;
  hello.token.resize(Hello::kTokenBytes);
  hello.payload = encode({reinterpret_cast<uintptr_t>(result), to->remote_key()});
  const EndpointId id = fabric->connect(address, hello, 5000).value();
  Grant peer{};
  std::vector<Event> events;
  for (bool connected = false; !connected;) {
    next(*fabric, events, 0);
    for (const Event& event : events) {
      if (event.kind == Event::Kind::kDisconnected) fail(event.status.message());
      if (event.kind != Event::Kind::kConnected) continue;
      std::memcpy(&peer, event.hello->payload.data(), sizeof(peer));
      connected = true;
    }
  }
  std::printf("%10s %10s %6s %10s %10s %10s %9s %12s\n", "bytes", "chunk", "calls", "median us",
              "p99 us", "min us", "Gbit/s", "client CPU us");
  for (const Job& job : jobs) {
    Endpoint& endpoint = *fabric->endpoint(id);
    if (!endpoint.write({}, {}, static_cast<Immediate>(job.chunk) | (1u << 31), 0).ok())
      fail("write");
    const size_t chunks = (job.bytes + job.chunk - 1) / job.chunk;
    const size_t calls = std::clamp<size_t>((size_t{512} << 20) / job.bytes, 20, 2000);
    std::vector<double> times;
    double cpu = 0;
    for (size_t call = 0; call < calls + 5; ++call) {
      if (call == 5) cpu = cpu_seconds();
      const auto began = Clock::now();
      size_t received = 0;
      for (size_t i = 0; i < chunks; ++i) {
        const size_t offset = i * job.chunk;
        const Slice slice{from.get(), source + offset, std::min(job.chunk, job.bytes - offset)};
        const Status status = endpoint.write({&slice, 1}, {peer.address + offset, peer.key},
                                             static_cast<Immediate>(i), i);
        if (!status.ok()) fail(status.message());
      }
      while (received < chunks || endpoint.outstanding() > 0) {
        next(*fabric, events, spin_us);
        for (const Event& event : events) {
          if (event.kind == Event::Kind::kDisconnected) fail(event.status.message());
          if (event.kind == Event::Kind::kReceived) {
            ++received;
            endpoint.release(1);
          }
        }
      }
      if (call >= 5)
        times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - began).count());
    }
    cpu = (cpu_seconds() - cpu) / static_cast<double>(calls) * 1e6;
    std::sort(times.begin(), times.end());
    const double median = times[times.size() / 2];
    std::printf("%10zu %10zu %6zu %10.1f %10.1f %10.1f %9.2f %12.1f\n", job.bytes, job.chunk, calls,
                median, times[times.size() * 99 / 100], times[0],
                static_cast<double>(job.bytes) * 8e-3 / median, cpu);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  bool add = false;
  int spin_us = 0;
  std::vector<Job> jobs;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--add") {
      add = true;
    } else if (argument == "--spin" && i + 1 < argc) {
      spin_us = std::atoi(argv[++i]);
    } else {
      char* end = nullptr;
      const size_t bytes = std::strtoull(argument.c_str(), &end, 10);
      const size_t chunk =
          *end == ':' ? std::strtoull(end + 1, nullptr, 10) : std::min<size_t>(bytes, 256 << 10);
      if (bytes == 0 || bytes > kLimit || chunk == 0)
        fail("expected SIZE[:CHUNK], at most 256 MiB, not " + argument);
      jobs.push_back({bytes, chunk});
    }
  }
  if (jobs.empty())
    jobs = {{4096, 4096},         {64 << 10, 64 << 10},  {1 << 20, 256 << 10},
            {4 << 20, 256 << 10}, {16 << 20, 256 << 10}, {64 << 20, 256 << 10}};

  for (const Job& job : jobs) buffer_bytes = std::max(buffer_bytes, job.bytes);

  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) fail("pipe");
  const pid_t server = fork();
  if (server == 0) return serve(pipe_ends[1], add, spin_us, jobs[0].chunk);
  char address[64] = {};
  if (read(pipe_ends[0], address, sizeof(address) - 1) <= 0) fail("the server did not start");
  drive(address, jobs, spin_us);
  waitpid(server, nullptr, 0);
  return 0;
}
