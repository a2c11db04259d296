/* engine/aggregate.h: what a server remembers of its flows: for each partition, who has contributed
   to which step, who waits for what, and where the numbers lie. Data and questions about it; the
   server's engine acts. */
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/flow.h"
#include "engine/held.h"
#include "engine/landing.h"
#include "engine/reduce.h"
#include "fabric/fabric.h"

namespace jaxrdma {

/// A gradient partition in a landing slot.
struct Contribution {
  uint32_t worker;
  DType dtype;
  std::shared_ptr<Landing> landing;
  uint32_t slot;
  fabric::EndpointId endpoint;  ///< who is told when the slot is free
};

struct Aggregate;

/// One partition of this server.
struct Piece {
  Aggregate* flow = nullptr;
  uint32_t partition = 0;  ///< index in the plan
  DType dtype = DType::kFloat32;
  uint64_t elements = 0;
  std::byte* accumulator = nullptr;
  std::byte* result = nullptr;  ///< what is sent: parameters, or the mean

  int64_t version = -1;    ///< the step that is being aggregated
  int64_t published = -1;  ///< the step that `result` has reached
  bool initialised = false;
  std::vector<bool> contributed;                ///< by worker; to `version`, summed or not
  uint32_t arrived = 0;                         ///< true bits of `contributed`
  std::chrono::steady_clock::time_point since;  ///< when the first of them came
  uint32_t summed = 0;                          ///< contributions in the accumulator
  std::vector<Contribution> waiting;            ///< arrived, not being summed
  std::vector<Contribution> reducing;           ///< in the hands of a reducing thread
  std::vector<Source> sources;                  ///< of `reducing`
  std::vector<Contribution> owed;               ///< summed; their slots are not yet given back
  bool busy = false;               ///< `reducing` and the accumulator belong to a reducing thread
  std::vector<Reply> replies;      ///< not yet posted
  uint32_t replies_in_flight = 0;  ///< writes that read `result`

  size_t bytes() const { return elements * dtype_bytes(dtype); }
  bool misses(uint32_t worker) const { return arrived > 0 && !contributed[worker]; }
  /// Begins to aggregate `step`.
  void begin(int64_t step);
  /// Moves from `waiting` to `reducing` what may be summed next: everything, or with `ordered` what
  /// replica order allows.
  void take(bool ordered);
  Reduction reduction(uint32_t workers);
};

/// One flow on this server.
struct Aggregate {
  /// Allocates the slabs and lays out the pieces. Needs no lock; the slabs are not enrolled yet.
  static Result<std::unique_ptr<Aggregate>> create(FlowSpec spec, uint32_t server,
                                                   uint32_t workers);

  FlowSpec spec;
  std::vector<Piece> pieces;      ///< in plan order; never moves
  std::vector<int32_t> piece_of;  ///< by partition; -1: on another server
  Slab accumulators;
  size_t parameters_at = 0;  ///< where in `results` the first leaf lies (update)
  Slab results;              ///< empty where the accumulators themselves, or the slots, are sent
  std::vector<std::byte*> accumulator_of_leaf;
  std::vector<std::byte*> result_of_leaf;
  std::vector<uint64_t> elements_of_leaf;  ///< on this server

  /// Of flows with an update, in `results`: where each piece lies, and whether it is at rest, for
  /// peers that read the parameters there.
  wire::Location* locations = nullptr;
  wire::Seal* seal = nullptr;

  size_t initialised = 0;  ///< pieces
  int64_t init_step = -1;
  size_t complete = 0;    ///< pieces whose mean is there (update)
  bool updating = false;  ///< the parameters belong to Python until `publish`
  uint32_t replies_in_flight = 0;
  bool stranded = false;  ///< said once

  std::unique_ptr<Held> held;  ///< null where nothing is left to decide about gradients

  Versions copies;                               ///< for followers, where none are held anyway
  std::vector<std::shared_ptr<Version>> coming;  ///< to be given to followers: being copied, summed
  bool copying = false;      ///< somebody reads the parameters: the next update waits
  bool making_room = false;  ///< for one more of `copies`

  std::vector<uint64_t> summed_of_worker;  ///< pieces in a mean, ever
  uint64_t means = 0;                      ///< pieces aggregated, ever (average)
  uint64_t steps = 0;                      ///< published after an update

  /// Whether the servers hold parameters of it.
  bool update() const { return spec.mode != FlowMode::kAverage; }
  /// Whether nothing comes from workers.
  bool shows() const { return spec.mode == FlowMode::kShow; }
  int64_t published() const { return pieces.empty() ? -1 : pieces.front().published; }
  /// What is answered may be the source of writes: it is at rest, or a copy.
  bool readable() const {
    return held != nullptr ? held->current != nullptr
                           : !update() || (!updating && complete < pieces.size());
  }
  /// The region and memory that a piece's result is sent from.
  fabric::Slice result_slice(const Piece& piece) const;
  /// Where a copy has it.
  fabric::Slice version_slice(const Version& version, const Piece& piece) const;
  size_t parameter_bytes() const { return results.pages.bytes() - parameters_at; }
  /// Where a held gradient has its part of `piece`.
  std::byte* value(const HeldGradient& gradient, const Piece& piece) const {
    return gradient.values.data() + (piece.accumulator - accumulators.pages.data());
  }
  /// Fills a version that was begun with the parameters as they are.
  void copy_parameters(Version& version) const;
  /// Writes into a filled version what followers are told of it.
  void sum_parameters(Version& version) const;
  /// What a kLocate of this piece is answered with. `results` must be enrolled.
  fabric::Slice location_slice(const Piece& piece);
  /// The parameters are about to be overwritten, or are those of `step`: what a reader reads
  /// between the two, it can tell.
  void break_seal();
  void set_seal(int64_t step);
};

}  // namespace jaxrdma
