/* fabric/verbs/device.cc: RDMA devices: what is on this machine, and one that is open. */
#include "fabric/verbs/device.h"

#if JAXRDMA_HAVE_VERBS

#include <arpa/inet.h>
#include <fcntl.h>
#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "fabric/verbs/explain.h"

namespace jaxrdma::fabric::verbs {

namespace {

struct FreeList {
  void operator()(ibv_device** list) const { ibv_free_device_list(list); }
};
using DeviceList = std::unique_ptr<ibv_device*[], FreeList>;

DeviceList device_list(int& count) {
  count = 0;
  // Null with ENOSYS where the kernel has no ib_uverbs: there is no device then.
  DeviceList list(ibv_get_device_list(&count));
  if (list == nullptr) count = 0;
  return list;
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);  // an empty slot of the GID table cannot be read
  return line;
}

const char* state_name(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_DOWN:
      return "DOWN";
    case IBV_PORT_INIT:
      return "INIT";
    case IBV_PORT_ARMED:
      return "ARMED";
    case IBV_PORT_ACTIVE:
      return "ACTIVE";
    case IBV_PORT_ACTIVE_DEFER:
      return "ACTIVE_DEFER";
    default:
      return "UNKNOWN";
  }
}

std::vector<GidEntry> query_gids(ibv_context* context, const std::string& device, uint8_t number,
                                 const ibv_port_attr& port) {
  const bool ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
  const std::string folder =
      "/sys/class/infiniband/" + device + "/ports/" + std::to_string(number) + "/gid_attrs";
  std::vector<GidEntry> found;
  const auto add = [&](int index, const ibv_gid& raw, std::string type, std::string net_device) {
    GidEntry entry{index, {}, std::move(type), std::move(net_device)};
    std::copy(std::begin(raw.raw), std::end(raw.raw), entry.gid.begin());
    if (entry.gid != RawGid{}) found.push_back(std::move(entry));
  };
  // One call for the filled slots, where the library and the kernel have it: reading all of 1024
  // slots one by one takes a second on a slow machine. The kernel's interface takes at most 64 KiB.
  std::vector<ibv_gid_entry> table(65535 / sizeof(ibv_gid_entry));
  const ssize_t count = ibv_query_gid_table(context, table.data(), table.size(), 0);
  if (count >= 0) {
    for (ssize_t i = 0; i < count; ++i) {
      const ibv_gid_entry& entry = table[static_cast<size_t>(i)];
      if (entry.port_num != number) continue;
      // The number of a network device in another namespace may be that of a stranger here, so the
      // kernel's name for it is compared; some kernels and containers do not tell it.
      char here[IF_NAMESIZE] = "";
      if (entry.ndev_ifindex != 0) if_indextoname(entry.ndev_ifindex, here);
      std::string name = first_line(folder + "/ndevs/" + std::to_string(entry.gid_index));
      if (name.empty()) {
        name = here;
      } else if (name != here) {
        name.clear();
      }
      add(static_cast<int>(entry.gid_index), entry.gid,
          entry.gid_type == IBV_GID_TYPE_ROCE_V2   ? "RoCE v2"
          : entry.gid_type == IBV_GID_TYPE_ROCE_V1 ? "RoCE v1"
                                                   : "IB",
          std::move(name));
    }
    return found;
  }
  for (int i = 0; i < port.gid_tbl_len; ++i) {
    ibv_gid raw{};
    if (ibv_query_gid(context, number, i, &raw) != 0) continue;  // unreadable in some containers
    const std::string type = first_line(folder + "/types/" + std::to_string(i));
    add(i, raw,
        type == "RoCE v2" ? type
        : ethernet        ? "RoCE v1"
                          : "IB",
        first_line(folder + "/ndevs/" + std::to_string(i)));
  }
  return found;
}

Result<PortInfo> query_port(ibv_context* context, const std::string& device, uint8_t number) {
  ibv_port_attr attributes{};
  if (const int error = ibv_query_port(context, number, &attributes); error != 0) {
    const std::string text = std::to_string(number) + ": " + errno_text(error);
    return error == EINVAL
               ? Status(Code::kInvalidArgument, "device " + device + " has no port " + text)
               : Status(Code::kUnavailable, "device " + device + " did not tell of port " + text);
  }
  PortInfo port{};
  port.number = number;
  port.active = attributes.state == IBV_PORT_ACTIVE;
  port.state = state_name(attributes.state);
  port.link_layer = attributes.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand";
  port.active_mtu = 128u << attributes.active_mtu;
  port.max_message = attributes.max_msg_sz;
  port.lid = attributes.lid;
  for (int i = 0; i < attributes.pkey_tbl_len; ++i) {
    __be16 pkey = 0;
    if (ibv_query_pkey(context, number, i, &pkey) != 0) break;
    port.pkeys.push_back(ntohs(pkey));
  }
  port.gids = query_gids(context, device, number, attributes);
  return port;
}

}  // namespace

