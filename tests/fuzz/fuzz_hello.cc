/* tests/fuzz/fuzz_hello.cc: what is read of whoever connects, before anything is known of him: the
   hello, the verbs parameters in it, addresses, and text that is shown to people. */
#include <cstring>
#include <span>

#include "base/secret.h"
#include "fabric/verbs/frame.h"
#include "raw.h"

using namespace jaxrdma::fabric;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  const std::span<const std::byte> input(reinterpret_cast<const std::byte*>(data), bytes);
  const std::string text(reinterpret_cast<const char*>(data), bytes);

  if (auto decoded = tcp::decode_hello(input); decoded.ok()) {
    const Hello& hello = decoded.value();
    fuzz::require(tcp::check_hello(hello).ok(), "what is decoded keeps to the bounds");
    const std::string encoded = tcp::encode_hello(hello);
    const auto again = tcp::decode_hello(fuzz::bytes_of(encoded));
    fuzz::require(again.ok() && again.value().job == hello.job &&
                      again.value().worker == hello.worker &&
                      again.value().incarnation == hello.incarnation &&
                      again.value().protocol_version == hello.protocol_version &&
                      again.value().payload == hello.payload &&
                      jaxrdma::equal_in_constant_time(again.value().token, hello.token),
                  "a hello comes back as it was");
  }
  verbs::ConnectionParameters parameters;
  std::vector<std::byte> payload;
  if (verbs::decode_payload(input, parameters, payload).ok()) {
    fuzz::require(payload.size() + sizeof(parameters) == bytes, "the payload is the rest");
    fuzz::require(verbs::device_text(parameters).size() <= parameters.device.size(), "a name");
    const auto encoded = verbs::encode_payload(parameters, payload);
    fuzz::require(std::memcmp(encoded.data(), data, bytes) == 0,
                  "parameters come back as they were");
  }
  const std::string shown = tcp::printable(text);
  fuzz::require(shown.size() <= tcp::kMaxTextBytes, "what is shown is bounded");
  for (const char c : shown)
    fuzz::require(c < 0 || (c >= 0x20 && c != 0x7f), "no control characters");
  if (auto address = tcp::split_address(text); address.ok()) {
    fuzz::require(!address.value().host.empty() && std::stoi(address.value().port) < 65536,
                  "a port");
  }
  return 0;
}
