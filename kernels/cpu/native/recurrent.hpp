// The gated delta rule, RWKV-7's, and the recurrences of Mamba-1 and 2, token by token.
//
// Each number of a state is computed from the same numbers in the same order, whichever tokens a step has:
// results have the same bits one by one, in chunks and in a batch. What a state's part needs from all of it
// (a head's sums over its rows, a row's sums over its columns) is summed in one order too.
//
// A state is read and written once for each token, in one pass: while it is updated with a token, the next
// one's keys are multiplied with it. Parts of a state small enough for the first-level cache (32 columns of
// a delta rule's head are 16 KiB, four rows of a Mamba-2 head 2 KiB) run through some tokens before the next
// part begins.
#pragma once

#include "abi.hpp"
#include "elementwise.hpp"
#include "simd.hpp"
#include "state_plan.hpp"

namespace LEVEL {

INLINE float exp_of_one(float x) {
    float lanes[kLanes];
    store(lanes, exp_of(set1(x)));
    return lanes[0];
}

INLINE float dot_of(const float* a, const float* b, int64_t count) {
    VF sum = zero();
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) sum = fma(load(a + i), load(b + i), sum);
    float total = reduce_add(sum);
    for (; i < count; ++i) total += a[i] * b[i];
    return total;
}

// The tokens of one request, from state to state: where each chunk begins and ends, and where its state goes.
struct StateWalk {
    const StateRows* rows;
    int64_t at, end, most;   // tokens; the most of a chunk
    int64_t save, last;      // of the request's saves
    int64_t offset;          // of the head's state in a slot
    const float* from;       // the head's state before `at`
    float* to;               // and after the chunk
    float* spare;            // where it is worked on
    bool saved;              // the state after the chunk is asked for

    float* in_slot(int64_t slot) const { return rows->state + slot * rows->slot_step + offset; }
};

// `spare`: memory for a head's state, where the request saves none.
INLINE StateWalk walk_of(const StateRows* rows, int64_t r, int64_t offset, int64_t most, float* spare) {
    StateWalk walk = {rows, rows->query_start[r], rows->query_start[r + 1], most, rows->save_start[r],
                      rows->save_start[r + 1], offset, nullptr, nullptr, spare, false};
    if (walk.save < walk.last) walk.spare = walk.in_slot(rows->save_slot[walk.last - 1]);
    walk.from = rows->initial[r] < 0 ? nullptr : walk.in_slot(rows->initial[r]);
    return walk;
}

// The next chunk: its number of tokens.
INLINE int64_t next_chunk(StateWalk* walk) {
    int64_t count = walk->end - walk->at;
    count = count < walk->most ? count : walk->most;
    walk->saved = false;
    walk->to = walk->spare;
    if (walk->save < walk->last) {
        const int64_t until = walk->rows->save_token[walk->save] + 1 - walk->at;
        if (until <= count) {
            count = until;
            walk->saved = true;
            walk->to = walk->in_slot(walk->rows->save_slot[walk->save]);
        }
    }
    return count;
}

// After a chunk of `count` tokens: the state is in `to`, and other saves of the same token get a copy of its
// part, `height` pieces of `width` floats from `first` on, `step` apart.
INLINE void end_chunk(StateWalk* walk, int64_t count, int64_t first, int64_t height, int64_t width,
                      int64_t step) {
    walk->at += count;
    walk->from = walk->to;
    if (!walk->saved) return;
    for (++walk->save; walk->save < walk->last; ++walk->save) {
        if (walk->rows->save_token[walk->save] != walk->at - 1) break;
        float* copy = walk->in_slot(walk->rows->save_slot[walk->save]);
        if (copy == walk->from) continue;
        for (int64_t i = 0, at = first; i < height; ++i, at += step)
            memcpy(copy + at, walk->from + at, sizeof(float) * (size_t)width);
    }
}

INLINE void clear(float* x, int64_t height, int64_t width, int64_t step) {
    for (int64_t i = 0; i < height; ++i) memset(x + i * step, 0, sizeof(float) * (size_t)width);
}

