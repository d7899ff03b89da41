// Rounds rows of floats to codes with scales, as the reference in quant/methods does, with the same bits: only
// operations that IEEE 754 rounds in one way, in the same order. One group, or 16 of them, at a time.
//
// Non-finite numbers are reported; what is written then has no meaning.
#pragma once

#include "simd.hpp"

namespace LEVEL {

typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint8_t Codes __attribute__((vector_size(kLanes)));

// Values that are converted at a time: they stay in the first-level cache.
enum { kRoundAtOnce = 512 };
static_assert(kRoundAtOnce % 16 == 0 && (int)kRoundAtOnce >= (int)kMostHqqGroup, "whole vectors, and a group of HQQ");

INLINE VF bits_kept(VF x, int32_t bits) { return (VF)((Ints)x & bits); }
INLINE void store_code_bytes(uint8_t* to, Ints code) {
    const Codes bytes = __builtin_convertvector(code, Codes);
    memcpy(to, &bytes, sizeof bytes);
}

// n <= kRoundAtOnce values from `at` on; the last one again up to whole vectors.
INLINE void load_values(const RoundArgs& a, const uint8_t* row, int64_t at, int64_t n, float* to) {
    const int size = a.type == kF32 ? 4 : 2;
    const uint8_t* from = row + at * size;
    const int64_t whole = n / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) store(to + i, load_as(a.type, from + i * size, 0));
    if (n % 16 == 0) return;
    alignas(64) uint8_t rest[4 * kLanes] = {0};
    memcpy(rest, from + whole * size, (size_t)((n - whole) * size));
    if (whole < n) store(to + whole, load_as(a.type, rest, 0));
    for (int64_t i = n; i % 16; ++i) to[i] = to[n - 1];
}

// The smallest and largest value and the largest magnitude by its bits: infinities and NaN are above all numbers.
struct Range {
    VF low, high, size;
};

INLINE Range no_range() { return {zero(), zero(), zero()}; }

INLINE Range range_with(Range r, const float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes) {
        const VF v = load(x + i);
        r.low = min(v, r.low);
        r.high = max(v, r.high);
        r.size = max_bits(r.size, v);
    }
    return r;
}

INLINE float lowest(VF x) {
    float lane[kLanes], found;
    store(lane, x);
    found = lane[0];
    for (int i = 1; i < kLanes; ++i) found = lane[i] < found ? lane[i] : found;
    return found;
}

// The largest magnitude; notes what is not finite.
INLINE float magnitude(RoundArgs* a, VF size) {
    const float found = reduce_bits(size);
    if (!(found < INFINITY)) a->bad = 1;
    return found;
}

INLINE float plain_nearest(float x) {  // |x| < 2^22
    volatile float shifted = x + 12582912.0f;
    return shifted - 12582912.0f;
}

struct Step {
    float scale, zero;
};

// The step of a group, as methods/integers.py; scales are float16.
INLINE Step step_of(RoundArgs* a, Range r, uint16_t* stored) {
    magnitude(a, r.size);
    const float low = lowest(r.low), high = reduce_max(r.high);
    const float top = (float)((1 << a->bits) - 1);
    float span = high - low, point;
    if (a->symmetric) {
        span = (high > -low ? high : -low) * 2;
        point = (float)(1 << (a->bits - 1));
    }
    const float step = span > 0 ? span / top : 1.0f;
    if (!a->symmetric) {
        point = -low / step;
        point = plain_nearest(point < top ? point : top);
    }
    if (step > a->largest) a->largest = step;
    const float kept = step > 0x1p-20f ? step : 0x1p-20f;
    *stored = float_to_half(kept < 65504.0f ? kept : 65504.0f);  // above, the caller asks the reference
    return {half_to_float(*stored), point};
}

