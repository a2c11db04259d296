/* engine/table.h: the rows of a table that lie on one server, and what becomes of them.

   A row takes memory when it is first trained: before, it is computed from the seed whenever
   somebody asks. Rows lie in the order in which they were first trained, each followed by its
   optimizer state, in address space that is reserved for all of them.

   Pure memory and arithmetic; the caller serialises all calls. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/table_spec.h"

namespace jaxrdma {

/// Address space, zeroed, of which only what is touched takes memory.
class Reserve {
 public:
  Reserve() = default;
  Reserve(Reserve&& other) noexcept { swap(other); }
  Reserve& operator=(Reserve&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Reserve();

  static Result<Reserve> allocate(size_t bytes, const std::string& what);
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  void swap(Reserve& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

/// The value of a row that was never trained, in one column.
float initial_value(const RowStart& start, uint64_t row, uint32_t column, uint32_t columns);

class Table {
 public:
  static Result<std::unique_ptr<Table>> create(TableSpec spec, uint32_t server, uint32_t servers);

  const TableSpec& spec() const { return spec_; }
  /// On this server.
  uint32_t rows() const { return rows_; }
  /// That were trained.
  uint32_t trained() const { return trained_; }

  /// Row `row` of this server (below `rows`) into `columns` floats.
  void read(uint32_t row, float* values) const;
  /// The optimizer's step of one row with its mean gradient.
  void apply(uint32_t row, const float* gradient);

 private:
  Table() = default;
  uint64_t global(uint32_t row) const { return uint64_t{row} * servers_ + server_; }
  float* place(uint32_t row);

  TableSpec spec_;
  uint32_t server_ = 0;
  uint32_t servers_ = 1;
  uint32_t rows_ = 0;
  uint32_t trained_ = 0;
  size_t stride_ = 0;  ///< floats of a row and its state
  Reserve place_of_;   ///< uint32 by row: its place + 1; 0: was never trained
  Reserve values_;     ///< by place
};

}  // namespace jaxrdma
