/* engine/table_spec.cc: see table_spec.h. */
#include "engine/table_spec.h"

#include <cmath>

namespace jaxrdma {
namespace {

/// So that sizes of rows and of their state never overflow.
constexpr uint32_t kMostColumns = 1u << 20;

bool all_finite(const TableSpec& spec) {
  const RowOptimizer& o = spec.optimizer;
  for (const float value :
       {o.rate, o.momentum, o.decay, o.epsilon, o.accumulator, spec.start.a, spec.start.b}) {
    if (!std::isfinite(value)) return false;
  }
  return true;
}

}  // namespace

Status check_table(const TableSpec& spec, size_t slot_payload_bytes) {
  const auto refuse = [&](const std::string& why) {
    return Status(Code::kInvalidArgument,
                  "table '" + spec.name + "' (" + std::to_string(spec.rows) + " rows of " +
                      std::to_string(spec.columns) + " columns) cannot be: " + why);
  };
  if (spec.rows == 0 || spec.rows > kMostRows)
    return refuse("from 1 to " + std::to_string(kMostRows) + " rows are possible");
  if (spec.columns == 0 || spec.columns > kMostColumns)
    return refuse("from 1 to " + std::to_string(kMostColumns) + " columns are possible");
  if (spec.optimizer.rule > RowRule::kAdam) return refuse("there is no such optimizer");
  if (spec.start.kind > RowInit::kNormal) return refuse("there is no such initial value");
  if (spec.policy > RowPolicy::kAsync) return refuse("there is no such policy");
  if (!all_finite(spec)) return refuse("a number of its optimizer or its start is not finite");
  if (wire::chunk_rows(spec.columns, slot_payload_bytes) == 0) {
    return refuse("a row and its id need " + std::to_string(wire::push_bytes(1, spec.columns)) +
                  " bytes, and a partition has " + std::to_string(slot_payload_bytes) +
                  "; raise JAXRDMA_PARTITION_BYTES, or use fewer columns");
  }
  return Status();
}

uint32_t rows_of_server(const TableSpec& spec, uint32_t server, uint32_t servers) {
  if (spec.rows <= server) return 0;
  return static_cast<uint32_t>((spec.rows - server - 1) / servers + 1);
}

namespace wire {

uint32_t chunk_rows(uint32_t columns, size_t slot_payload_bytes) {
  if (slot_payload_bytes < sizeof(Rows)) return 0;
  const size_t row = push_bytes(1, columns) - sizeof(Rows);
  const size_t rows = (slot_payload_bytes - sizeof(Rows)) / row;
  return static_cast<uint32_t>(rows < kMostRows ? rows : kMostRows);
}

}  // namespace wire
}  // namespace jaxrdma
