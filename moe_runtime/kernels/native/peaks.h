// What the machine can do at best.
#pragma once

namespace {

// Twelve sums of kLanes, more than the latency of a multiplication asks for. They begin differently and what is
// multiplied changes at every step, or compilers would multiply once.
constexpr int kPeakSums = 12, kPeakSteps = 16;
volatile float peak_sink;

double peak_float(int64_t repeats) {
  float steps[kPeakSteps * kLanes] = {0.5f, 0.25f};
  F32 sum[kPeakSums];
  UNROLL for (int s = 0; s < kPeakSums; ++s) sum[s] = set1(static_cast<float>(s));
  for (int64_t i = 0; i < repeats; ++i) {
    const F32 x = load_f(steps + i % kPeakSteps * kLanes);
    UNROLL for (auto& s : sum) s = fma(s, x, x);
  }
  float out[kLanes];
  UNROLL for (auto& s : sum) store_f(out, s), peak_sink = out[0] + out[kLanes - 1];
  return 2.0 * kPeakSums * kLanes * static_cast<double>(repeats);
}

template <class Step>
INLINE void peak_whole(int64_t repeats, Step step) {
  int32_t steps[kPeakSteps * kPeakSums] = {1, 2, 3};
  I32 sum[kPeakSums];
  UNROLL for (int s = 0; s < kPeakSums; ++s) sum[s] = set1_i(s);
  for (int64_t i = 0; i < repeats; ++i) {
    const int32_t* a = steps + i % kPeakSteps * kPeakSums;
    UNROLL for (int s = 0; s < kPeakSums; ++s) step(sum[s], a[s]);
  }
  float out[kLanes];
  UNROLL for (auto& s : sum) store_f(out, to_float(s)), peak_sink = out[0] + out[kLanes - 1];
}

double peak_pairs(int64_t repeats) {
  const uint8_t ones[sizeof(W16)] = {1, 0, 1};
  const W16 w = load_w16(ones);
  peak_whole(repeats, [&](I32& s, const int32_t& a) { dot_pairs(s, w, a); });
  return 4.0 * kPeakSums * kLanes * static_cast<double>(repeats);
}

double peak_bytes(int64_t repeats) {
  const uint8_t ones[64] = {1, 0, 1};
  const W8 w = load_w8(ones);
  peak_whole(repeats, [&](I32& s, const int32_t& a) { dot_fours(s, w, a); });
  return 8.0 * kPeakSums * kLanes * static_cast<double>(repeats);
}

int64_t read(const uint8_t* start, int64_t bytes) {
  I32 sum[4] = {zero_i(), zero_i(), zero_i(), zero_i()};
  for (int64_t at = 0; at + 256 <= bytes; at += 256)
    for (int i = 0; i < 4; ++i) sum[i] = add(sum[i], load_i(start + at + 64 * i));
  float out[kLanes];
  store_f(out, to_float(add(add(sum[0], sum[1]), add(sum[2], sum[3]))));
  return static_cast<int64_t>(out[0]);
}

}  // namespace
