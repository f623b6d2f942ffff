// Products with weights in panels of 16 columns, in tiles that stay in registers.
//
// Every format's panel is a row of steps of 64 bytes: 16 columns by one float, two bfloat16 or four int8. Each result is
// one chain of sums over the steps in their order (AMX: in bfloat16, of sums of 16 steps), whatever the tile: a row's bits
// do not depend on the other rows.
#pragma once

#include "kernels.h"
#include "math.h"
#include "norms.h"

#include <type_traits>

namespace {

constexpr int64_t PANEL = 16;                 // columns
constexpr int64_t STEP = 64;                  // bytes of a panel's step
constexpr int64_t VECTORS = PANEL / WIDTH;    // of a panel
constexpr int64_t MOST_PANELS = 8;            // of a tile
constexpr int64_t AHEAD = 256;                // steps that a single tile asks memory for in advance, of all its panels
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t REGISTERS = 32;
#else
constexpr int64_t REGISTERS = 16;
#endif
constexpr int64_t MAX_ROWS = WIDTH == 16 ? 9 : REGISTERS == 32 || WIDTH == 8 ? 6 : 2;  // of a tile
#if defined(__AMX_INT8__)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif
constexpr int64_t TILE_ROWS = 16;             // of the processor's tiles, each row of STEP bytes

// Forces a sum to be computed here: the products of several sums at once would not fit the registers.
#if defined(__x86_64__)
#define HERE(sum) asm volatile("" : "+v"(sum))
#else
#define HERE(sum) asm volatile("" : "+w"(sum))
#endif

// How many panels a tile of this many rows takes, so that sums, one row of weights and one factor fit the registers.
// Nine rows by three panels take fewer instructions than fourteen by two: alone in a loop, a tenth less time where a
// neighbour shares the core.
// The tiles of one product differ by one row, and have to take as many panels as each other.
constexpr int64_t panels_for(int64_t rows) {
  int64_t panels = rows == 1 ? MOST_PANELS : rows > 4 ? 3 : 4;
  while (panels > 1 && (rows + 1) * panels * VECTORS >= REGISTERS) panels /= 2;
  return panels;
}
constexpr bool tiles_agree() {
  for (int64_t rows = MAX_ROWS + 1; rows < 8 * MAX_ROWS; ++rows) {
    const int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    if (panels_for(rows / tiles) != panels_for((rows + tiles - 1) / tiles)) return false;
  }
  return true;
}
static_assert(tiles_agree());

// What multiply() works on.
struct Tile {
  const char* row;  // the first; the next one is `stride` bytes further
  int64_t stride, steps;
  const char* const* panels;
  const int64_t* columns;   // int8: the panels' places in these two
  const float* scale;
  const int32_t *zeros, *shifts;  // shifts: null where rows have none
  const float* row_scales;  // int8
  float* to;                // rows of `width` elements
  int64_t width;
  // Prefetches: each panel `distance` bytes further on, plus `next` once that passes its end; and for the L2 cache, from
  // `ahead` on, `ahead_step` bytes at each step.
  int64_t distance, next;
  const char* ahead;
  int64_t ahead_step;
};

// Each format: the sums' type, the bytes of a row's step, add(): sums[row] += row's step times the panels' step, and
// finish(): the sum of a row and a vector of columns as floats.
struct FloatStep {
  typedef Floats Sum;
  static constexpr int64_t BYTES = 4;
  static constexpr bool TILED = false;
  static inline Floats finish(Sum sum, const Tile&, int64_t, int64_t) { return sum; }
  template <int64_t ROWS, int64_t COLUMNS>
  static inline void add(Sum (&sums)[ROWS][COLUMNS], const char* row, int64_t stride, const char* const* panels, int64_t at) {
    Floats weights[COLUMNS];
    UNROLL for (int64_t c = 0; c < COLUMNS; ++c) weights[c] = load(panels[c / VECTORS] + at + c % VECTORS * WIDTH * 4);
    UNROLL for (int64_t r = 0; r < ROWS; ++r) {
      const Floats factor = splat(*reinterpret_cast<const float*>(row + r * stride));
      UNROLL for (int64_t c = 0; c < COLUMNS; ++c) sums[r][c] += factor * weights[c];
    }
  }
};

#if defined(__AVX512BF16__)
struct BfloatStep {
  typedef Floats Sum;
  static constexpr int64_t BYTES = 4;  // two bfloat16
  static constexpr bool TILED = HAS_TILES;
  static inline Floats finish(Sum sum, const Tile&, int64_t, int64_t) { return sum; }
  template <int64_t ROWS, int64_t COLUMNS>
  static inline void add(Sum (&sums)[ROWS][COLUMNS], const char* row, int64_t stride, const char* const* panels, int64_t at) {
    Ints weights[COLUMNS];
    UNROLL for (int64_t c = 0; c < COLUMNS; ++c) weights[c] = load<Ints>(panels[c] + at);
    UNROLL for (int64_t r = 0; r < ROWS; ++r) {
      const Ints factor = splat(*reinterpret_cast<const int32_t*>(row + r * stride));
      UNROLL for (int64_t c = 0; c < COLUMNS; ++c)
        sums[r][c] = (Floats)_mm512_dpbf16_ps((__m512)sums[r][c], (__m512bh)factor, (__m512bh)weights[c]);
    }
  }
};
#else
struct BfloatStep {
  typedef Floats Sum;
  static constexpr int64_t BYTES = 8;  // two floats, rounded
  static constexpr bool TILED = false;
  static inline Floats finish(Sum sum, const Tile&, int64_t, int64_t) { return sum; }
  template <int64_t ROWS, int64_t COLUMNS>
  static inline void add(Sum (&sums)[ROWS][COLUMNS], const char* row, int64_t stride, const char* const* panels, int64_t at) {
    UNROLL for (int64_t half = 0; half < 2; ++half) {
      Floats weights[COLUMNS];
      UNROLL for (int64_t c = 0; c < COLUMNS; ++c) {
        const Ints pair = load<Ints>(panels[c / VECTORS] + at + c % VECTORS * WIDTH * 4);
        weights[c] = bits(half ? pair & int32_t(0xffff0000) : pair << 16);
      }
      UNROLL for (int64_t r = 0; r < ROWS; ++r) {
        const Floats factor = splat(*reinterpret_cast<const float*>(row + r * stride + half * 4));
        UNROLL for (int64_t c = 0; c < COLUMNS; ++c) {
          sums[r][c] += factor * weights[c];
          HERE(sums[r][c]);
        }
      }
    }
  }
};
#endif

inline Floats finish_bytes(Ints sum, const Tile& tile, int64_t row, int64_t vector, int32_t zero) {
  const int64_t column = tile.columns[vector / VECTORS] + vector % VECTORS * WIDTH;
  if (zero) sum -= load<Ints>(tile.zeros + column) * zero;
  if (tile.shifts) sum -= load<Ints>(tile.shifts + column);
  return floats(sum) * (load(tile.scale + column) * tile.row_scales[row]);
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// In each lane of 32 bits, the sum and four products of 8 bits, the factors' without a sign.
inline Ints multiply_fours(Ints sum, Ints factors, Ints weights) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)factors, (__m512i)weights);
#else
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)factors, (__m256i)weights);
#endif
}
struct ByteStep {
  typedef Ints Sum;
  static constexpr int64_t BYTES = 4;  // four integers, plus 128: the instruction wants one factor unsigned
  static constexpr bool TILED = HAS_TILES;
  static constexpr int32_t ZERO = 128;
  static inline Floats finish(Sum sum, const Tile& tile, int64_t row, int64_t vector) {
    return finish_bytes(sum, tile, row, vector, ZERO);
  }
  template <int64_t ROWS, int64_t COLUMNS>
  static inline void add(Sum (&sums)[ROWS][COLUMNS], const char* row, int64_t stride, const char* const* panels, int64_t at) {
    Ints weights[COLUMNS];
    UNROLL for (int64_t c = 0; c < COLUMNS; ++c) weights[c] = load<Ints>(panels[c / VECTORS] + at + c % VECTORS * WIDTH * 4);
    UNROLL for (int64_t r = 0; r < ROWS; ++r) {
      const Ints factor = splat(*reinterpret_cast<const int32_t*>(row + r * stride));
      UNROLL for (int64_t c = 0; c < COLUMNS; ++c) sums[r][c] = multiply_fours(sums[r][c], factor, weights[c]);
    }
  }
  static inline void write(char* to, Ints values) { store(to, __builtin_convertvector(values + ZERO, Bytes)); }
};
#else
// In each lane of 32 bits, the sum of two products of 16 bits: exact, where sums of products of 8 bits may saturate.
inline Ints multiply_pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((Ints)a << 16 >> 16) * ((Ints)b << 16 >> 16) + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}
struct ByteStep {
  typedef Ints Sum;
  static constexpr int64_t BYTES = 8;  // four integers of 16 bits: the first, third, second and fourth
  static constexpr bool TILED = false;
  static constexpr int32_t ZERO = 0;
  static inline Floats finish(Sum sum, const Tile& tile, int64_t row, int64_t vector) {
    return finish_bytes(sum, tile, row, vector, ZERO);
  }
  template <int64_t ROWS, int64_t COLUMNS>
  static inline void add(Sum (&sums)[ROWS][COLUMNS], const char* row, int64_t stride, const char* const* panels, int64_t at) {
    UNROLL for (int64_t half = 0; half < 2; ++half) {
      Shorts weights[COLUMNS];
      UNROLL for (int64_t c = 0; c < COLUMNS; ++c) {
        const Shorts four = load<Shorts>(panels[c / VECTORS] + at + c % VECTORS * WIDTH * 4);
        weights[c] = half ? four >> 8 : four << 8 >> 8;
      }
      UNROLL for (int64_t r = 0; r < ROWS; ++r) {
        const Shorts factor = (Shorts)splat(*reinterpret_cast<const int32_t*>(row + r * stride + half * 4));
        UNROLL for (int64_t c = 0; c < COLUMNS; ++c) {
          sums[r][c] += multiply_pairs(factor, weights[c]);
          HERE(sums[r][c]);
        }
      }
    }
  }
  static inline void write(char* to, Ints values) {
    int32_t all[WIDTH];
    store(all, values);
    int16_t* shorts = reinterpret_cast<int16_t*>(to);
    for (int64_t i = 0; i < WIDTH; ++i) shorts[i / 4 * 4 + (i % 4 & 1) * 2 + (i % 4 >> 1)] = int16_t(all[i]);
  }
};
#endif

