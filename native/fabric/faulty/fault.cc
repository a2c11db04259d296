/* fabric/faulty/fault.cc: see fault.h. */
#include "fabric/faulty/fault.h"

#include <array>
#include <sstream>
#include <utility>

namespace jaxrdma::fabric::faulty {

namespace {

constexpr std::array<std::pair<const char*, Kind>, 7> kKinds{{
    {"withheld", Kind::kWithheld},
    {"lost", Kind::kLost},
    {"swallowed", Kind::kSwallowed},
    {"delayed", Kind::kDelayed},
    {"reordered", Kind::kReordered},
    {"duplicated", Kind::kDuplicated},
    {"uncredited", Kind::kUncredited},
}};
constexpr int kLongestMs = 3'600'000;

}  // namespace

Result<Fault> parse(const std::string& text) {
  std::istringstream words(text);
  std::string name;
  int64_t nth = 0;
  words >> name >> nth;
  for (const auto& [known, kind] : kKinds) {
    if (name != known || !words || nth < 1) continue;
    Fault fault{kind, static_cast<uint64_t>(nth), 0};
    if (kind == Kind::kDelayed && !(words >> fault.delay_ms)) break;
    if (fault.delay_ms < 0 || fault.delay_ms > kLongestMs) break;
    words >> std::ws;
    if (words.eof()) return fault;
    break;
  }
  std::string expected;
  for (const auto& [known, kind] : kKinds) expected += std::string(known) + ", ";
  return Status(Code::kInvalidArgument,
                "fault \"" + text + "\": expected one of " + expected +
                    "and the number of the write from 1, and after \"delayed\" how many ms");
}

}  // namespace jaxrdma::fabric::faulty
