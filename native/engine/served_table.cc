/* engine/served_table.cc: see served_table.h. */
#include "engine/served_table.h"

#include <cstring>
#include <utility>

namespace jaxrdma {

Result<std::unique_ptr<ServedTable>> ServedTable::create(TableSpec spec, uint32_t server,
                                                         uint32_t servers, uint32_t workers,
                                                         size_t slot_payload_bytes) {
  if (Status status = check_table(spec, slot_payload_bytes); !status.ok()) return status;
  auto served = std::make_unique<ServedTable>();
  served->chunk = wire::chunk_rows(spec.columns, slot_payload_bytes);
  served->scratch_row.resize(spec.columns);
  served->shares.resize(workers);
  served->applied.resize(workers);
  auto table = Table::create(std::move(spec), server, servers);
  if (!table.ok()) return table.status();
  served->table = std::move(table.value());
  auto touched = Touched::create(served->table->rows(), served->spec().columns,
                                 "table '" + served->spec().name + "'");
  if (!touched.ok()) return touched.status();
  served->touched = std::move(touched.value());
  return served;
}

std::string ServedTable::check(const wire::Header& header, const wire::Rows& rows,
                               uint64_t payload_bytes) const {
  const auto wrong = [&](const char* field, const std::string& expected, uint64_t got) {
    return std::string("rows of table '") + spec().name + "', " + field + ": expected " + expected +
           ", got " + std::to_string(got);
  };
  if (header.dtype != 0) return wrong("dtype", "0", header.dtype);
  if (payload_bytes < sizeof(rows))
    return wrong("payload", "at least " + std::to_string(sizeof(rows)) + " bytes", payload_bytes);
  const uint32_t most = wire::chunks_of(table->rows(), chunk);
  if (rows.chunks == 0 || rows.chunks > most)
    return wrong("chunks", "1 to " + std::to_string(most), rows.chunks);
  if (header.partition >= rows.chunks)
    return wrong("partition", "less than " + std::to_string(rows.chunks), header.partition);
  const bool last = header.partition + 1 == rows.chunks;
  const uint32_t least = !last ? chunk : rows.chunks > 1 ? 1 : 0;
  if (rows.count < least || rows.count > chunk) {
    return wrong("count", std::to_string(least) + " to " + std::to_string(chunk), rows.count);
  }
  const size_t bytes = header.kind == wire::Kind::kPushRows
                           ? wire::push_bytes(rows.count, spec().columns)
                           : wire::pull_bytes(rows.count);
  if (header.bytes != bytes) return wrong("bytes", std::to_string(bytes), header.bytes);
  if (payload_bytes != bytes)
    return wrong("bytes after the header", std::to_string(bytes), payload_bytes);
  return "";
}

size_t ServedTable::work_bytes(const RowTask& task) const {
  const size_t rows = task.kind == RowTask::Kind::kApply ? touched.size() : task.rows.count;
  return 2 * wire::values_bytes(rows, spec().columns);
}

std::string ServedTable::take_rows() {
  scratch_rows.resize(current.rows.count);
  if (scratch_rows.empty()) return "";
  std::memcpy(scratch_rows.data(),
              current.landing->payload(current.reply.slot) + sizeof(wire::Rows),
              scratch_rows.size() * sizeof(uint32_t));
  for (size_t i = 0; i < scratch_rows.size(); ++i) {
    const std::string at =
        "row " + std::to_string(i) + " of a message for table '" + spec().name + "': expected ";
    if (scratch_rows[i] >= table->rows()) {
      return at + "less than " + std::to_string(table->rows()) + ", got " +
             std::to_string(scratch_rows[i]);
    }
    if (i > 0 && scratch_rows[i] <= scratch_rows[i - 1]) {
      return at + "more than " + std::to_string(scratch_rows[i - 1]) +
             ", which is before it, got " + std::to_string(scratch_rows[i]);
    }
  }
  return "";
}

void ServedTable::work() {
  const size_t columns = spec().columns;
  if (current.kind == RowTask::Kind::kApply) {
    for (size_t i = 0; i < touched.size(); ++i) {
      touched.mean(i, scratch_row.data());
      table->apply(touched.row(i), scratch_row.data());
    }
    touched.clear();
    return;
  }
  current.wrong = take_rows();
  if (!current.wrong.empty()) return;
  std::byte* const payload = current.landing->payload(current.reply.slot);
  auto* const read = reinterpret_cast<float*>(payload);
  const auto* const pushed =
      reinterpret_cast<const float*>(payload + wire::pull_bytes(scratch_rows.size()));
  for (size_t i = 0; i < scratch_rows.size(); ++i) {
    switch (current.kind) {
      case RowTask::Kind::kRead:
        table->read(scratch_rows[i], read + i * columns);
        break;
      case RowTask::Kind::kSum:
        touched.add(scratch_rows[i], pushed + i * columns);
        break;
      case RowTask::Kind::kApplyNow:
        table->apply(scratch_rows[i], pushed + i * columns);
        break;
      case RowTask::Kind::kApply:
        break;
    }
  }
}

}  // namespace jaxrdma
