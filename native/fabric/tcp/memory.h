/* fabric/tcp/memory.h: which memory peers may write to, by key. */
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "base/status.h"
#include "fabric/fabric.h"

namespace jaxrdma::fabric::tcp {

/// The regions of one fabric that have a remote key. A key is good on any of its connections, for
/// answers to one request come over several: that a peer cannot guess those it was not told is what
/// keeps it to its own. Used under the lock of the fabric's owner.
class MemoryTable {
 public:
  /// Where a peer's write of `bytes` bytes to `remote` goes; nullptr, and the reason in `why`,
  /// where it must not go.
  std::byte* find(RemoteSlice remote, uint64_t bytes, const char** why) const;

  uint32_t add(std::byte* data, size_t bytes, Access access);
  void remove(uint32_t key);

 private:
  struct Entry {
    std::byte* data;
    size_t bytes;
    Access access;
  };
  uint32_t draw();

  std::unordered_map<uint32_t, Entry> entries_;
  std::array<uint32_t, 64> drawn_;  ///< random numbers: one system call draws so many
  size_t left_ = 0;                 ///< of drawn_, from its begin
};

/// Registering costs an entry in a table; memory only read from here costs nothing at all.
class TcpMemoryRegion final : public MemoryRegion {
 public:
  /// Shares the table, so that a region may outlive its fabric.
  TcpMemoryRegion(std::shared_ptr<MemoryTable> table, std::byte* data, size_t bytes, Access access);
  ~TcpMemoryRegion() override;

 private:
  std::shared_ptr<MemoryTable> table_;
};

}  // namespace jaxrdma::fabric::tcp
