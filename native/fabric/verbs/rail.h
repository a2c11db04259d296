/* fabric/verbs/rail.h: one device of a fabric, and where its traffic leaves. */
#pragma once

#include "fabric/verbs/library.h"

#if JAXRDMA_HAVE_VERBS

#include <cstdint>
#include <memory>
#include <string>

#include "fabric/tcp/endpoint.h"
#include "fabric/verbs/device.h"
#include "fabric/verbs/queue_pair.h"

namespace jaxrdma::fabric::verbs {

/// Receives beyond those that writes may use: for credits. Credits of two grants at most are on the
/// way at one time, as a grant is only made when the peer has used up half of what it had.
inline constexpr uint32_t kReservedReceives = 8;
/// Receives for `depth` writes: a long one takes two. They have no memory: 16 to 64 bytes each.
constexpr uint32_t receives_wanted(uint32_t depth) { return 2 * depth + kReservedReceives; }

/// Used under the lock of the fabric's owner only.
class Rail {
 public:
  /// The `index`th of `verbs.sources`. Fails where there is no such device, active port or GID.
  static Result<std::unique_ptr<Rail>> open(const Options& options, const VerbsOptions& verbs,
                                            uint32_t index);

  uint32_t index() const { return index_; }
  const std::shared_ptr<Device>& device() const { return device_; }
  const PortInfo& port() const { return port_; }
  CompletionChannel& channel() const { return *channel_; }
  uint32_t receive_depth() const { return receive_depth_; }
  uint32_t send_depth() const { return send_depth_; }

  /// In INIT, for a peer with this GID. The port is asked anew each time: one that comes back may
  /// have another MTU, and its GIDs elsewhere.
  Result<std::shared_ptr<QueuePair>> make_queue_pair(const RawGid* peer);
  /// The MTU of a peer, in bytes.
  void meet(uint32_t mtu);
  void port_changed(bool active);

  /// "rxe0 port 1, GID 192.0.2.1 (index 1, RoCE v2), MTU 4096".
  std::string describe() const;
  /// What people should know of the peers met so far; empty if nothing.
  std::string notice() const;
  /// "; port 1 of rxe0 on this side went down 2.1 s ago" after such an event; else empty.
  std::string port_text() const;

 private:
  Rail(const VerbsOptions& verbs, uint32_t index) : verbs_(verbs), index_(index) {}
  const VerbsSource& source() const { return verbs_.sources[index_]; }

  const VerbsOptions& verbs_;
  const uint32_t index_;
  std::shared_ptr<Device> device_;
  PortInfo port_{};
  GidEntry gid_{};
  std::unique_ptr<CompletionChannel> channel_;
  uint32_t receive_depth_ = 0;
  uint32_t send_depth_ = 0;
  static constexpr uint32_t kNoPeer = UINT32_MAX;
  uint32_t peer_mtu_ = kNoPeer;  ///< the smallest of all peers
  int64_t port_lost_ns_ = tcp::kNever;
};

}  // namespace jaxrdma::fabric::verbs

#endif
