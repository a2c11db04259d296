/* engine/flow.h: a flow is one set of leaves that is pushed and pulled together: one model of one
 * session. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"

namespace jaxrdma {

/// Element types that can be summed. 16-bit types are summed in fp32, the others in their own
/// precision.
enum class DType : uint8_t { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 3 };
size_t dtype_bytes(DType dtype);
const char* dtype_name(DType dtype);
/// The type in which `dtype` is summed: fp64 for fp64, else fp32.
DType accumulator_dtype(DType dtype);

/// What servers do with a whole set of contributions.
enum class FlowMode : uint8_t {
  kAverage = 0,  ///< the mean itself goes back; servers hold no parameters
  kUpdate = 1,   ///< the mean goes into the update; the new parameters go back
  kShow = 2,     ///< there are none: servers publish parameters of their own, for who follows
};

struct Leaf {
  DType dtype;  ///< of the parameter, and of what comes back
  uint64_t elements;
};

/// One array of the caller's: a leaf of its own, or, beside other small ones, a piece of a leaf
/// that is a pack.
struct LeafMember {
  uint32_t leaf;
  uint64_t begin;  ///< its first element within the leaf
  uint64_t elements;
};

/// A piece of one leaf, held by one server.
struct Partition {
  uint32_t leaf;
  uint32_t server;
  uint64_t begin;     ///< first element within the leaf
  uint64_t elements;  ///< more than 0
};

/// The native half of a plan: computed in Python alike on every process (jaxrdma/plan.py), checked
/// here once.
struct FlowSpec {
  uint16_t id = 0;
  FlowMode mode = FlowMode::kUpdate;
  std::vector<Leaf> leaves;
  std::vector<Partition> partitions;  ///< in the order in which they are pushed
  /// Where the arrays of the caller are, by their index. Empty: they are the leaves.
  std::vector<LeafMember> members;
  /// How many gradients of one worker a server keeps until it is decided which of them form a mean
  /// (held.h). 0: each mean is over one gradient of every worker, and nothing is left to decide.
  uint32_t held = 0;

  size_t arrays() const { return members.empty() ? leaves.size() : members.size(); }
  /// Where array `index` is.
  LeafMember member(uint32_t index) const {
    return members.empty() ? LeafMember{index, 0, leaves[index].elements} : members[index];
  }
};

/// Refuses a spec whose partitions leave their leaf, overlap, miss a piece, are empty, name no
/// server below `servers`, or do not fit a landing slot of `slot_payload_bytes` in their widest
/// gradient type; whose members do not fill their leaves one after the other; or with a pack in
/// more than one partition.
Status check_flow(const FlowSpec& spec, uint32_t servers, size_t slot_payload_bytes);

}  // namespace jaxrdma