// The bits of n codes from code `at` of a row on, which begins at a byte.
INLINE void put_codes(const RoundArgs& a, const uint8_t* codes, int64_t at, int64_t n, uint8_t* row) {
    uint8_t* to = row + at * a.bits / 8;
    if (a.bits == 8) {
        memcpy(to, codes, (size_t)n);
        return;
    }
    if (a.bits == 4) {
        for (int64_t i = 0; i < n / 2; ++i) to[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
        if (n % 2) to[n / 2] = codes[n - 1];
        return;
    }
    for (int64_t i = 0; i < n; i += 8, to += a.bits) {
        const int64_t count = n - i < 8 ? n - i : 8;
        uint64_t eight = 0;
        for (int64_t c = 0; c < count; ++c) eight |= (uint64_t)codes[i + c] << (c * a.bits);
        for (int64_t b = 0; b < (count * a.bits + 7) / 8; ++b) to[b] = (uint8_t)(eight >> (8 * b));
    }
}

INLINE void nearest_codes(const float* x, int64_t n, VF scale, VF point, VF top, uint8_t* codes) {
    for (int64_t i = 0; i < n; i += kLanes) {
        const VF code = add(nearest(div(load(x + i), scale)), point);
        store_code_bytes(codes + i, __builtin_convertvector(min(max(code, zero()), top), Ints));
    }
}

// Rounding to nearest: methods/integers.py.
INLINE void round_integers(RoundArgs* a, const uint8_t* row, int64_t r) {
    alignas(64) float x[kRoundAtOnce];
    alignas(64) uint8_t codes[kRoundAtOnce];
    const VF top = set1((float)((1 << a->bits) - 1));
    const int64_t groups = (a->k + a->group - 1) / a->group;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = g * a->group, end = begin + a->group < a->k ? begin + a->group : a->k;
        Range range = no_range();
        int64_t loaded = -1;
        for (int64_t at = begin; at < end; at += kRoundAtOnce) {
            const int64_t n = end - at < kRoundAtOnce ? end - at : (int64_t)kRoundAtOnce;
            load_values(*a, row, at, n, x);
            range = range_with(range, x, n);
            loaded = at;
        }
        const int64_t to = r * groups + g;
        const Step step = step_of(a, range, (uint16_t*)a->scale + to);
        a->zero[to] = step.zero;
        const VF scale = set1(step.scale), point = set1(step.zero);
        for (int64_t at = begin; at < end; at += kRoundAtOnce) {
            const int64_t n = end - at < kRoundAtOnce ? end - at : (int64_t)kRoundAtOnce;
            if (loaded != begin) load_values(*a, row, at, n, x);
            nearest_codes(x, n, scale, point, top, codes);
            put_codes(*a, codes, at, n, a->codes + r * a->row_bytes);
        }
    }
}

// The strength by which the error of a weight is shrunk, about |e|^-0.3: methods/hqq.py.
INLINE VF slope_of(VF size) {
    const VF bits = __builtin_convertvector((Ints)size, VF);
    const VF found = sub(set1(kSlopeOffset), mul(set1(kSlopeFactor), bits));
    return (VF)__builtin_convertvector(found, Ints);
}

// The zero points of kLanes groups: values[i * 16] are numbers i, in steps.
INLINE VF fitted_zeros(const float* values, int64_t group, VF start, VF top) {
    VF point = start, best = start, least = set1(INFINITY);
    const VF count = set1((float)group);
    for (int round = 0; round < kHqqRounds; ++round) {
        const VF inverse = set1(kHqqInverse[round]);
        VF total = zero(), moved = zero();
        for (int64_t i = 0; i < group; ++i) {
            const VF place = add(load(values + i * 16), point);
            const VF error = sub(place, min(max(nearest(place), zero()), top));
            const VF size = abs(error), slope = slope_of(size);
            total = add(total, mul(size, slope));
            moved = add(moved, copysign(min(size, mul(slope, inverse)), error));
        }
        best = select_less(total, least, point, best);
        least = select_less(total, least, total, least);
        point = sub(point, div(moved, count));
    }
    return best;
}

