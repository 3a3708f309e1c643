// Whole numbers: int16 pairs of weights, read or widened, by int16 pairs of activations.
#pragma once

namespace {

// Where pairs of columns come from, kStep at a time; `pair` counts from the beginning of the span.
struct Int8 {
  static constexpr int kStep = 4;
  static constexpr bool kParted = false;
  const uint8_t* at = nullptr;
  INLINE explicit Int8(const Pass&) {}
  INLINE void begin(const Cursor& c) { at = c.values; }
  INLINE void load(int pair, W16 (&w)[kStep]) const {
    const uint8_t* here = at + int64_t{pair} * 2 * kLanes;
    UNROLL for (int j = 0; j < kStep; ++j) w[j] = widen(here + 2 * j * kLanes);
  }
};
template <bool kZeros>
struct Codes {
  static constexpr int kStep = 4;
  static constexpr bool kParted = false;
  const uint8_t* at = nullptr;
  CodeTable table;
  W16 zero;
  INLINE explicit Codes(const Pass& p) : table(numbers(p.m)), zero(both(p.block)) {}
  INLINE static const int8_t* numbers(const MoeMatrix& m) {
    return m.values == kE2m1 ? kTwiceE2m1 : kZeros ? kUnsigned4 : kSigned4;
  }
  INLINE void begin(const Cursor& c) {
    at = c.values;
    if (kZeros) zero = both(c.zeros);
  }
  INLINE void load(int pair, W16 (&w)[kStep]) const {
    table.look_up(at + int64_t{pair} * kLanes, w);
    if (kZeros)
      UNROLL for (int j = 0; j < kStep; ++j) w[j] = sub(w[j], zero);
  }
};
// Codes of int4 as they are, every other one sixteenfold, which saves most of the shifting: the sums of the latter are
// divided by 16, and the zero point's share is taken off, once a span. 32767 * 240 * 64 < 2^29.
struct Int4 {
  static constexpr int kStep = 4;
  static constexpr bool kParted = true;
  const uint8_t* at = nullptr;
  INLINE explicit Int4(const Pass&) {}
  INLINE void begin(const Cursor& c) { at = c.values; }
  INLINE void load(int pair, W16 (&w)[kStep]) const { part_codes(at + int64_t{pair} * kLanes, w); }
};
struct Tile16 {
  static constexpr int kStep = 1;
  static constexpr bool kParted = false;
  const uint8_t *at = nullptr, *next;
  INLINE explicit Tile16(const Pass& p) : next(p.tile) {}
  INLINE void begin(const Cursor& c) { at = next, next += c.m.span / 2 * sizeof(W16); }
  INLINE void load(int pair, W16 (&w)[kStep]) const { w[0] = load_w16(at + int64_t{pair} * sizeof(W16)); }
};

// Of kBlocks blocks, whose products are `stride` apart. Rows alone would leave the multipliers waiting for their own
// sums: they get several sums each, which add up exactly.
template <class Source, int kRows, int kBlocks>
void whole_pass(const Pass* p, const int32_t* words, const float* scales, float* out, int stride) {
  constexpr int kStep = Source::kStep, kSums = kRows * kBlocks;
  constexpr int kChains = kSums == 1 ? 4 : kSums < 4 || Source::kParted ? 2 : 1;
  const MoeMatrix& m = p->m;
  Source source[2] = {Source(p[0]), Source(p[kBlocks - 1])};
  Cursor cursor[2] = {Cursor(p[0]), Cursor(p[kBlocks - 1])};
  const F32 unit = set1(p->unit);
  F32 sum[kBlocks][kRows];
  UNROLL for (int b = 0; b < kBlocks; ++b)
    UNROLL for (int r = 0; r < kRows; ++r) sum[b][r] = p->first ? load_f(out + b * stride + r * kLanes) : zero_f();
  for (int span = p->first; span < p->last; ++span) {
    I32 part[kBlocks][kRows][kChains];
    UNROLL for (int b = 0; b < kBlocks; ++b) {
      source[b].begin(cursor[b]);
      UNROLL for (int r = 0; r < kRows; ++r)
        UNROLL for (int c = 0; c < kChains; ++c) part[b][r][c] = zero_i();
    }
    const int pairs = columns_of(m, span) / 2;
    const int32_t* a = words + int64_t{span} * m.span / 2 * kRows;
    for (int pair = 0; pair < pairs; pair += kUnit, a += kUnit * kRows) {
      UNROLL for (int i = 0; i < kUnit; i += kStep) {
        W16 w[kBlocks][kStep];
        UNROLL for (int b = 0; b < kBlocks; ++b) source[b].load(pair + i, w[b]);
        UNROLL for (int j = 0; j < kStep; ++j)
          UNROLL for (int r = 0; r < kRows; ++r) {
            const int c = (i + j) % kChains;
            if constexpr (kBlocks == 1) {
              dot_pairs(part[0][r][c], w[0][j], a[r * kUnit + i + j]);
            } else {
              const auto all = broadcast(a[r * kUnit + i + j]);
              dot_pairs(part[0][r][c], w[0][j], all);
              dot_pairs(part[1][r][c], w[1][j], all);
            }
          }
      }
    }
    UNROLL for (int b = 0; b < kBlocks; ++b) {
      const F32 weight_scale = scales_at(cursor[b], unit);
      UNROLL for (int r = 0; r < kRows; ++r) {
        I32(&chains)[kChains] = part[b][r];
        if constexpr (Source::kParted) {
          UNROLL for (int c = 2; c < kChains; ++c) chains[c - 2] = add(chains[c - 2], chains[c]);
          const I32 zero = m.zero_points ? bytes_to_ints(cursor[b].zeros) : set1_i(8);
          chains[0] = add(chains[0], shift_right(chains[1], 4));
          chains[0] = subtract(chains[0], mul(zero, set1_i(int_at(scales + (m.spans + span) * kRows + r))));
        } else {
          UNROLL for (int c = 1; c < kChains; ++c) chains[0] = add(chains[0], chains[c]);
        }
        sum[b][r] = fma(to_float(chains[0]), mul(weight_scale, set1(scales[span * kRows + r])), sum[b][r]);
      }
      cursor[b].next();
    }
  }
  UNROLL for (int b = 0; b < kBlocks; ++b)
    UNROLL for (int r = 0; r < kRows; ++r) store_f(out + b * stride + r * kLanes, sum[b][r]);
}

}  // namespace