template <class Step, int64_t ROWS, int64_t PANELS>
__attribute__((noinline)) void multiply(const Tile& tile) {
  const char* panels[PANELS];
  UNROLL for (int64_t p = 0; p < PANELS; ++p) panels[p] = tile.panels[p];
  const char *row = tile.row, *ahead = tile.ahead;
  const int64_t stride = tile.stride, ahead_step = tile.ahead_step;
  typename Step::Sum sums[ROWS][PANELS * VECTORS] = {};
  const int64_t bytes = tile.steps * STEP;
  int64_t at = 0, end = bytes - tile.distance, distance = tile.distance;
  for (;;) {
    for (; at < end; at += STEP, row += Step::BYTES, ahead += ahead_step) {
      UNROLL for (int64_t p = 0; p < PANELS; ++p) __builtin_prefetch(panels[p] + at + distance);
      __builtin_prefetch(ahead, 0, 2);
      Step::template add<ROWS, PANELS * VECTORS>(sums, row, stride, panels, at);
    }
    if (at >= bytes) break;
    distance += tile.next, end = bytes;
  }
  UNROLL for (int64_t r = 0; r < ROWS; ++r)
    UNROLL for (int64_t v = 0; v < PANELS * VECTORS; ++v)
      store(tile.to + r * tile.width + v * WIDTH, Step::finish(sums[r][v], tile, r, v));
}
template <class Step, int64_t ROWS = MAX_ROWS>
inline void multiply_rows(int64_t rows, const Tile& tile) {
  if (rows == ROWS) {
    multiply<Step, ROWS, panels_for(ROWS)>(tile);
  } else if constexpr (ROWS > 1) {
    multiply_rows<Step, ROWS - 1>(rows, tile);
  }
}

