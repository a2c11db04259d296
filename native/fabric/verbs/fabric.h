/* fabric/verbs/fabric.h: the verbs fabric: its devices, their queue pairs, and the tcp fabric that
   signals for them. */
#pragma once

#include "fabric/verbs/library.h"

#if JAXRDMA_HAVE_VERBS

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/tcp/fabric.h"
#include "fabric/verbs/bundle.h"
#include "fabric/verbs/endpoint.h"
#include "fabric/verbs/memory.h"
#include "fabric/verbs/queue_pair.h"
#include "fabric/verbs/rail.h"
#include "fabric/verbs/setup.h"

namespace jaxrdma::fabric::verbs {

/// Threads. Everything under the owner's lock but `wait`, `wake` and the set-up thread. `wait` arms
/// the completion queues and then sleeps in the epoll set of the signalling fabric, which watches
/// the completion channels and the asynchronous events too.
class VerbsFabric final : public Fabric {
 public:
  static Result<std::unique_ptr<Fabric>> create(const Options& options, const VerbsOptions& verbs);
  ~VerbsFabric() override;

  const char* name() const override { return "verbs"; }
  std::string describe() const override;
  std::string notice() const override;
  std::string trouble() const override;
  uint64_t turned_away() const override { return signalling_->turned_away(); }
  Result<std::unique_ptr<MemoryRegion>> register_memory(std::byte* data, size_t bytes,
                                                        Access access) override;
  bool registration_is_cheap() const override { return false; }
  bool can_read() const override { return true; }
  Result<std::string> listen(const std::string& address, Gatekeeper gatekeeper) override;
  Result<EndpointId> connect(const std::string& address, const Hello& hello,
                             int timeout_ms) override;
  Endpoint* endpoint(EndpointId id) override;
  bool poll(std::vector<Event>& events) override;
  void wait(int timeout_ms, bool patient) override;
  void wake() override { signalling_->wake(); }

  // For the endpoints.
  const Options& options() const { return options_; }
  const VerbsOptions& verbs_options() const { return verbs_; }
  Fabric& signalling() { return *signalling_; }
  const std::vector<std::unique_ptr<Rail>>& rails() const { return rails_; }
  /// A queue pair for a peer with this GID, in INIT, and polled from now on.
  Result<std::shared_ptr<QueuePair>> make_queue_pair(EndpointId id, Rail& rail, const RawGid* peer);
  void start_polling(EndpointId id, std::shared_ptr<QueuePair> queue_pair);
  void stop_polling(const QueuePair& queue_pair);
  /// What its completion queue holds now.
  std::vector<ibv_wc> drain(EndpointId id, QueuePair& queue_pair);
  void ask_setup(EndpointId id, uint32_t generation, std::shared_ptr<QueuePair> queue_pair,
                 const ConnectionParameters& peer) {
    setup_.ask(id, generation, std::move(queue_pair), peer);
  }
  void emit(Event event);
  void retire(EndpointId id) { retired_.push_back(id); }
  void deadline_changed(int64_t deadline_ns);
  /// An endpoint cannot go on without the completion of what it has posted.
  void completions_needed();

 private:
  VerbsFabric(const Options& options, const VerbsOptions& verbs);
  Result<std::vector<std::byte>> admit(const Gatekeeper& gatekeeper, EndpointId id,
                                       const Hello& hello);
  Result<std::vector<std::byte>> admit_link(EndpointId id, const Hello& hello,
                                            const ConnectionParameters& peer);
  Result<VerbsEndpoint*> accept(EndpointId id, const ConnectionParameters& peer);
  Result<VerbsEndpoint*> connect_link(const std::string& address, const Hello& hello,
                                      int64_t deadline_ns, uint32_t link, uint32_t bundle);
  void make_links(VerbsEndpoint& first, const ConnectionParameters& peer);
  static void meet(VerbsEndpoint& endpoint, Rail& rail, const ConnectionParameters& peer);
  Rail& rail_of(uint32_t link) { return *rails_[link % rails_.size()]; }
  uint32_t links_with(const ConnectionParameters& peer) const {
    return std::max(static_cast<uint32_t>(rails_.size()), uint32_t{peer.rails});
  }
  void signalled(const Event& event);
  void read_async_events(Rail& rail);
  void read_channel();
  /// Returns whether a completion queue may hold more.
  bool poll_completions();
  void run_deadlines();

  const Options options_;
  const VerbsOptions verbs_;
  std::vector<std::unique_ptr<Rail>> rails_;  ///< as in the options
  std::unique_ptr<tcp::TcpFabric> signalling_;
  std::unordered_map<EndpointId, std::unique_ptr<VerbsEndpoint>> endpoints_;
  /// Connections of more than one link, by the id of the first.
  std::unordered_map<EndpointId, std::unique_ptr<Bundle>> bundles_;
  /// What was asked for, until the peer has told how many links there are.
  struct Asked {
    std::string address;
    Hello hello;
    int64_t deadline_ns = 0;
  };
  std::unordered_map<EndpointId, Asked> asked_;
  std::vector<EndpointId> retired_;
  std::vector<Event> signals_;
  uint32_t polls_ = 0;  ///< since the signalling fabric was last polled

  std::vector<Event>* polling_ = nullptr;  ///< where events go during `poll`
  std::vector<Event> later_;               ///< events that came about outside of `poll`
  std::atomic<bool> have_later_{false};
  std::atomic<bool> have_answers_{false};
  std::atomic<bool> impatient_{false};  ///< an endpoint needs_completions
  std::atomic<bool> slept_{false};      ///< `wait` has returned: descriptors may be readable
  std::atomic<int64_t> next_deadline_ns_{kNever};

  struct Polled {
    EndpointId endpoint;
    std::shared_ptr<QueuePair> queue_pair;
  };
  struct Found {
    EndpointId endpoint;
    uint64_t queue_pair;  ///< its serial number: it may be gone, and another at its address
    ibv_wc completion;
  };
  std::mutex completions_mutex_;  // guards polled_, found_, QueuePair::armed, and polling
  std::vector<Polled> polled_;
  std::vector<Found> found_;    ///< what `wait` found after arming
  std::vector<Found> working_;  ///< of `poll`; kept for their memory
  std::vector<ibv_wc> batch_;

  Setup setup_;  // last: its thread uses the above
};

}  // namespace jaxrdma::fabric::verbs

#endif
