/* fabric/verbs/explain.h: what a completion status or an errno of verbs means, and what to try. */
#pragma once

#include "fabric/verbs/library.h"

#if JAXRDMA_HAVE_VERBS

#include <cstddef>
#include <string>

#include "base/status.h"
#include "fabric/tcp/socket.h"

namespace jaxrdma::fabric::verbs {

using tcp::errno_text;

/// Why `ibv_open_device` of `device` failed.
std::string explain_open(const std::string& device, int error);

/// Why there is no device at all: no kernel module, no device nodes in a container, no provider.
std::string explain_no_device();

/// Why registering `bytes`, or making a queue, failed: names the locked-memory limit of this
/// process only where it can be the cause.
std::string explain_memory(int error, size_t bytes);

/// Why a queue pair could not be brought to `state` ("RTR", ...), given the GIDs of both sides.
std::string explain_transition(const char* state, int error, const std::string& local_gid,
                               const std::string& remote_gid);

/// One bad completion: cause in words and what to try. Of several only the first says anything;
/// the others were flushed.
std::string explain_completion(ibv_wc_status status, unsigned vendor_error, int timeout,
                               int retry_count);

/// Why a queue did not take what was posted.
std::string explain_post(int error);

/// An asynchronous event of a device, and what to try: `reported "...": ...`.
std::string explain_event(ibv_event_type event);

/// Whether the peer and the work may be fine and only the path broke, so that a new queue pair may
/// go on where this one stopped.
bool path_failure(ibv_wc_status status);

/// Whether the two devices may merely have lost track of each other, as Soft-RoCE does now and then
/// when it repeats packets: worth another queue pair, but not many.
bool sequence_failure(ibv_wc_status status);

}  // namespace jaxrdma::fabric::verbs

#endif
