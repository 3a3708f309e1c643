// From a strip's rows and a weight's format to the pass that multiplies them.
#pragma once

namespace {

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

}  // namespace
