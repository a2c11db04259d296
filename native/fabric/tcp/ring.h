/* fabric/tcp/ring.h: a queue that keeps its memory, so that a busy connection does not allocate. */
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace jaxrdma::fabric::tcp {

template <typename T>
class Ring {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  /// The i-th from the front.
  T& operator[](size_t i) { return items_[(first_ + i) & (items_.size() - 1)]; }
  T& front() { return (*this)[0]; }
  T& back() { return (*this)[size_ - 1]; }

  /// Appends an item whose content is that of an earlier one: the caller sets all of it.
  T& push() {
    if (size_ == items_.size()) grow();
    ++size_;
    return back();
  }
  void pop() {
    first_ = (first_ + 1) & (items_.size() - 1);
    --size_;
  }
  /// Keeps the first `count`.
  void truncate(size_t count) { size_ = count < size_ ? count : size_; }

 private:
  void grow() {
    std::vector<T> larger(items_.empty() ? 8 : items_.size() * 2);
    for (size_t i = 0; i < size_; ++i) larger[i] = std::move((*this)[i]);
    items_ = std::move(larger);
    first_ = 0;
  }

  std::vector<T> items_;  // its size is 0 or a power of two
  size_t first_ = 0;
  size_t size_ = 0;
};

}  // namespace jaxrdma::fabric::tcp
