/* fabric/verbs/explain.cc: what a completion status or an errno of verbs means, and what to try. */
#include "fabric/verbs/explain.h"

#if JAXRDMA_HAVE_VERBS

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>

namespace jaxrdma::fabric::verbs {

namespace {

constexpr int kCapIpcLock = 14;

bool has_ipc_lock() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("CapEff:", 0) == 0)
      return (std::stoull(line.substr(7), nullptr, 16) >> kCapIpcLock & 1) != 0;
  }
  return false;
}

/// Whether the device's node is there, and closed to this user.
bool node_is_closed(const std::string& device) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/sys/class/infiniband_verbs", ignored)) {
    std::ifstream file(entry.path() / "ibdev");
    std::string name;
    if (!std::getline(file, name) || name != device) continue;
    const std::string node = "/dev/infiniband/" + entry.path().filename().string();
    return fs::exists(node, ignored) && access(node.c_str(), R_OK | W_OK) != 0;
  }
  return false;
}

std::string limit_text(rlim_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : std::to_string(limit / 1024) + " KiB";
}

}  // namespace

std::string explain_open(const std::string& device, int error) {
  std::string text = "RDMA device " + device + " could not be opened: " + errno_text(error);
  // libibverbs says ENOENT of a node that is there and may not be opened, too.
  if (error == ENOENT && node_is_closed(device)) error = EACCES;
  if (error == EACCES || error == EPERM) {
    text += "; this user may not open /dev/infiniband/uverbs*: see its owner and mode";
  } else if (error == ENOENT || error == ENODEV || error == ENXIO) {
    text +=
        "; the kernel shows it but its node under /dev/infiniband is not here: in a container "
        "pass it in (docker: --device=/dev/infiniband)";
  }
  return text;
}

std::string explain_no_device() {
  namespace fs = std::filesystem;
  std::error_code ignored;
  std::string text = "verbs found no RDMA device on this machine: ";
  const bool in_sysfs = fs::exists("/sys/class/infiniband", ignored) &&
                        !fs::is_empty("/sys/class/infiniband", ignored);
  if (!in_sysfs) {
    return text +
           "/sys/class/infiniband is empty, so the kernel knows of none. Load the driver "
           "(mlx5_ib, rdma_rxe with `rdma link add`, ...), or choose transport=\"tcp\"";
  }
  const auto nodes = fs::directory_iterator("/dev/infiniband", ignored);
  if (std::none_of(begin(nodes), end(nodes), [](const fs::directory_entry& entry) {
        return entry.path().filename().string().starts_with("uverbs");
      })) {
    return text +
           "the kernel has some but /dev/infiniband/uverbs* are missing. In a container pass it in "
           "(docker: --device=/dev/infiniband); else load ib_uverbs";
  }
  return text +
         "the kernel has some but libibverbs has no driver for them. Install the providers "
         "(Debian: ibverbs-providers) of libibverbs's own version";
}

std::string explain_memory(int error, size_t bytes) {
  std::string text = errno_text(error);
  if (error == EFAULT) {
    return text +
           "; the memory is not mapped, is read-only, or lies on a device that cannot be "
           "registered";
  }
  if (error != ENOMEM) return text;
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  if (limit.rlim_cur != RLIM_INFINITY && !has_ipc_lock()) {
    return text + "; this process may lock " + limit_text(limit.rlim_cur) + " (hard limit " +
           limit_text(limit.rlim_max) + ") and lacks CAP_IPC_LOCK, " +
           (bytes == 0 ? "" : std::to_string(bytes) + " bytes were asked for: ") +
           "raise it by `ulimit -l unlimited`, docker --ulimit memlock=-1, systemd "
           "LimitMEMLOCK=infinity";
  }
  return text +
         "; locked memory is not limited here, so the device, the IOMMU or a cgroup ran out of "
         "entries or memory";
}

