// Products with keys and values that are integer codes (kI8, kI4, kI16). They take half the instructions of floats:
// with AVX-512 and 8-bit codes, prompts of 4096 tokens (SmolLM2) get 1.3 times as fast.
//
// Codes become 16 bits, in pairs that one instruction multiplies and adds: when they are read, or once for
// many rows, in a copy. Queries are rounded to 16 bits with a scale of the row. So are the weights of a key
// block times the scales of a group of values. The error is at most 2^-16 of the row's largest number; that
// of an 8-bit code is 2^-8. For codes of 16 bits (kI16) the scale is larger where the sum of sizes asks for it
// (kMostCodeSum). Zero points are subtracted from sums:
//     sum_i x_i (code_i - zero) = sum_i x_i code_i - zero sum_i x_i     for keys, where i are dimensions
//     sum_i x_i (code_i - zero_i) = sum_i x_i code_i - sum_i x_i zero_i     for values, where i are keys
// Sums of integers are exact, so a row has the same bits in every batch and at every level.
#pragma once

#include <type_traits>

#include "attention_block.hpp"
#include "pairs.hpp"

namespace LEVEL {

static_assert((int64_t)32767 * 128 * kMaxScaleGroup <= INT32_MAX, "scores of dimensions that share a scale are exact");
static_assert((int64_t)32767 * 255 * kBlockKeys <= INT32_MAX, "so are sums of a key block's values or zeros");
static_assert((int64_t)kMostWord * (kMostCodeSum + kMaxScaleGroup / 2) <= INT32_MAX,
              "sums with 16-bit codes too: rounding adds at most a half to each of their factors");
static_assert((int)kBlockKeys <= (int)kMaxScaleGroup, "the factors of values are as few");
static_assert(kHeadDimStep % 8 == 0, "halves of a head are whole units of kSumDims, and so are groups");

// Where the codes of a product come from: words of 16 bits (kI16), bytes, the low or the high halves of bytes
// (kI8, kLow4, kHigh4), or a copy of 16 bits.
enum { kCopied = -1 };

// What a page stores the codes in.
template <int FROM>
using Stored = typename std::conditional<FROM == kI16, int16_t, int8_t>::type;

// The codes of kLanes elements at `a` and at `b`, one of each in every lane.
template <int FROM>
INLINE VI zip_codes(const Stored<FROM>* a, const Stored<FROM>* b) {
    const VI codes = zip_pairs(a, b), mask = set1_int(0x000f000f);
    return FROM == kLow4 ? (VI)(codes & mask) : FROM == kHigh4 ? (VI)(codes >> 4 & mask) : codes;
}

// Of dimension d.
INLINE int source_of(const BlockSide& side, int d) {
    if (side.pairs) return kCopied;
    return side.type != kI4 ? side.type : d < side.low_dims ? (int)kLow4 : (int)kHigh4;
}

INLINE int16_t code_of(const PageSide& side, int64_t at, bool high) {
    if (side.type == kI16) return ((const int16_t*)side.data)[at];
    const int8_t code = ((const int8_t*)side.data)[at];
    return side.type == kI8 ? code : high ? code >> 4 & 15 : code & 15;
}

// Keys first..count, dimensions d_begin..d_end, as [head_dim / 2][128] pairs of dimensions.
template <int FROM>
static void pair_keys_of(const Item& item, int64_t begin, int first, int count, int d_begin, int d_end,
                         const KeyBlock& c) {
    const PageSide& side = c.from->keys;
    const bool whole = whole_slots(item.a), high = FROM == kHigh4;
    for (int d = d_begin; d < d_end; d += 2) {
        int16_t* to = (int16_t*)item.keys + d * kBlockKeys;
        const int64_t from = (high ? d - c.keys.low_dims : d) * side.step;
        for (int v = first / kLanes; whole && v * kLanes < count; ++v) {
            const Stored<FROM>* keys = (const Stored<FROM>*)c.key[v] + from;
            store_pairs(to + 2 * v * kLanes, zip_codes<FROM>(keys, keys + side.step));
        }
        for (int t = first; !whole && t < count; ++t) {
            const int64_t at = key_at(item, side, begin + t) + from;
            to[2 * t] = code_of(side, at, high);
            to[2 * t + 1] = code_of(side, at + side.step, high);
        }
    }
}

static void pair_keys(const Item& item, int64_t begin, int first, int count, KeyBlock* c) {
    const int width = item.a->head_dim, low_dims = c->keys.low_dims;
    if (c->keys.type == kI16) pair_keys_of<kI16>(item, begin, first, count, 0, width, *c);
    else if (c->keys.type == kI8) pair_keys_of<kI8>(item, begin, first, count, 0, width, *c);
    else {
        pair_keys_of<kLow4>(item, begin, first, count, 0, low_dims, *c);
        pair_keys_of<kHigh4>(item, begin, first, count, low_dims, width, *c);
    }
    c->keys.pairs = (const int16_t*)item.keys;
}

// The codes of value t of a key block that is read in place.
template <int FROM>
INLINE const Stored<FROM>* value_codes(const KeyBlock& c, int t) {
    return (const Stored<FROM>*)c.value[t >> c.segment_shift] + (t & ((1 << c.segment_shift) - 1)) * c.values.step;
}

// Values first..count, dimensions d_begin..d_end, as [64][value] pairs of keys. Where a pair has a key
// outside of first..count, that key's code is arbitrary: its weight is 0.
template <int FROM>
static void pair_values_of(const Item& item, int64_t begin, int first, int count, int d_begin, int d_end,
                           const KeyBlock& c) {
    const PageSide& side = c.from->values;
    const bool whole = in_place(item.a, *c.from), high = FROM == kHigh4;
    for (int t = first & ~1; t < count; t += 2) {
        int16_t* to = (int16_t*)item.values + t * item.value;
        for (int d = d_begin; whole && d < d_end; d += kLanes) {  // a page has both keys: its slots are even
            const Stored<FROM>* codes = value_codes<FROM>(c, t) + (high ? d - d_begin : d);
            store_pairs(to + 2 * d, zip_codes<FROM>(codes, codes + side.step));
        }
        for (int k = 0; !whole && k < 2; ++k) {
            const bool known = t + k >= first && t + k < count;
            const int64_t at = known ? value_at(item, side, begin + t + k) : 0;
            for (int d = d_begin; d < d_end; ++d)
                to[2 * d + k] = known ? code_of(side, at + (high ? d - d_begin : d), high) : (int16_t)0;
        }
        if (!whole) memset(to + 2 * d_end, 0, sizeof(int16_t) * 2 * (size_t)(item.value - d_end));
    }
}

static void pair_values(const Item& item, int64_t begin, int first, int count, KeyBlock* c) {
    const int width = item.a->value_dim, low_dims = c->values.low_dims;
    if (c->values.type == kI16) pair_values_of<kI16>(item, begin, first, count, 0, width, *c);
    else if (c->values.type == kI8) pair_values_of<kI8>(item, begin, first, count, 0, width, *c);
    else {
        pair_values_of<kLow4>(item, begin, first, count, 0, low_dims, *c);
        pair_values_of<kHigh4>(item, begin, first, count, low_dims, width, *c);
    }
    c->values.pairs = (const int16_t*)item.values;
    c->values.low_dims = width;  // in one part
}

// The same for latent pages, from the copy of keys: its pairs of dimensions become pairs of keys first.
static void pair_values_of_keys(const Item& item, int first, int count, KeyBlock* c) {
    const int width = item.a->value_dim;
    int16_t spread[4 * kBlockKeys];  // four dimensions of all keys, one after the other
    for (int d = 0; d < width; d += 4) {
        const int16_t* from = (const int16_t*)item.keys + d * kBlockKeys;
        for (int i = 0; i < 4; ++i)
            for (int t = first & ~1; t < count; ++t)
                spread[i * kBlockKeys + t] = from[(i & 2) * kBlockKeys + 2 * t + (i & 1)];
        if (count & 1)
            for (int i = 0; i < 4; ++i) spread[i * kBlockKeys + count] = 0;
        turn_keys((const float*)spread, kBlockKeys / 2, first / 2, (count + 1) / 2, 4, item.value, item.values + d);
    }
    c->values.pairs = (const int16_t*)item.values;
    c->values.low_dims = width;
}

// What one of kI16's factors must not be below as 32767 units of a scale, so that the codes have at most
// kMostCodeSum in sum.
INLINE float least_of(float sum) { return sum * (32767.0f / kMostCodeSum); }

INLINE float sum_of_sizes(const float* x, int count) {
    VF sums[16 / kLanes];
    for (int i = 0; i < 16 / kLanes; ++i) sums[i] = zero();
    for (int i = 0; i < count; i += kLanes) {
        VF* sum = sums + i / kLanes % (16 / kLanes);
        *sum = add(*sum, abs(vector_of(x, i, count)));
    }
    return sum_of_sixteen(sums);
}

// The largest magnitude that a query's scale must allow for its products with kI16 keys of any level; 0 without
// such keys.
INLINE float least_of_query(const AttentionArgs* a, const float* q) {
    float least = 0.0f;
    for (int l = 0; l < a->num_levels; ++l) {
        const PageSide& keys = a->levels[l].keys;
        for (int d = 0; keys.type == kI16 && d < a->head_dim; d += keys.group) {
            const int count = keys.group < a->head_dim - d ? keys.group : a->head_dim - d;
            const float own = least_of(sum_of_sizes(q + d, count));
            least = own > least ? own : least;
        }
    }
    return least;
}

// One row's query as 16 bits, its scale, and the sums of the codes of the first 0, kSumDims, ... dimensions.
INLINE void query_codes(const Item& item, int i) {
    const int width = item.a->head_dim;
    int16_t* codes = item.q_codes + i * item.padded;
    int32_t* sums = item.q_sums + i * kQuerySums;
    const float* q = item.q + i * item.padded;
    item.q_scales[i] = to_int16(q, width, 2, codes, least_of_query(item.a, q));
    sums[0] = 0;
    for (int d = 0; d < width; d += kSumDims) {
        int32_t sum = 0;
        for (int j = d; j < d + kSumDims; ++j) sum += codes[j];
        sums[d / kSumDims + 1] = sums[d / kSumDims] + sum;
    }
}

// Scores of rows i..i + MR with NV vectors of keys from `at` on, over dimensions begin..end, which share a
// scale.
template <int MR, int NV, int FROM>
__attribute__((noinline)) static void pair_scores(const Item& item, const KeyBlock& block, int i, int at,
                                                  int begin, int end, Ahead* ahead) {
    const BlockSide& side = block.keys;
    const int64_t stride = item.padded, step = FROM == kCopied ? (int64_t)kBlockKeys : side.step;
    const int low = FROM == kHigh4 ? side.low_dims : 0;
    const int16_t* const copy = FROM == kCopied ? side.pairs + 2 * at : nullptr;
    const Stored<FROM>* keys[NV];
#pragma GCC unroll 4
    for (int c = 0; c < NV; ++c)
        keys[c] = FROM == kCopied ? nullptr : (const Stored<FROM>*)block.key[at / kLanes + c];
    const int16_t* const codes = item.q_codes + i * item.padded;
    VI dot[MR][NV];
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) dot[r][c] = zero_int();
    for (int d = begin; d < end; d += 2) {
        VI x[MR];
#pragma GCC unroll 6
        for (int r = 0; r < MR; ++r) x[r] = load_pair(codes + r * stride + d);
        prefetch_step(ahead);
        const int64_t from = (d - low) * step;
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) {
            const VI key = FROM == kCopied ? load_pairs(copy + from + 2 * c * kLanes)
                                           : zip_codes<FROM>(keys[c] + from, keys[c] + from + step);
#pragma GCC unroll 6
            for (int r = 0; r < MR; ++r) dot[r][c] = dot_pairs(dot[r][c], key, x[r]);
        }
    }
    const int row = begin / side.group * kBlockKeys + at;
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r) {
        const int32_t* sums = item.q_sums + (i + r) * kQuerySums;
        const VF by = set1(item.q_scales[i + r]);
        const VF sum = set1((float)(sums[end / kSumDims] - sums[begin / kSumDims]));
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) {
            float* to = item.weights + r * kBlockKeys + at + c * kLanes;
            VF part = to_float(dot[r][c]);
            if (side.type == kI4) part = fnma(load(side.zero + row + c * kLanes), sum, part);
            const VF scale = load(side.scale + row + c * kLanes);
            store(to, fma(mul(part, by), scale, begin ? load(to) : zero()));
        }
    }
}

