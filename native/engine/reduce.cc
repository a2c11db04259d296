/* engine/reduce.cc: see reduce.h. Plain loops that compilers turn into vector code, once for any
   machine and once for AVX2; the block of the accumulator that is worked on stays in the
   first-level cache while all sources pass by. */
#include "engine/reduce.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace jaxrdma {
namespace {

// --- Loops. Pointers never overlap, but for `scale` in place, where each element is read before it
// is written.

template <typename T>
[[gnu::always_inline]] inline void add_loop(T* __restrict sum, const T* __restrict source,
                                            size_t n) {
  for (size_t i = 0; i < n; ++i) sum[i] += source[i];
}

template <typename T>
[[gnu::always_inline]] inline void add_divide_loop(T* __restrict sum, const T* __restrict source,
                                                   T by, size_t n) {
  for (size_t i = 0; i < n; ++i) sum[i] = (sum[i] + source[i]) / by;
}

template <typename T>
[[gnu::always_inline]] inline void add_multiply_loop(T* __restrict sum, const T* __restrict source,
                                                     T by, size_t n) {
  for (size_t i = 0; i < n; ++i) sum[i] = (sum[i] + source[i]) * by;
}

[[gnu::always_inline]] inline void widen_bfloat16_loop(const uint16_t* __restrict source,
                                                       float* __restrict target, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    target[i] = std::bit_cast<float>(static_cast<uint32_t>(source[i]) << 16);
  }
}

[[gnu::always_inline]] inline void narrow_bfloat16_loop(const float* __restrict source,
                                                        uint16_t* __restrict target, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(source[i]);
    // Half a unit of the last kept place, less one unless that place is odd: ties go to even.
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan =
        (bits >> 16) | 0x40u;  // quiet, lest cutting the payload make it an infinity
    target[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
  }
}

[[gnu::always_inline]] inline void widen_float16_loop(const uint16_t* __restrict source,
                                                      float* __restrict target, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t half = source[i];
    const uint32_t magnitude = (half & 0x7fffu) << 13;  // exponent and mantissa in fp32's places
    const uint32_t exponent = magnitude & (0x7c00u << 13);
    // The exponents' biases differ by 112; an all-ones exponent must stay all ones.
    const uint32_t normal = magnitude + (exponent == (0x7c00u << 13) ? 224u << 23 : 112u << 23);
    // A subnormal is mantissa * 2^-24: put the mantissa behind a 2^-14 and take that away.
    const float subnormal =
        std::bit_cast<float>(magnitude + (113u << 23)) - std::bit_cast<float>(113u << 23);
    const uint32_t bits = exponent == 0 ? std::bit_cast<uint32_t>(subnormal) : normal;
    target[i] = std::bit_cast<float>(bits | ((half & 0x8000u) << 16));
  }
}

[[gnu::always_inline]] inline void narrow_float16_loop(const float* __restrict source,
                                                       uint16_t* __restrict target, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(source[i]);
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Below 2^-14: adding 0.5 lets the addition itself round at the place of the last subnormal
    // bit.
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;  // NaN, or too large
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    const uint32_t half = magnitude >= (143u << 23) ? special : finite;
    target[i] = static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
  }
}

/// The loops as built for one kind of machine.
template <typename T>
struct Sums {
  void (*add)(T*, const T*, size_t);
  void (*add_divide)(T*, const T*, T, size_t);
  void (*add_multiply)(T*, const T*, T, size_t);
};
struct Kernels {
  Sums<float> float32;
  Sums<double> float64;
  void (*widen_float16)(const uint16_t*, float*, size_t);
  void (*widen_bfloat16)(const uint16_t*, float*, size_t);
  void (*narrow_float16)(const float*, uint16_t*, size_t);
  void (*narrow_bfloat16)(const float*, uint16_t*, size_t);
};

template <auto kLoop, typename... Args>
void portable(Args... args) {
  kLoop(args...);
}

constexpr Kernels kPortable = {
    {portable<add_loop<float>>, portable<add_divide_loop<float>>,
     portable<add_multiply_loop<float>>},
    {portable<add_loop<double>>, portable<add_divide_loop<double>>,
     portable<add_multiply_loop<double>>},
    portable<widen_float16_loop>,
    portable<widen_bfloat16_loop>,
    portable<narrow_float16_loop>,
    portable<narrow_bfloat16_loop>,
};

#if defined(__x86_64__)

// No FMA among the targets, so that nothing can be contracted. Not target_clones: its resolvers run
// before the sanitizers are ready.
template <auto kLoop, typename... Args>
[[gnu::target("avx2,f16c")]] void avx2(Args... args) {
  kLoop(args...);
}

