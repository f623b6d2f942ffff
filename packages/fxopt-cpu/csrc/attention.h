// Attention, by blocks of queries and blocks of keys, with the running maximum and sum of an online softmax.
//
// Queries lie in the lanes: those of a block are transposed once into a small scratch, keys and values are read where they
// lie, and the maxima and sums of the softmax run down the lanes without a reduction. A few queries (decoding) would leave
// most lanes empty: there the elements of a head lie in the lanes.
//
// A row of the result depends only on its query, keys, values and mask: not on the number of rows, heads or threads. Up to
// WIDTH / 4 queries and more than that are two code paths, whose sums run in different orders. `rounded` has a third one, for
// more than 3 * WIDTH.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "math.h"
#include "vector.h"

namespace {

constexpr int64_t KEYS = 128;                   // keys of a block: its scores for 2 * WIDTH queries stay in the first cache
constexpr int64_t TILE = WIDTH == 16 ? 8 : 4;  // rows of a tile, whose sums stay in registers
constexpr float INFINITE = __builtin_inff();

inline int64_t padded(int64_t size) {
  return (size + WIDTH - 1) / WIDTH * WIDTH;
}

inline bool few_queries(const Attention& a) {
  return a.queries <= WIDTH / 4;
}

// The mask of one query and `count` keys as summands.
inline void mask_row(const Attention& a, int64_t batch, int64_t head, int64_t query, int64_t key, int64_t count, float* to) {
  const int64_t step = a.mask_strides[3];
  const int64_t at = batch * a.mask_strides[0] + head * a.mask_strides[1] + query * a.mask_strides[2] + key * step;
  if (a.mask)
    for (int64_t j = 0; j < count; ++j) to[j] = a.mask[at + j * step];
  else
    for (int64_t j = 0; j < count; ++j) to[j] = a.attended[at + j * step] ? 0.0f : -INFINITE;
}

// to[column][row] = from[row][column] * scale, in rows of `lanes`; rows from `count` on are zero.
inline void transposed(const float* from, int64_t stride, int64_t count, int64_t columns, float scale, float* to, int64_t lanes) {
  for (int64_t first = 0; first < lanes; first += WIDTH) {
    const int64_t rows = most(least(count - first, WIDTH), int64_t(0));
    for (int64_t column = 0; column < columns; column += WIDTH) {
      const int64_t width = least(columns - column, WIDTH);
      Floats block[WIDTH] = {};
      for (int64_t r = 0; r < rows; ++r) {
        const float* at = from + (first + r) * stride + column;
        block[r] = (width == WIDTH ? load(at) : load(at, width)) * scale;
      }
      transpose(block);
      for (int64_t r = 0; r < width; ++r) store(to + (column + r) * lanes + first, block[r]);
    }
  }
}

// How much is added to the scores of a block: nothing, one number for each key, or one for each key and query.
enum class Summands { none, keys, all };

template <int64_t C>
struct Lanes {
  static constexpr int64_t COUNT = C * WIDTH;
  const float* queries;  // [size][COUNT]
  const float* summands;
  float* weights;  // [KEYS][COUNT]
  Summands kind;
  Floats top[C];
};

// Scores of keys `from` to `count`, by ROWS keys at a time, and their maxima.
template <int64_t ROWS, int64_t C>
inline void scores(Lanes<C>& x, const float* key, int64_t stride, int64_t size, int64_t from, int64_t count) {
  for (; from + ROWS <= count; from += ROWS) {
    Floats sum[ROWS][C] = {};
    const float* rows = key + from * stride;
    for (int64_t d = 0; d < size; ++d) {
      Floats q[C];
      UNROLL for (int64_t c = 0; c < C; ++c) q[c] = load(x.queries + (d * C + c) * WIDTH);
      UNROLL for (int64_t r = 0; r < ROWS; ++r) {
        const Floats element = splat(rows[r * stride + d]);
        UNROLL for (int64_t c = 0; c < C; ++c) sum[r][c] += element * q[c];
      }
    }
    UNROLL for (int64_t r = 0; r < ROWS; ++r) {
      UNROLL for (int64_t c = 0; c < C; ++c) {
        const int64_t at = ((from + r) * C + c) * WIDTH;
        if (x.kind == Summands::keys) sum[r][c] += splat(x.summands[from + r]);
        if (x.kind == Summands::all) sum[r][c] += load(x.summands + at);
        x.top[c] = most(x.top[c], sum[r][c]);
        store(x.weights + at, sum[r][c]);
      }
    }
  }
  if constexpr (ROWS > 1) scores<ROWS / 2>(x, key, stride, size, from, count);
}

// Sets what is added to the scores of the keys from `start` on, for C * WIDTH queries from `first` on; `rows` is scratch.
template <int64_t C>
Summands set_summands(const Attention& a, int64_t batch, int64_t head, int64_t first, int64_t start, int64_t keys, float* summands,
                      float* rows) {
  constexpr int64_t COUNT = C * WIDTH;
  const int64_t count = least(a.queries - first, COUNT);
  const bool crosses = a.causal && start + keys - 1 > first, masked = a.mask || a.attended;
  if (!masked && !crosses) return Summands::none;
  if (masked && a.mask_strides[2] == 0 && !crosses) {
    mask_row(a, batch, head, first, start, keys, summands);
    return Summands::keys;
  }
  if (masked) {
    for (int64_t r = 0; r < count; ++r) mask_row(a, batch, head, first + r, start, keys, rows + r * KEYS);
    transposed(rows, KEYS, count, keys, 1.0f, summands, COUNT);
  }
  if (crosses)
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t c = 0; c < C; ++c) {
        float* at = summands + (j * C + c) * WIDTH;
        store(at, LANES + int(first + c * WIDTH) < int(start + j) ? splat(-INFINITE) : masked ? load(at) : Floats{});
      }
  return Summands::all;
}

