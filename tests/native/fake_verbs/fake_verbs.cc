/* tests/native/fake_verbs/fake_verbs.cc: a libibverbs of its own devices, in memory: see
   fake_verbs.h.

   One lock guards everything: the order of what happens is what matters here, not speed. */
#include "fake_verbs.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

// Macros of the header stand in front of these functions.
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

namespace {

constexpr uint32_t kMaxQueue = 4096;
constexpr uint32_t kMaxCqe = 1 << 16;
constexpr uint32_t kMaxInline = 220;
constexpr uint32_t kMaxSge = 16;
constexpr uint8_t kMaxReads = 16;
// A destroyed object whose events are not acknowledged hangs its owner in reality; here so long.
constexpr auto kAckPatience = std::chrono::seconds(2);

struct Context;

struct Device : ibv_device {
  uint32_t address = 0;
  ibv_mtu mtu = IBV_MTU_4096;
  uint32_t max_message = 1u << 30;
  bool active = true;
  bool gone = false;
  std::set<Context*> contexts;
};

/// A descriptor that is readable while the queue beside it holds something.
class Doorbell {
 public:
  Doorbell() : fd_(eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE)) {}
  ~Doorbell() { close(fd_); }
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;
  int fd() const { return fd_; }
  void up() { eventfd_write(fd_, 1); }
  void down() {
    eventfd_t one = 0;
    eventfd_read(fd_, &one);
  }

 private:
  int fd_;
};

struct Cq;
struct Qp;

struct AsyncEvent {
  ibv_async_event event;
  const void* of;  ///< the queue pair or completion queue
};

struct Context : verbs_context {
  Device* home = nullptr;
  bool gone = false;
  Doorbell bell;
  std::deque<AsyncEvent> events;
  uint32_t objects = 0;
};

struct Pd : ibv_pd {
  uint32_t objects = 0;
};

struct Mr : ibv_mr {
  int rights = 0;
};

struct Channel : ibv_comp_channel {
  Doorbell bell;
  std::deque<Cq*> events;
};

/// Events told of an object, and those that its owner has acknowledged.
struct Told {
  uint32_t told = 0;
  uint32_t acknowledged = 0;
};

struct Completion {
  ibv_wc wc;
  Qp* qp;
  bool receive;
  bool solicited;  ///< the peer asked for an event
  uint32_t slots;  ///< of the work queue, free again once this has been polled
};

struct Cq : ibv_cq {
  std::deque<Completion> entries;
  bool armed = false;
  bool solicited_only = false;
  bool stopped = false;
  Told completions, errors;
  uint32_t queue_pairs = 0;
};

struct Work {
  ibv_send_wr request;
  std::vector<ibv_sge> slices;
  std::vector<uint8_t> copy;  ///< of what is sent inline
};

struct Receive {
  uint64_t id;
  std::vector<ibv_sge> slices;
};

/// A completion that a test asked for.
struct Fate {
  uint32_t skip;
  ibv_wc_status status;
  uint32_t delivered;  ///< how often
};

struct Qp : ibv_qp {
  ibv_qp_init_attr made{};
  ibv_qp_attr is{};
  std::deque<Work> posted;  ///< and not carried out
  std::deque<Receive> receives;
  std::deque<Fate> fates;
  uint32_t sends_used = 0, receives_used = 0;
  uint32_t quiet = 0;  ///< carried out since the last completion, without one of their own
  bool held = false;
  bool slow = false;  ///< to flush
  Told errors;
};

struct Fault {
  FakeVerbsCall call;
  std::string device;
  uint32_t skip, count;
  int error;
};

struct World {
  std::mutex lock;
  std::condition_variable changed;
  std::array<Device, 2> devices;
  std::map<uint32_t, Qp*> queue_pairs;
  std::map<uint32_t, Mr*> regions;
  uint32_t next_qp = 0x11;
  uint32_t next_key = 0x100;
  std::vector<Fault> faults;
  bool stall_rtr = false;
  uint32_t stalled = 0;
  FakeVerbsAlive alive{};
  std::string misuse;

  World() {
    for (size_t i = 0; i < devices.size(); ++i) {
      Device& device = devices[i];
      static_cast<ibv_device&>(device) = {};
      device.node_type = IBV_NODE_CA;
      device.transport_type = IBV_TRANSPORT_IB;
      const std::string name = "fake" + std::to_string(i);
      name.copy(device.name, sizeof(device.name) - 1);
    }
    restore();
  }
  void restore() {
    for (size_t i = 0; i < devices.size(); ++i) {
      devices[i].address = 0xc0000201u + static_cast<uint32_t>(i);  // 192.0.2.1 and 192.0.2.2
      devices[i].active = true;
      devices[i].gone = false;
    }
    // They differ, so that what is agreed on is the smaller; and long messages are cut to pieces.
    devices[1].mtu = IBV_MTU_1024;
    devices[1].max_message = 1u << 20;
    faults.clear();
    stall_rtr = false;
    misuse.clear();
  }
};

/// Never destroyed: objects may be, at exit, after it would have been.
World& world() {
  static World* const only = new World;
  return *only;
}

void note_misuse(const std::string& what) {
  if (world().misuse.empty()) world().misuse = what;
}

