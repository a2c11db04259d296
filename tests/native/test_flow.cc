/* tests/native/test_flow.cc: plans that cannot be right are refused, each for its own reason. */
#include <doctest/doctest.h>

#include <string>

#include "engine/flow.h"

using namespace jaxrdma;

namespace {

constexpr size_t kSlotBytes = 1024;

/// Two leaves on two servers, the first in two pieces.
FlowSpec good_flow() {
  FlowSpec spec;
  spec.id = 3;
  spec.leaves = {{DType::kFloat32, 300}, {DType::kBFloat16, 256}, {DType::kFloat64, 0}};
  spec.partitions = {{1, 0, 0, 256}, {0, 0, 100, 200}, {0, 1, 0, 100}};
  return spec;
}

void check_refused(const FlowSpec& spec, const std::string& because) {
  const Status status = check_flow(spec, 2, kSlotBytes);
  CHECK(status.code() == Code::kInvalidArgument);
  CAPTURE(status.message());
  CHECK(status.message().find(because) != std::string::npos);
  CHECK(status.message().find("flow 3") != std::string::npos);
}

}  // namespace

TEST_CASE("a plan whose partitions cover every leaf once is accepted in any order") {
  CHECK(check_flow(good_flow(), 2, kSlotBytes).ok());
}

TEST_CASE("a plan of no leaves is accepted") { CHECK(check_flow(FlowSpec{}, 1, kSlotBytes).ok()); }

TEST_CASE("a partition that leaves its leaf is refused") {
  FlowSpec spec = good_flow();
  spec.partitions[1].elements = 201;
  check_refused(spec, "leaf 0 has 300");
  spec.partitions[1].begin = 301;
  check_refused(spec, "leaf 0 has 300");
  spec.partitions[1] = {0, 0, UINT64_MAX, 2};  // whose end overflows
  check_refused(spec, "leaf 0 has 300");
}

TEST_CASE("partitions that overlap or leave a gap are refused") {
  FlowSpec spec = good_flow();
  spec.partitions[1] = {0, 0, 99, 201};
  check_refused(spec, "begins at element 99");
  spec.partitions[1] = {0, 0, 101, 199};
  check_refused(spec, "begins at element 101");
}

TEST_CASE("a leaf whose end or whole is missing is refused") {
  FlowSpec spec = good_flow();
  spec.partitions[1].elements = 199;
  check_refused(spec, "cover 299 of its 300");
  spec = good_flow();
  spec.partitions.erase(spec.partitions.begin());
  check_refused(spec, "cover 0 of its 256");
}

TEST_CASE("an empty partition is refused") {
  FlowSpec spec = good_flow();
  spec.partitions.push_back({0, 0, 300, 0});
  check_refused(spec, "is empty");
}

TEST_CASE("a server or leaf that does not exist is refused") {
  FlowSpec spec = good_flow();
  spec.partitions[0].server = 2;
  check_refused(spec, "names server 2 of 2");
  spec = good_flow();
  spec.partitions[0].leaf = 3;
  check_refused(spec, "names leaf 3 of 3");
}

TEST_CASE("a partition must fit a slot in the widest gradient it may be pushed as") {
  FlowSpec spec = good_flow();
  spec.leaves[1].elements = 257;
  spec.partitions[0].elements = 257;
  check_refused(spec,
                "257 elements of float32");  // a bfloat16 parameter may have a float32 gradient
  spec.mode = FlowMode::kAverage;            // a mean has the type of its gradients
  CHECK(check_flow(spec, 2, kSlotBytes).ok());
}

TEST_CASE("types are known by size, name and accumulator") {
  CHECK(dtype_bytes(DType::kFloat64) == 8);
  CHECK(dtype_bytes(DType::kBFloat16) == 2);
  CHECK(std::string(dtype_name(DType::kFloat16)) == "float16");
  CHECK(accumulator_dtype(DType::kFloat16) == DType::kFloat32);
  CHECK(accumulator_dtype(DType::kFloat64) == DType::kFloat64);
  FlowSpec spec = good_flow();
  spec.leaves[2].dtype = static_cast<DType>(9);
  check_refused(spec, "unknown dtype 9");
}

namespace {

/// The second leaf is a pack of three arrays.
FlowSpec packed_flow() {
  FlowSpec spec = good_flow();
  spec.members = {{1, 0, 6}, {0, 0, 300}, {1, 6, 200}, {2, 0, 0}, {1, 206, 50}};
  return spec;
}

}  // namespace

TEST_CASE("a plan with arrays that fill a leaf one after the other is accepted") {
  const FlowSpec spec = packed_flow();
  CHECK(check_flow(spec, 2, kSlotBytes).ok());
  CHECK(spec.arrays() == 5);
  CHECK(spec.member(2).begin == 6);
  CHECK(good_flow().arrays() == 3);
  CHECK(good_flow().member(1).elements == 256);
}

TEST_CASE("arrays that overlap, leave a gap or their leaf, or are empty in a pack, are refused") {
  FlowSpec spec = packed_flow();
  spec.members[2].begin = 5;
  check_refused(spec, "array 2: begins at element 5 of leaf 1, but those before it end at 6");
  spec.members[2].begin = 7;
  check_refused(spec, "begins at element 7");
  spec = packed_flow();
  spec.members[4].elements = 49;
  check_refused(spec, "have 255 of its 256 elements");
  spec.members[4].elements = 51;
  check_refused(spec, "has 51 elements from 206 on, but leaf 1 has 256");
  spec.members[4].elements = UINT64_MAX;
  check_refused(spec, "but leaf 1 has 256");
  spec = packed_flow();
  spec.members[3].leaf = 3;
  check_refused(spec, "array 3: is in leaf 3 of 3");
  spec = packed_flow();
  spec.members.push_back({1, 256, 0});
  check_refused(spec, "array 5: is empty, in a pack");
}

TEST_CASE("a pack in two partitions is refused") {
  FlowSpec spec = packed_flow();
  spec.partitions[0] = {1, 0, 0, 200};
  spec.partitions.push_back({1, 0, 200, 56});
  check_refused(spec, "partition 0: has a part of a pack, leaf 1");
}