#if defined(__AMX_INT8__)
// The processor's tiles: 0 to 3 hold sums, 4 and 5 rows of 16 steps, 6 and 7 those steps of a panel.
struct Tiles {
  Tiles(int64_t rows) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {STEP, STEP, STEP, STEP, STEP, STEP, STEP, STEP};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    const uint8_t upper = uint8_t(least(rows, TILE_ROWS)), lower = uint8_t(rows - upper);
    for (int i : {0, 1, 4}) shapes.rows[i] = upper;
    for (int i : {2, 3, 5}) shapes.rows[i] = lower ? lower : upper;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~Tiles() { _tile_release(); }
};
#define PRODUCT(sums, rows, panel)                                                                                 \
  if constexpr (std::is_same_v<Step, ByteStep>) _tile_dpbusd(sums, rows, panel); else _tile_dpbf16ps(sums, rows, panel)

// Sums of more than 16 rows with two panels, or of up to 16 with four. `tails` are 16 steps of each panel: those
// after the last multiple of 16, and zeros.
template <class Step>
__attribute__((noinline)) void multiply_tiles(int64_t rows, const Tile& tile, const char* tails) {
  const char *row = tile.row, *const lower = row + TILE_ROWS * tile.stride;
  const bool tall = rows > TILE_ROWS;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  asm volatile("" ::: "memory");  // the compiler does not know that tiles read memory
  for (int64_t step = 0; step < tile.steps; step += TILE_ROWS) {
    const bool whole = step + TILE_ROWS <= tile.steps;
    const auto panel = [&](int64_t i) { return whole ? tile.panels[i] + step * STEP : tails + i * TILE_ROWS * STEP; };
    _tile_loadd(4, row + step * 4, tile.stride);
    _tile_loadd(6, panel(0), STEP);
    PRODUCT(0, 4, 6);
    _tile_loadd(7, panel(1), STEP);
    PRODUCT(1, 4, 7);
    if (tall) {
      _tile_loadd(5, lower + step * 4, tile.stride);
      PRODUCT(2, 5, 6);
      PRODUCT(3, 5, 7);
    } else {
      _tile_loadd(6, panel(2), STEP);
      PRODUCT(2, 4, 6);
      _tile_loadd(7, panel(3), STEP);
      PRODUCT(3, 4, 7);
    }
  }
  float* const next = tall ? tile.to + TILE_ROWS * tile.width : tile.to + 2 * PANEL;
  _tile_stored(0, tile.to, tile.width * 4);
  _tile_stored(1, tile.to + PANEL, tile.width * 4);
  _tile_stored(2, next, tile.width * 4);
  _tile_stored(3, next + PANEL, tile.width * 4);
  asm volatile("" ::: "memory");
  if constexpr (std::is_same_v<Step, ByteStep>)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t v = 0; v < (tall ? 2 : 4); ++v) {
        float* const at = tile.to + r * tile.width + v * PANEL;
        store(at, Step::finish(load<Ints>(reinterpret_cast<int32_t*>(at)), tile, r, v));
      }
}
#undef PRODUCT
#else
struct Tiles;
template <class Step>
void multiply_tiles(int64_t, const Tile&, const char*) {}
#endif