Context& of(ibv_context* context) { return static_cast<Context&>(*verbs_get_ctx(context)); }

Device* find_device(const char* name) {
  for (Device& device : world().devices) {
    if (name != nullptr && std::string(name) == device.name) return &device;
  }
  return nullptr;
}

/// The error that `call` shall fail with now; 0 if none.
int fault(FakeVerbsCall call, const Device& device) {
  for (Fault& fault : world().faults) {
    if (fault.call != call || (!fault.device.empty() && fault.device != device.name)) continue;
    if (fault.skip > 0) {
      --fault.skip;
    } else if (fault.count > 0) {
      --fault.count;
      return fault.error;
    }
  }
  return 0;
}

int fault(FakeVerbsCall call, const Context& context) {
  const int error = fault(call, *context.home);
  return error != 0 ? error : context.gone ? EIO : 0;
}

ibv_gid mapped(uint32_t address) {
  ibv_gid gid{};
  gid.raw[10] = gid.raw[11] = 0xff;
  const uint32_t wire = htonl(address);
  std::memcpy(gid.raw + 12, &wire, sizeof(wire));
  return gid;
}

/// What a device does to memory, which no sanitizer of threads can see: the other side may be
/// reading what changes, and finds out by itself.
[[gnu::noinline]] __attribute__((no_sanitize("thread"))) void dma(uint8_t* to, const uint8_t* from,
                                                                  size_t bytes) {
  using Word [[gnu::aligned(1), gnu::may_alias]] = uint64_t;
  size_t i = 0;
  for (; i + sizeof(Word) <= bytes; i += sizeof(Word)) {
    *reinterpret_cast<volatile Word*>(to + i) = *reinterpret_cast<const volatile Word*>(from + i);
  }
  for (; i < bytes; ++i)
    *static_cast<volatile uint8_t*>(to + i) = *static_cast<const volatile uint8_t*>(from + i);
}

/// Whether [address, address + bytes) lies in the region of `key`, in `pd`, with these rights.
bool allowed(uint32_t key, const ibv_pd* pd, uint64_t address, uint64_t bytes, int rights) {
  const auto found = world().regions.find(key);
  if (found == world().regions.end()) return false;
  const Mr& region = *found->second;
  const auto begin = reinterpret_cast<uint64_t>(region.addr);
  return region.pd == pd && (region.rights & rights) == rights && address >= begin &&
         bytes <= region.length && address - begin <= region.length - bytes;
}

bool allowed(const std::vector<ibv_sge>& slices, const ibv_pd* pd, int rights) {
  return std::all_of(slices.begin(), slices.end(), [&](const ibv_sge& slice) {
    return slice.length == 0 || allowed(slice.lkey, pd, slice.addr, slice.length, rights);
  });
}

uint64_t total(const std::vector<ibv_sge>& slices) {
  uint64_t bytes = 0;
  for (const ibv_sge& slice : slices) bytes += slice.length;
  return bytes;
}

/// Between scattered memory and one range, in the direction said.
void scatter(const std::vector<ibv_sge>& slices, uint64_t whole, bool into_slices) {
  auto* at = reinterpret_cast<uint8_t*>(whole);
  for (const ibv_sge& slice : slices) {
    auto* piece = reinterpret_cast<uint8_t*>(slice.addr);
    if (into_slices) {
      dma(piece, at, slice.length);
    } else {
      dma(at, piece, slice.length);
    }
    at += slice.length;
  }
}

// ---- Events and completions.

void raise_async(Context& context, ibv_async_event event, const void* of_what) {
  context.events.push_back({event, of_what});
  context.bell.up();
}

void forget_async(Context& context, const void* of_what) {
  for (size_t i = 0; i < context.events.size();) {
    if (context.events[i].of == of_what) {
      context.events.erase(context.events.begin() + static_cast<ptrdiff_t>(i));
      context.bell.down();
    } else {
      ++i;
    }
  }
}

void stop(Cq& cq) {
  cq.stopped = true;
  ibv_async_event event{};
  event.event_type = IBV_EVENT_CQ_ERR;
  event.element.cq = &cq;
  raise_async(of(cq.context), event, &cq);
}

void push(Cq& cq, const Completion& completion) {
  if (cq.stopped) return;
  if (cq.entries.size() >= static_cast<size_t>(cq.cqe)) {
    note_misuse("a completion queue overran");
    stop(cq);
    return;
  }
  cq.entries.push_back(completion);
  if (!cq.armed || cq.channel == nullptr) return;
  const bool calls = completion.solicited || completion.wc.status != IBV_WC_SUCCESS;
  if (cq.solicited_only && !calls) return;
  cq.armed = false;
  auto& channel = static_cast<Channel&>(*cq.channel);
  channel.events.push_back(&cq);
  channel.bell.up();
}

Completion completion_of(Qp& qp, uint64_t id, ibv_wc_status status) {
  Completion completion{};
  completion.wc.wr_id = id;
  completion.wc.status = status;
  completion.wc.qp_num = qp.qp_num;
  completion.qp = &qp;
  return completion;
}

