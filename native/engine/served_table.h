/* engine/served_table.h: what a server remembers of a table beside its rows: whose gradients of the
   step have come, who waits for its end, what is to be done next.

   A table is worked on by one thread at a time, in the order in which messages came: sums, the
   optimizer's step, rows that are read. So nothing in it needs a lock but the queue. Data and
   questions about it; the server's engine acts. */
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/held.h"
#include "engine/landing.h"
#include "engine/table.h"
#include "engine/table_spec.h"
#include "engine/touched.h"
#include "engine/wire.h"

namespace jaxrdma {

/// One thing to be done with the rows of a table.
struct RowTask {
  enum class Kind : uint8_t {
    kRead,      ///< the rows named in the slot are written over its payload
    kSum,       ///< a kPushRows goes into the sums of the step
    kApplyNow,  ///< a kPushRows is applied as it is
    kApply,     ///< the means of the step are
  };
  Kind kind = Kind::kApply;
  wire::Rows rows{};
  bool last = false;  ///< of the chunks of a call
  Reply reply{};      ///< who asked; none for kApply
  std::shared_ptr<Landing> landing;
  std::string wrong;  ///< once done: what in the payload broke the protocol; nothing was done then
};

/// One worker's gradients of the step that is being formed.
struct RowShare {
  std::vector<std::optional<Reply>> replies;  ///< by chunk: has come; empty: none has
  uint32_t missing = 0;                       ///< chunks
  bool begun() const { return !replies.empty(); }
  bool whole() const { return begun() && missing == 0; }
};

struct ServedTable {
  static Result<std::unique_ptr<ServedTable>> create(TableSpec spec, uint32_t server,
                                                     uint32_t servers, uint32_t workers,
                                                     size_t slot_payload_bytes);

  const TableSpec& spec() const { return table->spec(); }
  bool sync() const { return spec().policy == RowPolicy::kSync; }
  /// Somebody has begun the step, and `worker` has not ended its part.
  bool misses(uint32_t worker) const { return begun > 0 && !shares[worker].whole(); }
  /// Empty, or what is wrong with the sizes that a message tells. The rows themselves are looked at
  /// when they are used: the peer could still change them.
  std::string check(const wire::Header& header, const wire::Rows& rows,
                    uint64_t payload_bytes) const;
  /// Bytes that `task` reads and writes, to decide whose thread does it. Nobody may be at work.
  size_t work_bytes(const RowTask& task) const;
  /// Does `current`. Without a lock, by who set `busy`.
  void work();

  uint32_t chunk = 0;  ///< rows of a full message
  // Of who set `busy`.
  std::unique_ptr<Table> table;
  Touched touched;
  RowTask current;
  std::vector<uint32_t> scratch_rows;
  std::vector<float> scratch_row;

  // Of the progress lock.
  bool busy = false;
  std::deque<RowTask> tasks;
  int64_t version = 0;            ///< the step that is being formed; kAsync: calls applied
  std::vector<RowShare> shares;   ///< by worker
  uint32_t begun = 0, whole = 0;  ///< of `shares`
  std::chrono::steady_clock::time_point since;  ///< when the first share of the step began
  std::vector<uint64_t> applied;                ///< by worker: calls
  bool stranded = false;                        ///< said once

 private:
  /// Copies the rows out of the slot; what is wrong with them, or empty.
  std::string take_rows();
};

}  // namespace jaxrdma
