/* tests/native/test_reduce.cc: sums, quotients and conversions give the bits that the definitions
 * give. */
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "engine/reduce.h"

using namespace jaxrdma;

namespace {

/// The value of a 16-bit float, from the definition of the format.
double value_of(DType dtype, uint16_t bits) {
  const int exponent_bits = dtype == DType::kFloat16 ? 5 : 8;
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

float widened(DType dtype, uint16_t bits) {
  float value;
  widen(dtype, reinterpret_cast<const std::byte*>(&bits), &value, 1);
  return value;
}

uint16_t narrowed(DType dtype, float value) {
  uint16_t bits;
  narrow(dtype, &value, reinterpret_cast<std::byte*>(&bits), 1);
  return bits;
}

constexpr DType kNarrow[] = {DType::kFloat16, DType::kBFloat16};

std::vector<float> random_floats(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

template <typename T>
Source source(const std::vector<T>& values, DType dtype) {
  return {reinterpret_cast<const std::byte*>(values.data()), dtype};
}

}  // namespace

TEST_CASE("every 16-bit pattern widens to its value, in vectors and one by one") {
  for (const DType dtype : kNarrow) {
    std::vector<uint16_t> all(1 << 16);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    std::vector<float> together(all.size());
    widen(dtype, reinterpret_cast<const std::byte*>(all.data()), together.data(), all.size());
    size_t wrong = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      const double expected = value_of(dtype, all[i]);
      const float alone = widened(dtype, all[i]);
      if (std::isnan(expected)) {
        wrong += !std::isnan(together[i]) || !std::isnan(alone);
      } else {
        wrong += together[i] != expected || alone != expected;
        wrong += std::signbit(together[i]) != std::signbit(expected);
        wrong += std::signbit(alone) != std::signbit(expected);
      }
    }
    CAPTURE(dtype_name(dtype));
    CHECK(wrong == 0);
  }
}

TEST_CASE("narrowing rounds to nearest, ties to even, in vectors and one by one") {
  for (const DType dtype : kNarrow) {
    CAPTURE(dtype_name(dtype));
    const uint16_t infinity = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
    std::vector<float> inputs;
    std::vector<uint16_t> expected;
    for (uint16_t low = 0; low < infinity; ++low) {
      const double a = value_of(dtype, low);
      // The step above the largest finite value is where that value's successor would be.
      const double b =
          low + 1 == infinity ? a + (a - value_of(dtype, low - 1)) : value_of(dtype, low + 1);
      const float middle = static_cast<float>((a + b) / 2);
      const uint16_t even = low % 2 == 0 ? low : low + 1;
      const std::pair<float, uint16_t> cases[] = {
          {static_cast<float>(a), low},
          {std::nextafter(middle, 0.0f), low},
          {middle, even},
          {std::nextafter(middle, HUGE_VALF), static_cast<uint16_t>(low + 1)},
      };
      // bfloat16's subnormals are fp32's with fewer bits: their middles are exact in fp32 too.
      for (const auto& [value, bits] : cases) {
        inputs.insert(inputs.end(), {value, -value});
        expected.insert(expected.end(), {bits, static_cast<uint16_t>(bits | 0x8000)});
      }
    }
    std::vector<uint16_t> together(inputs.size());
    narrow(dtype, inputs.data(), reinterpret_cast<std::byte*>(together.data()), inputs.size());
    size_t wrong_together = 0;
    size_t wrong_alone = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      wrong_together += together[i] != expected[i];
      wrong_alone += narrowed(dtype, inputs[i]) != expected[i];
    }
    CHECK(wrong_together == 0);
    CHECK(wrong_alone == 0);
  }
}

TEST_CASE("narrowing keeps infinities and makes no number of NaN") {
  for (const DType dtype : kNarrow) {
    CAPTURE(dtype_name(dtype));
    for (const size_t n : {size_t{1}, size_t{8}}) {
      // A NaN whose set bits are all among those that are cut off.
      const std::vector<float> specials[] = {
          std::vector<float>(n, std::bit_cast<float>(0x7f800001u)),
          std::vector<float>(n, HUGE_VALF), std::vector<float>(n, -HUGE_VALF)};
      std::vector<uint16_t> bits(n);
      const auto to = [&](const std::vector<float>& values) {
        narrow(dtype, values.data(), reinterpret_cast<std::byte*>(bits.data()), n);
        return value_of(dtype, bits[0]);
      };
      CHECK(std::isnan(to(specials[0])));
      CHECK(to(specials[1]) == HUGE_VAL);
      CHECK(to(specials[2]) == -HUGE_VAL);
    }
  }
}

