// Converts keys and values to the elements of a page: floats, or codes with scales.
//
// kernels/kv/kv_types.py and reference/page_codes.py define the same numbers.
#pragma once

#include "abi.hpp"
#include "simd.hpp"

namespace LEVEL {

// Beyond float16's range values saturate instead of becoming inf; NaN stays NaN.
INLINE float saturate(float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }

INLINE uint16_t to_half(float x) { return float_to_half(saturate(x)); }

// `count` floats as 16-bit values of a page.
INLINE void narrow(const float* x, int count, int type, uint16_t* to) {
    if (type == kBF16) {
        for (int i = 0; i < count; ++i) to[i] = float_to_bf16(x[i]);
        return;
    }
    int i = 0;
    for (; i + kLanes <= count; i += kLanes)
        store_half(to + i, max(set1(-65504.0f), min(set1(65504.0f), load(x + i))));
    for (; i < count; ++i) to[i] = to_half(x[i]);
}

// One step of the transform below: sums and differences of values SPAN apart. SPAN is a constant, so that the
// compiler exchanges lanes of vectors: one value at a time made `mix` 3 to 4 times slower.
template <int SPAN>
INLINE void butterflies(float* x, int width) {
    for (int i = 0; i < width; i += 2 * SPAN)
        for (int j = i; j < i + SPAN; ++j) {
            const float a = x[j], b = x[j + SPAN];
            x[j] = a + b;
            x[j + SPAN] = a - b;
        }
}

// Of a head: the largest power of two that divides its dimensions, and those of a value that is a part of it.
INLINE int mixed_block(int width, int also) { return (width | also) & -(width | also); }

// Multiplies a head by the orthonormal Hadamard matrix, in blocks (mixed_block). Dot products stay the same if both vectors are mixed, and mixing twice
// restores a vector. Integers share their step, which a few large channels would set for all. With
// one scale per head, mixing lowers the KL divergence of Gemma 3 270M with int8 pages from 0.0058 to
// 0.0012, that of SmolLM2 from 0.00125 to 0.00026. With e4m3 pages it raises that of Gemma from
// 0.0058 to 0.0203.
static void mix(float* x, int width, int block) {  // block: at least 8
    butterflies<1>(x, width);
    butterflies<2>(x, width);
    butterflies<4>(x, width);
    if (block > 8) butterflies<8>(x, width);
    for (int span = 16; span < block; span *= 2)
        for (int i = 0; i < width; i += 2 * span)
            for (int j = i; j < i + span; j += kLanes) {
                const VF a = load(x + j), b = load(x + j + span);
                store(x + j, add(a, b));
                store(x + j + span, sub(a, b));
            }
    const float norm = (float)(1.0 / __builtin_sqrt((double)block));
    for (int i = 0; i < width; ++i) x[i] *= norm;
}

// A key or value that becomes codes or is mixed. inf would become NaN in all dimensions: it
// saturates.
static void prepare(const PageSide& side, const float* x, float* to, int width, int block) {
    for (int d = 0; d < width; ++d) to[d] = saturate(x[d]);
    if (side.mixed) mix(to, width, block);
}

INLINE bool prepares(const PageSide& side) { return side.scales || side.mixed; }

// The largest magnitude; NaN if there is one.
INLINE float peak_of(const float* x, int count) {
    uint32_t bits[kMaxHeadDim], largest = 0;  // of magnitudes; NaN lies above inf
    memcpy(bits, x, sizeof(float) * (size_t)count);
    for (int i = 0; i < count; ++i) {
        const uint32_t size = bits[i] & 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    float peak;
    memcpy(&peak, &largest, sizeof peak);
    return peak;
}

// Scales of a head; none where the page holds floats.
INLINE int groups_of(const PageSide& side, int head_dim) {
    return side.scales ? (head_dim + side.group - 1) / side.group : 0;
}

// The first scale of a head in a slot; null where there are none.
INLINE uint16_t* scales_of(const PageSide& side, int head_dim, int64_t page, int head,
                           int64_t slot) {
    if (!side.scales) return nullptr;
    return side.scales + page * side.scale_page + head * groups_of(side, head_dim) * side.scale_row +
           slot;
}

INLINE float clamp(float x, float low, float high) {
    x = x < high ? x : high;
    return x > low ? x : low;
}

// To nearest even, |x| < 2^22: adding 1.5 * 2^23 leaves no bits behind the point.
INLINE float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; }

// To nearest even; |x| is at most 448. Below 2^-6 and 2^-14 the steps are equal: a constant is
// added whose last bit is one step.
INLINE uint8_t float_to_f8(float x, int type) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
    bits &= 0x7fffffff;
    const int shift = type == kE4M3 ? 20 : 21;
    const uint32_t smallest = type == kE4M3 ? 0x3c800000 : 0x38800000;
    if (bits < smallest) {
        const float step = type == kE4M3 ? 16384.0f : 128.0f;
        float value;
        uint32_t base;
        memcpy(&value, &bits, 4);
        memcpy(&base, &step, 4);
        value += step;
        memcpy(&bits, &value, 4);
        return sign | (uint8_t)(bits - base);
    }
    bits -= smallest - (1u << 23);  // the exponent's bias
    bits += (1u << (shift - 1)) - 1 + (bits >> shift & 1);
    return sign | (uint8_t)(bits >> shift);
}

