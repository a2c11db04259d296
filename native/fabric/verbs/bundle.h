/* fabric/verbs/bundle.h: one connection over several devices: its links, and which of them takes
   a write.

   With n devices on the connecting side and m on the accepting one there are max(n, m) links; link
   l joins device l mod n to device l mod m. The first is made like any connection. The reply to its
   hello tells how many devices the accepting side has, and a number by which the hello of each
   further link names the connection; it must come from the same incarnation of the same worker,
   with the same token.

   The owner sees one endpoint, which has the id of the first link: it connects when all links
   have, and dies with the first one that dies. Each link mends itself (endpoint.h); meanwhile the
   others take the writes. */
#pragma once

#include "fabric/verbs/library.h"

#if JAXRDMA_HAVE_VERBS

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/tcp/endpoint.h"

namespace jaxrdma::fabric::verbs {

class VerbsEndpoint;
class VerbsFabric;

/// Used under the lock of the fabric's owner only. Lives in its fabric.
class Bundle final : public Endpoint {
 public:
  /// `hello`: of the connecting side. `links` > 1.
  Bundle(VerbsFabric& fabric, EndpointId id, bool accepted, uint32_t links, Hello hello);

  EndpointId id() const override { return id_; }
  const std::string& peer_address() const override { return peer_; }
  /// Goes by the link with the fewest bytes under way, and by a broken one only if it has to.
  Status write(std::span<const Slice> local, RemoteSlice remote, Immediate immediate,
               RequestId request, Solicit solicit) override;
  /// Goes by the first link: reads keep their order.
  Status read(Slice local, RemoteSlice remote, RequestId request) override;
  size_t credits() const override;
  void release(size_t count) override;
  size_t outstanding() const override;
  void close(Status why, bool flush) override;
  uint64_t bytes_sent() const override;
  uint64_t bytes_received() const override;

  // For the fabric.
  const Hello& hello() const { return hello_; }
  /// Null: not made yet, or dead.
  VerbsEndpoint* link(uint32_t link) const { return links_[link]; }
  /// Whether this link may be added.
  bool lacks(uint32_t link) const;
  void add(uint32_t link, VerbsEndpoint& endpoint);
  /// What happened on one of its links.
  void on_event(VerbsEndpoint& link, Event event);
  void on_deadline();
  int64_t deadline_ns() const { return deadline_ns_; }
  /// Ends, with every link, for a reason that the peer is told.
  void fail(const Status& why);
  /// The owner has been told that it has ended, or never knew of it.
  bool over() const { return over_; }

 private:
  uint64_t sum(uint64_t (*of)(const VerbsEndpoint&)) const;
  void on_ended(VerbsEndpoint& link, const Status& why);
  void open();
  void fail_links();
  void finish_maybe();
  void set_deadline(int64_t deadline_ns);

  VerbsFabric& fabric_;
  const EndpointId id_;
  const bool accepted_;
  const Hello hello_;
  std::string peer_;
  std::vector<VerbsEndpoint*> links_;  ///< null: not made yet, or dead
  std::array<bool, kMostDevices> made_{};
  uint32_t connected_ = 0;
  uint32_t alive_ = 0;
  bool open_ = false;    ///< kConnected has been emitted
  bool ending_ = false;  ///< `reason_` says why
  bool over_ = false;
  Status reason_;
  bool hearsay_ = false;  ///< `reason_` is what the peer says; a link of this side may know better
  std::shared_ptr<const Hello> reply_;  ///< what kConnected of the first link brought
  std::vector<Event> early_;            ///< what happened before kConnected
  std::deque<uint8_t> arrived_;         ///< by which links writes came that are not released
  uint32_t next_ = 0;                   ///< the link that takes the next write among equals
  int64_t deadline_ns_ = tcp::kNever;
  uint64_t bytes_sent_ = 0, bytes_received_ = 0;  ///< of links that are dead
};

}  // namespace jaxrdma::fabric::verbs

#endif