// The largest scores before and after some keys become what weights are relative to, and the factors of the sums before.
template <int64_t C>
inline void rebase(Floats (&before)[C], const Floats (&top)[C], Floats (&total)[C], float* factors) {
  for (int64_t c = 0; c < C; ++c) {
    const Floats base = top[c] == splat(-INFINITE) ? Floats{} : top[c];  // all masked: exp(-inf - 0), never exp(-inf + inf)
    const Floats factor = exp_or_zero(before[c] - base);
    total[c] *= factor;
    store(factors + c * WIDTH, factor);
    before[c] = base;
  }
}

// Sums of weighted values for TILE queries and C vectors of columns. `sums` has those of the blocks before, to be
// multiplied by `factors` (null: there are none); the new sums, times `last` (null: not yet), go to the first `rows` of `to`.
template <int64_t C>
inline void weighted(const float* weights, int64_t lanes, const float* value, int64_t stride, int64_t count, const float* sums,
                     int64_t sums_stride, const float* factors, const float* last, float* to, int64_t to_stride, int64_t rows) {
  Floats sum[TILE][C] = {};
  if (factors)
    for (int64_t r = 0; r < TILE; ++r)
      for (int64_t c = 0; c < C; ++c) sum[r][c] = load(sums + r * sums_stride + c * WIDTH) * splat(factors[r]);
  for (int64_t j = 0; j < count; ++j) {
    Floats v[C];
    UNROLL for (int64_t c = 0; c < C; ++c) v[c] = load(value + j * stride + c * WIDTH);
    UNROLL for (int64_t r = 0; r < TILE; ++r) {
      const Floats weight = splat(weights[j * lanes + r]);
      UNROLL for (int64_t c = 0; c < C; ++c) sum[r][c] += weight * v[c];
    }
  }
  UNROLL for (int64_t r = 0; r < TILE; ++r) {
    if (r >= rows) break;
    UNROLL for (int64_t c = 0; c < C; ++c) store(to + r * to_stride + c * WIDTH, last ? sum[r][c] * splat(last[r]) : sum[r][c]);
  }
}