void complete_send(Qp& qp, const Work& work, ibv_wc_status status) {
  if (status == IBV_WC_SUCCESS && (work.request.send_flags & IBV_SEND_SIGNALED) == 0) {
    ++qp.quiet;
    return;
  }
  Completion completion = completion_of(qp, work.request.wr_id, status);
  completion.wc.vendor_err = status == IBV_WC_SUCCESS ? 0 : 0xfa;
  completion.wc.opcode = work.request.opcode == IBV_WR_RDMA_READ       ? IBV_WC_RDMA_READ
                         : work.request.opcode == IBV_WR_SEND_WITH_IMM ? IBV_WC_SEND
                                                                       : IBV_WC_RDMA_WRITE;
  completion.slots = 1 + std::exchange(qp.quiet, 0);
  push(static_cast<Cq&>(*qp.send_cq), completion);
}

void complete_receive(Qp& qp, ibv_wc_status status, ibv_wc_opcode opcode, uint64_t bytes,
                      uint32_t immediate, bool solicited = false) {
  Completion completion = completion_of(qp, qp.receives.front().id, status);
  qp.receives.pop_front();
  completion.receive = true;
  completion.solicited = solicited;
  completion.slots = 1;
  if (status == IBV_WC_SUCCESS) {
    completion.wc.opcode = opcode;
    completion.wc.byte_len = static_cast<uint32_t>(bytes);
    completion.wc.imm_data = immediate;
    completion.wc.wc_flags = IBV_WC_WITH_IMM;
  }
  push(static_cast<Cq&>(*qp.recv_cq), completion);
}

/// Everything posted comes back flushed.
void flush(Qp& qp) {
  if (qp.slow) return;
  for (; !qp.posted.empty(); qp.posted.pop_front())
    complete_send(qp, qp.posted.front(), IBV_WC_WR_FLUSH_ERR);
  while (!qp.receives.empty()) complete_receive(qp, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, 0, 0);
}

void fail(Qp& qp) {
  qp.state = IBV_QPS_ERR;
  flush(qp);
}

// ---- The wire.

/// Where packets of `qp` arrive; null if nowhere.
Qp* reach(const Qp& qp) {
  const Context& here = of(qp.context);
  if (here.gone || !here.home->active) return nullptr;
  const auto found = world().queue_pairs.find(qp.is.dest_qp_num);
  if (found == world().queue_pairs.end()) return nullptr;
  Qp& peer = *found->second;
  const Context& there = of(peer.context);
  const ibv_gid at = mapped(there.home->address);
  const bool there_it_is = !there.gone && there.home->active &&
                           std::memcmp(&at, &qp.is.ah_attr.grh.dgid, sizeof(at)) == 0;
  const bool connected = (peer.state == IBV_QPS_RTR || peer.state == IBV_QPS_RTS) &&
                         peer.is.dest_qp_num == qp.qp_num && peer.is.rq_psn == qp.is.sq_psn;
  return there_it_is && connected ? &peer : nullptr;
}

/// What becomes of a request at `peer`; carries it out if nothing speaks against it.
ibv_wc_status carry_out(Qp& qp, const Work& work, Qp& peer) {
  const ibv_send_wr& request = work.request;
  const uint64_t bytes = total(work.slices);
  const bool is_read = request.opcode == IBV_WR_RDMA_READ;
  const bool is_send = request.opcode == IBV_WR_SEND_WITH_IMM;
  const bool takes_receive = is_send || request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  const bool is_inline = (request.send_flags & IBV_SEND_INLINE) != 0;
  if (bytes > of(qp.context).home->max_message) return IBV_WC_LOC_LEN_ERR;
  if (!is_inline && !allowed(work.slices, qp.pd, is_read ? IBV_ACCESS_LOCAL_WRITE : 0))
    return IBV_WC_LOC_PROT_ERR;
  if (bytes > of(peer.context).home->max_message || qp.is.path_mtu != peer.is.path_mtu)
    return IBV_WC_REM_INV_REQ_ERR;
  if (is_read && (qp.is.max_rd_atomic == 0 || peer.is.max_dest_rd_atomic == 0))
    return IBV_WC_REM_INV_REQ_ERR;
  if (takes_receive && peer.receives.empty()) return IBV_WC_RNR_RETRY_EXC_ERR;
  if (is_send && bytes > total(peer.receives.front().slices)) {
    complete_receive(peer, IBV_WC_LOC_LEN_ERR, IBV_WC_RECV, 0, 0);
    fail(peer);
    return IBV_WC_REM_INV_REQ_ERR;
  }
  if (!is_send && bytes > 0) {
    const int right = is_read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    if ((peer.is.qp_access_flags & static_cast<unsigned>(right)) == 0 ||
        !allowed(request.wr.rdma.rkey, peer.pd, request.wr.rdma.remote_addr, bytes, right)) {
      fail(peer);
      return IBV_WC_REM_ACCESS_ERR;
    }
    if (is_inline) {
      dma(reinterpret_cast<uint8_t*>(request.wr.rdma.remote_addr), work.copy.data(), bytes);
    } else {
      scatter(work.slices, request.wr.rdma.remote_addr, is_read);
    }
  }
  // The only sends of ours are empty; memory of receives is not written.
  if (is_send && bytes > 0) note_misuse("the fake does not carry bytes in a SEND");
  if (takes_receive) {
    complete_receive(peer, IBV_WC_SUCCESS, is_send ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM, bytes,
                     request.imm_data, (request.send_flags & IBV_SEND_SOLICITED) != 0);
  }
  return IBV_WC_SUCCESS;
}

