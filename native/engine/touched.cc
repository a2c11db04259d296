/* engine/touched.cc: see touched.h. */
#include "engine/touched.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace jaxrdma {
namespace {

/// So that payloads of neighbours are aligned.
constexpr size_t kAlign = 64;

}  // namespace

Result<Touched> Touched::create(uint32_t rows, uint32_t columns, const std::string& who) {
  auto index = Reserve::allocate(rows * sizeof(uint32_t), "the touched rows of " + who);
  if (!index.ok()) return index.status();
  Touched touched;
  touched.columns_ = columns;
  touched.index_of_ = std::move(index.value());
  return touched;
}

void Touched::add(uint32_t row, const float* gradient) {
  uint32_t& index = index_of_.as<uint32_t>()[row];
  if (index == 0) {
    rows_.push_back(row);
    counts_.push_back(0);
    sums_.resize(sums_.size() + columns_);
    index = static_cast<uint32_t>(rows_.size());
  }
  ++counts_[index - 1];
  double* const sum = sums_.data() + size_t{index - 1} * columns_;
  for (uint32_t i = 0; i < columns_; ++i) sum[i] += gradient[i];
}

void Touched::mean(size_t index, float* values) const {
  const double* const sum = sums_.data() + index * columns_;
  const double count = counts_[index];
  for (uint32_t i = 0; i < columns_; ++i) values[i] = static_cast<float>(sum[i] / count);
}

void Touched::clear() {
  for (const uint32_t row : rows_) index_of_.as<uint32_t>()[row] = 0;
  rows_.clear();
  counts_.clear();
  sums_.clear();
}

int64_t RowIds::operator[](size_t i) const {
  const auto read = [&](auto value) {
    std::memcpy(&value, data + i * sizeof(value), sizeof(value));
    return static_cast<int64_t>(value);
  };
  switch (type) {
    case Type::kInt32:
      return read(int32_t{});
    case Type::kInt64:
      return read(int64_t{});
    case Type::kUint32:
      return read(uint32_t{});
  }
  return -1;
}

Result<RowBatch> RowBatch::create(const TableSpec& spec, const RowIds& ids,
                                  std::span<const uint32_t> chunk) {
  const auto servers = static_cast<uint32_t>(chunk.size());
  if (ids.count > kMostRows) {
    return Status(Code::kInvalidArgument,
                  "table '" + spec.name + "': " + std::to_string(ids.count) + " ids in one call, " +
                      std::to_string(kMostRows) + " are possible");
  }
  RowBatch batch;
  batch.columns_ = spec.columns;
  // By server, row, and place in the call, in one number each of which is cheap to compare.
  std::vector<std::pair<uint64_t, uint32_t>> order(ids.count);
  for (size_t i = 0; i < ids.count; ++i) {
    const int64_t id = ids[i];
    if (id < 0 || static_cast<uint64_t>(id) >= spec.rows) {
      return Status(Code::kInvalidArgument, "table '" + spec.name + "' has rows 0 to " +
                                                std::to_string(spec.rows - 1) + ", and id number " +
                                                std::to_string(i) + " of this call is " +
                                                std::to_string(id));
    }
    const auto row = static_cast<uint64_t>(id);
    order[i] = {(row % servers) << 32 | row / servers, static_cast<uint32_t>(i)};
  }
  std::sort(order.begin(), order.end());
  batch.positions_.reserve(ids.count);
  std::vector<uint32_t> of_server(servers);
  for (size_t i = 0; i < order.size(); ++i) {
    if (i == 0 || order[i].first != order[i - 1].first) {
      batch.rows_.push_back(static_cast<uint32_t>(order[i].first));
      batch.begin_.push_back(static_cast<uint32_t>(i));
      ++of_server[order[i].first >> 32];
    }
    batch.positions_.push_back(order[i].second);
  }
  batch.begin_.push_back(static_cast<uint32_t>(order.size()));
  batch.chunks_.resize(servers);
  uint32_t first = 0;
  for (uint32_t server = 0; server < servers; ++server) {
    uint32_t left = of_server[server];
    for (uint32_t i = wire::chunks_of(left, chunk[server]); i > 0; --i) {
      const uint32_t count = std::min(left, chunk[server]);
      batch.chunks_[server].push_back({first, count, 0});
      first += count;
      left -= count;
    }
  }
  return batch;
}

void RowBatch::lay_out(bool push) {
  payload_bytes_ = 0;
  for (std::vector<RowChunk>& chunks : chunks_) {
    for (RowChunk& chunk : chunks) {
      chunk.offset = payload_bytes_;
      const size_t bytes =
          push ? wire::push_bytes(chunk.count, columns_) : wire::pull_bytes(chunk.count);
      payload_bytes_ += (bytes + kAlign - 1) / kAlign * kAlign;
    }
  }
}

void RowBatch::pack_pull(std::byte* payloads) const {
  for (const std::vector<RowChunk>& chunks : chunks_) {
    for (const RowChunk& chunk : chunks) {
      const wire::Rows rows{chunk.count, static_cast<uint32_t>(chunks.size())};
      std::memcpy(payloads + chunk.offset, &rows, sizeof(rows));
      if (chunk.count == 0) continue;
      std::memcpy(payloads + chunk.offset + sizeof(rows), rows_.data() + chunk.first,
                  chunk.count * sizeof(uint32_t));
    }
  }
}

void RowBatch::pack_push(const float* gradients, std::byte* payloads) const {
  pack_pull(payloads);  // they begin alike
  std::vector<double> sum(columns_);
  for (const std::vector<RowChunk>& chunks : chunks_) {
    for (const RowChunk& chunk : chunks) {
      auto* to = reinterpret_cast<float*>(payloads + chunk.offset + wire::pull_bytes(chunk.count));
      for (uint32_t i = chunk.first; i < chunk.first + chunk.count; ++i, to += columns_) {
        const uint32_t begin = begin_[i], end = begin_[i + 1];
        const auto of = [&](uint32_t at) { return gradients + size_t{positions_[at]} * columns_; };
        if (end == begin + 1) {
          std::memcpy(to, of(begin), columns_ * sizeof(float));
          continue;
        }
        std::fill(sum.begin(), sum.end(), 0.0);
        for (uint32_t at = begin; at < end; ++at) {
          const float* from = of(at);
          for (uint32_t c = 0; c < columns_; ++c) sum[c] += from[c];
        }
        for (uint32_t c = 0; c < columns_; ++c) to[c] = static_cast<float>(sum[c]);
      }
    }
  }
}

void RowBatch::scatter(const float* values, float* target) const {
  for (size_t i = 0; i < rows_.size(); ++i) {
    for (uint32_t at = begin_[i]; at < begin_[i + 1]; ++at) {
      std::memcpy(target + size_t{positions_[at]} * columns_, values + i * columns_,
                  columns_ * sizeof(float));
    }
  }
}

}  // namespace jaxrdma
