// Causal attention over KV pages, tile by tile with an online softmax.
//
// A work item is (request, key head, up to query_tile tokens): its rows are all query heads that
// share the key head. Keys come 64 at a time, tiles aligned at position 0 whatever the chunk: a
// row's result depends on its own position only. Per row and tile, with the keys lo..hi visible:
//     s[t] = scale * sum_d q[d] k[t][d]         d in order; keys are the vector lanes
//     peak' = max(peak, max s); shrink = exp(peak - peak')
//     total = total * shrink + sum exp(s - peak');  acc = acc * shrink + sum exp(..) v[t], t in order
// A tile without visible keys changes nothing and is skipped. Invisible keys are never multiplied,
// so stale page contents (even NaN) cannot leak in. Keys are transposed once per tile and item;
// that costs as much as four rows of dot products.
#pragma once

#include "elementwise.hpp"

namespace LEVEL {

enum { kVectors = 4, kChunk = kVectors * kLanes, kAttentionRows = kLanes == 16 ? 4 : 2 };

INLINE void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
#if defined(__AVX512VNNI__)
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = load(from + i * from_stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; ++j) {
            __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + j + 2]);
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    }
    // a[4 g + c] now holds, per 128-bit lane l, column 4 l + c of rows 4 g .. 4 g + 3
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        __m512 p = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88);
        __m512 q = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
        __m512 r = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
        __m512 s = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
        store(to + c * to_stride, _mm512_shuffle_f32x4(p, q, 0x88));
        store(to + (8 + c) * to_stride, _mm512_shuffle_f32x4(p, q, 0xdd));
        store(to + (4 + c) * to_stride, _mm512_shuffle_f32x4(r, s, 0x88));
        store(to + (12 + c) * to_stride, _mm512_shuffle_f32x4(r, s, 0xdd));
    }
#else
    for (int d = 0; d < kLanes; ++d)
        for (int t = 0; t < kLanes; ++t) to[d * to_stride + t] = from[t * from_stride + d];
#endif
}

// Keys or values `begin .. begin + count` of a request as floats [64][padded], zero beyond.
static void gather(const AttentionArgs* a, const int32_t* table, const void* pages, int64_t page,
                   int64_t page_head, int64_t page_slot, int head, int64_t begin, int count,
                   int padded, float* out) {
    const int width = a->head_dim, body = width / kLanes * kLanes;
    for (int t = 0; t < count; ++t) {
        int64_t position = begin + t;
        int64_t at = table[position / a->page_size] * page + head * page_head +
                     position % a->page_size * page_slot;
        float* to = out + (int64_t)t * padded;
        for (int d = 0; d < body; d += kLanes) store(to + d, load_as(a->page_type, pages, at + d));
        for (int d = body; d < padded; ++d) {
            if (d >= width) to[d] = 0.0f;
            else if (a->page_type == kF32) to[d] = ((const float*)pages)[at + d];
            else {
                uint16_t h = ((const uint16_t*)pages)[at + d];
                to[d] = a->page_type == kF16 ? half_to_float(h) : bf16_to_float(h);
            }
        }
    }
    if (count < kKeyTile)
        memset(out + (int64_t)count * padded, 0,
               sizeof(float) * (size_t)((kKeyTile - count) * padded));
}

// scores[MR][64] of MR query rows against a transposed tile [head_dim][64].
template <int MR>
static void score_rows(const float* const* q, const float* keys, int width, float* scores) {
    for (int chunk = 0; chunk < kKeyTile; chunk += kChunk) {
        VF acc[MR][kVectors];
        for (int r = 0; r < MR; ++r)
            for (int c = 0; c < kVectors; ++c) acc[r][c] = zero();
        for (int d = 0; d < width; ++d) {
            const float* k = keys + d * kKeyTile + chunk;
#pragma GCC unroll 4
            for (int c = 0; c < kVectors; ++c) {
                VF key = load(k + c * kLanes);
#pragma GCC unroll 4
                for (int r = 0; r < MR; ++r) acc[r][c] = fma(key, set1(q[r][d]), acc[r][c]);
            }
        }
        for (int r = 0; r < MR; ++r)
            for (int c = 0; c < kVectors; ++c)
                store(scores + r * kKeyTile + chunk + c * kLanes, acc[r][c]);
    }
}