/// Carries out what is posted, as far as it gets.
void progress(Qp& qp) {
  while (qp.state == IBV_QPS_RTS && !qp.held && !qp.posted.empty()) {
    const bool fated = !qp.fates.empty() && qp.fates.front().skip == 0;
    Qp* peer = reach(qp);
    ibv_wc_status status = IBV_WC_SUCCESS;
    if (fated) {
      const Fate fate = qp.fates.front();
      if (fate.status == IBV_WC_SUCCESS && fate.delivered > 0 && peer == nullptr) return;
      qp.fates.pop_front();
      for (uint32_t i = 0; i < fate.delivered && peer != nullptr; ++i)
        carry_out(qp, qp.posted.front(), *peer);
      status = fate.status;
    } else if (peer == nullptr) {
      return;
    } else {
      if (!qp.fates.empty()) --qp.fates.front().skip;
      status = carry_out(qp, qp.posted.front(), *peer);
    }
    const Work work = std::move(qp.posted.front());
    qp.posted.pop_front();
    complete_send(qp, work, status);
    if (status != IBV_WC_SUCCESS) fail(qp);
  }
}

void progress_all() {
  for (auto& [number, qp] : world().queue_pairs) progress(*qp);
}

// ---- What the inline functions of the header call.

int poll_cq(ibv_cq* queue, int count, ibv_wc* completions) {
  const std::lock_guard guard(world().lock);
  auto& cq = static_cast<Cq&>(*queue);
  int stored = 0;
  for (; stored < count && !cq.entries.empty(); ++stored, cq.entries.pop_front()) {
    const Completion& first = cq.entries.front();
    completions[stored] = first.wc;
    (first.receive ? first.qp->receives_used : first.qp->sends_used) -= first.slots;
  }
  return stored;
}

int req_notify_cq(ibv_cq* queue, int solicited_only) {
  const std::lock_guard guard(world().lock);
  auto& cq = static_cast<Cq&>(*queue);
  // Asked for both, all completions count.
  cq.solicited_only = solicited_only != 0 && (!cq.armed || cq.solicited_only);
  cq.armed = true;
  return 0;
}

int post_send(ibv_qp* queue, ibv_send_wr* request, ibv_send_wr** bad) {
  const std::lock_guard guard(world().lock);
  auto& qp = static_cast<Qp&>(*queue);
  for (; request != nullptr; request = request->next) {
    *bad = request;
    if (const int error = fault(FakeVerbsCall::kPostSend, *of(qp.context).home); error != 0)
      return error;
    if (qp.state != IBV_QPS_RTS && qp.state != IBV_QPS_ERR) return EINVAL;
    if (static_cast<uint32_t>(request->num_sge) > qp.made.cap.max_send_sge) return EINVAL;
    if (qp.sends_used >= qp.made.cap.max_send_wr) {
      note_misuse("a send queue overran");
      return ENOMEM;
    }
    Work work{};
    work.request = *request;
    work.slices.assign(request->sg_list, request->sg_list + request->num_sge);
    if ((request->send_flags & IBV_SEND_INLINE) != 0) {
      if (total(work.slices) > qp.made.cap.max_inline_data) return EINVAL;
      for (const ibv_sge& slice : work.slices) {
        const auto* piece = reinterpret_cast<const uint8_t*>(slice.addr);
        work.copy.insert(work.copy.end(), piece, piece + slice.length);
      }
    }
    ++qp.sends_used;
    qp.posted.push_back(std::move(work));
    if (qp.state == IBV_QPS_ERR) flush(qp);
  }
  progress(qp);
  return 0;
}

int post_recv(ibv_qp* queue, ibv_recv_wr* request, ibv_recv_wr** bad) {
  const std::lock_guard guard(world().lock);
  auto& qp = static_cast<Qp&>(*queue);
  for (; request != nullptr; request = request->next) {
    *bad = request;
    if (const int error = fault(FakeVerbsCall::kPostRecv, *of(qp.context).home); error != 0)
      return error;
    if (qp.state == IBV_QPS_RESET) return EINVAL;
    if (qp.receives_used >= qp.made.cap.max_recv_wr) {
      note_misuse("a receive queue overran");
      return ENOMEM;
    }
    ++qp.receives_used;
    qp.receives.push_back(
        {request->wr_id, {request->sg_list, request->sg_list + request->num_sge}});
    if (qp.state == IBV_QPS_ERR) flush(qp);
  }
  return 0;
}

int describe_port(Context& context, uint8_t number, ibv_port_attr* port) {
  if (const int error = fault(FakeVerbsCall::kQueryPort, context); error != 0) return error;
  if (number != 1) return EINVAL;
  const Device& device = *context.home;
  *port = {};
  port->state = device.active ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  port->max_mtu = IBV_MTU_4096;
  port->active_mtu = device.mtu;
  port->gid_tbl_len = 4;
  port->max_msg_sz = device.max_message;
  port->pkey_tbl_len = 1;
  port->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}

