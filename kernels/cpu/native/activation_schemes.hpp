// Quantizes activations as the weight's file says: kernels/reference/fake_quantize.py, bit for bit.
//
// Integers and 4-bit floats (as integers of twice their value) become blocks of 32 codes with the scale
// of their group. Codes that do not fit one Q8Block are the sum of two terms: the part of an integer
// beyond 127, halved, with twice the scale (-128, which products without VNNI cannot multiply, and
// codes minus a zero point, up to 255); and the second half of a block with groups of 16.
#pragma once

#include "linear_scratch.hpp"
#include "simd.hpp"

namespace LEVEL {

// Block b of a row x of k values; where the row ends inside it, `padded` holds a copy with zeros.
INLINE const float* padded_block(const float* x, int64_t k, int64_t b, float* padded) {
    x += b * kTileDepth;
    if ((b + 1) * kTileDepth <= k) return x;
    memset(padded, 0, kTileDepth * sizeof(float));
    memcpy(padded, x, (size_t)(k - b * kTileDepth) * sizeof(float));
    return padded;
}

// The range of a code type. For floats, rounding adds and subtracts `shift` times a power of two, whose
// last bit is as large as one step of the type. Integers go from `least` to `most`.
struct Codes {
    bool integers;
    float least, most, shift;
};

INLINE Codes code_range(const ActivationScheme& in) {
    if (in.codes == kE4M3Codes) return {false, 0x1p-6f, 448.0f, 0x1.8p20f};
    if (in.codes == kE2M1Codes) return {false, 1.0f, 6.0f, 0x1.8p22f};
    const float half = (float)(1 << (in.bits - 1));
    return {true, -half, half - 1.0f, 0.0f};
}

// The nearest code of each quotient, minus `zero`.
INLINE VF nearest_codes(const Codes& codes, VF quotient, VF zero_point) {
    if (codes.integers) {
        const VF code = min(set1(codes.most), max(set1(codes.least), add(quotient, zero_point)));
        return sub(to_float(round_int(code)), zero_point);
    }
    const VF size = min(set1(codes.most), abs(quotient));
    const VF far = mul(max(set1(codes.least), power_below(size)), set1(codes.shift));
    return copysign(sub(add(size, far), far), quotient);
}

INLINE float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

// Scale and zero point of a group. scale 0: all its values become 0; NaN: not all are finite.
struct Step {
    float scale, zero;
};

// The scale for the largest magnitude (asymmetric integers: for the range).
static float scale_for_range(const ActivationScheme& in, float low, float high) {
    float peak = -low > high ? -low : high;
    if (peak > in.limit) peak = in.limit;
    const bool wide = in.codes == kE4M3Codes;
    if (in.rule == kMxScale)  // from 1.75 on the next power of two
        return bits_to_float((float_bits(peak) + (1u << 21)) & 0x7f800000u) * (wide ? 0x1p-8f : 0.25f);
    if (in.rule == kAbsmaxScale) return peak / (float)((1 << (in.bits - 1)) - 1);
    const float most = (float)((1 << in.bits) - 1);
    float scale = in.codes == kIntCodes ? (in.symmetric ? peak / (most / 2) : (high - low) / most)
                                        : peak / (wide ? 448.0f : 6.0f);
    if (in.rule == kPowerScale)
        return bits_to_float((float_bits(scale) + (1u << 23) - 1) & 0x7f800000u);
    if (in.rule == kNvScale) {
        float lanes[kLanes];
        const Codes floats = {false, 0x1p-6f, 448.0f, 0x1.8p20f};
        store(lanes, nearest_codes(floats, set1(scale * in.factor), zero()));
        scale = lanes[0] / in.factor;
    }
    return scale;
}

static Step scale_of_values(const ActivationScheme& in, const float* x, int64_t count) {
    VF least = zero(), most = zero(), bits = zero();
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const VF value = load(x + i);
        least = min(least, value);
        most = max(most, value);
        bits = max_bits(bits, value);
    }
    if (i < count) {
        float rest[kLanes] = {};
        memcpy(rest, x + i, (size_t)(count - i) * sizeof(float));
        least = min(least, load(rest));
        most = max(most, load(rest));
        bits = max_bits(bits, load(rest));
    }
    if (!(reduce_bits(bits) <= 0x1.fffffep127f)) return {__builtin_nanf(""), 0.0f};
    if (in.rule == kStaticScale) return {in.scale, in.zero};
    const float low = -reduce_max(sub(zero(), least)), high = reduce_max(most);
    if (!((-low > high ? -low : high) > 1e-30f)) return {0.0f, 0.0f};
    const float scale = scale_for_range(in, low, high);
    if (in.symmetric || in.codes != kIntCodes) return {scale, 0.0f};
    const Codes codes = code_range(in);
    float zeros[kLanes];
    store(zeros, nearest_codes(codes, set1(codes.least - low / scale), zero()));
    return {scale, zeros[0]};
}