int64_t steps_of(const Linear& call) {
  return divide_up(call.depth, call.format == FLOAT32 ? 1 : call.format == BFLOAT16 ? 2 : 4);
}

// Rows whose strides are multiples of so many bytes fall onto the same few places of the first cache.
bool crowded(int64_t stride) { return stride % 4096 == 0 || (stride % 2048 == 0 && MAX_ROWS > 8); }

int64_t linear_row_bytes(const Linear& call) {
  const int64_t steps = steps_of(call);
  int64_t bytes = 0;
  if (call.format == FLOAT32) {
    if (call.rows < 4 || !crowded(call.input_stride * 4)) return 0;
    bytes = steps * FloatStep::BYTES;
  } else {
    bytes = steps * (call.format == BFLOAT16 ? BfloatStep::BYTES : ByteStep::BYTES);
  }
  bytes = divide_up(bytes, WIDTH * 8) * WIDTH * 8;  // whole vectors are written
  return crowded(bytes) ? bytes + 128 : bytes;
}

inline void store_rounded(char* to, Floats value) {
#if defined(__AVX512BF16__)
  store(to, _mm512_cvtneps_pbh((__m512)value));
#else
  const Ints word = bits(value);
  const Ints rounded = (word + 0x7fff + (word >> 16 & 1)) & int32_t(0xffff0000);
  store(to, value != value ? value : bits(rounded));
#endif
}

