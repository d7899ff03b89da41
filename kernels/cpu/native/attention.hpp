// Attention over KV pages, causal or in both directions, one key block at a time, with an online softmax over
// the blocks.
//
// A row is a token under one query head; the rows of an item share a key head and so its keys and
// values. Per row and key block of 128 keys (at absolute positions, so a row's result depends only on
// its own position), with the keys lo..hi visible:
//     s[t]   = sum_g key_scale[g][t] sum_d (scale q[d]) k[t][d]   d in order, in groups
//     s[t]   = s[t] + slope (t - position)                        with linear biases (ALiBi)
//     s[t]   = s[t] + bias[clamp(t - position, -reach, reach)]    with biases by distance (T5, MPNet)
//     peak'  = max s;  w[t] = 2^(s[t] - peak');  total' = sum w
//     acc'   = sum_t w[t] value_scale[g][t] v[t]                t in order
// which gives a record (acc', peak', total'). Records are merged from the left:
//     m = max(peak, peak');  x = x 2^(peak - m) + x' 2^(peak' - m)  for x = acc, total
// where `scale` has a factor log2(e). The partial sums of `total'` are those of 16 lanes at every level.
// A block without visible keys changes nothing and is skipped. Invisible keys are never multiplied, or as
// integer codes with a weight of 0, so stale page contents (even NaN) have no effect. Every way to divide the work merges the same records
// in the same order, so spreading a context over threads changes no bit.
#pragma once

#include "attention_integers.hpp"
#include "elementwise.hpp"
#include "rope.hpp"

namespace LEVEL {

// Scores are multiplied by this: exponents of 2 take fewer instructions than those of e.
constexpr float kLog2e = 1.44269504f;

// Adds what keys begin..end of a block have by their distance from the row's own position, after which key t
// is `t + from`; `bias` is that of distance 0. Keys beyond the reach have one bias on each side, so the others
// are a run of the table.
INLINE void add_biases(float* s, int begin, int end, int from, const float* bias, int reach) {
    int near = -reach - from, far = reach + 1 - from;
    near = near < begin ? begin : near > end ? end : near;
    far = far < near ? near : far > end ? end : far;
    const float before = bias[-reach] * kLog2e, after = bias[reach] * kLog2e;
    for (int t = begin; t < near; ++t) s[t] += before;
    for (int t = near; t < far; ++t) {
        const float own = bias[t + from] * kLog2e;
        s[t] += own;
    }
    for (int t = far; t < end; ++t) s[t] += after;
}

// Scores begin..end of ROWS rows, whole vectors, become weights; and the peaks and totals of their records.
// Several rows at a time, because each waits for the largest of its scores and for their sum.
template <int ROWS>
INLINE void weights_of(float* s, int begin, int end, float* records, int64_t record) {
    VF best[ROWS], shift[ROWS];
    // 16 partial sums at every level; weights of invisible keys are 0
    VF sums[ROWS][16 / kLanes];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
        best[r] = set1(-INFINITY);
        for (int i = 0; i < 16 / kLanes; ++i) sums[r][i] = zero();
    }
    for (int t = begin; t < end; t += kLanes)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) best[r] = max(best[r], load(s + r * kBlockKeys + t));
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
        const float peak = reduce_max(best[r]);
        records[r * record] = peak;
        shift[r] = set1(peak);
    }
    for (int t = begin; t < end; t += kLanes)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            float* at = s + r * kBlockKeys + t;
            const VF weight = exp2_of(sub(load(at), shift[r]));
            VF* sum = sums[r] + t / kLanes % (16 / kLanes);
            *sum = add(*sum, weight);
            store(at, weight);
        }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) records[r * record + 1] = sum_of_sixteen(sums[r]);
}

