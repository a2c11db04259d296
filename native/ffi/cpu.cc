/* ffi/cpu.cc: XLA's handler on the CPU: turns a custom call into an operation of the session's
 * engine. */
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "ffi/errors.h"
#include "ffi/registry.h"
#include "xla/ffi/api/ffi.h"

namespace jaxrdma::ffi {

namespace {

std::optional<DType> dtype_of(xf::DataType type) {
  switch (type) {
    case xf::DataType::F32:
      return DType::kFloat32;
    case xf::DataType::F64:
      return DType::kFloat64;
    case xf::DataType::F16:
      return DType::kFloat16;
    case xf::DataType::BF16:
      return DType::kBFloat16;
    default:
      return std::nullopt;
  }
}

/// Operands: step, then whatever the results are aliased with, then from `first_source` on the
/// gradients. Results: the step, or the step and how many gradients were dropped, then one per
/// leaf, none for a push. `devices`: how many devices of this process run this program. Everything
/// is copied out of the call frame before this returns: XLA recycles the frame while the operation
/// is under way.
xf::Future call(xf::AnyBuffer step, xf::RemainingArgs operands,
                xf::Result<xf::AnyBuffer> step_result, xf::RemainingRets results, int64_t session,
                int64_t flow, int64_t kind, int64_t first_source, int64_t leaves, int64_t devices) {
  if (step.element_type() != xf::DataType::S32 || step.element_count() != 1) {
    return failed(xf::Error::InvalidArgument("jaxrdma: the step must be an int32 scalar"));
  }
  const std::shared_ptr<Session> found = find_session(session);
  if (found == nullptr) {
    const Status why(Code::kStale,
                     "session " + std::to_string(session) +
                         " of this program is not open in this process (closed, never connected, "
                         "or of the process that this one was forked from: start those that step "
                         "by spawn)");
    tell_end(session, why);
    return failed(xla_error(why));
  }
  if (step_result->element_type() != xf::DataType::S32 || step_result->element_count() == 0 ||
      step_result->element_count() > 2) {
    return failed(xf::Error::InvalidArgument("jaxrdma: the first result must be one or two int32"));
  }
  int32_t step_value = 0;
  std::memcpy(&step_value, step.untyped_data(), sizeof(step_value));

  DeviceCall made;
  Operation& operation = made.operation;
  made.bytes.resize(static_cast<size_t>(leaves));
  operation.kind = static_cast<OperationKind>(kind);
  operation.flow = static_cast<uint16_t>(flow);
  operation.step = step_value;
  operation.leaves.resize(static_cast<size_t>(leaves));
  const bool sends =
      operation.kind == OperationKind::kExchange || operation.kind == OperationKind::kPush;
  const bool receives = operation.kind != OperationKind::kPush;
  for (size_t i = 0; i < operation.leaves.size(); ++i) {
    LeafBuffers& buffers = operation.leaves[i];
    if (sends) {
      auto operand = operands.get<xf::AnyBuffer>(static_cast<size_t>(first_source) + i);
      if (!operand) return failed(operand.error());
      const std::optional<DType> dtype = dtype_of(operand->element_type());
      if (!dtype)
        return failed(
            xf::Error::InvalidArgument("jaxrdma: a gradient has a type that cannot be averaged"));
      buffers.source = static_cast<const std::byte*>(operand->untyped_data());
      buffers.source_dtype = *dtype;
    }
    if (receives) {
      auto result = results.get<xf::AnyBuffer>(i);
      if (!result) return failed(result.error());
      buffers.target = static_cast<std::byte*>((*result)->untyped_data());
      made.bytes[i] = (*result)->size_bytes();
    }
  }
  auto* next_step = static_cast<std::byte*>(step_result->untyped_data());
  // A push returns the step that it was given: its pull will ask for it.
  operation.outcome = std::make_shared<Outcome>(Outcome{step_value, 0});
  const size_t told = step_result->element_count();

  auto promise = std::make_shared<xf::Promise>();
  xf::Future future(*promise);
  operation.done = [promise, next_step, told, session,
                    outcome = operation.outcome](const Status& status) {
    tell_end(session, status);
    if (!status.ok()) {
      promise->SetError(xla_error(status));
      return;
    }
    const int32_t values[] = {static_cast<int32_t>(outcome->version),
                              static_cast<int32_t>(outcome->dropped)};
    std::memcpy(next_step, values, told * sizeof(values[0]));
    promise->SetAvailable();
  };
  if (devices <= 1) {
    found->engine->start(std::move(operation));
  } else {
    found->gather.add(static_cast<uint32_t>(devices), std::move(made));
  }
  return future;
}

XLA_FFI_DEFINE_HANDLER(kCpuHandler, call,
                       xf::Ffi::Bind()
                           .Arg<xf::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<xf::AnyBuffer>()
                           .RemainingRets()
                           .Attr<int64_t>("session")
                           .Attr<int64_t>("flow")
                           .Attr<int64_t>("kind")
                           .Attr<int64_t>("first_source")
                           .Attr<int64_t>("leaves")
                           .Attr<int64_t>("devices"));

}  // namespace

void* cpu_handler() { return reinterpret_cast<void*>(+kCpuHandler); }

}  // namespace jaxrdma::ffi
