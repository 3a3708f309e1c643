// Sixteen lanes as compilers' generic vectors, for any machine.
#include "kernel_headers.h"

namespace {

constexpr int kPanelRows = 2, kInt4Rows = 2, kTileRows = 2, kTileBlocks = 1;
constexpr bool kBiasedBytes = false;

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
struct W16 { I32 even, odd; };  // pairs of int16, wide already
struct W8 { I32 at[4]; };       // fours of int8, likewise

template <class Vector>
INLINE Vector load_as(const void* p) {
  Vector made;
  std::memcpy(&made, p, sizeof made);
  return made;
}
template <class Vector, class Make>
INLINE Vector lanes(Make make) {
  Vector made;
  for (int i = 0; i < kLanes; ++i) made[i] = make(i);
  return made;
}

INLINE F32 zero_f() { return F32{}; }
INLINE I32 zero_i() { return I32{}; }
INLINE I32 set1_i(int32_t x) { return x - I32{}; }
INLINE F32 set1(float x) { return x - F32{}; }
INLINE F32 load_f(const float* p) { return load_as<F32>(p); }
INLINE void store_f(float* p, F32 x) { std::memcpy(p, &x, sizeof x); }
INLINE F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
INLINE F32 mul(F32 a, F32 b) { return a * b; }
INLINE F32 to_float(I32 x) { return __builtin_convertvector(x, F32); }
INLINE I32 add(I32 a, I32 b) { return a + b; }
INLINE I32 subtract(I32 a, I32 b) { return a - b; }
INLINE I32 mul(I32 a, I32 b) { return a * b; }
INLINE I32 shift_right(I32 x, int bits) { return x >> bits; }
INLINE I32 bytes_to_ints(const uint8_t* p) {
  return lanes<I32>([&](int i) { return p[i]; });
}
INLINE I32 load_i(const void* p) { return load_as<I32>(p); }

INLINE void dot_pairs(I32& sum, const W16& w, const int32_t& a) {
  sum += w.even * static_cast<int16_t>(a) + w.odd * (a >> 16);
}
INLINE void dot_fours(I32& sum, const W8& w, const int32_t& a) {
  for (int i = 0; i < 4; ++i) sum += w.at[i] * static_cast<int8_t>(a >> 8 * i);
}

INLINE const int32_t& broadcast(const int32_t& a) { return a; }

INLINE W16 load_w16(const void* p) { return load_as<W16>(p); }
INLINE void store_w16(void* p, const W16& w) { std::memcpy(p, &w, sizeof w); }
INLINE W8 load_w8(const uint8_t* p) {
  const I32 x = load_i(p) ^ static_cast<int32_t>(0x80808080);
  return {{x << 24 >> 24, x << 16 >> 24, x << 8 >> 24, x >> 24}};
}
INLINE W16 widen(const uint8_t* p) {
  typedef int16_t Pairs __attribute__((vector_size(32)));
  const I32 x = __builtin_convertvector(load_as<Pairs>(p), I32);
  return {x << 24 >> 24, x >> 8};
}

struct CodeTable {
  const int8_t* numbers;
  explicit CodeTable(const int8_t* table) : numbers(table) {}
  INLINE I32 of(I32 codes, int shift) const {
    return lanes<I32>([&](int i) { return numbers[codes[i] >> shift & 15]; });
  }
  INLINE void look_up(const uint8_t* p, W16 (&w)[4]) const {
    const I32 codes = load_i(p);
    for (int j = 0; j < 4; ++j) w[j] = {of(codes, 4 * j), of(codes, 16 + 4 * j)};
  }
};
INLINE void part_codes(const uint8_t* p, W16 (&w)[4]) {
  const I32 codes = load_i(p);
  w[0] = {codes & 0xf, codes >> 16 & 0xf}, w[1] = {codes & 0xf0, codes >> 16 & 0xf0};
  w[2] = {codes >> 8 & 0xf, codes >> 24 & 0xf}, w[3] = {codes >> 8 & 0xf0, codes >> 24 & 0xf0};
}
INLINE W16 both(const uint8_t* p) {
  const I32 x = bytes_to_ints(p);
  return {x, x};
}
INLINE W16 sub(const W16& a, const W16& b) { return {a.even - b.even, a.odd - b.odd}; }

INLINE float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
INLINE uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
INLINE F32 floats_of_bits(I32 bits) { return load_as<F32>(&bits); }
INLINE float float_of_fp16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, mantissa = half & 1023u;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) return (sign ? -0x1p-24f : 0x1p-24f) * static_cast<float>(mantissa);
  return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}
INLINE uint16_t fp16_of_float(float x) {
  const uint32_t bits = bits_of_float(x), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  uint32_t half;
  if (magnitude > 0x7f800000) half = 0x7e00;
  else if (magnitude >= 0x477ff000) half = 0x7c00;  // 65520 and more round to infinity
  else if (magnitude < 0x38800000)  // below 2^-14 a half has a fixed step of 2^-24, as floats near 0.5 have
    half = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000;
  else half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  return static_cast<uint16_t>(sign | half);
}

INLINE F32 from_bf16(const uint8_t* p) {
  typedef uint16_t Halves __attribute__((vector_size(32)));
  return floats_of_bits(__builtin_convertvector(load_as<Halves>(p), I32) << 16);
}
INLINE F32 from_fp16(const uint8_t* p) {
  return lanes<F32>([&](int i) { return float_of_fp16(static_cast<uint16_t>(p[2 * i] | p[2 * i + 1] << 8)); });
}
INLINE F32 from_e8m0(const uint8_t* p) {  // 2^-127 is no normal number
  return lanes<F32>([&](int i) { return float_of_bits(p[i] ? uint32_t{p[i]} << 23 : 0x00400000); });
}
INLINE void pair_from_bf16(const uint8_t* p, F32& even, F32& odd) {
  const I32 x = load_i(p);
  even = floats_of_bits(x << 16), odd = floats_of_bits(x & set1_i(static_cast<int32_t>(0xffff0000)));
}
INLINE F32 from_e4m3(const uint8_t* p) {
  return lanes<F32>([&](int i) {
    return float_of_fp16(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7));
  });
}
INLINE void pair_from_e4m3(const uint8_t* p, F32& even, F32& odd) { even = from_e4m3(p), odd = from_e4m3(p + kLanes); }

INLINE void floats_from_fp16(const uint16_t* x, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = float_of_fp16(x[i]);
}
INLINE void fp16_from_floats(const float* x, int n, uint16_t* out) {
  for (int i = 0; i < n; ++i) out[i] = fp16_of_float(x[i]);
}

}  // namespace

#include "kernels.h"

const KernelTable* portable_kernels() {
  static constexpr KernelTable table = table_of<false>("portable");
  return &table;
}
