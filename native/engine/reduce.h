/* engine/reduce.h: the arithmetic of a server: contributions of any type are summed, divided and
   narrowed.

   Every operation is correctly rounded and done in the order given, so a mean is the same bits on
   every machine. Pure functions over memory; any thread. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/flow.h"

namespace jaxrdma {

/// A gradient partition as it landed.
struct Source {
  const std::byte* data;  ///< aligned to the dtype
  DType dtype;
};

/// What to do with the next contributions of one partition.
struct Reduction {
  uint64_t elements = 0;
  DType accumulator_dtype = DType::kFloat32;  ///< kFloat32 or kFloat64
  std::byte* accumulator = nullptr;
  bool first = false;               ///< the accumulator holds nothing yet: sources[0] begins it
  std::span<const Source> sources;  ///< all of them summed in the accumulator's type, in this order
  /// 0: more contributions will follow. Else the accumulator is divided by it after the last
  /// source.
  uint32_t divisor = 0;
  /// With a divisor: where the mean goes as `output_dtype`, beside the accumulator. Null: it stays
  /// in the accumulator.
  std::byte* output = nullptr;
  DType output_dtype = DType::kFloat32;
};

/// Bytes that `reduce` will read and write, near enough to decide whose thread does it.
size_t reduction_bytes(const Reduction& reduction);

void reduce(const Reduction& reduction);

/// Conversions between fp32 and the 16-bit types: to nearest, ties to even; overflow becomes
/// infinity, NaN stays NaN.
void widen(DType from, const std::byte* source, float* target, size_t elements);
void narrow(DType to, const float* source, std::byte* target, size_t elements);

}  // namespace jaxrdma
