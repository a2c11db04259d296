/* engine/gather.h: one operation out of the calls that several devices of this process make for it.

   Inside shard_map XLA calls once per device, each with its own buffers, in any order and on any
   thread, and holds that all devices of the program get there. All have the same gradients, as
   jaxrdma/step.py sees to, so one exchange with the servers does for all of them: leaf i is taken
   from, and lands at, device i modulo their number, and is copied from there to the others. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/worker.h"

namespace jaxrdma {

/// What one device asks for.
struct DeviceCall {
  Operation operation;
  std::vector<size_t> bytes;  ///< of each leaf's target
};

/// Safe on any thread.
class Gather {
 public:
  /// `start`: begins what has been gathered.
  explicit Gather(std::function<void(Operation)> start) : start_(std::move(start)) {}

  /// The last of `devices` calls of a kind and flow begins the operation; when that is done, so are
  /// all of them, with its status. If their steps or their numbers differ, they and all later calls
  /// fail with kInvalidArgument.
  void add(uint32_t devices, DeviceCall call);
  /// Fails what waits for the calls of other devices, and all later calls.
  void close(Status why);

 private:
  using Key = std::pair<uint16_t, OperationKind>;
  struct Waiting {
    uint32_t devices;
    std::vector<DeviceCall> calls;
  };

  const std::function<void(Operation)> start_;
  std::mutex lock_;
  std::map<Key, Waiting> waiting_;
  Status closed_;
};

}  // namespace jaxrdma
