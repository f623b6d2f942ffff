// The mean or the largest of each window of images with the channels last.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

void pool_rows(const Pool& c, int64_t first, int64_t last) {
  for (int64_t line = first; line < last; ++line) {
    const int64_t top = line % c.rows * c.stride[0] - c.padding[0];
    const float* image = c.input + line / c.rows * c.height * c.width * c.pitch;
    for (int64_t column = 0; column < c.columns; ++column) {
      const int64_t left = column * c.stride[1] - c.padding[1];
      // Where padding counts, what reaches beyond it does not.
      const int64_t all = (least(top + c.kernel[0], c.height + c.after[0]) - top) *
                          (least(left + c.kernel[1], c.width + c.after[1]) - left);
      for (int64_t channel = 0; channel < c.channels; channel += WIDTH) {
        const int64_t some = c.channels - channel;
        Floats value = splat(c.largest ? -__builtin_inff() : 0.f);
        int64_t count = 0;
        for (int64_t v = 0; v < c.kernel[0]; ++v)
          for (int64_t h = 0; h < c.kernel[1]; ++h) {
            const int64_t y = top + v * c.dilation[0], x = left + h * c.dilation[1];
            if (y < 0 || y >= c.height || x < 0 || x >= c.width) continue;
            const Floats each = load(image + (y * c.width + x) * c.pitch + channel, some);
            // A NaN takes the place of any number, and nothing takes its place.
            value = c.largest ? select((each > value) | (each != each), each, value) : value + each;
            ++count;
          }
        if (!c.largest) value = value / float(c.counts_padding ? all : count);
        store(c.output + (line * c.columns + column) * c.result_pitch + channel, value, some);
      }
    }
  }
}

}  // namespace