template <int MR, int FROM>
INLINE void part_scores(const Item& item, const KeyBlock& c, int i, int first, int end, int d, int stop,
                        Ahead* ahead) {
    for (int at = first / kLanes * kLanes; at < end;) {
        const bool four = at + 4 * kLanes <= kBlockKeys && at + 2 * kLanes < end;
        const bool two = at + 2 * kLanes <= kBlockKeys;
        if (four) pair_scores<MR, 4, FROM>(item, c, i, at, d, stop, ahead);
        else if (two) pair_scores<MR, 2, FROM>(item, c, i, at, d, stop, ahead);
        else pair_scores<MR, 1, FROM>(item, c, i, at, d, stop, ahead);
        at += (four ? 4 : 2) * kLanes;
    }
}

// Scores of rows i..i + MR with keys first..end.
template <int MR>
static void score_codes(const Item& item, const KeyBlock& c, int i, int first, int end, Ahead* ahead) {
    const int width = item.a->head_dim;
    for (int d = 0, stop; d < width; d = stop) {
        stop = part_end(c.keys, d, width);
        switch (source_of(c.keys, d)) {
            case kCopied: part_scores<MR, kCopied>(item, c, i, first, end, d, stop, ahead); break;
            case kLow4: part_scores<MR, kLow4>(item, c, i, first, end, d, stop, ahead); break;
            case kHigh4: part_scores<MR, kHigh4>(item, c, i, first, end, d, stop, ahead); break;
            case kI16: part_scores<MR, kI16>(item, c, i, first, end, d, stop, ahead); break;
            default: part_scores<MR, kI8>(item, c, i, first, end, d, stop, ahead);
        }
    }
}

