/* tests/native/transports.h: on which transport the tests of this folder run.

   TEST_TRANSPORT names it, tcp if it is not set: to test another, run everything again. For verbs
   TEST_RDMA_DEVICES may list devices that can reach each other ("rxe0,rxe1"): the fabrics of a test
   use them in turn, so that the bytes cross a wire. With TEST_STRIPED set, each uses all of them,
   and its peer has them in another order. */
#pragma once

#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "fabric/fabric.h"

namespace testing {

inline const std::string& transport() {
  static const std::string name = [] {
    const char* value = std::getenv("TEST_TRANSPORT");
    return std::string(value == nullptr ? "tcp" : value);
  }();
  return name;
}

/// The devices of TEST_RDMA_DEVICES.
inline const std::vector<std::string>& devices() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> listed;
    const char* value = std::getenv("TEST_RDMA_DEVICES");
    std::string rest = value == nullptr ? "" : value;
    while (!rest.empty()) {
      const size_t comma = rest.find(',');
      listed.push_back(rest.substr(0, comma));
      rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
    }
    return listed;
  }();
  return names;
}

/// How many devices each fabric uses, and so how many links a connection has.
inline uint32_t links() {
  const bool striped = std::getenv("TEST_STRIPED") != nullptr && !devices().empty();
  return striped ? static_cast<uint32_t>(devices().size()) : 1;
}

/// What the next fabric sends from; one without a name where any device will do.
inline std::vector<jaxrdma::fabric::VerbsSource> next_sources() {
  static std::atomic<size_t> turn{0};
  const size_t first = turn++;
  std::vector<jaxrdma::fabric::VerbsSource> sources(links());
  for (size_t i = 0; i < sources.size() && !devices().empty(); ++i)
    sources[i].device = devices()[(first + i) % devices().size()];
  return sources;
}

/// For the fabric that a test makes next.
inline jaxrdma::fabric::TransportOptions next_transport() {
  jaxrdma::fabric::TransportOptions options;
  options.name = transport();
  options.verbs.sources = next_sources();
  return options;
}

}  // namespace testing
