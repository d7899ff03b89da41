// One block of 128 keys for up to kAttentionRows rows: finds and multiplies its keys and values.
//
// A dot product runs over d in order, with keys as vector lanes; a sum of values runs over the keys in
// order. Codes are multiplied before they are scaled: each part of a dot product (a group, or a part of
// one where the high halves of a kI4 head begin inside it) is scaled and added to the previous parts,
// and the weights are scaled for each group of values. Reading pages in place and reading converted
// copies give the same bits. Here are the products of floats, which fp8 codes become; those of integer codes
// are in attention_integers.hpp.
#pragma once

#include "attention_items.hpp"

namespace LEVEL {

// The keys or values of a key block, as floats or as codes.
struct BlockSide {
    int type;
    int64_t step;        // from one dimension of a key to the next, from one value to the next
    const float *scale, *zero;  // [groups][128]; null: no scales; zero where `type` is kI4
    int group, low_dims;  // dimensions that share a scale; those in low halves of kI4 pages, or all
    const int16_t* pairs;  // a copy of codes (attention_integers.hpp); null: they are read in place
};

// Where the keys and values of a key block are stored. Keys t of vector v are the lanes of
// key[v] + d * keys.step; value t is value[t >> segment_shift] + (t & mask) * values.step.
struct KeyBlock {
    const PageLevel* from;  // the level of its pages
    BlockSide keys, values;
    int segment_shift;
    const void* key[kKeyVectors];
    const void* value[kKeyVectors];  // one per page segment: a page in place has whole vectors of slots
};

// The end of the part of a head that begins at d.
INLINE int part_end(const BlockSide& side, int d, int width) {
    int end = side.scale ? (d / side.group + 1) * side.group : width;
    if (d < side.low_dims && end > side.low_dims) end = side.low_dims;
    return end < width ? end : width;
}

// Keys lo..hi of the key block at `begin` that row i sees; none if lo >= hi.
INLINE void visible(const Item& item, int64_t begin, int i, int* lo, int* hi) {
    const int64_t position = item.position + i / item.group - begin;
    const int64_t from = first_seen(item.a, position + begin) - begin;
    const int64_t end = keys_end(item, position + begin) - begin;
    *lo = from < 0 ? 0 : from > kBlockKeys ? (int)kBlockKeys : (int)from;
    *hi = end < 0 ? 0 : end > kBlockKeys ? (int)kBlockKeys : (int)end;
}

// Points to keys and values first..count of the key block at `begin` in their pages. Vectors after the
// last one repeat it, so that a product of several vectors reads nothing else.
static void locate(const Item& item, int64_t begin, int count, KeyBlock* c) {
    const AttentionArgs* a = item.a;
    const PageSide &keys = c->from->keys, &values = c->from->values;
    const int shift = __builtin_ctz((unsigned)a->page_size), mask = a->page_size - 1;
    c->segment_shift = shift < kBlockShift ? shift : (int)kBlockShift;
    for (int v = 0; v < kKeyVectors; ++v) {
        const int t = v * kLanes < count ? v * kLanes : (count - 1) / kLanes * kLanes;
        const int64_t position = begin + t;
        const int64_t page = page_of(item.table[position >> shift]);
        const int64_t at = page * keys.page + item.head * keys.head;
        c->key[v] = element(keys, at + (position & mask));
    }
    for (int s = 0; s << c->segment_shift < count; ++s) {
        const int64_t position = begin + ((int64_t)s << c->segment_shift);
        const int64_t page = page_of(item.table[position >> shift]);
        const int64_t at = page * values.page + item.head * values.head;
        c->value[s] = element(values, at + (position & mask) * values.step);
    }
}

// Scales of codes of `type` without zeros as floats. Those of kE4M3 get what load_page leaves out.
INLINE void widen(const uint16_t* scales, int count, int type, float* to) {
    const int kind = scale_type(type);
    const float factor = type == kE4M3 ? 256.0f : 1.0f;
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, mul(load_as(kind, scales, i), set1(factor)));
    for (; i < count; ++i) to[i] = scale_of(type, scales[i]) * factor;
}

// Scales and zeros of kI4 codes as floats.
INLINE void widen_pairs(const uint16_t* scales, int count, float* scale, float* zero) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        store(scale + i, load_short_scale(scales + i));
        store(zero + i, mul(load_short_zero(scales + i), set1(0.0625f)));
    }
    for (; i < count; ++i) {
        scale[i] = short_scale((uint8_t)scales[i]);
        zero[i] = (float)(scales[i] >> 8) * 0.0625f;
    }
}

