/* ffi/registry.h: small integers for engines. Compiled programs hold such an integer, never a
   pointer: they may be cached on disk and run again in another process. */
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "base/status.h"
#include "engine/gather.h"
#include "engine/worker.h"

namespace jaxrdma::ffi {

struct Session {
  explicit Session(std::shared_ptr<WorkerEngine> of)
      : engine(std::move(of)),
        gather([to = engine](Operation all) { to->start(std::move(all)); }) {}

  const std::shared_ptr<WorkerEngine> engine;
  Gather gather;  ///< of programs on several devices
};

/// Makes `engine` known as `session`. An engine that was known by that number before is forgotten.
void register_session(int64_t session, std::shared_ptr<WorkerEngine> engine);
/// What waits for the calls of other devices fails with kCancelled.
void forget_session(int64_t session);
/// nullptr if there is none, as in a process that was forked from one that had it.
std::shared_ptr<Session> find_session(int64_t session);

/// Remembers how a call of a program ended, for its session to tell if nobody waited for it.
void tell_end(int64_t session, const Status& status);
/// How the last call of the session's programs ended; forgets it. Ok if there was none.
Status take_end(int64_t session);

/// XLA's handler for the CPU, as a pointer that Python puts into a capsule.
void* cpu_handler();
/// The same for operations on tables.
void* rows_handler();

}  // namespace jaxrdma::ffi