int query_port(ibv_context* context, uint8_t number, ibv_port_attr* port, size_t bytes) {
  const std::lock_guard guard(world().lock);
  ibv_port_attr whole{};
  const int error = describe_port(of(context), number, &whole);
  if (error == 0) std::memcpy(port, &whole, std::min(bytes, sizeof(whole)));
  return error;
}

/// Waits until the owner has acknowledged what it was told of an object that it destroys.
void await_acknowledged(std::unique_lock<std::mutex>& guard, const Told& told, const char* what) {
  if (!world().changed.wait_for(guard, kAckPatience,
                                [&] { return told.told == told.acknowledged; })) {
    note_misuse(std::string(what) +
                " was destroyed before its events were acknowledged: libibverbs would hang");
  }
}

/// A descriptor of the user's: blocks unless told not to.
bool await_bell(std::unique_lock<std::mutex>& guard, const Doorbell& bell) {
  if ((fcntl(bell.fd(), F_GETFL) & O_NONBLOCK) != 0) {
    errno = EAGAIN;
    return false;
  }
  guard.unlock();
  pollfd readable{bell.fd(), POLLIN, 0};
  poll(&readable, 1, -1);
  guard.lock();
  return true;
}

}  // namespace

// ---- The library.

extern "C" {

ibv_device** ibv_get_device_list(int* count) {
  const std::lock_guard guard(world().lock);
  auto** list = new ibv_device*[world().devices.size() + 1]();
  int found = 0;
  for (Device& device : world().devices) {
    if (!device.gone) list[found++] = &device;
  }
  if (count != nullptr) *count = found;
  return list;
}

void ibv_free_device_list(ibv_device** list) { delete[] list; }

const char* ibv_get_device_name(ibv_device* device) { return device->name; }

ibv_context* ibv_open_device(ibv_device* device) {
  const std::lock_guard guard(world().lock);
  auto& home = static_cast<Device&>(*device);
  const int error = fault(FakeVerbsCall::kOpenDevice, home);
  if (error != 0 || home.gone) {
    errno = error != 0 ? error : ENODEV;
    return nullptr;
  }
  auto* made = new Context();
  made->home = &home;
  made->query_port = query_port;
  made->sz = sizeof(verbs_context);
  made->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
  made->context.device = device;
  made->context.async_fd = made->bell.fd();
  made->context.cmd_fd = -1;
  made->context.num_comp_vectors = 1;
  made->context.ops.poll_cq = poll_cq;
  made->context.ops.req_notify_cq = req_notify_cq;
  made->context.ops.post_send = post_send;
  made->context.ops.post_recv = post_recv;
  home.contexts.insert(made);
  ++world().alive.contexts;
  return &made->context;
}

int ibv_close_device(ibv_context* context) {
  const std::lock_guard guard(world().lock);
  Context& closed = of(context);
  if (closed.objects != 0) note_misuse("a device was closed before what was made from it");
  closed.home->contexts.erase(&closed);
  --world().alive.contexts;
  delete &closed;
  return 0;
}

int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  std::unique_lock guard(world().lock);
  Context& from = of(context);
  while (from.events.empty()) {
    if (!await_bell(guard, from.bell)) return -1;
  }
  const AsyncEvent first = from.events.front();
  from.events.pop_front();
  from.bell.down();
  *event = first.event;
  if (event->event_type == IBV_EVENT_CQ_ERR) {
    ++static_cast<Cq*>(event->element.cq)->errors.told;
  } else if (first.of != nullptr) {
    ++static_cast<Qp*>(event->element.qp)->errors.told;
  }
  return 0;
}

void ibv_ack_async_event(ibv_async_event* event) {
  const std::lock_guard guard(world().lock);
  switch (event->event_type) {
    case IBV_EVENT_CQ_ERR:
      ++static_cast<Cq*>(event->element.cq)->errors.acknowledged;
      break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      ++static_cast<Qp*>(event->element.qp)->errors.acknowledged;
      break;
    default:
      return;
  }
  world().changed.notify_all();
}

int ibv_query_device(ibv_context* context, ibv_device_attr* attributes) {
  const std::lock_guard guard(world().lock);
  if (const int error = fault(FakeVerbsCall::kQueryDevice, of(context)); error != 0) return error;
  *attributes = {};
  std::strcpy(attributes->fw_ver, "fake");
  attributes->max_mr_size = uint64_t{1} << 40;
  attributes->max_qp = 1024;
  attributes->max_qp_wr = kMaxQueue;
  attributes->max_sge = kMaxSge;
  attributes->max_cq = 1024;
  attributes->max_cqe = kMaxCqe;
  attributes->max_qp_rd_atom = attributes->max_qp_init_rd_atom = kMaxReads;
  attributes->phys_port_cnt = 1;
  return 0;
}

int ibv_query_port(ibv_context* context, uint8_t number, _compat_ibv_port_attr* port) {
  const std::lock_guard guard(world().lock);
  return describe_port(of(context), number, reinterpret_cast<ibv_port_attr*>(port));
}

int ibv_query_gid(ibv_context* context, uint8_t, int index, ibv_gid* gid) {
  const std::lock_guard guard(world().lock);
  if (of(context).gone) return -1;
  *gid = index < 2 ? mapped(of(context).home->address) : ibv_gid{};
  return 0;
}