// The weights of MR rows times the scales of a group of values.
template <int MR>
struct WeightCodes {
    int16_t codes[MR * kBlockKeys];
    float scales[MR];
    float zeros[MR];  // the sums of codes times zeros
};

// Products of a row's weights with scales as 16 bits; returns their scale, NaN if a product is not finite. All
// vectors stay in registers at levels that have enough of them. LIMITED: for values of kI16.
template <bool LIMITED>
INLINE float product_codes(const float* weights, const float* scales, int16_t* to) {
    VF product[kKeyVectors], peak = zero(), sums[16 / kLanes];
    for (int i = 0; i < 16 / kLanes; ++i) sums[i] = zero();
#pragma GCC unroll 32
    for (int v = 0; v < kKeyVectors; ++v) {
        product[v] = mul(load(weights + v * kLanes), load(scales + v * kLanes));
        peak = max_bits(peak, product[v]);
        if (LIMITED) sums[v % (16 / kLanes)] = add(sums[v % (16 / kLanes)], product[v]);
    }
    float largest = reduce_bits(peak);
    const float least = LIMITED ? least_of(sum_of_sixteen(sums)) : 0.0f;
    if (least > largest) largest = least;
    if (!has_codes(largest)) {
        memset(to, 0, sizeof(int16_t) * kBlockKeys);
        return scale_without_codes(largest);
    }
    const VF inverse = set1(32767.0f / largest);
#pragma GCC unroll 32
    for (int v = 0; v < kKeyVectors; ++v)
        store_words(to + v * kLanes, round_int(mul(product[v], inverse)));
    return largest / 32767.0f;
}