// ---- the gated delta rule --------------------------------------------------------------------------------

// One lane, for columns that fill no vector: the same names as for vectors.
INLINE float load_lanes(const float* p, float) { return *p; }
INLINE VF load_lanes(const float* p, VF) { return load(p); }
INLINE void store_lanes(float* p, float x) { *p = x; }
INLINE void store_lanes(float* p, VF x) { store(p, x); }
INLINE float every(float x, float) { return x; }
INLINE VF every(float x, VF) { return set1(x); }
INLINE float times(float a, float b) { return a * b; }
INLINE VF times(VF a, VF b) { return mul(a, b); }
INLINE float less(float a, float b) { return a - b; }
INLINE VF less(VF a, VF b) { return sub(a, b); }
INLINE float plus_product(float a, float b, float c) { return a * b + c; }
INLINE VF plus_product(VF a, VF b, VF c) { return fma(a, b, c); }

// Decays of a head, of each row of a state, or RWKV-7.
enum DeltaKind { kByHead = 0, kByRow = 1, kRwkv = 2 };

// The tokens of a chunk, prepared: unit keys, unit queries times the scale, decays and keys times decays. Of
// RWKV-7: keys, queries, decays and unit keys; unit keys times -rate, and values.
struct DeltaChunk {
    float *k, *q, *decay, *seen;  // [kDeltaTokens][key_dim]; with kByHead decay is [kDeltaTokens]
    float *lose, *value;          // the same, of RWKV-7 alone
    float* block;                 // [key_dim][kDeltaColumns]
    int64_t head, first, count;
    const float* ahead;  // the state that the thread reads next; null: unknown
};

static void prepare_delta(const DeltaArgs* a, DeltaChunk* chunk) {
    const int64_t dim = a->key_dim, head = chunk->head;
    const int64_t key_head = a->tiled ? head % a->key_heads : head / (a->heads / a->key_heads);
    for (int64_t t = 0; t < chunk->count; ++t) {
        const int64_t token = chunk->first + t;
        const float* k = a->k + token * a->k_token + key_head * a->k_head;
        const float* q = a->q + token * a->q_token + key_head * a->q_head;
        const float* decay = a->decay + token * a->decay_token + head * a->decay_head;
        float *unit = chunk->k + t * dim, *seen = chunk->seen + t * dim;
        const float of_k = a->normalized ? 1.0f / __builtin_sqrtf(dot_of(k, k, dim) + a->eps) : 1.0f;
        const float of_q = a->normalized ? 1.0f / __builtin_sqrtf(dot_of(q, q, dim) + a->eps) : 1.0f;
        for (int64_t i = 0; i < dim; ++i) unit[i] = k[i] * of_k;
        for (int64_t i = 0; i < dim; ++i) chunk->q[t * dim + i] = q[i] * of_q * a->scale;
        if (!a->by_row) {
            const float factor = chunk->decay[t] = exp_of_one(decay[0]);
            for (int64_t i = 0; i < dim; ++i) seen[i] = unit[i] * factor;
            continue;
        }
        float* factors = chunk->decay + t * dim;
        int64_t i = 0;
        for (; i + kLanes <= dim; i += kLanes) store(factors + i, exp_of(load(decay + i)));
        for (; i < dim; ++i) factors[i] = exp_of_one(decay[i]);
        for (i = 0; i < dim; ++i) seen[i] = unit[i] * factors[i];
    }
}

