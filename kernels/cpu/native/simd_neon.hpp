// NEON, which every 64-bit ARM CPU has; with dot products (ARMv8.2) or 8-bit matrix products (i8mm):
// 4 lanes.
#pragma once

#include <arm_neon.h>

#include "numbers.hpp"

namespace LEVEL {

enum { kLanes = 4, kRegisters = 32 };
typedef float32x4_t VF;
typedef int32x4_t VI;
typedef uint8x16_t VB;

INLINE VF zero() { return vdupq_n_f32(0.0f); }
INLINE VF set1(float x) { return vdupq_n_f32(x); }
INLINE VF load(const float* p) { return vld1q_f32(p); }
INLINE void store(float* p, VF x) { vst1q_f32(p, x); }
INLINE VF load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE VF load_bf16(const uint16_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
// 4 bytes, in the lower half of a register.
INLINE uint8x8_t load_bytes(const uint8_t* p) {
    float four;  // a load into a vector register
    memcpy(&four, p, 4);
    return vreinterpret_u8_f32(vset_lane_f32(four, vdup_n_f32(0.0f), 0));
}
INLINE uint16x4_t widen_bytes(uint8x8_t x) { return vget_low_u16(vmovl_u8(x)); }
INLINE VF bytes_float(uint8x8_t x) { return vcvtq_f32_u32(vmovl_u16(widen_bytes(x))); }
INLINE VF load_u8(const uint8_t* p) { return bytes_float(load_bytes(p)); }
INLINE VF load_i8(const uint8_t* p) {
    const int16x4_t wide = vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_bytes(p))));
    return vcvtq_f32_s32(vmovl_s16(wide));
}
// Numbers of 16 rows in fewer than 8 bits (abi.hpp), from row `lane` on, a multiple of 4.
INLINE uint8x8_t nibbles(const uint8_t* p, int64_t lane) {
    const uint8x8_t x = load_bytes(p + lane % 8);
    return lane < 8 ? vand_u8(x, vdup_n_u8(15)) : vshr_n_u8(x, 4);
}
INLINE uint8x8_t pairs(const uint8_t* p, int64_t lane) {
    return vand_u8(vshl_u8(load_bytes(p), vdup_n_s8((int8_t)(-lane / 2))), vdup_n_u8(3));
}
INLINE VF load_u4(const uint8_t* p, int64_t lane) { return bytes_float(nibbles(p, lane)); }
INLINE VF load_u2(const uint8_t* p, int64_t lane) { return bytes_float(pairs(p, lane)); }
INLINE VF load_i6(const uint8_t* p, int64_t lane) {
    const uint8x8_t six = vorr_u8(nibbles(p, lane), vshl_n_u8(pairs(p + 8, lane), 4));
    return vsubq_f32(bytes_float(six), vdupq_n_f32(32.0f));
}
INLINE VF load_e5m2(const uint8_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16(widen_bytes(load_bytes(p)), 8)));
}
// See e4m3_as_half.
INLINE VF load_e4m3_as_half(const uint8_t* p) {
    const int16x4_t wide = vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_bytes(p))));
    const uint16x4_t half = vreinterpret_u16_s16(vshl_n_s16(wide, 7));  // the sign went to the top
    return vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(half, vdup_n_u16(0xbf80))));
}
INLINE VF load_e4m3(const uint8_t* p) {
    const uint8x8_t x = load_bytes(p), low = vdup_n_u8(0x7f);
    const int16x8_t nan = vmovl_s8(vreinterpret_s8_u8(vceq_u8(vand_u8(x, low), low)));
    const uint32x4_t all = vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(nan)));
    const VF value = vmulq_n_f32(load_e4m3_as_half(p), 256.0f);
    return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(value), all));
}
// The halves of a byte.
INLINE VF load_low4(const uint8_t* p) { return bytes_float(vand_u8(load_bytes(p), vdup_n_u8(15))); }
INLINE VF load_high4(const uint8_t* p) { return bytes_float(vshr_n_u8(load_bytes(p), 4)); }
// Scales of kI4 groups, and their zeros in sixteenths.
INLINE VF load_short_scale(const uint16_t* p) {
    const uint16x4_t half = vshr_n_u16(vshl_n_u16(vld1_u16(p), 8), 1);
    return vcvt_f32_f16(vreinterpret_f16_u16(half));
}
INLINE VF load_short_zero(const uint16_t* p) {
    return vcvtq_f32_u32(vmovl_u16(vshr_n_u16(vld1_u16(p), 8)));
}
INLINE VF load_e8m0(const uint8_t* p) {
    const uint32x4_t x = vmovl_u16(widen_bytes(load_bytes(p)));
    const uint32x4_t quiet = vdupq_n_u32(0x00400000);  // also 2^-127
    const uint32x4_t bits = vmaxq_u32(vshlq_n_u32(x, 23), quiet);
    const uint32x4_t nan = vandq_u32(vceqq_u32(x, vdupq_n_u32(255)), quiet);
    return vreinterpretq_f32_u32(vorrq_u32(bits, nan));
}
INLINE void store_half(uint16_t* p, VF x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
INLINE VF add(VF a, VF b) { return vaddq_f32(a, b); }
INLINE VF sub(VF a, VF b) { return vsubq_f32(a, b); }
INLINE VF mul(VF a, VF b) { return vmulq_f32(a, b); }
INLINE VF div(VF a, VF b) { return vdivq_f32(a, b); }
INLINE VF fma(VF a, VF b, VF c) { return vfmaq_f32(c, a, b); }
INLINE VF fnma(VF a, VF b, VF c) { return vfmsq_f32(c, a, b); }  // c - a * b
// fmax and fmin would return NaN for one in a.
INLINE VF max(VF a, VF b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // NaN in b wins
INLINE VF min(VF a, VF b) { return vbslq_f32(vcltq_f32(a, b), a, b); }  // NaN in b wins
INLINE VF abs(VF a) { return vabsq_f32(a); }
INLINE VF copysign(VF a, VF sign) {  // a >= 0
    return vbslq_f32(vdupq_n_u32(0x80000000), sign, a);
}
INLINE VF power_below(VF a) {  // the mantissa 0; a >= 0
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32(0x7f800000)));
}
INLINE VF select_less(VF a, VF b, VF yes, VF no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
INLINE VI round_int(VF x) { return vcvtnq_s32_f32(x); }
INLINE void store_bytes(uint8_t* p, VI x) {  // of integers in -128..127
    const int16x4_t words = vmovn_s32(x);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    const int32_t four = vget_lane_s32(vreinterpret_s32_s8(bytes), 0);
    memcpy(p, &four, 4);
}
INLINE void store_words(int16_t* p, VI x) { vst1_s16(p, vmovn_s32(x)); }  // of integers in -32768..32767
INLINE VF to_float(VI x) { return vcvtq_f32_s32(x); }
INLINE VF power_of_two(VI n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
INLINE VF nearest(VF x) { return vrndnq_f32(x); }
INLINE VF times_power_of_two(VF p, VF n) { return vmulq_f32(p, power_of_two(round_int(n))); }
INLINE VI zero_int() { return vdupq_n_s32(0); }
INLINE VI set1_int(int32_t x) { return vdupq_n_s32(x); }
INLINE VI add_int(VI a, VI b) { return vaddq_s32(a, b); }
// The larger of a and |b| by their bits: inf and NaN are above every number.
INLINE VF max_bits(VF a, VF b) {
    return vreinterpretq_f32_s32(
        vmaxq_s32(vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(vabsq_f32(b))));
}
// 32 values times `inverse`, rounded to nearest even, at most 127 in magnitude
INLINE void to_int8(const float* x, float inverse, int8_t* q, int32_t* sums) {
    for (int h = 0; h < 2; ++h, x += 16) {
        int16x8_t words[2];
        for (int i = 0; i < 2; ++i) {
            const VI low = round_int(vmulq_n_f32(load(x + 8 * i), inverse));
            const VI high = round_int(vmulq_n_f32(load(x + 8 * i + 4), inverse));
            words[i] = vcombine_s16(vmovn_s32(low), vmovn_s32(high));
        }
        vst1q_s8(q + 16 * h, vcombine_s8(vmovn_s16(words[0]), vmovn_s16(words[1])));
        sums[h] = vaddvq_s16(vaddq_s16(words[0], words[1]));
    }
}
INLINE VB load_codes(const uint8_t* p) { return vld1q_u8(p); }
INLINE void store_codes(uint8_t* p, VB x) { vst1q_u8(p, x); }
INLINE VB code_or(VB a, VB b) { return vorrq_u8(a, b); }
// Bytes are shifted on their own: ARM has no instruction for a mask of the remaining bits.
INLINE VB field(VB p, int from, int mask, int to) {
    const int shift = from - to;
    const VB shifted = shift > 0 ? p >> (uint8_t)shift : shift < 0 ? p << (uint8_t)-shift : p;
    const int left = shift > 0 ? 255 >> shift : 255 << -shift & 255;
    return left == mask << to ? shifted : vandq_u8(shifted, vdupq_n_u8((uint8_t)(mask << to)));
}
INLINE VI code_int(VB p, int b) {
    const uint32x4_t x = vreinterpretq_u32_u8(p) >> (uint32_t)(8 * b);
    return vreinterpretq_s32_u32(b == 3 ? x : vandq_u32(x, vdupq_n_u32(255)));
}
INLINE VB load_table(const uint8_t* p) { return vld1q_u8(p); }
INLINE VB look_up(VB table, VB index) { return vqtbl1q_u8(table, index); }
INLINE VF look_up_float(const float* table, VI index) {
    const uint8_t* bytes = (const uint8_t*)table;
    const uint8x16x4_t all = {
        {vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
    // the four bytes of entry i: 4 i, 4 i + 1, ...
    const VI at = vmlaq_s32(vdupq_n_s32(0x03020100), index, vdupq_n_s32(0x04040404));
    return vreinterpretq_f32_u8(vqtbl4q_u8(all, vreinterpretq_u8_s32(at)));
}
// Sixteen activations: four for each of four vectors of codes, which select theirs by `lane`.
typedef int8x16_t Quads;
INLINE Quads load_quads(const int8_t* q) { return vld1q_s8(q); }
INLINE int8x16_t as_signed(VB x) { return vreinterpretq_s8_u8(x); }
// What the instructions that follow take as a constant. `lane` is one in the unrolled loops.
#define EACH_LANE(lane, use)    \
    switch (lane) {             \
        case 0: return use(0);  \
        case 1: return use(1);  \
        case 2: return use(2);  \
        default: return use(3); \
    }
#if defined(__ARM_FEATURE_DOTPROD)
INLINE VI dot_signed(VI acc, int8x16_t codes, Quads a, int lane) {
#define USE(n) vdotq_laneq_s32(acc, codes, a, n)
    EACH_LANE(lane, USE)
#undef USE
}
#else
INLINE int8x16_t quad(Quads a, int lane) {  // in all lanes
#define USE(n) vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(a), n))
    EACH_LANE(lane, USE)
#undef USE
}
// Two products fit 16 bits: 2 * 128 * 127 = 32512.
static_assert(2 * 128 * 127 <= INT16_MAX, "codes of 7 bits and codes - 128 do not saturate");
INLINE VI dot_signed(VI acc, int8x16_t codes, Quads a, int lane) {
    const int8x16_t four = quad(a, lane);
    const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(four));
    return vpadalq_s16(acc, vpaddq_s16(low, vmull_high_s8(codes, four)));
}
// Products of short codes are summed in 16 bits first: two instructions for sixteen instead of four.
#define SHORT_SUMS
// With fewer vectors sums of both halves of a block would need more registers than there are.
enum { kShortProducts = 1, kLeastRun = 8 };
struct ShortSums {
    int16x8_t low, high;  // of rows 0 and 1, 2 and 3
};
INLINE ShortSums dot_short(ShortSums sums, VB codes, Quads a, int lane) {
    const int8x16_t c = as_signed(codes), four = quad(a, lane);
    return {vmlal_s8(sums.low, vget_low_s8(c), vget_low_s8(four)), vmlal_high_s8(sums.high, c, four)};
}
INLINE VI add_short(VI acc, ShortSums sums) {
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(sums.low), vpaddlq_s16(sums.high)));
}
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
INLINE VI dot4(VI acc, VB codes, Quads a, int lane) {
#define USE(n) vusdotq_laneq_s32(acc, codes, a, n)
    EACH_LANE(lane, USE)
#undef USE
}
INLINE VI dot4_wide(VI acc, VB codes, Quads a, int lane) { return dot4(acc, codes, a, lane); }
enum { kWideOffset = 0 };
#else
INLINE VI dot4(VI acc, VB codes, Quads a, int lane) {  // codes of 7 bits
    return dot_signed(acc, as_signed(codes), a, lane);
}
// 8-bit codes are multiplied as code - 128. The caller adds 128 * sum(a) back: kWideOffset.
INLINE VI dot4_wide(VI acc, VB codes, Quads a, int lane) {
    return dot_signed(acc, as_signed(veorq_u8(codes, vdupq_n_u8(0x80))), a, lane);
}
enum { kWideOffset = 128 };
#endif
#undef EACH_LANE

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define MATRIX_PRODUCTS
// usmmla multiplies two rows of 8 codes by two rows of 8 activations: twice the products of a usdot.
enum { kMatrix = 1 };
INLINE VB first_rows(VB a, VB b) {  // two vectors of codes, of k and k + 4: their rows 0 and 1
    return vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}
INLINE VB last_rows(VB a, VB b) {  // 2 and 3
    return vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}
// Activations k..k + 7 and k + 8..k + 15 of two rows.
struct TwoRows {
    int8x16_t low, high;
};
INLINE TwoRows load_two_rows(const int8_t* a, const int8_t* b) {
    const int64x2_t x = vreinterpretq_s64_s8(vld1q_s8(a)), y = vreinterpretq_s64_s8(vld1q_s8(b));
    return {vreinterpretq_s8_s64(vzip1q_s64(x, y)), vreinterpretq_s8_s64(vzip2q_s64(x, y))};
}
INLINE VI dot8(VI acc, VB codes, int8x16_t x) { return vusmmlaq_s32(acc, codes, x); }
// Rows 0 to 3 of the codes times the first, or the second row of activations.
INLINE VI of_first(VI first, VI last) { return vuzp1q_s32(first, last); }
INLINE VI of_second(VI first, VI last) { return vuzp2q_s32(first, last); }
#endif

INLINE float reduce_add(VF a) {
    const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vpadds_f32(b);
}
INLINE VI widen_pairs(const int8_t* p) { return vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p))); }
INLINE VI zip_pairs(const int8_t* a, const int8_t* b) {
    int32_t x, y;
    memcpy(&x, a, 4);
    memcpy(&y, b, 4);
    const int8x8_t first = vreinterpret_s8_s32(vdup_n_s32(x)), second = vreinterpret_s8_s32(vdup_n_s32(y));
    return vreinterpretq_s32_s16(vmovl_s8(vzip1_s8(first, second)));
}
INLINE VI zip_pairs(const int16_t* a, const int16_t* b) {
    const int16x4_t x = vld1_s16(a), y = vld1_s16(b);
    return vreinterpretq_s32_s16(vcombine_s16(vzip1_s16(x, y), vzip2_s16(x, y)));
}
INLINE VI dot_pairs(VI acc, VI codes, VI x) {
    const int16x8_t a = vreinterpretq_s16_s32(codes), b = vreinterpretq_s16_s32(x);
    const VI low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
    return vaddq_s32(acc, vpaddq_s32(low, vmull_high_s16(a, b)));
}
// The sums of four vectors' lanes.
INLINE void reduce_four(const VF* x, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = reduce_add(x[i]);
}
INLINE float reduce_max(VF a) { return vmaxvq_f32(a); }
INLINE uint32_t lane_bits(uint32x4_t mask) {
    const uint32_t bits[] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(mask, vld1q_u32(bits)));
}
INLINE uint32_t lanes_at_least(VF a, VF b) { return lane_bits(vcgeq_f32(a, b)); }
INLINE uint32_t lanes_nan(VF a, VF b) {
    return lane_bits(vmvnq_u32(vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b))));
}
INLINE VF lanes_kept(VF x, uint32_t bits) {
    const uint32_t lanes[] = {1, 2, 4, 8};
    return vbslq_f32(vtstq_u32(vdupq_n_u32(bits), vld1q_u32(lanes)), x, set1(-__builtin_inff()));
}
typedef float64x2_t VD;
INLINE VD zero_wide() { return vdupq_n_f64(0.0); }
INLINE void store_wide(double* p, VD x) { vst1q_f64(p, x); }
INLINE void add_wide(VD* sums, VF x) {
    sums[0] = vaddq_f64(sums[0], vcvt_f64_f32(vget_low_f32(x)));
    sums[1] = vaddq_f64(sums[1], vcvt_high_f64_f32(x));
}
INLINE float reduce_bits(VF a) {  // the largest by its bits, a >= 0 or NaN
    return vgetq_lane_f32(vreinterpretq_f32_s32(vdupq_n_s32(vmaxvq_s32(vreinterpretq_s32_f32(a)))), 0);
}

}  // namespace LEVEL
