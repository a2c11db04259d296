/* fabric/faulty/fault.h: what a faulty fabric does wrong, once, and at which write. */
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace jaxrdma::fabric::faulty {

enum class Kind : uint8_t {
  kWithheld,    ///< the write is accepted and never made; no completion comes
  kLost,        ///< the write is never made, and its completion comes
  kSwallowed,   ///< the write is made, and its completion never comes
  kDelayed,     ///< the write, and what follows it to the same peer, is made later
  kReordered,   ///< the write is made after the next one to the same peer
  kDuplicated,  ///< the write that came is delivered twice
  /// From the write that came on, no credit is given back: neither receives, nor what the fabric's
  /// owner tells by writes without bytes.
  kUncredited,
};

/// The `nth` (from 1) of the writes of data that one fabric posts, or that come to it, goes wrong.
struct Fault {
  Kind kind;
  uint64_t nth;
  int delay_ms = 0;  ///< of kDelayed
};

/// "lost 40", "delayed 40 2000" (ms). Fails with kInvalidArgument, and says what is expected.
Result<Fault> parse(const std::string& text);

}  // namespace jaxrdma::fabric::faulty
