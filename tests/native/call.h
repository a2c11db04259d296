/* tests/native/call.h: one operation of a worker's engine, on a flow of one float32 leaf. */
#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "engine/worker.h"

namespace testing {

using jaxrdma::LeafBuffers;
using jaxrdma::Operation;
using jaxrdma::OperationKind;
using jaxrdma::Status;
using jaxrdma::WorkerEngine;

/// An operation and the wait for its end.
class Call {
 public:
  void start(WorkerEngine& engine, OperationKind kind, int64_t step,
             const std::vector<float>* source, std::vector<float>* target) {
    Operation operation;
    operation.kind = kind;
    operation.flow = 0;
    operation.step = step;
    LeafBuffers leaf;
    if (source != nullptr) leaf.source = reinterpret_cast<const std::byte*>(source->data());
    if (target != nullptr) leaf.target = reinterpret_cast<std::byte*>(target->data());
    operation.leaves.push_back(leaf);
    operation.outcome = brought_;
    operation.done = [this](const Status& status) {
      std::lock_guard guard(lock_);
      ++calls_;
      outcome_ = status;
      changed_.notify_all();
    };
    engine.start(std::move(operation));
  }
  Status wait(int timeout_ms = 10'000) {
    std::unique_lock guard(lock_);
    REQUIRE(changed_.wait_for(guard, std::chrono::milliseconds(timeout_ms),
                              [this] { return outcome_.has_value(); }));
    CHECK(calls_ == 1);
    return *outcome_;
  }
  // Once it has ended well.
  int64_t version() const { return brought_->version; }
  uint32_t dropped() const { return brought_->dropped; }
  bool ended() {
    std::lock_guard guard(lock_);
    return outcome_.has_value();
  }

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  std::optional<Status> outcome_;
  std::shared_ptr<jaxrdma::Outcome> brought_ = std::make_shared<jaxrdma::Outcome>();
  int calls_ = 0;
};

}  // namespace testing
