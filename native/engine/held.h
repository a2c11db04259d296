/* engine/held.h: gradients that are kept whole until it is decided which of them form a mean.

   Where a mean is not over one gradient of each worker (backup replicas, several gradients of one
   worker, workers that run ahead), what lands cannot be summed before somebody has named the set.
   So each worker's share is kept, in the type in which it is summed, and its landing slots are
   given back at once. What the workers are answered with is a copy of the parameters of one
   version: a slow reader delays no update.

   Data and questions about it; the server's engine acts. */
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "engine/flow.h"
#include "engine/landing.h"
#include "engine/wire.h"
#include "fabric/fabric.h"

namespace jaxrdma {

/// Names a gradient: those of one incarnation of a worker are numbered from 0, in the order in
/// which it pushes them. As a worker is answered before it pushes again, all servers count alike.
struct GradientId {
  uint32_t worker = 0;
  uint64_t incarnation = 0;
  uint32_t sequence = 0;
  bool operator==(const GradientId&) const = default;
};
std::string name_of(const GradientId& id);

/// A worker that waits for a partition to reach step `wanted`.
struct Reply {
  uint32_t worker;
  fabric::EndpointId endpoint;
  fabric::RemoteSlice target;
  uint32_t tag;
  int64_t wanted;
  uint32_t slot;  ///< in which it was asked for
};

/// This server's share of one gradient.
struct HeldGradient {
  GradientId id;
  int64_t step = 0;  ///< of the parameters that it was computed on
  fabric::EndpointId endpoint = 0;
  /// When the first of it came.
  std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
  Pages values;                               ///< laid out as the sums of its flow
  std::vector<std::optional<Reply>> replies;  ///< by piece: who waits; none: has not landed
  std::optional<Reply> verdict;               ///< who waits to be told what became of it
  size_t missing = 0;   ///< pieces that are not in `values`, and the verdict's request
  uint32_t busy = 0;    ///< pieces in the hands of reducing threads
  bool orphan = false;  ///< its connection is gone: nobody waits for an answer
  bool named = false;   ///< it is decided what becomes of it
  bool spent = false;   ///< its values are not needed any more: summed, or dropped
  bool answered = false;
  /// What its worker shall be answered with, once that is known.
  struct Verdict {
    int64_t step;
    bool accepted;
  };
  std::optional<Verdict> decided;

  bool whole() const { return missing == 0; }
  bool over() const { return busy == 0 && (orphan ? spent || !whole() : spent && answered); }
};

/// A copy of the parameters of one version, for those who are answered with it: two verdicts, for
/// a gradient that does not count and one that does; what followers are told of it; then the
/// parameters, laid out as in the flow. Shared by the writes that read it.
struct Version {
  Slab slab;
  int64_t step = -1;
  bool summed = false;  ///< `kept` has its checksum

  static size_t parameters_at();
  /// Is going to be filled with the parameters of this step.
  void begin(int64_t of);
  wire::Verdict* verdicts() const { return reinterpret_cast<wire::Verdict*>(slab.pages.data()); }
  wire::Kept* kept() const { return reinterpret_cast<wire::Kept*>(verdicts() + 2); }
};

/// Versions of one flow. One that only the pool knows is spare.
class Versions {
 public:
  /// One that nobody reads, to be filled; null if there is none.
  std::shared_ptr<Version> spare() const;
  /// Another. Needs no lock, but `add` does.
  static Result<std::shared_ptr<Version>> make(size_t parameter_bytes, const std::string& who);
  Status add(fabric::Fabric& fabric, std::shared_ptr<Version> version);
  /// The parameters of `step` with their checksum, if they are still here.
  std::shared_ptr<Version> find(int64_t step) const;
  size_t size() const { return all_.size(); }
  /// Before the fabric goes.
  void withdraw();

 private:
  std::vector<std::shared_ptr<Version>> all_;
};

/// The held gradients of one flow on this server.
class Held {
 public:
  /// `per_worker`: while all workers are there; all together never have more. `value_bytes`: of one
  /// gradient; `parameter_bytes`: of one version. Allocates room for
  /// `per_worker` gradients of each of `workers`. Needs no lock.
  static Result<std::unique_ptr<Held>> create(uint32_t per_worker, uint32_t workers, size_t pieces,
                                              size_t value_bytes, size_t parameter_bytes,
                                              std::string who);

  /// The gradient of this worker that is still landing, or a new one; an error if it has as many
  /// as it may.
  Result<HeldGradient*> landing(uint32_t worker, uint64_t incarnation, fabric::EndpointId endpoint,
                                int64_t step);
  HeldGradient* find(const GradientId& id);
  /// Forgets the gradients that are over.
  void sweep();
  /// A connection has ended.
  void orphan(fabric::EndpointId endpoint);
  std::list<HeldGradient>& all() { return gradients_; }

  /// A version that nobody reads, to be filled.
  Result<std::shared_ptr<Version>> spare(fabric::Fabric& fabric);

  /// Before the fabric goes.
  void withdraw();

  /// A mean that was asked for, and is not begun.
  struct Mean {
    int64_t step;
    std::vector<GradientId> set;
  };
  std::deque<Mean> means;
  int64_t newest_mean = -1;            ///< the step of the last one that was asked for
  std::vector<HeldGradient*> summing;  ///< of the mean that is being formed
  bool forming = false;                ///< a mean, until it is published
  std::shared_ptr<Version> current;    ///< null before the first publication

 private:
  Held() = default;
  uint64_t most_ = 0;  ///< of one worker
  size_t pieces_ = 0;
  size_t value_bytes_ = 0;
  size_t parameter_bytes_ = 0;
  std::string who_;
  std::list<HeldGradient> gradients_;
  std::vector<Pages> spare_values_;
  Versions versions_;
  struct Count {
    uint64_t incarnation;
    uint32_t next;
  };
  std::unordered_map<uint32_t, Count> counts_;  ///< by worker
};

}  // namespace jaxrdma