// kLanes values from x[i] on; those from x[count] on count as zeros.
INLINE VF vector_of(const float* x, int i, int count) {
    if (i + kLanes <= count) return load(x + i);
    float rest[kLanes] = {};
    memcpy(rest, x + i, sizeof(float) * (size_t)(count - i));
    return load(rest);
}

// The type of the scales of codes without zeros, and such a scale.
INLINE int scale_type(int type) { return type == kI16 ? kBF16 : kF16; }
INLINE float scale_of(int type, uint16_t scale) {
    return type == kI16 ? bf16_to_float(scale) : half_to_float(scale);
}

// What the largest value becomes. An e5m2 goes to 57344, but then the scales of ordinary heads
// would be too small for an f16.
INLINE float largest_code(int type) { return type == kI8 ? 127.0f : 448.0f; }

// x ~ scale * to, which is written in whole vectors. The scale is rounded to float16 first and the
// codes follow it, so that this rounding costs nothing. With a NaN in x the scale is NaN: it must
// stay visible.
INLINE uint16_t round_codes(const float* x, int count, int type, uint8_t* to) {
    const float most = largest_code(type);
    const uint16_t half = to_half(peak_of(x, count) / most);
    const float scale = half_to_float(half);
    if (scale != scale) {
        memset(to, 0, (size_t)count);
        return half;
    }
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int i = 0; i < count && type == kI8; i += kLanes) {
        const VF code = mul(vector_of(x, i, count), set1(inverse));
        store_bytes(to + i, round_int(min(max(code, set1(-most)), set1(most))));
    }
    for (int i = 0; i < count && type != kI8; ++i)
        to[i] = float_to_f8(clamp(x[i] * inverse, -most, most), type);
    return half;
}

// The same for kI16. Its scale is a bfloat16: float16 has fewer than 11 bits for peaks below 0.5. It is rounded
// up, so that no code is above kMostWord. Peaks of 1e-30 and less become 0: the inverse would be infinite.
INLINE uint16_t round_words(const float* x, int count, int16_t* to) {
    const float peak = peak_of(x, count), step = peak / (float)kMostWord;
    if (!(peak > 1e-30f)) {
        memset(to, 0, sizeof(int16_t) * (size_t)count);
        return peak != peak ? float_to_bf16(peak) : (uint16_t)0;
    }
    uint32_t bits;
    memcpy(&bits, &step, 4);
    const uint16_t half = (uint16_t)((bits + 0xffff) >> 16);
    const VF inverse = set1(1.0f / bf16_to_float(half)), most = set1((float)kMostWord);
    for (int i = 0; i < count; i += kLanes) {
        const VF code = mul(vector_of(x, i, count), inverse);
        store_words(to + i, round_int(min(max(code, sub(zero(), most)), most)));
    }
    return half;
}