// C * WIDTH queries of one head, from `first` on.
template <int64_t C>
void attend_in_lanes(const Attention& a, int64_t batch, int64_t head, int64_t first, float* scratch) {
  constexpr int64_t COUNT = C * WIDTH;
  const int64_t count = least(a.queries - first, COUNT), kv_head = head / (a.heads / a.kv_heads), width = padded(a.value_size);
  const float* query = a.query + batch * a.query_strides[0] + head * a.query_strides[1] + first * a.query_strides[2];
  const float* key = a.key + batch * a.key_strides[0] + kv_head * a.key_strides[1];
  const float* value = a.value + batch * a.value_strides[0] + kv_head * a.value_strides[1];
  float* result = a.result + ((batch * a.queries + first) * a.heads + head) * a.value_size;
  const int64_t stride = a.heads * a.value_size;
  float* queries = scratch;
  float* weights = queries + a.size * COUNT;
  float* summands = weights + KEYS * COUNT;
  float* rows = summands + KEYS * COUNT;
  float* out = rows + KEYS * COUNT;
  float* copies = out + width * COUNT;
  alignas(64) float factors[COUNT], last[COUNT];

  transposed(query, a.query_strides[2], count, a.size, a.scale, queries, COUNT);
  Lanes<C> x{queries, summands, weights, Summands::none, {}};
  Floats total[C] = {};
  for (int64_t c = 0; c < C; ++c) x.top[c] = splat(-INFINITE);
  const int64_t end = a.causal ? least(a.keys, first + count) : a.keys;  // no query of the block attends later keys
  for (int64_t start = 0; start < end; start += KEYS) {
    const int64_t keys = least(end - start, KEYS);
    x.kind = set_summands<C>(a, batch, head, first, start, keys, summands, rows);

    Floats base[C];
    for (int64_t c = 0; c < C; ++c) base[c] = x.top[c];
    scores<TILE>(x, key + start * a.key_strides[2], a.key_strides[2], a.size, 0, keys);
    rebase(base, x.top, total, factors);
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t c = 0; c < C; ++c) {
        float* at = weights + (j * C + c) * WIDTH;
        const Floats weight = exp_or_zero(load(at) - base[c]);
        total[c] += weight;
        store(at, weight);
      }

    const float* values = value + start * a.value_strides[2];
    int64_t values_stride = a.value_strides[2];
    if (width != a.value_size) {
      for (int64_t j = 0; j < keys; ++j) {
        std::memcpy(copies + j * width, values + j * values_stride, a.value_size * 4);
        for (int64_t d = a.value_size; d < width; ++d) copies[j * width + d] = 0.0f;
      }
      values = copies;
      values_stride = width;
    }
    const bool ends = start + keys == end;
    if (ends)
      for (int64_t c = 0; c < C; ++c) store(last + c * WIDTH, 1.0f / (total[c] == Floats{} ? splat(1.0f) : total[c]));
    const bool direct = ends && width == a.value_size;
    for (int64_t r = 0; r < count; r += TILE)
      for (int64_t d = 0; d < width; d += 2 * WIDTH) {
        float* to = direct ? result + r * stride + d : out + r * width + d;
        const auto tile = width - d > WIDTH ? weighted<2> : weighted<1>;
        tile(weights + r, COUNT, values + d, values_stride, keys, out + r * width + d, width, start ? factors + r : nullptr,
             ends ? last + r : nullptr, to, direct ? stride : width, count - r);
      }
  }
  if (end == 0 || width != a.value_size)
    for (int64_t r = 0; r < count; ++r)
      for (int64_t d = 0; d < a.value_size; ++d) result[r * stride + d] = end ? out[r * width + d] : 0.0f;
}

// C vectors of columns, the last with `some` elements if that is not 0, of the weighted sum of `count` values, added to `sums`.
template <int64_t C, bool SOME>
inline void weighted_row(const float* weights, const float* value, int64_t stride, int64_t count, int64_t some, float* sums) {
  Floats sum[4][C] = {};  // four that do not wait for each other
  const auto add = [&](int64_t j, Floats(&to)[C]) {
    for (int64_t c = 0; c < C; ++c) {
      const float* at = value + j * stride + c * WIDTH;
      to[c] += splat(weights[j]) * (SOME ? load(at, some) : load(at));
    }
  };
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) add(j, sum[0]), add(j + 1, sum[1]), add(j + 2, sum[2]), add(j + 3, sum[3]);
  for (; j < count; ++j) add(j, sum[j & 3]);
  for (int64_t c = 0; c < C; ++c)
    store(sums + c * WIDTH, load(sums + c * WIDTH) + ((sum[0][c] + sum[1][c]) + (sum[2][c] + sum[3][c])));
}

// Scores of WIDTH keys: lane l has the one of row[l].
inline Floats dots(const float* query, const float* const (&row)[WIDTH], int64_t size) {
  Floats dot[WIDTH] = {};
  int64_t d = 0;
  for (; d + WIDTH <= size; d += WIDTH) {
    const Floats q = load(query + d);
    UNROLL for (int64_t r = 0; r < WIDTH; ++r) dot[r] += q * load(row[r] + d);
  }
  if (d < size)
    for (int64_t r = 0; r < WIDTH; ++r) dot[r] += load(query + d) * load(row[r] + d, size - d);
  return sums(dot);
}

