/* base/status.h: errors as values. Nothing in native/ throws across a thread, into Python or into
 * XLA. */
#pragma once

#include <cassert>
#include <string>
#include <utility>
#include <variant>

namespace jaxrdma {

/// What kind of failure it is; decides the Python exception class and XLA's error code.
enum class Code {
  kOk = 0,
  kInvalidArgument,   ///< the caller gave something impossible
  kUnavailable,       ///< a peer cannot be reached, or was lost
  kPermissionDenied,  ///< wrong token, job, version or incarnation
  kProtocol,          ///< a peer sent bytes that break the protocol
  kResource,          ///< the operating system refused memory, descriptors, ports
  kStale,             ///< the step was already aggregated without this contribution
  kDeadline,          ///< a time limit passed
  kCancelled,         ///< closed or interrupted on this side
  kPeerFailed,        ///< another process of the job failed; the text names it
  kInternal,          ///< a bug of ours
};

/// Success, or a code and one sentence saying who, what was expected, what came, what to try.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

/// A value or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}        // NOLINT: implicit by design
  Result(Status status) : value_(std::move(status)) {  // NOLINT: implicit by design
    assert(!std::get<Status>(value_).ok());
  }

  bool ok() const { return std::holds_alternative<T>(value_); }
  T& value() { return std::get<T>(value_); }
  const T& value() const { return std::get<T>(value_); }
  Status status() const { return ok() ? Status() : std::get<Status>(value_); }

 private:
  std::variant<T, Status> value_;
};

}  // namespace jaxrdma
