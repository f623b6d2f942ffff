// Work in pieces, on torch's threads. For files that are compiled once: units do not include this.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>

#include "team.h"

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Below this a parallel region, and a step of a team, cost more than they gain.
constexpr double WORTH_THREADS = 50e3, WORTH_TEAM = 15e3;  // nanoseconds

inline int64_t threads_for(double nanoseconds) {
  if (const Team* team = Team::current()) return nanoseconds < WORTH_TEAM ? 1 : team->threads;
  return nanoseconds < WORTH_THREADS ? 1 : int64_t(torch::stable::get_num_threads());
}

// Calls function(piece) for each piece. Threads draw the next piece when they are done with one: where a neighbour
// holds a core up, the other threads do its share.
template <class Function>
void run_pieces(int64_t pieces, double nanoseconds, const Function& function) {
  int64_t threads = threads_for(nanoseconds);
  if (threads > pieces) threads = pieces;
  if (threads <= 1) {
    for (int64_t piece = 0; piece < pieces; ++piece) function(piece);
    return;
  }
  Team* team = Team::current();
  if (team && pieces <= Team::MOST_PIECES) return team->run_pieces(pieces, function);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin)
      for (int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) function(piece);
  });
}

// The part of `total`, each of them split into `of_part` pieces, that leaves the busiest thread the least work; two to `most`
// pieces for each thread.
inline int64_t fair_part(int64_t total, int64_t threads, int64_t most, int64_t of_part = 1) {
  int64_t best = total, least = INT64_MAX;
  for (int64_t pieces = threads * 2; pieces <= threads * most; ++pieces) {
    const int64_t part = divide_up(total, divide_up(pieces, of_part));
    const int64_t share = divide_up(divide_up(total, part) * of_part, threads) * part;
    if (share < least) best = part, least = share;
  }
  return best;
}

// Computes a product whose rows a function converts, instead of the unit's; linear.cpp.
struct Linear;
typedef std::function<void(int64_t first, int64_t last, char* data, float* scales)> Convert;
void run_linear(const Linear&, const Convert& convert);

// This thread's memory for data that lasts no longer than a call; it never shrinks. Aligned to 64 bytes. Each USE has
// memory of its own: the kernels', and the arena of a plan that calls them.
enum Use { KERNELS, ARENA, WEIGHTS, PIXELS };
template <Use USE = KERNELS>
inline char* scratch(size_t bytes) {
  struct Memory {
    char* data = nullptr;
    size_t size = 0;
    ~Memory() { std::free(data); }
  };
  thread_local Memory memory;
  if (memory.size < bytes) {
    std::free(memory.data);
    memory.size = 0;
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    memory.data = static_cast<char*>(std::aligned_alloc(64, rounded));
    if (!memory.data) throw std::bad_alloc();
    memory.size = rounded;
  }
  return memory.data;
}