TEST_CASE("a sum is the sum of its terms in order, divided at the end") {
  // Around the size of the blocks, and of vectors.
  for (const size_t n : {1, 7, 8, 2047, 2048, 2049, 5000}) {
    for (const uint32_t workers : {1u, 2u, 3u, 4u, 7u}) {
      CAPTURE(n);
      CAPTURE(workers);
      std::vector<std::vector<float>> gradients;
      std::vector<Source> sources;
      for (uint32_t w = 0; w < workers; ++w) gradients.push_back(random_floats(n, w + 1));
      for (const auto& each : gradients) sources.push_back(source(each, DType::kFloat32));
      std::vector<float> expected = gradients[0];
      for (uint32_t w = 1; w < workers; ++w) {
        for (size_t i = 0; i < n; ++i) expected[i] += gradients[w][i];
      }
      for (float& value : expected) value /= static_cast<float>(workers);

      Reduction reduction;
      reduction.elements = n;
      std::vector<float> sum(n, -1.0f);
      reduction.accumulator = reinterpret_cast<std::byte*>(sum.data());
      SUBCASE("all at once") {
        reduction.first = true;
        reduction.divisor = workers;
        reduction.sources = sources;
        reduce(reduction);
      }
      SUBCASE("one by one") {
        for (uint32_t w = 0; w < workers; ++w) {
          reduction.first = w == 0;
          reduction.divisor = w + 1 == workers ? workers : 0;
          reduction.sources = {&sources[w], 1};
          reduce(reduction);
        }
      }
      CHECK(std::memcmp(sum.data(), expected.data(), n * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("doubles are summed as doubles") {
  const size_t n = 3000;
  std::vector<std::vector<double>> gradients(3, std::vector<double>(n));
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal;
  std::vector<Source> sources;
  for (auto& each : gradients) {
    for (double& value : each) value = normal(random);
    sources.push_back(source(each, DType::kFloat64));
  }
  std::vector<double> sum(n);
  Reduction reduction;
  reduction.elements = n;
  reduction.accumulator_dtype = DType::kFloat64;
  reduction.accumulator = reinterpret_cast<std::byte*>(sum.data());
  reduction.first = true;
  reduction.sources = sources;
  reduction.divisor = 3;
  reduce(reduction);
  size_t wrong = 0;
  for (size_t i = 0; i < n; ++i)
    wrong += sum[i] != (gradients[0][i] + gradients[1][i] + gradients[2][i]) / 3.0;
  CHECK(wrong == 0);
}

TEST_CASE("16-bit gradients are summed in fp32 and rounded once") {
  const size_t n = 2500;
  for (const DType dtype : kNarrow) {
    CAPTURE(dtype_name(dtype));
    std::vector<std::vector<uint16_t>> gradients(3, std::vector<uint16_t>(n));
    std::vector<Source> sources;
    for (uint32_t w = 0; w < 3; ++w) {
      const std::vector<float> values = random_floats(n, 10 + w);
      narrow(dtype, values.data(), reinterpret_cast<std::byte*>(gradients[w].data()), n);
      sources.push_back(source(gradients[w], dtype));
    }
    std::vector<float> sum(n);
    std::vector<uint16_t> mean(n);
    Reduction reduction;
    reduction.elements = n;
    reduction.accumulator = reinterpret_cast<std::byte*>(sum.data());
    reduction.first = true;
    reduction.sources = sources;
    reduction.divisor = 3;
    reduction.output = reinterpret_cast<std::byte*>(mean.data());
    reduction.output_dtype = dtype;
    reduce(reduction);
    size_t wrong = 0;
    for (size_t i = 0; i < n; ++i) {
      float expected = widened(dtype, gradients[0][i]);
      expected += widened(dtype, gradients[1][i]);
      expected += widened(dtype, gradients[2][i]);
      expected /= 3.0f;
      wrong += sum[i] != expected || mean[i] != narrowed(dtype, expected);
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("gradients of several types meet in one sum") {
  const std::vector<uint16_t> half(9, 0x3c00);   // 1
  const std::vector<uint16_t> brain(9, 0x4000);  // 2
  const std::vector<float> single(9, 0.5f);
  const Source sources[] = {source(half, DType::kFloat16), source(brain, DType::kBFloat16),
                            source(single, DType::kFloat32)};
  std::vector<float> sum(9);
  Reduction reduction;
  reduction.elements = 9;
  reduction.accumulator = reinterpret_cast<std::byte*>(sum.data());
  reduction.first = true;
  reduction.sources = sources;
  reduce(reduction);
  CHECK(sum == std::vector<float>(9, 3.5f));
}