// acc[MR] += weights[MR][lo..hi) x values[64][padded], over `vectors` vectors of the head.
template <int MR, int VECTORS>
static void value_rows(float* acc, int64_t acc_stride, const float* weights, const float* values,
                       int padded, int lo, int hi) {
    VF sum[MR][VECTORS];
    for (int r = 0; r < MR; ++r)
        for (int c = 0; c < VECTORS; ++c) sum[r][c] = load(acc + r * acc_stride + c * kLanes);
    for (int t = lo; t < hi; ++t) {
#pragma GCC unroll 4
        for (int c = 0; c < VECTORS; ++c) {
            VF value = load(values + (int64_t)t * padded + c * kLanes);
#pragma GCC unroll 4
            for (int r = 0; r < MR; ++r)
                sum[r][c] = fma(set1(weights[r * kKeyTile + t]), value, sum[r][c]);
        }
    }
    for (int r = 0; r < MR; ++r)
        for (int c = 0; c < VECTORS; ++c) store(acc + r * acc_stride + c * kLanes, sum[r][c]);
}

template <int MR>
static void add_head(float* acc, const float* weights, const float* values, int padded, int lo,
                     int hi) {
    int d = 0;
    for (; d + kChunk <= padded; d += kChunk)
        value_rows<MR, kVectors>(acc + d, padded, weights, values + d, padded, lo, hi);
    for (; d < padded; d += kLanes)
        value_rows<MR, 1>(acc + d, padded, weights, values + d, padded, lo, hi);
}

INLINE void score(int rows, const float* const* q, const float* keys, int width, float* scores) {
    switch (rows) {
        case 1: score_rows<1>(q, keys, width, scores); break;
        case 2: score_rows<2>(q, keys, width, scores); break;
        case 3: score_rows<3>(q, keys, width, scores); break;
        default: score_rows<4>(q, keys, width, scores);
    }
}

INLINE void add_values(int rows, float* acc, const float* weights, const float* values, int padded,
                       int lo, int hi) {
    switch (rows) {
        case 1: add_head<1>(acc, weights, values, padded, lo, hi); break;
        case 2: add_head<2>(acc, weights, values, padded, lo, hi); break;
        case 3: add_head<3>(acc, weights, values, padded, lo, hi); break;
        default: add_head<4>(acc, weights, values, padded, lo, hi);
    }
}

// Turns one row's scores into softmax weights (0 outside lo..hi); returns the shrink factor.
INLINE float soften(const AttentionArgs* a, float* s, int lo, int hi, float* peak, float* total) {
    const VF scale = set1(a->scale), cap = set1(a->softcap);
    VF best = set1(-INFINITY);
    for (int t = 0; t < kKeyTile; t += kLanes) {
        VF x = mul(load(s + t), scale);
        if (a->softcap > 0.0f) x = mul(tanh_of(div(x, cap)), cap);
        store(s + t, x);
    }
    for (int t = 0; t < lo; ++t) s[t] = -INFINITY;
    for (int t = hi; t < kKeyTile; ++t) s[t] = -INFINITY;
    for (int t = 0; t < kKeyTile; t += kLanes) best = max(best, load(s + t));
    float top = reduce_max(best);
    top = *peak > top ? *peak : top;
    VF sum = zero();
    for (int t = 0; t < kKeyTile; t += kLanes) {
        VF weight = exp_of(sub(load(s + t), set1(top)));
        store(s + t, weight);
        sum = add(sum, weight);
    }
    float shrinks[kLanes];
    store(shrinks, exp_of(set1(*peak - top)));
    *total = *total * shrinks[0] + reduce_add(sum);
    *peak = top;
    return shrinks[0];
}

