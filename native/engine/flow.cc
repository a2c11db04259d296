/* engine/flow.cc: see flow.h. */
#include "engine/flow.h"

#include <algorithm>
#include <string>

namespace jaxrdma {

size_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
  }
  return 0;
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
  }
  return "unknown dtype";
}

DType accumulator_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

namespace {

/// Each is a copy of the model's part.
constexpr uint32_t kMostHeld = 1024;

std::string named(const FlowSpec& spec, size_t partition) {
  return "flow " + std::to_string(spec.id) + ", partition " + std::to_string(partition) + ": ";
}

Status refused(std::string message) {
  return Status(Code::kInvalidArgument, std::move(message) + "; the plan is not one of this job");
}

/// One partition by itself; how it lies beside the others is check_cover's.
Status check_partition(const FlowSpec& spec, size_t index, uint32_t servers, size_t slot_bytes) {
  const Partition& partition = spec.partitions[index];
  const std::string who = named(spec, index);
  if (partition.leaf >= spec.leaves.size()) {
    return refused(who + "names leaf " + std::to_string(partition.leaf) + " of " +
                   std::to_string(spec.leaves.size()));
  }
  if (partition.server >= servers) {
    return refused(who + "names server " + std::to_string(partition.server) + " of " +
                   std::to_string(servers));
  }
  if (partition.elements == 0) return refused(who + "is empty");
  const Leaf& leaf = spec.leaves[partition.leaf];
  if (partition.begin > leaf.elements || partition.elements > leaf.elements - partition.begin) {
    return refused(who + "covers elements " + std::to_string(partition.begin) + " and " +
                   std::to_string(partition.elements) + " more, but leaf " +
                   std::to_string(partition.leaf) + " has " + std::to_string(leaf.elements));
  }
  // An update takes gradients of any type that is summed in the leaf's accumulator; the widest is
  // the accumulator's.
  const DType widest = spec.mode == FlowMode::kUpdate ? accumulator_dtype(leaf.dtype) : leaf.dtype;
  if (partition.elements > slot_bytes / dtype_bytes(widest)) {
    return refused(who + "has " + std::to_string(partition.elements) + " elements of " +
                   dtype_name(widest) + ", but a landing slot holds " + std::to_string(slot_bytes) +
                   " bytes");
  }
  return Status();
}

/// Every element of every leaf lies in exactly one partition.
Status check_cover(const FlowSpec& spec) {
  std::vector<size_t> order(spec.partitions.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const Partition& left = spec.partitions[a];
    const Partition& right = spec.partitions[b];
    return left.leaf != right.leaf ? left.leaf < right.leaf : left.begin < right.begin;
  });
  size_t next = 0;
  for (size_t leaf = 0; leaf < spec.leaves.size(); ++leaf) {
    uint64_t covered = 0;
    for (; next < order.size() && spec.partitions[order[next]].leaf == leaf; ++next) {
      const Partition& partition = spec.partitions[order[next]];
      if (partition.begin != covered) {
        return refused(named(spec, order[next]) + "begins at element " +
                       std::to_string(partition.begin) + " of leaf " + std::to_string(leaf) +
                       ", but those before it end at " + std::to_string(covered));
      }
      covered += partition.elements;
    }
    if (covered != spec.leaves[leaf].elements) {
      return refused("flow " + std::to_string(spec.id) + ": the partitions of leaf " +
                     std::to_string(leaf) + " cover " + std::to_string(covered) + " of its " +
                     std::to_string(spec.leaves[leaf].elements) + " elements");
    }
  }
  return Status();
}

/// Every element of every leaf is that of exactly one array, and each server has all of a pack or
/// nothing.
Status check_members(const FlowSpec& spec) {
  if (spec.members.empty()) return Status();
  std::vector<uint64_t> filled(spec.leaves.size());
  for (size_t i = 0; i < spec.members.size(); ++i) {
    const LeafMember& member = spec.members[i];
    const std::string who =
        "flow " + std::to_string(spec.id) + ", array " + std::to_string(i) + ": ";
    if (member.leaf >= spec.leaves.size()) {
      return refused(who + "is in leaf " + std::to_string(member.leaf) + " of " +
                     std::to_string(spec.leaves.size()));
    }
    const uint64_t elements = spec.leaves[member.leaf].elements;
    if (member.begin != filled[member.leaf]) {
      return refused(who + "begins at element " + std::to_string(member.begin) + " of leaf " +
                     std::to_string(member.leaf) + ", but those before it end at " +
                     std::to_string(filled[member.leaf]));
    }
    if (member.elements > elements - member.begin) {
      return refused(who + "has " + std::to_string(member.elements) + " elements from " +
                     std::to_string(member.begin) + " on, but leaf " + std::to_string(member.leaf) +
                     " has " + std::to_string(elements));
    }
    if (member.elements == 0 && elements > 0) return refused(who + "is empty, in a pack");
    filled[member.leaf] += member.elements;
  }
  for (size_t leaf = 0; leaf < spec.leaves.size(); ++leaf) {
    if (filled[leaf] != spec.leaves[leaf].elements) {
      return refused("flow " + std::to_string(spec.id) + ": the arrays in leaf " +
                     std::to_string(leaf) + " have " + std::to_string(filled[leaf]) + " of its " +
                     std::to_string(spec.leaves[leaf].elements) + " elements");
    }
  }
  std::vector<bool> packed(spec.leaves.size());
  for (const LeafMember& member : spec.members)
    if (member.elements < spec.leaves[member.leaf].elements) packed[member.leaf] = true;
  for (size_t i = 0; i < spec.partitions.size(); ++i) {
    const Partition& partition = spec.partitions[i];
    if (packed[partition.leaf] && partition.elements < spec.leaves[partition.leaf].elements)
      return refused(named(spec, i) + "has a part of a pack, leaf " +
                     std::to_string(partition.leaf));
  }
  return Status();
}

}  // namespace

Status check_flow(const FlowSpec& spec, uint32_t servers, size_t slot_payload_bytes) {
  if (spec.mode != FlowMode::kAverage && spec.mode != FlowMode::kUpdate &&
      spec.mode != FlowMode::kShow) {
    return refused("flow " + std::to_string(spec.id) + ": unknown mode " +
                   std::to_string(static_cast<int>(spec.mode)));
  }
  if (spec.partitions.size() > UINT32_MAX) {
    return refused("flow " + std::to_string(spec.id) + ": more than 2^32 - 1 partitions");
  }
  if (spec.held > 0 && spec.mode != FlowMode::kUpdate) {
    return refused("flow " + std::to_string(spec.id) +
                   ": gradients are held for an update alone, and it has none");
  }
  if (spec.held > kMostHeld) {
    return refused("flow " + std::to_string(spec.id) + ": " + std::to_string(spec.held) +
                   " gradients of each worker held, at most " + std::to_string(kMostHeld) +
                   " can be");
  }
  for (size_t i = 0; i < spec.leaves.size(); ++i) {
    if (dtype_bytes(spec.leaves[i].dtype) == 0) {
      return refused("flow " + std::to_string(spec.id) + ": leaf " + std::to_string(i) +
                     " has unknown dtype " +
                     std::to_string(static_cast<int>(spec.leaves[i].dtype)));
    }
  }
  for (size_t i = 0; i < spec.partitions.size(); ++i) {
    if (Status status = check_partition(spec, i, servers, slot_payload_bytes); !status.ok()) {
      return status;
    }
  }
  if (Status status = check_cover(spec); !status.ok()) return status;
  return check_members(spec);
}

}  // namespace jaxrdma
