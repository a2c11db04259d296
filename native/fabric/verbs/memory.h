/* fabric/verbs/memory.h: memory registered with the devices of a fabric. */
#pragma once

#include "fabric/verbs/library.h"

#if JAXRDMA_HAVE_VERBS

#include <memory>
#include <span>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/verbs/device.h"
#include "fabric/verbs/rail.h"

namespace jaxrdma::fabric::verbs {

/// One piece of memory in the job's protection domain of every device. Holds the devices, so that
/// it may outlive the fabric.
class VerbsMemoryRegion final : public MemoryRegion {
 public:
  static Result<std::unique_ptr<MemoryRegion>> create(std::span<const std::unique_ptr<Rail>> rails,
                                                      std::byte* data, size_t bytes, Access access);

  uint32_t local_key(uint32_t rail) const { return of_rail_[rail].region->lkey; }

 private:
  struct Deregister {
    void operator()(ibv_mr* region) const { ibv_dereg_mr(region); }
  };
  struct Registered {
    std::shared_ptr<Device> device;  // outlives region
    std::unique_ptr<ibv_mr, Deregister> region;
  };
  using MemoryRegion::MemoryRegion;

  std::vector<Registered> of_rail_;
};

}  // namespace jaxrdma::fabric::verbs

#endif
