/* engine/table.cc: see table.h. */
#include "engine/table.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <numbers>
#include <utility>

namespace jaxrdma {
namespace {

/// Floats of state per row beside its values: a multiple of the columns, and some of its own.
struct StateSize {
  size_t per_column;
  size_t per_row;
};
StateSize state_size(RowRule rule) {
  switch (rule) {
    case RowRule::kSgd:
      return {0, 0};
    case RowRule::kMomentum:
    case RowRule::kAdagrad:
      return {1, 0};
    case RowRule::kAdam:
      return {2, 2};  // the powers of both decays
  }
  return {0, 0};
}

/// Output number `index` of the generator SplitMix64 (Steele, Lea, Flood 2014) from `seed`: any of
/// them can be had by itself.
uint64_t split_mix(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

Reserve::~Reserve() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Result<Reserve> Reserve::allocate(size_t bytes, const std::string& what) {
  Reserve reserve;
  if (bytes == 0) return reserve;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return Status(Code::kResource, "no address space for " + what + ": the system refused " +
                                       std::to_string(bytes) + " bytes (" + std::strerror(errno) +
                                       "); use more servers");
  }
  reserve.data_ = static_cast<std::byte*>(data);
  reserve.bytes_ = bytes;
  return reserve;
}

float initial_value(const RowStart& start, uint64_t row, uint32_t column, uint32_t columns) {
  if (start.kind == RowInit::kConstant) return start.a;
  const uint64_t bits = split_mix(start.seed, row * columns + column);
  if (start.kind == RowInit::kUniform) {
    const double unit = static_cast<double>(bits >> 11) * 0x1p-53;
    return static_cast<float>(start.a + (double{start.b} - start.a) * unit);
  }
  // Box and Muller's, of one half of the bits each; never the logarithm of 0.
  const double radius = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;
  const double angle = static_cast<double>(bits & 0xffffffffu) * 0x1p-32;
  const double normal =
      std::sqrt(-2.0 * std::log(radius)) * std::cos(2.0 * std::numbers::pi * angle);
  return static_cast<float>(start.a + start.b * normal);
}

Result<std::unique_ptr<Table>> Table::create(TableSpec spec, uint32_t server, uint32_t servers) {
  std::unique_ptr<Table> table(new Table);
  table->rows_ = rows_of_server(spec, server, servers);
  table->server_ = server;
  table->servers_ = servers;
  const StateSize state = state_size(spec.optimizer.rule);
  table->stride_ = spec.columns * (1 + state.per_column) + state.per_row;
  const std::string who =
      "table '" + spec.name + "' (" + std::to_string(table->rows_) + " rows here)";
  auto places = Reserve::allocate(table->rows_ * sizeof(uint32_t), "the places of " + who);
  if (!places.ok()) return places.status();
  auto values = Reserve::allocate(table->rows_ * table->stride_ * sizeof(float), who);
  if (!values.ok()) return values.status();
  table->place_of_ = std::move(places.value());
  table->values_ = std::move(values.value());
  table->spec_ = std::move(spec);
  return table;
}

void Table::read(uint32_t row, float* values) const {
  const uint32_t place = place_of_.as<uint32_t>()[row];
  if (place > 0) {
    std::memcpy(values, values_.as<float>() + (place - 1) * stride_, spec_.columns * sizeof(float));
    return;
  }
  for (uint32_t i = 0; i < spec_.columns; ++i)
    values[i] = initial_value(spec_.start, global(row), i, spec_.columns);
}

/// Of a row that is being trained; it begins here, the first time.
float* Table::place(uint32_t row) {
  uint32_t& place = place_of_.as<uint32_t>()[row];
  if (place == 0) {
    float* const begun = values_.as<float>() + trained_ * stride_;
    read(row, begun);
    const size_t columns = spec_.columns;
    if (spec_.optimizer.rule == RowRule::kAdagrad)
      std::fill_n(begun + columns, columns, spec_.optimizer.accumulator);
    if (spec_.optimizer.rule == RowRule::kAdam) begun[3 * columns] = begun[3 * columns + 1] = 1.0f;
    place = ++trained_;
  }
  return values_.as<float>() + (place - 1) * stride_;
}

void Table::apply(uint32_t row, const float* gradient) {
  const RowOptimizer& o = spec_.optimizer;
  const size_t columns = spec_.columns;
  float* const w = place(row);
  float* const first = w + columns;
  float* const second = first + columns;
  switch (o.rule) {
    case RowRule::kSgd:
      for (size_t i = 0; i < columns; ++i) w[i] -= o.rate * gradient[i];
      break;
    case RowRule::kMomentum:
      for (size_t i = 0; i < columns; ++i) {
        first[i] = o.momentum * first[i] + gradient[i];
        w[i] -= o.rate * first[i];
      }
      break;
    case RowRule::kAdagrad:
      for (size_t i = 0; i < columns; ++i) {
        const float g = gradient[i];
        first[i] += g * g;
        const float scaled = o.rate * g / std::sqrt(first[i] + o.epsilon);
        w[i] -= first[i] > 0.0f ? scaled : 0.0f;
      }
      break;
    case RowRule::kAdam: {
      float* const powers = second + columns;
      powers[0] *= o.momentum;
      powers[1] *= o.decay;
      const float unbias_first = 1.0f / (1.0f - powers[0]);
      const float unbias_second = 1.0f / (1.0f - powers[1]);
      for (size_t i = 0; i < columns; ++i) {
        const float g = gradient[i];
        first[i] = o.momentum * first[i] + (1.0f - o.momentum) * g;
        second[i] = o.decay * second[i] + (1.0f - o.decay) * g * g;
        w[i] -=
            o.rate * first[i] * unbias_first / (std::sqrt(second[i] * unbias_second) + o.epsilon);
      }
      break;
    }
  }
}

}  // namespace jaxrdma
