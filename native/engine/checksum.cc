/* engine/checksum.cc: see checksum.h. */
#include "engine/checksum.h"

#include <cstring>

namespace jaxrdma {
namespace {

/// Sums in so many columns do not wait for each other.
constexpr size_t kColumns = 4;
constexpr size_t kRowBytes = kColumns * sizeof(uint64_t);

/// Every bit of the result depends on every bit of `value`.
uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 32)) * 0xd6e8feb86659fd93u;
  value = (value ^ (value >> 32)) * 0xd6e8feb86659fd93u;
  return value ^ (value >> 32);
}

/// As Fletcher's: of the words, and of these sums, so that the place of a word counts.
struct Sums {
  uint64_t first[kColumns] = {};
  uint64_t second[kColumns] = {};

  void add(const std::byte* row) {
    uint64_t words[kColumns];
    std::memcpy(words, row, kRowBytes);
    for (size_t i = 0; i < kColumns; ++i) {
      first[i] += words[i];
      second[i] += first[i];
    }
  }
};

}  // namespace

uint64_t partition_checksum(uint32_t partition, const std::byte* data, size_t bytes) {
  Sums sums;
  size_t done = 0;
  for (; done + kRowBytes <= bytes; done += kRowBytes) sums.add(data + done);
  if (done < bytes) {
    std::byte rest[kRowBytes] = {};
    std::memcpy(rest, data + done, bytes - done);
    sums.add(rest);
  }
  uint64_t result = mix(bytes ^ (uint64_t{partition} << 32));
  for (size_t i = 0; i < kColumns; ++i) {
    result = mix(result ^ sums.first[i]);
    result = mix(result ^ sums.second[i]);
  }
  return result;
}

}  // namespace jaxrdma
