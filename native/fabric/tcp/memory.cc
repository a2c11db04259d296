/* fabric/tcp/memory.cc: which memory peers may write to, by key. */
#include "fabric/tcp/memory.h"

#include <random>
#include <utility>

namespace jaxrdma::fabric::tcp {

MemoryTable::MemoryTable() : next_(std::random_device{}()) {}

std::byte* MemoryTable::find(RemoteSlice remote, uint64_t bytes, const char** why) const {
  const auto found = entries_.find(remote.key[0]);
  if (found == entries_.end()) {
    *why = "names no registered region";
    return nullptr;
  }
  const Entry& entry = found->second;
  if ((static_cast<uint8_t>(entry.access) & static_cast<uint8_t>(Access::kRemoteWrite)) == 0) {
    *why = "names a region that peers may not write to";
    return nullptr;
  }
  // Neither the sum address + bytes nor a pointer outside of the region is ever formed: both could
  // overflow.
  const uint64_t base = reinterpret_cast<uintptr_t>(entry.data);
  if (remote.address < base || bytes > entry.bytes || remote.address - base > entry.bytes - bytes) {
    *why = "leaves its region";
    return nullptr;
  }
  return entry.data + (remote.address - base);
}

uint32_t MemoryTable::add(std::byte* data, size_t bytes, Access access) {
  // An odd factor makes this a permutation of the 32-bit numbers: a withdrawn key does not come
  // back for four thousand million registrations, and a stale key does not hit a neighbour.
  uint32_t key;
  do {
    key = next_++ * 0x9e3779b1u;
  } while (key == 0 || entries_.contains(key));
  entries_.emplace(key, Entry{data, bytes, access});
  return key;
}

void MemoryTable::remove(uint32_t key) { entries_.erase(key); }

TcpMemoryRegion::TcpMemoryRegion(std::shared_ptr<MemoryTable> table, std::byte* data, size_t bytes,
                                 Access access)
    : MemoryRegion(data, bytes), table_(std::move(table)) {
  if (access != Access::kLocal) remote_key_[0] = table_->add(data, bytes, access);
}

TcpMemoryRegion::~TcpMemoryRegion() {
  if (remote_key_[0] != 0) table_->remove(remote_key_[0]);
}

}  // namespace jaxrdma::fabric::tcp
