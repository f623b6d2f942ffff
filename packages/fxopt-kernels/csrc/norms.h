// Norms over one row.
#pragma once

#include "vector.h"

namespace {

enum Norm : int64_t { NO_NORM, LAYER_NORM, RMS_NORM, NORMS };

// to = norm(from) * weight + bias, where `weight` and `bias` may be null; `to` may be `from`.
inline void norm_row(const float* from, float* to, int64_t size, int64_t kind, const float* weight, const float* bias,
                     float epsilon) {
  float mean = 0.f;
  if (kind == LAYER_NORM) {
    Floats total = {};
    for (int64_t i = 0; i < size; i += WIDTH) total += load(from + i, size - i);
    mean = sum(total) / float(size);
  }
  Floats total = {};
  for (int64_t i = 0; i < size; i += WIDTH) {
    Floats value = load(from + i, size - i) - mean;
    if (size - i < WIDTH) {  // lanes beyond the row hold -mean
      float part[WIDTH] = {};
      store(part, value, size - i);
      value = load(part);
    }
    total += value * value;
  }
  const float factor = 1.f / __builtin_sqrtf(sum(total) / float(size) + epsilon);
  for (int64_t i = 0; i < size; i += WIDTH) {
    Floats value = (load(from + i, size - i) - mean) * factor;
    if (weight) value *= load(weight + i, size - i);
    if (bias) value += load(bias + i, size - i);
    store(to + i, value, size - i);
  }
}

}  // namespace
