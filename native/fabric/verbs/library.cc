/* fabric/verbs/library.cc: the one table of libibverbs's symbols. */
#include "fabric/verbs/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>

#if JAXRDMA_HAVE_VERBS

// Macros of the header stand in front of these functions.
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

// name, symbol version, result, parameters, arguments. Versions matter: several functions exist
// twice, and the older ones speak another ABI.
#define JAXRDMA_VERBS_SYMBOLS(X)                                                                   \
  X(ibv_get_device_list, "IBVERBS_1.1", ibv_device**, (int* count), (count))                       \
  X(ibv_free_device_list, "IBVERBS_1.1", void, (ibv_device * *list), (list))                       \
  X(ibv_get_device_name, "IBVERBS_1.1", const char*, (ibv_device * device), (device))              \
  X(ibv_open_device, "IBVERBS_1.1", ibv_context*, (ibv_device * device), (device))                 \
  X(ibv_close_device, "IBVERBS_1.1", int, (ibv_context * context), (context))                      \
  X(ibv_get_async_event, "IBVERBS_1.1", int, (ibv_context * context, ibv_async_event * event),     \
    (context, event))                                                                              \
  X(ibv_ack_async_event, "IBVERBS_1.1", void, (ibv_async_event * event), (event))                  \
  X(ibv_query_device, "IBVERBS_1.1", int, (ibv_context * context, ibv_device_attr * attributes),   \
    (context, attributes))                                                                         \
  X(ibv_query_port, "IBVERBS_1.1", int,                                                            \
    (ibv_context * context, uint8_t port, _compat_ibv_port_attr* attributes),                      \
    (context, port, attributes))                                                                   \
  X(ibv_query_gid, "IBVERBS_1.1", int,                                                             \
    (ibv_context * context, uint8_t port, int index, ibv_gid* gid), (context, port, index, gid))   \
  X(ibv_query_pkey, "IBVERBS_1.1", int,                                                            \
    (ibv_context * context, uint8_t port, int index, __be16* pkey), (context, port, index, pkey))  \
  X(ibv_alloc_pd, "IBVERBS_1.1", ibv_pd*, (ibv_context * context), (context))                      \
  X(ibv_dealloc_pd, "IBVERBS_1.1", int, (ibv_pd * pd), (pd))                                       \
  X(ibv_reg_mr, "IBVERBS_1.1", ibv_mr*, (ibv_pd * pd, void* address, size_t length, int access),   \
    (pd, address, length, access))                                                                 \
  X(ibv_dereg_mr, "IBVERBS_1.1", int, (ibv_mr * mr), (mr))                                         \
  X(ibv_create_comp_channel, "IBVERBS_1.0", ibv_comp_channel*, (ibv_context * context), (context)) \
  X(ibv_destroy_comp_channel, "IBVERBS_1.0", int, (ibv_comp_channel * channel), (channel))         \
  X(ibv_create_cq, "IBVERBS_1.1", ibv_cq*,                                                         \
    (ibv_context * context, int entries, void* user, ibv_comp_channel* channel, int vector),       \
    (context, entries, user, channel, vector))                                                     \
  X(ibv_destroy_cq, "IBVERBS_1.1", int, (ibv_cq * cq), (cq))                                       \
  X(ibv_get_cq_event, "IBVERBS_1.1", int, (ibv_comp_channel * channel, ibv_cq * *cq, void** user), \
    (channel, cq, user))                                                                           \
  X(ibv_ack_cq_events, "IBVERBS_1.1", void, (ibv_cq * cq, unsigned count), (cq, count))            \
  X(ibv_create_qp, "IBVERBS_1.1", ibv_qp*, (ibv_pd * pd, ibv_qp_init_attr * attributes),           \
    (pd, attributes))                                                                              \
  X(ibv_modify_qp, "IBVERBS_1.1", int, (ibv_qp * qp, ibv_qp_attr * attributes, int mask),          \
    (qp, attributes, mask))                                                                        \
  X(ibv_query_qp, "IBVERBS_1.1", int,                                                              \
    (ibv_qp * qp, ibv_qp_attr * attributes, int mask, ibv_qp_init_attr* initial),                  \
    (qp, attributes, mask, initial))                                                               \
  X(ibv_destroy_qp, "IBVERBS_1.1", int, (ibv_qp * qp), (qp))                                       \
  X(ibv_fork_init, "IBVERBS_1.1", int, (), ())                                                     \
  X(ibv_wc_status_str, "IBVERBS_1.1", const char*, (ibv_wc_status status), (status))               \
  X(ibv_event_type_str, "IBVERBS_1.1", const char*, (ibv_event_type type), (type))