ssize_t _ibv_query_gid_table(ibv_context* context, ibv_gid_entry* entries, size_t max, uint32_t,
                             size_t) {
  const std::lock_guard guard(world().lock);
  if (of(context).gone) return -EIO;
  const uint32_t types[] = {IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2};
  uint32_t i = 0;
  for (; i < std::min<size_t>(max, 2); ++i)
    entries[i] = {mapped(of(context).home->address), i, 1, types[i], 0};
  return i;
}

int ibv_query_pkey(ibv_context*, uint8_t, int index, __be16* pkey) {
  if (index != 0) return -1;
  *pkey = htons(0xffff);
  return 0;
}

ibv_pd* ibv_alloc_pd(ibv_context* context) {
  const std::lock_guard guard(world().lock);
  if (errno = fault(FakeVerbsCall::kAllocPd, of(context)); errno != 0) return nullptr;
  auto* made = new Pd();
  made->context = context;
  ++of(context).objects;
  ++world().alive.pds;
  return made;
}

int ibv_dealloc_pd(ibv_pd* pd) {
  const std::lock_guard guard(world().lock);
  auto* freed = static_cast<Pd*>(pd);
  if (freed->objects != 0) {
    note_misuse("a protection domain was freed before what was made in it");
    return EBUSY;
  }
  --of(pd->context).objects;
  --world().alive.pds;
  delete freed;
  return 0;
}

ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, size_t length, uint64_t, unsigned rights) {
  const std::lock_guard guard(world().lock);
  if (errno = fault(FakeVerbsCall::kRegMr, of(pd->context)); errno != 0) return nullptr;
  auto* made = new Mr();
  made->context = pd->context;
  made->pd = pd;
  made->addr = address;
  made->length = length;
  made->rights = static_cast<int>(rights);
  // Never used again, and no two beside each other: a wrong key is no key.
  made->lkey = made->rkey = world().next_key += 0x100;
  world().regions[made->lkey] = made;
  ++static_cast<Pd*>(pd)->objects;
  ++world().alive.regions;
  return made;
}

ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, size_t length, int rights) {
  return ibv_reg_mr_iova2(pd, address, length, reinterpret_cast<uint64_t>(address),
                          static_cast<unsigned>(rights));
}

int ibv_dereg_mr(ibv_mr* region) {
  const std::lock_guard guard(world().lock);
  world().regions.erase(region->lkey);
  --static_cast<Pd*>(region->pd)->objects;
  --world().alive.regions;
  delete static_cast<Mr*>(region);
  return 0;
}

ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  const std::lock_guard guard(world().lock);
  if (errno = fault(FakeVerbsCall::kCreateCompChannel, of(context)); errno != 0) return nullptr;
  auto* made = new Channel();
  made->context = context;
  made->fd = made->bell.fd();
  ++of(context).objects;
  ++world().alive.channels;
  return made;
}

int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  const std::lock_guard guard(world().lock);
  if (channel->refcnt != 0) {
    note_misuse("a completion channel was destroyed before its completion queues");
    return EBUSY;
  }
  --of(channel->context).objects;
  --world().alive.channels;
  delete static_cast<Channel*>(channel);
  return 0;
}

ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* user, ibv_comp_channel* channel,
                      int) {
  const std::lock_guard guard(world().lock);
  if (errno = fault(FakeVerbsCall::kCreateCq, of(context)); errno != 0) return nullptr;
  if (entries < 1 || entries > static_cast<int>(kMaxCqe)) {
    errno = EINVAL;
    return nullptr;
  }
  auto* made = new Cq();
  made->context = context;
  made->channel = channel;
  made->cq_context = user;
  made->cqe = entries;
  if (channel != nullptr) ++channel->refcnt;
  ++of(context).objects;
  ++world().alive.cqs;
  return made;
}

int ibv_destroy_cq(ibv_cq* queue) {
  std::unique_lock guard(world().lock);
  auto* cq = static_cast<Cq*>(queue);
  if (cq->queue_pairs != 0) {
    note_misuse("a completion queue was destroyed before its queue pairs");
    return EBUSY;
  }
  forget_async(of(cq->context), cq);
  if (cq->channel != nullptr) {
    auto& channel = static_cast<Channel&>(*cq->channel);
    const size_t before = channel.events.size();
    std::erase(channel.events, cq);
    for (size_t i = channel.events.size(); i < before; ++i) channel.bell.down();
    --channel.refcnt;
  }
  await_acknowledged(guard, cq->completions, "a completion queue");
  await_acknowledged(guard, cq->errors, "a completion queue");
  --of(cq->context).objects;
  --world().alive.cqs;
  delete cq;
  return 0;
}

int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** queue, void** user) {
  std::unique_lock guard(world().lock);
  auto& from = static_cast<Channel&>(*channel);
  while (from.events.empty()) {
    if (!await_bell(guard, from.bell)) return -1;
  }
  Cq* cq = from.events.front();
  from.events.pop_front();
  from.bell.down();
  ++cq->completions.told;
  *queue = cq;
  *user = cq->cq_context;
  return 0;
}

