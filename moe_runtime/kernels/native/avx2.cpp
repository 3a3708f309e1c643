// Sixteen lanes in two registers, whole numbers multiplied by vpmaddwd.
#include "kernel_table.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernel_headers.h"
BEGIN_TARGET("avx2,fma,f16c")

namespace {

constexpr int kPanelRows = 6, kInt4Rows = 2, kTileRows = 6, kTileBlocks = 1;
constexpr bool kBiasedBytes = false;

struct F32 { __m256 lo, hi; };
struct I32 { __m256i lo, hi; };
using W16 = I32;  // pairs of int16
using W8 = I32;   // fours of int8

INLINE __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
INLINE __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
INLINE F32 zero_f() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE I32 zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F32 load_f(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store_f(float* p, F32 x) { _mm256_storeu_ps(p, x.lo), _mm256_storeu_ps(p + 8, x.hi); }
INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
INLINE F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
INLINE F32 to_float(I32 x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
INLINE I32 add(I32 a, I32 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
INLINE I32 subtract(I32 a, I32 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
INLINE I32 mul(I32 a, I32 b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
INLINE I32 shift_right(I32 x, int bits) { return {_mm256_srai_epi32(x.lo, bits), _mm256_srai_epi32(x.hi, bits)}; }
INLINE __m256i ints8(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
INLINE I32 bytes_to_ints(const uint8_t* p) { return {ints8(p), ints8(p + 8)}; }
INLINE I32 load_i(const void* p) { return {load256(p), load256(static_cast<const char*>(p) + 32)}; }
INLINE I32 set1_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

// One after another: compilers would rather add up trees of products, for which there are not enough registers.
INLINE void add_to(I32& sum, const I32& x) {
  sum = add(sum, x);
  asm("" : "+x"(sum.lo), "+x"(sum.hi));
}
INLINE void dot_pairs(I32& sum, const W16& w, const int32_t& a) {
  const __m256i all = _mm256_set1_epi32(a);
  add_to(sum, {_mm256_madd_epi16(w.lo, all), _mm256_madd_epi16(w.hi, all)});
}
// vpmaddubsw adds two products in 16 bits and saturates, which unsigned 255 would. So |w| <= 128 is its unsigned side
// and an activation, -127..127, takes w's sign: 2 * 128 * 127 = 32512 fits.
INLINE __m256i four(__m256i w, __m256i a) {
  const __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
  return _mm256_madd_epi16(products, _mm256_set1_epi16(1));
}
INLINE void dot_fours(I32& sum, const W8& w, const int32_t& a) {
  const __m256i all = _mm256_set1_epi32(a);
  add_to(sum, {four(w.lo, all), four(w.hi, all)});
}

INLINE const int32_t& broadcast(const int32_t& a) { return a; }

INLINE W16 load_w16(const void* p) { return load_i(p); }
INLINE void store_w16(void* p, W16 w) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), w.lo), _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, w.hi);
}
INLINE W8 load_w8(const uint8_t* p) {
  const __m256i bias = _mm256_set1_epi8(-128);
  const I32 x = load_i(p);
  return {_mm256_xor_si256(x.lo, bias), _mm256_xor_si256(x.hi, bias)};
}
INLINE W16 widen(const uint8_t* p) { return {_mm256_cvtepi8_epi16(load128(p)), _mm256_cvtepi8_epi16(load128(p + 16))}; }

// vpshufb looks up the low and the high byte of a 16-bit lane, which belong to two vectors of pairs.
struct CodeTable {
  __m256i bytes;
  INLINE explicit CodeTable(const int8_t* numbers) { bytes = _mm256_broadcastsi128_si256(load128(numbers)); }
  INLINE void two(__m256i codes, __m256i& first, __m256i& second) const {
    const __m256i numbers = _mm256_shuffle_epi8(bytes, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
    first = _mm256_srai_epi16(_mm256_slli_epi16(numbers, 8), 8);
    second = _mm256_srai_epi16(numbers, 8);
  }
  INLINE void look_up(const uint8_t* p, W16 (&w)[4]) const {
    const I32 codes = load_i(p);
    two(codes.lo, w[0].lo, w[2].lo);
    two(codes.hi, w[0].hi, w[2].hi);
    two(_mm256_srli_epi16(codes.lo, 4), w[1].lo, w[3].lo);
    two(_mm256_srli_epi16(codes.hi, 4), w[1].hi, w[3].hi);
  }
};
INLINE void part_codes(const uint8_t* p, W16 (&w)[4]) {
  const I32 low = load_i(p), high = {_mm256_srli_epi16(low.lo, 8), _mm256_srli_epi16(low.hi, 8)};
  const __m256i even = _mm256_set1_epi16(0x000f), odd = _mm256_set1_epi16(0x00f0);
  w[0] = {_mm256_and_si256(low.lo, even), _mm256_and_si256(low.hi, even)};
  w[1] = {_mm256_and_si256(low.lo, odd), _mm256_and_si256(low.hi, odd)};
  w[2] = {_mm256_and_si256(high.lo, even), _mm256_and_si256(high.hi, even)};
  w[3] = {_mm256_and_si256(high.lo, odd), _mm256_and_si256(high.hi, odd)};
}
INLINE __m256i both8(const uint8_t* p) {
  const __m256i x = ints8(p);
  return _mm256_or_si256(x, _mm256_slli_epi32(x, 16));
}
INLINE W16 both(const uint8_t* p) { return {both8(p), both8(p + 8)}; }
INLINE W16 sub(W16 a, W16 b) { return {_mm256_sub_epi16(a.lo, b.lo), _mm256_sub_epi16(a.hi, b.hi)}; }

INLINE __m256 bf16_8(const uint8_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
}
INLINE F32 from_bf16(const uint8_t* p) { return {bf16_8(p), bf16_8(p + 16)}; }
INLINE F32 from_fp16(const uint8_t* p) { return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 16))}; }
INLINE __m256 e8m0_8(const uint8_t* p) {  // 2^-127 is no normal number
  const __m256i x = _mm256_slli_epi32(ints8(p), 23);
  return _mm256_castsi256_ps(_mm256_max_epu32(x, _mm256_set1_epi32(0x00400000)));
}
INLINE F32 from_e8m0(const uint8_t* p) { return {e8m0_8(p), e8m0_8(p + 8)}; }
INLINE void pair_from_bf16(const uint8_t* p, F32& even, F32& odd) {
  const I32 x = load_i(p);
  const __m256i high = _mm256_set1_epi32(0xffff0000);
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(x.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.hi, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(x.lo, high)), _mm256_castsi256_ps(_mm256_and_si256(x.hi, high))};
}
INLINE F32 e4m3_16(const uint8_t* p) {
  const __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load128(p)), 7);
  const __m256i half = _mm256_and_si256(x, _mm256_set1_epi16(int16_t(0xbf80)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}
INLINE void pair_from_e4m3(const uint8_t* p, F32& even, F32& odd) { even = e4m3_16(p), odd = e4m3_16(p + 16); }

INLINE void floats_from_fp16(const uint16_t* x, int n, float* out) {
  int i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(load128(x + i)));
  for (; i < n; ++i) out[i] = _cvtsh_ss(x[i]);
}
INLINE void fp16_from_floats(const float* x, int n, uint16_t* out) {
  for (int i = 0; i < n; ++i) out[i] = _cvtss_sh(x[i], 0);
}

}  // namespace

#include "kernels.h"

END_TARGET

const KernelTable* avx2_kernels() {
  __builtin_cpu_init();
  const bool here =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  static constexpr KernelTable table = table_of<false>("avx2");
  return here ? &table : nullptr;
}
#else
const KernelTable* avx2_kernels() { return nullptr; }
#endif