// Of row r, which sees keys lo..hi; the codes of the other keys are 0.
template <int MR>
INLINE void weight_codes(const float* weights, const BlockSide& side, int d, int lo, int hi, int r,
                         WeightCodes<MR>* to) {
    const float* scale = side.scale + d / side.group * kBlockKeys;
    int16_t* codes = to->codes + r * kBlockKeys;
    float seen[2 * kBlockKeys];
    if (lo > 0 || hi < kBlockKeys) {  // weights and scales of other keys are arbitrary, perhaps NaN
        memset(seen, 0, sizeof seen);
        memcpy(seen + lo, weights + lo, sizeof(float) * (size_t)(hi - lo));
        memcpy(seen + kBlockKeys + lo, scale + lo, sizeof(float) * (size_t)(hi - lo));
        weights = seen;
        scale = seen + kBlockKeys;
    }
    to->scales[r] = side.type == kI16 ? product_codes<true>(weights, scale, codes)
                                      : product_codes<false>(weights, scale, codes);
    to->zeros[r] = 0.0f;
    if (side.type != kI4) return;
    const float* zero = side.zero + d / side.group * kBlockKeys;
    int32_t sum = 0;
    for (int t = lo; t < hi; ++t) sum += codes[t] * (int32_t)(zero[t] * 16.0f);
    to->zeros[r] = (float)sum * 0.0625f;
}

