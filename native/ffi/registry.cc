/* ffi/registry.cc: see registry.h. */
#include "ffi/registry.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace jaxrdma::ffi {
namespace {

struct Registry {
  std::shared_mutex lock;
  std::unordered_map<int64_t, std::shared_ptr<WorkerEngine>> engines;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

}  // namespace

void register_session(int64_t session, std::shared_ptr<WorkerEngine> engine) {
  std::unique_lock guard(registry().lock);
  registry().engines[session] = std::move(engine);
}

void forget_session(int64_t session) {
  std::shared_ptr<WorkerEngine> last;  // destroyed after the lock is given back
  std::unique_lock guard(registry().lock);
  auto found = registry().engines.find(session);
  if (found == registry().engines.end()) return;
  last = std::move(found->second);
  registry().engines.erase(found);
  guard.unlock();
}

std::shared_ptr<WorkerEngine> find_session(int64_t session) {
  std::shared_lock guard(registry().lock);
  auto found = registry().engines.find(session);
  return found == registry().engines.end() ? nullptr : found->second;
}

}  // namespace jaxrdma::ffi
