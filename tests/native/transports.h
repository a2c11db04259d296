/* tests/native/transports.h: on which transport the tests of this folder run.

   TEST_TRANSPORT names it, tcp if it is not set: to test another, run everything again. For verbs
   TEST_RDMA_DEVICES may list devices that can reach each other ("rxe0,rxe1"): the fabrics of a test
   use them in turn, so that the bytes cross a wire. */
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

/// The device that the next fabric uses; empty where any will do.
inline std::string next_device() {
  static const std::vector<std::string> devices = [] {
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
  static std::atomic<size_t> turn{0};
  return devices.empty() ? std::string() : devices[turn++ % devices.size()];
}

/// For the fabric that a test makes next.
inline jaxrdma::fabric::TransportOptions next_transport() {
  jaxrdma::fabric::TransportOptions options;
  options.name = transport();
  options.verbs.device = next_device();
  return options;
}

}  // namespace testing
