// Any CPU: 4 lanes in the compiler's vector types, which become SSE2 on x86.
#pragma once

#include <math.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "numbers.hpp"

namespace LEVEL {

enum { kLanes = 4, kRegisters = 16 };  // of SSE2
typedef float VF __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
typedef uint32_t VU __attribute__((vector_size(16)));
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
INLINE VF load_e4m3_as_half(const uint8_t* p) {
    return VF{e4m3_as_half(p[0]), e4m3_as_half(p[1]), e4m3_as_half(p[2]), e4m3_as_half(p[3])};
}
// The halves of a byte.
INLINE VF load_low4(const uint8_t* p) {
    return VF{(float)(p[0] & 15), (float)(p[1] & 15), (float)(p[2] & 15), (float)(p[3] & 15)};
}
INLINE VF load_high4(const uint8_t* p) {
    return VF{(float)(p[0] >> 4), (float)(p[1] >> 4), (float)(p[2] >> 4), (float)(p[3] >> 4)};
}
// Scales of kI4 groups, and their zeros in sixteenths.
INLINE VF load_short_scale(const uint16_t* p) {
    return VF{short_scale((uint8_t)p[0]), short_scale((uint8_t)p[1]), short_scale((uint8_t)p[2]),
              short_scale((uint8_t)p[3])};
}
INLINE VF load_short_zero(const uint16_t* p) {
    return VF{(float)(p[0] >> 8), (float)(p[1] >> 8), (float)(p[2] >> 8), (float)(p[3] >> 8)};
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
INLINE void store_bytes(uint8_t* p, VI x) {  // of integers in -128..127
    for (int i = 0; i < kLanes; ++i) p[i] = (uint8_t)x[i];
}
INLINE void store_words(int16_t* p, VI x) {  // of integers in -32768..32767
    for (int i = 0; i < kLanes; ++i) p[i] = (int16_t)x[i];
}
INLINE VF to_float(VI x) { return __builtin_convertvector(x, VF); }
INLINE VF power_of_two(VI n) { return (VF)((n + 127) << 23); }
INLINE VF nearest(VF x) { return to_float(round_int(x)); }
INLINE VF times_power_of_two(VF p, VF n) { return p * power_of_two(round_int(n)); }
INLINE VI zero_int() { return VI{}; }
INLINE VI set1_int(int32_t x) { return VI{x, x, x, x}; }
INLINE VI add_int(VI a, VI b) { return a + b; }
// The larger of a and |b| by their bits: inf and NaN are above every number.
INLINE VF max_bits(VF a, VF b) { return select((VI)a > (VI)abs(b), a, abs(b)); }
// 32 values times `inverse`, rounded to nearest even, at most 127 in magnitude
INLINE void to_int8(const float* x, float inverse, int8_t* q, int32_t* sums) {
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
// Sixteen activations: `dot4` takes four of them, those of `lane`.
typedef const int8_t* Quads;
INLINE Quads load_quads(const int8_t* q) { return q; }
#if defined(__x86_64__)  // SSE2, which every x86-64 CPU has
INLINE VI dot4(VI acc, VB codes, Quads a, int lane) {
    int32_t four;
    memcpy(&four, a + 4 * lane, 4);
    const __m128i none = _mm_setzero_si128(), bytes = _mm_set1_epi32(four);
    const __m128i wide = _mm_unpacklo_epi8(bytes, _mm_cmpgt_epi8(none, bytes));
    const __m128i low = _mm_madd_epi16(_mm_unpacklo_epi8((__m128i)codes, none), wide);
    const __m128i high = _mm_madd_epi16(_mm_unpackhi_epi8((__m128i)codes, none), wide);
    const VI even = (VI)_mm_shuffle_ps((__m128)low, (__m128)high, 0x88);
    const VI odd = (VI)_mm_shuffle_ps((__m128)low, (__m128)high, 0xdd);
    return acc + (even + odd);
}
#else
INLINE VI dot4(VI acc, VB c, Quads a, int lane) {
    a += 4 * lane;
    for (int i = 0; i < kLanes; ++i)
        acc[i] += c[4 * i] * a[0] + c[4 * i + 1] * a[1] + c[4 * i + 2] * a[2] + c[4 * i + 3] * a[3];
    return acc;
}
#endif
INLINE VI dot4_wide(VI acc, VB codes, Quads a, int lane) { return dot4(acc, codes, a, lane); }
enum { kWideOffset = 0 };
INLINE float reduce_add(VF a) { return (a[0] + a[2]) + (a[1] + a[3]); }
// A lane has two numbers of 16 bits.
INLINE VI widen_pairs(const int8_t* p) {
    VI found;
    for (int i = 0; i < 4; ++i) found[i] = (int32_t)((uint32_t)p[2 * i + 1] << 16 | (uint16_t)p[2 * i]);
    return found;
}
template <typename T>
INLINE VI zip_pairs(const T* a, const T* b) {
    VI found;
    for (int i = 0; i < 4; ++i) found[i] = (int32_t)((uint32_t)b[i] << 16 | (uint16_t)a[i]);
    return found;
}
// Unsigned additions: lanes that are not used, such as keys behind the last one, may overflow.
INLINE VI dot_pairs(VI acc, VI codes, VI x) {
    const VU low = (VU)((codes << 16 >> 16) * (x << 16 >> 16)), high = (VU)((codes >> 16) * (x >> 16));
    return (VI)((VU)acc + low + high);
}
// The sums of four vectors' lanes.
INLINE void reduce_four(const VF* x, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = reduce_add(x[i]);
}
INLINE float reduce_max(VF a) {
    float low = a[0] > a[1] ? a[0] : a[1], high = a[2] > a[3] ? a[2] : a[3];
    return low > high ? low : high;
}
INLINE uint32_t lane_bits(VI mask) {  // one bit of every lane that is all ones
    return (uint32_t)((mask[0] & 1) | (mask[1] & 2) | (mask[2] & 4) | (mask[3] & 8));
}
INLINE uint32_t lanes_at_least(VF a, VF b) { return lane_bits(a >= b); }
INLINE uint32_t lanes_nan(VF a, VF b) { return lane_bits((a != a) | (b != b)); }
INLINE VF lanes_kept(VF x, uint32_t bits) {
    const VI lanes = {1, 2, 4, 8}, all = {(int)bits, (int)bits, (int)bits, (int)bits};
    const VI kept = (all & lanes) == lanes;
    return (VF)(((VI)x & kept) | ((VI)set1(-INFINITY) & ~kept));
}
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

}  // namespace LEVEL
