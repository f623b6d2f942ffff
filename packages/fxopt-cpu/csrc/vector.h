// Vectors of one instruction set, by the compiler's vector extensions: the same text for every unit, and for aarch64.
//
// This header, and all that a unit includes after it, is compiled once for each instruction set, with its flags. All of it
// is therefore in an anonymous namespace, and no unit calls a function template of the standard library: the linker
// would keep one copy for all units, perhaps the one that this processor cannot run.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define UNROLL _Pragma("GCC unroll 32")

namespace {

#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16;
#elif defined(__AVX2__)
constexpr int64_t WIDTH = 8;
#else
constexpr int64_t WIDTH = 4;
#endif

typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef int16_t Shorts __attribute__((vector_size(WIDTH * 4)));  // twice as many lanes
typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));       // as many lanes

template <class T>
inline T least(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T most(T a, T b) {
  return a < b ? b : a;
}
inline int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

template <class Vector = Floats>
inline Vector load(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class Vector>
inline void store(void* to, Vector value) {
  std::memcpy(to, &value, sizeof value);
}
#if defined(__AVX512F__)
constexpr Ints LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr __mmask16 ALL = 0xffff;  // GCC 12 takes the forms without a mask for reads of variables without a value
#elif defined(__AVX2__)
constexpr Ints LANES = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr Ints LANES = {0, 1, 2, 3};
#endif

// The first `count` lanes, and zeros; a count of WIDTH or more is a whole vector. Nothing beyond them is read or written.
inline Floats load(const float* from, int64_t count) {
  if (count >= WIDTH) return load(from);
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
#elif defined(__AVX2__)
  return (Floats)_mm256_maskload_ps(from, (__m256i)(LANES < int32_t(count)));
#else
  Floats value = {};
  for (int64_t lane = 0; lane < count; ++lane) value[lane] = from[lane];
  return value;
#endif
}
inline void store(float* to, Floats value, int64_t count) {
  if (count >= WIDTH) return store(to, value);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), (__m512)value);
#elif defined(__AVX2__)
  _mm256_maskstore_ps(to, (__m256i)(LANES < int32_t(count)), (__m256)value);
#else
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = value[lane];
#endif
}
inline Floats splat(float value) {
  return value - Floats{};  // x - 0 is x for every x, so that the compiler leaves the copies alone
}
inline Ints splat(int32_t value) {
  return value - Ints{};
}
inline Floats bits(Ints value) {
  return (Floats)value;
}
inline Ints bits(Floats value) {
  return (Ints)value;
}
inline Floats floats(Ints value) {
  return __builtin_convertvector(value, Floats);
}
inline Floats select(Ints mask, Floats yes, Floats no) {
  return mask ? yes : no;
}
// NaN in `a` stays, as in torch's relu, clamp and maximum: the instructions return their second operand then. Compilers
// make a comparison and a selection of `a < low ? low : a`.
inline Floats at_least(Floats a, Floats low) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_max_ps(ALL, (__m512)low, (__m512)a);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)low, (__m256)a);
#else
  return a < low ? low : a;
#endif
}
inline Floats at_most(Floats a, Floats high) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_min_ps(ALL, (__m512)high, (__m512)a);
#elif defined(__AVX2__)
  return (Floats)_mm256_min_ps((__m256)high, (__m256)a);
#else
  return high < a ? high : a;
#endif
}
inline Floats absolute(Floats a) {
  return bits(bits(a) & 0x7fffffff);
}
// The nearest integer, of two the even one, for |a| < 2^22.
inline Floats nearest(Floats a) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_roundscale_ps(ALL, (__m512)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Floats magic = splat(12582912.f);  // 1.5 * 2^23: its last bit is worth one
  return (a + magic) - magic;
#endif
}
inline Ints nearest_ints(Floats a) {
#if defined(__AVX512F__)
  return (Ints)_mm512_maskz_cvtps_epi32(ALL, (__m512)a);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)a);
#else
  const Floats magic = splat(12582912.f);
  return bits(a + magic) - bits(magic);
#endif
}
// a * 2^n for a whole n of at most 253 in size, rounded once.
inline Floats scaled(Floats a, Floats n) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_scalef_ps(ALL, (__m512)a, (__m512)n);
#else
  const Ints power = nearest_ints(n), half = power >> 1;  // two factors, so that neither overflows or is denormal
  return a * bits((half + 127) << 23) * bits((power - half + 127) << 23);
#endif
}
// Orders of lanes: `__builtin_shufflevector`, which GCC and Clang have, wants them as constants.
template <int STEP, size_t... LANE>
inline Floats low_halves(Floats a, Floats b, std::index_sequence<LANE...>) {
  return __builtin_shufflevector(a, b, (LANE & STEP ? LANE + WIDTH - STEP : LANE)...);
}
template <int STEP, size_t... LANE>
inline Floats high_halves(Floats a, Floats b, std::index_sequence<LANE...>) {
  return __builtin_shufflevector(a, b, (LANE & STEP ? LANE + WIDTH : LANE + STEP)...);
}
template <int STEP, size_t... LANE>
inline Floats exchanged(Floats a, std::index_sequence<LANE...>) {
  return __builtin_shufflevector(a, a, (LANE ^ STEP)...);
}
typedef std::make_index_sequence<WIDTH> Order;

// Lane l of the result is lane order[l] of the value.
inline Floats in_order(Floats value, Ints order) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_permutexvar_ps(ALL, (__m512i)order, (__m512)value);
#elif defined(__AVX2__)
  return (Floats)_mm256_permutevar8x32_ps((__m256)value, (__m256i)order);
#else
  Floats result;
  for (int64_t lane = 0; lane < WIDTH; ++lane) result[lane] = value[order[lane]];
  return result;
#endif
}

template <int STEP = WIDTH / 2>
inline float sum(Floats value) {
  value += exchanged<STEP>(value, Order{});
  if constexpr (STEP > 1) return sum<STEP / 2>(value);
  return value[0];
}
template <int STEP = WIDTH / 2>
inline float highest(Floats value) {
  value = most(value, exchanged<STEP>(value, Order{}));
  if constexpr (STEP > 1) return highest<STEP / 2>(value);
  return value[0];
}

// rows[r][l] becomes rows[l][r]: the bits of r and l change places one by one.
template <int STEP = WIDTH / 2>
inline void transpose(Floats (&rows)[WIDTH]) {
  for (int64_t r = 0; r < WIDTH; ++r)
    if (!(r & STEP)) {
      const Floats a = rows[r], b = rows[r + STEP];
      rows[r] = low_halves<STEP>(a, b, Order{});
      rows[r + STEP] = high_halves<STEP>(a, b, Order{});
    }
  if constexpr (STEP > 1) transpose<STEP / 2>(rows);
}
// Lane l of the result is the sum of rows[l].
template <int STEP = WIDTH / 2>
inline Floats sums(Floats (&rows)[WIDTH]) {
  for (int64_t r = 0; r < STEP; ++r) {
    const Floats a = rows[r], b = rows[r + STEP];
    rows[r] = low_halves<STEP>(a, b, Order{}) + high_halves<STEP>(a, b, Order{});
  }
  if constexpr (STEP > 1) return sums<STEP / 2>(rows);
  return rows[0];
}

}  // namespace
