/* engine/wire.h: what the two engines say to each other over a fabric.

   A worker writes into landing slots of the server; each write is one header and its payload, and
   the immediate names the slot. The server writes results to the address that the header gave, and
   the immediate carries the worker's tag. Everything but a credit is written with Solicit::kYes:
   who waits for it may sleep patiently. All integers are little-endian; the project does not run
   on big-endian machines (asserted). */
#pragma once

#include <bit>
#include <cstdint>

#include "fabric/fabric.h"

namespace jaxrdma::wire {

static_assert(std::endian::native == std::endian::little);

/// Raised by any change to frames, headers or immediates.
inline constexpr uint16_t kProtocolVersion = 10;
inline constexpr uint32_t kHeaderMagic = 0x5444524a;  // "JRDT"

enum class Kind : uint8_t {
  kPush = 1,    ///< a gradient partition; the answer is the partition of step + 1
  kPull = 2,    ///< no payload; the answer is the partition as soon as it has reached `step`
  kInit = 3,    ///< a parameter partition of the start, from the chief; the answer is the partition
                ///< at `step`
  kLocate = 4,  ///< no payload; the answer is the Location of the partition
  /// No payload; goes with the pushes of one gradient of a flow that holds them, to each server
  /// that has partitions of it. The answer is the Verdict.
  kVerdict = 5,
  /// No payload; from a follower, or a worker that takes the place of another. The server keeps one
  /// version of its part of the flow for it, the newest, as soon as that has reached `step`; what
  /// it kept for it before, it forgets. The answer is what it Kept. The slot is given back with it.
  /// Another kKeep of the same flow takes the place of one that still waits, which is answered with
  /// kStale. Which is the newer `bytes` tells, a number that grows: over several devices the older
  /// may be the last to arrive.
  kKeep = 6,
  /// No payload; after a kKeep. The answer is the partition of the version that is kept, whose step
  /// is `step`.
  kTake = 7,
  /// Rows of a table and their gradients (table_spec.h); `partition` is which piece of the call it
  /// is. The answer, without data, says that step + 1 is there; of a table whose gradients are
  /// applied as they come, that these are.
  kPushRows = 8,
  /// Rows of a table. The answer, together with the slot, is what they hold. A worker asks once it
  /// has been told that `step` is there, so that none keeps a slot while it waits for others.
  kPullRows = 9,
};
/// Whether it concerns a table.
constexpr bool of_rows(Kind kind) { return kind == Kind::kPushRows || kind == Kind::kPullRows; }

/// A Hello::worker from here on is a follower, and what is above it the follower's number. Its
/// slots have no payload, and it sends nothing but kKeep and kTake.
inline constexpr uint32_t kFirstFollower = 1u << 16;

/// What became of a gradient that was held. Its pushes are answered with the parameters of `step`.
struct Verdict {
  int64_t step;
  uint32_t accepted;  ///< 1: it is, or will be, part of a mean; 0: dropped
  uint32_t reserved;
};
static_assert(sizeof(Verdict) == 16);

/// The version that a server keeps for a follower.
struct Kept {
  int64_t step;
  uint64_t checksum;  ///< of this server's partitions, added up (checksum.h)
};
static_assert(sizeof(Kept) == 16);

/// Where a partition of parameters lies in the server's memory, for those who read it there. It
/// stays there as long as the connection.
struct Location {
  uint64_t address;
  uint64_t bytes;
  uint64_t seal_address;  ///< of the Seal that is for all partitions of this flow on this server
  fabric::RemoteKey key;  ///< of both
};
static_assert(sizeof(Location) == 40);

/// Tells whether what was read is one version: the same even sequence before and after. Read the
/// seal, then partitions, then the seal again, in this order on one connection.
struct Seal {
  uint64_t sequence;  ///< odd while the parameters are being overwritten
  int64_t step;       ///< their version
};
static_assert(sizeof(Seal) == 16);

/// Lies at the beginning of a landing slot. The payload follows at once.
struct Header {
  uint32_t magic;
  uint16_t flow;
  Kind kind;
  uint8_t dtype;       ///< of the payload
  uint32_t partition;  ///< index in the plan
  uint32_t reply_tag;  ///< comes back in the immediate of the answer, kTagBits
  int64_t step;
  uint64_t incarnation;  ///< of the worker
  uint64_t bytes;        ///< of the payload; of a kKeep, which has none, its number
  uint64_t reply_address;
  fabric::RemoteKey reply_key;
};
static_assert(sizeof(Header) == 64);

/// Immediates. Towards the server: the slot. Towards the worker: what it is, and of which slot or
/// request.
enum class Answer : uint8_t {
  kResult = 1,  ///< the partition is in place; low bits: tag
  kCredit = 2,  ///< the slot may be written again; low bits: slot
  kStale = 3,   ///< the step was already aggregated without this push; low bits: tag
  kAhead = 4,   ///< the step is beyond the one that is being aggregated; low bits: tag
  /// kResult, and kCredit for the slot in which the request came: one message instead of two.
  kResultAndCredit = 5,
};
inline constexpr uint32_t kTagBits = 20;
inline constexpr uint32_t kTagMask = (1u << kTagBits) - 1;
constexpr fabric::Immediate answer(Answer what, uint32_t tag) {
  return (static_cast<uint32_t>(what) << kTagBits) | (tag & kTagMask);
}
constexpr Answer answer_kind(fabric::Immediate immediate) {
  return static_cast<Answer>(immediate >> kTagBits);
}
constexpr uint32_t answer_tag(fabric::Immediate immediate) { return immediate & kTagMask; }

/// The payload of the server's hello: where the worker may write. Slot i is [address + i*stride,
/// +stride).
struct LandingGrant {
  uint64_t address;
  uint64_t slot_stride;  ///< bytes, header included
  fabric::RemoteKey key;
  uint32_t slots;
  uint32_t reserved;
};
static_assert(sizeof(LandingGrant) == 40);

}  // namespace jaxrdma::wire
