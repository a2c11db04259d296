/* fabric/verbs/device.h: RDMA devices: what is on this machine, and one that is open. */
#pragma once

#include "fabric/verbs/library.h"

#if JAXRDMA_HAVE_VERBS

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "fabric/fabric.h"

namespace jaxrdma::fabric::verbs {

using RawGid = std::array<uint8_t, 16>;

/// One filled slot of a port's GID table.
struct GidEntry {
  int index;
  RawGid gid;
  std::string type;        ///< "IB", "RoCE v1", "RoCE v2"
  std::string net_device;  ///< "" where there is none, or it is in another network namespace
};

/// What is known of a port without sending anything.
struct PortInfo {
  uint8_t number;
  bool active;
  std::string state;       ///< "ACTIVE", "DOWN", ...
  std::string link_layer;  ///< "Ethernet", "InfiniBand"
  uint32_t active_mtu;     ///< bytes of payload per packet
  uint32_t max_message;    ///< bytes
  uint16_t lid;
  std::vector<uint16_t> pkeys;
  std::vector<GidEntry> gids;
};

struct DeviceInfo {
  std::string name;
  std::string firmware;
  uint32_t max_qp;
  uint32_t max_qp_wr;
  uint32_t max_cqe;
  uint64_t max_mr_size;
  std::vector<PortInfo> ports;
  std::string problem;  ///< why it could not be opened; then only `name` is known
};

/// Every RDMA device that the kernel shows, one that cannot be opened too. Empty where the kernel
/// has none.
Result<std::vector<DeviceInfo>> list_devices();

/// "192.0.2.7" of an IPv4-mapped GID, else IPv6 notation.
std::string gid_text(const RawGid& gid);
bool gid_is_ipv4(const RawGid& gid);
bool gid_is_link_local(const RawGid& gid);

struct CloseContext {
  void operator()(ibv_context* context) const { ibv_close_device(context); }
};
struct FreePd {
  void operator()(ibv_pd* pd) const { ibv_dealloc_pd(pd); }
};

/// An open device and the protection domain of this job in it. Shared by everything made from it,
/// so that it goes last.
class Device {
 public:
  /// `name` empty: the first with an active port.
  static Result<std::shared_ptr<Device>> open(const std::string& name);

  const std::string& name() const { return name_; }
  ibv_context* context() const { return context_.get(); }
  ibv_pd* pd() const { return pd_.get(); }
  const ibv_device_attr& attributes() const { return attributes_; }
  /// What the port is now; `number` 0: the first active one.
  Result<PortInfo> port(uint8_t number) const;

 private:
  Device() = default;
  std::string name_;
  std::unique_ptr<ibv_context, CloseContext> context_;
  std::unique_ptr<ibv_pd, FreePd> pd_;
  ibv_device_attr attributes_{};
};

/// The GID to use for a peer: the one at `source.gid_index` where that is not negative; else
/// `source.gid`, unless it went away or the peer's is of another kind; else RoCE v2 before v1, the
/// peer's kind first, global before link-local. `peer` null: not known yet.
Result<GidEntry> choose_gid(const std::string& device, const PortInfo& port,
                            const VerbsSource& source, const RawGid* peer);

}  // namespace jaxrdma::fabric::verbs

#endif
