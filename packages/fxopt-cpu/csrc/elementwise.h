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
        value = call.operation == ADD        ? value + other
                : call.operation == SUBTRACT ? value - other
                : call.operation == MULTIPLY ? value * other
                                             : value / other;
      }
      store(to + i, activate<KIND>(value, call.alpha, call.beta), size - i);
    }
  }
};

// Some rows of the result, up to a vector of them, whose elements lie side by side in what is copied.
struct ElementwiseBlock {
  const Elementwise& call;
  const float* a;
  float* to;
  int64_t rows;

  template <int64_t KIND>
  void run() const {
    for (int64_t i = 0; i < call.sizes[3]; i += WIDTH) {
      const int64_t some = least(WIDTH, call.sizes[3] - i);
      Floats block[WIDTH] = {};
      for (int64_t l = 0; l < some; ++l) block[l] = load(a + (i + l) * call.a_strides[3], rows);
      transpose(block);
      for (int64_t r = 0; r < rows; ++r)
        store(to + r * call.result_strides[2] + i, activate<KIND>(block[r], call.alpha, call.beta), some);
    }
  }
};

void elementwise_rows(const Elementwise& call, int64_t first, int64_t last) {
  const bool transposes = call.operation == COPY && call.a_strides[2] == 1 && call.a_strides[3] > 1;
  for (int64_t row = first, some = 1; row < last; row += some) {
    const int64_t index[3] = {row / call.sizes[2] / call.sizes[1], row / call.sizes[2] % call.sizes[1], row % call.sizes[2]};
    int64_t a = 0, b = 0, to = 0;
    for (int64_t i = 0; i < 3; ++i)
      a += index[i] * call.a_strides[i], b += index[i] * call.b_strides[i], to += index[i] * call.result_strides[i];
    if (transposes) {
      some = least(WIDTH, least(last - row, call.sizes[2] - index[2]));
      const ElementwiseBlock block{call, call.a + a, call.result + to, some};
      with_activation(call.activation, block);
      continue;
    }
    const ElementwiseRow each{call, call.a + a, call.b + b, call.result + to};
    with_activation(call.activation, each);
  }
}

}  // namespace