// The header's ibv_reg_mr calls this for flags that are no constants, but only where it exists.
#define JAXRDMA_VERBS_OPTIONAL(X)                                                \
  X(ibv_reg_mr_iova2, "IBVERBS_1.8", ibv_mr*,                                    \
    (ibv_pd * pd, void* address, size_t length, uint64_t iova, unsigned access), \
    (pd, address, length, iova, access))                                         \
  X(_ibv_query_gid_table, "IBVERBS_1.11", ssize_t,                               \
    (ibv_context * context, ibv_gid_entry * entries, size_t max, uint32_t flags, \
     size_t entry_bytes),                                                        \
    (context, entries, max, flags, entry_bytes))

#define JAXRDMA_DEFINE(name, version, result, parameters, arguments) \
  static result(*pointer_##name) parameters = nullptr;               \
  extern "C" result name parameters { return pointer_##name arguments; }
JAXRDMA_VERBS_SYMBOLS(JAXRDMA_DEFINE)
JAXRDMA_VERBS_OPTIONAL(JAXRDMA_DEFINE)
#undef JAXRDMA_DEFINE

namespace {

// What an old library lacks falls back to what it has.
ibv_mr* old_reg_mr_iova2(ibv_pd* pd, void* address, size_t length, uint64_t, unsigned access) {
  return pointer_ibv_reg_mr(pd, address, length,
                            static_cast<int>(access & ~unsigned{IBV_ACCESS_OPTIONAL_RANGE}));
}

ssize_t no_gid_table(ibv_context*, ibv_gid_entry*, size_t, uint32_t, size_t) { return -1; }

}  // namespace

namespace jaxrdma::fabric::verbs {

namespace {

std::string loaded_path;  // written once, under load_library's call_once

Status load() {
  const char* wanted = std::getenv("JAXRDMA_IBVERBS_LIB");
  if (wanted == nullptr || *wanted == '\0') wanted = "libibverbs.so.1";
  void* library = dlopen(wanted, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    return {Code::kUnavailable,
            std::string("the verbs library could not be opened: ") +
                (reason == nullptr ? wanted : reason) +
                "; install rdma-core (Debian: libibverbs1 and ibverbs-providers), or choose "
                "transport=\"tcp\""};
  }
#define JAXRDMA_FIND(name, version, result, parameters, arguments)                              \
  pointer_##name = reinterpret_cast<decltype(pointer_##name)>(dlvsym(library, #name, version)); \
  if (pointer_##name == nullptr) {                                                              \
    return {Code::kUnavailable, std::string("the verbs library ") + wanted +                    \
                                    " has no symbol " #name "@" version                         \
                                    "; it is too old, or not libibverbs: install rdma-core"};   \
  }
  JAXRDMA_VERBS_SYMBOLS(JAXRDMA_FIND)
#undef JAXRDMA_FIND
#define JAXRDMA_TRY(name, version, result, parameters, arguments) \
  pointer_##name = reinterpret_cast<decltype(pointer_##name)>(dlvsym(library, #name, version));
  JAXRDMA_VERBS_OPTIONAL(JAXRDMA_TRY)
#undef JAXRDMA_TRY
  if (pointer_ibv_reg_mr_iova2 == nullptr) pointer_ibv_reg_mr_iova2 = old_reg_mr_iova2;
  if (pointer__ibv_query_gid_table == nullptr) pointer__ibv_query_gid_table = no_gid_table;

  Dl_info where{};
  if (dladdr(reinterpret_cast<void*>(pointer_ibv_open_device), &where) != 0 &&
      where.dli_fname != nullptr) {
    loaded_path = where.dli_fname;
  }
  // Children of fork must not lose pages that the device writes to. On kernels that copy pinned
  // pages at fork it does nothing; it must come before the first device is opened.
  ibv_fork_init();
  return {};
}

}  // namespace

Status load_library() {
  static std::once_flag once;
  static Status outcome;
  std::call_once(once, [] { outcome = load(); });
  return outcome;
}

std::string library_path() { return load_library().ok() ? loaded_path : std::string(); }

}  // namespace jaxrdma::fabric::verbs

#else  // JAXRDMA_HAVE_VERBS

namespace jaxrdma::fabric::verbs {

Status load_library() {
  return {Code::kUnavailable,
          "this jaxrdma was built without verbs: install libibverbs's headers (Debian: "
          "libibverbs-dev; others: rdma-core-devel) and build it again"};
}

std::string library_path() { return {}; }

}  // namespace jaxrdma::fabric::verbs

#endif
