// Weights that are multiplied as they lie in memory.
#pragma once

namespace {

// Products that need no scale before all columns are summed up, so that weights are multiplied as they lie in memory.
// int8 by int8, one scale a row of activations: 127 * 255 * 65536 < 2^31. Weights are stored with 128 added; where that
// is how they are multiplied, a row's sum starts with what that adds, which follows its scale.
struct Bytes {
  using Sum = I32;
  INLINE static W8 load(const uint8_t* p) { return load_w8(p); }
  INLINE static Sum first(const float* scales, int rows, int r) { return set1_i(int_at(scales + rows + r)); }
  template <class Word>
  INLINE static void dot(Sum& sum, const W8& w, const Word& a) {
    dot_fours(sum, w, a);
  }
  INLINE static F32 result(const Sum& sum, const F32& weight_scale, const float* scales, int r) {
    return mul(to_float(sum), mul(weight_scale, set1(scales[r])));
  }
};
// bf16 by bf16, where there are instructions for that: one float sum over all columns, in their order.
struct Bf16Pairs {
  using Sum = F32;
  INLINE static W16 load(const uint8_t* p) { return load_w16(p); }
  INLINE static Sum first(const float*, int, int) { return zero_f(); }
  template <class Word>
  INLINE static void dot(Sum& sum, const W16& w, const Word& a) {
    dot_bf16(sum, w, a);
  }
  INLINE static F32 result(const Sum& sum, const F32&, const float*, int) { return sum; }
};

template <class Product, int kRows, int kBlocks>
void stream_pass(const Pass* p, const int32_t* words, const float* scales, float* out, int stride) {
  typename Product::Sum sum[kBlocks][kRows];
  UNROLL for (int r = 0; r < kRows; ++r)
    UNROLL for (int b = 0; b < kBlocks; ++b) sum[b][r] = Product::first(scales, kRows, r);
  for (int unit = 0; unit < p->m.words; unit += kUnit, words += kUnit * kRows)
    UNROLL for (int i = 0; i < kUnit; ++i) {
      const int64_t at = p->m.head_bytes + int64_t{unit + i} * 4 * kLanes;
      const auto upper = Product::load(p[0].block + at);
      if constexpr (kBlocks == 1) {
        UNROLL for (int r = 0; r < kRows; ++r) Product::dot(sum[0][r], upper, words[r * kUnit + i]);
      } else {
        const auto lower = Product::load(p[1].block + at);
        UNROLL for (int r = 0; r < kRows; ++r) {
          const auto all = broadcast(words[r * kUnit + i]);
          Product::dot(sum[0][r], upper, all), Product::dot(sum[1][r], lower, all);
        }
      }
    }
  UNROLL for (int b = 0; b < kBlocks; ++b) {
    const F32 weight_scale = scales_at(Cursor(p[b]), set1(1));
    UNROLL for (int r = 0; r < kRows; ++r)
      store_f(out + b * stride + r * kLanes, Product::result(sum[b][r], weight_scale, scales, r));
  }
}

}  // namespace
