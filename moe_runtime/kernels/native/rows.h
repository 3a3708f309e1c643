// What happens once a row, in plain loops, which compilers turn into vectors.
#pragma once

namespace {

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
constexpr uint32_t kInfinite = 0x7f800000;

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
// 2^-100 counts as zero. A span with a number that is not finite has a scale that is not, and zeros, which makes the
// row's result NaN. For int4 the spans' sums follow the scales, as bits.
void prepare_pairs(const MoeMatrix& m, const void* x, int32_t type, int16_t* out, float* scales) {
  float chunk[kChunk];
  for (int span = 0; span < m.spans; ++span, out += m.span) {
    const int at = span * m.span, n = m.columns - at < m.span ? m.columns - at : m.span;
    load_floats(x, type, at, n, chunk);
    const uint32_t most = most_of(chunk, n);
    const bool tiny = most < kTiny, bad = most >= kInfinite;
    scales[span] = tiny ? 0 : as_float(most) / 32767;
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
  scales[0] = bad ? as_float(most) : step;
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

}  // namespace
