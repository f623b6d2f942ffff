// Norms over one row, and sums of rows.
#pragma once

#include "kernels.h"
#include "math.h"
#include "vector.h"

namespace {

enum NormKind : int64_t { NO_NORM, LAYER_NORM, RMS_NORM, NORMS };

// The sum of term(i, count) over a row, by `count` elements from i on; four sums that do not wait for each other.
template <class Term>
inline float row_sum(int64_t size, const Term& term) {
  Floats sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * WIDTH <= size; i += 4 * WIDTH)
    UNROLL for (int64_t s = 0; s < 4; ++s) sums[s] += term(i + s * WIDTH, WIDTH);
  for (; i < size; i += WIDTH) sums[0] += term(i, least(size - i, WIDTH));
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// to = norm(from) * weight + bias, where `weight` and `bias` may be null; `to` may be `from`.
inline void norm_row(const float* from, float* to, int64_t size, int64_t kind, const float* weight, const float* bias,
                     float epsilon) {
  const float mean =
      kind == LAYER_NORM ? row_sum(size, [=](int64_t i, int64_t count) { return load(from + i, count); }) / float(size) : 0.f;
  const float square = row_sum(size, [=](int64_t i, int64_t count) {
    const Floats value = load(from + i, count) - mean;
    return count < WIDTH ? select(LANES < int32_t(count), value * value, Floats{}) : value * value;
  });
  const float factor = 1.f / __builtin_sqrtf(square / float(size) + epsilon);
  for (int64_t i = 0; i < size; i += WIDTH) {
    Floats value = (load(from + i, size - i) - mean) * factor;
    if (weight) value *= load(weight + i, size - i);
    if (bias) value += load(bias + i, size - i);
    store(to + i, value, size - i);
  }
}

// Rows first to last: sum = input + residual, and result = norm(sum).
void norm_rows(const Norm& call, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const float* from = call.input + row * call.input_stride;
    float* to = call.result + row * call.size;
    if (call.residual) {
      const float* residual = call.residual + row * call.residual_stride;
      float* total = call.sum ? call.sum + row * call.size : to;
      for (int64_t i = 0; i < call.size; i += WIDTH)
        store(total + i, load(from + i, call.size - i) + load(residual + i, call.size - i), call.size - i);
      from = total;
    }
    norm_row(from, to, call.size, call.kind, call.weight, call.bias, call.epsilon);
  }
}

// Rows first to last: the sum of the tables' rows, and its norm.
void embedding_rows(const Embedding& call, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const float* rows[MOST_TABLES];
    for (int64_t t = 0; t < call.tables; ++t) rows[t] = call.table[t] + call.ids[row * call.tables + t] * call.stride[t];
    float* to = call.result + row * call.size;
    for (int64_t i = 0; i < call.size; i += WIDTH) {
      Floats value = load(rows[0] + i, call.size - i);
      for (int64_t t = 1; t < call.tables; ++t) value += load(rows[t] + i, call.size - i);
      store(to + i, value, call.size - i);
    }
    if (call.kind != NO_NORM) norm_row(to, to, call.size, call.kind, call.weight, call.bias, call.epsilon);
  }
}

// The mean of some channels over some pixels, then the sum of squared differences from it.
template <int64_t VECTORS>
inline void channel_moments_of(const float* from, int64_t pixels, int64_t pitch, int64_t channels, float* mean, float* square) {
  Floats means[VECTORS] = {}, squares[VECTORS] = {};
  for (int64_t pixel = 0; pixel < pixels; ++pixel)
    UNROLL for (int64_t v = 0; v < VECTORS; ++v) means[v] += load(from + pixel * pitch + v * WIDTH, channels - v * WIDTH);
  for (Floats& each : means) each /= float(pixels);
  for (int64_t pixel = 0; pixel < pixels; ++pixel)
    UNROLL for (int64_t v = 0; v < VECTORS; ++v) {
      const Floats value = load(from + pixel * pitch + v * WIDTH, channels - v * WIDTH) - means[v];
      squares[v] += value * value;
    }
  for (int64_t v = 0; v < VECTORS; ++v) {
    store(mean + v * WIDTH, means[v], channels - v * WIDTH);
    store(square + v * WIDTH, squares[v], channels - v * WIDTH);
  }
}

void channel_moments(const GroupNorm& call, const float* from, int64_t pixels, float* to) {
  int64_t i = 0;
  for (; i + 4 * WIDTH <= call.channels; i += 4 * WIDTH)
    channel_moments_of<4>(from + i, pixels, call.pitch, 4 * WIDTH, to + i, to + call.channels + i);
  for (; i < call.channels; i += WIDTH)
    channel_moments_of<1>(from + i, pixels, call.pitch, call.channels - i, to + i, to + call.channels + i);
}

struct NormalizedChannels {
  const GroupNorm& call;
  const float* from;
  int64_t pixels;
  const float* constants;
  float* to;

  template <int64_t KIND>
  void run() const {
    const float *mean = constants, *factor = mean + call.channels, *shift = factor + call.channels;
    for (int64_t pixel = 0; pixel < pixels; ++pixel)
      for (int64_t i = 0; i < call.channels; i += WIDTH) {
        const int64_t some = call.channels - i;
        const Floats value = (load(from + pixel * call.pitch + i, some) - load(mean + i, some)) * load(factor + i, some);
        store(to + pixel * call.result_pitch + i, activate<KIND>(value + load(shift + i, some), call.alpha, call.beta), some);
      }
  }
};

void normalize_channels(const GroupNorm& call, const float* from, int64_t pixels, const float* constants, float* to) {
  const NormalizedChannels each{call, from, pixels, constants, to};
  with_activation(call.activation, each);
}

}  // namespace
