// How a product is split: blocks of rows that stay in the L2 cache, and pieces of a block for threads.
#include <unistd.h>

#include <vector>

#include "kernels.h"
#include "threads.h"

namespace {

// Of rows, for each thread. Each block reads the weights again, which counts where few rows fit: an L2 cache of 2 MB has room
// for twice as many (1,024 features from 4,096 in float32: 6 to 14 % less time).
constexpr int64_t BLOCK_BYTES = 512 << 10, FEW_ROWS = 96, LARGE_CACHE = 2 << 20;

bool has_large_cache() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const bool large = sysconf(_SC_LEVEL2_CACHE_SIZE) >= LARGE_CACHE;
  return large;
#else
  return false;
#endif
}

}  // namespace

void run_linear(const Linear& call) {
  run_linear(call, [&](int64_t first, int64_t last, char* data, float* scales) {
    kernels().linear_convert(call, first, last, data, scales);
  });
}

void run_linear(const Linear& call, const Convert& convert) {
  const Kernels& unit = kernels();
  const int64_t row_bytes = call.rounded_input ? 0 : unit.linear_row_bytes(call), all_panels = divide_up(call.features, 16);
  const double weights = double(call.depth) * double(call.features) * (call.gated ? 2 : 1);
  const int64_t most_rows = unit.most_rows[call.format];
  const double slow = call.format == FLOAT32 ? 50 : call.format == BFLOAT16 ? 75 : 150;  // products a nanosecond
  const double speed = most_rows > 16 ? slow * 8 : slow;                                 // AMX
  const double nanoseconds = weights * double(call.rows) / speed + weights * (4 >> call.format) / 20;
  const int64_t threads = threads_for(nanoseconds);
  const int64_t pitch = call.rounded_input ? call.rounded_input : call.input_stride * 4;  // from row to row of the input
  const int64_t bytes = row_bytes ? row_bytes : call.depth * (call.rounded_input ? 2 : 4);
  const int64_t fitting = BLOCK_BYTES / (bytes ? bytes : 1), twice = fitting < FEW_ROWS && has_large_cache() ? 2 : 1;
  const int64_t wanted = fitting * twice / most_rows * most_rows;
  const int64_t part = wanted < 2 * most_rows ? 2 * most_rows : wanted;  // rows that one piece takes
  const int64_t block = part * threads;
  for (int64_t first = 0; first < call.rows; first += block) {
    const int64_t last = first + block < call.rows ? first + block : call.rows, rows = last - first;
    const double share = nanoseconds * double(rows) / double(call.rows);
    char* data = nullptr;
    float* scales = nullptr;
    if (row_bytes) {
      data = scratch(size_t(rows) * size_t(row_bytes + 4));
      scales = reinterpret_cast<float*>(data + rows * row_bytes);
      const int64_t chunk = divide_up(rows, threads * 2);
      run_pieces(divide_up(rows, chunk), double(rows) * double(call.depth) / 4, [&](int64_t piece) {
        const int64_t from = piece * chunk, to = from + chunk < rows ? from + chunk : rows;
        if (from < to)
          convert(first + from, first + to, data + from * row_bytes, scales + from);
      });
    }
    // A piece is some rows and some columns; the last one done with its rows norms them.
    const int64_t row_pieces = divide_up(rows, part), row_size = divide_up(rows, row_pieces);
    const int64_t few = most_rows > 16 ? 16 : 4, tall = most_rows > 16 ? 2 : 3;  // AMX: 2
    const int64_t at_once = row_size > few ? tall : row_size > 1 ? 4 : 8;        // panels of a tile
    const bool shares = threads > 1 && row_pieces < threads * 4 && all_panels;
    const int64_t tiles = divide_up(all_panels, at_once);
    const int64_t columns = shares ? fair_part(tiles, threads, 4, row_pieces) * at_once : all_panels + !all_panels;
    const int64_t column_pieces = divide_up(all_panels, columns);
    std::vector<std::atomic<int64_t>> done(call.norm ? size_t(row_pieces) : 0);
    run_pieces(row_pieces * column_pieces, share, [&](int64_t piece) {
      const int64_t which = piece / column_pieces, panel = piece % column_pieces * columns;
      const int64_t from = which * row_size, to = from + row_size < rows ? from + row_size : rows;
      if (from >= to) return;
      Rows converted{reinterpret_cast<const char*>(call.input) + (first + from) * pitch, pitch, nullptr};
      if (row_bytes) converted = {data + from * row_bytes, row_bytes, scales + from};
      unit.linear_tiles(call, converted, first + from, first + to, panel,
                        panel + columns < all_panels ? panel + columns : all_panels);
      if (call.norm && done[size_t(which)].fetch_add(1) + 1 == column_pieces)
        unit.linear_norm(call, first + from, first + to);
    });
  }
}
