/* base/secret.h: what must not be compared so that time tells how much of it was right. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace jaxrdma {

inline bool equal_in_constant_time(const std::vector<std::byte>& a,
                                   const std::vector<std::byte>& b) {
  if (a.size() != b.size()) return false;
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i)
    difference = difference | std::to_integer<uint8_t>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace jaxrdma
