/* fabric/verbs/memory.h: memory registered with a device. */
#pragma once

#include "fabric/verbs/library.h"

#if JAXRDMA_HAVE_VERBS

#include <memory>

#include "fabric/fabric.h"
#include "fabric/verbs/device.h"

namespace jaxrdma::fabric::verbs {

/// One memory region of the job's protection domain. Holds the device, so that it may outlive the
/// fabric.
class VerbsMemoryRegion final : public MemoryRegion {
 public:
  static Result<std::unique_ptr<MemoryRegion>> create(std::shared_ptr<Device> device,
                                                      std::byte* data, size_t bytes, Access access);

  uint32_t local_key() const { return region_->lkey; }

 private:
  struct Deregister {
    void operator()(ibv_mr* region) const { ibv_dereg_mr(region); }
  };
  VerbsMemoryRegion(std::shared_ptr<Device> device, std::byte* data, size_t bytes, ibv_mr* region)
      : MemoryRegion(data, bytes), device_(std::move(device)), region_(region) {}

  std::shared_ptr<Device> device_;  // outlives region_
  std::unique_ptr<ibv_mr, Deregister> region_;
};

}  // namespace jaxrdma::fabric::verbs

#endif