// 16 groups of a row, or its last ones: `count`.
INLINE void hqq_groups(RoundArgs* a, const uint8_t* row, int64_t r, int64_t first, int64_t count) {
    alignas(64) float x[kMostHqqGroup], values[kMostHqqGroup * 16], start[16] = {0}, best[16];
    alignas(64) uint8_t turned[kMostHqqGroup * 16], codes[kMostHqqGroup];
    const int64_t group = a->group, to = r * (a->k / group) + first;
    float* const minus = a->zero + to;
    uint16_t* const stored = (uint16_t*)a->scale + to;
    if (count < 16) memset(values, 0, sizeof values);
    for (int64_t g = 0; g < count; ++g) {
        load_values(*a, row, (first + g) * group, group, x);
        const Step step = step_of(a, range_with(no_range(), x, group), stored + g);
        start[g] = step.zero;
        for (int64_t i = 0; i < group; i += kLanes) store(x + i, div(load(x + i), set1(step.scale)));
        for (int64_t i = 0; i < group; ++i) values[i * 16 + g] = x[i];
    }
    const VF top = set1((float)((1 << a->bits) - 1));
    for (int lane = 0; lane < 16; lane += kLanes) {
        const VF point = fitted_zeros(values + lane, group, load(start + lane), top);
        store(best + lane, point);
        for (int64_t i = 0; i < group; ++i) {
            const VF code = min(max(nearest(add(load(values + i * 16 + lane), point)), zero()), top);
            store_code_bytes(turned + i * 16 + lane, __builtin_convertvector(code, Ints));
        }
    }
    for (int64_t g = 0; g < count; ++g) {
        minus[g] = best[g] * half_to_float(stored[g]);
        for (int64_t i = 0; i < group; ++i) codes[i] = turned[i * 16 + g];
        put_codes(*a, codes, (first + g) * group, group, a->codes + r * a->row_bytes);
    }
}

INLINE void round_hqq(RoundArgs* a, const uint8_t* row, int64_t r) {
    const int64_t groups = a->k / a->group;
    for (int64_t first = 0; first < groups; first += 16)
        hqq_groups(a, row, r, first, groups - first < 16 ? groups - first : 16);
}

INLINE float magnitude_of(RoundArgs* a, const uint8_t* row, int64_t begin, int64_t end) {
    alignas(64) float x[kRoundAtOnce];
    VF size = zero();
    for (int64_t at = begin; at < end; at += kRoundAtOnce) {
        const int64_t n = end - at < kRoundAtOnce ? end - at : (int64_t)kRoundAtOnce;
        load_values(*a, row, at, n, x);
        for (int64_t i = 0; i < n; i += kLanes) size = max_bits(size, load(x + i));
    }
    return magnitude(a, size);
}

// The bits of |x| <= 448 as e4m3, ties to even.
INLINE Ints e4m3_bits(VF x) {
    const VF size = abs(x);
    const Ints bits = (Ints)size, sign = ((Ints)x >> 24) & 0x80;
    const Ints normal = (bits + 0x7ffff + ((bits >> 20) & 1) - (120 << 23)) >> 20;
    const Ints small = (Ints)add(size, set1(16384.0f)) - 0x46800000;  // steps of 2^-9
    return (Ints)select_less(size, set1(0x1p-6f), (VF)small, (VF)normal) | sign;
}

INLINE void e4m3_values(RoundArgs* a, const uint8_t* row, int64_t begin, int64_t end, float scale, uint8_t* to) {
    alignas(64) float x[kRoundAtOnce];
    alignas(64) uint8_t codes[kRoundAtOnce];
    const VF most = set1(448.0f), by = set1(scale);
    for (int64_t at = begin; at < end; at += kRoundAtOnce) {
        const int64_t n = end - at < kRoundAtOnce ? end - at : (int64_t)kRoundAtOnce;
        load_values(*a, row, at, n, x);
        for (int64_t i = 0; i < n; i += kLanes) {
            const VF scaled = div(load(x + i), by);
            store_code_bytes(codes + i, e4m3_bits(min(max(scaled, sub(zero(), most)), most)));
        }
        memcpy(to + at, codes, (size_t)n);
    }
}

