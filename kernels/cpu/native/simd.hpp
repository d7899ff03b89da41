// Vectors of kLanes floats, int32 or 4-byte code groups, one set per instruction-set level.
//
// The kernels are written once on top of these and compiled once per level, each time inside its
// own namespace (LEVEL). Everything here is `static inline`: a template or inline function with
// external linkage, merged by the linker across levels, would let AVX-512 code run on a CPU without
// it. For the same reason no C++ standard header is included.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace LEVEL {

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, bits = (uint32_t)(h & 0x7fff) << 13, out;
    float value;
    if (bits >= 0x0f800000) {
        bits |= 0x7f800000;  // inf and NaN
        memcpy(&value, &bits, 4);
    } else {
        memcpy(&value, &bits, 4);
        value *= 0x1p112f;  // moves the exponent bias; exact, denormals included
    }
    memcpy(&out, &value, 4);
    out |= sign;
    memcpy(&value, &out, 4);
    return value;
}

INLINE uint16_t float_to_half(float x) {  // round to nearest even; x is finite in range or NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x47800000) return sign | 0x7c00;
    if (bits < 0x38800000) {  // below 2^-14: add a constant whose last bit is 2^-24
        float value;
        memcpy(&value, &bits, 4);
        value += 0.5f;
        memcpy(&bits, &value, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    bits += 0xc8000fff + ((bits >> 13) & 1);
    return sign | (uint16_t)(bits >> 13);
}

INLINE uint16_t float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float bf16_to_float(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// 8-bit floats: the bits of a float16, whose exponent has 5 bits; e4m3 is then 2^8 too small.
INLINE float e5m2_to_float(uint8_t x) { return half_to_float((uint16_t)(x << 8)); }
INLINE float e4m3_to_float(uint8_t x) {
    if ((x & 0x7f) == 0x7f) return __builtin_nanf("");
    return half_to_float((uint16_t)((x & 0x80) << 8 | (x & 0x7f) << 7)) * 256.0f;
}

INLINE float e8m0_to_float(uint8_t x) {  // 2^(x - 127); the first is denormal, 255 is NaN
    const uint32_t bits = x == 0 ? 0x00400000u : x == 255 ? 0x7fc00000u : (uint32_t)x << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

#if defined(__AVX2__)
// 16 numbers of 4 bits: byte i holds the i-th and, above it, the one 8 after it.
INLINE __m128i nibbles(const uint8_t* p) {
    const __m128i x = _mm_loadl_epi64((const __m128i*)p);
    return _mm_and_si128(_mm_unpacklo_epi64(x, _mm_srli_epi64(x, 4)), _mm_set1_epi8(15));
}
// 16 numbers of 2 bits: byte i holds the i-th and, above it, those 4, 8 and 12 after it.
INLINE __m128i pairs(const uint8_t* p) {
    int32_t word;
    memcpy(&word, p, 4);
    const __m128i x = _mm_srlv_epi32(_mm_set1_epi32(word), _mm_setr_epi32(0, 2, 4, 6));
    return _mm_and_si128(x, _mm_set1_epi8(3));
}

// sums[h] = sum of bytes 16 h .. 16 h + 15 of q
INLINE void half_sums(__m256i q, int32_t* sums) {
    __m256i s = _mm256_sad_epu8(_mm256_xor_si256(q, _mm256_set1_epi8((char)0x80)),
                                _mm256_setzero_si256());
    s = _mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0x4e));
    sums[0] = _mm256_extract_epi32(s, 0) - 16 * 128;
    sums[1] = _mm256_extract_epi32(s, 4) - 16 * 128;
}
#endif

#if defined(__AVX512VNNI__)

enum { kLanes = 16 };
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
INLINE VF to_float(VI x) { return _mm512_cvtepi32_ps(x); }
INLINE VF power_of_two(VI n) {  // 2^n, n in -127..127 (-127 gives 0)
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
INLINE VI zero_int() { return _mm512_setzero_si512(); }
INLINE VI set1_int(int32_t x) { return _mm512_set1_epi32(x); }
INLINE VI mul_int(VI a, VI b) { return _mm512_mullo_epi32(a, b); }
INLINE VI add_int(VI a, VI b) { return _mm512_add_epi32(a, b); }
// The larger of a and |b| by their bits: inf and NaN are above every number.
INLINE VF max_bits(VF a, VF b) {
    return _mm512_castsi512_ps(
        _mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(_mm512_abs_ps(b))));
}
// 32 values times `inverse`, rounded to nearest even, at most 127 in magnitude
INLINE void round_block(const float* x, float inverse, int8_t* q, int32_t* sums) {
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
INLINE VI dot4(VI acc, VB codes, const int8_t* a) {
    return _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(load_int(a)));
}
INLINE VI dot4_wide(VI acc, VB codes, const int8_t* a) { return dot4(acc, codes, a); }
enum { kWideOffset = 0 };
INLINE float reduce_add(VF x) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
INLINE float reduce_max(VF x) { return _mm512_reduce_max_ps(x); }
// One bit per lane: a >= b; a or b is NaN.
INLINE uint32_t lanes_at_least(VF a, VF b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE uint32_t lanes_nan(VF a, VF b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
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

#elif defined(__AVX2__)

enum { kLanes = 8 };
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
INLINE VF to_float(VI x) { return _mm256_cvtepi32_ps(x); }
INLINE VF power_of_two(VI n) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
INLINE VI zero_int() { return _mm256_setzero_si256(); }
INLINE VI set1_int(int32_t x) { return _mm256_set1_epi32(x); }
INLINE VI mul_int(VI a, VI b) { return _mm256_mullo_epi32(a, b); }
INLINE VI add_int(VI a, VI b) { return _mm256_add_epi32(a, b); }
// The larger of a and |b| by their bits: inf and NaN are above every number.
INLINE VF max_bits(VF a, VF b) {
    return _mm256_castsi256_ps(
        _mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(abs(b))));
}
// 32 values times `inverse`, rounded to nearest even, at most 127 in magnitude
INLINE void round_block(const float* x, float inverse, int8_t* q, int32_t* sums) {
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
INLINE VI dot4(VI acc, VB codes, const int8_t* a) {
    return _mm256_dpbusd_avx_epi32(acc, codes, _mm256_set1_epi32(load_int(a)));
}
INLINE VI dot4_wide(VI acc, VB codes, const int8_t* a) { return dot4(acc, codes, a); }
enum { kWideOffset = 0 };
#else
// vpmaddubsw saturates at 32767; codes of up to 7 bits stay below: 2 * 127 * 127 = 32258.
INLINE VI dot4(VI acc, VB codes, const int8_t* a) {
    __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi32(load_int(a)));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// 8-bit codes would saturate (2 * 255 * 127). Taken as code - 128 their magnitude is at most 128:
// 2 * 128 * 127 = 32512 fits. The caller adds 128 * sum(a) back: kWideOffset.
INLINE VI dot4_wide(VI acc, VB codes, const int8_t* a) {
    __m256i c = _mm256_xor_si256(codes, _mm256_set1_epi8((char)0x80));
    __m256i signed_a = _mm256_sign_epi8(_mm256_set1_epi32(load_int(a)), c);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(c), signed_a);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
enum { kWideOffset = 128 };
#endif
INLINE float reduce_add(VF a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
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

#else  // portable: 4 lanes in the compilers' own vector types, which become SSE2 or NEON

enum { kLanes = 4 };
typedef float VF __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
typedef uint8_t VB __attribute__((vector_size(16)));

INLINE VF zero() { return VF{}; }
INLINE VF set1(float x) { return VF{x, x, x, x}; }
INLINE VF load(const float* p) {
    VF x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store(float* p, VF x) { memcpy(p, &x, sizeof x); }
INLINE VF load_half(const uint16_t* p) {
    return VF{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
INLINE VF load_bf16(const uint16_t* p) {
    return VF{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])};
}
INLINE VF load_u8(const uint8_t* p) {
    return VF{(float)p[0], (float)p[1], (float)p[2], (float)p[3]};
}
INLINE VF load_i8(const uint8_t* p) {
    return VF{(float)(int8_t)p[0], (float)(int8_t)p[1], (float)(int8_t)p[2], (float)(int8_t)p[3]};
}
INLINE VF load_u4(const uint8_t* p, int64_t lane) {
    VF x;
    for (int i = 0; i < kLanes; ++i) x[i] = (float)(p[(lane + i) % 8] >> (lane + i) / 8 * 4 & 15);
    return x;
}
INLINE VF load_u2(const uint8_t* p, int64_t lane) {
    VF x;
    for (int i = 0; i < kLanes; ++i) x[i] = (float)(p[(lane + i) % 4] >> (lane + i) / 4 * 2 & 3);
    return x;
}
INLINE VF load_i6(const uint8_t* p, int64_t lane) {
    return load_u4(p, lane) + 16.0f * load_u2(p + 8, lane) - 32.0f;
}
INLINE VF load_e5m2(const uint8_t* p) {
    return VF{e5m2_to_float(p[0]), e5m2_to_float(p[1]), e5m2_to_float(p[2]), e5m2_to_float(p[3])};
}
INLINE VF load_e4m3(const uint8_t* p) {
    return VF{e4m3_to_float(p[0]), e4m3_to_float(p[1]), e4m3_to_float(p[2]), e4m3_to_float(p[3])};
}
INLINE VF load_e8m0(const uint8_t* p) {
    return VF{e8m0_to_float(p[0]), e8m0_to_float(p[1]), e8m0_to_float(p[2]), e8m0_to_float(p[3])};
}
INLINE void store_half(uint16_t* p, VF x) {
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(x[i]);
}
INLINE VF add(VF a, VF b) { return a + b; }
INLINE VF sub(VF a, VF b) { return a - b; }
INLINE VF mul(VF a, VF b) { return a * b; }
INLINE VF div(VF a, VF b) { return a / b; }
#if defined(__FP_FAST_FMAF)
INLINE VF fma(VF a, VF b, VF c) {
    for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}
#else  // a software fma costs ~20 times a multiplication: this level rounds twice
INLINE VF fma(VF a, VF b, VF c) { return a * b + c; }
#endif
INLINE VF fnma(VF a, VF b, VF c) { return fma(-a, b, c); }  // c - a * b
INLINE VF select(VI mask, VF yes, VF no) { return (VF)((mask & (VI)yes) | (~mask & (VI)no)); }
INLINE VF max(VF a, VF b) { return select(a > b, a, b); }  // NaN in b wins
INLINE VF min(VF a, VF b) { return select(a < b, a, b); }  // NaN in b wins
INLINE VF abs(VF a) { return (VF)((VI)a & 0x7fffffff); }
INLINE VF copysign(VF a, VF sign) {  // a >= 0
    return (VF)((VI)a | ((VI)sign & (int32_t)0x80000000));
}
INLINE VF power_below(VF a) { return (VF)((VI)a & 0x7f800000); }  // the mantissa 0; a >= 0
INLINE VF select_less(VF a, VF b, VF yes, VF no) { return select(a < b, yes, no); }
// |x| < 2^22: adding 1.5 * 2^23 rounds to nearest even
INLINE VI round_int(VF x) { return (VI)(x + 12582912.0f) - 0x4b400000; }
INLINE VF to_float(VI x) { return __builtin_convertvector(x, VF); }
INLINE VF power_of_two(VI n) { return (VF)((n + 127) << 23); }
INLINE VI zero_int() { return VI{}; }
INLINE VI set1_int(int32_t x) { return VI{x, x, x, x}; }
INLINE VI mul_int(VI a, VI b) { return a * b; }
INLINE VI add_int(VI a, VI b) { return a + b; }
// The larger of a and |b| by their bits: inf and NaN are above every number.
INLINE VF max_bits(VF a, VF b) { return select((VI)a > (VI)abs(b), a, abs(b)); }
// 32 values times `inverse`, rounded to nearest even, at most 127 in magnitude
INLINE void round_block(const float* x, float inverse, int8_t* q, int32_t* sums) {
    VI total = VI{};
    for (int i = 0; i < 32; i += kLanes) {
        const VI code = round_int(mul(load(x + i), set1(inverse)));
        for (int lane = 0; lane < kLanes; ++lane) q[i + lane] = (int8_t)code[lane];
        total = i % 16 ? total + code : code;
        sums[i / 16] = total[0] + total[1] + total[2] + total[3];
    }
}
INLINE VB load_codes(const uint8_t* p) {
    VB x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store_codes(uint8_t* p, VB x) { memcpy(p, &x, sizeof x); }
INLINE VB code_or(VB a, VB b) { return a | b; }
INLINE VB field(VB p, int from, int mask, int to) {
    VI x = (VI)p;  // whole words: bits that cross a byte are masked away
    if (from > to) x = x >> (from - to);
    if (from < to) x = x << (to - from);
    const uint8_t m = (uint8_t)(mask << to);
    return (VB)x & VB{m, m, m, m, m, m, m, m, m, m, m, m, m, m, m, m};
}
INLINE VI code_int(VB p, int b) { return ((VI)p >> (8 * b)) & 255; }
INLINE VB load_table(const uint8_t* p) { return load_codes(p); }
INLINE VB look_up(VB table, VB index) {
    uint8_t entries[16];
    memcpy(entries, &table, 16);
    for (int i = 0; i < 16; ++i) index[i] = entries[index[i]];
    return index;
}
INLINE VF look_up_float(const float* table, VI index) {
    return VF{table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
}
#if defined(__x86_64__)  // SSE2, which every x86-64 CPU has
INLINE VI dot4(VI acc, VB codes, const int8_t* a) {
    int32_t four;
    memcpy(&four, a, 4);
    const __m128i none = _mm_setzero_si128(), bytes = _mm_set1_epi32(four);
    const __m128i wide = _mm_unpacklo_epi8(bytes, _mm_cmpgt_epi8(none, bytes));
    const __m128i low = _mm_madd_epi16(_mm_unpacklo_epi8((__m128i)codes, none), wide);
    const __m128i high = _mm_madd_epi16(_mm_unpackhi_epi8((__m128i)codes, none), wide);
    const VI even = (VI)_mm_shuffle_ps((__m128)low, (__m128)high, 0x88);
    const VI odd = (VI)_mm_shuffle_ps((__m128)low, (__m128)high, 0xdd);
    return acc + (even + odd);
}
#else
INLINE VI dot4(VI acc, VB c, const int8_t* a) {
    for (int i = 0; i < kLanes; ++i)
        acc[i] += c[4 * i] * a[0] + c[4 * i + 1] * a[1] + c[4 * i + 2] * a[2] + c[4 * i + 3] * a[3];
    return acc;
}
#endif
INLINE VI dot4_wide(VI acc, VB codes, const int8_t* a) { return dot4(acc, codes, a); }
enum { kWideOffset = 0 };
INLINE float reduce_add(VF a) { return (a[0] + a[2]) + (a[1] + a[3]); }
INLINE float reduce_max(VF a) {
    float low = a[0] > a[1] ? a[0] : a[1], high = a[2] > a[3] ? a[2] : a[3];
    return low > high ? low : high;
}
INLINE uint32_t lane_bits(VI mask) {  // one bit of every lane that is all ones
    return (uint32_t)((mask[0] & 1) | (mask[1] & 2) | (mask[2] & 4) | (mask[3] & 8));
}
INLINE uint32_t lanes_at_least(VF a, VF b) { return lane_bits(a >= b); }
INLINE uint32_t lanes_nan(VF a, VF b) { return lane_bits((a != a) | (b != b)); }
typedef double VD __attribute__((vector_size(16)));
INLINE VD zero_wide() { return VD{}; }
INLINE void store_wide(double* p, VD x) { memcpy(p, &x, sizeof x); }
INLINE void add_wide(VD* sums, VF x) {
    sums[0] += VD{(double)x[0], (double)x[1]};
    sums[1] += VD{(double)x[2], (double)x[3]};
}
INLINE float reduce_bits(VF a) {  // the largest by its bits, a >= 0 or NaN
    VF b = max_bits(a, VF{a[2], a[3], a[0], a[1]});
    b = max_bits(b, VF{b[1], b[0], b[3], b[2]});
    return b[0];
}

#endif

INLINE VF code_float(VB p, int b) { return to_float(code_int(p, b)); }

// The high half of a byte, as float: (byte - 7.5) / 16 lies within 0.47 of it.
INLINE VF load_high4(const uint8_t* p) {
    return to_float(round_int(mul(sub(load_u8(p), set1(7.5f)), set1(0.0625f))));
}
INLINE VF load_low4(const uint8_t* p) { return sub(load_u8(p), mul(load_high4(p), set1(16.0f))); }

#if defined(__AVX2__)
// Numbers of 16 rows in fewer bits than 8 (abi.hpp), from row `lane` on.
INLINE VF load_u4(const uint8_t* p, int64_t lane) { return lanes_float(nibbles(p), lane); }
INLINE VF load_u2(const uint8_t* p, int64_t lane) { return lanes_float(pairs(p), lane); }
INLINE VF load_i6(const uint8_t* p, int64_t lane) {
    const __m128i six = _mm_or_si128(nibbles(p), _mm_slli_epi16(pairs(p + 8), 4));
    return lanes_float(_mm_sub_epi8(six, _mm_set1_epi8(32)), lane);
}
#endif

// kLanes elements of any stored type, as float.
INLINE VF load_as(int type, const void* base, int64_t index) {
    switch (type) {
        case 0: return load_half((const uint16_t*)base + index);
        case 1: return load_bf16((const uint16_t*)base + index);
        case 2: return load((const float*)base + index);
        case 3: return load_u8((const uint8_t*)base + index);
        case 5: return load_e4m3((const uint8_t*)base + index);
        case 6: return load_e5m2((const uint8_t*)base + index);
        case 7: return load_low4((const uint8_t*)base + index);
        case 8: return load_high4((const uint8_t*)base + index);
        case 9: return load_e8m0((const uint8_t*)base + index);
        case 11: return load_u2((const uint8_t*)base + index / 16 * 4, index % 16);
        case 12: return load_u4((const uint8_t*)base + index / 16 * 8, index % 16);
        case 13: return load_i6((const uint8_t*)base + index / 16 * 12, index % 16);
        default: return load_i8((const uint8_t*)base + index);
    }
}

}  // namespace LEVEL
