/* ffi/errors.h: a Status as XLA's handlers report it. */
#pragma once

#include "base/status.h"
#include "xla/ffi/api/ffi.h"

namespace jaxrdma::ffi {

namespace xf = xla::ffi;

xf::Error xla_error(const Status& status);

/// A future that is there already: XLA takes the error from it as from any other.
xf::Future failed(xf::Error error);

}  // namespace jaxrdma::ffi