// Scales and zeros of the key block's codes as floats; slots that no row sees may hold anything.
static void load_scales(const Item& item, int64_t begin, int count, const PageSide& from, int width,
                        float* scale, float* zero, BlockSide* to) {
    const AttentionArgs* a = item.a;
    const int groups = groups_of(from, width);
    for (int t = 0; t < count && groups;) {
        const int64_t position = begin + t, slot = position % a->page_size;
        const int64_t page = page_of(item.table[position / a->page_size]);
        const int run = a->page_size - slot < count - t ? (int)(a->page_size - slot) : count - t;
        for (int g = 0; g < groups; ++g) {
            const uint16_t* scales = from.scales + page * from.scale_page +
                                     (item.head * groups + g) * from.scale_row + slot;
            const int at = g * kBlockKeys + t;
            if (from.type == kI4) widen_pairs(scales, run, scale + at, zero + at);
            else widen(scales, run, from.type, scale + at);
        }
        t += run;
    }
    to->type = from.type;
    to->pairs = nullptr;
    to->step = from.step;
    to->scale = groups ? scale : nullptr;
    to->zero = zero;
    to->group = from.group;
    to->low_dims = from.type == kI4 ? width / 2 : width;
}

// kLanes codes or floats of a page. An e4m3 is 2^8 too small; its scale corrects that (`load_scales`).
// This is exact and takes four instructions instead of seven.
INLINE VF load_page(int type, const void* base, int64_t index) {
    return type == kE4M3 ? load_e4m3_as_half((const uint8_t*)base + index)
                         : load_as(type, base, index);
}

// The first element of the key or value of the token at `position`.
INLINE int64_t key_at(const Item& item, const PageSide& side, int64_t position) {
    const int64_t page = page_of(item.table[position / item.a->page_size]);
    return page * side.page + item.head * side.head + position % item.a->page_size;
}

INLINE int64_t value_at(const Item& item, const PageSide& side, int64_t position) {
    const int64_t page = page_of(item.table[position / item.a->page_size]);
    return page * side.page + item.head * side.head + position % item.a->page_size * side.step;
}

// Copies keys first..count of a key block as floats, [head_dim][128], which pays off with many rows; those of
// pages of odd shapes are always copied, number by number only where slots are not whole vectors.
static void convert_keys(const Item& item, int64_t begin, int first, int count, KeyBlock* c) {
    const AttentionArgs* a = item.a;
    const PageSide& side = c->from->keys;
    const bool whole = whole_slots(a);
    for (int d = 0; d < a->head_dim; ++d) {
        const int64_t at_d = d * side.step;
        float* to = item.keys + d * kBlockKeys;
        for (int v = first / kLanes; whole && v * kLanes < count; ++v)
            store(to + v * kLanes, load_page(side.type, c->key[v], at_d));
        for (int t = first; !whole && t < count; ++t)
            to[t] = load_one(side, key_at(item, side, begin + t) + at_d);
    }
    c->keys.type = kF32;
    c->keys.step = kBlockKeys;
    for (int v = 0; v < kKeyVectors; ++v) c->key[v] = item.keys + v * kLanes;
}

// The same for values, [128][value].
static void convert_values(const Item& item, int64_t begin, int first, int count, KeyBlock* c) {
    const PageSide& side = c->from->values;
    const int width = item.a->value_dim;
    for (int t = first; t < count; ++t) {
        const int64_t at = value_at(item, side, begin + t);
        float* to = item.values + t * item.value;
        int d = 0;
        for (; d + kLanes <= width; d += kLanes) store(to + d, load_page(side.type, side.data, at + d));
        for (; side.type == kF32 && d < width; d += kHeadDimStep)
            memcpy(to + d, (const float*)side.data + at + d, kHeadDimStep * sizeof(float));
        for (; d < width; ++d) to[d] = load_one(side, at + d);
        for (; d < item.value; ++d) to[d] = 0.0f;
    }
    c->values.type = kF32;
    c->values.step = item.value;
    c->segment_shift = kBlockShift;
    c->value[0] = item.values;
}

typedef float Four __attribute__((vector_size(16)));

// to[c][r] = from[r][c] for r and c below 4: rows are `step` and `to_step` apart, in floats.
INLINE void turn_four(const float* from, int64_t step, float* to, int64_t to_step) {
    Four a, b, c, d;
    memcpy(&a, from, sizeof a);
    memcpy(&b, from + step, sizeof b);
    memcpy(&c, from + 2 * step, sizeof c);
    memcpy(&d, from + 3 * step, sizeof d);
    const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    const Four ba = __builtin_shufflevector(a, b, 2, 6, 3, 7), dc = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    a = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
    b = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    c = __builtin_shufflevector(ba, dc, 0, 1, 4, 5);
    d = __builtin_shufflevector(ba, dc, 2, 3, 6, 7);
    memcpy(to, &a, sizeof a);
    memcpy(to + to_step, &b, sizeof b);
    memcpy(to + 2 * to_step, &c, sizeof c);
    memcpy(to + 3 * to_step, &d, sizeof d);
}