std::string explain_transition(const char* state, int error, const std::string& local_gid,
                               const std::string& remote_gid) {
  std::string text = std::string("the queue pair did not become ") + state + " from GID " +
                     local_gid + " to GID " + remote_gid + ": " + errno_text(error);
  switch (error) {
    case ETIMEDOUT:
      return text +
             "; the peer's address was not resolved: its host or link is down, or the two GIDs "
             "are of networks that are not connected";
    case ENODEV:
      return text +
             "; no route by this device, or its network device is in another network namespace";
    case ENETUNREACH:
    case EHOSTUNREACH:
      return text + "; no route from this device to the peer's GID";
    case EINVAL:
      return text + "; the two GIDs are of different families, or one is link-local";
    case ENODATA:
      return text + "; the GID index is empty";
    default:
      return text;
  }
}

std::string explain_completion(ibv_wc_status status, unsigned vendor_error, int timeout,
                               int retry_count) {
  std::string text = ibv_wc_status_str(status);
  text += " (status " + std::to_string(status);
  if (vendor_error != 0) {
    char hex[24];
    std::snprintf(hex, sizeof(hex), ", vendor 0x%x", vendor_error);
    text += hex;
  }
  text += "): ";
  switch (status) {
    case IBV_WC_LOC_LEN_ERR:
      return text + "a message was longer than the device or a receive allows";
    case IBV_WC_LOC_QP_OP_ERR:
      return text + "the queue pair could not send what was posted: is there a route to the peer?";
    case IBV_WC_LOC_PROT_ERR:
      return text + "local memory was no longer registered while it was sent";
    case IBV_WC_WR_FLUSH_ERR:
      return text + "the queue pair was torn down, here or by the peer";
    case IBV_WC_LOC_ACCESS_ERR:
      return text + "the peer asked for something that this side does not permit";
    case IBV_WC_REM_INV_REQ_ERR:
      return text + "the peer refused the form of the request: do both sides use one path MTU?";
    case IBV_WC_REM_ACCESS_ERR:
      return text +
             "the peer refused the remote key or the address: out of bounds, or withdrawn because "
             "it restarted";
    case IBV_WC_REM_OP_ERR:
      return text + "the peer's device failed; see the kernel log there";
    case IBV_WC_RETRY_EXC_ERR: {
      char seconds[24];
      std::snprintf(seconds, sizeof(seconds), "%.2g",
                    4.096e-6 * static_cast<double>(uint64_t{1} << timeout) * (retry_count + 1));
      return text + "the peer's device did not answer for about " + seconds + " s (timeout " +
             std::to_string(timeout) + ", " + std::to_string(retry_count) +
             " retries): its host or a link is down, or packets are dropped on the way";
    }
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return text + "the peer is there but had no receive posted; this is a bug of jaxrdma";
    default:
      return text + "the device or its driver failed; see the kernel log";
  }
}

std::string explain_post(int error) {
  const std::string text = errno_text(error);
  if (error != ENOMEM) return text;
  return text +
         "; its queue is full, though what it holds is counted: a bug of jaxrdma or of the "
         "device's "
         "driver";
}

std::string explain_event(ibv_event_type event) {
  const std::string text = std::string("reported \"") + ibv_event_type_str(event) + "\": ";
  switch (event) {
    case IBV_EVENT_CQ_ERR:
      return text + "the completion queue cannot be used any more; see the kernel log";
    case IBV_EVENT_QP_FATAL:
      return text + "the queue pair cannot be used any more; see the kernel log";
    case IBV_EVENT_QP_REQ_ERR:
      return text + "it refused what was posted; see the kernel log";
    case IBV_EVENT_QP_ACCESS_ERR:
      return text +
             "the peer asked for something that this side does not permit; do both run the same "
             "jaxrdma?";
    case IBV_EVENT_DEVICE_FATAL:
      return text +
             "the device cannot be used any more; see the kernel log, and start again when it is "
             "back, or on another device";
    default:
      return text + "see the kernel log";
  }
}

bool path_failure(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_WR_FLUSH_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
    case IBV_WC_LOC_QP_OP_ERR:  // of a software device whose network device went down
    case IBV_WC_FATAL_ERR:
      return true;
    default:
      return false;
  }
}

bool sequence_failure(ibv_wc_status status) { return status == IBV_WC_REM_INV_REQ_ERR; }

}  // namespace jaxrdma::fabric::verbs

#endif
