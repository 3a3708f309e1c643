// Sixteen lanes in one register, whole numbers multiplied by AVX512-VNNI.
#include "kernel_table.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernel_headers.h"
BEGIN_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")

namespace {

// 12 whole-number and 12 float sums leave eight registers: 12 rows of a block, or, with fewer loads, 6 of two.
constexpr int kPanelRows = 12, kInt4Rows = 8, kTileRows = 6, kTileBlocks = 2;
constexpr bool kBiasedBytes = true;  // vpdpbusd multiplies unsigned by signed

using F32 = __m512;
using I32 = __m512i;
using W16 = __m512i;  // pairs of int16
using W8 = __m512i;   // fours of int8

INLINE F32 zero_f() { return _mm512_setzero_ps(); }
INLINE I32 zero_i() { return _mm512_setzero_si512(); }
INLINE F32 set1(float x) { return _mm512_set1_ps(x); }
INLINE F32 load_f(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store_f(float* p, F32 x) { _mm512_storeu_ps(p, x); }
INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
INLINE F32 to_float(I32 x) { return _mm512_cvtepi32_ps(x); }
INLINE I32 add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
INLINE I32 subtract(I32 a, I32 b) { return _mm512_sub_epi32(a, b); }
INLINE I32 mul(I32 a, I32 b) { return _mm512_mullo_epi32(a, b); }
INLINE I32 shift_right(I32 x, int bits) { return _mm512_srai_epi32(x, bits); }
INLINE I32 bytes_to_ints(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I32 load_i(const void* p) { return _mm512_loadu_si512(p); }
INLINE I32 set1_i(int32_t x) { return _mm512_set1_epi32(x); }

// By hand, since compilers copy the sum and spend an instruction on the broadcast.
INLINE void dot_pairs(I32& sum, W16 w, const int32_t& a) {
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(a));
}
INLINE void dot_fours(I32& sum, W8 w, const int32_t& a) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(a));
}

INLINE __m512i broadcast(const int32_t& a) { return _mm512_set1_epi32(a); }
INLINE void dot_pairs(I32& sum, W16 w, __m512i a) { asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(a)); }
INLINE void dot_fours(I32& sum, W8 w, __m512i a) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(a)); }

// Not every machine with the rest has this one.
INLINE void dot_bf16(F32& sum, W16 w, __m512i a) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(a)); }
INLINE void dot_bf16(F32& sum, W16 w, const int32_t& a) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(a));
}

INLINE W16 load_w16(const void* p) { return _mm512_loadu_si512(p); }
INLINE void store_w16(void* p, W16 w) { _mm512_storeu_si512(p, w); }
INLINE W8 load_w8(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE W16 widen(const uint8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// A code is an index into 32 words, of which bit 4 does not matter: no mask is needed.
struct CodeTable {
  __m512i words;
  INLINE explicit CodeTable(const int8_t* numbers) {
    words = _mm512_cvtepi8_epi16(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)numbers)));
  }
  INLINE void look_up(const uint8_t* p, W16 (&w)[4]) const {
    const __m512i codes = _mm512_loadu_si512(p);
    w[0] = _mm512_permutexvar_epi16(codes, words);
    w[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), words);
    w[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), words);
    w[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), words);
  }
};
INLINE void part_codes(const uint8_t* p, W16 (&w)[4]) {
  __m512i low = _mm512_loadu_si512(p);
  asm("" : "+v"(low));  // once, not wherever it is used
  const __m512i high = _mm512_srli_epi16(low, 8);
  const __m512i even = _mm512_set1_epi16(0x000f), odd = _mm512_set1_epi16(0x00f0);
  w[0] = _mm512_and_si512(low, even), w[1] = _mm512_and_si512(low, odd);
  w[2] = _mm512_and_si512(high, even), w[3] = _mm512_and_si512(high, odd);
}
INLINE W16 both(const uint8_t* p) {  // 16 bytes, each in both halves of its lane
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm512_or_si512(x, _mm512_slli_epi32(x, 16));
}
INLINE W16 sub(W16 a, W16 b) { return _mm512_sub_epi16(a, b); }

INLINE F32 from_bf16(const uint8_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
INLINE F32 from_fp16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE F32 from_e8m0(const uint8_t* p) {  // 2^-127 is no normal number
  const __m512i x = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23);
  return _mm512_castsi512_ps(_mm512_max_epu32(x, _mm512_set1_epi32(0x00400000)));
}
// Columns k and k + 1 of bf16 pairs, and of e4m3 (as 2^-8 of the number).
INLINE void pair_from_bf16(const uint8_t* p, F32& even, F32& odd) {
  const __m512i x = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xffff0000)));
}
INLINE void pair_from_e4m3(const uint8_t* p, F32& even, F32& odd) {
  const __m512i x = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)), 7);
  const __m512i half = _mm512_and_si512(x, _mm512_set1_epi16(int16_t(0xbf80)));
  even = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
  odd = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
}

INLINE void floats_from_fp16(const uint16_t* x, int n, float* out) {
  int i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + i))));
  for (; i < n; ++i) out[i] = _cvtsh_ss(x[i]);
}
INLINE void fp16_from_floats(const float* x, int n, uint16_t* out) {
  for (int i = 0; i < n; ++i) out[i] = _cvtss_sh(x[i], 0);
}

}  // namespace

#include "kernels.h"

END_TARGET

const KernelTable* avx512bf16_kernels() {
  static constexpr KernelTable table = table_of<true>("avx512bf16");
  return avx512_kernels() && __builtin_cpu_supports("avx512bf16") ? &table : nullptr;
}

const KernelTable* avx512_kernels() {
  __builtin_cpu_init();
  const bool here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("f16c");
  static constexpr KernelTable table = table_of<false>("avx512");
  return here ? &table : nullptr;
}
#else
const KernelTable* avx512bf16_kernels() { return nullptr; }
const KernelTable* avx512_kernels() { return nullptr; }
#endif