void ibv_ack_cq_events(ibv_cq* queue, unsigned count) {
  const std::lock_guard guard(world().lock);
  static_cast<Cq*>(queue)->completions.acknowledged += count;
  world().changed.notify_all();
}

ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* wanted) {
  const std::lock_guard guard(world().lock);
  if (errno = fault(FakeVerbsCall::kCreateQp, of(pd->context)); errno != 0) return nullptr;
  const ibv_qp_cap& cap = wanted->cap;
  if (wanted->qp_type != IBV_QPT_RC || cap.max_send_wr > kMaxQueue || cap.max_recv_wr > kMaxQueue ||
      cap.max_send_sge > kMaxSge || cap.max_recv_sge > kMaxSge ||
      cap.max_inline_data > kMaxInline) {
    errno = EINVAL;
    return nullptr;
  }
  auto* made = new Qp();
  made->context = pd->context;
  made->qp_context = wanted->qp_context;
  made->pd = pd;
  made->send_cq = wanted->send_cq;
  made->recv_cq = wanted->recv_cq;
  made->qp_type = wanted->qp_type;
  made->qp_num = world().next_qp++;
  made->made = *wanted;
  ++static_cast<Cq*>(made->send_cq)->queue_pairs;
  ++static_cast<Cq*>(made->recv_cq)->queue_pairs;
  ++static_cast<Pd*>(pd)->objects;
  ++world().alive.qps;
  world().queue_pairs[made->qp_num] = made;
  return made;
}

int ibv_modify_qp(ibv_qp* queue, ibv_qp_attr* attributes, int mask) {
  std::unique_lock guard(world().lock);
  auto& qp = static_cast<Qp&>(*queue);
  Context& context = of(qp.context);
  if ((mask & IBV_QP_STATE) == 0) return EINVAL;
  int needed = 0;
  ibv_qp_state before = IBV_QPS_RESET;
  FakeVerbsCall call = FakeVerbsCall::kModifyInit;
  switch (attributes->qp_state) {
    case IBV_QPS_INIT:
      needed = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
      break;
    case IBV_QPS_RTR:
      call = FakeVerbsCall::kModifyRtr;
      before = IBV_QPS_INIT;
      needed = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
      ++world().stalled;
      world().changed.notify_all();
      world().changed.wait(guard, [] { return !world().stall_rtr; });
      --world().stalled;
      break;
    case IBV_QPS_RTS:
      call = FakeVerbsCall::kModifyRts;
      before = IBV_QPS_RTR;
      needed = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
               IBV_QP_MAX_QP_RD_ATOMIC;
      break;
    case IBV_QPS_ERR:
      if (context.gone) return EIO;
      fail(qp);
      return 0;
    default:
      return EINVAL;
  }
  if (const int error = fault(call, context); error != 0) return error;
  if (qp.state != before || (mask & needed) != needed) return EINVAL;
  qp.state = attributes->qp_state;
  if (qp.state == IBV_QPS_INIT) {
    qp.is.port_num = attributes->port_num;
    qp.is.qp_access_flags = attributes->qp_access_flags;
  } else if (qp.state == IBV_QPS_RTR) {
    qp.is.ah_attr = attributes->ah_attr;
    qp.is.path_mtu = attributes->path_mtu;
    qp.is.dest_qp_num = attributes->dest_qp_num;
    qp.is.rq_psn = attributes->rq_psn;
    qp.is.max_dest_rd_atomic = attributes->max_dest_rd_atomic;
    progress_all();
  } else {
    qp.is.sq_psn = attributes->sq_psn;
    qp.is.max_rd_atomic = attributes->max_rd_atomic;
  }
  return 0;
}

int ibv_query_qp(ibv_qp* queue, ibv_qp_attr* attributes, int, ibv_qp_init_attr* initial) {
  const std::lock_guard guard(world().lock);
  const auto& qp = static_cast<Qp&>(*queue);
  *attributes = qp.is;
  attributes->qp_state = qp.state;
  *initial = qp.made;
  return 0;
}

int ibv_destroy_qp(ibv_qp* queue) {
  std::unique_lock guard(world().lock);
  auto* qp = static_cast<Qp*>(queue);
  world().queue_pairs.erase(qp->qp_num);
  forget_async(of(qp->context), qp);
  await_acknowledged(guard, qp->errors, "a queue pair");
  for (ibv_cq* each : {qp->send_cq, qp->recv_cq}) {
    auto& cq = static_cast<Cq&>(*each);
    std::erase_if(cq.entries, [&](const Completion& entry) { return entry.qp == qp; });
    --cq.queue_pairs;
  }
  --static_cast<Pd*>(qp->pd)->objects;
  --world().alive.qps;
  delete qp;
  return 0;
}

int ibv_fork_init(void) { return 0; }

const char* ibv_wc_status_str(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return "success";
    case IBV_WC_LOC_LEN_ERR:
      return "local length error";
    case IBV_WC_LOC_QP_OP_ERR:
      return "local QP operation error";
    case IBV_WC_LOC_PROT_ERR:
      return "local protection error";
    case IBV_WC_WR_FLUSH_ERR:
      return "Work Request Flushed Error";
    case IBV_WC_LOC_ACCESS_ERR:
      return "local access error";
    case IBV_WC_REM_INV_REQ_ERR:
      return "remote invalid request error";
    case IBV_WC_REM_ACCESS_ERR:
      return "remote access error";
    case IBV_WC_REM_OP_ERR:
      return "remote operation error";
    case IBV_WC_RETRY_EXC_ERR:
      return "transport retry counter exceeded";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "RNR retry counter exceeded";
    case IBV_WC_FATAL_ERR:
      return "fatal error";
    case IBV_WC_RESP_TIMEOUT_ERR:
      return "response timeout error";
    case IBV_WC_GENERAL_ERR:
      return "general error";
    default:
      return "unknown";
  }
}

