/* fabric/tcp/frame.cc: Hello to bytes and back. */
#include "fabric/tcp/frame.h"

#include <cstring>

namespace jaxrdma::fabric::tcp {

namespace {

/// Precedes the job, the token and the payload in the body.
struct HelloFixed {
  uint64_t incarnation;
  uint32_t worker;
  uint16_t protocol_version;
  uint16_t job_bytes;
  uint16_t token_bytes;
  uint16_t payload_bytes;
  uint32_t reserved;
};
static_assert(sizeof(HelloFixed) == 24);
static_assert(sizeof(HelloFixed) + kMaxJobBytes + Hello::kTokenBytes + kMaxPayloadBytes <=
              kMaxBodyBytes);

}  // namespace

Status check_hello(const Hello& hello) {
  if (hello.job.size() > kMaxJobBytes) {
    return {Code::kInvalidArgument, "the job's id has " + std::to_string(hello.job.size()) +
                                        " bytes, at most " + std::to_string(kMaxJobBytes) +
                                        " are allowed"};
  }
  if (hello.payload.size() > kMaxPayloadBytes) {
    return {Code::kInvalidArgument, "the hello's payload has " +
                                        std::to_string(hello.payload.size()) + " bytes, at most " +
                                        std::to_string(kMaxPayloadBytes) + " are allowed"};
  }
  if (!hello.token.empty() && hello.token.size() != Hello::kTokenBytes) {
    return {Code::kInvalidArgument, "the hello's token has " + std::to_string(hello.token.size()) +
                                        " bytes, not " + std::to_string(Hello::kTokenBytes)};
  }
  return {};
}

std::string encode_hello(const Hello& hello) {
  HelloFixed fixed{};
  fixed.incarnation = hello.incarnation;
  fixed.worker = hello.worker;
  fixed.protocol_version = hello.protocol_version;
  fixed.job_bytes = static_cast<uint16_t>(hello.job.size());
  fixed.token_bytes = static_cast<uint16_t>(hello.token.size());
  fixed.payload_bytes = static_cast<uint16_t>(hello.payload.size());
  std::string body(reinterpret_cast<const char*>(&fixed), sizeof(fixed));
  body += hello.job;
  body.append(reinterpret_cast<const char*>(hello.token.data()), hello.token.size());
  body.append(reinterpret_cast<const char*>(hello.payload.data()), hello.payload.size());
  return body;
}

Result<Hello> decode_hello(std::span<const std::byte> body) {
  HelloFixed fixed;
  if (body.size() < sizeof(fixed))
    return Status(Code::kProtocol, "a hello shorter than its fixed part");
  std::memcpy(&fixed, body.data(), sizeof(fixed));
  if (fixed.job_bytes > kMaxJobBytes || fixed.payload_bytes > kMaxPayloadBytes ||
      (fixed.token_bytes != 0 && fixed.token_bytes != Hello::kTokenBytes)) {
    return Status(Code::kProtocol, "a hello with impossible lengths");
  }
  if (body.size() != sizeof(fixed) + fixed.job_bytes + fixed.token_bytes + fixed.payload_bytes) {
    return Status(Code::kProtocol, "a hello whose lengths do not add up");
  }
  Hello hello;
  hello.incarnation = fixed.incarnation;
  hello.worker = fixed.worker;
  hello.protocol_version = fixed.protocol_version;
  body = body.subspan(sizeof(fixed));
  hello.job.assign(reinterpret_cast<const char*>(body.data()), fixed.job_bytes);
  body = body.subspan(fixed.job_bytes);
  hello.token.assign(body.begin(), body.begin() + fixed.token_bytes);
  body = body.subspan(fixed.token_bytes);
  hello.payload.assign(body.begin(), body.end());
  return hello;
}

std::string printable(std::string_view text) {
  std::string shown(text.substr(0, kMaxTextBytes));
  for (char& c : shown) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return shown;
}

}  // namespace jaxrdma::fabric::tcp
