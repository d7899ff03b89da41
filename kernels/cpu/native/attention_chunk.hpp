// One chunk of 128 keys for up to kAttentionRows rows: its keys and values found, multiplied.
//
// A dot product runs over d in order, keys being the vector lanes; a sum of values runs over the
// keys in order. Read straight from pages or from converted copies, the bits are the same.
#pragma once

#include "attention_items.hpp"

namespace LEVEL {

// Where the keys and values of a chunk lie. Keys t of vector v are the lanes of
// keys[v] + d * key_dim; value t is values[t >> segment_shift] + (t & mask) * value_slot.
struct Chunk {
    int type;
    int64_t key_dim, value_slot;
    int segment_shift;
    const void* keys[kKeyVectors];
    const void* values[kKeyVectors];
    const float* key_scale;  // [128]; null unless the pages are kI8
    const float* value_scale;
};

INLINE float load_one(int type, const void* base, int64_t i) {
    switch (type) {
        case kF32: return ((const float*)base)[i];
        case kI8: return (float)((const int8_t*)base)[i];
        case kF16: return half_to_float(((const uint16_t*)base)[i]);
        default: return bf16_to_float(((const uint16_t*)base)[i]);
    }
}

// Keys of a chunk that begins at `begin` which row i sees: lo..hi, empty where lo >= hi.
INLINE void visible(const Item& item, int64_t begin, int i, int* lo, int* hi) {
    const int64_t position = item.position + i / item.group - begin;
    const int64_t from = item.a->window ? position - item.a->window + 1 : 0;
    *lo = from < 0 ? 0 : from > kChunkKeys ? (int)kChunkKeys : (int)from;
    *hi = position < 0 ? 0 : position >= kChunkKeys ? (int)kChunkKeys : (int)position + 1;
}

// Points at keys and values first..count of the chunk at `begin` in their pages. Vectors beyond
// stand for the last one, so that a product of several vectors reads nothing else.
static void locate(const Item& item, int64_t begin, int count, Chunk* c) {
    const AttentionArgs* a = item.a;
    const int shift = __builtin_ctz((unsigned)a->page_size), mask = a->page_size - 1;
    c->type = a->page_type;
    c->key_dim = a->k_page_dim;
    c->value_slot = a->v_page_slot;
    c->segment_shift = shift < 7 ? shift : 7;
    for (int v = 0; v < kKeyVectors; ++v) {
        const int t = v * kLanes < count ? v * kLanes : (count - 1) / kLanes * kLanes;
        const int64_t position = begin + t;
        const int64_t at = item.table[position >> shift] * a->k_page + item.head * a->k_page_head;
        c->keys[v] = element(a->k_pages, at + (position & mask), a->page_type);
    }
    for (int s = 0; s << c->segment_shift < count; ++s) {
        const int64_t position = begin + ((int64_t)s << c->segment_shift);
        const int64_t at = item.table[position >> shift] * a->v_page + item.head * a->v_page_head;
        c->values[s] = element(a->v_pages, at + (position & mask) * a->v_page_slot, a->page_type);
    }
}

// The scales of the chunk's codes as floats; slots that no row sees may hold anything.
static void load_scales(const Item& item, int64_t begin, int count, Chunk* c) {
    const AttentionArgs* a = item.a;
    for (int t = 0; t < count;) {
        const int64_t position = begin + t, slot = position % a->page_size;
        const int64_t at = item.table[position / a->page_size] * a->scale_page +
                           item.head * a->scale_head + slot;
        int run = a->page_size - slot < count - t ? (int)(a->page_size - slot) : count - t;
        for (int i = 0; i < run; ++i) {
            item.key_scale[t + i] = half_to_float(a->k_scales[at + i]);
            item.value_scale[t + i] = half_to_float(a->v_scales[at + i]);
        }
        t += run;
    }
    c->key_scale = item.key_scale;
    c->value_scale = item.value_scale;
}

// Copies keys and values first..count of a chunk as floats, which pays from many rows on; pages of
// odd shapes always go this way.
static void convert(const Item& item, int64_t begin, int first, int count, Chunk* c) {
    const AttentionArgs* a = item.a;
    const int type = a->page_type, width = a->head_dim;
    if (in_place(a)) {
        locate(item, begin, count, c);
        for (int v = first / kLanes; v * kLanes < count; ++v)
            for (int d = 0; d < width; ++d)
                store(item.keys + d * kChunkKeys + v * kLanes,
                      load_as(type, c->keys[v], d * c->key_dim));
    }
    for (int t = first; t < count; ++t) {
        const int64_t page = item.table[(begin + t) / a->page_size];
        const int64_t slot = (begin + t) % a->page_size;
        if (!in_place(a)) {
            const int64_t at = page * a->k_page + item.head * a->k_page_head + slot;
            for (int d = 0; d < width; ++d)
                item.keys[d * kChunkKeys + t] = load_one(type, a->k_pages, at + d * a->k_page_dim);
        }
        const int64_t at = page * a->v_page + item.head * a->v_page_head + slot * a->v_page_slot;
        float* to = item.values + t * item.padded;
        int d = 0;
        for (; d + kLanes <= width; d += kLanes) store(to + d, load_as(type, a->v_pages, at + d));
        for (; d < width; ++d) to[d] = load_one(type, a->v_pages, at + d);
        for (; d < item.padded; ++d) to[d] = 0.0f;
    }
    c->type = kF32;
    c->key_dim = kChunkKeys;
    c->value_slot = item.padded;
    c->segment_shift = 7;
    c->values[0] = item.values;
    for (int v = 0; v < kKeyVectors; ++v) c->keys[v] = item.keys + v * kLanes;
}

// Dot products of MR rows, `stride` floats apart, with NV vectors of keys: scores[MR][128].
template <int TYPE, int MR, int NV>
static void score_vectors(const float* q, int64_t stride, const void* const* keys, int64_t key_dim,
                          int width, float* scores, Ahead* ahead) {
    VF acc[MR][NV];
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) acc[r][c] = zero();
    for (int d = 0; d < width; ++d) {
        VF key[NV];
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) key[c] = load_as(TYPE, keys[c], d * key_dim);
        ask(ahead);
#pragma GCC unroll 6
        for (int r = 0; r < MR; ++r) {
            VF x = set1(q[r * stride + d]);
#pragma GCC unroll 4
            for (int c = 0; c < NV; ++c) acc[r][c] = fma(key[c], x, acc[r][c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) store(scores + r * kChunkKeys + c * kLanes, acc[r][c]);
}

template <int TYPE, int MR>
static void score_rows(const Chunk& c, const float* q, int64_t stride, int width, int first,
                       int end, float* scores, Ahead* ahead) {
    for (int v = first / kLanes; v * kLanes < end;) {
        const void* const* keys = c.keys + v;
        float* to = scores + v * kLanes;
        const bool four = v + 4 <= kKeyVectors && (v + 2) * kLanes < end;
        if (four) score_vectors<TYPE, MR, 4>(q, stride, keys, c.key_dim, width, to, ahead);
        else if (v + 2 <= kKeyVectors)
            score_vectors<TYPE, MR, 2>(q, stride, keys, c.key_dim, width, to, ahead);
        else score_vectors<TYPE, MR, 1>(q, stride, keys, c.key_dim, width, to, ahead);
        v += four ? 4 : 2;
    }
}

// out[MR][record] += weights[MR][lo..hi) x values, NV vectors of the head from d on.
template <int TYPE, int MR, int NV>
static void value_vectors(const Chunk& c, int lo, int hi, const float* weights, int d, float* out,
                          int64_t record, Ahead* ahead) {
    const int mask = (1 << c.segment_shift) - 1;
    VF sum[MR][NV];
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[r][v] = load(out + r * record + d + v * kLanes);
    for (int t = lo; t < hi;) {
        const void* base = c.values[t >> c.segment_shift];
        int64_t at = (t & mask) * c.value_slot + d;
        const int end = (t | mask) + 1 < hi ? (t | mask) + 1 : hi;
        for (; t < end; ++t, at += c.value_slot) {
            VF value[NV];
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) value[v] = load_as(TYPE, base, at + v * kLanes);
            ask(ahead);
#pragma GCC unroll 6
            for (int r = 0; r < MR; ++r) {
                VF weight = set1(weights[r * kChunkKeys + t]);
#pragma GCC unroll 4
                for (int v = 0; v < NV; ++v) sum[r][v] = fma(weight, value[v], sum[r][v]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) store(out + r * record + d + v * kLanes, sum[r][v]);
}

template <int TYPE, int MR>
static void value_rows(const Chunk& c, int lo, int hi, const float* weights, int width, float* out,
                       int64_t record, Ahead* ahead) {
    int d = 0;
    for (; d + 4 * kLanes <= width; d += 4 * kLanes)
        value_vectors<TYPE, MR, 4>(c, lo, hi, weights, d, out, record, ahead);
    for (; d < width; d += kLanes)
        value_vectors<TYPE, MR, 1>(c, lo, hi, weights, d, out, record, ahead);
}

// The two products for one number of rows and one type.
struct Products {
    void (*score)(const Chunk&, const float* q, int64_t stride, int width, int first, int end,
                  float* scores, Ahead* ahead);
    void (*values)(const Chunk&, int lo, int hi, const float* weights, int width, float* out,
                   int64_t record, Ahead* ahead);
};

template <int TYPE>
static Products products_of(int rows) {
    switch (rows) {
        case 1: return {score_rows<TYPE, 1>, value_rows<TYPE, 1>};
        case 2: return {score_rows<TYPE, 2>, value_rows<TYPE, 2>};
#if defined(__AVX512VNNI__)
        case 3: return {score_rows<TYPE, 3>, value_rows<TYPE, 3>};
        case 4: return {score_rows<TYPE, 4>, value_rows<TYPE, 4>};
        case 5: return {score_rows<TYPE, 5>, value_rows<TYPE, 5>};
#endif
        default: return {score_rows<TYPE, kAttentionRows>, value_rows<TYPE, kAttentionRows>};
    }
}

INLINE Products products(int type, int rows) {
    switch (type) {
        case kF16: return products_of<kF16>(rows);
        case kBF16: return products_of<kBF16>(rows);
        case kF32: return products_of<kF32>(rows);
        default: return products_of<kI8>(rows);
    }
}

}  // namespace LEVEL
