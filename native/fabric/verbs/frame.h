/* fabric/verbs/frame.h: what the two sides of a verbs connection tell each other beside it, over
   the signalling connection: fixed structures, little-endian.

   The signalling connection is one of the tcp fabric: its hello is checked against the token that
   the control plane issued, and carries the first ConnectionParameters in front of the engine's
   payload. Later messages are writes into the peer's mailbox, whose immediate names the slot. */
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "fabric/fabric.h"

namespace jaxrdma::fabric::verbs {

static_assert(std::endian::native == std::endian::little);

/// "JRV2". Raised with any change to this file.
inline constexpr uint32_t kParametersMagic = 0x3256524a;
inline constexpr uint32_t kMailboxSlots = 8;

/// One end of a queue pair, as the other end needs to know it.
struct ConnectionParameters {
  uint32_t magic = kParametersMagic;
  uint32_t queue_pair = 0;       ///< 24 bits
  uint32_t packet_sequence = 0;  ///< the first, 24 bits, random
  uint32_t receive_depth = 0;    ///< writes that may be on the way towards this end
  std::array<uint8_t, 16> gid{};
  uint64_t mailbox_address = 0;  ///< of the signalling connection
  uint32_t mailbox_key = 0;
  uint32_t max_message = 0;  ///< bytes
  uint16_t lid = 0;
  uint16_t pkey = 0;
  uint8_t mtu = 0;       ///< enum ibv_mtu
  uint8_t ethernet = 0;  ///< link layer: 1 RoCE, 0 InfiniBand
  uint8_t reads = 0;     ///< RDMA READs that this end answers at one time
  uint8_t rails = 1;     ///< devices of this side: 1 to kMostDevices
  uint32_t bundle = 0;   ///< in the reply: by what later links name this connection; in theirs: it
  uint8_t link = 0;      ///< which link of the connection this is
  std::array<uint8_t, 3> reserved{};
  std::array<char, 64> device{};  ///< "rxe0 port 1", for messages to people
};
static_assert(sizeof(ConnectionParameters) == 128);

enum class MessageType : uint32_t {
  kReady = 1,    ///< my queue pair of this generation can receive
  kBroken = 2,   ///< my queue pair of this generation failed: make a new one
  kRebuild = 3,  ///< from the connecting side: my new queue pair, and how far I came
  kRebuilt = 4,  ///< the answer to it
};

/// A message in a mailbox slot.
struct Message {
  MessageType type = MessageType::kReady;
  uint32_t generation = 0;  ///< of the queue pair: 0, and 1 more with each rebuilding
  uint32_t received = 0;    ///< writes delivered on this side so far, modulo 2^32
  uint32_t granted = 0;     ///< writes that the other side may have sent in total, modulo 2^32
  ConnectionParameters parameters;
};
static_assert(sizeof(Message) == 144);

/// Parameters and the engine's payload, as one hello payload.
std::vector<std::byte> encode_payload(const ConnectionParameters& parameters,
                                      std::span<const std::byte> payload);
/// Splits and checks it. What comes off the wire is believed only within its bounds.
Status decode_payload(std::span<const std::byte> body, ConnectionParameters& parameters,
                      std::vector<std::byte>& payload);
Status check_parameters(const ConnectionParameters& parameters);
/// The device's name, as text that can be shown.
std::string device_text(const ConnectionParameters& parameters);

}  // namespace jaxrdma::fabric::verbs
