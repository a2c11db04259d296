/* engine/pack.h: packs: small arrays of the caller's that travel as one leaf of a flow.

   A partition costs tens of microseconds whatever its size, so many small ones are copied into one
   buffer before they travel, and out of it afterwards. Pure functions over memory; any thread. */
#pragma once

#include <cstddef>
#include <vector>

#include "base/status.h"
#include "engine/flow.h"
#include "engine/worker.h"

namespace jaxrdma {

/// Where the packs of a flow lie in one buffer. Refers to the spec that it was made of.
class Packing {
 public:
  /// `spec`: checked by check_flow.
  explicit Packing(const FlowSpec& spec);

  /// How many bytes the buffer of an operation has; 0: the flow has no packs.
  size_t bytes() const { return bytes_; }

  /// The buffers of the flow's leaves, for an operation of `kind` on the arrays of the caller:
  /// theirs, or places in `buffer`, to which what is sent has been copied. What comes back to a
  /// place may land where that was taken from: a pack is one partition.
  Result<std::vector<LeafBuffers>> pack(OperationKind kind, const std::vector<LeafBuffers>& arrays,
                                        std::byte* buffer) const;

  /// Copies what came into `buffer` to the arrays that it is for.
  void unpack(const std::byte* buffer, const std::vector<LeafBuffers>& arrays) const;

 private:
  const FlowSpec& spec_;
  size_t bytes_ = 0;
  std::vector<bool> packed_;   ///< by leaf, whether it is a pack
  std::vector<size_t> place_;  ///< by leaf that is one, where it lies
};

}  // namespace jaxrdma
