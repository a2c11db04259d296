/* fabric/tcp/frame.h: the bytes on a tcp connection: a fixed header, then as many bytes as it says.

   A connection starts with one kHello from the connecting side and one kHelloReply from the other.
   After that both sides send kWrite and kCredit as they like, and kClose as the last frame.
   Integers are little-endian. */
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "fabric/fabric.h"

namespace jaxrdma::fabric::tcp {

static_assert(std::endian::native == std::endian::little);

/// "JRT1". Raised with any change to this file, so that a peer of another build is told so at the
/// first frame.
inline constexpr uint32_t kFrameMagic = 0x3154524a;

enum class FrameType : uint8_t {
  kHello = 1,       ///< body: an encoded Hello
  kHelloReply = 2,  ///< immediate: 0 and body: an encoded Hello; or immediate: a Code and body:
                    ///< text of the refusal
  kWrite = 3,       ///< body goes to `address` in the region `key`; then `immediate` is delivered
  kCredit = 4,      ///< no body: only `credits` matters
  kClose = 5,  ///< the last frame of this direction; body: why, as text; `immediate`: kBlame or 0
};

/// Of a kClose: the receiver broke the protocol, or so the sender says.
inline constexpr uint32_t kBlame = 1;

struct FrameHeader {
  uint32_t magic = kFrameMagic;
  FrameType type = FrameType::kCredit;
  uint8_t reserved0[3] = {};
  uint32_t credits =
      0;  ///< writes that the receiver of this frame may send beyond those it already may
  uint32_t immediate = 0;
  uint32_t key = 0;
  uint32_t reserved1 = 0;
  uint64_t address = 0;
  uint64_t length = 0;  ///< of the body
};
static_assert(sizeof(FrameHeader) == 40);

inline constexpr size_t kMaxJobBytes = 64;
inline constexpr size_t kMaxPayloadBytes = 4096;
inline constexpr size_t kMaxTextBytes = 1024;
/// Bound of every body that is not written into registered memory: what an unknown peer can make us
/// allocate.
inline constexpr size_t kMaxBodyBytes = 8192;

/// Refuses a Hello that breaks the bounds in fabric.h. An empty token is legal here: replies carry
/// none.
Status check_hello(const Hello& hello);
std::string encode_hello(const Hello& hello);
Result<Hello> decode_hello(std::span<const std::byte> body);

/// Text of a peer, made fit to be shown: bounded, without control characters.
std::string printable(std::string_view text);

}  // namespace jaxrdma::fabric::tcp
