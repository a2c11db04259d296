/* engine/touched.h: which rows a step has touched: on a server, summed over the workers; on a
   worker, the ids of one call, sorted by where they go, each row once.

   Sums are kept in float64: gradients whose magnitudes lie within a factor of 2^29 / workers sum
   without rounding, so a mean does not depend on the order in which workers come. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/table.h"
#include "engine/table_spec.h"

namespace jaxrdma {

/// The rows of one server that were touched since `clear`: their sums, and how often each.
class Touched {
 public:
  static Result<Touched> create(uint32_t rows, uint32_t columns, const std::string& who);

  void add(uint32_t row, const float* gradient);
  size_t size() const { return rows_.size(); }
  uint32_t row(size_t index) const { return rows_[index]; }
  /// Over those that touched it.
  void mean(size_t index, float* values) const;
  void clear();

 private:
  uint32_t columns_ = 0;
  Reserve index_of_;  ///< uint32 by row: its index + 1; 0: not touched
  std::vector<uint32_t> rows_;
  std::vector<uint32_t> counts_;
  std::vector<double> sums_;
};

/// Ids as a program has them.
struct RowIds {
  enum class Type : uint8_t { kInt32, kInt64, kUint32 };
  const std::byte* data = nullptr;
  Type type = Type::kInt32;
  size_t count = 0;
  /// As a signed number, which an int32 below 0 is too.
  int64_t operator[](size_t i) const;
};

/// A piece of a call, for one server: rows [first, first + count) of its share.
struct RowChunk {
  uint32_t first = 0;  ///< among all rows of the call
  uint32_t count = 0;
  size_t offset = 0;  ///< of its payload among the payloads of the call
};

/// The ids of one call of a worker, as they travel: each row once, sorted by server and row, cut
/// into chunks. Needs no lock.
class RowBatch {
 public:
  /// An id that is no row of the table is an error that names it. `chunk`: rows that fit a message,
  /// by server.
  static Result<RowBatch> create(const TableSpec& spec, const RowIds& ids,
                                 std::span<const uint32_t> chunk);

  uint32_t servers() const { return static_cast<uint32_t>(chunks_.size()); }
  const std::vector<RowChunk>& chunks(uint32_t server) const { return chunks_[server]; }
  size_t rows() const { return rows_.size(); }
  /// Of the requests' payloads, those of a push or a pull, laid out one after the other.
  size_t payload_bytes() const { return payload_bytes_; }

  /// Writes every payload of a push: the rows, and for each the sum of its gradients.
  void pack_push(const float* gradients, std::byte* payloads) const;
  void pack_pull(std::byte* payloads) const;
  /// From `values`, which has the rows of the call one after the other, to where each id stands.
  void scatter(const float* values, float* target) const;

  /// Lays out the payloads, of a push or a pull.
  void lay_out(bool push);

 private:
  uint32_t columns_ = 0;
  std::vector<uint32_t> rows_;       ///< as their server counts them
  std::vector<uint32_t> begin_;      ///< by row: where in `positions_`; one more at the end
  std::vector<uint32_t> positions_;  ///< of ids, by row
  std::vector<std::vector<RowChunk>> chunks_;
  size_t payload_bytes_ = 0;
};

}  // namespace jaxrdma
