// The kernels themselves, in terms of the lanes that the including file defines: F32 and I32 hold one number of each of
// 16 rows, W16 a pair of int16 of each, W8 four int8. Included once per instruction set.
//
// Whole numbers (int8, int4, e2m1): activations are int16 with a scale for every span of columns, weights become int16
// as they are read, and a span's products add up in 32 bits. That cannot overflow: an activation is at most 32767, a
// span at most 128 columns, and a number at most 128 (int8), 15 (int4 less its zero point) or 12 (e2m1, doubled), and
// 32767 * 128 * 128 < 2^29. Floats: sums of a span in the order of columns, then the spans' sums in order. Either way
// a row's sums do not depend on how many rows share the pass.
#pragma once

namespace {

// Weights that several panels share are widened once, this many columns at a time: 16 KB of the first-level cache.
constexpr int kTileColumns16 = 512 / kTileBlocks, kTileColumnsFloat = 256 / kTileBlocks;

constexpr int8_t kSigned4[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr int8_t kUnsigned4[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr int8_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Pass {  // spans first..last of one block
  const MoeMatrix& m;
  const uint8_t* block;
  float unit;  // what scales have to be multiplied by, because of how numbers are read
  int first, last;
  const uint8_t* tile;  // of these spans
};

INLINE Pass pass_of(const MoeMatrix& m, const uint8_t* record, int block) {
  // e2m1 is read as twice the number, and e4m3 as a half, whose exponent has another bias.
  const float unit = m.values == kE2m1 ? 0.5f : m.values == kE4m3 ? 256.0f : 1.0f;
  return {m, record + block * m.block_bytes, unit, 0, m.spans, nullptr};
}

// Where the values, scales and zero points of one span after another are.
struct Cursor {
  const MoeMatrix& m;
  const uint8_t *head, *values, *scales, *zeros;
  int left;  // spans of this stretch

  INLINE explicit Cursor(const Pass& p)
      : m(p.m), head(p.block + head_at(p.m, p.first)), values(p.block + values_at(p.m, p.first)) {
    enter();
  }
  INLINE void next() {
    values += m.span_bytes;
    if (!m.group) return;
    scales += kLanes * number_bytes(m.scales), zeros += kLanes;
    if (--left) return;
    head += m.stretch_bytes, values = head + m.head_bytes;
    enter();
  }

 private:
  INLINE void enter() {
    left = groups_of_head(m), scales = head, zeros = head + left * kLanes * number_bytes(m.scales);
  }
};

INLINE F32 scales_at(const Cursor& c, const F32& unit) {
  switch (c.m.scales) {
    case kNone: return unit;
    case kFloat32: return mul(unit, load_f(reinterpret_cast<const float*>(c.scales)));
    case kFloat16: return mul(unit, from_fp16(c.scales));
    case kBfloat16: return mul(unit, from_bf16(c.scales));
    default: return mul(unit, from_e8m0(c.scales));
  }
}

// Scales of activations are followed by whole numbers.
INLINE int32_t int_at(const float* p) {
  int32_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

INLINE int columns_of(const MoeMatrix& m, int span) {  // padded
  return span + 1 < m.spans ? m.span : m.padded - span * m.span;
}

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

using AnyPass = void (*)(const Pass*, const int32_t*, const float*, float*, int);

template <class Source, int kBlocks, int... kRow>
INLINE AnyPass whole_pass_of(int rows, std::integer_sequence<int, kRow...>) {
  static constexpr AnyPass passes[] = {whole_pass<Source, kRow + 1, kBlocks>...};
  return passes[rows - 1];
}
template <class Source, int kBlocks, bool kTile, int... kRow>
INLINE AnyPass float_pass_of(int rows, std::integer_sequence<int, kRow...>) {
  static constexpr AnyPass passes[] = {float_pass<Source, kRow + 1, kBlocks, kTile>...};
  return passes[rows - 1];
}
template <class Product, int kBlocks, int... kRow>
INLINE AnyPass stream_pass_of(int rows, std::integer_sequence<int, kRow...>) {
  static constexpr AnyPass passes[] = {stream_pass<Product, kRow + 1, kBlocks>...};
  return passes[rows - 1];
}
template <int kRows>
using UpTo = std::make_integer_sequence<int, kRows>;

constexpr int kStreamRows = 4;

// Up to this many rows weights are used as they are read; more rows are worth a tile.
INLINE int direct_rows(const MoeMatrix& m) { return m.values < kE4m3 ? kPanelRows : kTileRows; }

template <bool kPairs>
int panel_rows(const MoeMatrix& m, int rows) {
  const bool streams = m.values == kInt8Dynamic || (kPairs && m.values == kBf16);
  return streams || rows <= direct_rows(m) ? kPanelRows : kTileRows;
}

template <class Source>
void widen_spans(const Pass& pass, uint8_t* to) {
  Source source(pass);
  Cursor cursor(pass);
  for (int span = pass.first; span < pass.last; ++span, cursor.next()) {
    source.begin(cursor);
    for (int pair = 0; pair < columns_of(pass.m, span) / 2; pair += Source::kStep) {
      W16 w[Source::kStep];
      source.load(pair, w);
      UNROLL for (int j = 0; j < Source::kStep; ++j, to += sizeof(W16)) store_w16(to, w[j]);
    }
  }
}

// Brings in what the next tile is made of, a piece before each panel of this one. Tiles begin where stretches do.
struct Ahead {
  const uint8_t* from[2];
  int64_t piece, bytes;
  INLINE Ahead(const Pass& upper, const Pass& lower, int64_t to_next, int panels) {
    const MoeMatrix& m = upper.m;
    const int64_t next = upper.last < m.spans ? values_at(m, upper.last) - (m.group ? m.head_bytes : 0) : to_next;
    bytes = (upper.last - upper.first) * (m.group ? m.stretch_bytes / groups_of_head(m) : m.span_bytes);
    piece = (bytes / panels + 63) / 64 * 64;
    from[0] = upper.block + next, from[1] = lower.block + next;
  }
  INLINE void fetch(int panel) const {
    for (int64_t at = panel * piece; at < (panel + 1) * piece && at < bytes; at += 64) {
      __builtin_prefetch(from[0] + at, 0, 2);
      if (from[1] != from[0]) __builtin_prefetch(from[1] + at, 0, 2);
    }
  }
};

// Few: the source for up to kFewRows rows.
template <class Source, class Few = Source, int kFewRows = 1>
void dot_whole(const MoeMatrix& m, const uint8_t* record, int block, int blocks, const Strip& strip, void* scratch,
               float* out) {
  const int stride = strip.rows * kLanes;
  Pass pass[2] = {pass_of(m, record, block), pass_of(m, record, block + blocks - 1)};
  if (strip.rows <= direct_rows(m)) {
    const AnyPass run = strip.rows <= kFewRows ? whole_pass_of<Few, 1>(strip.rows, UpTo<kFewRows>())
                                               : whole_pass_of<Source, 1>(strip.rows, UpTo<kPanelRows>());
    for (int b = 0; b < blocks; ++b) run(pass + b, strip.words, strip.scales, out + b * stride, stride);
    return;
  }
  const Split panels(strip.rows, kTileRows);
  uint8_t* const tile = static_cast<uint8_t*>(scratch);
  const int at_once = blocks < kTileBlocks ? blocks : kTileBlocks, spans = kTileColumns16 / m.span;
  for (int b = 0; b < blocks; b += at_once) {
    Pass* const here = pass + b;
    for (here->first = 0; here->first < m.spans; here->first = here->last) {
      here->last = here->first + spans < m.spans ? here->first + spans : m.spans;
      for (int i = 0; i < at_once; ++i) {
        uint8_t* const to = tile + i * kTileColumns16 / 2 * sizeof(W16);
        here[i].first = here->first, here[i].last = here->last, here[i].tile = to;
        widen_spans<Source>(here[i], to);
      }
      const Ahead ahead(here[0], here[at_once - 1], at_once * m.block_bytes, panels.count);
      for (int i = 0; i < panels.count; ++i) {
        ahead.fetch(i);
        const int64_t row = panels.first(i);
        const AnyPass run = at_once == 2 ? whole_pass_of<Tile16, 2>(panels.size(i), UpTo<kTileRows>())
                                         : whole_pass_of<Tile16, 1>(panels.size(i), UpTo<kTileRows>());
        run(here, strip.words + row * m.words, strip.scales + row * m.word_scales, out + b * stride + row * kLanes,
            stride);
      }
    }
  }
}

template <class Source>
void widen_floats(const Pass& pass, float* to) {
  Cursor cursor(pass);
  for (int span = pass.first; span < pass.last; ++span, cursor.next()) {
    const uint8_t* from = cursor.values;
    for (int k = 0; k < columns_of(pass.m, span); k += 2, to += 2 * kLanes) {
      F32 even, odd;
      Source::load(from + k * kLanes * Source::kBytes, even, odd);
      store_f(to, even), store_f(to + kLanes, odd);
    }
  }
}

template <class Source>
void dot_float(const MoeMatrix& m, const uint8_t* record, int block, int blocks, const Strip& strip, void* scratch,
               float* out) {
  const int stride = strip.rows * kLanes;
  Pass pass[2] = {pass_of(m, record, block), pass_of(m, record, block + blocks - 1)};
  if (strip.rows <= direct_rows(m)) {
    if (blocks == 2 && kTileBlocks == 2)
      return float_pass_of<Source, kTileBlocks, false>(strip.rows, UpTo<kTileRows>())(pass, strip.words, nullptr, out,
                                                                                      stride);
    const AnyPass run = float_pass_of<Source, 1, false>(strip.rows, UpTo<kTileRows>());
    for (int b = 0; b < blocks; ++b) run(pass + b, strip.words, nullptr, out + b * stride, stride);
    return;
  }
  const Split panels(strip.rows, kTileRows);
  float* const tile = static_cast<float*>(scratch);
  const int at_once = blocks < kTileBlocks ? blocks : kTileBlocks, spans = kTileColumnsFloat / m.span;
  for (int b = 0; b < blocks; b += at_once) {
    Pass* const here = pass + b;
    for (here->first = 0; here->first < m.spans; here->first = here->last) {
      here->last = here->first + spans < m.spans ? here->first + spans : m.spans;
      for (int i = 0; i < at_once; ++i) {
        here[i].first = here->first, here[i].last = here->last;
        here[i].tile = here[i].block + values_at(m, here->first);
        if constexpr (Source::kBytes == 4) continue;  // is one already
        float* const to = tile + i * kTileColumnsFloat * kLanes;
        here[i].tile = reinterpret_cast<const uint8_t*>(to);
        widen_floats<Source>(here[i], to);
      }
      const Ahead ahead(here[0], here[at_once - 1], at_once * m.block_bytes, panels.count);
      for (int i = 0; i < panels.count; ++i) {
        ahead.fetch(i);
        const int64_t row = panels.first(i);
        const AnyPass run = at_once == 2 ? float_pass_of<Fp32, 2, true>(panels.size(i), UpTo<kTileRows>())
                                         : float_pass_of<Fp32, 1, true>(panels.size(i), UpTo<kTileRows>());
        run(here, strip.words + row * m.words, nullptr, out + b * stride + row * kLanes, stride);
      }
    }
  }
}

template <class Product>
void dot_stream(const MoeMatrix& m, const uint8_t* record, int block, int blocks, const Strip& strip, float* out) {
  const Split panels(strip.rows, kPanelRows);
  const int stride = strip.rows * kLanes;
  const Pass pass[2] = {pass_of(m, record, block), pass_of(m, record, block + blocks - 1)};
  // Few rows wait for memory, which gives one stream faster than two.
  const int at_once = strip.rows < kStreamRows ? 1 : blocks;
  for (int i = 0; i < panels.count; ++i) {
    const int64_t row = panels.first(i);
    const AnyPass run = at_once == 2 ? stream_pass_of<Product, 2>(panels.size(i), UpTo<kPanelRows>())
                                     : stream_pass_of<Product, 1>(panels.size(i), UpTo<kPanelRows>());
    for (int b = 0; b < blocks; b += at_once)
      run(pass + b, strip.words + row * m.words, strip.scales + row * m.word_scales, out + b * stride + row * kLanes,
          stride);
  }
}

template <bool kPairs>
void dot(const MoeMatrix& m, const uint8_t* record, int block, int blocks, const Strip& strip, void* scratch,
         float* out) {
  switch (m.values) {
    case kInt8: return dot_whole<Int8>(m, record, block, blocks, strip, scratch, out);
    case kInt8Dynamic: return dot_stream<Bytes>(m, record, block, blocks, strip, out);
    case kInt4:
      if (m.zero_points) return dot_whole<Codes<true>, Int4, kInt4Rows>(m, record, block, blocks, strip, scratch, out);
      return dot_whole<Codes<false>, Int4, kInt4Rows>(m, record, block, blocks, strip, scratch, out);
    case kE2m1: return dot_whole<Codes<false>>(m, record, block, blocks, strip, scratch, out);
    case kE4m3: return dot_float<E4m3>(m, record, block, blocks, strip, scratch, out);
    case kBf16:
      if constexpr (kPairs) return dot_stream<Bf16Pairs>(m, record, block, blocks, strip, out);
      else return dot_float<Bf16>(m, record, block, blocks, strip, scratch, out);
    case kFp16: return dot_float<Fp16>(m, record, block, blocks, strip, scratch, out);
    default: return dot_float<Fp32>(m, record, block, blocks, strip, scratch, out);
  }
}

// ---- What happens once a row: plain loops, which compilers turn into vectors ----

INLINE float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
INLINE uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

constexpr int kChunk = 128;
constexpr uint32_t kTiny = 0x0d800000;  // 2^-100
constexpr uint32_t kInfinite = 0x7f800000, kQuietNan = 0x7fc00000;

INLINE void load_floats(const void* x, int32_t type, int at, int n, float* out) {
  if (type == kFloat32) {
    std::memcpy(out, static_cast<const float*>(x) + at, n * sizeof(float));
  } else if (type == kFloat16) {
    floats_from_fp16(static_cast<const uint16_t*>(x) + at, n, out);
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(x) + at;
    for (int i = 0; i < n; ++i) out[i] = as_float(uint32_t{from[i]} << 16);
  }
}

// Bits of the largest magnitude: they order as the numbers do, with infinity and NaN above all.
INLINE uint32_t most_of(const float* x, int n) {
  uint32_t most = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t magnitude = as_bits(x[i]) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

// To nearest, ties to even, for |x| < 2^22.
INLINE int32_t round_to_int(float x) {
  return static_cast<int32_t>(as_bits(x + 12582912.0f)) - 0x4b400000;
}

// int16 with a scale for each span: 1/65534 of the largest number of the span is the largest error. What is below
// 2^-100 counts as zero, and a span with a number that is not finite makes the row's result NaN. For int4 the spans'
// sums follow the scales, as bits.
void prepare_pairs(const MoeMatrix& m, const void* x, int32_t type, int16_t* out, float* scales) {
  float chunk[kChunk];
  for (int span = 0; span < m.spans; ++span, out += m.span) {
    const int at = span * m.span, n = m.columns - at < m.span ? m.columns - at : m.span;
    load_floats(x, type, at, n, chunk);
    const uint32_t most = most_of(chunk, n);
    const bool tiny = most < kTiny, bad = most >= kInfinite;
    scales[span] = bad ? as_float(kQuietNan) : tiny ? 0 : as_float(most) / 32767;
    const float inverse = bad || tiny ? 0 : 32767 / as_float(most);
    if (bad) std::memset(chunk, 0, sizeof chunk);
    int32_t sum = 0;
    for (int i = 0; i < n; ++i) {
      const int32_t whole = round_to_int(chunk[i] * inverse);
      out[i] = static_cast<int16_t>(whole);
      sum += whole;
    }
    for (int i = n; i < columns_of(m, span); ++i) out[i] = 0;
    if (m.values == kInt4) std::memcpy(scales + m.spans + span, &sum, sizeof sum);
  }
}

// int8, one scale a row; then -128 times the row's sum, as bits, where weights are multiplied with 128 added.
void prepare_bytes(const MoeMatrix& m, const void* x, int32_t type, int8_t* out, float* scales) {
  float chunk[kChunk];
  uint32_t most = 0;
  for (int at = 0; at < m.columns; at += kChunk) {
    const int n = m.columns - at < kChunk ? m.columns - at : kChunk;
    load_floats(x, type, at, n, chunk);
    const uint32_t here = most_of(chunk, n);
    most = here > most ? here : most;
  }
  const bool tiny = most < kTiny, bad = most >= kInfinite;
  const float step = bad || tiny ? 1 : as_float(most) / 127;
  int32_t sum = 0;
  for (int at = 0; at < m.columns; at += kChunk) {
    const int n = m.columns - at < kChunk ? m.columns - at : kChunk;
    load_floats(x, type, at, n, chunk);
    if (bad || tiny) std::memset(chunk, 0, sizeof chunk);
    for (int i = 0; i < n; ++i) {
      const int32_t whole = round_to_int(chunk[i] / step);
      out[at + i] = static_cast<int8_t>(whole);
      sum += whole;
    }
  }
  for (int k = m.columns; k < m.padded; ++k) out[k] = 0;
  const int32_t excess = kBiasedBytes ? -128 * sum : 0;
  scales[0] = bad ? as_float(kQuietNan) : step;
  std::memcpy(scales + 1, &excess, sizeof excess);
}

INLINE uint16_t to_bf16(float x) {
  const uint32_t bits = as_bits(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > kInfinite ? bits >> 16 | 0x40 : rounded);
}

void prepare_bf16(const MoeMatrix& m, const void* x, int32_t type, uint16_t* out) {
  float chunk[kChunk];
  for (int at = 0; at < m.padded; at += kChunk) {
    const int end = m.padded - at < kChunk ? m.padded - at : kChunk, n = m.columns - at < end ? m.columns - at : end;
    load_floats(x, type, at, n, chunk);
    for (int i = 0; i < n; ++i) out[at + i] = to_bf16(chunk[i]);
    for (int i = n; i < end; ++i) out[at + i] = 0;
  }
}

template <bool kPairs>
void prepare(const MoeMatrix& m, const void* x, int32_t type, int32_t* words, float* scales) {
  if (kPairs && m.values == kBf16) return prepare_bf16(m, x, type, reinterpret_cast<uint16_t*>(words));
  if (m.values == kInt8Dynamic) return prepare_bytes(m, x, type, reinterpret_cast<int8_t*>(words), scales);
  if (m.word_scales) return prepare_pairs(m, x, type, reinterpret_cast<int16_t*>(words), scales);
  float* out = reinterpret_cast<float*>(words);
  load_floats(x, type, 0, m.columns, out);
  for (int k = m.columns; k < m.padded; ++k) out[k] = 0;
}

void pack_panel(const int32_t* const* rows, int count, int words, int32_t* panel) {
  for (int w = 0; w < words; w += kUnit)
    for (int r = 0; r < count; ++r, panel += kUnit) std::memcpy(panel, rows[r] + w, kUnit * sizeof(int32_t));
}

// exp to 2e-7, by Cephes' polynomial on [-ln 2 / 2, ln 2 / 2].
INLINE float exp_of(float x) {
  x = x < 87.0f ? x : 87.0f;
  x = x > -87.0f ? x : -87.0f;
  const float shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float value = p * r * r + r + 1.0f;
  return as_float(as_bits(value) + ((as_bits(shifted) - 0x4b400000) << 23));
}

void silu_mul(const float* gate, const float* up, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = gate[i] / (1.0f + exp_of(-gate[i])) * up[i];
}

void add_scaled(const float* x, float scale, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] += scale * x[i];
}

void store(const float* x, int n, int32_t type, void* y) {
  if (type == kFloat32) std::memcpy(y, x, n * sizeof(float));
  if (type == kFloat16) fp16_from_floats(x, n, static_cast<uint16_t*>(y));
  if (type != kBfloat16) return;
  uint16_t* out = static_cast<uint16_t*>(y);
  for (int i = 0; i < n; ++i) out[i] = to_bf16(x[i]);
}

// ---- What the machine can do at best ----

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

// kPairs: with the instructions for bf16.
template <bool kPairs>
constexpr KernelTable table_of(const char* name) {
  return {name, kPanelRows, kPairs, kTileBlocks * kTileColumns16 / 2 * sizeof(W16), panel_rows<kPairs>, dot<kPairs>,
          prepare<kPairs>, pack_panel, silu_mul, add_scaled, store, peak_float, peak_pairs, peak_bytes, read};
}

}  // namespace
