// A spinning thread's breath.
#pragma once
#include <sched.h>

#include <atomic>

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Until `left` is 0. What it waits for is being computed by another thread, or that thread waits for a core.
inline void wait_for_zero(const std::atomic<int>& left) {
  for (int turn = 0; left.load(std::memory_order_acquire) != 0; ++turn) {
    if (turn < 2000) pause_briefly();
    else sched_yield();
  }
}
