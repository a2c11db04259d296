/* engine/pack.cc: see pack.h. */
#include "engine/pack.h"

#include <cstring>
#include <optional>
#include <string>

#include "engine/reduce.h"

namespace jaxrdma {
namespace {

/// A cache line: what is summed and copied begins at one.
constexpr size_t kAlign = 64;

}  // namespace

Packing::Packing(const FlowSpec& spec)
    : spec_(spec), packed_(spec.leaves.size()), place_(spec.leaves.size()) {
  for (const LeafMember& member : spec.members)
    if (member.elements < spec.leaves[member.leaf].elements) packed_[member.leaf] = true;
  for (size_t i = 0; i < spec.leaves.size(); ++i) {
    if (!packed_[i]) continue;
    place_[i] = bytes_;
    // With room for the widest gradient.
    const size_t width = dtype_bytes(accumulator_dtype(spec.leaves[i].dtype));
    bytes_ += (spec.leaves[i].elements * width + kAlign - 1) / kAlign * kAlign;
  }
}

Result<std::vector<LeafBuffers>> Packing::pack(OperationKind kind,
                                               const std::vector<LeafBuffers>& arrays,
                                               std::byte* buffer) const {
  const bool sends = kind == OperationKind::kExchange || kind == OperationKind::kPush ||
                     kind == OperationKind::kInit;
  const bool receives = kind != OperationKind::kPush;
  const auto flaw = [&](size_t array, const std::string& what) {
    return Status(Code::kInvalidArgument, "array " + std::to_string(array) + " of flow " +
                                              std::to_string(spec_.id) + " " + what);
  };
  // What the members of a pack are sent as: all alike, else in the type in which they are summed.
  std::vector<std::optional<DType>> sent(spec_.leaves.size());
  for (size_t i = 0; i < arrays.size(); ++i) {
    const size_t leaf = spec_.members[i].leaf;
    if (!packed_[leaf]) continue;
    if (receives && arrays[i].target == nullptr) return flaw(i, "has no target buffer");
    if (!sends) continue;
    if (arrays[i].source == nullptr) return flaw(i, "has no source buffer");
    const DType dtype = arrays[i].source_dtype;
    const DType summed = accumulator_dtype(spec_.leaves[leaf].dtype);
    if (accumulator_dtype(dtype) != summed) {
      return flaw(i, std::string("is ") + dtype_name(spec_.leaves[leaf].dtype) + ", its gradient " +
                         dtype_name(dtype) + ": cast the gradient");
    }
    sent[leaf] = sent[leaf].value_or(dtype) == dtype ? dtype : summed;
  }
  std::vector<LeafBuffers> leaves(spec_.leaves.size());
  for (size_t i = 0; i < arrays.size(); ++i) {
    const LeafMember& member = spec_.members[i];
    LeafBuffers& leaf = leaves[member.leaf];
    if (!packed_[member.leaf]) {
      leaf = arrays[i];
      continue;
    }
    std::byte* const place = buffer + place_[member.leaf];
    if (receives) leaf.target = place;
    if (!sends) continue;
    leaf.source = place;
    leaf.source_dtype = *sent[member.leaf];
    std::byte* const begin = place + member.begin * dtype_bytes(leaf.source_dtype);
    if (arrays[i].source_dtype == leaf.source_dtype) {
      std::memcpy(begin, arrays[i].source, member.elements * dtype_bytes(leaf.source_dtype));
    } else {
      widen(arrays[i].source_dtype, arrays[i].source, reinterpret_cast<float*>(begin),
            member.elements);
    }
  }
  return leaves;
}

void Packing::unpack(const std::byte* buffer, const std::vector<LeafBuffers>& arrays) const {
  for (size_t i = 0; i < arrays.size(); ++i) {
    const LeafMember& member = spec_.members[i];
    if (!packed_[member.leaf] || arrays[i].target == nullptr) continue;
    const size_t width = dtype_bytes(spec_.leaves[member.leaf].dtype);
    std::memcpy(arrays[i].target, buffer + place_[member.leaf] + member.begin * width,
                member.elements * width);
  }
}

}  // namespace jaxrdma
