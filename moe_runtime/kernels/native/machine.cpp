// Which instruction sets there are, and what this machine does at best: the yardsticks of benchmarks/bench_kernels.py.
#include <atomic>
#include <chrono>
#include <cstring>

#include "kernel_table.h"
#include "threads.h"

namespace {

using Lookup = const KernelTable* (*)();
constexpr Lookup kLookups[] = {avx512bf16_kernels, avx512_kernels, avx2_kernels, portable_kernels};
constexpr int kIsas = sizeof kLookups / sizeof *kLookups;

struct Measurement {
  std::atomic<int> ready{0}, next{0};
  int threads;
  const KernelTable* kernels;
  double (*peak)(int64_t);
  int64_t repeats;
  const uint8_t* start;
  int64_t bytes;
};

constexpr int64_t kPiece = 1 << 20;

}  // namespace

const KernelTable* kernels_of(int32_t isa) { return isa >= 0 && isa < kIsas ? kLookups[isa]() : nullptr; }

MOE_API int32_t moe_isa(const char* name) {
  for (int isa = 0; isa < kIsas; ++isa)
    if (const KernelTable* kernels = kernels_of(isa))
      if (!*name || !std::strcmp(name, kernels->name)) return isa;
  return -1;
}

namespace {

double seconds(Measurement& measurement, void (*work)(void*, int)) {
  const auto start = std::chrono::steady_clock::now();
  run_on_threads(measurement.threads, work, &measurement);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

MOE_API double moe_peak(int32_t isa, const char* kind, int32_t threads, int64_t repeats) {
  const KernelTable* kernels = kernels_of(isa);
  Measurement measurement;
  measurement.threads = threads, measurement.repeats = repeats;
  measurement.peak = !std::strcmp(kind, "float")   ? kernels->peak_float
                     : !std::strcmp(kind, "pairs") ? kernels->peak_pairs
                                                   : kernels->peak_bytes;
  // Pieces that the threads take: a worker that comes late does fewer.
  const auto work = [](void* argument, int) {
    auto& m = *static_cast<Measurement*>(argument);
    while (m.next.fetch_add(1) < 32 * m.threads) m.peak(m.repeats);
  };
  const double taken = seconds(measurement, work);
  return measurement.peak(0) + 32.0 * threads * (measurement.peak(1)) * static_cast<double>(repeats) / taken;
}

MOE_API double moe_read_bandwidth(const uint8_t* start, int64_t bytes, int32_t threads, int32_t isa) {
  Measurement measurement;
  measurement.threads = threads, measurement.kernels = kernels_of(isa);
  measurement.start = start, measurement.bytes = bytes;
  const auto work = [](void* argument, int) {
    auto& m = *static_cast<Measurement*>(argument);
    for (;;) {
      const int64_t at = m.next.fetch_add(1) * kPiece;
      if (at >= m.bytes) return;
      m.kernels->read(m.start + at, m.bytes - at < kPiece ? m.bytes - at : kPiece);
    }
  };
  return static_cast<double>(bytes) / seconds(measurement, work);
}