// Turns one row's scores into weights; returns peak and total of its record. With linear biases key t of
// the block is `t + from` after the row's own position and has the bias `slope` times that.
INLINE void softmax_row(const AttentionArgs* a, float* s, int lo, int hi, float slope, const float* bias, int from,
                        float* record) {
    const int begin = lo / kLanes * kLanes, end = (hi + kLanes - 1) / kLanes * kLanes;
    const VF cap = set1(a->softcap), most = set1(a->softcap * kLog2e);
    for (int t = begin; t < end && a->softcap > 0.0f; t += kLanes)
        store(s + t, mul(tanh_of(div(load(s + t), cap)), most));
    for (int t = begin; t < end && a->slopes; ++t) {
        const float distance = (float)(t + from);
        s[t] += slope * (distance < 0.0f ? distance : -distance);
    }
    if (bias) add_biases(s, begin, end, from, bias, a->reach);
    for (int t = begin; t < lo; ++t) s[t] = -INFINITY;
    for (int t = hi; t < end; ++t) s[t] = -INFINITY;
    weights_of<1>(s, begin, end, record, 0);
}

// Merges one more record into the state of each row whose bit in `rows` is set. The exponents of all
// rows are computed together.
static void merge_records(const Item& item, float* states, const float* parts, uint32_t rows) {
    enum { kRows = (kAttentionRows + kLanes - 1) / kLanes * kLanes };
    const int64_t padded = item.value, record = item.record;
    float kept[kRows] = {}, added[kRows] = {}, total[kRows] = {}, more[kRows] = {};
    for (int j = 0; j < kAttentionRows; ++j) {
        if (!(rows >> j & 1)) continue;
        float* tail = states + j * record + padded;
        const float *part = parts + j * record + padded, peak = part[0] > tail[0] ? part[0] : tail[0];
        kept[j] = tail[0] - peak;
        added[j] = part[0] - peak;
        total[j] = tail[1];
        more[j] = part[1];
        tail[0] = peak;
    }
    for (int j = 0; j < kRows; j += kLanes) {
        const VF old_part = exp2_of(load(kept + j)), new_part = exp2_of(load(added + j));
        store(kept + j, old_part);
        store(added + j, new_part);
        store(total + j, fma(load(more + j), new_part, mul(load(total + j), old_part)));
    }
    for (int j = 0; j < kAttentionRows; ++j) {
        if (!(rows >> j & 1)) continue;
        float* state = states + j * record;
        const float* part = parts + j * record;
        const VF old_part = set1(kept[j]), new_part = set1(added[j]);
        for (int64_t d = 0; d < padded; d += kLanes)
            store(state + d, fma(load(part + d), new_part, mul(load(state + d), old_part)));
        state[padded + 1] = total[j];
    }
}

