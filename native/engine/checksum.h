/* engine/checksum.h: tells whether a partition came as it was sent. */
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxrdma {

/// Of the bytes of one partition, whose index in the plan enters: those of a set of partitions may
/// be added up in any order, and two that are exchanged are noticed. As fast as memory. Against
/// mistakes, not against malice.
uint64_t partition_checksum(uint32_t partition, const std::byte* data, size_t bytes);

}  // namespace jaxrdma
