/* fabric/faulty/fabric.h: a fabric that does one thing wrong, around a real one that does all else.

   For drills: what a stall report says of a fault can be seen only where there is one, and a wire
   that loses a message, or a card that swallows a completion, cannot be had to order. What counts
   are writes of data: those of more than kSmall bytes, to whomever. */
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/faulty/fault.h"

namespace jaxrdma::fabric::faulty {

/// Writes up to here are taken for bookkeeping.
inline constexpr size_t kSmall = 64;

class FaultyFabric;

/// A write that is kept back.
struct HeldWrite {
  std::vector<Slice> local;
  RemoteSlice remote;
  Immediate immediate;
  RequestId request;
  Solicit solicit;
};

class FaultyEndpoint final : public Endpoint {
 public:
  FaultyEndpoint(FaultyFabric& fabric, Endpoint& inner) : fabric_(fabric), inner_(inner) {}

  EndpointId id() const override { return inner_.id(); }
  const std::string& peer_address() const override { return inner_.peer_address(); }
  Status write(std::span<const Slice> local, RemoteSlice remote, Immediate immediate,
               RequestId request, Solicit solicit) override;
  Status read(Slice local, RemoteSlice remote, RequestId request) override {
    return inner_.read(local, remote, request);
  }
  size_t credits() const override;
  void release(size_t count) override;
  size_t outstanding() const override { return inner_.outstanding() + held_.size() + never_; }
  void close(Status why, bool flush) override;
  uint64_t bytes_sent() const override { return inner_.bytes_sent(); }
  uint64_t bytes_received() const override { return inner_.bytes_received(); }

 private:
  friend class FaultyFabric;
  /// Posts what was held, as far as credits go.
  void let_go();
  Status lose(RequestId request);
  Status keep(std::span<const Slice> local, RemoteSlice remote, Immediate immediate,
              RequestId request, Solicit solicit);

  FaultyFabric& fabric_;
  Endpoint& inner_;
  std::deque<HeldWrite> held_;
  size_t never_ = 0;      ///< accepted, and neither made nor completed
  int64_t until_ns_ = 0;  ///< when what is held is let go
};

class FaultyFabric final : public Fabric {
 public:
  FaultyFabric(std::unique_ptr<Fabric> inner, Fault fault)
      : inner_(std::move(inner)), fault_(fault) {}

  const char* name() const override { return inner_->name(); }
  std::string describe() const override {
    return inner_->describe() + ", with a fault to order" + (struck_ ? ", which has come" : "");
  }
  std::string notice() const override { return inner_->notice(); }
  std::string trouble() const override { return inner_->trouble(); }
  uint64_t turned_away() const override { return inner_->turned_away(); }
  Result<std::unique_ptr<MemoryRegion>> register_memory(std::byte* data, size_t bytes,
                                                        Access access) override {
    return inner_->register_memory(data, bytes, access);
  }
  bool registration_is_cheap() const override { return inner_->registration_is_cheap(); }
  bool can_read() const override { return inner_->can_read(); }
  Result<std::string> listen(const std::string& address, Gatekeeper gatekeeper) override {
    return inner_->listen(address, std::move(gatekeeper));
  }
  Result<EndpointId> connect(const std::string& address, const Hello& hello,
                             int timeout_ms) override {
    return inner_->connect(address, hello, timeout_ms);
  }
  Endpoint* endpoint(EndpointId id) override;
  bool poll(std::vector<Event>& events) override;
  void wait(int timeout_ms, bool patient) override;
  void wake() override { inner_->wake(); }

 private:
  friend class FaultyEndpoint;
  /// Whether this write, of so many bytes, is the one that goes wrong.
  bool strikes_sent(size_t bytes);

  const std::unique_ptr<Fabric> inner_;
  const Fault fault_;
  uint64_t sent_ = 0;      ///< writes of data, so far
  uint64_t received_ = 0;  ///< likewise
  std::unordered_map<EndpointId, std::unique_ptr<FaultyEndpoint>> endpoints_;
  std::vector<Event> made_up_;  ///< completions of writes that were lost
  std::optional<std::pair<EndpointId, RequestId>> swallowed_;  ///< whose completion never comes
  bool uncredited_ = false;
  bool struck_ = false;  ///< the fault has come
  /// When what is held is let go, for `wait`, which has no lock. 0: nothing is held.
  std::atomic<int64_t> due_ns_{0};
};

}  // namespace jaxrdma::fabric::faulty
