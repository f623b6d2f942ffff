// activation(a), activation(a + b) ... of elements, where `a` and `b` have any strides (0 repeats) and rows of the result lie together.
#pragma once

#include "kernels.h"
#include "math.h"
#include "vector.h"

namespace {

// `count` elements that are `stride` apart.
inline Floats gather(const float* from, int64_t stride, int64_t count) {
  if (stride == 1) return load(from, count);
  if (stride == 0) return splat(*from);
  float lanes[WIDTH] = {};
  for (int64_t lane = 0; lane < least(count, WIDTH); ++lane) lanes[lane] = from[lane * stride];
  return load(lanes);
}

// One row of the result.
struct ElementwiseRow {
  const Elementwise& call;
  const float *a, *b;
  float* to;

  template <int64_t KIND>
  void run() const {
    const int64_t size = call.sizes[3];
    for (int64_t i = 0; i < size; i += WIDTH) {
      Floats value = gather(a + i * call.a_strides[3], call.a_strides[3], size - i);
      if (call.operation != COPY) {
        const Floats other = gather(b + i * call.b_strides[3], call.b_strides[3], size - i);
        value = call.operation == ADD ? value + other : call.operation == SUBTRACT ? value - other : value * other;
      }
      store(to + i, activate<KIND>(value, call.alpha, call.beta), size - i);
    }
  }
};

void elementwise_rows(const Elementwise& call, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const int64_t index[3] = {row / call.sizes[2] / call.sizes[1], row / call.sizes[2] % call.sizes[1], row % call.sizes[2]};
    int64_t a = 0, b = 0, to = 0;
    for (int64_t i = 0; i < 3; ++i)
      a += index[i] * call.a_strides[i], b += index[i] * call.b_strides[i], to += index[i] * call.result_strides[i];
    const ElementwiseRow each{call, call.a + a, call.b + b, call.result + to};
    with_activation(call.activation, each);
  }
}

}  // namespace
