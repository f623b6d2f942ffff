// Convolutions of 3 x 3 taps by Winograd's F(2 x 2, 3 x 3): 16 products for four pixels instead of 36.
//
// Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015: Y = A' [(G g G') * (B' d B)] A, where d is
// the 4 x 4 pixels that a tile of 2 x 2 results reads. The sums of a result read only its own 3 x 3 pixels, so that NaN stays
// where it belongs. Infinity, and numbers near the largest, become NaN in the differences; such tiles are computed tap by tap.
#pragma once

#include "conv.h"

namespace {

// panels (P, 9 * channels, 16) -> (16, P, channels, 16)
void winograd_weights(const Convolution& c, float* to, int64_t first, int64_t last) {
  const int64_t plane = divide_up(c.features, 16) * c.channels * 16;
  for (int64_t panel = first; panel < last; ++panel)
    for (int64_t i = 0; i < c.channels * 16; i += WIDTH) {
      const float* from = c.panels + panel * 9 * c.channels * 16 + i;
      Floats rows[4][3];
UNROLL for (int x = 0; x < 3; ++x) {
        const Floats a = load(from + x * c.channels * 16), b = load(from + (3 + x) * c.channels * 16),
                     d = load(from + (6 + x) * c.channels * 16);
        rows[0][x] = a, rows[1][x] = (a + b + d) * .5f, rows[2][x] = (a - b + d) * .5f, rows[3][x] = d;
      }
UNROLL for (int y = 0; y < 4; ++y) {
        const Floats a = rows[y][0], b = rows[y][1], d = rows[y][2];
        float* const place = to + y * 4 * plane + panel * c.channels * 16 + i;
        store(place, a), store(place + plane, (a + b + d) * .5f), store(place + 2 * plane, (a - b + d) * .5f);
        store(place + 3 * plane, d);
      }
    }
}

// What a tile reads, transformed: 16 rows of channels that are `plane` apart.
inline void winograd_input(const Convolution& c, const float* const (&from)[4][4], float* to, int64_t plane) {
  for (int64_t k = 0; k < c.channels; k += WIDTH) {
    const int64_t left = c.channels - k;
    Floats d[4][4];
UNROLL for (int x = 0; x < 4; ++x) {
      const Floats d0 = load(from[0][x] + k, left), d1 = load(from[1][x] + k, left), d2 = load(from[2][x] + k, left),
                   d3 = load(from[3][x] + k, left);
      d[0][x] = d0 - d2, d[1][x] = d1 + d2, d[2][x] = d2 - d1, d[3][x] = d1 - d3;
    }
UNROLL for (int y = 0; y < 4; ++y) {
      float* const place = to + y * 4 * plane + k;
      store(place, d[y][0] - d[y][2], left), store(place + plane, d[y][1] + d[y][2], left);
      store(place + 2 * plane, d[y][2] - d[y][1], left), store(place + 3 * plane, d[y][1] - d[y][3], left);
    }
  }
}

// A tile of the result: its first pixel, and how many rows and columns are inside of the image.
struct Square {
  int64_t pixel, rows, columns;
};

// P panels of a tile from their 16 products, which are `plane` apart.
template <int P>
inline void winograd_output(const Convolution& c, const Square& tile, const float* from, int64_t plane, int64_t panel) {
  constexpr int N = P * VECTORS;
  Floats y[2][2][N], finite = {};
UNROLL for (int j = 0; j < N; ++j) {
    Floats m[2][4];
UNROLL for (int x = 0; x < 4; ++x) {
      const float* place = from + x * plane + j * WIDTH;
      const Floats a = load(place), b = load(place + 4 * plane), d = load(place + 8 * plane), e = load(place + 12 * plane);
      m[0][x] = a + b + d, m[1][x] = b - d - e;
    }
    const Floats bias = load(c.bias + panel * 16 + j * WIDTH);
UNROLL for (int r = 0; r < 2; ++r) {
      y[r][0][j] = m[r][0] + m[r][1] + m[r][2] + bias, y[r][1][j] = m[r][1] - m[r][2] - m[r][3] + bias;
      finite += (y[r][0][j] - y[r][0][j]) + (y[r][1][j] - y[r][1][j]);
    }
  }
  const bool direct = !(sum(finite) == 0.f);
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t pixel = tile.pixel + r * c.columns;
    if (direct) {
      convolve(c, pixel, pixel + tile.columns, panel, panel + P);
    } else if (tile.columns == 2) {
      finish(c, y[r], pixel, panel * 16, c.features - panel * 16);
    } else {
      Floats one[1][N];
UNROLL for (int j = 0; j < N; ++j) one[0][j] = y[r][0][j];
      finish(c, one, pixel, panel * 16, c.features - panel * 16);
    }
  }
}

