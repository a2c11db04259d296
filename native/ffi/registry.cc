/* ffi/registry.cc: see registry.h. */
#include "ffi/registry.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace jaxrdma::ffi {
namespace {

struct Registry {
  std::shared_mutex lock;
  std::unordered_map<int64_t, std::shared_ptr<Session>> sessions;
  /// Sessions whose last call failed. They outlive the session: a call may come after its end.
  std::unordered_map<int64_t, Status> failed;
  std::atomic<bool> none_failed = true;  ///< without the lock: a step that goes well takes none
};

/// Never destroyed: XLA's threads and an engine's may call while the process ends.
Registry& registry() {
  static Registry* const instance = std::make_unique<Registry>().release();
  return *instance;
}

/// A forked child has the memory of its parent's engines, and none of their threads: a call would
/// wait for ever, and so would a destructor. So it finds none of them, and destroys none.
void forget_all_in_children() {
  static const int done =
      pthread_atfork([] { registry().lock.lock(); }, [] { registry().lock.unlock(); },
                     [] {
                       new std::unordered_map(std::move(registry().sessions));
                       registry().sessions.clear();
                       // It is held by a thread of the parent, which glibc tells from this one.
                       new (&registry().lock) std::shared_mutex;
                     });
  (void)done;
}

}  // namespace

void register_session(int64_t session, std::shared_ptr<WorkerEngine> engine) {
  forget_all_in_children();
  auto made = std::make_shared<Session>(std::move(engine));
  std::unique_lock guard(registry().lock);
  registry().sessions[session] = std::move(made);
}

void forget_session(int64_t session) {
  std::shared_ptr<Session> last;  // ended after the lock is given back
  std::unique_lock guard(registry().lock);
  auto found = registry().sessions.find(session);
  if (found == registry().sessions.end()) return;
  last = std::move(found->second);
  registry().sessions.erase(found);
  guard.unlock();
  last->gather.close({Code::kCancelled, "the session was closed"});
}

std::shared_ptr<Session> find_session(int64_t session) {
  std::shared_lock guard(registry().lock);
  auto found = registry().sessions.find(session);
  return found == registry().sessions.end() ? nullptr : found->second;
}

void tell_end(int64_t session, const Status& status) {
  if (status.ok() && registry().none_failed) return;
  std::unique_lock guard(registry().lock);
  if (status.ok()) {
    registry().failed.erase(session);
  } else {
    registry().failed.insert_or_assign(session, status);
  }
  registry().none_failed = registry().failed.empty();
}

Status take_end(int64_t session) {
  std::unique_lock guard(registry().lock);
  auto found = registry().failed.extract(session);
  registry().none_failed = registry().failed.empty();
  return found.empty() ? Status() : found.mapped();
}

}  // namespace jaxrdma::ffi
