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

class Team {
 public:
  static constexpr uint64_t COUNT = uint64_t(1) << 32;  // a step has fewer pieces
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
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      if (driven.exchange(true)) return team.work();
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
    pieces_ = pieces;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t next = (open_.load(std::memory_order_relaxed) / COUNT + 1) * COUNT;
    open_.store(next + uint64_t(pieces), std::memory_order_release);
    while (take()) {
    }
    for (int64_t idle = 0; done_.load(std::memory_order_acquire) != pieces;) rest(idle);
    if (error_) std::rethrow_exception(error_);
  }

 private:
  explicit Team(int64_t threads) : threads(threads) {}

  void work() {
    for (int64_t idle = 0; !ended_.load(std::memory_order_acquire);) {
      if (take())
        idle = 0;
      else
        rest(idle);
    }
  }

  // Takes a piece and does it; false where none is open. Who has taken one keeps the step from ending, so that what the
  // step set is read only after.
  bool take() {
    uint64_t open = open_.load(std::memory_order_acquire);
    do {
      if (open % COUNT == 0) return false;
    } while (!open_.compare_exchange_weak(open, open - 1, std::memory_order_acquire));
    try {
      call_(function_, pieces_ - int64_t(open % COUNT));
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  static void rest(int64_t& idle) {
    if (++idle > 1000) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  std::atomic<uint64_t> open_{0};  // which step, times COUNT, plus how many of its pieces nobody has taken
  std::atomic<int64_t> done_{0};
  std::atomic<bool> ended_{false}, failed_{false};
  std::exception_ptr error_;
  void (*call_)(const void*, int64_t) = nullptr;
  const void* function_ = nullptr;
  int64_t pieces_ = 0;
};
