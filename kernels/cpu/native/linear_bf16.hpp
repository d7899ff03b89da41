// y = x W^T with activations rounded to bfloat16 and 16-bit weights: those in bfloat16 are exact, those in
// float16 are rounded.
//
// Each output adds its products pair by pair in order of k (bf16_pairs.hpp), 256 at a time from zero, and adds
// these sums in order: one order for every number of rows. A k panel of a strip becomes pairs in the first-level
// cache, [k / 2][kStripRows], and each group of 8 rows of x runs over it.
#pragma once

#include "bf16_pairs.hpp"
#include "linear_int.hpp"

namespace LEVEL {

enum { kBf16Rows = 8 };
static_assert(2 * kBf16Rows + 3 <= kRegisters, "two sums per row, two vectors of weights and a broadcast");
static_assert(kBf16Depth % 2 == 0 && kStripBlocks * kTileRows == 2 * kLanes, "a panel is pairs of two vectors");

// Sums of MR rows of x, `stride` numbers apart, over `pairs` pairs of k.
template <int MR>
__attribute__((noinline)) static void panel_bf16(const uint16_t* weights, int64_t pairs, const uint16_t* x,
                                                 int64_t stride, bool first, float* sums) {
    VF acc0[MR], acc1[MR];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) acc0[r] = acc1[r] = zero();
    for (int64_t i = 0; i < pairs; ++i, x += 2, weights += 2 * kStripRows) {
        const VI a = load_pairs((const int16_t*)weights), b = load_pairs((const int16_t*)weights + 2 * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
            const VI each = load_pair((const int16_t*)x + r * stride);
            acc0[r] = dot_bf16(acc0[r], a, each);
            acc1[r] = dot_bf16(acc1[r], b, each);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
        float* to = sums + r * kStripRows;
        store(to, first ? acc0[r] : add(load(to), acc0[r]));
        store(to + kLanes, first ? acc1[r] : add(load(to + kLanes), acc1[r]));
    }
}

static void rows_bf16(const uint16_t* weights, int64_t pairs, const uint16_t* x, int64_t stride, bool first,
                      int64_t m, float* sums) {
    while (m > 0) {
        const int done = m >= kBf16Rows ? (int)kBf16Rows : m >= 4 ? 4 : m >= 2 ? 2 : 1;
        switch (done) {
            case kBf16Rows: panel_bf16<kBf16Rows>(weights, pairs, x, stride, first, sums); break;
            case 4: panel_bf16<4>(weights, pairs, x, stride, first, sums); break;
            case 2: panel_bf16<2>(weights, pairs, x, stride, first, sums); break;
            default: panel_bf16<1>(weights, pairs, x, stride, first, sums);
        }
        m -= done;
        x += done * stride;
        sums += done * kStripRows;
    }
}

// 16 rows of a weight at two k, as pairs; `values` are [k][16] of TYPE.
template <int TYPE>
INLINE VI weight_pair(const uint16_t* values) {
    if (TYPE == kBF16) return zip_halves(load_pairs((const int16_t*)values));
    return zip_halves(round_two(load_half(values), load_half(values + kTileRows)));
}

template <int TYPE>
INLINE VI last_weight(const uint16_t* values) {
    if (TYPE == kBF16) return with_zeros(values);
    return zip_halves(round_two(load_half(values), zero()));
}

// `k` of two row blocks as pairs, [(k + 1) / 2][kStripRows]; an odd last k is paired with zeros.
template <int TYPE>
static void pair_weights(const uint16_t* const* blocks, int64_t k, uint16_t* to) {
    for (int64_t i = 0; i < k; i += 2, to += 2 * kStripRows)
        for (int b = 0; b < kStripBlocks; ++b) {
            const uint16_t* values = blocks[b] + i * kTileRows;
            const VI pairs = i + 1 < k ? weight_pair<TYPE>(values) : last_weight<TYPE>(values);
            store_pairs((int16_t*)to + b * 2 * kLanes, pairs);
        }
}

static void linear_bf16(const LinearArgs* args, const ItemRange* strips, uint8_t* scratch) {
    const Weight* w = args->w;
    const int64_t k = w->k, pass = bf16_pass(args->m, k), stride = bf16_row(k);
    const uint16_t* values = (const uint16_t*)w->codes;
    float* sums = (float*)scratch;
    uint16_t* weights = (uint16_t*)(sums + pass * kStripRows);
    for (int64_t m = 0; m < args->m; m += pass) {
        const int64_t m_end = m + pass < args->m ? m + pass : args->m;
        for (int64_t s = strips->begin; s < strips->end; ++s) {
            const Strip strip = strip_at(w, s);
            for (int64_t i = 0; i < k; i += kBf16Depth) {
                const int64_t depth = i + kBf16Depth < k ? (int64_t)kBf16Depth : k - i;
                const uint16_t* blocks[kStripBlocks];
                for (int b = 0; b < kStripBlocks; ++b)
                    blocks[b] = values + (strip.block[b] * k + i) * kTileRows;
                if (w->scale_type == kBF16) pair_weights<kBF16>(blocks, depth, weights);
                else pair_weights<kF16>(blocks, depth, weights);
                rows_bf16(weights, (depth + 1) / 2, args->act.bf16 + m * stride + i, stride, i == 0, m_end - m,
                          sums);
            }
            store_strip(args, s, strip.valid, m, m_end, sums);
        }
    }
}

}  // namespace LEVEL
