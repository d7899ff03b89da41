// Rows of numbers of 16 bits, which an instruction multiplies in pairs.
#pragma once

#include "simd.hpp"

namespace LEVEL {

// Whether numbers of which the largest has this magnitude become codes; if not, these are zeros with this scale.
INLINE bool has_codes(float largest) { return largest > 1e-30f && largest <= 0x1.fffffep127f; }
INLINE float scale_without_codes(float largest) { return largest <= 1e-30f ? 0.0f : __builtin_nanf(""); }

// count values as 16 bits in `to`, zeros up to a multiple of `padding`. The scale, of which 32767 are the largest
// value or `least`; NaN if a value is not finite.
static float to_int16(const float* x, int64_t count, int64_t padding, int16_t* to, float least = 0.0f) {
    VF peak = zero();
    const int64_t whole = count / kLanes * kLanes, padded = (count + padding - 1) / padding * padding;
    float rest[kLanes] = {};
    memcpy(rest, x + whole, sizeof(float) * (size_t)(count - whole));
    for (int64_t i = 0; i < whole; i += kLanes) peak = max_bits(peak, load(x + i));
    const float highest = reduce_bits(max_bits(peak, load(rest))), largest = least > highest ? least : highest;
    if (!has_codes(largest)) {
        memset(to, 0, sizeof(int16_t) * (size_t)padded);
        return scale_without_codes(largest);
    }
    const VF inverse = set1(32767.0f / largest);
    for (int64_t i = 0; i < whole; i += kLanes) store_words(to + i, round_int(mul(load(x + i), inverse)));
    if (whole < padded) {
        int16_t words[kLanes];
        store_words(words, round_int(mul(load(rest), inverse)));
        memset(to + whole, 0, sizeof(int16_t) * (size_t)(padded - whole));
        memcpy(to + whole, words, sizeof(int16_t) * (size_t)(count - whole));
    }
    return largest / 32767.0f;
}

// Pairs, one for each lane; and one pair for all lanes.
INLINE VI load_pairs(const int16_t* x) {
    VI pairs;
    memcpy(&pairs, x, sizeof pairs);
    return pairs;
}

INLINE VI load_pair(const int16_t* x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return set1_int(pair);
}

INLINE void store_pairs(int16_t* to, VI pairs) { memcpy(to, &pairs, sizeof pairs); }

}  // namespace LEVEL
