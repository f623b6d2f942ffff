// Functions on vectors, for every float: about 1e-7 of the result, or of its last digit where floats allow no better.
//
// Polynomials are fitted (minimax, by weighted least squares) to what the comments say. NaN stays NaN, infinities give
// the limits, and denormals are computed with. For -infinity, the results are those of torch's eager functions (silu: NaN).
#pragma once

#include "vector.h"

namespace {

struct Exponential {
  Floats less_one;  // e^r - 1 for the remainder r
  Floats power;     // n of e^x = e^r * 2^n
};
inline Exponential exponential(Floats x) {
  x = at_most(at_least(x, splat(-104.f)), splat(89.f));  // beyond lie zero and infinity
  const Floats n = nearest(x * 1.44269504f);
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first with 9 bits
  Floats q = splat(0.00139506022f);  // (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2
  q = q * r + 0.00836895352f;
  q = q * r + 0.0416662041f;
  q = q * r + 0.166665183f;
  q = q * r + 0.5f;
  return {r + r * r * q, n};
}
inline Floats exp(Floats x) {
  const Exponential e = exponential(x);
  return scaled(e.less_one + 1.f, e.power);
}
// The same, but zero from the least normal number down, as for masked keys: a vector with a result that is subnormal, or
// rounds to zero, took 240 ns in attention, tens of times as long as any other.
inline Floats exp_or_zero(Floats x) {
  return select(x < -87.f, Floats{}, exp(at_least(x, splat(-87.f))));
}
// The same to 8e-5 of the result, for x <= 0, where the result is rounded to bfloat16; zero from 2^-125 down.
inline Floats exp_roughly(Floats x) {
  const Floats exponent = at_least(x * 1.44269504f, splat(-125.f)), n = nearest(exponent), f = exponent - n;
  Floats p = splat(0.0551716685f);  // 2^f for |f| <= 1/2
  p = p * f + 0.242611125f;
  p = p * f + 0.693260968f;
  p = p * f + 0.999928057f;
  return select(exponent == -125.f, Floats{}, scaled(p, n));
}
inline Floats expm1(Floats x) {
  const Exponential e = exponential(x);
  return select(e.power == 0.f, e.less_one, scaled(e.less_one + 1.f, e.power) - 1.f);
}
inline Floats sigmoid(Floats x) {
  return 1.f / (1.f + exp(-x));
}
inline Floats tanh(Floats x) {
  const Floats square = x * x;
  Floats p = splat(-0.00566078861f);  // (tanh x - x) / x^3 for |x| <= 0.63, in x^2
  p = p * square + 0.0206020073f;
  p = p * square - 0.0537292299f;
  p = p * square + 0.13331329f;
  p = p * square - 0.333332783f;
  const Floats size = absolute(x);
  const Floats large = 1.f - 2.f / (exp(size + size) + 1.f);
  return select(size < 0.625f, x + x * square * p, bits(bits(large) | (bits(x) & INT32_MIN)));
}
// The normal distribution function: (1 + erf(x / sqrt(2))) / 2, relatively right in its left tail too.
inline Floats normal_cdf(Floats x) {
  const Floats size = at_most(absolute(x), splat(14.5f));
  const Floats u = 1.f / (1.f + 0.3f * size);
  Floats p = splat(0.038407404f);  // cdf(-size) * e^(size^2 / 2) in u
  p = p * u - 0.169307514f;
  p = p * u + 0.22895188f;
  p = p * u - 0.0768397696f;
  p = p * u + 0.142765343f;
  p = p * u + 0.0945858371f;
  p = p * u + 0.121945269f;
  p = p * u + 0.119484206f;
  p = p * u + 7.37242971e-06f;
  const Floats tail = p * exp(size * size * -0.5f);
  return select(x < 0.f, tail, 1.f - tail);
}

// The numbers are those of the operators' argument `activation`.
enum Activation : int64_t {
  NO_ACTIVATION,
  RELU,
  GELU,
  GELU_TANH,
  SILU,
  TANH,
  SIGMOID,
  HARDSWISH,
  HARDTANH,
  HARDSIGMOID,
  LEAKY_RELU,
  QUICK_GELU,
  ELU,
  MISH,
  ACTIVATIONS
};

template <int64_t KIND>
inline Floats activate(Floats x, [[maybe_unused]] float alpha, [[maybe_unused]] float beta) {
  if constexpr (KIND == RELU) return at_least(x, Floats{});
  if constexpr (KIND == GELU) return x * normal_cdf(x);
  if constexpr (KIND == GELU_TANH) return x / (1.f + exp(x * (-1.59576912f - 0.0713548163f * x * x)));
  if constexpr (KIND == SILU) return x / (1.f + exp(-x));
  if constexpr (KIND == TANH) return tanh(x);
  if constexpr (KIND == SIGMOID) return sigmoid(x);
  if constexpr (KIND == HARDSWISH) return x * at_most(at_least(x + 3.f, Floats{}), splat(6.f)) * (1.f / 6.f);
  if constexpr (KIND == HARDTANH) return at_most(at_least(x, splat(alpha)), splat(beta));
  if constexpr (KIND == HARDSIGMOID) return at_most(at_least(x + 3.f, Floats{}), splat(6.f)) * (1.f / 6.f);
  if constexpr (KIND == LEAKY_RELU) return select(x > 0.f, x, x * alpha);
  if constexpr (KIND == QUICK_GELU) return x / (1.f + exp(x * -1.702f));
  if constexpr (KIND == ELU) return select(x > 0.f, x, expm1(x) * alpha);
  if constexpr (KIND == MISH) {  // tanh(log(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2)
    const Floats e = exp(at_most(x, splat(30.f))), part = e * (e + 2.f);
    return x * (part / (part + 2.f));
  }
  return x;
}

// Calls `function.run<KIND>()` for the kind: one branch for all elements.
template <int64_t KIND = 0, class Function>
inline void with_activation(int64_t kind, Function& function) {
  if (kind == KIND) {
    function.template run<KIND>();
  } else if constexpr (KIND + 1 < ACTIVATIONS) {
    with_activation<KIND + 1>(kind, function);
  }
}

}  // namespace