// Tokens t_begin..t_end (within the request) of one request under one key head.
static void attend(const AttentionArgs* a, int r, int head, int64_t t_begin, int64_t t_end,
                   uint8_t* scratch) {
    const int width = a->head_dim, padded = (width + kLanes - 1) / kLanes * kLanes;
    const int group = a->heads / a->kv_heads;
    const int rows = (int)(t_end - t_begin) * group;
    const int64_t start = a->query_start[r];
    const int64_t first = a->context_len[r] - (a->query_start[r + 1] - start);  // of the request
    const int32_t* table = a->page_table + r * a->table_width;
    float* keys = (float*)scratch;                        // [padded][64]
    float* tile = keys + (int64_t)padded * kKeyTile;      // [64][padded]
    float* scores = tile + (int64_t)padded * kKeyTile;    // [rows][64]
    float* acc = scores + (int64_t)rows * kKeyTile;       // [rows][padded]
    float* peak = acc + (int64_t)rows * padded;
    float* total = peak + rows;
    for (int i = 0; i < rows; ++i) {
        peak[i] = a->sinks ? a->sinks[head * group + i % group] : -INFINITY;
        total[i] = a->sinks ? 1.0f : 0.0f;
    }
    memset(acc, 0, sizeof(float) * (size_t)rows * (size_t)padded);

    const int64_t last = first + t_end - 1;  // position of the item's last token
    int64_t lowest = a->window ? first + t_begin - a->window + 1 : 0;
    if (lowest < 0) lowest = 0;
    for (int64_t begin = lowest / kKeyTile * kKeyTile; begin <= last; begin += kKeyTile) {
        const int count = last + 1 - begin < kKeyTile ? (int)(last + 1 - begin) : (int)kKeyTile;
        gather(a, table, a->k_pages, a->k_page, a->k_page_head, a->k_page_slot, head, begin, count,
               padded, tile);
        for (int t = 0; t < kKeyTile; t += kLanes)
            for (int d = 0; d < padded; d += kLanes)
                transpose(tile + (int64_t)t * padded + d, padded, keys + d * kKeyTile + t,
                          kKeyTile);
        gather(a, table, a->v_pages, a->v_page, a->v_page_head, a->v_page_slot, head, begin, count,
               padded, tile);
        for (int i = 0; i < rows;) {
            const int mr = i + kAttentionRows <= rows ? (int)kAttentionRows : rows - i;
            const float* q[kAttentionRows];
            int lo[kAttentionRows], hi[kAttentionRows], low = 0, high = kKeyTile, any = 0;
            for (int j = 0; j < mr; ++j) {
                int64_t t = t_begin + (i + j) / group, position = first + t;
                int64_t from = a->window ? position - a->window + 1 - begin : 0;
                int64_t to = position + 1 - begin;
                q[j] = a->q + (start + t) * a->q_token + (head * group + (i + j) % group) * a->q_head;
                lo[j] = from < 0 ? 0 : from > kKeyTile ? (int)kKeyTile : (int)from;
                hi[j] = to < 0 ? 0 : to > kKeyTile ? (int)kKeyTile : (int)to;
                low = lo[j] > low ? lo[j] : low;
                high = hi[j] < high ? hi[j] : high;
                any |= lo[j] < hi[j];
            }
            if (any) {
                float* s = scores + (int64_t)i * kKeyTile;
                score(mr, q, keys, width, s);
                for (int j = 0; j < mr; ++j) {
                    if (lo[j] >= hi[j]) continue;
                    float shrink = soften(a, s + j * kKeyTile, lo[j], hi[j], peak + i + j,
                                          total + i + j);
                    if (shrink != 1.0f) {
                        float* to = acc + (int64_t)(i + j) * padded;
                        for (int d = 0; d < padded; d += kLanes)
                            store(to + d, mul(load(to + d), set1(shrink)));
                    }
                }
                // Keys every row sees together, the rest row by row; ascending for each row.
                float* to = acc + (int64_t)i * padded;
                bool together = mr > 1 && low < high;
                for (int j = 0; j < mr; ++j) {
                    int end = together ? low : hi[j];
                    if (lo[j] < end)
                        add_values(1, to + j * padded, s + j * kKeyTile, tile, padded, lo[j], end);
                }
                if (together) {
                    add_values(mr, to, s, tile, padded, low, high);
                    for (int j = 0; j < mr; ++j)
                        if (high < hi[j])
                            add_values(1, to + j * padded, s + j * kKeyTile, tile, padded, high,
                                          hi[j]);
                }
            }
            i += mr;
        }
    }
    for (int i = 0; i < rows; ++i) {
        int64_t t = start + t_begin + i / group;
        float* out = a->out + (t * a->heads + head * group + i % group) * width;
        const float* from = acc + (int64_t)i * padded;
        for (int d = 0; d < width; ++d) out[d] = from[d] / total[i];
    }
}

static void attention(const AttentionArgs* a, int64_t begin, int64_t end, uint8_t* scratch) {
    int r = 0;
    for (int64_t item = begin; item < end; ++item) {
        while (item >= a->item_start[r + 1]) ++r;
        int64_t within = item - a->item_start[r];
        int64_t tokens = a->query_start[r + 1] - a->query_start[r];
        // The last tokens see the most keys: they go first, so that no thread ends alone with them.
        int64_t tiles = (tokens + a->query_tile - 1) / a->query_tile;
        int64_t tile = tiles - 1 - within / a->kv_heads;
        int64_t t_begin = tile * a->query_tile;
        int64_t t_end = t_begin + a->query_tile < tokens ? t_begin + a->query_tile : tokens;
        attend(a, r, (int)(within % a->kv_heads), t_begin, t_end, scratch);
    }
}

}  // namespace LEVEL