// One query of one head.
void attend_by_dots(const Attention& a, int64_t batch, int64_t head, int64_t first, float* scratch) {
  const int64_t kv_head = head / (a.heads / a.kv_heads), width = padded(a.value_size), size = padded(a.size);
  const float* query = a.query + batch * a.query_strides[0] + head * a.query_strides[1] + first * a.query_strides[2];
  const float* key = a.key + batch * a.key_strides[0] + kv_head * a.key_strides[1];
  const float* value = a.value + batch * a.value_strides[0] + kv_head * a.value_strides[1];
  float* result = a.result + ((batch * a.queries + first) * a.heads + head) * a.value_size;
  float* scaled = scratch;
  float* weights = scaled + size;
  float* summands = weights + KEYS;
  float* out = summands + KEYS;
  for (int64_t d = 0; d < size; ++d) scaled[d] = d < a.size ? query[d] * a.scale : 0.0f;
  for (int64_t d = 0; d < width; ++d) out[d] = 0.0f;
  float top = -INFINITE, total = 0.0f;
  const int64_t end = a.causal ? least(a.keys, first + 1) : a.keys;
  for (int64_t start = 0; start < end; start += KEYS) {
    const int64_t keys = least(end - start, KEYS);
    const bool masked = a.mask || a.attended;
    if (masked) mask_row(a, batch, head, first, start, keys, summands);
    Floats tops = splat(top);
    for (int64_t j = 0; j < keys; j += WIDTH) {
      const float* row[WIDTH];
      for (int64_t r = 0; r < WIDTH; ++r) row[r] = key + (start + least(j + r, keys - 1)) * a.key_strides[2];
      Floats score = dots(scaled, row, a.size);
      if (masked) score += load(summands + j);
      score = LANES < int(keys - j) ? score : splat(-INFINITE);
      tops = most(tops, score);
      store(weights + j, score);
    }
    const float before = top;
    top = highest(tops);
    const float base = top == -INFINITE ? 0.0f : top;  // all masked: exp(-inf - 0), never exp(-inf + inf)
    const float factor = exp_or_zero(splat(before - base))[0];
    Floats totals{};
    for (int64_t j = 0; j < keys; j += WIDTH) {
      const Floats weight = exp_or_zero(load(weights + j) - base);
      totals += weight;
      store(weights + j, weight);
    }
    total = total * factor + sum(totals);
    if (start)
      for (int64_t d = 0; d < width; d += WIDTH) store(out + d, load(out + d) * factor);
    const float* values = value + start * a.value_strides[2];
    int64_t d = 0;
    for (; d + 2 * WIDTH <= a.value_size; d += 2 * WIDTH)
      weighted_row<2, false>(weights, values + d, a.value_strides[2], keys, 0, out + d);
    for (; d + WIDTH <= a.value_size; d += WIDTH)
      weighted_row<1, false>(weights, values + d, a.value_strides[2], keys, 0, out + d);
    if (d < a.value_size) weighted_row<1, true>(weights, values + d, a.value_strides[2], keys, a.value_size - d, out + d);
  }
  for (int64_t d = 0; d < a.value_size; ++d) result[d] = out[d] * (1.0f / (total == 0.0f ? 1.0f : total));
}

constexpr int64_t EDGE = 2 * WIDTH;       // with bfloat16, keys, queries and elements come in so many, the last ones zeros
constexpr double MOST_ROUNDED = 1 << 26;  // elements of the keys and values of a head, which take memory
inline int64_t edged(int64_t size) { return divide_up(size, EDGE) * EDGE; }

#if defined(__AMX_BF16__)
constexpr bool ROUNDS = true;

