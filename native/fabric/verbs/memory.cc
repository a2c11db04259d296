/* fabric/verbs/memory.cc: memory registered with a device. */
#include "fabric/verbs/memory.h"

#if JAXRDMA_HAVE_VERBS

#include <cerrno>
#include <string>

#include "fabric/verbs/explain.h"

namespace jaxrdma::fabric::verbs {

Result<std::unique_ptr<MemoryRegion>> VerbsMemoryRegion::create(std::shared_ptr<Device> device,
                                                                std::byte* data, size_t bytes,
                                                                Access access) {
  if (data == nullptr || bytes == 0)
    return Status(Code::kInvalidArgument, "memory to register must not be null or empty");
  const auto& attributes = device->attributes();
  if (bytes > attributes.max_mr_size) {
    return Status(Code::kResource, std::to_string(bytes) + " bytes are more than device " +
                                       device->name() + " registers at one time (" +
                                       std::to_string(attributes.max_mr_size) + ")");
  }
  // Memory that is only read from here may be mapped read-only, which LOCAL_WRITE would refuse.
  const auto wanted = static_cast<uint8_t>(access);
  int flags = 0;
  if ((wanted & static_cast<uint8_t>(Access::kRemoteWrite)) != 0)
    flags |= IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  if ((wanted & static_cast<uint8_t>(Access::kRemoteRead)) != 0) flags |= IBV_ACCESS_REMOTE_READ;
  ibv_mr* region = ibv_reg_mr(device->pd(), data, bytes, flags);
  if (region == nullptr) {
    return Status(Code::kResource, "device " + device->name() + " did not register " +
                                       std::to_string(bytes) +
                                       " bytes: " + explain_memory(errno, bytes));
  }
  std::unique_ptr<VerbsMemoryRegion> made(
      new VerbsMemoryRegion(std::move(device), data, bytes, region));
  if (access != Access::kLocal) made->remote_key_ = region->rkey;
  return std::unique_ptr<MemoryRegion>(std::move(made));
}

}  // namespace jaxrdma::fabric::verbs

#endif
