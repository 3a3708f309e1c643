// Floats, and what becomes floats as it is read.
#pragma once

namespace {

// Where two columns of floats come from.
struct E4m3 {
  static constexpr int kBytes = 1;
  INLINE static void load(const uint8_t* p, F32& even, F32& odd) { pair_from_e4m3(p, even, odd); }
};
struct Bf16 {
  static constexpr int kBytes = 2;
  INLINE static void load(const uint8_t* p, F32& even, F32& odd) { pair_from_bf16(p, even, odd); }
};
struct Fp16 {
  static constexpr int kBytes = 2;
  INLINE static void load(const uint8_t* p, F32& even, F32& odd) {
    even = from_fp16(p), odd = from_fp16(p + 2 * kLanes);
  }
};
struct Fp32 {
  static constexpr int kBytes = 4;
  INLINE static void load(const uint8_t* p, F32& even, F32& odd) {
    even = load_f(reinterpret_cast<const float*>(p)), odd = load_f(reinterpret_cast<const float*>(p) + kLanes);
  }
};

// kBlocks at once, since a row alone waits for its own sum.
template <class Source, int kRows, int kBlocks, bool kTile>
void float_pass(const Pass* p, const int32_t* words, const float*, float* out, int stride) {
  const MoeMatrix& m = p->m;
  F32 sum[kBlocks][kRows];
  UNROLL for (int b = 0; b < kBlocks; ++b)
    UNROLL for (int r = 0; r < kRows; ++r) sum[b][r] = p->first ? load_f(out + b * stride + r * kLanes) : zero_f();
  Cursor cursor[2] = {Cursor(p[0]), Cursor(p[kBlocks - 1])};
  const F32 unit = set1(p->unit);
  for (int span = p->first; span < p->last; ++span) {
    F32 part[kBlocks][kRows];
    UNROLL for (int b = 0; b < kBlocks; ++b)
      UNROLL for (int r = 0; r < kRows; ++r) part[b][r] = zero_f();
    const uint8_t* from[kBlocks];
    UNROLL for (int b = 0; b < kBlocks; ++b)
      from[b] = kTile ? p[b].tile + int64_t{span - p->first} * m.span * kLanes * Source::kBytes : cursor[b].values;
    const int columns = columns_of(m, span);
    const float* a = reinterpret_cast<const float*>(words) + int64_t{span} * m.span * kRows;
    for (int k = 0; k < columns; k += kUnit, a += kUnit * kRows) {
      UNROLL for (int i = 0; i < kUnit; i += 2)
        UNROLL for (int b = 0; b < kBlocks; ++b) {
          F32 even, odd;
          Source::load(from[b] + (k + i) * kLanes * Source::kBytes, even, odd);
          UNROLL for (int r = 0; r < kRows; ++r) part[b][r] = fma(even, set1(a[r * kUnit + i]), part[b][r]);
          UNROLL for (int r = 0; r < kRows; ++r) part[b][r] = fma(odd, set1(a[r * kUnit + i + 1]), part[b][r]);
        }
    }
    UNROLL for (int b = 0; b < kBlocks; ++b) {
      const F32 scale = scales_at(cursor[b], unit);
      UNROLL for (int r = 0; r < kRows; ++r) sum[b][r] = fma(part[b][r], scale, sum[b][r]);
      cursor[b].next();
    }
  }
  UNROLL for (int b = 0; b < kBlocks; ++b)
    UNROLL for (int r = 0; r < kRows; ++r) store_f(out + b * stride + r * kLanes, sum[b][r]);
}

}  // namespace
