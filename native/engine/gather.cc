/* engine/gather.cc: see gather.h. */
#include "engine/gather.h"

#include <cstring>
#include <memory>
#include <string>

namespace jaxrdma {
namespace {

void end(const std::vector<DeviceCall>& calls, const Status& status) {
  for (const DeviceCall& call : calls) call.operation.done(status);
}

/// Gives every device what has landed at one of them.
void spread(const std::vector<DeviceCall>& calls) {
  for (size_t leaf = 0; leaf < calls[0].operation.leaves.size(); ++leaf) {
    const std::byte* from = calls[leaf % calls.size()].operation.leaves[leaf].target;
    if (from == nullptr) continue;
    for (const DeviceCall& call : calls) {
      std::byte* to = call.operation.leaves[leaf].target;
      if (to != nullptr && to != from) std::memcpy(to, from, call.bytes[leaf]);
    }
  }
  const auto& first = calls[0].operation.outcome;
  for (const DeviceCall& call : calls) {
    if (first != nullptr && call.operation.outcome != nullptr) *call.operation.outcome = *first;
  }
}

}  // namespace

void Gather::add(uint32_t devices, DeviceCall call) {
  const Key key{call.operation.flow, call.operation.kind};
  std::vector<DeviceCall> calls;
  Status wrong;
  {
    const std::lock_guard guard(lock_);
    wrong = closed_;
    if (closed_.ok()) {
      Waiting& waiting = waiting_[key];
      if (waiting.calls.empty()) waiting.devices = devices;
      waiting.calls.push_back(std::move(call));
      const DeviceCall& first = waiting.calls.front();
      const DeviceCall& last = waiting.calls.back();
      if (last.operation.step != first.operation.step || devices != waiting.devices ||
          last.bytes != first.bytes) {
        wrong = Status(
            Code::kInvalidArgument,
            "the devices of this process are at different steps: one of " +
                std::to_string(waiting.devices) + " at step " +
                std::to_string(first.operation.step) + ", another of " + std::to_string(devices) +
                " at step " + std::to_string(last.operation.step) +
                "; each program must run on all devices of its mesh, with a replicated state");
      } else if (waiting.calls.size() < devices) {
        return;
      } else {
        calls = std::move(waiting.calls);
        waiting_.erase(key);
      }
    }
  }
  if (!wrong.ok()) {
    // The others would wait for calls that do not come.
    close(wrong);
    if (call.operation.done) call.operation.done(wrong);
    return;
  }
  Operation all;
  const Operation& first = calls[0].operation;
  all.kind = first.kind;
  all.flow = first.flow;
  all.step = first.step;
  all.timeout_ms = first.timeout_ms;
  all.outcome = first.outcome;
  for (size_t leaf = 0; leaf < first.leaves.size(); ++leaf)
    all.leaves.push_back(calls[leaf % calls.size()].operation.leaves[leaf]);
  auto shared = std::make_shared<const std::vector<DeviceCall>>(std::move(calls));
  all.done = [shared](const Status& status) {
    if (status.ok()) spread(*shared);
    end(*shared, status);
  };
  start_(std::move(all));
}

void Gather::close(Status why) {
  std::map<Key, Waiting> waiting;
  {
    const std::lock_guard guard(lock_);
    if (closed_.ok()) closed_ = why;
    waiting.swap(waiting_);
  }
  for (const auto& [key, each] : waiting) end(each.calls, why);
}

}  // namespace jaxrdma
