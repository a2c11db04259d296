/* fabric/verbs/queue_pair.h: one reliable queue pair and its completion queue. */
#pragma once

#include "fabric/verbs/library.h"

#if JAXRDMA_HAVE_VERBS

#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "fabric/fabric.h"
#include "fabric/verbs/device.h"
#include "fabric/verbs/frame.h"

namespace jaxrdma::fabric::verbs {

/// Reports completions of several queue pairs by one descriptor.
class CompletionChannel {
 public:
  static Result<std::unique_ptr<CompletionChannel>> create(std::shared_ptr<Device> device);
  int fd() const { return channel_->fd; }
  ibv_comp_channel* get() const { return channel_.get(); }

 private:
  struct Destroy {
    void operator()(ibv_comp_channel* channel) const { ibv_destroy_comp_channel(channel); }
  };
  CompletionChannel(std::shared_ptr<Device> device, ibv_comp_channel* channel)
      : device_(std::move(device)), channel_(channel) {}
  std::shared_ptr<Device> device_;  // outlives channel_
  std::unique_ptr<ibv_comp_channel, Destroy> channel_;
};

/// A queue pair of its own completion queue, as deep as both of its work queues together: it
/// cannot overrun, whatever the number of peers.
///
/// Threads. `connect` may run beside everything else on the fabric's set-up thread; all other
/// calls are serialised by the fabric.
class QueuePair {
 public:
  /// In state INIT, without receives.
  static Result<std::shared_ptr<QueuePair>> create(std::shared_ptr<Device> device,
                                                   const PortInfo& port, const GidEntry& gid,
                                                   CompletionChannel& channel,
                                                   const VerbsOptions& options, uint32_t send_depth,
                                                   uint32_t receive_depth);
  /// Stops the device's work on it: no memory is read or written after this.
  ~QueuePair();

  /// RDMA READs that a queue pair of the device answers at one time.
  static uint8_t reads(const Device& device);

  uint32_t number() const { return queue_pair_->qp_num; }
  /// Of this process's queue pairs, which one: addresses and numbers are used again.
  uint64_t serial() const { return serial_; }
  uint32_t packet_sequence() const { return packet_sequence_; }
  uint32_t max_inline() const { return max_inline_; }
  const GidEntry& gid() const { return gid_; }
  ibv_cq* completion_queue() const { return completions_.get(); }

  /// Posts `count` receives without memory: writes bring their own address.
  Status post_receives(uint32_t count);
  /// INIT to RTR to RTS. May block for a second while the kernel looks for the peer's address.
  Status connect(const ConnectionParameters& peer);
  /// Ends all of its work, with flushed completions.
  void fail();

  Status post(ibv_send_wr& request);
  /// Returns how many completions it stored.
  int poll(std::span<ibv_wc> completions) {
    return ibv_poll_cq(completions_.get(), static_cast<int>(completions.size()),
                       completions.data());
  }
  /// Which completions write an event to the channel, once. kSolicited: what the peer has marked
  /// so, and errors.
  enum class Armed : uint8_t { kNot, kSolicited, kAll };
  /// Those that came before write none: poll after this.
  bool arm(Armed which) {
    return ibv_req_notify_cq(completions_.get(), which == Armed::kSolicited ? 1 : 0) == 0;
  }

  Armed armed = Armed::kNot;  ///< guarded like the polling of its completions

 private:
  struct DestroyCq {
    void operator()(ibv_cq* queue) const { ibv_destroy_cq(queue); }
  };
  struct DestroyQp {
    void operator()(ibv_qp* queue) const { ibv_destroy_qp(queue); }
  };
  QueuePair() = default;

  std::shared_ptr<Device> device_;
  VerbsOptions options_;
  uint8_t port_ = 1;
  bool ethernet_ = true;
  uint32_t active_mtu_ = 0;  ///< enum ibv_mtu
  GidEntry gid_;
  uint64_t serial_ = 0;
  uint32_t packet_sequence_ = 0;
  uint32_t max_inline_ = 0;
  std::unique_ptr<ibv_cq, DestroyCq> completions_;
  std::unique_ptr<ibv_qp, DestroyQp> queue_pair_;  // destroyed before completions_
};

/// The enum of a path MTU in bytes.
ibv_mtu mtu_of(uint32_t bytes);

}  // namespace jaxrdma::fabric::verbs

#endif