// Sums of MR rows and NV vectors of the head from d on: values of keys first..end times their weights.
template <int MR, int NV, int FROM>
__attribute__((noinline)) static void pair_sums(const Item& item, const KeyBlock& c, int first, int end,
                                                const WeightCodes<MR>& weights, int d, float* out,
                                                Ahead* ahead) {
    const int from = FROM == kHigh4 ? d - c.values.low_dims : d;
    VI sum[MR][NV];
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[r][v] = zero_int();
    for (int t = first & ~1; t < end; t += 2) {
        VI weight[MR];
#pragma GCC unroll 6
        for (int r = 0; r < MR; ++r) weight[r] = load_pair(weights.codes + r * kBlockKeys + t);
        prefetch_step(ahead);
        const int16_t* const copy = FROM == kCopied ? c.values.pairs + t * item.value + 2 * d : nullptr;
        const Stored<FROM>* const place = FROM == kCopied ? nullptr : value_codes<FROM>(c, t) + from;
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
            const int at = v * kLanes;
            const VI value = FROM == kCopied ? load_pairs(copy + 2 * at)
                                             : zip_codes<FROM>(place + at, place + c.values.step + at);
#pragma GCC unroll 6
            for (int r = 0; r < MR; ++r) sum[r][v] = dot_pairs(sum[r][v], value, weight[r]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v)
            store(out + r * item.record + d + v * kLanes,
                  mul(sub(to_float(sum[r][v]), set1(weights.zeros[r])), set1(weights.scales[r])));
}

template <int MR, int FROM>
INLINE void part_sums(const Item& item, const KeyBlock& c, int first, int end, const WeightCodes<MR>& weights,
                      int d, int stop, float* out, Ahead* ahead) {
    for (; d + 4 * kLanes <= stop; d += 4 * kLanes)
        pair_sums<MR, 4, FROM>(item, c, first, end, weights, d, out, ahead);
    for (; d + 2 * kLanes <= stop; d += 2 * kLanes)
        pair_sums<MR, 2, FROM>(item, c, first, end, weights, d, out, ahead);
    for (; d < stop; d += kLanes) pair_sums<MR, 1, FROM>(item, c, first, end, weights, d, out, ahead);
}

// Sums of the values of keys first..end for MR rows; row r sees those of lo[r]..hi[r].
template <int MR>
static void sum_codes(const Item& item, const KeyBlock& c, const int* lo, const int* hi, int first, int end,
                      float* out, Ahead* ahead) {
    const int width = item.a->value_dim;
    WeightCodes<MR> weights;
    for (int d = 0, stop; d < width; d = stop) {
        stop = part_end(c.values, d, width);
        for (int r = 0; r < MR && d % c.values.group == 0; ++r)
            weight_codes(item.weights + r * kBlockKeys, c.values, d, lo[r], hi[r], r, &weights);
        switch (source_of(c.values, d)) {
            case kCopied: part_sums<MR, kCopied>(item, c, first, end, weights, d, stop, out, ahead); break;
            case kLow4: part_sums<MR, kLow4>(item, c, first, end, weights, d, stop, out, ahead); break;
            case kHigh4: part_sums<MR, kHigh4>(item, c, first, end, weights, d, stop, out, ahead); break;
            case kI16: part_sums<MR, kI16>(item, c, first, end, weights, d, stop, out, ahead); break;
            default: part_sums<MR, kI8>(item, c, first, end, weights, d, stop, out, ahead);
        }
    }
}

// The two products for one number of rows.
struct CodeProducts {
    void (*score)(const Item&, const KeyBlock&, int i, int first, int end, Ahead*);
    void (*sum)(const Item&, const KeyBlock&, const int* lo, const int* hi, int first, int end, float* out,
                Ahead*);
};

static CodeProducts code_products(int rows) {
    const int kMost = kAttentionRows;  // 6 or 3
    switch (rows) {
        case 1: return {score_codes<1>, sum_codes<1>};
        case 2: return {score_codes<2>, sum_codes<2>};
        case 3: return {score_codes<3>, sum_codes<3>};
        case 4: return {score_codes<kMost == 6 ? 4 : 3>, sum_codes<kMost == 6 ? 4 : 3>};
        case 5: return {score_codes<kMost == 6 ? 5 : 3>, sum_codes<kMost == 6 ? 5 : 3>};
        default: return {score_codes<kMost>, sum_codes<kMost>};
    }
}

}  // namespace LEVEL
