// Vectors of one instruction set, by the compiler's vector extensions: the same text for every unit, and for aarch64.
//
// This header, and all that a unit includes after it, is compiled once for each instruction set, with its flags. All of it
// is therefore in an anonymous namespace, and no unit calls a function template of the standard library: the linker
// would keep one copy for all units, perhaps the one that this processor cannot run.
#pragma once

#include <cstdint>
#include <cstring>
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
// The first `count` lanes, and zeros; a count of WIDTH or more is a whole vector.
inline Floats load(const float* from, int64_t count) {
  if (count >= WIDTH) return load(from);
  Floats value = {};
  std::memcpy(&value, from, size_t(count) * 4);
  return value;
}
inline void store(float* to, Floats value, int64_t count) {
  if (count >= WIDTH) return store(to, value);
  std::memcpy(to, &value, size_t(count) * 4);
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
// NaN in `a` stays, as in torch's relu, clamp and maximum.
inline Floats at_least(Floats a, Floats low) {
  return a < low ? low : a;
}
inline Floats at_most(Floats a, Floats high) {
  return high < a ? high : a;
}
inline Floats absolute(Floats a) {
  return bits(bits(a) & 0x7fffffff);
}
// The nearest integer, of two the even one, for |a| < 2^22.
inline Floats nearest(Floats a) {
  const Floats magic = splat(12582912.f);  // 1.5 * 2^23: its last bit is worth one
  return (a + magic) - magic;
}
inline Ints nearest_ints(Floats a) {
  const Floats magic = splat(12582912.f);
  return bits(a + magic) - bits(magic);
}
inline float sum(Floats value) {
  float lanes[WIDTH];
  store(lanes, value);
  for (int64_t half = WIDTH / 2; half; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

}  // namespace
