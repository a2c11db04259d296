/* fabric/tcp/memory.cc: which memory peers may write to, by key. */
#include "fabric/tcp/memory.h"

#include <sys/random.h>

#include <random>
#include <utility>

namespace jaxrdma::fabric::tcp {

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
  // Random, each by itself: a key says nothing of another's, and one that was withdrawn is as
  // unlikely to come back as any is to be guessed.
  uint32_t key;
  do {
    key = draw();
  } while (key == 0 || entries_.contains(key));
  entries_.emplace(key, Entry{data, bytes, access});
  return key;
}

uint32_t MemoryTable::draw() {
  if (left_ == 0) {
    // So many bytes come whole or not at all, and are never waited for once the system is up.
    static_assert(sizeof(drawn_) <= 256);
    if (getrandom(drawn_.data(), sizeof(drawn_), 0) != static_cast<ssize_t>(sizeof(drawn_))) {
      std::random_device source;  // where a sandbox forbids the call
      for (uint32_t& each : drawn_) each = source();
    }
    left_ = drawn_.size();
  }
  return drawn_[--left_];
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
