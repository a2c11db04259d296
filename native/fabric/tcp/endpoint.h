/* fabric/tcp/endpoint.h: one tcp connection: how it comes about, what it carries, how it ends. */
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/tcp/frame.h"
#include "fabric/tcp/ring.h"
#include "fabric/tcp/socket.h"

namespace jaxrdma::fabric::tcp {

class TcpFabric;

inline constexpr int64_t kNever = INT64_MAX;

/// Used under the lock of the fabric's owner only. Lives in its fabric.
class TcpEndpoint final : public Endpoint {
 public:
  /// The connecting side. `start` begins.
  TcpEndpoint(TcpFabric& fabric, EndpointId id, std::string address, HostPort where,
              const Hello& hello, int timeout_ms);
  /// The accepting side, of a connection just accepted by listener `listener`.
  TcpEndpoint(TcpFabric& fabric, EndpointId id, Fd socket, const SocketAddress& peer,
              size_t listener);
  ~TcpEndpoint() override;

  EndpointId id() const override { return id_; }
  const std::string& peer_address() const override { return peer_; }
  Status write(std::span<const Slice> local, RemoteSlice remote, Immediate immediate,
               RequestId request, Solicit solicit) override;
  Status read(Slice, RemoteSlice, RequestId) override {
    return {Code::kInvalidArgument, "tcp does not read in a peer's memory"};
  }
  size_t credits() const override { return credits_; }
  void release(size_t count) override;
  size_t outstanding() const override { return outstanding_; }
  void close(Status why, bool flush) override;
  uint64_t bytes_sent() const override { return bytes_sent_; }
  uint64_t bytes_received() const override { return bytes_received_; }

  // For the fabric.
  void start();
  void resolved(Result<std::vector<SocketAddress>> addresses);
  /// Works on what epoll said of the socket. Returns whether anything moved.
  bool on_ready(uint32_t epoll_events);
  void on_deadline();
  int64_t deadline_ns() const { return deadline_ns_; }
  bool dead() const { return state_ == State::kDead; }
  /// Why there is no connection yet; empty if there is, or was.
  std::string trouble() const;
  /// The owner has been told of the end.
  bool buried() const { return buried_; }
  void bury() { buried_ = true; }

 private:
  enum class State : uint8_t {
    kResolving,   ///< the name service was asked
    kConnecting,  ///< the kernel shakes hands
    kBackoff,     ///< waits to try again
    kAwaitHello,  ///< accepted; the peer's hello is to come
    kAwaitReply,  ///< hello sent; the peer's is to come
    kOpen,
    kFlushing,  ///< ends: sends what is queued, ignores what comes
    kDraining,  ///< ends: all is sent and the sending direction shut; waits until the peer has seen
                ///< it and closes
    kDead,      ///< no socket
  };

  /// A frame, or the rest of one, that the socket has not taken yet.
  struct Queued {
    FrameHeader header;
    std::array<iovec, kMaxSlices> slices;
    uint32_t slice_count = 0;
    RequestId request = 0;
    std::string body;  ///< of frames that are not writes
  };

  // Coming about.
  void resolve_and_try();
  void try_next_address();
  void attempt_failed(std::string reason);
  void try_later(std::string reason);
  void on_connected();
  void give_up();
  /// How it stands with the last attempt to connect.
  std::string last_attempt() const;
  void on_hello();
  void on_reply();
  void open(Hello peer);

  // Sending.
  void enqueue(FrameType type, Immediate immediate, std::string body);
  bool flush();
  void advance(size_t sent);
  uint32_t take_credits_to_return();
  void return_credits_if_due();
  void watch_socket();

  // Receiving.
  bool receives() const {
    return state_ == State::kOpen || state_ == State::kAwaitHello || state_ == State::kAwaitReply;
  }
  bool receive(bool until_error);
  bool discard();
  void on_header();
  void on_body();
  std::byte* body_target(const char** why);

  // The end.
  void violation(const std::string& what);
  void lost(const std::string& how);
  void end(Status why, const std::string& text);
  void begin_flushing();
  void finish();
  void die(Status why);
  void announce_end(Status why);
  void set_deadline(int64_t deadline_ns);

  TcpFabric& fabric_;
  const EndpointId id_;
  const bool accepted_;
  const size_t listener_ = 0;
  State state_;
  bool announced_;      ///< the owner knows this endpoint
  bool ended_ = false;  ///< kDisconnected has been emitted
  bool buried_ = false;
  std::string peer_;
  Fd socket_;
  uint32_t watched_ = 0;  ///< what epoll watches the socket for; 0: it is not in the set
  int64_t deadline_ns_ = kNever;

  // The connecting side.
  HostPort where_;
  Hello hello_;
  bool numeric_ = false;
  int64_t began_ns_ = 0;
  int64_t give_up_ns_ = kNever;
  int64_t backoff_ns_ = 0;
  int attempts_ = 0;
  std::string last_error_;  ///< of the last attempt that ended; empty if none has
  std::vector<SocketAddress> addresses_;
  size_t next_address_ = 0;

  // Sending.
  Ring<Queued> queue_;
  size_t front_sent_ = 0;  ///< bytes of the queue's first frame that the socket has taken
  int send_error_ = 0;     ///< the socket takes no more; what it still has to read comes first
  size_t outstanding_ = 0;
  uint32_t credits_ = 0;     ///< writes we may send
  uint32_t peer_depth_ = 0;  ///< upper bound of credits_, as the peer said
  uint64_t bytes_sent_ = 0;
  Status close_reason_;

  // Receiving.
  std::array<std::byte, sizeof(FrameHeader)> next_;  ///< the header that comes next
  size_t next_have_ = 0;
  FrameHeader header_;  ///< of the body that is being received
  bool in_body_ = false;
  uint64_t body_have_ = 0;
  std::vector<std::byte> body_;     ///< of frames that are not writes
  uint32_t peer_credits_ = 0;       ///< writes the peer may send, as far as it has been told
  uint32_t credits_to_return_ = 0;  ///< released here, and not told yet
  uint32_t unreleased_ = 0;         ///< received, and not released
  uint64_t bytes_received_ = 0;
};

}  // namespace jaxrdma::fabric::tcp
