/* ffi/errors.cc: see errors.h. */
#include "ffi/errors.h"

#include <utility>

namespace jaxrdma::ffi {
namespace {

xf::ErrorCode xla_code(Code code) {
  switch (code) {
    case Code::kOk:
      return xf::ErrorCode::kOk;
    case Code::kInvalidArgument:
      return xf::ErrorCode::kInvalidArgument;
    case Code::kUnavailable:
      return xf::ErrorCode::kUnavailable;
    case Code::kPermissionDenied:
      return xf::ErrorCode::kPermissionDenied;
    case Code::kProtocol:
      return xf::ErrorCode::kDataLoss;
    case Code::kResource:
      return xf::ErrorCode::kResourceExhausted;
    case Code::kStale:
      return xf::ErrorCode::kFailedPrecondition;
    case Code::kDeadline:
      return xf::ErrorCode::kDeadlineExceeded;
    case Code::kCancelled:
      return xf::ErrorCode::kCancelled;
    case Code::kPeerFailed:
      return xf::ErrorCode::kAborted;
    case Code::kInternal:
      return xf::ErrorCode::kInternal;
  }
  return xf::ErrorCode::kUnknown;
}

}  // namespace

xf::Error xla_error(const Status& status) {
  return xf::Error(xla_code(status.code()), "jaxrdma: " + status.message());
}

xf::Future failed(xf::Error error) {
  xf::Promise promise;
  xf::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

}  // namespace jaxrdma::ffi
