/* fabric/verbs/rail.cc: one device of a fabric. */
#include "fabric/verbs/rail.h"

#if JAXRDMA_HAVE_VERBS

#include <algorithm>
#include <cstdio>
#include <utility>

namespace jaxrdma::fabric::verbs {

namespace {

// Answers and credits of a step for one peer fit well; a work queue entry of a write takes 64 to
// 256 bytes of pinned memory.
constexpr uint32_t kMaxDepth = 512;

}  // namespace

Result<std::unique_ptr<Rail>> Rail::open(const Options& options, const VerbsOptions& verbs,
                                         uint32_t index) {
  std::unique_ptr<Rail> made(new Rail(verbs, index));
  const VerbsSource& source = made->source();
  auto device = Device::open(source.device);
  if (!device.ok()) return device.status();
  made->device_ = std::move(device.value());
  const std::string& name = made->device_->name();
  auto port = made->device_->port(static_cast<uint8_t>(source.port));
  if (!port.ok()) return port.status();
  made->port_ = std::move(port.value());
  const std::string number = std::to_string(made->port_.number);
  if (!made->port_.active) {
    return Status(Code::kUnavailable,
                  "port " + number + " of device " + name + " is " + made->port_.state +
                      ", not ACTIVE: check the cable, the switch, and `ip link` of its network "
                      "device");
  }
  if (verbs.pkey_index != 0 && verbs.pkey_index >= made->port_.pkeys.size()) {
    return Status(Code::kInvalidArgument,
                  "pkey index " + std::to_string(verbs.pkey_index) + " of " + name +
                      ": the table has " + std::to_string(made->port_.pkeys.size()) + " entries");
  }
  auto gid = choose_gid(name, made->port_, source, nullptr);
  if (!gid.ok()) return gid.status();
  made->gid_ = std::move(gid.value());

  const auto most = static_cast<uint32_t>(std::max(64, made->device_->attributes().max_qp_wr));
  made->receive_depth_ =
      std::min({options.receive_depth, kMaxDepth, (most - kReservedReceives) / 2});
  made->send_depth_ = std::min(kMaxDepth, most);
  auto channel = CompletionChannel::create(made->device_);
  if (!channel.ok()) return channel.status();
  made->channel_ = std::move(channel.value());
  return made;
}

Result<std::shared_ptr<QueuePair>> Rail::make_queue_pair(const RawGid* peer) {
  auto port = device_->port(port_.number);
  if (!port.ok()) return port.status();
  if (!port.value().active) {
    return Status(Code::kUnavailable, "port " + std::to_string(port_.number) + " of " +
                                          device_->name() + " is " + port.value().state);
  }
  auto gid = choose_gid(device_->name(), port.value(), source(), peer);
  if (!gid.ok()) return gid.status();
  port_ = std::move(port.value());
  gid_ = std::move(gid.value());
  return QueuePair::create(device_, port_, gid_, *channel_, verbs_, send_depth_,
                           receives_wanted(receive_depth_));
}

void Rail::meet(uint32_t mtu) { peer_mtu_ = std::min(peer_mtu_, mtu); }

void Rail::port_changed(bool active) { port_lost_ns_ = active ? tcp::kNever : tcp::monotonic_ns(); }

std::string Rail::describe() const {
  const uint32_t used = std::min(port_.active_mtu, peer_mtu_);
  return device_->name() + " port " + std::to_string(port_.number) + ", GID " + gid_text(gid_.gid) +
         " (index " + std::to_string(gid_.index) + ", " + gid_.type + "), MTU " +
         std::to_string(used) +
         (used < port_.active_mtu ? ", the peer's (" + std::to_string(port_.active_mtu) + " here)"
                                  : "");
}

std::string Rail::notice() const {
  if (peer_mtu_ == kNoPeer || peer_mtu_ == port_.active_mtu) return {};
  return "MTU " + std::to_string(std::min(port_.active_mtu, peer_mtu_)) +
         " is used: " + device_->name() + " port " + std::to_string(port_.number) + " has " +
         std::to_string(port_.active_mtu) + ", the peer " + std::to_string(peer_mtu_) +
         "; the same on both ends is faster";
}

std::string Rail::port_text() const {
  if (port_lost_ns_ == tcp::kNever) return {};
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.1f",
                static_cast<double>(tcp::monotonic_ns() - port_lost_ns_) * 1e-9);
  return "; port " + std::to_string(port_.number) + " of " + device_->name() +
         " on this side went down " + seconds + " s ago";
}

}  // namespace jaxrdma::fabric::verbs

#endif
