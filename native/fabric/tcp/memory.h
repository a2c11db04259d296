/* fabric/tcp/memory.h: which memory peers may write to, by key. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "base/status.h"
#include "fabric/fabric.h"

namespace jaxrdma::fabric::tcp {

/// The regions of one fabric that have a remote key. Used under the lock of the fabric's owner.
class MemoryTable {
 public:
  MemoryTable();

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
  std::unordered_map<uint32_t, Entry> entries_;
  uint32_t next_;
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