// The same of RWKV-7; writes `own` of columns [begin, end).
static void prepare_rwkv(const DeltaArgs* a, DeltaChunk* chunk, int64_t begin, int64_t end) {
    const int64_t dim = a->key_dim, head = chunk->head;
    const float *key_norm = a->key_norm + head * dim, *key_mix = a->key_mix + head * dim;
    const float* key_read = a->key_read + head * dim;
    for (int64_t t = 0; t < chunk->count; ++t) {
        const int64_t token = chunk->first + t;
        const float* k = a->k + token * a->k_token + head * a->k_head;
        const float* q = a->q + token * a->q_token + head * a->q_head;
        const float* v = a->v + token * a->v_token + head * a->v_head;
        const float* decay = a->decay + token * a->decay_token + head * a->decay_head;
        const float* rate = a->rate + token * a->rate_token + head * a->rate_head;
        float *key = chunk->k + t * dim, *unit = chunk->seen + t * dim, *lose = chunk->lose + t * dim;
        float *factors = chunk->decay + t * dim, *value = chunk->value + t * dim, *query = chunk->q + t * dim;
        for (int64_t i = 0; i < dim; ++i) unit[i] = k[i] * key_norm[i];
        const float size = __builtin_sqrtf(dot_of(unit, unit, dim));
        const float of_unit = 1.0f / (size < 1e-12f ? 1e-12f : size);
        for (int64_t i = 0; i < dim; ++i) {
            unit[i] *= of_unit;
            key[i] = k[i] + k[i] * (rate[i] - 1.0f) * key_mix[i];
            query[i] = q[i];
            value[i] = v[i];
            lose[i] = q[i] * key_read[i];  // until the product below
        }
        const float read = dot_of(lose, key, dim);
        for (int64_t i = 0; i < dim; ++i) lose[i] = -unit[i] * rate[i];
        int64_t i = 0;
        for (; i + kLanes <= dim; i += kLanes) store(factors + i, exp_of(load(decay + i)));
        for (; i < dim; ++i) factors[i] = exp_of_one(decay[i]);
        if (a->first) {
            const float* first = a->first + token * a->first_token + head * a->first_head;
            const float* mix = a->mix + token * a->mix_token + head * a->mix_head;
            for (i = 0; i < dim; ++i) value[i] += (first[i] - value[i]) * mix[i];
        }
        float* own = a->own + (token * a->heads + head) * dim;
        for (i = begin; i < end; ++i) own[i] = read * value[i];
    }
}

// Rows of a part of a state; some steps apart.
struct Rows {
    float* data;
    int64_t step;
};

// Both passes over the state of a token that is alone prefetch a half of the next head's: the second one reads
// what the first has read, and memory would wait.
INLINE void prefetch_next(const DeltaArgs* a, const DeltaChunk* chunk, int64_t row, int64_t column) {
    if (chunk->ahead) prefetch(chunk->ahead + row * a->value_dim + column);
}

// What of a chunk's tokens one is.
enum DeltaPlace { kBefore = 0, kLast = 1, kOnly = 2 };

// One token of W vectors of columns: `from` becomes `to`. `seen`: the products of its key, then, if another
// token follows, of that one's.
template <typename V, int W, int KIND, int PLACE>
INLINE void delta_token(const DeltaArgs* a, const DeltaChunk* chunk, int64_t t, Rows from, Rows to, V* seen,
                        int64_t column) {
    const int64_t dim = a->key_dim, token = chunk->first + t, lanes = sizeof(V) / sizeof(float);
    const float* k = chunk->k + t * dim;
    const float* q = chunk->q + t * dim;
    const float* next = chunk->seen + (t + 1) * dim;
    const float* decay = chunk->decay + (KIND == kByHead ? t : t * dim);
    const float* lose = KIND == kRwkv ? chunk->lose + t * dim : nullptr;
    const float* v = KIND == kRwkv ? chunk->value + t * dim + column
                                   : a->v + token * a->v_token + chunk->head * a->v_head + column;
    V change[W], out[W], gone[W];
    for (int w = 0; w < W; ++w) {
        change[w] = load_lanes(v + w * lanes, V());
        if (KIND == kRwkv) gone[w] = seen[w];
        else {
            const float beta = a->beta[token * a->beta_token + chunk->head * a->beta_head];
            change[w] = times(every(beta, V()), less(change[w], seen[w]));
        }
        out[w] = seen[w] = every(0.0f, V());
    }
    V factor = every(decay[0], V());
    for (int64_t i = 0; i < dim; ++i) {
        if (KIND != kByHead) factor = every(decay[i], V());
        const V key = every(k[i], V()), query = every(q[i], V());
        const V later = PLACE == kBefore ? every(next[i], V()) : query;
        for (int w = 0; w < W; ++w) {
            V s = load_lanes(from.data + i * from.step + w * lanes, V());
            s = times(factor, s);
            if (KIND == kRwkv) s = plus_product(every(lose[i], V()), gone[w], s);
            s = plus_product(key, change[w], s);
            store_lanes(to.data + i * to.step + w * lanes, s);
            out[w] = plus_product(query, s, out[w]);
            if (PLACE == kBefore) seen[w] = plus_product(later, s, seen[w]);
            if (PLACE == kOnly && w >= W / 2) prefetch_next(a, chunk, i, column + w * lanes);
        }
    }
    float* result = a->out + (token * a->heads + chunk->head) * a->value_dim + column;
    for (int w = 0; w < W; ++w) store_lanes(result + w * lanes, out[w]);
}

