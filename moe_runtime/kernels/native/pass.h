// What the kernels of one instruction set share: a block's spans, one after another, and their scales.
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

}  // namespace
