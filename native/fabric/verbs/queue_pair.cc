/* fabric/verbs/queue_pair.cc: one reliable queue pair and its completion queue. */
#include "fabric/verbs/queue_pair.h"

#if JAXRDMA_HAVE_VERBS

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <string>

#include "fabric/verbs/explain.h"

namespace jaxrdma::fabric::verbs {

namespace {

// What perftest asks for; devices that cannot say so, and are asked for less.
constexpr std::array<uint32_t, 4> kInlineBytes{220, 128, 64, 0};
// 0.64 ms: what NCCL and perftest use. 0 would mean 655 ms.
constexpr uint8_t kMinRnrTimer = 12;
// Finite, and never needed: credits keep the receives ahead of the writes.
constexpr uint8_t kRnrRetry = 6;
constexpr uint8_t kHopLimit = 64;

}  // namespace

Result<std::unique_ptr<CompletionChannel>> CompletionChannel::create(
    std::shared_ptr<Device> device) {
  ibv_comp_channel* channel = ibv_create_comp_channel(device->context());
  if (channel == nullptr) {
    return Status(Code::kResource, "no completion channel on device " + device->name() + ": " +
                                       explain_memory(errno, 0));
  }
  const int flags = fcntl(channel->fd, F_GETFL);
  fcntl(channel->fd, F_SETFL, flags | O_NONBLOCK);
  return std::unique_ptr<CompletionChannel>(new CompletionChannel(std::move(device), channel));
}

ibv_mtu mtu_of(uint32_t bytes) {
  return bytes >= 4096   ? IBV_MTU_4096
         : bytes >= 2048 ? IBV_MTU_2048
         : bytes >= 1024 ? IBV_MTU_1024
         : bytes >= 512  ? IBV_MTU_512
                         : IBV_MTU_256;
}

Result<std::shared_ptr<QueuePair>> QueuePair::create(std::shared_ptr<Device> device,
                                                     const PortInfo& port, const GidEntry& gid,
                                                     CompletionChannel& channel,
                                                     const VerbsOptions& options,
                                                     uint32_t send_depth, uint32_t receive_depth) {
  static std::atomic<uint64_t> created{0};
  std::shared_ptr<QueuePair> made(new QueuePair());
  made->serial_ = ++created;
  made->options_ = options;
  made->port_ = port.number;
  made->ethernet_ = port.link_layer == "Ethernet";
  made->active_mtu_ = mtu_of(port.active_mtu);
  made->gid_ = gid;
  made->packet_sequence_ = std::random_device{}() & 0xffffff;
  made->completions_.reset(ibv_create_cq(device->context(),
                                         static_cast<int>(send_depth + receive_depth), made.get(),
                                         channel.get(), 0));
  if (made->completions_ == nullptr) {
    return Status(Code::kResource,
                  "no completion queue of " + std::to_string(send_depth + receive_depth) +
                      " entries on device " + device->name() + ": " + explain_memory(errno, 0));
  }
  int error = 0;
  for (const uint32_t inline_bytes : kInlineBytes) {
    ibv_qp_init_attr initial{};
    initial.send_cq = initial.recv_cq = made->completions_.get();
    initial.qp_type = IBV_QPT_RC;
    initial.cap.max_send_wr = send_depth;
    initial.cap.max_recv_wr = receive_depth;
    initial.cap.max_send_sge = Endpoint::kMaxSlices;
    initial.cap.max_recv_sge = 1;
    initial.cap.max_inline_data = inline_bytes;
    made->queue_pair_.reset(ibv_create_qp(device->pd(), &initial));
    if (made->queue_pair_ != nullptr) {
      made->max_inline_ = initial.cap.max_inline_data;
      break;
    }
    error = errno;
    if (error != EINVAL) break;
  }
  if (made->queue_pair_ == nullptr) {
    return Status(Code::kResource,
                  "no queue pair of " + std::to_string(send_depth) + " sends and " +
                      std::to_string(receive_depth) + " receives on device " + device->name() +
                      " (it has at most " + std::to_string(device->attributes().max_qp) +
                      " queue pairs): " + explain_memory(error, 0));
  }
  made->device_ = std::move(device);

  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.pkey_index = static_cast<uint16_t>(options.pkey_index);
  attributes.port_num = port.number;
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  error = ibv_modify_qp(made->queue_pair_.get(), &attributes,
                        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (error != 0) {
    return Status(Code::kInvalidArgument, "the queue pair of device " + made->device_->name() +
                                              " did not become INIT on port " +
                                              std::to_string(port.number) + " with pkey index " +
                                              std::to_string(options.pkey_index) + ": " +
                                              errno_text(error));
  }
  return made;
}

uint8_t QueuePair::reads(const Device& device) {
  return static_cast<uint8_t>(std::min(16, device.attributes().max_qp_rd_atom));
}

QueuePair::~QueuePair() {
  // A queue pair in ERR does not start anything new while it is being destroyed.
  if (queue_pair_ != nullptr) fail();
}

Status QueuePair::post_receives(uint32_t count) {
  ibv_recv_wr request{};
  request.wr_id = UINT64_MAX;
  for (uint32_t i = 0; i < count; ++i) {
    ibv_recv_wr* bad = nullptr;
    if (const int error = ibv_post_recv(queue_pair_.get(), &request, &bad); error != 0)
      return {Code::kResource,
              "device " + device_->name() + " took no receive: " + explain_post(error)};
  }
  return {};
}

Status QueuePair::connect(const ConnectionParameters& peer) {
  const std::string local_gid = gid_text(gid_.gid);
  RawGid remote{};
  std::copy(peer.gid.begin(), peer.gid.end(), remote.begin());
  const std::string remote_gid = gid_text(remote);
  if ((peer.ethernet != 0) != ethernet_) {
    return {Code::kInvalidArgument,
            "this side's port is " + std::string(ethernet_ ? "Ethernet" : "InfiniBand") +
                ", the peer's is " + (ethernet_ ? "InfiniBand" : "Ethernet") +
                ": they cannot be connected; set JAXRDMA_DEVICE on one of them"};
  }
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = static_cast<ibv_mtu>(std::min<uint32_t>(peer.mtu, active_mtu_));
  attributes.dest_qp_num = peer.queue_pair;
  attributes.rq_psn = peer.packet_sequence;
  attributes.max_dest_rd_atomic = reads(*device_);
  attributes.min_rnr_timer = kMinRnrTimer;
  attributes.ah_attr.port_num = port_;
  attributes.ah_attr.sl = static_cast<uint8_t>(options_.service_level);
  attributes.ah_attr.dlid = peer.lid;
  // Routed by GID on Ethernet; on InfiniBand only between subnets.
  const bool same_subnet = std::equal(remote.begin(), remote.begin() + 8, gid_.gid.begin());
  if (ethernet_ || !same_subnet) {
    attributes.ah_attr.is_global = 1;
    std::copy(remote.begin(), remote.end(), attributes.ah_attr.grh.dgid.raw);
    attributes.ah_attr.grh.sgid_index = static_cast<uint8_t>(gid_.index);
    attributes.ah_attr.grh.hop_limit = kHopLimit;
    attributes.ah_attr.grh.traffic_class = static_cast<uint8_t>(options_.traffic_class);
  }
  int error = ibv_modify_qp(queue_pair_.get(), &attributes,
                            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (error != 0)
    return {Code::kUnavailable, explain_transition("RTR", error, local_gid, remote_gid)};
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = static_cast<uint8_t>(options_.timeout);
  attributes.retry_cnt = static_cast<uint8_t>(options_.retry_count);
  attributes.rnr_retry = kRnrRetry;
  attributes.sq_psn = packet_sequence_;
  attributes.max_rd_atomic =
      static_cast<uint8_t>(std::min<int>(peer.reads, device_->attributes().max_qp_init_rd_atom));
  error = ibv_modify_qp(queue_pair_.get(), &attributes,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  if (error != 0)
    return {Code::kUnavailable, explain_transition("RTS", error, local_gid, remote_gid)};
  return {};
}

void QueuePair::fail() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  ibv_modify_qp(queue_pair_.get(), &attributes, IBV_QP_STATE);
}

Status QueuePair::post(ibv_send_wr& request) {
  ibv_send_wr* bad = nullptr;
  if (const int error = ibv_post_send(queue_pair_.get(), &request, &bad); error != 0)
    return {Code::kResource,
            "device " + device_->name() + " took no work request: " + explain_post(error)};
  return {};
}

}  // namespace jaxrdma::fabric::verbs

#endif