inline void convert_bfloat(const float* from, char* to, int64_t depth) {
  for (int64_t k = 0; k < depth; k += WIDTH) store_rounded(to + k * (BfloatStep::BYTES / 2), load(from + k, depth - k));
  if (const int64_t written = divide_up(depth, WIDTH) * WIDTH; HAS_TILES && written % 32)
    std::memset(to + written * 2, 0, 32);  // tiles multiply it by zeros
}

inline int32_t largest_lane(Ints values) {
  int32_t lanes[WIDTH], top = 0;
  store(lanes, values);
  for (int64_t i = 0; i < WIDTH; ++i) top = most(top, lanes[i]);
  return top;
}

// One row's integers, each with a factor and a shift of its own; the row's scale is 1, NaN if it holds NaN or infinity.
inline float convert_fixed(const float* from, char* to, int64_t depth, const float* rounding) {
  Ints most_bits = {};
  for (int64_t k = 0; k < depth; k += WIDTH) {
    Floats value = load(from + k, depth - k);
    const Ints size = bits(value) & 0x7fffffff;
    most_bits = size > most_bits ? size : most_bits;
    value = value * load(rounding + k, depth - k) + load(rounding + depth + k, depth - k);
    ByteStep::write(to + k * ByteStep::BYTES / 4, nearest_ints(at_most(at_least(value, splat(-127.f)), splat(127.f))));
  }
  return largest_lane(most_bits) < 0x7f800000 ? 1.f : __builtin_nanf("");
}

// One row's integers, with its scale; NaN says that the row holds NaN or infinity.
inline float convert_bytes(const float* from, char* to, int64_t depth) {
  Ints most_bits = {};
  for (int64_t k = 0; k < depth; k += WIDTH) {
    const Ints size = bits(load(from + k, depth - k)) & 0x7fffffff;
    most_bits = size > most_bits ? size : most_bits;
  }
  const int32_t top = largest_lane(most_bits);
  float largest;
  std::memcpy(&largest, &top, 4);
  const bool finite = top < 0x7f800000;
  const float lift = top < 0x10000000 ? 0x1p80f : 1.f;  // so that the inverse of a tiny scale is finite
  const float inverse = finite && largest > 0.f ? 127.f / (largest * lift) : 0.f;
  for (int64_t k = 0; k < depth; k += WIDTH) {
    Floats value = Floats{};
    if (finite) value = at_most(at_least(load(from + k, depth - k) * lift * inverse, splat(-127.f)), splat(127.f));
    ByteStep::write(to + k * ByteStep::BYTES / 4, nearest_ints(value));
  }
  return finite ? largest / 127.f : __builtin_nanf("");
}