enum { kNaNScale = 0xff };

// To nearest even.
INLINE uint8_t to_short_scale(float x) {
    const uint32_t half = to_half(x), bits = (half + 63 + (half >> 7 & 1)) >> 7;
    return (uint8_t)(bits < 0xf7 ? bits : 0xf7);  // the largest below inf
}

// x ~ scale * (to - zero / 16), to in 0..15; returns scale and zero. The middle of the range is
// code 7.5, so that both ends are as far off.
INLINE uint16_t round_nibbles(const float* x, int count, uint8_t* to) {
    VF highest = zero(), lowest = zero();  // lowest: without its sign
    uint32_t unknown = 0;
    for (int i = 0; i < count; i += kLanes) {
        const VF part = vector_of(x, i, count);
        unknown |= lanes_nan(part, part);
        highest = max(part, highest);
        lowest = max(sub(zero(), part), lowest);
    }
    if (unknown) {
        memset(to, 0, (size_t)count);
        return kNaNScale;
    }
    const float high = reduce_max(highest), low = -reduce_max(lowest);
    const uint8_t bits = to_short_scale((high - low) / 15.0f);
    const float scale = short_scale(bits), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    const float middle = (high + low) * 0.5f * inverse;
    const float at = clamp(round_even((7.5f - middle) * 16.0f), 0.0f, 255.0f);
    const VF by = set1(inverse), offset = set1(at * 0.0625f), most = set1(15.0f);
    for (int i = 0; i < count; i += kLanes) {
        const VF code = add(mul(vector_of(x, i, count), by), offset);
        store_bytes(to + i, round_int(min(max(code, zero()), most)));
    }
    return (uint16_t)((uint16_t)at << 8 | bits);
}

// Element i of floats or fp8 codes; kE4M3 as load_page has it.
INLINE float load_one(const PageSide& side, int64_t i) {
    const void* base = side.data;
    switch (side.type) {
        case kF32: return ((const float*)base)[i];
        case kF16: return half_to_float(((const uint16_t*)base)[i]);
        case kE4M3: return e4m3_as_half(((const uint8_t*)base)[i]);
        case kE5M2: return e5m2_to_float(((const uint8_t*)base)[i]);
        default: return bf16_to_float(((const uint16_t*)base)[i]);
    }
}

template <typename T>
INLINE void spread(const T* x, int count, T* to, int64_t stride) {
    for (int i = 0; i < count; ++i) to[i * stride] = x[i];
}

// One head of one token into its slot: elements `stride` apart, from element `at`; its scales
// `side.scale_row` apart.
static void to_page(const PageSide& side, int64_t at, int64_t stride, uint16_t* scales,
                    const float* x, int count) {
    if (side.type == kF32) {
        spread(x, count, (float*)side.data + at, stride);
        return;
    }
    if (!side.scales) {
        uint16_t halves[kMaxHeadDim];
        narrow(x, count, side.type, halves);
        spread(halves, count, (uint16_t*)side.data + at, stride);
        return;
    }
    if (side.type == kI16) {
        int16_t codes[kMaxHeadDim + kLanes];
        for (int d = 0; d < count; d += side.group, scales += side.scale_row)
            *scales = round_words(x + d, side.group < count - d ? side.group : count - d, codes + d);
        spread(codes, count, (int16_t*)side.data + at, stride);
        return;
    }
    uint8_t codes[kMaxHeadDim + kLanes];
    for (int d = 0; d < count; d += side.group, scales += side.scale_row) {
        const int width = side.group < count - d ? side.group : count - d;
        *scales = side.type == kI4 ? round_nibbles(x + d, width, codes + d)
                                   : round_codes(x + d, width, side.type, codes + d);
    }
    if (side.type == kI4) {
        count /= 2;
        for (int d = 0; d < count; ++d) codes[d] |= (uint8_t)(codes[count + d] << 4);
    }
    spread(codes, count, (uint8_t*)side.data + at, stride);
}

}  // namespace LEVEL