// All tokens of a chunk, or its only ONE, for W vectors of columns.
template <typename V, int W, int KIND, bool ONE = false>
static void delta_columns(const DeltaArgs* a, const DeltaChunk* chunk, const float* from, float* to,
                          int64_t column) {
    const int64_t dim = a->key_dim, lanes = sizeof(V) / sizeof(float);
    const Rows before = {const_cast<float*>(from) + column, a->value_dim};
    const Rows after = {to + column, a->value_dim}, block = {chunk->block, W * lanes};
    V seen[W];
    for (int w = 0; w < W; ++w) seen[w] = every(0.0f, V());
    for (int64_t i = 0; i < dim; ++i) {
        const V key = every(chunk->seen[i], V());
        for (int w = 0; w < W; ++w) {
            seen[w] = plus_product(key, load_lanes(before.data + i * before.step + w * lanes, V()), seen[w]);
            if (ONE && w < W / 2) prefetch_next(a, chunk, i, column + w * lanes);
        }
    }
    const int64_t last = chunk->count - 1;
    if (ONE) return delta_token<V, W, KIND, kOnly>(a, chunk, 0, before, after, seen, column);
    for (int64_t t = 0; t < last; ++t)
        delta_token<V, W, KIND, kBefore>(a, chunk, t, t ? block : before, block, seen, column);
    delta_token<V, W, KIND, kLast>(a, chunk, last, last ? block : before, after, seen, column);
}

// Vectors of columns that stay in registers: three for each (what a token changes, its result, the next one's
// products), some for the state and for numbers of a row. A single token has no next one, and wide rows
// are read as they lie in memory.
#if defined(__AVX512F__)
enum { kDeltaVectors = 2, kDeltaWide = 8 };
#else
enum { kDeltaVectors = kRegisters == 32 ? 4 : 2, kDeltaWide = kRegisters == 32 ? 8 : 4 };
#endif
static_assert(kDeltaVectors * kLanes <= kDeltaColumns, "the block of a chunk has room");

template <int KIND>
static void delta_chunk(const DeltaArgs* a, const DeltaChunk* chunk, const float* from, float* to,
                        int64_t begin, int64_t end) {
    int64_t column = begin;
    if (chunk->count == 1)
        for (; column + kDeltaWide * kLanes <= end; column += kDeltaWide * kLanes)
            delta_columns<VF, kDeltaWide, KIND, true>(a, chunk, from, to, column);
    for (; column + kDeltaVectors * kLanes <= end; column += kDeltaVectors * kLanes)
        delta_columns<VF, kDeltaVectors, KIND>(a, chunk, from, to, column);
    for (; column + kLanes <= end; column += kLanes)
        delta_columns<VF, 1, KIND>(a, chunk, from, to, column);
    for (; column < end; ++column) delta_columns<float, 1, KIND>(a, chunk, from, to, column);
}

// The state with which an item begins; null: zeros.
static const float* next_state(const DeltaArgs* a, int64_t item) {
    const int64_t slot = a->rows.initial[item / a->heads];
    if (slot < 0 || slot >= a->rows.slots) return nullptr;  // that of a request without tokens may be anything
    return a->rows.state + slot * a->rows.slot_step + item % a->heads * a->key_dim * a->value_dim;
}

