// Activations rounded as the file of a weight says: kernels/reference/fake_quantize.py, bit for bit.
//
// Integers and 4-bit floats (as integers twice their size) go to integer products as records of 32
// codes with the scale of their group. What does not fit one record is the sum of two, as where a
// block is rounded twice: what integers have beyond 127, halved, with twice the scale (-128, which the
// products without VNNI cannot take, and codes less a zero point, up to 255); and the second half of
// groups of 16.
#pragma once

#include "linear_scratch.hpp"
#include "simd.hpp"

namespace LEVEL {

// 32 values from x on, of which the row of k has the first ones; `padded` holds them where it ends.
INLINE const float* whole_block(const float* x, int64_t k, int64_t b, float* padded) {
    x += b * kDepth;
    if ((b + 1) * kDepth <= k) return x;
    memset(padded, 0, kDepth * sizeof(float));
    memcpy(padded, x, (size_t)(k - b * kDepth) * sizeof(float));
    return padded;
}

// A float type, for rounding by adding: `shift` times a power of two has steps as wide as the type has
// there. Codes that are integers: from `least` to `most`.
struct Codes {
    bool integers;
    float least, most, shift;
};

INLINE Codes input_codes(const Inputs& in) {
    if (in.codes == kE4M3Codes) return {false, 0x1p-6f, 448.0f, 0x1.8p20f};
    if (in.codes == kE2M1Codes) return {false, 1.0f, 6.0f, 0x1.8p22f};
    const float half = (float)(1 << (in.bits - 1));
    return {true, -half, half - 1.0f, 0.0f};
}

// The nearest code of each quotient, less `zero`.
INLINE VF round_to(const Codes& codes, VF quotient, VF zero_point) {
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

// How a group is rounded. scale 0: to nothing; NaN: its values are not all finite.
struct Step {
    float scale, zero;
};

// The scale that the largest magnitude (for integers without symmetry: the range) asks for.
static float scale_of_range(const Inputs& in, float low, float high) {
    float peak = -low > high ? -low : high;
    if (peak > in.limit) peak = in.limit;
    const bool wide = in.codes == kE4M3Codes;
    if (in.rule == kMxScale)  // from 1.75 on the next power of two
        return bits_to_float((float_bits(peak) + (1u << 21)) & 0x7f800000u) * (wide ? 0x1p-8f : 0.25f);
    const float most = (float)((1 << in.bits) - 1);
    float scale = in.codes == kIntCodes ? (in.symmetric ? peak / (most / 2) : (high - low) / most)
                                        : peak / (wide ? 448.0f : 6.0f);
    if (in.rule == kPowerScale)
        return bits_to_float((float_bits(scale) + (1u << 23) - 1) & 0x7f800000u);
    if (in.rule == kNvScale) {
        float lanes[kLanes];
        const Codes floats = {false, 0x1p-6f, 448.0f, 0x1.8p20f};
        store(lanes, round_to(floats, set1(scale * in.factor), zero()));
        scale = lanes[0] / in.factor;
    }
    return scale;
}

static Step step_of(const Inputs& in, const float* x, int64_t count) {
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
    const float scale = scale_of_range(in, low, high);
    if (in.symmetric || in.codes != kIntCodes) return {scale, 0.0f};
    const Codes codes = input_codes(in);
    float zeros[kLanes];
    store(zeros, round_to(codes, set1(codes.least - low / scale), zero()));
    return {scale, zeros[0]};
}

// x becomes scale * code.
static void round_to_floats(const Inputs& in, const float* x, int64_t k, float* to) {
    const Codes codes = input_codes(in);
    for (int64_t begin = 0; begin < k; begin += in.group) {
        const int64_t end = begin + in.group < k ? begin + in.group : k;
        const Step step = step_of(in, x + begin, end - begin);
        if (!(step.scale > 0)) {
            for (int64_t i = begin; i < end; ++i) to[i] = step.scale;
            continue;
        }
        const VF scale = set1(step.scale), zero_point = set1(step.zero);
        int64_t i = begin;
        for (; i + kLanes <= end; i += kLanes)
            store(to + i, mul(round_to(codes, div(load(x + i), scale), zero_point), scale));
        if (i == end) continue;
        float rest[kLanes] = {};
        memcpy(rest, x + i, (size_t)(end - i) * sizeof(float));
        store(rest, mul(round_to(codes, div(load(rest), scale), zero_point), scale));
        memcpy(to + i, rest, (size_t)(end - i) * sizeof(float));
    }
}

static void fill_record(const float* codes, float scale, Rounded* to) {
    to->scale = scale;
    round_block(codes, 1.0f, to->q, to->half);
    to->sum = to->half[0] + to->half[1];
}

// Values [begin, end) of a block as `to` + 2 * `beyond`, each at most 127; true when some need both.
static bool block_codes(const Inputs& in, const Step& step, const float* x, int begin, int end,
                        float* to, float* beyond) {
    const Codes codes = input_codes(in);
    const VF scale = set1(step.scale), zero_point = set1(step.zero), limit = set1(127.0f);
    const VF factor = set1(in.codes == kE2M1Codes ? 2.0f : 1.0f);
    VF all = zero();
    for (int i = begin; i < end; i += kLanes) {
        const VF code = mul(round_to(codes, div(load(x + i), scale), zero_point), factor);
        const VF left = sub(code, max(sub(zero(), limit), min(limit, code)));
        const VF half = to_float(round_int(add(mul(left, set1(0.5f)), copysign(set1(0.25f), left))));
        store(to + i, sub(code, add(half, half)));  // half is away from zero: 128 is 126 + 2 * 1
        store(beyond + i, half);
        all = max_bits(all, half);
    }
    return reduce_bits(all) > 0;
}

// One block whose halves have scales of their own: two records.
static void round_halves(const Inputs& in, const float* x, Rounded* first, Rounded* second) {
    for (int h = 0; h < 2; ++h) {
        float codes[kDepth] = {}, beyond[kDepth];
        const Step step = step_of(in, x + 16 * h, 16);
        if (step.scale > 0) block_codes(in, step, x, 16 * h, 16 * h + 16, codes, beyond);
        fill_record(codes, in.codes == kE2M1Codes ? step.scale / 2 : step.scale, h ? second : first);
    }
}

// Records of a row in two planes, as round_again fills them; groups are 16, a multiple of 32, or k.
static void round_to_integers(const Inputs& in, const float* x, int64_t k, Rounded* to,
                              uint32_t* rest) {
    const int64_t blocks = (k + kDepth - 1) / kDepth, chunks = chunks_of(blocks);
    const int64_t group = in.group < k ? in.group : blocks * kDepth;
    float padded[kDepth], codes[kDepth], beyond[kDepth];
    Step step = {};
    memset(to, 0, (size_t)(2 * blocks) * sizeof *to);
    for (int64_t c = 0; c < chunks; ++c) {
        const int64_t begin = chunk_begin(blocks, c), end = chunk_begin(blocks, c + 1);
        rest[c] = 0;
        for (int64_t b = begin; b < end; ++b) {
            const float* values = whole_block(x, k, b, padded);
            Rounded *first = to + b, *second = first + blocks;
            if (group == 16) {
                round_halves(in, values, first, second);
                rest[c] |= 1u << (b - begin);
                continue;
            }
            const int64_t at = b * kDepth;
            if (at % group == 0) step = step_of(in, x + at, at + group < k ? group : k - at);
            const float scale = in.codes == kE2M1Codes ? step.scale / 2 : step.scale;
            first->scale = scale;
            if (!(step.scale > 0)) continue;
            const bool more = block_codes(in, step, values, 0, kDepth, codes, beyond);
            fill_record(codes, scale, first);
            if (!more) continue;
            fill_record(beyond, 2 * scale, second);
            rest[c] |= 1u << (b - begin);
        }
    }
}

}  // namespace LEVEL