void linear_convert(const Linear& call, int64_t first, int64_t last, char* data, float* scales) {
  const int64_t bytes = linear_row_bytes(call), depth = call.depth;
  for (int64_t row = first; row < last; ++row, data += bytes) {
    const float* from = call.input + row * call.input_stride;
    if (call.format == FLOAT32) {
      std::memcpy(data, from, size_t(depth) * 4);
    } else if (call.format == BFLOAT16) {
      convert_bfloat(from, data, depth);
    } else {
      *scales++ = call.rounding ? convert_fixed(from, data, depth, call.rounding) : convert_bytes(from, data, depth);
    }
  }
}

// A row with NaN or infinity: unrounded, times int8 weights.
inline void multiply_special(const float* row, int64_t depth, const float* factors, const char* panel, const float* scale,
                             float* to) {
  for (int64_t column = 0; column < PANEL; ++column) {
    float total = 0.f;
    for (int64_t k = 0; k < depth; ++k)
      total += row[k] * (factors ? factors[k] : 1.f) * float(int8_t(panel[k / 4 * STEP + column * 4 + k % 4]));
    to[column] = total * scale[column];
  }
}

// What follows the product: bias, activation, gate, residual.
struct Epilogue {
  const Linear& call;
  const float* sums;  // the product, in rows of `width`; with a gate, `count` columns of it and then of its factor
  int64_t width, count;
  int64_t rows, row, column;  // the place in the result
  int64_t end;                // of the columns to write: those after it are another thread's

  template <int64_t KIND>
  void run() {
    const int64_t columns = least(count, end - column);
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = sums + r * width;
      float* to = call.output + (row + r) * call.output_stride + column;
      char* const rounded = reinterpret_cast<char*>(call.output) + (row + r) * call.rounded_output + column * 2;
      const float* residual = call.residual ? call.residual + (row + r) * call.residual_stride + column : nullptr;
      for (int64_t c = 0; c < columns; c += WIDTH) {
        Floats value = load(from + c);
        if (call.bias) value += load(call.bias + column + c, columns - c);
        if (residual && call.adds_first) value += load(residual + c, columns - c);
        value = activate<KIND>(value, call.alpha, call.beta);
        if (call.gated) {
          Floats factor = load(from + count + c);
          if (call.bias) factor += load(call.bias + call.features + column + c, columns - c);
          value *= factor;
        }
        if (residual && !call.adds_first) value += load(residual + c, columns - c);
        if (call.rounded_output)
          store_rounded(rounded + c * 2, value);
        else
          store(to + c, value, columns - c);
      }
    }
  }
};

template <class Step>
constexpr int64_t rows_of = Step::TILED ? 2 * TILE_ROWS : MAX_ROWS;  // of a tile