static void delta(const DeltaArgs* a, int64_t begin, int64_t end, uint8_t* scratch) {
    const int64_t dim = a->key_dim, width = a->value_dim, prepared = kDeltaTokens * dim;
    float* memory = (float*)scratch;
    DeltaChunk chunk = {memory, memory + prepared, memory + 2 * prepared, memory + 3 * prepared, nullptr,
                        nullptr, memory + 4 * prepared, 0, 0, 0, nullptr};
    float* spare = chunk.block + dim * kDeltaColumns;
    if (a->rate) {
        chunk.lose = spare + dim * width;
        chunk.value = chunk.lose + prepared;
    }
    const int64_t parts = (width + kDeltaColumns - 1) / kDeltaColumns;
    for (int64_t item = begin; item < end; ++item) {
        const int64_t split = item % a->splits, r = item / a->splits / a->heads;
        chunk.head = item / a->splits % a->heads;
        // Whole vectors of an item are those of the head: what is left over belongs to its last item.
        const int64_t first = parts * split / a->splits * kDeltaColumns;
        const int64_t after = parts * (split + 1) / a->splits * kDeltaColumns;
        const int64_t last = after < width ? after : width;
        StateWalk walk = walk_of(&a->rows, r, chunk.head * dim * width, kDeltaTokens, spare);
        if (walk.at < walk.end && !walk.from) {
            clear(walk.spare + first, dim, last - first, width);
            walk.from = walk.spare;
        }
        chunk.ahead = item + 1 < end && a->splits == 1 ? next_state(a, item + 1) : nullptr;
        while (walk.at < walk.end) {
            chunk.first = walk.at;
            chunk.count = next_chunk(&walk);
            if (a->rate) prepare_rwkv(a, &chunk, first, last);
            else prepare_delta(a, &chunk);
            if (a->rate) delta_chunk<kRwkv>(a, &chunk, walk.from, walk.to, first, last);
            else if (a->by_row) delta_chunk<kByRow>(a, &chunk, walk.from, walk.to, first, last);
            else delta_chunk<kByHead>(a, &chunk, walk.from, walk.to, first, last);
            end_chunk(&walk, chunk.count, first, dim, last - first, width);
        }
    }
}

// ---- Mamba-1 and 2 ---------------------------------------------------------------------------------------

// Some tokens of a head, with b and c side by side; with by_row each row has its own dt and decays.
struct SpaceChunk {
    float *b, *c;  // [kSpaceTokens][size]
    float decay[kSpaceTokens], dt[kSpaceTokens];
    int64_t head, first, count;
};

static void prepare_space(const SpaceArgs* a, SpaceChunk* chunk) {
    const int64_t group = chunk->head / (a->heads / a->groups);
    const size_t bytes = sizeof(float) * (size_t)a->size;
    for (int64_t t = 0; t < chunk->count; ++t) {
        const int64_t token = chunk->first + t;
        memcpy(chunk->b + t * a->size, a->b + token * a->b_token + group * a->b_group, bytes);
        memcpy(chunk->c + t * a->size, a->c + token * a->c_token + group * a->c_group, bytes);
        if (a->by_row) continue;
        chunk->dt[t] = a->dt[token * a->dt_token + chunk->head * a->dt_head];
        chunk->decay[t] = exp_of_one(chunk->dt[t] * a->a[chunk->head]);
    }
}

static_assert(kSpaceRows == 4, "the sums of four rows are reduced together");
enum { kSpaceAhead = 2048 };  // floats between what is prefetched and what is read

