// Converts numbers of 8 and 16 bits to floats and back, one at a time.
//
// Everything here is `static inline` and inside LEVEL, as in simd.hpp.
#pragma once

#include <stdint.h>
#include <string.h>

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
INLINE float e4m3_as_half(uint8_t x) {  // without that factor; NaN as if it were 480
    return half_to_float((uint16_t)((x & 0x80) << 8 | (x & 0x7f) << 7));
}
INLINE float e4m3_to_float(uint8_t x) {
    return (x & 0x7f) == 0x7f ? __builtin_nanf("") : e4m3_as_half(x) * 256.0f;
}

// The scale of a kI4 group of a page: the upper 8 bits of an f16 without sign.
INLINE float short_scale(uint8_t bits) { return half_to_float((uint16_t)(bits << 7)); }

INLINE float e8m0_to_float(uint8_t x) {  // 2^(x - 127); the first is denormal, 255 is NaN
    const uint32_t bits = x == 0 ? 0x00400000u : x == 255 ? 0x7fc00000u : (uint32_t)x << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

}  // namespace LEVEL
