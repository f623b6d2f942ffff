// Torch's threads, held together for as long as a plan runs. For files that are compiled once: units do not include this.
//
// Between parallel regions of OpenMP every thread waits for every other, also for one that had nothing to do and only has
// to be scheduled for that: with a busy neighbour, a time slice of the system for each region. Here a step of the plan is
// done when its pieces are, whoever did them, and one region holds all steps.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

class Team {
 public:
  static constexpr int64_t MOST_PIECES = (int64_t(1) << 20) - 1;  // of a step
  const int64_t threads;

  // The team that the calling thread drives, or null.
  static Team*& current() {
    thread_local Team* team = nullptr;
    return team;
  }

  // Calls `body` on the first of torch's threads that comes; its calls of `run_pieces` are shared with the others.
  template <class Body>
  static void run(int64_t threads, const Body& body) {
    if (threads <= 1) return body();
    Team team(threads);
    std::atomic<bool> driven{false};
    std::exception_ptr error;
    torch::stable::parallel_for(0, threads, 1, [&](int64_t thread, int64_t) {
      if (driven.exchange(true)) return team.work(thread);
      team.driver_ = thread;
      current() = &team;
      try {
        body();
      } catch (...) {
        error = std::current_exception();
      }
      current() = nullptr;
      team.ended_.store(true, std::memory_order_release);
    });
    if (error) std::rethrow_exception(error);
  }

  // Calls function(piece) for each piece, on whatever threads are free, and returns when all are done.
  template <class Function>
  void run_pieces(int64_t pieces, const Function& function) {
    call_ = [](const void* called, int64_t piece) { (*static_cast<const Function*>(called))(piece); };
    function_ = &function;
    done_.store(0, std::memory_order_relaxed);
    ++step_;
    for (int64_t i = 0; i < threads; ++i) {
      const Share share{step_, uint64_t(pieces * i / threads), uint64_t(pieces * (i + 1) / threads)};
      shares_[size_t(i)].packed.store(share.packed(), std::memory_order_release);
    }
    while (take(driver_)) {
    }
    for (int64_t idle = 0; done_.load(std::memory_order_acquire) != pieces;) rest(idle);
    if (error_) std::rethrow_exception(error_);
  }

 private:
  // The pieces of a step that a thread begins with, and that nobody has taken. The step is part of the number, so that
  // whoever has read that of an earlier step takes nothing.
  struct Share {
    uint64_t step, next, end;
    static Share of(uint64_t packed) { return {packed >> 40, packed >> 20 & MOST_PIECES, packed & MOST_PIECES}; }
    uint64_t packed() const { return step << 40 | next << 20 | end; }
  };
  struct alignas(64) Slot {
    std::atomic<uint64_t> packed{0};
  };

  explicit Team(int64_t threads) : threads(threads), shares_(size_t(threads)) {}

  void work(int64_t thread) {
    for (int64_t idle = 0; !ended_.load(std::memory_order_acquire);) {
      if (take(thread))
        idle = 0;
      else
        rest(idle);
    }
  }

  // Takes a piece and does it; false where none is left. A thread takes its own share from the front, so that it reads what
  // it wrote in the step before, and then those of others from the back. Who has taken a piece keeps the step from
  // ending, so that what the step set is read only after.
  bool take(int64_t thread) {
    for (int64_t i = 0; i < threads; ++i) {
      std::atomic<uint64_t>& packed = shares_[size_t((thread + i) % threads)].packed;
      for (uint64_t known = packed.load(std::memory_order_acquire);;) {
        Share share = Share::of(known);
        if (share.next == share.end) break;
        const int64_t piece = int64_t(i == 0 ? share.next++ : --share.end);
        if (packed.compare_exchange_weak(known, share.packed(), std::memory_order_acquire)) return perform(piece), true;
      }
    }
    return false;
  }

  void perform(int64_t piece) {
    try {
      call_(function_, piece);
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
    done_.fetch_add(1, std::memory_order_release);
  }

  static void rest(int64_t& idle) {
    if (++idle > 1000) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  std::vector<Slot> shares_;  // one for each thread
  std::atomic<int64_t> done_{0};
  std::atomic<bool> ended_{false}, failed_{false};
  std::exception_ptr error_;
  void (*call_)(const void*, int64_t) = nullptr;
  const void* function_ = nullptr;
  uint64_t step_ = 0;
  int64_t driver_ = 0;
};
