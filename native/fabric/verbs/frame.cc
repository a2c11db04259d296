/* fabric/verbs/frame.cc: see frame.h. */
#include "fabric/verbs/frame.h"

#include <algorithm>
#include <cstring>

namespace jaxrdma::fabric::verbs {

namespace {
constexpr uint32_t kLimit24 = 1u << 24;
}

Status check_parameters(const ConnectionParameters& p) {
  const bool sane =
      p.magic == kParametersMagic && p.queue_pair < kLimit24 && p.packet_sequence < kLimit24 &&
      p.receive_depth > 0 && p.receive_depth <= kMaxReceiveDepth && p.mtu >= 1 && p.mtu <= 5 &&
      p.ethernet <= 1 && p.max_message > 0 && p.rails >= 1 && p.rails <= kMostDevices &&
      p.link < kMostDevices && (p.ethernet == 0 || p.gid != decltype(p.gid){});
  if (!sane) {
    return {Code::kProtocol,
            "malformed verbs connection parameters: does the peer use transport verbs, and the "
            "same version of jaxrdma?"};
  }
  return {};
}

std::vector<std::byte> encode_payload(const ConnectionParameters& parameters,
                                      std::span<const std::byte> payload) {
  std::vector<std::byte> body(sizeof(parameters) + payload.size());
  std::memcpy(body.data(), &parameters, sizeof(parameters));
  std::copy(payload.begin(), payload.end(), body.begin() + sizeof(parameters));
  return body;
}

Status decode_payload(std::span<const std::byte> body, ConnectionParameters& parameters,
                      std::vector<std::byte>& payload) {
  if (body.size() < sizeof(parameters)) {
    return {Code::kProtocol,
            "the hello has no verbs connection parameters: this side uses transport verbs, the "
            "peer another"};
  }
  std::memcpy(&parameters, body.data(), sizeof(parameters));
  if (Status checked = check_parameters(parameters); !checked.ok()) return checked;
  body = body.subspan(sizeof(parameters));
  payload.assign(body.begin(), body.end());
  return {};
}

std::string device_text(const ConnectionParameters& parameters) {
  std::string text;
  for (const char c : parameters.device) {
    if (c == 0) break;
    text += c >= 0x20 && c < 0x7f ? c : '?';
  }
  return text;
}

}  // namespace jaxrdma::fabric::verbs