[[gnu::target("avx2,f16c")]] void widen_float16_avx2(const uint16_t* source, float* target,
                                                     size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm256_storeu_ps(target + i, _mm256_cvtph_ps(half));
  }
  widen_float16_loop(source + i, target + i, n - i);
}

[[gnu::target("avx2,f16c")]] void narrow_float16_avx2(const float* source, uint16_t* target,
                                                      size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), half);
  }
  narrow_float16_loop(source + i, target + i, n - i);
}

constexpr Kernels kAvx2 = {
    {avx2<add_loop<float>>, avx2<add_divide_loop<float>>, avx2<add_multiply_loop<float>>},
    {avx2<add_loop<double>>, avx2<add_divide_loop<double>>, avx2<add_multiply_loop<double>>},
    widen_float16_avx2,
    avx2<widen_bfloat16_loop>,
    narrow_float16_avx2,
    avx2<narrow_bfloat16_loop>,
};

/// Not every Clang knows "f16c" in __builtin_cpu_supports.
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

const Kernels& kernels() {
  static const Kernels& best = __builtin_cpu_supports("avx2") && has_f16c() ? kAvx2 : kPortable;
  return best;
}

#else

const Kernels& kernels() { return kPortable; }

#endif

// --- Blocks.

/// Elements worked on at a time: the accumulator's block and a widened source's fit the first-level
/// cache together.
constexpr size_t kBlock = 2048;

template <typename T>
const T* at(const std::byte* data, size_t element) {
  return reinterpret_cast<const T*>(data) + element;
}

/// The block of a source in the accumulator's type; `scratch` where it has to be converted.
template <typename T>
const T* load(const Source& source, size_t begin, size_t n, T* scratch) {
  if constexpr (std::is_same_v<T, float>) {
    if (source.dtype != DType::kFloat32) {
      widen(source.dtype, source.data + begin * sizeof(uint16_t), scratch, n);
      return scratch;
    }
  }
  return at<T>(source.data, begin);
}

template <typename T>
void reduce_block(const Reduction& reduction, const Sums<T>& sums, size_t begin, size_t n) {
  alignas(64) T scratch[kBlock];
  T* sum = reinterpret_cast<T*>(reduction.accumulator) + begin;
  size_t next = 0;
  if (reduction.first) {
    const Source& source = reduction.sources[next++];
    if (source.dtype == reduction.accumulator_dtype) {
      std::memcpy(sum, at<T>(source.data, begin), n * sizeof(T));
    } else {
      load<T>(source, begin, n, sum);
    }
  }
  const T divisor = static_cast<T>(reduction.divisor);
  for (; next < reduction.sources.size(); ++next) {
    const T* values = load<T>(reduction.sources[next], begin, n, scratch);
    if (reduction.divisor <= 1 || next + 1 < reduction.sources.size()) {
      sums.add(sum, values, n);
    } else if (std::has_single_bit(reduction.divisor)) {
      sums.add_multiply(sum, values, 1 / divisor, n);  // the same bits as dividing, and faster
    } else {
      sums.add_divide(sum, values, divisor, n);
    }
  }
  if (reduction.divisor != 0 && reduction.output != nullptr) {
    if constexpr (std::is_same_v<T, float>) {
      narrow(reduction.output_dtype, sum, reduction.output + begin * sizeof(uint16_t), n);
    }
  }
}

}  // namespace

size_t reduction_bytes(const Reduction& reduction) {
  return reduction.elements * dtype_bytes(reduction.accumulator_dtype) *
         (reduction.sources.size() + (reduction.output != nullptr ? 1 : 0));
}

void reduce(const Reduction& reduction) {
  for (size_t begin = 0; begin < reduction.elements; begin += kBlock) {
    const size_t n = std::min<size_t>(kBlock, reduction.elements - begin);
    if (reduction.accumulator_dtype == DType::kFloat64) {
      reduce_block<double>(reduction, kernels().float64, begin, n);
    } else {
      reduce_block<float>(reduction, kernels().float32, begin, n);
    }
  }
}

void widen(DType from, const std::byte* source, float* target, size_t elements) {
  const uint16_t* bits = at<uint16_t>(source, 0);
  if (from == DType::kFloat16) {
    kernels().widen_float16(bits, target, elements);
  } else {
    kernels().widen_bfloat16(bits, target, elements);
  }
}

void narrow(DType to, const float* source, std::byte* target, size_t elements) {
  uint16_t* bits = reinterpret_cast<uint16_t*>(target);
  if (to == DType::kFloat16) {
    kernels().narrow_float16(source, bits, elements);
  } else {
    kernels().narrow_bfloat16(source, bits, elements);
  }
}

}  // namespace jaxrdma