// All tokens of a chunk, or its only ONE, for R rows of a state.
template <int R, bool ONE, bool BY_ROW>
static void space_rows(const SpaceArgs* a, const SpaceChunk* chunk, const float* from, float* to,
                       int64_t row) {
    const int64_t size = a->size, body = size / kLanes * kLanes;
    for (int64_t t = 0; t < chunk->count; ++t, from = to) {
        const int64_t token = chunk->first + t;
        const float* x = a->x + token * a->x_token + chunk->head * a->x_head + row;
        const float *b = chunk->b + t * size, *c = chunk->c + t * size;
        const float* own = a->dt + token * a->dt_token + chunk->head * a->dt_head + row;
        const float* dt = BY_ROW ? own : chunk->dt + t;
        const float* rates = a->a + (BY_ROW ? (chunk->head * a->width + row) * size : 0);
        float change[R], total[R];
        VF sums[R];
        for (int r = 0; r < R; ++r) {
            change[r] = dt[BY_ROW ? r : 0] * x[r];
            sums[r] = zero();
        }
        for (int64_t n = 0; n < body; n += kLanes) {
            const VF in = load(b + n), read = load(c + n);
            for (int r = 0; r < R; ++r) {
                const int64_t at = (row + r) * size + n;
                if (ONE) prefetch(from + at + kSpaceAhead);
                VF decay = set1(chunk->decay[t]);
                if (BY_ROW) decay = exp_of(mul(set1(dt[r]), load(rates + r * size + n)));
                const VF s = fma(set1(change[r]), in, mul(decay, load(from + at)));
                store(to + at, s);
                sums[r] = fma(s, read, sums[r]);
            }
        }
        if (R == 4) reduce_four(sums, total);
        else total[0] = reduce_add(sums[0]);
        for (int64_t n = body; n < size; ++n)
            for (int r = 0; r < R; ++r) {
                const int64_t at = (row + r) * size + n;
                const float decay = BY_ROW ? exp_of_one(dt[r] * rates[r * size + n]) : chunk->decay[t];
                to[at] = change[r] * b[n] + decay * from[at];
                total[r] += to[at] * c[n];
            }
        float* out = a->out + (token * a->heads + chunk->head) * a->width + row;
        const float* skip = a->d ? a->d + (BY_ROW ? chunk->head * a->width + row : chunk->head) : nullptr;
        for (int r = 0; r < R; ++r) out[r] = skip ? total[r] + skip[BY_ROW ? r : 0] * x[r] : total[r];
    }
}

template <bool BY_ROW>
static void space_chunk(const SpaceArgs* a, const SpaceChunk* chunk, const float* from, float* to,
                        int64_t row, int64_t last) {
    for (; row + kSpaceRows <= last; row += kSpaceRows) {
        if (chunk->count == 1) space_rows<kSpaceRows, true, BY_ROW>(a, chunk, from, to, row);
        else space_rows<kSpaceRows, false, BY_ROW>(a, chunk, from, to, row);
    }
    for (; row < last; ++row) space_rows<1, false, BY_ROW>(a, chunk, from, to, row);
}

static void space(const SpaceArgs* a, int64_t begin, int64_t end, uint8_t* scratch) {
    const int64_t size = a->size, width = a->width;
    SpaceChunk chunk;
    chunk.b = (float*)scratch;
    chunk.c = chunk.b + kSpaceTokens * size;
    float* spare = chunk.c + kSpaceTokens * size;
    const int64_t parts = (width + kSpaceRows - 1) / kSpaceRows;
    for (int64_t item = begin; item < end; ++item) {
        const int64_t split = item % a->splits, r = item / a->splits / a->heads;
        chunk.head = item / a->splits % a->heads;
        const int64_t first = parts * split / a->splits * kSpaceRows;
        const int64_t after = parts * (split + 1) / a->splits * kSpaceRows;
        const int64_t last = after < width ? after : width;
        StateWalk walk = walk_of(&a->rows, r, chunk.head * width * size, kSpaceTokens, spare);
        if (walk.at < walk.end && !walk.from) {
            clear(walk.spare + first * size, 1, (last - first) * size, 0);
            walk.from = walk.spare;
        }
        while (walk.at < walk.end) {
            chunk.first = walk.at;
            chunk.count = next_chunk(&walk);
            prepare_space(a, &chunk);
            if (a->by_row) space_chunk<true>(a, &chunk, walk.from, walk.to, first, last);
            else space_chunk<false>(a, &chunk, walk.from, walk.to, first, last);
            end_chunk(&walk, chunk.count, first * size, 1, (last - first) * size, 0);
        }
    }
}

}  // namespace LEVEL
