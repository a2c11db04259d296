/* ffi/rows.cc: XLA's handler on the CPU for tables: rows that are looked up, gradients of rows. */
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

std::optional<RowIds::Type> ids_type(xf::DataType type) {
  switch (type) {
    case xf::DataType::S32:
      return RowIds::Type::kInt32;
    case xf::DataType::S64:
      return RowIds::Type::kInt64;
    case xf::DataType::U32:
      return RowIds::Type::kUint32;
    default:
      return std::nullopt;
  }
}

/// Operands: the step, the ids, of a push the gradients. Results: the next step of a push, the rows
/// of a pull. `columns` is what the program takes a row to have. Everything is copied out of the
/// call frame before this returns.
xf::Future call(xf::AnyBuffer step, xf::AnyBuffer ids, xf::RemainingArgs operands,
                xf::Result<xf::AnyBuffer> result, int64_t session, int64_t flow, int64_t kind,
                int64_t columns) {
  if (step.element_type() != xf::DataType::S32 || step.element_count() != 1)
    return failed(xf::Error::InvalidArgument("jaxrdma: the step must be an int32 scalar"));
  const std::optional<RowIds::Type> type = ids_type(ids.element_type());
  if (!type) {
    return failed(
        xf::Error::InvalidArgument("jaxrdma: ids of rows must be int32, int64 or uint32"));
  }
  const std::shared_ptr<Session> found = find_session(session);
  if (found == nullptr) {
    return failed(
        xf::Error(xf::ErrorCode::kFailedPrecondition,
                  "jaxrdma: session " + std::to_string(session) +
                      " of this program is not open in this process (closed, or never connected)"));
  }
  int32_t step_value = 0;
  std::memcpy(&step_value, step.untyped_data(), sizeof(step_value));
  Operation operation;
  operation.kind = static_cast<OperationKind>(kind);
  operation.flow = static_cast<uint16_t>(flow);
  operation.step = step_value;
  operation.rows.ids = {static_cast<const std::byte*>(ids.untyped_data()), *type,
                        ids.element_count()};
  operation.rows.columns = static_cast<uint32_t>(columns);
  const auto is_rows = [&](const xf::AnyBuffer& buffer) {
    return buffer.element_type() == xf::DataType::F32 &&
           buffer.element_count() == ids.element_count() * static_cast<size_t>(columns);
  };
  int32_t* next_step = nullptr;
  if (operation.kind == OperationKind::kPushRows) {
    auto gradients = operands.get<xf::AnyBuffer>(0);
    if (!gradients) return failed(gradients.error());
    if (!is_rows(*gradients) || result->element_type() != xf::DataType::S32 ||
        result->element_count() != 1) {
      return failed(
          xf::Error::InvalidArgument("jaxrdma: gradients of rows must be float32 of shape (ids, "
                                     "columns), the result an int32"));
    }
    operation.rows.gradients = static_cast<const float*>(gradients->untyped_data());
    next_step = static_cast<int32_t*>(result->untyped_data());
  } else if (operation.kind == OperationKind::kPullRows && is_rows(*result)) {
    operation.rows.target = static_cast<float*>(result->untyped_data());
  } else {
    return failed(xf::Error::InvalidArgument(
        "jaxrdma: rows are pushed, or pulled into float32 of shape (ids, columns)"));
  }
  operation.outcome = std::make_shared<Outcome>();

  auto promise = std::make_shared<xf::Promise>();
  xf::Future future(*promise);
  operation.done = [promise, next_step, outcome = operation.outcome](const Status& status) {
    if (!status.ok()) {
      promise->SetError(xla_error(status));
      return;
    }
    if (next_step != nullptr) *next_step = static_cast<int32_t>(outcome->version);
    promise->SetAvailable();
  };
  found->engine->start(std::move(operation));
  return future;
}

XLA_FFI_DEFINE_HANDLER(kRowsHandler, call,
                       xf::Ffi::Bind()
                           .Arg<xf::AnyBuffer>()
                           .Arg<xf::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<xf::AnyBuffer>()
                           .Attr<int64_t>("session")
                           .Attr<int64_t>("flow")
                           .Attr<int64_t>("kind")
                           .Attr<int64_t>("columns"));

}  // namespace

void* rows_handler() { return reinterpret_cast<void*>(+kRowsHandler); }

}  // namespace jaxrdma::ffi
