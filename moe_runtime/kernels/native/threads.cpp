#include "threads.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "pause.h"

namespace {

using Clock = std::chrono::steady_clock;
// Waking a sleeping core costs tens of microseconds, so a worker looks out for the next call that long; more would take
// the core from others.
constexpr auto kSpin = std::chrono::microseconds(30);

// True as soon as done() is; false after kSpin.
template <class Done>
bool spin(Done done) {
  const auto until = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      pause_briefly();
    }
  } while (Clock::now() < until);
  return done();
}

class Pool {
 public:
  void run(int threads, void (*work)(void*, int), void* argument) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (threads < 2 || !turn.owns_lock()) return work(argument, 0);
    grow(threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = work, argument_ = argument, open_ = threads - 1, entered_ = 0;
      call_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    work(argument, 0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      open_ = 0;
    }
    if (spin([&] { return inside_.load(std::memory_order_acquire) == 0; })) return;
    std::unique_lock<std::mutex> lock(mutex_);
    left_.wait(lock, [&] { return inside_.load(std::memory_order_acquire) == 0; });
  }

 private:
  void grow(int workers) {
    for (; workers_ < workers; ++workers_) {
      // Signals belong to the threads of whoever loaded this library.
      sigset_t all, before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {  // no more threads are to be had: those that are here do the work
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return;
      }
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
  }

  [[noreturn]] void serve() {
    unsigned seen = 0;
    for (;;) {
      spin([&] { return call_.load(std::memory_order_acquire) != seen; });
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return call_.load(std::memory_order_relaxed) != seen; });
      seen = call_.load(std::memory_order_relaxed);
      if (!open_) continue;
      --open_;
      inside_.fetch_add(1, std::memory_order_relaxed);
      const int number = ++entered_;
      auto* const work = work_;
      void* const argument = argument_;
      lock.unlock();
      work(argument, number);
      // The last one out tells the caller, who may be asleep; under the lock, so that no wake-up is lost.
      if (inside_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        lock.lock();
        left_.notify_one();
      }
    }
  }

  std::mutex turn_;  // held by the call that has the workers
  std::mutex mutex_;
  std::condition_variable wake_, left_;
  std::atomic<unsigned> call_{0};
  std::atomic<int> inside_{0};
  int workers_ = 0, open_ = 0, entered_ = 0;
  void (*work_)(void*, int) = nullptr;
  void* argument_ = nullptr;
};

// Never destroyed: workers sleep in it until the process ends. A forked child has no workers and perhaps locked
// mutexes, so it starts with a new one.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
  Pool* here = pool.load(std::memory_order_acquire);
  if (here) return *here;
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); }); });
  Pool* made = new Pool;
  if (pool.compare_exchange_strong(here, made)) return *made;
  delete made;
  return *here;
}

}  // namespace

void run_on_threads(int threads, void (*work)(void*, int), void* argument) {
  the_pool().run(threads < kMostThreads ? threads : kMostThreads, work, argument);
}
