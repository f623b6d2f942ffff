// Convolutions over channels-last images: dense ones as products of pixels with panels, depthwise ones tap by tap.
//
// A dense convolution has its weight as panels (P, taps * channels, 16) and reads each pixel of the input through a table of
// pointers, one for each tap and pixel of the result, so that strides, dilation and padding cost nothing in the
// product: outside of the image the pointer leads to zeros. Groups are dense convolutions of their channels, and have
// panels of their own. A depthwise one has its weight as (taps, features).
#pragma once

#include "kernels.h"
#include "linear.h"
#include "math.h"
#include "vector.h"

namespace {

constexpr int64_t MOST_POINTERS = 4096;
constexpr int64_t ROOM = 4 * MOST_COPIED;  // elements of copied rows

struct Activate {
  const Convolution& c;
  Floats* values;
  int count;
  template <int64_t KIND>
  void run() {
    for (int i = 0; i < count; ++i) values[i] = activate<KIND>(values[i], c.alpha, c.beta);
  }
};

// Stores the results of M neighbouring pixels and N vectors of features, of which `left` exist, from their sums: residual and
// activation.
template <int M, int N>
inline void finish(const Convolution& c, Floats (&sums)[M][N], int64_t pixel, int64_t feature, int64_t left) {
  float* const to = c.output + pixel * c.result_pitch + feature;
  if (c.residual) {
    const float* const from = c.residual + pixel * c.features + feature;
    UNROLL for (int i = 0; i < M; ++i) UNROLL for (int j = 0; j < N; ++j)
        if (j * WIDTH < left) sums[i][j] += load(from + i * c.features + j * WIDTH, left - j * WIDTH);
  }
  if (c.activation == RELU || c.activation == HARDTANH) {  // the usual ones
    const bool relu = c.activation == RELU;
    const Floats low = splat(relu ? 0.f : c.alpha), high = splat(relu ? __builtin_inff() : c.beta);
    UNROLL for (int i = 0; i < M; ++i) UNROLL for (int j = 0; j < N; ++j)
        sums[i][j] = at_most(at_least(sums[i][j], low), high);
  } else if (c.activation == HARDSWISH) {
    UNROLL for (int i = 0; i < M; ++i) UNROLL for (int j = 0; j < N; ++j)
        sums[i][j] = activate<HARDSWISH>(sums[i][j], 0.f, 0.f);
  } else if (c.activation != NO_ACTIVATION) {
    Floats values[M * N];  // a copy: the sums stay in registers if nothing has their address
    UNROLL for (int i = 0; i < M; ++i) UNROLL for (int j = 0; j < N; ++j) values[i * N + j] = sums[i][j];
    Activate function{c, values, M * N};
    with_activation(c.activation, function);
    UNROLL for (int i = 0; i < M; ++i) UNROLL for (int j = 0; j < N; ++j) sums[i][j] = values[i * N + j];
  }
  if (left >= N * WIDTH) {
    UNROLL for (int i = 0; i < M; ++i) UNROLL for (int j = 0; j < N; ++j)
        store(to + i * c.result_pitch + j * WIDTH, sums[i][j]);
  } else {
    UNROLL for (int i = 0; i < M; ++i) UNROLL for (int j = 0; j < N; ++j)
        if (j * WIDTH < left) store(to + i * c.result_pitch + j * WIDTH, sums[i][j], left - j * WIDTH);
  }
}

// sums[i][j] += rows[i][k] * weight[k][j], for K neighbouring k.
template <int M, int N, int K>
inline void multiply(Floats (&sums)[M][N], const float* const (&rows)[M], int64_t k, const float* weight, int64_t size) {
  Floats columns[K][N];
UNROLL for (int l = 0; l < K; ++l)
UNROLL for (int j = 0; j < N; ++j) columns[l][j] = load(weight + l * 16 + j / VECTORS * size + j % VECTORS * WIDTH);
UNROLL for (int i = 0; i < M; ++i)
UNROLL for (int l = 0; l < K; ++l) {
      const Floats value = splat(rows[i][k + l]);
UNROLL for (int j = 0; j < N; ++j) sums[i][j] += value * columns[l][j];
    }
}

// Some panels, the channels that they read, and the features that they give.
struct Columns {
  int64_t panel, channel, feature, left;
};

// M pixels times P panels.
template <int M, int P>
void convolve_tile(const Convolution& c, const float* const* table, int64_t taps, int64_t channels, int64_t pixels,
                   int64_t pixel, const Columns& columns) {
  constexpr int N = P * VECTORS;
  const int64_t size = taps * channels * 16, panel = columns.panel;
  Floats sums[M][N];
UNROLL for (int j = 0; j < N; ++j) {
    const Floats start = load(c.bias + panel * 16 + j * WIDTH);
UNROLL for (int i = 0; i < M; ++i) sums[i][j] = start;
  }
  const float* weight = c.panels + panel * size;
  // A narrow tile reads as many pointers as products otherwise; half of the registers have no room for more columns.
  constexpr int STEP = WIDTH < 16 || N > 2 ? 1 : 4 / N;
  for (int64_t tap = 0; tap < taps; ++tap) {
    const float* rows[M];
    for (int i = 0; i < M; ++i) rows[i] = table[tap * pixels + i] + columns.channel;
    int64_t k = 0;
    for (; k + STEP <= channels; k += STEP, weight += STEP * 16) multiply<M, N, STEP>(sums, rows, k, weight, size);
    for (; k < channels; ++k, weight += 16) multiply<M, N, 1>(sums, rows, k, weight, size);
  }
  finish(c, sums, pixel, columns.feature, columns.left);
}

#if defined(__AVX2__)
typedef float Eight __attribute__((vector_size(32)));
inline Floats widened(Eight value) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(value, Eight{}, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  return value;
#endif
}

// M pixels times the first eight features of a panel, as small groups have no more: half the work.
template <int M>
void convolve_half(const Convolution& c, const float* const* table, int64_t taps, int64_t channels, int64_t pixels,
                   int64_t pixel, const Columns& columns) {
  const Eight start = load<Eight>(c.bias + columns.panel * 16);
  Eight sums[M];
UNROLL for (int i = 0; i < M; ++i) sums[i] = start;
  const float* weight = c.panels + columns.panel * taps * channels * 16;
  for (int64_t tap = 0; tap < taps; ++tap) {
    const float* rows[M];
    for (int i = 0; i < M; ++i) rows[i] = table[tap * pixels + i] + columns.channel;
    for (int64_t k = 0; k < channels; ++k, weight += 16) {
      const Eight column = load<Eight>(weight);
UNROLL for (int i = 0; i < M; ++i) sums[i] += (rows[i][k] - Eight{}) * column;
    }
  }
  Floats wide[M][1];
UNROLL for (int i = 0; i < M; ++i) wide[i][0] = widened(sums[i]);
  finish(c, wide, pixel, columns.feature, columns.left);
}
#endif

template <int M, int P>
void convolve_some(const Convolution& c, const float* const* table, int64_t taps, int64_t channels, int64_t pixels,
                   int64_t pixel, const Columns& columns) {
#if defined(__AVX2__)
  if constexpr (P == 0) return convolve_half<M>(c, table, taps, channels, pixels, pixel, columns);
#endif
  if constexpr (P > 0) convolve_tile<M, P>(c, table, taps, channels, pixels, pixel, columns);
}

// All pixels of a block times P panels, or times half a panel where P is 0, M pixels at once.
template <int M, int P>
void convolve_panels(const Convolution& c, const float* const* table, int64_t taps, int64_t channels, int64_t pixels,
                     int64_t first, const Columns& columns) {
  int64_t i = 0;
  for (; i + M <= pixels; i += M) convolve_some<M, P>(c, table + i, taps, channels, pixels, first + i, columns);
  if constexpr (M > 4)
    for (; i + 4 <= pixels; i += 4) convolve_some<4, P>(c, table + i, taps, channels, pixels, first + i, columns);
  if constexpr (M > 2)
    for (; i + 2 <= pixels; i += 2) convolve_some<2, P>(c, table + i, taps, channels, pixels, first + i, columns);
  for (; i < pixels; ++i) convolve_some<1, P>(c, table + i, taps, channels, pixels, first + i, columns);
}

constexpr int64_t MOST_DOT = 4096;  // elements of the weight of one feature

// One feature, whose pixels lie together. Lanes are channels first and pixels then; what is left of a vector repeats one.
void convolve_dot(const Convolution& c, const float* const* table, int64_t taps, int64_t channels, int64_t pixels,
                  int64_t first) {
  const int64_t width = divide_up(channels, WIDTH) * WIDTH;
  float weights[MOST_DOT] = {};
  for (int64_t tap = 0; tap < taps; ++tap)
    for (int64_t k = 0; k < channels; ++k) weights[tap * width + k] = c.panels[(tap * channels + k) * 16];
  for (int64_t i = 0; i < pixels; i += WIDTH) {
    Floats rows[WIDTH] = {};
    for (int64_t tap = 0; tap < taps; ++tap) {
      const float* from[WIDTH];
UNROLL for (int64_t p = 0; p < WIDTH; ++p) from[p] = table[tap * pixels + least(i + p, pixels - 1)];
      for (int64_t k = 0; k < channels; k += WIDTH) {
        const Floats weight = load(weights + tap * width + k);
UNROLL for (int64_t p = 0; p < WIDTH; ++p) rows[p] += load(from[p] + k, channels - k) * weight;
      }
    }
    Floats result[1][1] = {{sums(rows) + splat(c.bias[0])}};
    finish(c, result, first + i, 0, pixels - i);
  }
}

// Neighbouring pixels of the result, in the order of images, rows and columns.
struct Pixels {
  int64_t count, image, row, column;
};

// table[tap * count + i] becomes where pixel i reads that tap: zeros outside of the image.
inline void point(const Convolution& c, const Pixels& pixels, const float** table) {
  int64_t image = pixels.image, row = pixels.row, column = pixels.column;
  for (int64_t done = 0, some; done < pixels.count; done += some, column = 0) {
    some = least(pixels.count - done, c.columns - column);  // of one row
    const float* from = c.input + image * c.height * c.width * c.pitch;
    int64_t y = row * c.stride[0] - c.padding[0];
    for (int64_t v = 0, tap = 0; v < c.kernel[0]; ++v, y += c.dilation[0])
      for (int64_t h = 0; h < c.kernel[1]; ++h, ++tap) {
        const int64_t x = column * c.stride[1] - c.padding[1] + h * c.dilation[1];
        int64_t begin = 0, end = some;  // of those inside
        if (x < 0) begin = least(some, divide_up(-x, c.stride[1]));
        if (x + (some - 1) * c.stride[1] >= c.width) end = x < c.width ? divide_up(c.width - x, c.stride[1]) : 0;
        if (y < 0 || y >= c.height || end < begin) begin = end = some;
        const float** to = table + tap * pixels.count + done;
        for (int64_t i = 0; i < begin; ++i) to[i] = c.zeros;
        for (int64_t i = begin; i < end; ++i) to[i] = from + (y * c.width + x + i * c.stride[1]) * c.pitch;
        for (int64_t i = end; i < some; ++i) to[i] = c.zeros;
      }
    if (++row == c.rows) row = 0, ++image;
  }
}

// The largest finite magnitude.
float largest_number(const Convolution& c, int64_t first, int64_t last) {
  Ints largest = {};
  for (int64_t i = first; i < last; ++i)
    for (int64_t k = 0; k < c.channels; k += WIDTH) {
      const Ints size = bits(load(c.input + i * c.pitch + k, c.channels - k)) & 0x7fffffff;
      largest = (size > largest) & (size < 0x7f800000) ? size : largest;
    }
  const int32_t top = largest_lane(largest);
  float result;
  std::memcpy(&result, &top, 4);
  return result;
}

// Integers, each in one byte; units that multiply 16 bits widen them when rows are gathered.
void round_pixels(const Convolution& c, int64_t first, int64_t last, const float* rounding, int64_t pitch, char* to,
                  float* finite) {
  for (int64_t i = first; i < last; ++i, to += pitch) {
    const float* const from = c.input + i * c.pitch;
    Ints most_bits = {};
    for (int64_t k = 0; k < c.channels; k += WIDTH) {
      Floats value = load(from + k, c.channels - k);
      const Ints size = bits(value) & 0x7fffffff;
      most_bits = size > most_bits ? size : most_bits;
      value = value * load(rounding + k, c.channels - k) + load(rounding + c.channels + k, c.channels - k);
      const Ints rounded = nearest_ints(at_most(at_least(value, splat(-127.f)), splat(127.f)));
      store(to + k, __builtin_convertvector(rounded + ByteStep::ZERO, Bytes));
    }
    if (finite) finite[i - first] = largest_lane(most_bits) < 0x7f800000 ? 1.f : __builtin_nanf("");
  }
}

void gather_rows(const Convolution& c, int64_t first, int64_t last, const float* finite, int64_t row_bytes, char* to,
                 float* scales) {
  const int64_t taps = c.kernel[0] * c.kernel[1], pitch = c.pitch * 4, depth = taps * c.channels;
  const bool wide = c.channels % (4 * WIDTH) == 0;  // no copy goes beyond a tap
  const char* const image = reinterpret_cast<const char*>(c.input);
  const float* table[MOST_POINTERS];
  [[maybe_unused]] char bytes[ByteStep::BYTES == 4 ? 1 : MOST_DEPTH + 64];
  for (int64_t start = first; start < last;) {
    const int64_t line = start / c.columns;
    const Pixels pixels{least(MOST_POINTERS / taps, last - start), line / c.rows, line % c.rows, start % c.columns};
    point(c, pixels, table);
    for (int64_t i = 0; i < pixels.count; ++i, to += row_bytes) {
      float scale = 1.f;
      char* at = ByteStep::BYTES == 4 ? to : bytes;
      for (int64_t tap = 0; tap < taps; ++tap, at += c.channels) {
        const char* const from = reinterpret_cast<const char*>(table[tap * pixels.count + i]);
        if (wide)
          for (int64_t k = 0; k < c.channels; k += 4 * WIDTH) store(at + k, load(from + k));
        else if (c.channels < 16 || tap + 1 == taps)  // elsewhere, the next tap overwrites what goes beyond
          std::memcpy(at, from, size_t(c.channels));
        else
          for (int64_t k = 0; k < c.channels; k += 16) std::memcpy(at + k, from + k, 16);
        if (finite) scale *= finite[(from - image) / pitch];
      }
      *scales++ = scale;
      if constexpr (ByteStep::BYTES > 4)
        for (int64_t k = 0; k < depth; k += WIDTH) {
          const Bytes some = load<Bytes>(bytes + k);
          ByteStep::write(to + k * ByteStep::BYTES / 4, __builtin_convertvector(some, Ints) << 24 >> 24);
        }
    }
    start += pixels.count;
  }
}

// Copies rows of an image, and the zeros around them, with the channels last.
inline void copy_rows(const Convolution& c, const float* image, int64_t top, int64_t left, int64_t rows, int64_t width,
                      float* to) {
  const int64_t place = c.channel_stride == 1 ? c.pitch : 1;  // from pixel to pixel
  for (int64_t y = top; y < top + rows; ++y, to += width * c.channels) {
    const bool inside = y >= 0 && y < c.height;
    const int64_t begin = inside ? least(width, most(int64_t(0), -left)) : width;
    const int64_t end = most(begin, least(width, c.width - left));
    for (int64_t i = 0; i < begin * c.channels; ++i) to[i] = 0.0f;
    for (int64_t i = end * c.channels; i < width * c.channels; ++i) to[i] = 0.0f;
    const float* from = image + (y * c.width + left) * place;
    if (place == c.channels) {
      for (int64_t i = begin * c.channels; i < end * c.channels; ++i) to[i] = from[i];
      continue;
    }
    for (int64_t k = 0; k < c.channels; ++k)
      for (int64_t x = begin; x < end; ++x) to[x * c.channels + k] = from[x * place + k * c.channel_stride];
  }
}

// Few channels, as of colour images: the rows that some pixels read are copied, so that a row of the kernel is one tap.
// Takes as many of the pixels as there is room for.
inline void copy(const Convolution& c, Pixels& pixels, float* rows, const float** table) {
  const int64_t high = c.kernel[0], full = (c.columns - 1) * c.stride[1] + c.kernel[1], fit = ROOM / (full * c.channels);
  int64_t left = -c.padding[1], width = full, before = pixels.column;
  if (fit >= high) {  // whole rows
    const int64_t lines = least(c.rows - pixels.row, (fit - high) / c.stride[0] + 1);
    pixels.count = least(pixels.count, lines * c.columns - pixels.column);
  } else {
    const int64_t columns = (ROOM / (high * c.channels) - c.kernel[1]) / c.stride[1] + 1;
    pixels.count = least(pixels.count, least(columns, c.columns - pixels.column));
    left += pixels.column * c.stride[1], width = (pixels.count - 1) * c.stride[1] + c.kernel[1], before = 0;
  }
  const int64_t lines = (before + pixels.count - 1) / c.columns + 1;
  copy_rows(c, c.input + pixels.image * c.height * c.width * c.pitch, pixels.row * c.stride[0] - c.padding[0], left,
            (lines - 1) * c.stride[0] + high, width, rows);
  for (int64_t done = 0, row = 0, column = before, some; done < pixels.count; done += some, column = 0, ++row) {
    some = least(pixels.count - done, c.columns - column);
    for (int64_t v = 0; v < high; ++v) {
      const float* from = rows + ((row * c.stride[0] + v) * width + column * c.stride[1]) * c.channels;
      const float** to = table + v * pixels.count + done;
      for (int64_t i = 0; i < some; ++i) to[i] = from + i * c.stride[1] * c.channels;
    }
  }
}

// Pixels [first, last) of all images, as one row, times panels [panel, end).
void convolve(const Convolution& c, int64_t first, int64_t last, int64_t panel, int64_t end) {
  const int64_t features = c.features / c.groups, panels = divide_up(features, 16);  // of a group
  const bool copies = may_be_planes(c);
  const int64_t taps = copies ? c.kernel[0] : c.kernel[0] * c.kernel[1];
  const int64_t channels = copies ? c.kernel[1] * c.channels : c.channels / c.groups;
  // By the pixels of an image, not of this call, so that the bits depend on no threads and on no other images.
  const bool dot = c.features == 1 && c.result_pitch == 1 && !copies && c.rows * c.columns >= WIDTH &&
                   taps * divide_up(channels, WIDTH) * WIDTH <= MOST_DOT;
  const float* table[MOST_POINTERS];
  float rows[ROOM];
  for (int64_t start = first; start < last;) {
    const int64_t line = start / c.columns;
    Pixels pixels{least(MOST_POINTERS / taps, last - start), line / c.rows, line % c.rows, start % c.columns};
    if (copies) {
      copy(c, pixels, rows, table);
    } else {
      point(c, pixels, table);
    }
    if (dot) {
      convolve_dot(c, table, taps, channels, pixels.count, start);
      panel = end;
    }
    for (int64_t p = panel; p < end;) {
      const int64_t group = p / panels, done = p % panels;
      [[maybe_unused]] const int64_t left = least(end - p, panels - done);
      const Columns at{p, copies ? 0 : group * channels, group * features + done * 16, features - done * 16};
#if defined(__AVX2__)
      if (at.left <= 8) {
        convolve_panels<12, 0>(c, table, taps, channels, pixels.count, start, at), ++p;
        continue;
      }
#endif
#if defined(__AVX512F__)
      if (left >= 7 || left == 4) {
        convolve_panels<6, 4>(c, table, taps, channels, pixels.count, start, at), p += 4;
      } else if (left >= 3) {
        convolve_panels<8, 3>(c, table, taps, channels, pixels.count, start, at), p += 3;
      } else if (left == 2) {
        convolve_panels<12, 2>(c, table, taps, channels, pixels.count, start, at), p += 2;
      } else {
        convolve_panels<12, 1>(c, table, taps, channels, pixels.count, start, at), p += 1;
      }
#elif defined(__AVX2__)
      if (left >= 2 && pixels.count < 6) {
        convolve_panels<2, 2>(c, table, taps, channels, pixels.count, start, at), p += 2;
      } else {
        convolve_panels<6, 1>(c, table, taps, channels, pixels.count, start, at), p += 1;
      }
#else
      convolve_panels<2, 1>(c, table, taps, channels, pixels.count, start, at), p += 1;
#endif
    }
    start += pixels.count;
  }
}

enum Inputs { WHOLE, PART, REPEATED };  // of a vector of inputs: REPEATED where several features read one channel

// X neighbouring pixels of a row, V vectors of features: taps [top, bottom) by [left, right) are inside of the image.
template <int X, int V, Inputs KIND>
inline void depthwise_tile(const Convolution& c, const float* corner, int64_t pixel, int64_t feature, int64_t top,
                           int64_t bottom, int64_t left, int64_t right) {
  const int64_t step = c.stride[1] * c.pitch, shift = KIND == REPEATED ? c.repeats : 0;
  const Ints order = LANES >> int32_t(shift);
  Floats sums[X][V];
UNROLL for (int i = 0; i < X; ++i)
UNROLL for (int j = 0; j < V; ++j) sums[i][j] = load(c.bias + feature + j * WIDTH);
  for (int64_t y = top; y < bottom; ++y)
    for (int64_t x = left; x < right; ++x) {
      const float* from = corner + (y * c.dilation[0] * c.width + x * c.dilation[1]) * c.pitch;
      const float* weights = c.panels + (y * c.kernel[1] + x) * divide_up(c.features, 16) * 16 + feature;
UNROLL for (int j = 0; j < V; ++j) {
        const Floats weight = load(weights + j * WIDTH);
        const int64_t channel = (feature + j * WIDTH) >> shift;
UNROLL for (int i = 0; i < X; ++i) {
          const float* place = from + i * step + channel;
          const Floats value = KIND == WHOLE ? load(place) : load(place, c.channels - channel);
          sums[i][j] += (KIND == REPEATED ? in_order(value, order) : value) * weight;
        }
      }
    }
  finish(c, sums, pixel, feature, c.features - feature);
}

// X neighbouring pixels of a row, all features: in the order in which they lie in memory. Fewer pixels take more features at
// once, so that enough independent sums hide the latency of a product.
template <int X, int V = (X > 2 ? 2 : X == 2 || WIDTH == 16 ? 4 : 8)>
inline void depthwise_pixels(const Convolution& c, const float* corner, int64_t pixel, int64_t top, int64_t bottom,
                             int64_t left, int64_t right, int64_t feature = 0) {
  for (; feature + V * WIDTH <= c.features; feature += V * WIDTH)
    if (c.repeats)
      depthwise_tile<X, V, REPEATED>(c, corner, pixel, feature, top, bottom, left, right);
    else
      depthwise_tile<X, V, WHOLE>(c, corner, pixel, feature, top, bottom, left, right);
  if constexpr (V > 1)
    depthwise_pixels<X, V / 2>(c, corner, pixel, top, bottom, left, right, feature);
  else if (feature < c.features)
    (c.repeats ? depthwise_tile<X, 1, REPEATED> : depthwise_tile<X, 1, PART>)(c, corner, pixel, feature, top, bottom, left,
                                                                              right);
}

// Rows [first, last) of the results of all images.
void convolve_depthwise(const Convolution& c, int64_t first, int64_t last) {
  constexpr int X = WIDTH < 8 ? 4 : 6;
  const int64_t reach = (c.kernel[1] - 1) * c.dilation[1], room = c.width + c.padding[1] - reach - 1;
  // Columns whose taps are all inside of the image.
  const int64_t inner = least(c.columns, (c.padding[1] + c.stride[1] - 1) / c.stride[1]);
  const int64_t outer = most(inner, least(c.columns, room < 0 ? 0 : room / c.stride[1] + 1));
  for (int64_t line = first; line < last; ++line) {
    const int64_t y = line % c.rows * c.stride[0] - c.padding[0];
    const float* image = c.input + line / c.rows * c.height * c.width * c.pitch;
    int64_t top = 0, bottom = c.kernel[0];
    while (top < bottom && y + top * c.dilation[0] < 0) ++top;
    while (bottom > top && y + (bottom - 1) * c.dilation[0] >= c.height) --bottom;
    for (int64_t column = 0; column < c.columns;) {
      const int64_t x = column * c.stride[1] - c.padding[1], pixel = line * c.columns + column;
      const float* corner = image + (y * c.width + x) * c.pitch;
      if (column >= inner && column + X <= outer) {
        depthwise_pixels<X>(c, corner, pixel, top, bottom, 0, c.kernel[1]), column += X;
      } else if (column >= inner && column + 2 <= outer) {
        depthwise_pixels<2>(c, corner, pixel, top, bottom, 0, c.kernel[1]), column += 2;
      } else {
        int64_t left = 0, right = c.kernel[1];
        while (left < right && x + left * c.dilation[1] < 0) ++left;
        while (right > left && x + (right - 1) * c.dilation[1] >= c.width) --right;
        depthwise_pixels<1>(c, corner, pixel, top, bottom, left, right), ++column;
      }
    }
  }
}

}  // namespace
