// AVX2, with or without VNNI: 8 lanes.
#pragma once

#include "simd_x86.hpp"

namespace LEVEL {

enum { kLanes = 8, kRegisters = 16 };
typedef __m256 VF;
typedef __m256i VI;
typedef __m256i VB;

INLINE VF zero() { return _mm256_setzero_ps(); }
INLINE VF set1(float x) { return _mm256_set1_ps(x); }
INLINE VF load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, VF x) { _mm256_storeu_ps(p, x); }
INLINE VF load_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
INLINE VF load_bf16(const uint16_t* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE VF load_u8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
INLINE VF load_i8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
INLINE VF lanes_float(__m128i bytes, int64_t lane) {  // from `lane` on, 0 or 8
    const __m128i part = lane ? _mm_unpackhi_epi64(bytes, bytes) : bytes;
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part));
}
INLINE VF load_e5m2(const uint8_t* p) {
    __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
    return _mm256_cvtph_ps(_mm_slli_epi16(wide, 8));
}
INLINE VF load_e4m3(const uint8_t* p) {
    const __m128i x = _mm_loadl_epi64((const __m128i*)p), low = _mm_set1_epi8(0x7f);
    const __m256i nan = _mm256_cvtepi8_epi32(_mm_cmpeq_epi8(_mm_and_si128(x, low), low));
    const __m128i wide = _mm_cvtepi8_epi16(x);  // the sign goes to the top
    const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbf80));
    const VF value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
    return _mm256_or_ps(value, _mm256_castsi256_ps(nan));
}
// See e4m3_as_half.
INLINE VF load_e4m3_as_half(const uint8_t* p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbf80)));
}
// The halves of a byte.
INLINE VF load_low4(const uint8_t* p) {
    const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    return _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(15)));
}
INLINE VF load_high4(const uint8_t* p) {
    const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 4));
}
// Scales of kI4 groups, and their zeros in sixteenths.
INLINE VF load_short_scale(const uint16_t* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return _mm256_cvtph_ps(_mm_srli_epi16(_mm_slli_epi16(x, 8), 1));
}
INLINE VF load_short_zero(const uint16_t* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_srli_epi16(x, 8)));
}
INLINE VF load_e8m0(const uint8_t* p) {
    const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    const __m256i quiet = _mm256_set1_epi32(0x00400000);  // also 2^-127
    const __m256i bits = _mm256_max_epi32(_mm256_slli_epi32(x, 23), quiet);
    const __m256i nan = _mm256_cmpeq_epi32(x, _mm256_set1_epi32(255));
    return _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_and_si256(nan, quiet)));
}
INLINE void store_half(uint16_t* p, VF x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE VF add(VF a, VF b) { return _mm256_add_ps(a, b); }
INLINE VF sub(VF a, VF b) { return _mm256_sub_ps(a, b); }
INLINE VF mul(VF a, VF b) { return _mm256_mul_ps(a, b); }
INLINE VF div(VF a, VF b) { return _mm256_div_ps(a, b); }
INLINE VF fma(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
INLINE VF fnma(VF a, VF b, VF c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
INLINE VF max(VF a, VF b) { return _mm256_max_ps(a, b); }  // NaN in b wins
INLINE VF min(VF a, VF b) { return _mm256_min_ps(a, b); }  // NaN in b wins
INLINE VF abs(VF a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE VF copysign(VF a, VF sign) {  // a >= 0
    return _mm256_or_ps(a, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}
INLINE VF power_below(VF a) {  // the mantissa 0; a >= 0
    return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000)));
}
INLINE VF select_less(VF a, VF b, VF yes, VF no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
INLINE VI round_int(VF x) { return _mm256_cvtps_epi32(x); }
INLINE void store_bytes(uint8_t* p, VI x) {  // of integers in -128..127
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
INLINE void store_words(int16_t* p, VI x) {  // of integers in -32768..32767
    _mm_storeu_si128((__m128i*)p,
                     _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
INLINE VF to_float(VI x) { return _mm256_cvtepi32_ps(x); }
INLINE VF power_of_two(VI n) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
INLINE VF nearest(VF x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE VF times_power_of_two(VF p, VF n) { return mul(p, power_of_two(round_int(n))); }
INLINE VI zero_int() { return _mm256_setzero_si256(); }
INLINE VI set1_int(int32_t x) { return _mm256_set1_epi32(x); }
INLINE VI add_int(VI a, VI b) { return _mm256_add_epi32(a, b); }
// The larger of a and |b| by their bits: inf and NaN are above every number.
INLINE VF max_bits(VF a, VF b) {
    return _mm256_castsi256_ps(
        _mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(abs(b))));
}
// 32 values times `inverse`, rounded to nearest even, at most 127 in magnitude
INLINE void to_int8(const float* x, float inverse, int8_t* q, int32_t* sums) {
    const VF by = _mm256_set1_ps(inverse);
    const __m256i low = _mm256_packs_epi32(round_int(mul(load(x), by)),
                                           round_int(mul(load(x + 8), by)));
    const __m256i high = _mm256_packs_epi32(round_int(mul(load(x + 16), by)),
                                            round_int(mul(load(x + 24), by)));
    const __m256i all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high),
                                                    _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i*)q, all);
    half_sums(all, sums);
}
INLINE VB load_codes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE void store_codes(uint8_t* p, VB x) { _mm256_storeu_si256((__m256i*)p, x); }
INLINE VB code_or(VB a, VB b) { return _mm256_or_si256(a, b); }
INLINE VB field(VB p, int from, int mask, int to) {
    VB shifted = p;
    if (from > to) shifted = _mm256_srli_epi16(p, from - to);
    if (from < to) shifted = _mm256_slli_epi16(p, to - from);
    return _mm256_and_si256(shifted, _mm256_set1_epi8((char)(mask << to)));
}
INLINE VI code_int(VB p, int b) {
    if (b == 3) return _mm256_srli_epi32(p, 24);
    return _mm256_and_si256(_mm256_srli_epi32(p, 8 * b), _mm256_set1_epi32(255));
}
INLINE VB load_table(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
}
INLINE VB look_up(VB table, VB index) { return _mm256_shuffle_epi8(table, index); }
INLINE VF look_up_float(const float* table, VI index) {
    const VF low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
    const VF high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
INLINE int32_t load_int(const void* p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}
#if defined(__AVXVNNI__)
INLINE VI dot4(VI acc, VB codes, Quads a, int lane) {
    return _mm256_dpbusd_avx_epi32(acc, codes, _mm256_set1_epi32(load_int(a + 4 * lane)));
}
INLINE VI dot4_wide(VI acc, VB codes, Quads a, int lane) { return dot4(acc, codes, a, lane); }
enum { kWideOffset = 0 };
#else
// Keeps the order of a sum's additions: g++ would turn it into a tree, whose parts go to the stack.
INLINE __m256i in_order(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
}
// vpmaddubsw saturates at 32767. Codes of up to 7 bits stay below it: 2 * 127 * 127 = 32258.
static_assert(2 * 127 * 127 <= INT16_MAX, "codes of 7 bits do not saturate");
INLINE VI dot4(VI acc, VB codes, Quads a, int lane) {
    __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi32(load_int(a + 4 * lane)));
    return in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
// Products of short codes are summed in 16 bits first: two instructions for 32 products instead of three,
// of which only one is a multiplication (two of those start in each cycle, and four additions).
#define SHORT_SUMS
enum { kShortProducts = 2, kLeastRun = 2 };
typedef __m256i ShortSums;
INLINE ShortSums dot_short(ShortSums sums, VB codes, Quads a, int lane) {
    const __m256i four = _mm256_set1_epi32(load_int(a + 4 * lane));
    return in_order(_mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, four)));
}
INLINE VI add_short(VI acc, ShortSums sums) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
}
// 8-bit codes would saturate (2 * 255 * 127). As code - 128 their magnitude is at most 128:
// 2 * 128 * 127 = 32512 fits. The caller adds 128 * sum(a) back: kWideOffset.
static_assert(2 * 255 * 127 > INT16_MAX && 2 * 128 * 127 <= INT16_MAX, "why codes are offset");
INLINE VI dot4_wide(VI acc, VB codes, Quads a, int lane) {
    __m256i c = _mm256_xor_si256(codes, _mm256_set1_epi8((char)0x80));
    __m256i signed_a = _mm256_sign_epi8(_mm256_set1_epi32(load_int(a + 4 * lane)), c);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(c), signed_a);
    return in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
enum { kWideOffset = 128 };
// The same with activations as words (Activations::words), which needs neither signs nor an offset: the
// operands are the even codes and the odd ones.
#define WIDE_IN_WORDS
enum { kWideInWords = 1 };
INLINE VI dot_words(VI acc, VB codes, const int16_t* x) {
    const __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(255));
    const __m256i odd = _mm256_srli_epi16(codes, 8);
    acc = in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(even, _mm256_set1_epi32(load_int(x)))));
    return in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(odd, _mm256_set1_epi32(load_int(x + 2)))));
}
#endif
INLINE float reduce_add(VF a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
INLINE VI widen_pairs(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
}
INLINE VI zip_pairs(const int8_t* a, const int8_t* b) {
    const __m128i x = _mm_loadl_epi64((const __m128i*)a), y = _mm_loadl_epi64((const __m128i*)b);
    return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x, y));
}
INLINE VI zip_pairs(const int16_t* a, const int16_t* b) {
    const __m128i x = _mm_loadu_si128((const __m128i*)a), y = _mm_loadu_si128((const __m128i*)b);
    return _mm256_set_m128i(_mm_unpackhi_epi16(x, y), _mm_unpacklo_epi16(x, y));
}
INLINE VI dot_pairs(VI acc, VI codes, VI x) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(codes, x));
}
// The sums of four vectors' lanes.
INLINE void reduce_four(const VF* x, float* out) {
    const VF ab = add(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
    const VF cd = add(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
    const VF all = add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
INLINE float reduce_max(VF a) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
INLINE uint32_t lanes_at_least(VF a, VF b) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ));
}
INLINE uint32_t lanes_nan(VF a, VF b) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q));
}
INLINE VF lanes_kept(VF x, uint32_t bits) {
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i kept = _mm256_and_si256(_mm256_set1_epi32((int)bits), lanes);
    const VF mask = _mm256_castsi256_ps(_mm256_cmpeq_epi32(kept, lanes));
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x, mask);
}
typedef __m256d VD;
INLINE VD zero_wide() { return _mm256_setzero_pd(); }
INLINE void store_wide(double* p, VD x) { _mm256_storeu_pd(p, x); }
INLINE void add_wide(VD* sums, VF x) {
    sums[0] = _mm256_add_pd(sums[0], _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    sums[1] = _mm256_add_pd(sums[1], _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
}
INLINE float reduce_bits(VF a) {  // the largest by its bits, a >= 0 or NaN
    const __m256i x = _mm256_castps_si256(a);
    __m128i b = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
    b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(b));
}

}  // namespace LEVEL