// Tiles of 8-bit floats, `rows` high: methods/float8.py. `factor`: the largest magnitude of a whole matrix; 0:
// each tile has its own.
INLINE void round_e4m3(RoundArgs* a, int64_t first, int64_t rows) {
    const uint8_t* x = (const uint8_t*)a->x;
    const int64_t width = a->k * (a->type == kF32 ? 4 : 2), tiles = (a->k + a->group - 1) / a->group;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t begin = t * a->group, end = begin + a->group < a->k ? begin + a->group : a->k;
        float largest = a->factor;
        for (int64_t r = first; r < first + rows && !a->factor; ++r) {
            const float found = magnitude_of(a, x + r * width, begin, end);
            largest = found > largest ? found : largest;
        }
        const float scale = largest > 0 ? largest / 448.0f : 1.0f;
        if (!a->factor) ((float*)a->scale)[first / a->height * tiles + t] = scale;
        for (int64_t r = first; r < first + rows; ++r)
            e4m3_values(a, x + r * width, begin, end, scale, a->codes + r * a->row_bytes);
    }
}

// Codes of 4-bit floats, ties to even: a boundary belongs to the even code beside it.
INLINE Ints e2m1_codes(VF x) {
    const VF size = abs(x);
    Ints code = (Ints)(size > set1(0.25f)) + (Ints)(size >= set1(0.75f)) + (Ints)(size > set1(1.25f)) +
                (Ints)(size >= set1(1.75f)) + (Ints)(size > set1(2.5f)) + (Ints)(size >= set1(3.5f)) +
                (Ints)(size > set1(5.0f));
    return -code - (Ints)(x < zero()) * 8;
}

INLINE float scalar_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Groups of 4-bit floats: methods/float4.py. `factor`: of the scales of NVFP4; 0: MXFP4, powers of two.
INLINE void round_e2m1(RoundArgs* a, const uint8_t* row, int64_t r) {
    alignas(64) float x[32];
    alignas(64) uint8_t codes[32];
    const int64_t groups = a->k / a->group;
    for (int64_t g = 0; g < groups; ++g) {
        load_values(*a, row, g * a->group, a->group, x);
        const float largest = magnitude(a, range_with(no_range(), x, a->group).size);
        uint8_t stored;
        float scale;
        if (a->factor) {
            const float wanted = largest / (6.0f * a->factor);
            float lane[kLanes];
            store(lane, (VF)e4m3_bits(set1(wanted < 448.0f ? wanted : 448.0f)));
            memcpy(&stored, lane, 1);
            scale = e4m3_to_float(stored) * a->factor;
        } else {
            uint32_t bits;
            memcpy(&bits, &largest, 4);
            const uint32_t exponent = bits >> 23;
            stored = (uint8_t)(bits == 0 ? 124 : exponent > 2 ? exponent - 2 : 0);
            scale = e8m0_to_float(stored);
        }
        ((uint8_t*)a->scale)[r * groups + g] = stored;
        const VF inverse = set1(scale > 0 ? 1.0f / scale : 0.0f);
        for (int64_t i = 0; i < a->group; i += kLanes)
            store_code_bytes(codes + i, e2m1_codes(mul(load(x + i), inverse)));
        put_codes(*a, codes, g * a->group, a->group, a->codes + r * a->row_bytes);
    }
}

static void round_rows(RoundArgs* a) {
    const int64_t width = a->k * (a->type == kF32 ? 4 : 2);
    const uint8_t* const x = (const uint8_t*)a->x;
    if (a->method == kRoundE4M3) {
        for (int64_t r = 0; r < a->rows; r += a->height)
            round_e4m3(a, r, a->rows - r < a->height ? a->rows - r : a->height);
        return;
    }
    for (int64_t r = 0; r < a->rows; ++r) {
        const uint8_t* const row = x + r * width;
        switch (a->method) {
            case kRoundIntegers: round_integers(a, row, r); break;
            case kRoundHqq: round_hqq(a, row, r); break;
            case kRoundE2M1: round_e2m1(a, row, r); break;
            default: {
                const float found = magnitude_of(a, row, 0, a->k);
                a->largest = found > a->largest ? found : a->largest;
            }
        }
    }
}

}  // namespace LEVEL