// Pairs of bfloat16, one pair in each lane: of the same lane of both, or of neighbours of a row with `count` elements left.
inline Floats pairs(Floats even, Floats odd) {
  const Shorts both = (Shorts)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return (Floats)__builtin_shufflevector(both, both, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11,
                                         27, 12, 28, 13, 29, 14, 30, 15, 31);
}
inline Floats pairs(const float* from, int64_t count, float factor) {
  const Floats low = load(from, count) * factor, high = count > WIDTH ? load(from + WIDTH, count - WIDTH) * factor : Floats{};
  return (Floats)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

// to = rows @ panels in rows of EDGE, for `count` rows, `stride` bytes apart, and two panels of `steps` pairs.
inline void multiply_edges(const char* rows, int64_t stride, int64_t count, int64_t steps, const char* panels, float* to) {
  const char* const both[2] = {panels, panels + steps * STEP};
  for (int64_t r = 0; r < count; r += EDGE) {
    Tile tile{};
    tile.row = rows + r * stride, tile.stride = stride, tile.steps = steps, tile.panels = both;
    tile.to = to + r * EDGE, tile.width = EDGE;
    for (int64_t at = 0; at < EDGE * stride; at += STEP) __builtin_prefetch(tile.row + EDGE * stride + at);  // the next rows
    multiply_tiles<BfloatStep>(EDGE, tile, nullptr);
  }
}

// Queries first to last of one head, with products of bfloat16: keys times queries, then values times weights.
void attend_rounded(const Attention& a, int64_t batch, int64_t head, int64_t first, int64_t last, float* scratch) {
  const int64_t kv_head = head / (a.heads / a.kv_heads), size = edged(a.size), width = edged(a.value_size);
  const float* key = a.key + batch * a.key_strides[0] + kv_head * a.key_strides[1];
  const float* value = a.value + batch * a.value_strides[0] + kv_head * a.value_strides[1];
  const int64_t stride = a.heads * a.value_size, all = a.causal ? least(a.keys, last) : a.keys;
  float *scores = scratch, *summands = scores + KEYS * EDGE, *rows = summands + KEYS * EDGE, *sums = rows + KEYS * EDGE;
  float* products = sums + width * EDGE;
  char* const queries = reinterpret_cast<char*>(products + width * EDGE);  // two panels of steps of two elements
  char* const weights = queries + size * EDGE * 2;                         // two panels of steps of two keys
  char* const keys = weights + KEYS * EDGE * 2;                            // rows of elements
  char* const values = keys + edged(all) * size * 2;                       // for each block of keys, rows of these
  alignas(64) float factors[EDGE];
  const Tiles shaped(EDGE);

  for (int64_t j = 0; j < all; ++j) convert_bfloat(key + j * a.key_strides[2], keys + j * size * 2, a.size);
  for (int64_t j = 0; j < all; j += EDGE)
    for (int64_t d = 0; d < width; d += WIDTH) {
      Floats block[WIDTH] = {};
      for (int64_t r = 0; r < WIDTH && d < a.value_size; ++r) {
        const int64_t at = j + 2 * r, left = a.value_size - d;
        const float* from = value + at * a.value_strides[2] + d;
        block[r] = pairs(at < all ? load(from, left) : Floats{}, at + 1 < all ? load(from + a.value_strides[2], left) : Floats{});
      }
      transpose(block);
      const int64_t start = j / KEYS * KEYS, padded = least(edged(all - start), KEYS);
      for (int64_t r = 0; r < WIDTH; ++r) store(values + (start * width + (d + r) * padded + j - start) * 2, block[r]);
    }

  for (; first < last; first += EDGE) {
    const int64_t count = least(last - first, EDGE), end = a.causal ? least(all, first + count) : all;
    const float* query = a.query + batch * a.query_strides[0] + head * a.query_strides[1] + first * a.query_strides[2];
    for (int64_t d = 0; d < size * 2; d += EDGE) {
      const int64_t c = d / size * WIDTH, from = d % size;
      Floats block[WIDTH] = {};
      for (int64_t r = 0; r < least(count - c, WIDTH); ++r)
        block[r] = pairs(query + (c + r) * a.query_strides[2] + from, a.size - from, a.scale);
      transpose(block);
      for (int64_t r = 0; r < WIDTH; ++r) store(queries + d * 2 * WIDTH + r * STEP, block[r]);
    }
    Floats total[2] = {}, top[2] = {splat(-INFINITE), splat(-INFINITE)};
    for (int64_t start = 0; start < end; start += KEYS) {
      const int64_t some = least(end - start, KEYS), padded = edged(some);
      multiply_edges(keys + start * size * 2, size * 2, padded, size / 2, queries, scores);
      const Summands kind = set_summands<2>(a, batch, head, first, start, some, summands, rows);
      Floats base[2] = {top[0], top[1]};
      for (int64_t j = 0; j < some; ++j)
        for (int64_t c = 0; c < 2; ++c) {
          float* const at = scores + j * EDGE + c * WIDTH;
          if (kind == Summands::keys) store(at, load(at) + splat(summands[j]));
          if (kind == Summands::all) store(at, load(at) + load(summands + j * EDGE + c * WIDTH));
          top[c] = most(top[c], load(at));
        }
      rebase(base, top, total, factors);
      for (int64_t j = 0; j < padded; j += 2)
        for (int64_t c = 0; c < 2; ++c) {
          const float* const at = scores + j * EDGE + c * WIDTH;
          const Floats even = j < some ? exp_roughly(load(at) - base[c]) : Floats{};
          const Floats odd = j + 1 < some ? exp_roughly(load(at + EDGE) - base[c]) : Floats{};
          const Floats both = pairs(even, odd);
          total[c] += bits(bits(both) << 16) + bits(bits(both) & int32_t(0xffff0000));  // as rounded
          store(weights + (c * padded + j) * 2 * WIDTH, both);
        }
      const int64_t held = least(edged(all - start), KEYS);  // of the block: with `causal`, more than these queries attend
      multiply_edges(values + start * width * 2, held * 2, width, padded / 2, weights, start ? products : sums);
      for (int64_t i = 0; i < a.value_size * EDGE && start; i += WIDTH)
        store(sums + i, load(sums + i) * load(factors + i % EDGE) + load(products + i));
    }
    for (int64_t c = 0; c < 2; ++c) store(factors + c * WIDTH, 1.0f / (total[c] == Floats{} ? splat(1.0f) : total[c]));
    for (int64_t i = 0; i < a.value_size * EDGE; i += WIDTH) store(sums + i, end ? load(sums + i) * load(factors + i % EDGE) : Floats{});
    transposed(sums, EDGE, a.value_size, count, 1.0f, products, width);
    float* result = a.result + ((batch * a.queries + first) * a.heads + head) * a.value_size;
    for (int64_t r = 0; r < count; ++r) std::memcpy(result + r * stride, products + r * width, size_t(a.value_size) * 4);
  }
}
#else
constexpr bool ROUNDS = false;
void attend_rounded(const Attention&, int64_t, int64_t, int64_t, int64_t, float*) {}
#endif

// Fewer queries take longer so than in float32.
inline bool rounds(const Attention& a) {
  return ROUNDS && a.rounded && a.queries > 3 * WIDTH && double(a.keys) * double(a.size + a.value_size) <= MOST_ROUNDED;
}
// The pieces that the work falls into, in any order and on any thread, and the floats of scratch that one piece needs.
inline int64_t queries_of_piece(const Attention& a) {
  if (few_queries(a)) return 1;
  return !rounds(a) ? 2 * WIDTH : a.batch * a.heads < 16 ? 2 * EDGE : 8 * EDGE;  // keys and values are rounded for each piece
}
int64_t attention_pieces(const Attention& a) { return a.batch * a.heads * divide_up(a.queries, queries_of_piece(a)); }
int64_t attention_scratch(const Attention& a) {
  const int64_t width = padded(a.value_size), lanes = few_queries(a) ? 1 : 2 * WIDTH;
  if (rounds(a))
    return (7 * KEYS / 2 + 2 * edged(width) + edged(a.size) / 2) * EDGE + edged(a.keys) * (edged(a.size) + edged(width)) / 2;
  return (padded(a.size) + 3 * KEYS + width) * lanes + (lanes > 1 && width != a.value_size ? KEYS * width : 0);
}
void attention(const Attention& a, int64_t piece, float* scratch) {
  const int64_t blocks = attention_pieces(a) / (a.batch * a.heads), head = piece / blocks % a.heads, batch = piece / blocks / a.heads;
  const int64_t each = queries_of_piece(a), first = piece % blocks * each, last = least(first + each, a.queries);
  if (few_queries(a)) return attend_by_dots(a, batch, head, first, scratch);
  if (rounds(a)) return attend_rounded(a, batch, head, first, last, scratch);
  (last - first > WIDTH ? attend_in_lanes<2> : attend_in_lanes<1>)(a, batch, head, first, scratch);
}

}  // namespace
