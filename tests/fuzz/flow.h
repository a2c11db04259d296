/* tests/fuzz/flow.h: the model that the engines under a fuzzer hold: one leaf in two partitions. */
#pragma once

#include <cstdint>

#include "engine/flow.h"

namespace fuzz {

inline constexpr uint64_t kElements = 8;  ///< of each partition

/// `held`: as in `FlowSpec`. The lists are filled one by one: GCC 13 with ASan warns of its own
/// initialiser lists of one element.
inline jaxrdma::FlowSpec flow(uint16_t id, jaxrdma::FlowMode mode, jaxrdma::DType dtype,
                              uint32_t held = 0) {
  jaxrdma::FlowSpec spec;
  spec.id = id;
  spec.mode = mode;
  spec.held = held;
  spec.leaves.push_back({dtype, 2 * kElements});
  spec.partitions.push_back({0, 0, 0, kElements});
  spec.partitions.push_back({0, 0, kElements, kElements});
  return spec;
}

}  // namespace fuzz
