/* engine/landing.cc: see landing.h. */
#include "engine/landing.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

namespace jaxrdma {

Pages::~Pages() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Result<Pages> Pages::allocate(size_t bytes, const std::string& what) {
  Pages pages;
  if (bytes == 0) return pages;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return Status(Code::kResource,
                  "no memory for " + what + ": the system refused " + std::to_string(bytes) +
                      " bytes (" + std::strerror(errno) +
                      "); use more servers, or smaller or fewer partitions in flight");
  }
  pages.data_ = static_cast<std::byte*>(data);
  pages.bytes_ = bytes;
  madvise(data, bytes, MADV_HUGEPAGE);  // advice: without it the pages are smaller, no more
  constexpr size_t kSmallestPage = 4096;
  for (size_t offset = 0; offset < bytes; offset += kSmallestPage) {
    static_cast<volatile std::byte*>(pages.data_)[offset] = std::byte{0};
  }
  return pages;
}

Status Slab::enrol(fabric::Fabric& fabric, fabric::Access access) {
  if (pages.bytes() == 0) return Status();
  auto registered = fabric.register_memory(pages.data(), pages.bytes(), access);
  if (!registered.ok()) return registered.status();
  region = std::move(registered.value());
  return Status();
}

Result<std::shared_ptr<Landing>> Landing::create(uint32_t slots, size_t payload_bytes,
                                                 const std::string& owner) {
  const size_t stride = Landing::stride(payload_bytes);
  auto pages = Pages::allocate(slots * stride, std::to_string(slots) + " landing slots of " +
                                                   std::to_string(stride) + " bytes of " + owner);
  if (!pages.ok()) return pages.status();
  std::shared_ptr<Landing> landing(new Landing(slots, stride));
  landing->slab.pages = std::move(pages.value());
  return landing;
}

wire::LandingGrant Landing::grant() const {
  wire::LandingGrant grant{};
  grant.address = reinterpret_cast<uintptr_t>(slab.pages.data());
  grant.slot_stride = stride_;
  grant.key = slab.region->remote_key();
  grant.slots = slots();
  return grant;
}

void Landing::free(uint32_t slot) {
  occupied_[slot] = false;
  std::memset(header(slot), 0, sizeof(uint32_t));
}

}  // namespace jaxrdma