template <class Step>
void tiles(const Linear& call, Rows rows, int64_t first, int64_t last, int64_t first_panel, int64_t last_panel) {
  const int64_t count = last - first, halves = call.gated ? 2 : 1;
  const int64_t along = divide_up(count, rows_of<Step>), height = divide_up(count, along);
  const int64_t at_once = !Step::TILED ? panels_for(height) : height > TILE_ROWS ? 2 : 4;
  const int64_t group = at_once % halves ? at_once : at_once / halves, width = group * halves * PANEL;  // panels of the result
  const int64_t steps = steps_of(call), panel_bytes = steps * STEP, all_panels = divide_up(call.features, PANEL);
  const int32_t* shifts = call.rounding ? call.sums + all_panels * halves * PANEL : nullptr;
  alignas(64) float sums[MAX_ROWS * MOST_PANELS * PANEL];
  alignas(64) char tails[Step::TILED ? 4 * TILE_ROWS * STEP : 1] = {};
  [[maybe_unused]] const std::conditional_t<Step::TILED, Tiles, int64_t> shaped(height);
  for (int64_t panel = first_panel; panel < last_panel; panel += group) {
    const char* panels[MOST_PANELS];
    int64_t columns[MOST_PANELS];
    for (int64_t i = 0; i < group * halves; ++i) {  // beyond the last panel, that one is computed again, and not used
      const int64_t place = least(panel + i % group, all_panels - 1) + i / group * all_panels;
      panels[i] = static_cast<const char*>(call.panels) + place * panel_bytes;
      columns[i] = place * PANEL;
      if (const int64_t rest = steps % TILE_ROWS; Step::TILED && rest)
        std::memcpy(tails + i * TILE_ROWS * STEP, panels[i] + (steps - rest) * STEP, size_t(rest * STEP));
    }
    for (int64_t t = 0; t < along; ++t) {
      int64_t row = first + count * t / along, some = first + count * (t + 1) / along - row;
      // All of one shape, some rows computed twice: to change the shape takes as long as a product.
      if (Step::TILED) row = least(first + t * height, last - height), some = height;
      const float* row_scales = call.format == INT8 ? rows.scales + (row - first) : nullptr;
      // Memory to write to comes while the product runs: an eighth of the time less from 1,024 features to 3,072.
      const int64_t pitch = call.rounded_output ? call.rounded_output : call.output_stride * 4;
      for (int64_t r = 0; Step::TILED && r < some; ++r)
        for (int64_t c = 0, size = call.rounded_output ? 2 : 4; c < group * PANEL * size; c += 64)
          __builtin_prefetch(reinterpret_cast<char*>(call.output) + (row + r) * pitch + panel * PANEL * size + c, 1);
      for (int64_t i = 0; i < group * halves; i += at_once) {
        // Each tile asks for its share of the next panels; a single one looks farther ahead in its own.
        const char* ahead = along > 1 ? panels[i] + group * panel_bytes + t * at_once * panel_bytes / along : rows.data;
        const Tile tile{rows.data + (row - first) * rows.stride, rows.stride, steps, panels + i, columns + i, call.scale,
                        call.sums, shifts, row_scales, sums + i * PANEL, width, (along > 1 ? 16 : AHEAD / at_once) * STEP,
                        along > 1 ? 0 : (group - 1) * panel_bytes, ahead, along > 1 ? at_once * STEP / along : 0};
        if constexpr (Step::TILED)
          multiply_tiles<Step>(some, tile, tails);
        else
          multiply_rows<Step>(some, tile);
      }
      if (row_scales)
        for (int64_t r = 0; r < some; ++r)
          for (int64_t i = 0; row_scales[r] != row_scales[r] && i < group * halves; ++i)
            multiply_special(call.input + (row + r) * call.input_stride, call.depth, call.rounding, panels[i],
                             call.scale + columns[i], sums + r * width + i * PANEL);
      Epilogue epilogue{call, sums, width, group * PANEL, some, row, panel * PANEL, least(call.features, last_panel * PANEL)};
      with_activation(call.activation, epilogue);
    }
  }
}

void linear_tiles(const Linear& call, Rows rows, int64_t first, int64_t last, int64_t first_panel, int64_t last_panel) {
  if (call.format == FLOAT32) return tiles<FloatStep>(call, rows, first, last, first_panel, last_panel);
  if (call.format == BFLOAT16) return tiles<BfloatStep>(call, rows, first, last, first_panel, last_panel);
  tiles<ByteStep>(call, rows, first, last, first_panel, last_panel);
}

void linear_norm(const Linear& call, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    float* at = call.output + row * call.features;
    norm_row(at, at, call.features, call.norm, call.norm_weight, call.norm_bias, call.epsilon);
  }
}

}  // namespace
