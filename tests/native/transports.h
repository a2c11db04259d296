/* tests/native/transports.h: on which transports the tests of this folder run.

   JAXRDMA_TEST_TRANSPORTS lists them ("tcp,verbs"), tcp if it is not set. For verbs
   JAXRDMA_TEST_DEVICES may list devices that can reach each other ("rxe0,rxe1"): the fabrics of a
   test use them in turn, so that the bytes cross a wire. */
#pragma once

#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "fabric/fabric.h"

namespace testing {

inline std::vector<std::string> listed(const char* variable, const char* otherwise) {
  const char* value = std::getenv(variable);
  std::vector<std::string> items;
  std::string item;
  for (const char* c = value == nullptr ? otherwise : value;; ++c) {
    if (*c != ',' && *c != 0) {
      item += *c;
      continue;
    }
    if (!item.empty()) items.push_back(item);
    item.clear();
    if (*c == 0) return items;
  }
}

inline const std::vector<std::string>& transports() {
  static const std::vector<std::string> all = listed("JAXRDMA_TEST_TRANSPORTS", "tcp");
  return all;
}

/// The device that the next fabric uses; empty where any will do.
inline std::string next_device() {
  static const std::vector<std::string> devices = listed("JAXRDMA_TEST_DEVICES", "");
  static std::atomic<size_t> turn{0};
  return devices.empty() ? std::string() : devices[turn++ % devices.size()];
}

}  // namespace testing