// x becomes scale * code.
static void quantize_to_floats(const ActivationScheme& in, const float* x, int64_t k, float* to) {
    const Codes codes = code_range(in);
    for (int64_t begin = 0; begin < k; begin += in.group) {
        const int64_t end = begin + in.group < k ? begin + in.group : k;
        const Step step = scale_of_values(in, x + begin, end - begin);
        if (!(step.scale > 0)) {
            for (int64_t i = begin; i < end; ++i) to[i] = step.scale;
            continue;
        }
        const VF scale = set1(step.scale), zero_point = set1(step.zero);
        int64_t i = begin;
        for (; i + kLanes <= end; i += kLanes)
            store(to + i, mul(nearest_codes(codes, div(load(x + i), scale), zero_point), scale));
        if (i == end) continue;
        float rest[kLanes] = {};
        memcpy(rest, x + i, (size_t)(end - i) * sizeof(float));
        store(rest, mul(nearest_codes(codes, div(load(rest), scale), zero_point), scale));
        memcpy(to + i, rest, (size_t)(end - i) * sizeof(float));
    }
}

static void fill_block(const float* codes, float scale, Q8Block* to) {
    to->scale = scale;
    to_int8(codes, 1.0f, to->q, to->half);
    to->sum = to->half[0] + to->half[1];
}

// Codes [begin, end) of a block as `to` + 2 * `beyond`, each at most 127; true if any needs both.
static bool block_codes(const ActivationScheme& in, const Step& step, const float* x, int begin,
                        int end, float* to, float* beyond) {
    const Codes codes = code_range(in);
    const VF scale = set1(step.scale), zero_point = set1(step.zero), limit = set1(127.0f);
    const VF factor = set1(in.codes == kE2M1Codes ? 2.0f : 1.0f);
    VF all = zero();
    for (int i = begin; i < end; i += kLanes) {
        const VF code = mul(nearest_codes(codes, div(load(x + i), scale), zero_point), factor);
        const VF left = sub(code, max(sub(zero(), limit), min(limit, code)));
        const VF half = to_float(round_int(add(mul(left, set1(0.5f)), copysign(set1(0.25f), left))));
        store(to + i, sub(code, add(half, half)));  // half is away from zero: 128 is 126 + 2 * 1
        store(beyond + i, half);
        all = max_bits(all, half);
    }
    return reduce_bits(all) > 0;
}

// One block whose halves have different scales: two terms.
static void quantize_halves(const ActivationScheme& in, const float* x, Q8Block* first,
                            Q8Block* second) {
    for (int h = 0; h < 2; ++h) {
        float codes[kTileDepth] = {}, beyond[kTileDepth];
        const Step step = scale_of_values(in, x + 16 * h, 16);
        if (step.scale > 0) block_codes(in, step, x, 16 * h, 16 * h + 16, codes, beyond);
        fill_block(codes, in.codes == kE2M1Codes ? step.scale / 2 : step.scale, h ? second : first);
    }
}

// The blocks of a row in two terms, as quantize_residuals fills them; groups are 16, a multiple of 32,
// or k.
static void quantize_to_integers(const ActivationScheme& in, const float* x, int64_t k, Q8Block* to,
                              uint32_t* residual) {
    const int64_t blocks = (k + kTileDepth - 1) / kTileDepth, panels = panels_of(blocks);
    const int64_t group = in.group < k ? in.group : blocks * kTileDepth;
    float padded[kTileDepth], codes[kTileDepth], beyond[kTileDepth];
    Step step = {};
    memset(to, 0, (size_t)(2 * blocks) * sizeof *to);
    for (int64_t c = 0; c < panels; ++c) {
        const int64_t begin = panel_begin(blocks, c), end = panel_begin(blocks, c + 1);
        residual[c] = 0;
        for (int64_t b = begin; b < end; ++b) {
            const float* values = padded_block(x, k, b, padded);
            Q8Block *first = to + b, *second = first + blocks;
            if (group == 16) {
                quantize_halves(in, values, first, second);
                residual[c] |= 1u << (b - begin);
                continue;
            }
            const int64_t at = b * kTileDepth;
            if (at % group == 0) step = scale_of_values(in, x + at, at + group < k ? group : k - at);
            const float scale = in.codes == kE2M1Codes ? step.scale / 2 : step.scale;
            first->scale = scale;
            if (!(step.scale > 0)) continue;
            const bool more = block_codes(in, step, values, 0, kTileDepth, codes, beyond);
            fill_block(codes, scale, first);
            if (!more) continue;
            fill_block(beyond, 2 * scale, second);
            residual[c] |= 1u << (b - begin);
        }
    }
}

}  // namespace LEVEL
