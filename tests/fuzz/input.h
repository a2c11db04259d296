/* tests/fuzz/input.h: a fuzzer's bytes, read as choices: numbers, pieces of text, one of several.
 */
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>

namespace fuzz {

/// Whatever the bytes are, they are choices; once they are used up, all are 0.
class Input {
 public:
  Input(const uint8_t* data, size_t bytes) : data_(data), left_(bytes) {}

  bool more() const { return left_ > 0; }
  template <typename T>
  T take() {
    T value{};
    const size_t bytes = std::min(sizeof(T), left_);
    std::memcpy(&value, data_, bytes);
    skip(bytes);
    return value;
  }
  /// At most `bytes`.
  std::string text(size_t bytes) {
    std::string taken(reinterpret_cast<const char*>(data_), std::min(bytes, left_));
    skip(taken.size());
    return taken;
  }
  template <typename T>
  T pick(std::initializer_list<T> of) {
    return of.begin()[take<uint8_t>() % of.size()];
  }
  /// `usual` seven times out of eight, else any.
  template <typename T>
  T mostly(T usual) {
    return take<uint8_t>() % 8 == 7 ? take<T>() : usual;
  }

 private:
  void skip(size_t bytes) {
    data_ += bytes;
    left_ -= bytes;
  }
  const uint8_t* data_;
  size_t left_;
};

}  // namespace fuzz
