/* engine/aggregate.cc: see aggregate.h. */
#include "engine/aggregate.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "engine/checksum.h"

namespace jaxrdma {
namespace {

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

void Piece::begin(int64_t step) {
  version = step;
  arrived = 0;
  summed = 0;
  contributed.assign(contributed.size(), false);
}

void Piece::take(bool ordered) {
  if (!ordered) {
    reducing.swap(waiting);
    return;
  }
  while (true) {
    const uint32_t next = summed + static_cast<uint32_t>(reducing.size());
    const auto found = std::find_if(waiting.begin(), waiting.end(),
                                    [&](const Contribution& each) { return each.worker == next; });
    if (found == waiting.end()) return;
    reducing.push_back(std::move(*found));
    waiting.erase(found);
  }
}

Reduction Piece::reduction(uint32_t workers) {
  sources.clear();
  for (const Contribution& each : reducing) {
    sources.push_back({each.landing->payload(each.slot), each.dtype});
  }
  Reduction task;
  task.elements = elements;
  task.accumulator_dtype = accumulator_dtype(dtype);
  task.accumulator = accumulator;
  task.first = summed == 0;
  task.sources = sources;
  if (summed + reducing.size() == workers) {
    task.divisor = workers;
    if (!flow->update() && result != accumulator) {
      task.output = result;
      task.output_dtype = dtype;
    }
  }
  return task;
}

fabric::Slice Aggregate::result_slice(const Piece& piece) const {
  if (held != nullptr) return version_slice(*held->current, piece);
  const bool own = update() || piece.dtype != accumulator_dtype(piece.dtype);
  return (own ? results : accumulators).slice(piece.result, piece.bytes());
}

fabric::Slice Aggregate::version_slice(const Version& version, const Piece& piece) const {
  const ptrdiff_t offset = piece.result - (results.pages.data() + parameters_at);
  return version.slab.slice(version.slab.pages.data() + Version::parameters_at() + offset,
                            piece.bytes());
}

void Aggregate::copy_parameters(Version& version) const {
  const size_t bytes = parameter_bytes();
  if (bytes > 0) {
    std::memcpy(version.slab.pages.data() + Version::parameters_at(),
                results.pages.data() + parameters_at, bytes);
  }
}

void Aggregate::sum_parameters(Version& version) const {
  uint64_t sum = 0;
  for (const Piece& piece : pieces) {
    const fabric::Slice slice = version_slice(version, piece);
    sum += partition_checksum(piece.partition, slice.data, slice.bytes);
  }
  *version.kept() = {version.step, sum};
}

fabric::Slice Aggregate::location_slice(const Piece& piece) {
  wire::Location& location = locations[&piece - pieces.data()];
  location.address = reinterpret_cast<uint64_t>(piece.result);
  location.bytes = piece.bytes();
  location.seal_address = reinterpret_cast<uint64_t>(seal);
  location.key = results.region->remote_key();
  return results.slice(reinterpret_cast<const std::byte*>(&location), sizeof(location));
}

// The device reads the seal while this writes it: each word whole, and in this order with the
// parameters.

void Aggregate::break_seal() {
  std::atomic_ref<uint64_t> sequence(seal->sequence);
  // Nothing that is written after this may be seen before it.
  if (sequence.load(std::memory_order_relaxed) % 2 == 0)
    sequence.fetch_add(1, std::memory_order_seq_cst);
}

void Aggregate::set_seal(int64_t step) {
  break_seal();
  std::atomic_ref<int64_t>(seal->step).store(step, std::memory_order_relaxed);
  std::atomic_ref<uint64_t>(seal->sequence).fetch_add(1, std::memory_order_release);
}

Result<std::unique_ptr<Aggregate>> Aggregate::create(FlowSpec spec, uint32_t server,
                                                     uint32_t workers) {
  auto flow = std::make_unique<Aggregate>();
  flow->spec = std::move(spec);
  const size_t leaves = flow->spec.leaves.size();
  flow->elements_of_leaf.resize(leaves);
  flow->accumulator_of_leaf.resize(leaves);
  flow->result_of_leaf.resize(leaves);
  flow->summed_of_worker.resize(workers);
  size_t pieces = 0;
  for (const Partition& partition : flow->spec.partitions) {
    if (partition.server != server) continue;
    flow->elements_of_leaf[partition.leaf] += partition.elements;
    ++pieces;
  }

  // With one replica the mean is the contribution: it is sent from the slot where it landed.
  const bool pass_through = !flow->update() && workers == 1;
  size_t accumulator_bytes = 0;
  size_t result_bytes = 0;
  if (flow->update()) {
    result_bytes = aligned(sizeof(wire::Seal)) + aligned(pieces * sizeof(wire::Location));
    flow->parameters_at = result_bytes;
  }
  std::vector<size_t> accumulator_offset(leaves);
  std::vector<size_t> result_offset(leaves);
  std::vector<bool> own_result(leaves);
  for (size_t leaf = 0; leaf < leaves; ++leaf) {
    const DType dtype = flow->spec.leaves[leaf].dtype;
    const uint64_t elements = flow->elements_of_leaf[leaf];
    if (pass_through) continue;
    accumulator_offset[leaf] = accumulator_bytes;
    if (!flow->shows())
      accumulator_bytes += aligned(elements * dtype_bytes(accumulator_dtype(dtype)));
    own_result[leaf] = flow->update() || dtype != accumulator_dtype(dtype);
    if (!own_result[leaf]) continue;
    result_offset[leaf] = result_bytes;
    result_bytes += aligned(elements * dtype_bytes(dtype));
  }
  const std::string who = " of flow " + std::to_string(flow->spec.id);
  auto accumulators = Pages::allocate(accumulator_bytes, "the sums" + who);
  if (!accumulators.ok()) return accumulators.status();
  auto results =
      Pages::allocate(result_bytes, (flow->update() ? "the parameters" : "the means") + who);
  if (!results.ok()) return results.status();
  flow->accumulators.pages = std::move(accumulators.value());
  flow->results.pages = std::move(results.value());
  if (flow->update()) {
    std::byte* const begin = flow->results.pages.data();
    flow->seal = reinterpret_cast<wire::Seal*>(begin);
    *flow->seal = {1, -1};
    flow->locations = reinterpret_cast<wire::Location*>(begin + aligned(sizeof(wire::Seal)));
  }
  for (size_t leaf = 0; leaf < leaves && !pass_through; ++leaf) {
    if (flow->elements_of_leaf[leaf] == 0) continue;
    if (!flow->shows()) {
      flow->accumulator_of_leaf[leaf] = flow->accumulators.pages.data() + accumulator_offset[leaf];
    }
    flow->result_of_leaf[leaf] = own_result[leaf] ? flow->results.pages.data() + result_offset[leaf]
                                                  : flow->accumulator_of_leaf[leaf];
  }

  if (flow->spec.held > 0) {
    auto held = Held::create(flow->spec.held, workers, pieces, accumulator_bytes,
                             result_bytes - flow->parameters_at, who);
    if (!held.ok()) return held.status();
    flow->held = std::move(held.value());
  }

  flow->piece_of.assign(flow->spec.partitions.size(), -1);
  std::vector<uint64_t> begin(leaves);
  for (size_t i = 0; i < flow->spec.partitions.size(); ++i) {
    const Partition& partition = flow->spec.partitions[i];
    if (partition.server != server) continue;
    flow->piece_of[i] = static_cast<int32_t>(flow->pieces.size());
    Piece& piece = flow->pieces.emplace_back();
    piece.flow = flow.get();
    piece.partition = static_cast<uint32_t>(i);
    piece.dtype = flow->spec.leaves[partition.leaf].dtype;
    piece.elements = partition.elements;
    piece.contributed.assign(workers, false);
    if (!pass_through) {
      const size_t width = dtype_bytes(accumulator_dtype(piece.dtype));
      if (std::byte* sums = flow->accumulator_of_leaf[partition.leaf])
        piece.accumulator = sums + begin[partition.leaf] * width;
      piece.result =
          flow->result_of_leaf[partition.leaf] + begin[partition.leaf] * dtype_bytes(piece.dtype);
    }
    begin[partition.leaf] += partition.elements;
  }
  return flow;
}

}  // namespace jaxrdma