// The records of rows i..i + mr of one key block, into parts[mr][record].
static void make_records(const Item& item, const KeyBlock& c, int64_t begin, int i, int mr,
                         float* parts, Ahead* ahead) {
    const AttentionArgs* a = item.a;
    const int width = a->value_dim;
    int lo[kAttentionRows], hi[kAttentionRows];
    int first = kBlockKeys, end = 0, low = 0, high = kBlockKeys;  // seen by any; seen by all
    for (int j = 0; j < mr; ++j) {
        visible(item, begin, i + j, lo + j, hi + j);
        if (lo[j] < hi[j]) {
            first = lo[j] < first ? lo[j] : first;
            end = hi[j] > end ? hi[j] : end;
        }
        low = lo[j] > low ? lo[j] : low;
        high = hi[j] < high ? hi[j] : high;
    }
    if (first >= end) return;
    const Products multiply = products(c, mr), single = products(c, 1);
    if (multiplies_codes(c.from->keys)) code_products(mr).score(item, c, i, first, end, ahead);
    else multiply.score(c, item.q + i * item.padded, item.padded, a->head_dim, first, end, item.weights, ahead);
    for (int j = 0; j < mr; ++j) memset(parts + j * item.record, 0, sizeof(float) * (size_t)item.value);
    enum { kTogether = 3 };  // divides the rows of every level
    const bool plain = a->softcap <= 0.0f && !a->slopes && !a->biases;
    const bool whole = plain && mr % kTogether == 0 && low == 0 && high == kBlockKeys;
    for (int j = 0; whole && j < mr; j += kTogether)
        weights_of<kTogether>(item.weights + j * kBlockKeys, 0, kBlockKeys, parts + j * item.record + item.value,
                              item.record);
    for (int j = 0; !whole && j < mr; ++j) {
        float* part = parts + j * item.record;
        if (lo[j] >= hi[j]) continue;
        const int row = i + j, head = item.head * item.group + row % item.group;
        const float slope = a->slopes ? a->slopes[head] * kLog2e : 0.0f;
        const int from = (int)(begin - item.position) - row / item.group;
        const float* bias = a->biases ? a->biases + (int64_t)head * (2 * a->reach + 1) + a->reach : nullptr;
        softmax_row(a, item.weights + j * kBlockKeys, lo[j], hi[j], slope, bias, from, part + item.value);
    }
    if (multiplies_codes(c.from->values)) {
        code_products(mr).sum(item, c, lo, hi, first, end, parts, ahead);
        return;
    }
    // Keys that all rows see are multiplied together, the others row by row; ascending for each row.
    const bool together = low < high;
    for (int j = 0; j < mr; ++j) {
        const int stop = together ? low : hi[j];
        if (lo[j] < stop)
            single.values(c, lo[j], stop, item.weights + j * kBlockKeys, width,
                          parts + j * item.record, item.record, ahead);
    }
    if (!together) return;
    multiply.values(c, low, high, item.weights, width, parts, item.record, ahead);
    for (int j = 0; j < mr; ++j)
        if (high < hi[j])
            single.values(c, high, hi[j], item.weights + j * kBlockKeys, width,
                          parts + j * item.record, item.record, ahead);
}

// Bit j: row i + j sees keys of the key block at `begin`.
INLINE uint32_t rows_that_see(const Item& item, int64_t begin, int i, int mr) {
    uint32_t rows = 0;
    for (int j = 0, lo, hi; j < mr; ++j) {
        visible(item, begin, i + j, &lo, &hi);
        rows |= (uint32_t)(lo < hi) << j;
    }
    return rows;
}

// Copies keys and values first..count of a key block, as floats or as codes.
static void copy_block(const Item& item, int64_t begin, int first, int count, KeyBlock* c) {
    const bool codes = multiplies_codes(c->from->keys);
    (codes ? pair_keys : convert_keys)(item, begin, first, count, c);
    if (item.a->latent) (codes ? pair_values_of_keys : values_of_keys)(item, first, count, c);
    else (multiplies_codes(c->from->values) ? pair_values : convert_values)(item, begin, first, count, c);
}

// One key block for all rows: merged into the item's states, or left in `split` as records.
static void attend_block(const Item& item, int64_t begin, float* split, Ahead* ahead) {
    const AttentionArgs* a = item.a;
    int first = 0, hi = 0;
    visible(item, begin, 0, &first, &hi);
    const int64_t seen = item.sees - begin;
    const int count = seen < kBlockKeys ? (int)seen : (int)kBlockKeys;
    if (first >= count) return;
    KeyBlock c;
    c.from = &a->levels[level_of(item.table[begin / a->page_size])];
    load_scales(item, begin, count, c.from->keys, a->head_dim, item.key_scale, item.key_zero, &c.keys);
    c.values = c.keys;
    if (!a->latent)
        load_scales(item, begin, count, c.from->values, a->value_dim, item.value_scale, item.value_zero, &c.values);
    if (whole_slots(a)) locate(item, begin, count, &c);
    if (!reads_pages(item, *c.from)) copy_block(item, begin, first, count, &c);
    for (int i = 0; i < item.rows; i += kAttentionRows) {
        const int mr = i + kAttentionRows < item.rows ? (int)kAttentionRows : item.rows - i;
        float* parts = split ? split + i * item.record : item.parts;
        make_records(item, c, begin, i, mr, parts, ahead);
        if (!split)
            merge_records(item, item.states + i * item.record, parts, rows_that_see(item, begin, i, mr));
    }
}