// The values of latent pages: the copy of keys the other way round, [keys][value] 32-bit numbers; a number of
// codes is those of a pair of keys. What keys before `first` and from `count` on have is arbitrary.
INLINE void turn_keys(const float* keys, int64_t step, int first, int count, int width, int64_t to_step,
                      float* to) {
    for (int t = first / 4 * 4; t < count; t += 4)
        for (int d = 0; d < width; d += 4) turn_four(keys + d * step + t, step, to + t * to_step + d, to_step);
}

static void values_of_keys(const Item& item, int first, int count, KeyBlock* c) {
    const int width = item.a->value_dim;
    turn_keys(item.keys, kBlockKeys, first, count, width, item.value, item.values);
    for (int t = first; t < count && width < item.value; ++t)
        memset(item.values + t * item.value + width, 0, sizeof(float) * (size_t)(item.value - width));
    c->values.type = kF32;
    c->values.step = item.value;
    c->segment_shift = kBlockShift;
    c->value[0] = item.values;
}

// Vectors of keys or values that a product takes at a time. Codes that are decoded with constants need
// registers for them.
template <int TYPE>
constexpr int most_vectors() {
    return kRegisters < 32 && TYPE == kE4M3 ? 2 : 4;
}

// Dot products of MR rows, `stride` floats apart, with NV vectors of keys from `at` on, over
// dimensions begin..end: scores[MR][128], scaled and added to the previous ones where there is a scale.
// Vectors of keys are loaded one by one: with all four at once AVX2 is one register short, and the sum that
// then goes to the stack and back for each dimension made this 1.5 times slower.
template <int TYPE, int MR, int NV>
static void score_vectors(const BlockSide& side, const void* const* keys, int at, const float* q,
                          int64_t stride, int begin, int end, float* scores, Ahead* ahead) {
    VF acc[MR][NV];
    const int row = side.scale ? begin / side.group * kBlockKeys + at : 0;
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) acc[r][c] = zero();
    int64_t from = begin * side.step;
    for (int d = begin; d < end; ++d, from += side.step) {
        VF x[MR];
#pragma GCC unroll 6
        for (int r = 0; r < MR; ++r) x[r] = set1(q[r * stride + d]);
        prefetch_step(ahead);
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) {
            const VF key = load_page(TYPE, keys[c], from);
#pragma GCC unroll 6
            for (int r = 0; r < MR; ++r) acc[r][c] = fma(key, x[r], acc[r][c]);
        }
    }
    if (side.scale) {
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) {
            const VF scale = load(side.scale + row + c * kLanes);
#pragma GCC unroll 6
            for (int r = 0; r < MR; ++r) {
                const VF before = begin ? load(scores + r * kBlockKeys + c * kLanes) : zero();
                acc[r][c] = fma(acc[r][c], scale, before);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) store(scores + r * kBlockKeys + c * kLanes, acc[r][c]);
}

template <int TYPE, int MR>
static void score_part(const KeyBlock& c, const float* q, int64_t stride, int begin, int stop,
                       int first, int end, float* scores, Ahead* ahead) {
    for (int v = first / kLanes; v * kLanes < end;) {
        const void* const* keys = c.key + v;
        float* to = scores + v * kLanes;
        const int at = v * kLanes;
        const int kMost = most_vectors<TYPE>();
        const bool four = kMost == 4 && v + 4 <= kKeyVectors && (v + 2) * kLanes < end;
        if (four)
            score_vectors<TYPE, MR, kMost>(c.keys, keys, at, q, stride, begin, stop, to, ahead);
        else if (v + 2 <= kKeyVectors)
            score_vectors<TYPE, MR, 2>(c.keys, keys, at, q, stride, begin, stop, to, ahead);
        else score_vectors<TYPE, MR, 1>(c.keys, keys, at, q, stride, begin, stop, to, ahead);
        v += four ? 4 : 2;
    }
}

template <int TYPE, int MR>
static void score_rows(const KeyBlock& c, const float* q, int64_t stride, int width, int first,
                       int end, float* scores, Ahead* ahead) {
    for (int d = 0, stop; d < width; d = stop) {
        stop = part_end(c.keys, d, width);
        score_part<TYPE, MR>(c, q, stride, d, stop, first, end, scores, ahead);
    }
}