const char* ibv_event_type_str(ibv_event_type event) {
  switch (event) {
    case IBV_EVENT_CQ_ERR:
      return "CQ error";
    case IBV_EVENT_QP_FATAL:
      return "local work queue catastrophic error";
    case IBV_EVENT_QP_REQ_ERR:
      return "invalid request local work queue error";
    case IBV_EVENT_QP_ACCESS_ERR:
      return "local access violation work queue error";
    case IBV_EVENT_DEVICE_FATAL:
      return "local catastrophic error";
    case IBV_EVENT_PORT_ACTIVE:
      return "port active";
    case IBV_EVENT_PORT_ERR:
      return "port error";
    case IBV_EVENT_LID_CHANGE:
      return "LID change";
    case IBV_EVENT_GID_CHANGE:
      return "GID table change";
    default:
      return "unknown event";
  }
}

// ---- What tests call.

void fake_verbs_reset(void) {
  const std::lock_guard guard(world().lock);
  world().restore();
  world().changed.notify_all();
}

void fake_verbs_fail(FakeVerbsCall call, const char* device, uint32_t skip, uint32_t count,
                     int error) {
  const std::lock_guard guard(world().lock);
  world().faults.push_back({call, device == nullptr ? "" : device, skip, count, error});
}

void fake_verbs_stall_rtr(bool stall) {
  const std::lock_guard guard(world().lock);
  world().stall_rtr = stall;
  world().changed.notify_all();
}

uint32_t fake_verbs_stalled(void) {
  const std::lock_guard guard(world().lock);
  return world().stalled;
}

void fake_verbs_complete(uint32_t number, ibv_wc_status status, uint32_t skip, bool delivered) {
  const std::lock_guard guard(world().lock);
  Qp& qp = *world().queue_pairs.at(number);
  qp.fates.push_back({skip, status, delivered ? 1u : 0u});
  progress(qp);
}

void fake_verbs_repeat(uint32_t number, uint32_t skip) {
  const std::lock_guard guard(world().lock);
  Qp& qp = *world().queue_pairs.at(number);
  qp.fates.push_back({skip, IBV_WC_SUCCESS, 2});
  progress(qp);
}

void fake_verbs_complete_receive(uint32_t number, ibv_wc_status status) {
  const std::lock_guard guard(world().lock);
  Qp& qp = *world().queue_pairs.at(number);
  if (!qp.receives.empty()) complete_receive(qp, status, IBV_WC_RECV, 0, 0);
  fail(qp);
}

void fake_verbs_hold(uint32_t number, bool held) {
  const std::lock_guard guard(world().lock);
  Qp& qp = *world().queue_pairs.at(number);
  qp.held = held;
  progress(qp);
}

void fake_verbs_slow_flush(uint32_t number, bool slow) {
  const std::lock_guard guard(world().lock);
  const auto found = world().queue_pairs.find(number);
  if (found == world().queue_pairs.end()) return;
  Qp& qp = *found->second;
  qp.slow = slow;
  if (qp.state == IBV_QPS_ERR) flush(qp);
}

void fake_verbs_raise(const char* name, ibv_event_type type, uint32_t number) {
  const std::lock_guard guard(world().lock);
  ibv_async_event event{};
  event.event_type = type;
  if (number != 0) {
    Qp& qp = *world().queue_pairs.at(number);
    if (type == IBV_EVENT_CQ_ERR) {
      stop(static_cast<Cq&>(*qp.send_cq));
      return;
    }
    if (type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR ||
        type == IBV_EVENT_QP_ACCESS_ERR) {
      qp.state = IBV_QPS_ERR;
      qp.posted.clear();
      qp.receives.clear();
    }
    event.element.qp = &qp;
    raise_async(of(qp.context), event, &qp);
    return;
  }
  Device& device = *find_device(name);
  if (type == IBV_EVENT_PORT_ERR) device.active = false;
  if (type == IBV_EVENT_PORT_ACTIVE) device.active = true;
  if (type == IBV_EVENT_DEVICE_FATAL) device.gone = true;
  for (Context* context : device.contexts) {
    context->gone = context->gone || device.gone;
    event.element.port_num = 1;
    raise_async(*context, event, nullptr);
  }
  if (type == IBV_EVENT_PORT_ACTIVE) progress_all();
}

void fake_verbs_set_address(const char* name, uint32_t address) {
  const std::lock_guard guard(world().lock);
  find_device(name)->address = address;
}

FakeVerbsAlive fake_verbs_alive(void) {
  const std::lock_guard guard(world().lock);
  return world().alive;
}

const char* fake_verbs_misuse(void) {
  const std::lock_guard guard(world().lock);
  static std::string told;
  told = world().misuse;
  return told.c_str();
}

}  // extern "C"
