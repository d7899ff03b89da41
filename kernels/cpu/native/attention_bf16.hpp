// Attention of tokens that see all others of their sequence, in bfloat16: the towers of images.
//
// Queries times the scale are rounded to bfloat16; keys and values are stored as that. Per row and key block of
// 128 keys:
//     s[t]   = sum_d (scale q[d]) k[t][d]        pairs of d in order (bf16_pairs.hpp)
//     m      = max(peak, max s);  w[t] = 2^(s[t] - m)
//     total  = total 2^(peak - m) + sum w
//     acc    = acc 2^(peak - m) + sum_t w[t] v[t]   pairs of t in order, w rounded to bfloat16
// Query tiles divide rows alone, and no request is split (plan_attention), so a row has the same bits in every
// batch. Keys and values of a block become pairs once for the rows of an item.
#pragma once

#include "attention.hpp"
#include "bf16_pairs.hpp"

namespace LEVEL {

static_assert(kAttentionRows == 6 && kRegisters == 32, "the tiles below fit the registers");

// 2^x; the error of 3e-6 is far below that of a weight in bfloat16.
INLINE VF exp2_for_bf16(VF x) {
    const VF limited = max(set1(-127.0f), x);
    const VF n = _mm512_roundscale_ps(limited, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const VF r = sub(limited, n);
    VF p = set1(9.58284e-3f);
    p = fma(p, r, set1(5.590644e-2f));
    p = fma(p, r, set1(2.4024099e-1f));
    p = fma(p, r, set1(6.9312419e-1f));
    p = fma(p, r, set1(1.0f));
    return _mm512_scalef_ps(p, n);
}

// The keys and values of a block as pairs.
struct PairBlock {
    const int16_t* keys;    // [head_dim / 2][128] pairs of dimensions
    const int16_t* values;  // [64][value] pairs of keys; keys from `count` on are zeros
    int count;              // keys
};

static PairBlock pair_block(const Item& item, int64_t begin, int count) {
    const AttentionArgs* a = item.a;
    KeyBlock c;
    c.from = &a->levels[0];
    locate(item, begin, count, &c);
    const int64_t step = c.from->keys.step, wide = c.from->values.step;
    int16_t *keys = (int16_t*)item.keys, *values = (int16_t*)item.values;
    for (int v = 0; v * kLanes < count; ++v) {
        const uint16_t* from = (const uint16_t*)c.key[v];
        for (int d = 0; d < a->head_dim; d += 2, from += 2 * step)
            store_pairs(keys + d * kBlockKeys + 2 * v * kLanes, zip_bf16(from, from + step));
    }
    const int mask = (1 << c.segment_shift) - 1;
    for (int t = 0; t < count; t += 2) {  // a page has both keys: its slots are even
        const uint16_t* from = (const uint16_t*)c.value[t >> c.segment_shift] + (t & mask) * wide;
        for (int d = 0; d < item.value; d += kLanes)
            store_pairs(values + t * item.value + 2 * d,
                        t + 1 < count ? zip_bf16(from + d, from + wide + d) : with_zeros(from + d));
    }
    return {keys, values, count};
}

// Scores of MR rows with NV vectors of keys from `at` on.
template <int MR, int NV>
__attribute__((noinline)) static void pair_scores_bf16(const int16_t* keys, const int16_t* q, int64_t stride,
                                                       int width, int at, float* scores) {
    VF acc[MR][NV];
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) acc[r][c] = zero();
    keys += 2 * at;
    for (int d = 0; d < width; d += 2, keys += 2 * kBlockKeys) {
        VI x[MR];
#pragma GCC unroll 6
        for (int r = 0; r < MR; ++r) x[r] = load_pair(q + r * stride + d);
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) {
            const VI key = load_pairs(keys + 2 * c * kLanes);
#pragma GCC unroll 6
            for (int r = 0; r < MR; ++r) acc[r][c] = dot_bf16(acc[r][c], key, x[r]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) store(scores + r * kBlockKeys + at + c * kLanes, acc[r][c]);
}

template <int MR>
INLINE void scores_bf16(const Item& item, const PairBlock& block, int i, float* scores) {
    const int16_t* q = item.q_codes + i * item.padded;
    const int width = item.a->head_dim;
    for (int at = 0; at < block.count;) {
        const int left = (block.count - at + kLanes - 1) / kLanes;
        if (left > 2) pair_scores_bf16<MR, 4>(block.keys, q, item.padded, width, at, scores);
        else if (left == 2) pair_scores_bf16<MR, 2>(block.keys, q, item.padded, width, at, scores);
        else pair_scores_bf16<MR, 1>(block.keys, q, item.padded, width, at, scores);
        at += (left > 2 ? 4 : left) * kLanes;
    }
}

// One row's scores of `count` keys become weights, in bfloat16 with zeros up to a whole block. `tail` is the
// peak and the total of the row's state; the result is what the state is multiplied with.
INLINE float weights_bf16(const float* s, int count, float* tail, int16_t* to) {
    VF score[kKeyVectors], best = set1(-INFINITY), sum = zero();
#pragma GCC unroll 8
    for (int v = 0; v < kKeyVectors; ++v) {
        const int seen = count - v * kLanes;
        score[v] = load(s + v * kLanes);
        if (seen < kLanes) score[v] = lanes_kept(score[v], seen > 0 ? (1u << seen) - 1 : 0);
        best = max(best, score[v]);
    }
    const float block = reduce_max(best), peak = block > tail[0] ? block : tail[0];
    const VF shift = set1(peak);
#pragma GCC unroll 4
    for (int v = 0; v < kKeyVectors; v += 2) {
        const VF low = exp2_for_bf16(sub(score[v], shift)), high = exp2_for_bf16(sub(score[v + 1], shift));
        sum = add(sum, add(low, high));
        store_pairs(to + v * kLanes, round_two(low, high));
    }
    float kept;
    const VF old = exp2_for_bf16(set1(tail[0] - peak));
    kept = _mm512_cvtss_f32(old);
    tail[0] = peak;
    tail[1] = tail[1] * kept + reduce_add(sum);
    return kept;
}

// state = state kept + the values of a block times their weights, for MR rows and NV vectors of the head.
template <int MR, int NV>
__attribute__((noinline)) static void pair_sums_bf16(const int16_t* values, int64_t wide, int count,
                                                     const int16_t* weights, const float* kept, float* states,
                                                     int64_t record) {
    VF sum[MR][NV];
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[r][v] = mul(load(states + r * record + v * kLanes), set1(kept[r]));
    for (int t = 0; t < count; t += 2, values += 2 * wide) {
        VI weight[MR];
#pragma GCC unroll 6
        for (int r = 0; r < MR; ++r) weight[r] = load_pair(weights + r * kBlockKeys + t);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
            const VI value = load_pairs(values + 2 * v * kLanes);
#pragma GCC unroll 6
            for (int r = 0; r < MR; ++r) sum[r][v] = dot_bf16(sum[r][v], value, weight[r]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) store(states + r * record + v * kLanes, sum[r][v]);
}

// A vector alone waits for the additions before it, so five are three and two.
template <int MR>
INLINE void sums_bf16(const Item& item, const PairBlock& block, const int16_t* weights, const float* kept,
                      float* states) {
    for (int64_t d = 0; d < item.value;) {
        const int left = (int)((item.value - d) / kLanes), take = left == 5 ? 3 : left > 4 ? 4 : left;
        const int16_t* values = block.values + 2 * d;
        float* to = states + d;
        switch (take) {
            case 4: pair_sums_bf16<MR, 4>(values, item.value, block.count, weights, kept, to, item.record); break;
            case 3: pair_sums_bf16<MR, 3>(values, item.value, block.count, weights, kept, to, item.record); break;
            case 2: pair_sums_bf16<MR, 2>(values, item.value, block.count, weights, kept, to, item.record); break;
            default: pair_sums_bf16<MR, 1>(values, item.value, block.count, weights, kept, to, item.record);
        }
        d += take * kLanes;
    }
}

// Rows i..i + MR over one key block.
template <int MR>
static void rows_of_block(const Item& item, const PairBlock& block, int i) {
    float kept[MR];
    int16_t weights[MR * kBlockKeys];
    float* states = item.states + i * item.record;
    scores_bf16<MR>(item, block, i, item.weights);
    for (int r = 0; r < MR; ++r) {
        float* tail = states + r * item.record + item.value;
        const float* scores = item.weights + r * kBlockKeys;
        int16_t* to = weights + r * kBlockKeys;
        kept[r] = block.count == kBlockKeys ? weights_bf16(scores, kBlockKeys, tail, to)
                                            : weights_bf16(scores, block.count, tail, to);
    }
    sums_bf16<MR>(item, block, weights, kept, states);
}

static void attend_bf16(const Item& item, int64_t begin, int64_t end) {
    const AttentionArgs* a = item.a;
    for (int i = 0; i < item.rows; ++i) {
        const float* q = a->q + (item.token + i / item.group) * a->q_token +
                         (item.head * item.group + i % item.group) * a->q_head;
        const float scale = a->scale * kLog2e;
        uint16_t* to = (uint16_t*)item.q_codes + i * item.padded;
        for (int d = 0; d < a->head_dim; ++d) to[d] = float_to_bf16(q[d] * scale);
        begin_state(item, i);
    }
    for (; begin < end; begin += kBlockKeys) {
        const int count = end - begin < kBlockKeys ? (int)(end - begin) : (int)kBlockKeys;
        const PairBlock block = pair_block(item, begin, count);
        for (int i = 0; i < item.rows; i += kAttentionRows) {
            switch (item.rows - i) {
                case 1: rows_of_block<1>(item, block, i); break;
                case 2: rows_of_block<2>(item, block, i); break;
                case 3: rows_of_block<3>(item, block, i); break;
                case 4: rows_of_block<4>(item, block, i); break;
                case 5: rows_of_block<5>(item, block, i); break;
                default: rows_of_block<kAttentionRows>(item, block, i);
            }
        }
    }
    for (int i = 0; i < item.rows; ++i) finish(item, i);
}

static void attention_bf16(const AttentionArgs* a, const ItemRange* share, uint8_t* scratch) {
    Walk walk = walk_from(a, share->begin, share->end);
    Stretch stretch;
    while (next_stretch(&walk, scratch, &stretch)) attend_bf16(stretch.item, stretch.begin, stretch.end);
}

}  // namespace LEVEL
