/* fabric/fabric.h: what every transport offers: registered memory, and reliable one-sided writes
   that tell the receiver.

   The face is that of RDMA verbs. A process registers memory and gives remote keys to its peers; a
   peer writes into that memory and delivers a 32-bit immediate once all of the data is visible;
   completions say when a write's source may be reused and when a peer's write has arrived. Nobody
   polls memory. The fabric knows nothing of parameters.

   Threads. A fabric has one owner, which serialises every call on the fabric and its endpoints by a
   lock of its own (the engine's progress lock). The exceptions: `wait` is called by the progress
   thread without that lock, so that others may post while it sleeps; `wake` is called by anybody.
   No call but `wait` blocks. */
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace jaxrdma::fabric {

/// Of kImmediateBits: the verbs fabric numbers its writes in the bits above.
using Immediate = uint32_t;
inline constexpr uint32_t kImmediateBits = 24;
using RequestId = uint64_t;
using EndpointId = uint32_t;  ///< never reused within one fabric

/// Devices over which one fabric may spread what it sends, at most.
inline constexpr size_t kMostDevices = 4;

/// What a peer names a region by: a key for each device of the fabric that registered it, in the
/// order of its options; the rest are 0. Fabrics without devices use the first.
using RemoteKey = std::array<uint32_t, kMostDevices>;

/// What a peer may do with a region. Local access is always there.
enum class Access : uint8_t { kLocal = 0, kRemoteWrite = 1, kRemoteRead = 2, kRemoteReadWrite = 3 };

/// Memory that the fabric may read from and, with remote access, that peers may write to.
/// Destroying it withdraws the remote key; the memory itself belongs to the caller and must outlive
/// it, and must not be the source of a write that has not completed.
class MemoryRegion {
 public:
  virtual ~MemoryRegion() = default;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const RemoteKey& remote_key() const { return remote_key_; }

 protected:
  MemoryRegion(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {}
  MemoryRegion(const MemoryRegion&) = delete;
  MemoryRegion& operator=(const MemoryRegion&) = delete;
  std::byte* data_;
  size_t bytes_;
  RemoteKey remote_key_{};
};

/// A piece of registered local memory.
struct Slice {
  const MemoryRegion* region;
  const std::byte* data;  ///< inside `region`
  size_t bytes;
};

/// Where a write lands in the peer's memory: an address inside the region that `key` names there.
struct RemoteSlice {
  uint64_t address;
  RemoteKey key;
};

/// The first thing each side says on a data connection. Everything but the names is compared before
/// anything else is believed; the token, issued by the control plane, in constant time.
struct Hello {
  static constexpr size_t kTokenBytes = 16;
  std::string job;  ///< the job's id, at most 64 bytes
  uint16_t protocol_version = 0;
  uint32_t worker = 0;           ///< index of the connecting worker
  uint64_t incarnation = 0;      ///< of the connecting worker
  std::vector<std::byte> token;  ///< kTokenBytes
  /// Opaque to the fabric, at most 3 KiB: what the engines must know of each other before the first
  /// write. The accepting side fills in its own in the reply.
  std::vector<std::byte> payload;
};

/// What happened, in the order it happened per endpoint.
struct Event {
  enum class Kind : uint8_t {
    kConnected,     ///< hello accepted on both sides; `hello` is the peer's; writes may be posted
    kDisconnected,  ///< the endpoint is dead; `status` says why; it has no events after this one
    kWriteDone,     ///< the source of write `request` may be reused (says nothing of the peer)
    kReceived,  ///< a peer's write of `bytes` bytes is visible in local memory; `immediate` is what
                ///< came with it
    kCredits,   ///< credits() of this endpoint went from 0 to more
    kReadDone,  ///< what read `request` asked for is in local memory
  };
  Kind kind;
  EndpointId endpoint;
  RequestId request = 0;
  Immediate immediate = 0;
  uint64_t bytes = 0;
  Status status;
  std::shared_ptr<const Hello> hello;
};

/// Whether a write wakes a peer that waits patiently (see Fabric::wait). In verbs: a solicited
/// event.
enum class Solicit : uint8_t { kYes, kNo };

/// One reliable connection to a peer. Owned by its fabric.
class Endpoint {
 public:
  virtual ~Endpoint() = default;
  virtual EndpointId id() const = 0;
  /// Address of the peer, as people read it ("127.0.0.1:40112").
  virtual const std::string& peer_address() const = 0;

  /// Writes the concatenation of `local` (at most kMaxSlices) to `remote` and delivers `immediate`
  /// to the peer once all of it is visible there. The slices' memory must stay untouched until
  /// kWriteDone with `request`. Needs a credit and takes one. Never blocks. 0 bytes in total are
  /// legal: only the immediate is delivered, `remote` is not looked at. Writes of one endpoint
  /// arrive in the order posted where a single device carries them; over several, in any order.
  virtual Status write(std::span<const Slice> local, RemoteSlice remote, Immediate immediate,
                       RequestId request, Solicit solicit = Solicit::kYes) = 0;
  static constexpr size_t kMaxSlices = 4;

  /// Reads local.bytes > 0 bytes at `remote` in the peer's memory into `local`, whose region must
  /// be one that peers may write to; kReadDone with `request` follows. Takes no credit, and the
  /// peer has nothing to do with it: who reads memory that changes must find out by himself. Reads
  /// of one endpoint happen in the order asked for. Only where the fabric `can_read`.
  virtual Status read(Slice local, RemoteSlice remote, RequestId request) = 0;

  /// How many writes the peer is ready to receive now.
  virtual size_t credits() const = 0;
  /// Gives the peer back `count` credits: as many received writes have been dealt with here.
  /// (verbs: receives re-posted.)
  virtual void release(size_t count) = 0;
  /// Writes posted whose kWriteDone has not been delivered.
  virtual size_t outstanding() const = 0;

  /// Ends the connection, with kDisconnected to follow, after what was posted before is sent if
  /// `flush`, bounded by the fabric's close_timeout_ms. Idempotent.
  virtual void close(Status why, bool flush) = 0;

  virtual uint64_t bytes_sent() const = 0;      ///< payload only
  virtual uint64_t bytes_received() const = 0;  ///< payload only
};

/// A peer that says it can receive more writes than this is refused: so many it can make us
/// remember, some hundred bytes each, by never taking any. Ours ask for Options::receive_depth, or
/// for as many as a worker has slots on a server, which this bounds; over verbs for 512 at most.
inline constexpr uint32_t kMaxReceiveDepth = 1u << 16;

struct Options {
  /// Writes that a peer may have in flight towards one of our endpoints, over each device; at most
  /// kMaxReceiveDepth. Told in the hello.
  uint32_t receive_depth = 4096;
  /// A connection that has not finished its hello after this is dropped.
  int hello_timeout_ms = 5000;
  int close_timeout_ms = 2000;
  /// A connection ends when the peer's machine has not answered for so long; its processes may be
  /// as slow as they like. 0: after some 25 s, and only looked for while nothing is on the way.
  int silence_timeout_ms = 0;
  /// Connections that may be open without having finished their hello; more are refused.
  uint32_t max_pending_hellos = 64;
};

/// Where traffic leaves: a device, a port of it, an address of that.
struct VerbsSource {
  std::string device;  ///< empty: the first with an active port
  uint32_t port = 0;   ///< 0: the first active one
  int gid_index = -1;  ///< negative: see `gid`
  /// The source address to prefer, whatever its index is now, where the peer's is of its kind; all
  /// zeros: the best for the peer.
  std::array<uint8_t, 16> gid{};
  std::string gid_type;  ///< of `gid`: "RoCE v2", "RoCE v1", "IB"
};

/// What the verbs fabric needs beside Options. The defaults are for RoCE v2 in one data centre.
struct VerbsOptions {
  /// Different devices, at most kMostDevices: writes are spread over them. Device i here talks to
  /// device i of a peer that has as many; where one side has fewer, each of its devices talks to
  /// several.
  std::vector<VerbsSource> sources{1};
  uint32_t pkey_index = 0;
  uint32_t traffic_class = 0;  ///< of the IP packets of RoCE v2
  uint32_t service_level = 0;
  uint32_t timeout = 16;     ///< an answer is awaited for 4.096 us * 2^timeout
  uint32_t retry_count = 6;  ///< 7 is endless on some devices
  /// A broken link may take so long to come back before its connections end.
  int link_timeout_ms = 20000;
};

/// Which transport, and what it needs.
struct TransportOptions {
  std::string name = "tcp";  ///< "tcp" or "verbs"
  VerbsOptions verbs;
  std::string fault;  ///< what goes wrong, to order (faulty/fault.h); empty: nothing
};

/// Decides about a Hello on the accepting side: the reply's payload, or why not. Called inside
/// `poll`, for the endpoint that has, or would have, this id. The text of a refusal goes to the
/// peer, which asks again, until its time is up, if the code is kUnavailable.
using Gatekeeper = std::function<Result<std::vector<std::byte>>(EndpointId, const Hello&)>;

/// One transport in one process: memory, endpoints and their completions.
class Fabric {
 public:
  virtual ~Fabric() = default;
  virtual const char* name() const = 0;  ///< "tcp", "verbs", "shm"
  /// For people: the name, and what was chosen ("verbs, rxe0 port 1, GID 192.0.2.1 (RoCE v2),
  /// ...").
  virtual std::string describe() const { return name(); }
  /// What people should know of the peers met so far; empty if nothing.
  virtual std::string notice() const { return {}; }
  /// Which connections do not work just now, and why; empty if all do.
  virtual std::string trouble() const { return {}; }
  /// Connections that ended, or were ended, before their hello was accepted: strangers, most often.
  virtual uint64_t turned_away() const { return 0; }

  /// Makes [data, data+bytes) usable as a source and, by `access`, as a target of peers. bytes > 0.
  virtual Result<std::unique_ptr<MemoryRegion>> register_memory(std::byte* data, size_t bytes,
                                                                Access access) = 0;
  /// True where registering costs next to nothing, so that buffers owned by others can be
  /// registered for one transfer; false where memory should be registered once and data copied in
  /// and out of it.
  virtual bool registration_is_cheap() const = 0;
  /// Whether endpoints `read`.
  virtual bool can_read() const = 0;

  /// Starts to accept peers at `address` ("host:port", "[::1]:port", port 0 = any free one);
  /// returns the real address.
  virtual Result<std::string> listen(const std::string& address, Gatekeeper gatekeeper) = 0;
  /// Starts to connect to a peer that listens at `address`; kConnected or kDisconnected follows
  /// within `timeout_ms`. A refused or unreachable connection is retried until then: peers start in
  /// any order.
  virtual Result<EndpointId> connect(const std::string& address, const Hello& hello,
                                     int timeout_ms) = 0;
  /// nullptr once kDisconnected has been delivered.
  virtual Endpoint* endpoint(EndpointId id) = 0;

  /// Moves data without blocking, and appends what happened to `events`. Bounded work per call.
  /// Returns whether anything moved.
  virtual bool poll(std::vector<Event>& events) = 0;
  /// Sleeps until `poll` may have something to do, `wake` is called, or `timeout_ms` has passed
  /// (-1: no limit). `patient`: need not wake for a kWriteDone, nor for what a peer has written
  /// with Solicit::kNo; `poll` delivers them when something else does.
  virtual void wait(int timeout_ms, bool patient = false) = 0;
  virtual void wake() = 0;
};

/// The tcp fabric. Never fails but for want of file descriptors.
Result<std::unique_ptr<Fabric>> make_tcp_fabric(const Options& options);

/// The verbs fabric. Fails where there is no libibverbs, no device, no active port or no GID, and
/// says which; it never falls back to another transport.
Result<std::unique_ptr<Fabric>> make_verbs_fabric(const Options& options,
                                                  const VerbsOptions& verbs);

/// The one that `transport` names.
Result<std::unique_ptr<Fabric>> make_fabric(const TransportOptions& transport,
                                            const Options& options);

}  // namespace jaxrdma::fabric