INLINE void begin_state(const Item& item, int i) {
    const AttentionArgs* a = item.a;
    float* state = item.states + i * item.record;
    memset(state, 0, sizeof(float) * (size_t)item.value);
    state[item.value] =
        a->sinks ? a->sinks[item.head * item.group + i % item.group] * kLog2e : -INFINITY;
    state[item.value + 1] = a->sinks ? 1.0f : 0.0f;
}

INLINE void finish(const Item& item, int i) {
    const AttentionArgs* a = item.a;
    const float *state = item.states + i * item.record, total = state[item.value + 1];
    const int64_t t = item.token + i / item.group;
    float* out = a->out + (t * a->heads + item.head * item.group + i % item.group) * a->value_dim;
    int d = 0;
    for (; d + kLanes <= a->value_dim; d += kLanes)
        store(out + d, div(load(state + d), set1(total)));
    for (; d < a->value_dim; ++d) out[d] = state[d] / total;
    if (a->levels[0].values.mixed)
        mix(out, a->value_dim, mixed_block(a->value_dim, a->latent ? a->head_dim : 0));
}

// Queries times the scale, row after row; also as 16 bits if keys are codes that are multiplied.
static void scale_queries(const Item& item) {
    const AttentionArgs* a = item.a;
    const float scale = a->softcap > 0.0f ? a->scale : a->scale * kLog2e;
    bool codes = false;
    for (int l = 0; l < a->num_levels; ++l) codes |= multiplies_codes(a->levels[l].keys);
    for (int i = 0; i < item.rows; ++i) {
        const float* q = a->q + (item.token + i / item.group) * a->q_token +
                         (item.head * item.group + i % item.group) * a->q_head;
        float* to = item.q + i * item.padded;
        for (int d = 0; d < a->head_dim; ++d) to[d] = q[d] * scale;
        if (codes) query_codes(item, i);
    }
}

// Merges the records of all key blocks into the result.
static void merge_splits(const Stretch& s) {
    const Item& item = s.item;
    for (int i = 0; i < item.rows; ++i) begin_state(item, i);
    for (int i = 0; i < item.rows; i += kAttentionRows) {
        const int mr = i + kAttentionRows < item.rows ? (int)kAttentionRows : item.rows - i;
        for (int64_t c = 0; c < s.blocks; ++c)
            merge_records(item, item.states + i * item.record,
                          s.records + (c * item.rows + i) * item.record,
                          rows_that_see(item, s.records_begin + c * kBlockKeys, i, mr));
    }
    for (int i = 0; i < item.rows; ++i) finish(item, i);
}

// All key blocks of a stretch: merged one by one, or left as records, which the last split of the
// request merges. Meanwhile later memory is prefetched.
static void attend(const Stretch& s, Ahead* ahead) {
    const Item& item = s.item;
    scale_queries(item);
    for (int i = 0; i < item.rows && !s.records; ++i) begin_state(item, i);
    for (int64_t begin = s.begin; begin < s.end; begin += kBlockKeys) {
        plan_prefetch(ahead, item, begin, s.end);
        const int64_t block = (begin - s.records_begin) / kBlockKeys;
        attend_block(item, begin, s.records ? s.records + block * item.rows * item.record : nullptr,
                     ahead);
    }
    if (!s.records) {
        for (int i = 0; i < item.rows; ++i) finish(item, i);
    } else if (__atomic_add_fetch(s.counter, 1, __ATOMIC_ACQ_REL) == s.splits) {
        __atomic_store_n(s.counter, 0, __ATOMIC_RELAXED);  // for the next call
        merge_splits(s);
    }
}

static void attention(const AttentionArgs* a, const ItemRange* share, uint8_t* scratch) {
    Walk walk = walk_from(a, share->begin, share->end);
    Ahead ahead;
    prefetch_first(a, *share, scratch, &ahead);
    Stretch stretch;
    while (next_stretch(&walk, scratch, &stretch)) attend(stretch, &ahead);
}

}  // namespace LEVEL
