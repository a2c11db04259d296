/* engine/landing.h: the memory of a server: registered slabs, and the slots in which one worker's
 * writes land. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/wire.h"
#include "fabric/fabric.h"

namespace jaxrdma {

/// Page-aligned memory whose pages are there: a first touch on the way of a partition costs more
/// than its copy.
class Pages {
 public:
  Pages() = default;
  Pages(Pages&& other) noexcept { swap(other); }
  Pages& operator=(Pages&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Pages();

  /// Zeroed. `what` says in the failure whose memory it was to be. 0 bytes: none.
  static Result<Pages> allocate(size_t bytes, const std::string& what);
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void swap(Pages& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

/// Pages known to a fabric. Like every call on the fabric, `enrol`, `withdraw` and the destruction
/// need its owner's lock.
struct Slab {
  Pages pages;
  std::unique_ptr<fabric::MemoryRegion> region;  ///< destroyed before `pages`

  Status enrol(fabric::Fabric& fabric, fabric::Access access);
  void withdraw() { region.reset(); }
  fabric::Slice slice(const std::byte* data, size_t bytes) const {
    return {region.get(), data, bytes};
  }
};

/// The slots of one connection of one worker. Everything that still needs a slot shares in the
/// ownership: a contribution that waits in it, a write whose source it is, the connection whose
/// peer may write to it.
class Landing {
 public:
  /// Needs no lock.
  static Result<std::shared_ptr<Landing>> create(uint32_t slots, size_t payload_bytes,
                                                 const std::string& owner);
  /// Distance of slots: the payloads are aligned to 64 bytes.
  static size_t stride(size_t payload_bytes) {
    return sizeof(wire::Header) + (payload_bytes + 63) / 64 * 64;
  }

  wire::LandingGrant grant() const;
  uint32_t slots() const { return static_cast<uint32_t>(occupied_.size()); }
  std::byte* header(uint32_t slot) const { return slab.pages.data() + slot * stride_; }
  std::byte* payload(uint32_t slot) const { return header(slot) + sizeof(wire::Header); }

  bool occupied(uint32_t slot) const { return occupied_[slot]; }
  void occupy(uint32_t slot) { occupied_[slot] = true; }
  /// Wipes the header's magic, so that a slot announced twice is not read twice.
  void free(uint32_t slot);

  Slab slab;
  bool used = false;  ///< has been granted to a connection, which may still write

 private:
  Landing(uint32_t slots, size_t stride) : stride_(stride), occupied_(slots) {}
  size_t stride_;
  std::vector<bool> occupied_;
};

}  // namespace jaxrdma