// M tiles times P panels, for one of the 16 places.
template <int M, int P>
inline void winograd_product(const float* from, int64_t channels, const float* weight, float* to) {
  constexpr int N = P * VECTORS, STEP = WIDTH < 16 || N > 2 ? 1 : 4 / N;
  const int64_t size = channels * 16;
  const float* rows[M];
  for (int i = 0; i < M; ++i) rows[i] = from + i * channels;
  Floats sums[M][N] = {};
  int64_t k = 0;
  for (; k + STEP <= channels; k += STEP, weight += STEP * 16) multiply<M, N, STEP>(sums, rows, k, weight, size);
  for (; k < channels; ++k, weight += 16) multiply<M, N, 1>(sums, rows, k, weight, size);
UNROLL for (int i = 0; i < M; ++i)
UNROLL for (int j = 0; j < N; ++j) store(to + i * MOST_TILE_PANELS * 16 + j * WIDTH, sums[i][j]);
}

template <int M, int P>
void winograd_panels(const Convolution& c, const float* weights, const float* input, int64_t plane, float* products,
                     int64_t product_plane, const Square* tiles, int64_t count, int64_t panel) {
  const int64_t all = divide_up(c.features, 16) * c.channels * 16;
  for (int64_t place = 0; place < 16; ++place) {
    const float *from = input + place * plane, *weight = weights + place * all + panel * c.channels * 16;
    float* to = products + place * product_plane;
    int64_t i = 0;
    for (; i + M <= count; i += M)
      winograd_product<M, P>(from + i * c.channels, c.channels, weight, to + i * MOST_TILE_PANELS * 16);
    for (; i + 2 <= count; i += 2)
      winograd_product<2, P>(from + i * c.channels, c.channels, weight, to + i * MOST_TILE_PANELS * 16);
    for (; i < count; ++i)
      winograd_product<1, P>(from + i * c.channels, c.channels, weight, to + i * MOST_TILE_PANELS * 16);
  }
  for (int64_t i = 0; i < count; ++i)
    winograd_output<P>(c, tiles[i], products + i * MOST_TILE_PANELS * 16, product_plane, panel);
}

// Tiles [first, last) of all images, at most MOST_TILES of them.
void winograd(const Convolution& c, const float* weights, float* room, int64_t first, int64_t last) {
  const int64_t count = last - first, panels = divide_up(c.features, 16);
  const int64_t down = divide_up(c.rows, 2), across = divide_up(c.columns, 2);
  const int64_t plane = count * c.channels + 16, product_plane = count * MOST_TILE_PANELS * 16 + 16;  // other sets
  float* const products = room + 16 * plane;
  Square tiles[MOST_TILES];
  for (int64_t i = 0; i < count; ++i) {
    const int64_t image = (first + i) / across / down, y = (first + i) / across % down * 2, x = (first + i) % across * 2;
    tiles[i] = {(image * c.rows + y) * c.columns + x, least<int64_t>(2, c.rows - y), least<int64_t>(2, c.columns - x)};
    const int64_t top = y - c.padding[0], left = x - c.padding[1];
    const float* from[4][4];
    for (int64_t v = 0; v < 4; ++v)
      for (int64_t h = 0; h < 4; ++h) {
        const bool inside = top + v >= 0 && top + v < c.height && left + h >= 0 && left + h < c.width;
        from[v][h] = inside ? c.input + ((image * c.height + top + v) * c.width + left + h) * c.pitch : c.zeros;
      }
    winograd_input(c, from, room + i * c.channels, plane);
  }
  for (int64_t p = 0; p < panels;) {
    const int64_t left = panels - p;
#if defined(__AVX512F__)
    if (left >= 7 || left == 4) {
      winograd_panels<6, 4>(c, weights, room, plane, products, product_plane, tiles, count, p), p += 4;
    } else if (left >= 3) {
      winograd_panels<8, 3>(c, weights, room, plane, products, product_plane, tiles, count, p), p += 3;
    } else if (left == 2) {
      winograd_panels<12, 2>(c, weights, room, plane, products, product_plane, tiles, count, p), p += 2;
    } else {
      winograd_panels<12, 1>(c, weights, room, plane, products, product_plane, tiles, count, p), p += 1;
    }
#elif defined(__AVX2__)
    if (left >= 1) winograd_panels<6, 1>(c, weights, room, plane, products, product_plane, tiles, count, p), p += 1;
#else
    if (left >= 1) winograd_panels<2, 1>(c, weights, room, plane, products, product_plane, tiles, count, p), p += 1;
#endif
  }
}

}  // namespace