Result<std::vector<DeviceInfo>> list_devices() {
  if (Status loaded = load_library(); !loaded.ok()) return loaded;
  int count = 0;
  const DeviceList list = device_list(count);
  std::vector<DeviceInfo> found;
  for (int i = 0; i < count; ++i) {
    DeviceInfo info{};
    info.name = ibv_get_device_name(list[i]);
    const std::unique_ptr<ibv_context, CloseContext> context(ibv_open_device(list[i]));
    ibv_device_attr attributes{};
    if (context == nullptr) {
      info.problem = explain_open(info.name, errno);
    } else if (const int error = ibv_query_device(context.get(), &attributes); error != 0) {
      info.problem = "could not be queried: " + errno_text(error);
    } else {
      info.firmware = attributes.fw_ver;
      info.max_qp = static_cast<uint32_t>(attributes.max_qp);
      info.max_qp_wr = static_cast<uint32_t>(attributes.max_qp_wr);
      info.max_cqe = static_cast<uint32_t>(attributes.max_cqe);
      info.max_mr_size = attributes.max_mr_size;
      for (uint8_t number = 1; number <= attributes.phys_port_cnt; ++number) {
        auto port = query_port(context.get(), info.name, number);
        if (port.ok()) info.ports.push_back(std::move(port.value()));
      }
    }
    found.push_back(std::move(info));
  }
  return found;
}

std::string gid_text(const RawGid& gid) {
  char text[INET6_ADDRSTRLEN] = "?";
  if (gid_is_ipv4(gid)) {
    inet_ntop(AF_INET, gid.data() + 12, text, sizeof(text));
  } else {
    inet_ntop(AF_INET6, gid.data(), text, sizeof(text));
  }
  return text;
}

bool gid_is_ipv4(const RawGid& gid) {
  constexpr std::array<uint8_t, 12> kPrefix{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::equal(kPrefix.begin(), kPrefix.end(), gid.begin());
}

bool gid_is_link_local(const RawGid& gid) { return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80; }

Result<std::shared_ptr<Device>> Device::open(const std::string& name) {
  if (Status loaded = load_library(); !loaded.ok()) return loaded;
  int count = 0;
  const DeviceList list = device_list(count);
  std::string names;
  std::string problem;
  for (int i = 0; i < count; ++i) {
    const std::string candidate = ibv_get_device_name(list[i]);
    names += (names.empty() ? "" : ", ") + candidate;
    if (!name.empty() && candidate != name) continue;
    std::shared_ptr<Device> device(new Device());
    device->name_ = candidate;
    device->context_.reset(ibv_open_device(list[i]));
    if (device->context_ == nullptr) {
      problem = explain_open(candidate, errno);
      continue;
    }
    if (const int error = ibv_query_device(device->context(), &device->attributes_); error != 0) {
      problem = "device " + candidate + " could not be queried: " + errno_text(error);
      continue;
    }
    if (name.empty() && !device->port(0).ok()) {
      problem = device->port(0).status().message();
      continue;
    }
    device->pd_.reset(ibv_alloc_pd(device->context()));
    if (device->pd_ == nullptr) {
      return Status(Code::kResource, "no protection domain on device " + candidate + ": " +
                                         explain_memory(errno, 0));
    }
    // Asynchronous events are read by the progress thread, which never blocks.
    const int flags = fcntl(device->context()->async_fd, F_GETFL);
    fcntl(device->context()->async_fd, F_SETFL, flags | O_NONBLOCK);
    return device;
  }
  if (!problem.empty()) return Status(Code::kUnavailable, problem);
  if (names.empty()) return Status(Code::kUnavailable, explain_no_device());
  return Status(Code::kInvalidArgument,
                "there is no RDMA device \"" + name + "\" on this machine; there is " + names);
}

Result<PortInfo> Device::port(uint8_t number) const {
  if (number != 0) return query_port(context(), name_, number);
  std::string states;
  for (uint8_t i = 1; i <= attributes_.phys_port_cnt; ++i) {
    auto port = query_port(context(), name_, i);
    if (port.ok() && port.value().active) return port;
    states += (states.empty() ? "" : ", ") +
              (port.ok() ? "port " + std::to_string(i) + " is " + port.value().state
                         : port.status().message());
  }
  return Status(Code::kUnavailable,
                "no port of device " + name_ + " is active (" + states +
                    "): check the cable, the switch, and `ip link` of its network device");
}

Result<GidEntry> choose_gid(const std::string& device, const PortInfo& port,
                            const VerbsSource& source, const RawGid* peer) {
  const std::string where = device + " port " + std::to_string(port.number);
  if (const int index = source.gid_index; index >= 0) {
    for (const GidEntry& entry : port.gids) {
      if (entry.index == index) return entry;
    }
    std::string filled;
    for (const GidEntry& entry : port.gids) {
      filled += (filled.empty() ? "" : ", ") + std::to_string(entry.index) + " (" +
                gid_text(entry.gid) + ", " + entry.type + ")";
    }
    return Status(Code::kInvalidArgument, "GID index " + std::to_string(index) + " of " + where +
                                              " is empty; filled are " +
                                              (filled.empty() ? "none" : filled));
  }
  const auto score = [&](const GidEntry& entry) {
    const bool local = gid_is_link_local(entry.gid);
    const bool family = peer == nullptr ? gid_is_ipv4(entry.gid)
                                        : gid_is_ipv4(entry.gid) == gid_is_ipv4(*peer) &&
                                              local == gid_is_link_local(*peer);
    const bool preferred = source.gid != RawGid{} && entry.gid == source.gid &&
                           entry.type == source.gid_type && (peer == nullptr || family);
    return (preferred ? 8 : 0) + (entry.type != "RoCE v1" ? 4 : 0) + (family ? 2 : 0) +
           (local ? 0 : 1);
  };
  const auto best =
      std::max_element(port.gids.begin(), port.gids.end(),
                       [&](const GidEntry& a, const GidEntry& b) { return score(a) < score(b); });
  if (best == port.gids.end()) {
    return Status(Code::kUnavailable,
                  "the GID table of " + where +
                      " is empty: its network device has no address, or is in another network "
                      "namespace");
  }
  return *best;
}

}  // namespace jaxrdma::fabric::verbs

#endif
