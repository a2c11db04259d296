/* fabric/tcp/fabric.h: the tcp fabric: one epoll set, its listeners and connections. */
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/tcp/endpoint.h"
#include "fabric/tcp/memory.h"
#include "fabric/tcp/resolver.h"
#include "fabric/tcp/socket.h"

struct epoll_event;

namespace jaxrdma::fabric::tcp {

/// Threads. Everything under the owner's lock but `wait`, `wake` and the resolver's thread, which
/// touch only the descriptors of the epoll set and of the event counter, the atomics, and what
/// ready_mutex_ guards.
class TcpFabric final : public Fabric {
 public:
  static Result<std::unique_ptr<TcpFabric>> create(const Options& options);
  ~TcpFabric() override;

  const char* name() const override { return "tcp"; }
  Result<std::unique_ptr<MemoryRegion>> register_memory(std::byte* data, size_t bytes,
                                                        Access access) override;
  bool registration_is_cheap() const override { return true; }
  bool can_read() const override { return false; }
  uint64_t turned_away() const override { return turned_away_; }
  std::string trouble() const override;
  Result<std::string> listen(const std::string& address, Gatekeeper gatekeeper) override;
  Result<EndpointId> connect(const std::string& address, const Hello& hello,
                             int timeout_ms) override;
  Endpoint* endpoint(EndpointId id) override;
  bool poll(std::vector<Event>& events) override;
  void wait(int timeout_ms, bool patient) override;
  void wake() override;
  /// Whether `poll` has something to tell without asking the kernel.
  bool has_news() const { return have_later_ || have_names_; }

  /// `wait` also returns while `fd` is readable; reading it is the caller's business. For a fabric
  /// that uses this one for signalling. Returns an errno.
  int watch_foreign(int fd);

  // For the endpoints.
  const Options& options() const { return options_; }
  const MemoryTable& memory() const { return *memory_; }
  const Gatekeeper& gatekeeper(size_t listener) const { return listeners_[listener].gatekeeper; }
  void ask_resolver(EndpointId endpoint, const HostPort& where) { resolver_.ask(endpoint, where); }
  /// Delivers `event` in this call of `poll`, or in the next.
  void emit(Event event);
  /// Watches `fd` for the endpoint; `add` the first time. Returns an errno.
  int watch(int fd, EndpointId id, uint32_t epoll_events, bool add);
  void unwatch(int fd);
  /// The endpoint's deadline is now `deadline_ns`.
  void deadline_changed(int64_t deadline_ns);
  /// The endpoint is dead, or has ended for its owner: to be looked at when this call of `poll`
  /// ends.
  void retire(EndpointId id) { retired_.push_back(id); }
  /// An accepted connection is no longer pending.
  void hello_finished() { --pending_hellos_; }
  /// An accepted connection is none of ours.
  void turn_away() { ++turned_away_; }

 private:
  struct Listener {
    Fd socket;
    Gatekeeper gatekeeper;
    std::string address;
    bool paused = false;
  };

  TcpFabric(const Options& options, Fd epoll, Fd event);
  bool accept(size_t listener);
  void resume_listeners();
  bool run_deadlines();
  void notify();

  const Options options_;
  const Fd epoll_;
  const Fd event_;  ///< wakes `wait`, which alone reads it: `poll` on another thread must not
  std::shared_ptr<MemoryTable> memory_ = std::make_shared<MemoryTable>();
  std::vector<Listener> listeners_;
  std::unordered_map<EndpointId, std::unique_ptr<TcpEndpoint>> endpoints_;
  EndpointId next_id_ = 1;
  uint32_t pending_hellos_ = 0;
  uint64_t turned_away_ = 0;
  int64_t resume_listening_ns_ = kNever;
  std::vector<EndpointId> retired_;
  std::vector<Event>* polling_ = nullptr;  ///< where events go during `poll`
  std::vector<Event> later_;               ///< events that came about outside of `poll`
  bool delivered_only_ = false;            ///< the last `poll` did not ask the kernel

  // How `wait` and those who give it a reason to return find each other: whoever makes a reason
  // stores it first and then looks at sleeping_; `wait` stores sleeping_ first and then looks at
  // the reasons. All of it is sequentially consistent, so one of the two sees the other, and the
  // eventfd is written only if somebody sleeps.
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> woken_{false};                 ///< `wake` was called
  std::atomic<bool> have_later_{false};            ///< later_ is not empty
  std::atomic<bool> have_names_{false};            ///< an answer of the resolver waits
  std::atomic<int64_t> next_deadline_ns_{kNever};  ///< nothing in run_deadlines is due before

  struct Ready {
    uint64_t tag;
    uint32_t epoll_events;
  };
  std::mutex ready_mutex_;  // guards ready_
  /// What `wait` learnt, so that `poll` need not ask again. May be out of date: endpoints are
  /// looked up by id, and a socket that is not ready says so.
  std::vector<Ready> ready_;
  std::vector<Ready> working_;  ///< of `poll`; kept for its memory

  Resolver resolver_;  // last: its thread uses the above
};

}  // namespace jaxrdma::fabric::tcp
