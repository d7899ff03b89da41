// AVX-512 with VNNI: 16 lanes.
#pragma once

#include "simd_x86.hpp"

namespace LEVEL {

enum { kLanes = 16, kRegisters = 32 };
typedef __m512 VF;
typedef __m512i VI;
typedef __m512i VB;

INLINE VF zero() { return _mm512_setzero_ps(); }
INLINE VF set1(float x) { return _mm512_set1_ps(x); }
INLINE VF load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, VF x) { _mm512_storeu_ps(p, x); }
INLINE VF load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
INLINE VF load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE VF load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
INLINE VF load_i8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
INLINE VF lanes_float(__m128i bytes, int64_t) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
INLINE VF load_e5m2(const uint8_t* p) {
    __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
    return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
}
INLINE VF load_e4m3(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p), low = _mm_set1_epi8(0x7f);
    const __mmask16 nan = _mm_cmpeq_epi8_mask(_mm_and_si128(x, low), low);
    const __m256i wide = _mm256_cvtepi8_epi16(x);  // the sign goes to the top
    const __m256i half =
        _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbf80));
    const VF value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
    return _mm512_mask_mov_ps(value, nan, _mm512_set1_ps(__builtin_nanf("")));
}
// See e4m3_as_half.
INLINE VF load_e4m3_as_half(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    return _mm512_cvtph_ps(
        _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbf80)));
}
// The halves of a byte. A table needs no mask: its index is the low four bits.
INLINE VF load_low4(const uint8_t* p) {
    const VF digits = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm512_permutexvar_ps(x, digits);
}
INLINE VF load_high4(const uint8_t* p) {
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm512_cvtepi32_ps(_mm512_srli_epi32(x, 4));
}
// Scales of kI4 groups, and their zeros in sixteenths.
INLINE VF load_short_scale(const uint16_t* p) {
    const __m256i x = _mm256_loadu_si256((const __m256i*)p);
    return _mm512_cvtph_ps(_mm256_srli_epi16(_mm256_slli_epi16(x, 8), 1));
}
INLINE VF load_short_zero(const uint16_t* p) {
    const __m256i x = _mm256_loadu_si256((const __m256i*)p);
    return _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm256_srli_epi16(x, 8)));
}
INLINE VF load_e8m0(const uint8_t* p) {
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m512i quiet = _mm512_set1_epi32(0x00400000);  // also 2^-127
    const __m512i bits = _mm512_max_epi32(_mm512_slli_epi32(x, 23), quiet);
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(x, _mm512_set1_epi32(255));
    return _mm512_castsi512_ps(_mm512_mask_or_epi32(bits, nan, bits, quiet));
}
INLINE void store_half(uint16_t* p, VF x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE VF add(VF a, VF b) { return _mm512_add_ps(a, b); }
INLINE VF sub(VF a, VF b) { return _mm512_sub_ps(a, b); }
INLINE VF mul(VF a, VF b) { return _mm512_mul_ps(a, b); }
INLINE VF div(VF a, VF b) { return _mm512_div_ps(a, b); }
INLINE VF fma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
INLINE VF fnma(VF a, VF b, VF c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
INLINE VF max(VF a, VF b) { return _mm512_max_ps(a, b); }  // NaN in b wins
INLINE VF min(VF a, VF b) { return _mm512_min_ps(a, b); }  // NaN in b wins
INLINE VF abs(VF a) { return _mm512_abs_ps(a); }
INLINE VF copysign(VF a, VF sign) {  // a >= 0
    __m512i s = _mm512_and_si512(_mm512_castps_si512(sign), _mm512_set1_epi32((int)0x80000000));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(a), s));
}
INLINE VF power_below(VF a) {  // the mantissa 0; a >= 0
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7f800000)));
}
INLINE VF select_less(VF a, VF b, VF yes, VF no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
INLINE VI round_int(VF x) { return _mm512_cvtps_epi32(x); }
INLINE void store_bytes(uint8_t* p, VI x) {  // of integers in -128..127
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x));
}
INLINE void store_words(int16_t* p, VI x) {  // of integers in -32768..32767
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(x));
}
INLINE VF to_float(VI x) { return _mm512_cvtepi32_ps(x); }
INLINE VF power_of_two(VI n) {  // 2^n, n in -127..127 (-127 gives 0)
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
// The nearest integer; and p 2^n for such an n from -127 on, with which it is 0. NaN stays NaN.
INLINE VF nearest(VF x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE VF times_power_of_two(VF p, VF n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, _mm512_set1_ps(-127.0f), _CMP_NLE_UQ), p, n);
}
INLINE VI zero_int() { return _mm512_setzero_si512(); }
INLINE VI set1_int(int32_t x) { return _mm512_set1_epi32(x); }
INLINE VI add_int(VI a, VI b) { return _mm512_add_epi32(a, b); }
// The larger of a and |b| by their bits: inf and NaN are above every number.
INLINE VF max_bits(VF a, VF b) {
    return _mm512_castsi512_ps(
        _mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(_mm512_abs_ps(b))));
}
// 32 values times `inverse`, rounded to nearest even, at most 127 in magnitude
INLINE void to_int8(const float* x, float inverse, int8_t* q, int32_t* sums) {
    const VF by = _mm512_set1_ps(inverse);
    const __m128i low = _mm512_cvtepi32_epi8(round_int(mul(load(x), by)));
    const __m128i high = _mm512_cvtepi32_epi8(round_int(mul(load(x + 16), by)));
    const __m256i all = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    _mm256_storeu_si256((__m256i*)q, all);
    half_sums(all, sums);
}
INLINE VB load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE void store_codes(uint8_t* p, VB x) { _mm512_storeu_si512(p, x); }
INLINE VB code_or(VB a, VB b) { return _mm512_or_si512(a, b); }
// ((p >> from) & mask) << to, per byte
INLINE VB field(VB p, int from, int mask, int to) {
    VB shifted = p;
    if (from > to) shifted = _mm512_srli_epi16(p, (unsigned)(from - to));
    if (from < to) shifted = _mm512_slli_epi16(p, (unsigned)(to - from));
    return _mm512_and_si512(shifted, _mm512_set1_epi8((char)(mask << to)));
}
// Byte b of every 32-bit lane.
INLINE VI code_int(VB p, int b) {
    if (b == 3) return _mm512_srli_epi32(p, 24);
    return _mm512_and_si512(_mm512_srli_epi32(p, (unsigned)(8 * b)), _mm512_set1_epi32(255));
}
// Entries of a table of 16 bytes, or floats; indices are below 16.
INLINE VB load_table(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
}
INLINE VB look_up(VB table, VB index) { return _mm512_shuffle_epi8(table, index); }
INLINE VF look_up_float(const float* table, VI index) {
    return _mm512_permutexvar_ps(index, _mm512_loadu_ps(table));
}
INLINE int32_t load_int(const void* p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}
// acc + sum of four products of unsigned codes with the same four signed activations in every lane
INLINE VI dot4(VI acc, VB codes, Quads a, int lane) {
    return _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(load_int(a + 4 * lane)));
}
INLINE VI dot4_wide(VI acc, VB codes, Quads a, int lane) { return dot4(acc, codes, a, lane); }
// 2 * kLanes codes as 16 bits, and acc + the sum of the two products of every lane's pairs.
INLINE VI widen_pairs(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
}
// One code of `a` and one of `b` in every lane.
INLINE VI zip_pairs(const int8_t* a, const int8_t* b) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                           22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m128i low = _mm_loadu_si128((const __m128i*)a), high = _mm_loadu_si128((const __m128i*)b);
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    return _mm512_permutexvar_epi16(order, _mm512_cvtepi8_epi16(both));
}
INLINE VI zip_pairs(const int16_t* a, const int16_t* b) {
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                           38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m256i low = _mm256_loadu_si256((const __m256i*)a), high = _mm256_loadu_si256((const __m256i*)b);
    return _mm512_permutex2var_epi16(_mm512_castsi256_si512(low), order, _mm512_castsi256_si512(high));
}
// Without its intrinsic, for which g++ 12 copies each sum to another register and back: attention with 8-bit
// pages took 1.4 times as long.
INLINE VI dot_pairs(VI acc, VI codes, VI x) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(x));
    return acc;
}
enum { kWideOffset = 0 };
INLINE float reduce_add(VF x) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
// The sums of four vectors' lanes.
INLINE void reduce_four(const VF* x, float* out) {
    const VF ab = add(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const VF cd = add(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    const VF all = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(
        _mm512_castps512_ps256(all),
        _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
INLINE float reduce_max(VF x) { return _mm512_reduce_max_ps(x); }
// One bit per lane: a >= b; a or b is NaN.
INLINE uint32_t lanes_at_least(VF a, VF b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE uint32_t lanes_nan(VF a, VF b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
// The lanes whose bits are set; the others minus infinity.
INLINE VF lanes_kept(VF x, uint32_t bits) {
    return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), (__mmask16)bits, x);
}
typedef __m512d VD;  // kLanes / 2 doubles
INLINE VD zero_wide() { return _mm512_setzero_pd(); }
INLINE void store_wide(double* p, VD x) { _mm512_storeu_pd(p, x); }
INLINE void add_wide(VD* sums, VF x) {  // sums[0]: the first half of the lanes, sums[1]: the second
    sums[0] = _mm512_add_pd(sums[0], _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    __m256d high = _mm512_extractf64x4_pd(_mm512_castps_pd(x), 1);
    sums[1] = _mm512_add_pd(sums[1], _mm512_cvtps_pd(_mm256_castpd_ps(high)));
}
INLINE float reduce_bits(VF x) {  // the largest by its bits, x >= 0 or NaN
    const int32_t bits = _mm512_reduce_max_epi32(_mm512_castps_si512(x));
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

}  // namespace LEVEL
