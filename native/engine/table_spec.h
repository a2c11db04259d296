/* engine/table_spec.h: a table is a matrix of float32 of which workers look up and train single
   rows: an embedding. What all processes must agree on about one, and how its rows lie and travel.

   Row r lies on server r % servers, as its row r / servers: the ids that are frequent are most
   often neighbours (ids sorted by frequency), so that striding spreads them over the servers. A
   worker says each row at most once in a message, in ascending order; a message has as many rows as
   fit a landing slot, but for the last of a call. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace jaxrdma {

/// What a row does with its mean gradient. Each row has a state of its own, and only what is
/// touched in a step changes in it: the others' momentum does not decay, their moments do not age.
enum class RowRule : uint8_t {
  kSgd = 0,       ///< w -= rate * g
  kMomentum = 1,  ///< m = momentum * m + g;  w -= rate * m
  kAdagrad = 2,   ///< s += g^2;  w -= rate * g / sqrt(s + epsilon), nothing where s is 0
  /// As Adam, with the t of the bias correction counted by row.
  kAdam = 3,
};

struct RowOptimizer {
  RowRule rule = RowRule::kSgd;
  float rate = 0.01f;
  float momentum = 0.0f;     ///< kMomentum; kAdam: decay of the first moment
  float decay = 0.999f;      ///< kAdam: of the second moment
  float epsilon = 1e-8f;     ///< kAdagrad, kAdam
  float accumulator = 0.1f;  ///< kAdagrad: s before the first gradient
};

/// What a row holds before it is first trained: a function of the seed, the row and the column
/// alone, whatever server it lies on.
enum class RowInit : uint8_t {
  kConstant = 0,  ///< `a`
  kUniform = 1,   ///< from `a` on, below `b`
  kNormal = 2,    ///< around `a`, with the standard deviation `b`
};

struct RowStart {
  RowInit kind = RowInit::kConstant;
  float a = 0.0f;
  float b = 0.0f;
  uint64_t seed = 0;
};

/// When the gradients of a row are applied.
enum class RowPolicy : uint8_t {
  kSync = 0,   ///< once every worker has pushed: the mean over those that touched the row
  kAsync = 1,  ///< when they come
};

struct TableSpec {
  uint16_t id = 0;  ///< among flows: a table takes a number as a model does
  std::string name;
  uint64_t rows = 0;
  uint32_t columns = 0;
  RowOptimizer optimizer;
  RowStart start;
  RowPolicy policy = RowPolicy::kSync;
};

/// Rows fit an int32, which is what ids are in JAX.
inline constexpr uint64_t kMostRows = (uint64_t{1} << 31) - 1;

/// Refuses a spec that cannot be, or of which not one row fits a landing slot.
Status check_table(const TableSpec& spec, size_t slot_payload_bytes);

/// How many rows lie on this server.
uint32_t rows_of_server(const TableSpec& spec, uint32_t server, uint32_t servers);

namespace wire {

/// The payload of a kPushRows and a kPullRows begins with it. The rows follow, uint32 as the server
/// counts its own, strictly ascending; in a kPushRows then their gradients, float32.
struct Rows {
  uint32_t count;
  uint32_t chunks;  ///< into how many messages this call is cut for this server; header.partition
                    ///< is which this is
};
static_assert(sizeof(Rows) == 8);

/// Rows of a message that is full.
uint32_t chunk_rows(uint32_t columns, size_t slot_payload_bytes);
/// Of so many rows; none make one message.
constexpr uint32_t chunks_of(uint64_t rows, uint32_t chunk) {
  return rows == 0 ? 1 : static_cast<uint32_t>((rows + chunk - 1) / chunk);
}
constexpr size_t pull_bytes(uint64_t rows) { return sizeof(Rows) + rows * sizeof(uint32_t); }
constexpr size_t values_bytes(uint64_t rows, uint32_t columns) {
  return rows * columns * sizeof(float);
}
constexpr size_t push_bytes(uint64_t rows, uint32_t columns) {
  return pull_bytes(rows) + values_bytes(rows, columns);
}

}  // namespace wire
}  // namespace jaxrdma
