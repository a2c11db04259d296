/* fabric/verbs/memory.cc: see memory.h. */
#include "fabric/verbs/memory.h"

#if JAXRDMA_HAVE_VERBS

#include <cerrno>
#include <string>

#include "fabric/verbs/explain.h"

namespace jaxrdma::fabric::verbs {

Result<std::unique_ptr<MemoryRegion>> VerbsMemoryRegion::create(
    std::span<const std::unique_ptr<Rail>> rails, std::byte* data, size_t bytes, Access access) {
  if (data == nullptr || bytes == 0)
    return Status(Code::kInvalidArgument, "memory to register must not be null or empty");
  // Memory that is only read from here may be mapped read-only, which LOCAL_WRITE would refuse.
  const auto wanted = static_cast<uint8_t>(access);
  int flags = 0;
  if ((wanted & static_cast<uint8_t>(Access::kRemoteWrite)) != 0)
    flags |= IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  if ((wanted & static_cast<uint8_t>(Access::kRemoteRead)) != 0) flags |= IBV_ACCESS_REMOTE_READ;
  std::unique_ptr<VerbsMemoryRegion> made(new VerbsMemoryRegion(data, bytes));
  for (const auto& rail : rails) {
    const Device& device = *rail->device();
    if (const uint64_t most = device.attributes().max_mr_size; bytes > most) {
      return Status(Code::kResource, std::to_string(bytes) + " bytes are more than device " +
                                         device.name() + " registers at one time (" +
                                         std::to_string(most) + ")");
    }
    ibv_mr* region = ibv_reg_mr(device.pd(), data, bytes, flags);
    if (region == nullptr) {
      return Status(Code::kResource, "device " + device.name() + " did not register " +
                                         std::to_string(bytes) +
                                         " bytes: " + explain_memory(errno, bytes));
    }
    made->of_rail_.push_back({rail->device(), std::unique_ptr<ibv_mr, Deregister>(region)});
    if (access != Access::kLocal) made->remote_key_[rail->index()] = region->rkey;
  }
  return std::unique_ptr<MemoryRegion>(std::move(made));
}

}  // namespace jaxrdma::fabric::verbs

#endif