// out[MR][record] += weights[MR][lo..hi) x values, NV vectors of the head from d on.
template <int TYPE, int MR, int NV>
static void value_vectors(const KeyBlock& c, int lo, int hi, const float* weights, int d, float* out,
                          int64_t record, Ahead* ahead) {
    const int mask = (1 << c.segment_shift) - 1;
    const BlockSide& side = c.values;
    VF sum[MR][NV];
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[r][v] = load(out + r * record + d + v * kLanes);
    for (int t = lo; t < hi;) {
        const void* base = c.value[t >> c.segment_shift];
        int64_t at = (t & mask) * side.step + d;
        const int end = (t | mask) + 1 < hi ? (t | mask) + 1 : hi;
        for (; t < end; ++t, at += side.step) {
            VF weight[MR];
#pragma GCC unroll 6
            for (int r = 0; r < MR; ++r) weight[r] = set1(weights[r * kBlockKeys + t]);
            prefetch_step(ahead);
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) {
                const VF value = load_page(TYPE, base, at + v * kLanes);
#pragma GCC unroll 6
                for (int r = 0; r < MR; ++r) sum[r][v] = fma(weight[r], value, sum[r][v]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) store(out + r * record + d + v * kLanes, sum[r][v]);
}

template <int TYPE, int MR>
static void value_part(const KeyBlock& c, int lo, int hi, const float* weights, int d, int stop,
                       float* out, int64_t record, Ahead* ahead) {
    const int kMost = most_vectors<TYPE>();
    for (; d + kMost * kLanes <= stop; d += kMost * kLanes)
        value_vectors<TYPE, MR, kMost>(c, lo, hi, weights, d, out, record, ahead);
    for (; d + 2 * kLanes <= stop; d += 2 * kLanes)
        value_vectors<TYPE, MR, 2>(c, lo, hi, weights, d, out, record, ahead);
    for (; d < stop; d += kLanes)
        value_vectors<TYPE, MR, 1>(c, lo, hi, weights, d, out, record, ahead);
}

// weights[MR][lo..hi) times the scales of a group; the other lanes may hold anything.
template <int MR>
INLINE const float* scaled(const BlockSide& side, int d, int lo, int hi, const float* weights,
                           float* to) {
    const float* scale = side.scale + d / side.group * kBlockKeys;
    for (int r = 0; r < MR; ++r)
        for (int t = lo / kLanes * kLanes; t < hi; t += kLanes)
            store(to + r * kBlockKeys + t,
                  mul(load(weights + r * kBlockKeys + t), load(scale + t)));
    return to;
}

template <int TYPE, int MR>
static void value_rows(const KeyBlock& c, int lo, int hi, const float* weights, int width, float* out,
                       int64_t record, Ahead* ahead) {
    float products[MR * kBlockKeys];
    for (int d = 0, stop; d < width; d = stop) {
        stop = part_end(c.values, d, width);
        const float* by = c.values.scale ? scaled<MR>(c.values, d, lo, hi, weights, products)
                                         : weights;
        value_part<TYPE, MR>(c, lo, hi, by, d, stop, out, record, ahead);
    }
}

typedef void (*Scores)(const KeyBlock&, const float* q, int64_t stride, int width, int first, int end,
                       float* scores, Ahead* ahead);
typedef void (*Values)(const KeyBlock&, int lo, int hi, const float* weights, int width, float* out,
                       int64_t record, Ahead* ahead);

// The two products for one number of rows and one type.
struct Products {
    Scores score;
    Values values;
};

template <int TYPE>
static Products products_of(int rows) {
    const int kMost = kAttentionRows;  // 6 or 3
    switch (rows) {
        case 1: return {score_rows<TYPE, 1>, value_rows<TYPE, 1>};
        case 2: return {score_rows<TYPE, 2>, value_rows<TYPE, 2>};
        case 3: return {score_rows<TYPE, 3>, value_rows<TYPE, 3>};
        case 4: return {score_rows<TYPE, kMost == 6 ? 4 : 3>, value_rows<TYPE, kMost == 6 ? 4 : 3>};
        case 5: return {score_rows<TYPE, kMost == 6 ? 5 : 3>, value_rows<TYPE, kMost == 6 ? 5 : 3>};
        default: return {score_rows<TYPE, kMost>, value_rows<TYPE, kMost>};
    }
}

INLINE Products products(int type, int rows) {
    switch (type) {
        case kF16: return products_of<kF16>(rows);
        case kBF16: return products_of<kBF16>(rows);
        case kF32: return products_of<kF32>(rows);
        case kE4M3: return products_of<kE4M3>(rows);
        default: return products_of<kE5M2>(rows);
    }
}

// Keys and values may have different types.
INLINE Products products(const KeyBlock& c, int rows) {
    return {products(c.keys.type, rows).score, products(c.values.type, rows).values};
}

}  // namespace LEVEL
