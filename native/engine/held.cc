/* engine/held.cc: see held.h. */
#include "engine/held.h"

#include <algorithm>
#include <utility>

namespace jaxrdma {

std::string name_of(const GradientId& id) {
  return "gradient " + std::to_string(id.sequence) + " of worker " + std::to_string(id.worker) +
         " (incarnation " + std::to_string(id.incarnation) + ")";
}

size_t Version::parameters_at() { return 64; }
static_assert(2 * sizeof(wire::Verdict) + sizeof(wire::Kept) <= 64);

void Version::begin(int64_t of) {
  step = of;
  summed = false;
  verdicts()[0] = {of, 0, 0};
  verdicts()[1] = {of, 1, 0};
}

Result<std::unique_ptr<Held>> Held::create(uint32_t per_worker, uint32_t workers, size_t pieces,
                                           size_t value_bytes, size_t parameter_bytes,
                                           std::string who) {
  std::unique_ptr<Held> held(new Held());
  // Those who remain of a job give what the others would have.
  held->most_ = uint64_t{per_worker} * workers;
  held->pieces_ = pieces;
  held->value_bytes_ = value_bytes;
  held->parameter_bytes_ = parameter_bytes;
  held->who_ = std::move(who);
  for (uint64_t i = 0; i < held->most_; ++i) {
    auto pages = Pages::allocate(value_bytes, "gradients that are held" + held->who_);
    if (!pages.ok()) return pages.status();
    held->spare_values_.push_back(std::move(pages.value()));
  }
  return held;
}

Result<HeldGradient*> Held::landing(uint32_t worker, uint64_t incarnation,
                                    fabric::EndpointId endpoint, int64_t step) {
  uint64_t kept = 0;
  for (HeldGradient& each : gradients_) {
    if (each.endpoint != endpoint || each.orphan) continue;
    if (!each.whole()) return &each;
    ++kept;
  }
  if (kept >= most_) {
    return Status(Code::kProtocol, "it has " + std::to_string(kept) +
                                       " gradients here that nothing is decided about, and pushes "
                                       "another");
  }
  Pages values;
  if (!spare_values_.empty()) {
    values = std::move(spare_values_.back());
    spare_values_.pop_back();
  } else {
    // What an earlier incarnation left is not decided about yet.
    auto pages = Pages::allocate(value_bytes_, "one more gradient that is held" + who_);
    if (!pages.ok()) return pages.status();
    values = std::move(pages.value());
  }
  Count& count = counts_.try_emplace(worker, Count{incarnation, 0}).first->second;
  if (count.incarnation != incarnation) count = {incarnation, 0};
  HeldGradient& made = gradients_.emplace_back();
  made.id = {worker, incarnation, count.next++};
  made.step = step;
  made.endpoint = endpoint;
  made.values = std::move(values);
  made.replies.resize(pieces_);
  made.missing = pieces_ + 1;
  return &made;
}

HeldGradient* Held::find(const GradientId& id) {
  const auto found = std::find_if(gradients_.begin(), gradients_.end(),
                                  [&](const HeldGradient& each) { return each.id == id; });
  return found == gradients_.end() ? nullptr : &*found;
}

void Held::sweep() {
  for (auto each = gradients_.begin(); each != gradients_.end();) {
    if (!each->over()) {
      ++each;
      continue;
    }
    spare_values_.push_back(std::move(each->values));
    each = gradients_.erase(each);
  }
}

void Held::orphan(fabric::EndpointId endpoint) {
  for (HeldGradient& each : gradients_) each.orphan |= each.endpoint == endpoint;
  sweep();
}

Result<std::shared_ptr<Version>> Held::spare(fabric::Fabric& fabric) {
  if (auto found = versions_.spare(); found != nullptr) return found;
  auto made = Versions::make(parameter_bytes_, who_);
  if (!made.ok()) return made.status();
  if (Status status = versions_.add(fabric, made.value()); !status.ok()) return status;
  return made;
}

void Held::withdraw() {
  current.reset();
  versions_.withdraw();
}

std::shared_ptr<Version> Versions::spare() const {
  for (const auto& each : all_) {
    if (each.use_count() == 1) return each;
  }
  return nullptr;
}

Result<std::shared_ptr<Version>> Versions::make(size_t parameter_bytes, const std::string& who) {
  auto pages = Pages::allocate(Version::parameters_at() + parameter_bytes,
                               "a version of the parameters" + who);
  if (!pages.ok()) return pages.status();
  auto made = std::make_shared<Version>();
  made->slab.pages = std::move(pages.value());
  return made;
}

Status Versions::add(fabric::Fabric& fabric, std::shared_ptr<Version> version) {
  if (Status status = version->slab.enrol(fabric, fabric::Access::kLocal); !status.ok())
    return status;
  all_.push_back(std::move(version));
  return Status();
}

std::shared_ptr<Version> Versions::find(int64_t step) const {
  for (const auto& each : all_) {
    if (each->step == step && each->summed) return each;
  }
  return nullptr;
}

void Versions::withdraw() {
  for (const auto& each : all_) each->slab.withdraw();
}

}  // namespace jaxrdma
