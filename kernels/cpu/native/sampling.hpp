// From logits to one token per row: argmax, or temperature, truncation and the draw.
//
// kernels/reference/sampling.py defines every step. A row is worked on alone, in an order that
// knows neither the other rows, the threads nor the width of a vector.
//
// A token's `gap` is (best - logit) / temperature: float32, never negative, 0 for the best token.
// Its weight is e^-gap, 0 beyond kFar. "Likelier" means a smaller gap, then the lower id, so the
// first tokens of that order are those whose key (bits of the gap, index) is at most some cut. The
// row is not sorted: a first pass leaves the best of every 32 logits, which bound where the cut can
// lie, and only the few logits within the bound become candidates.
#pragma once

#include "abi.hpp"
#include "elementwise.hpp"
#include "simd.hpp"

namespace LEVEL {

enum { kPart = 16, kPieces = kPart / kLanes, kBins = 2048, kDigit = 1024, kFew = 48 };
static const int64_t kGroup = 512;

// exp_of is 0 beyond it: such a token is never drawn.
static const float kFar = 87.3f;
static const uint64_t kAll = ~(uint64_t)0;

// One row, and the thread's memory for it.
struct Row {
    const float* logits;
    int64_t width, groups;
    float best, temperature;
    float* peaks;    // [groups][16]: lane i has the best of the group's logits i, i + 16, ...
    double* sums;    // [groups] weights of a group added up
    double* bins;    // [kBins]
    float* room;     // [kGroup]
    // Candidates, ids ascending.
    int64_t count;
    int32_t* ids;
    float* gaps;
    float* weights;
    float* distances;
    uint64_t* keys;
    uint64_t* spare;
};

// Lays the row's memory out from `at`; returns the bytes it takes.
static int64_t place(Row* row, int64_t width, uint8_t* at) {
    row->width = width;
    row->groups = (width + kGroup - 1) / kGroup;
    const int64_t n = row->groups * kGroup, start = (int64_t)(uintptr_t)at;
    row->room = (float*)at, at += kGroup * sizeof(float);
    row->bins = (double*)at, at += kBins * sizeof(double);
    row->sums = (double*)at, at += (row->groups + 7) / 8 * 8 * (int64_t)sizeof(double);
    row->peaks = (float*)at, at += row->groups * kPart * (int64_t)sizeof(float);
    row->ids = (int32_t*)at, at += n * (int64_t)sizeof(int32_t);
    row->gaps = (float*)at, at += n * (int64_t)sizeof(float);
    row->weights = (float*)at, at += n * (int64_t)sizeof(float);
    row->distances = (float*)at, at += n * (int64_t)sizeof(float);
    row->keys = (uint64_t*)at, at += n * (int64_t)sizeof(uint64_t);
    row->spare = (uint64_t*)at, at += n * (int64_t)sizeof(uint64_t);
    return (int64_t)(uintptr_t)at - start;
}

static int64_t sample_scratch(int64_t width) {
    Row row;
    return place(&row, width, nullptr);
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// The 512 logits of a group; minus infinity after the row's end.
static const float* group_of(const Row* row, int64_t group) {
    const float* x = row->logits + group * kGroup;
    const int64_t left = row->width - group * kGroup;
    if (left >= kGroup) return x;
    memcpy(row->room, x, (size_t)left * sizeof(float));
    for (int64_t i = left; i < kGroup; ++i) row->room[i] = -INFINITY;
    return row->room;
}

// Finds the best logit (NaN if there is one) and fills `peaks`.
static void survey(Row* row) {
    uint32_t nan = 0;
    VF best[kPieces];
    for (int v = 0; v < kPieces; ++v) best[v] = set1(-INFINITY);
    for (int64_t g = 0; g < row->groups; ++g) {
        const float* x = group_of(row, g);
        for (int v = 0; v < kPieces; ++v) {
            VF peak = set1(-INFINITY);
            for (const float* at = x + v * kLanes; at < x + kGroup; at += 4 * kPart) {
                VF a = load(at), b = load(at + kPart);
                VF c = load(at + 2 * kPart), d = load(at + 3 * kPart);
                nan |= lanes_nan(a, b) | lanes_nan(c, d);
                peak = max(peak, max(max(a, b), max(c, d)));
            }
            store(row->peaks + g * kPart + v * kLanes, peak);
            best[v] = max(best[v], peak);
        }
    }
    for (int v = 1; v < kPieces; ++v) best[0] = max(best[0], best[v]);
    row->best = nan ? NAN : reduce_max(best[0]) + 0.0f;  // never -0: gaps are never negative
}

// The first token whose logit is the best (or NaN).
static int64_t first_best(const Row* row) {
    if (row->best != row->best) {
        for (int64_t i = 0; i < row->width; ++i)
            if (row->logits[i] != row->logits[i]) return i;
    }
    const VF best = set1(row->best);
    for (int64_t g = 0; g < row->groups; ++g) {
        uint32_t found = 0;
        for (int v = 0; v < kPieces; ++v)
            found |= lanes_at_least(load(row->peaks + g * kPart + v * kLanes), best);
        if (!found) continue;
        const float* x = group_of(row, g);
        for (int i = 0; i < kGroup; ++i)
            if (x[i] == row->best) return g * kGroup + i;
    }
    return 0;
}

INLINE VF gap_of(const Row* row, VF logits) {
    VF below = sub(set1(row->best), logits);
    return row->temperature == 1.0f ? below : div(below, set1(row->temperature));
}

// The sum of `n` weights (a multiple of 16) in float64: 16 running sums, added in pairs.
static double sum_of(const float* weights, int64_t n) {
    VD sums[2 * kPieces];
    for (int i = 0; i < 2 * kPieces; ++i) sums[i] = zero_wide();
    for (int64_t i = 0; i < n; i += kPart)
        for (int v = 0; v < kPieces; ++v) add_wide(sums + 2 * v, load(weights + i + v * kLanes));
    double lanes[kPart];
    for (int i = 0; i < 2 * kPieces; ++i) store_wide(lanes + i * (kLanes / 2), sums[i]);
    for (int step = kPart / 2; step; step /= 2)
        for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
    return lanes[0];
}

// The weights of a group's tokens, in `room`.
static void weigh_group(const Row* row, int64_t group) {
    const float* x = group_of(row, group);
    for (int i = 0; i < kGroup; i += kLanes)
        store(row->room + i, exp_of(sub(zero(), gap_of(row, load(x + i)))));
}

// Fills `sums` for the whole row; returns their total.
static double weigh_row(const Row* row) {
    double total = 0;
    for (int64_t g = 0; g < row->groups; ++g) {
        weigh_group(row, g);
        total += row->sums[g] = sum_of(row->room, kGroup);
    }
    return total;
}

// Fills `weights`; returns their total.
static double weigh_candidates(Row* row) {
    const int64_t padded = (row->count + kPart - 1) / kPart * kPart;
    for (int64_t i = row->count; i < padded; ++i) row->gaps[i] = INFINITY;
    for (int64_t i = 0; i < padded; i += kLanes)
        store(row->weights + i, exp_of(sub(zero(), load(row->gaps + i))));
    return sum_of(row->weights, padded);
}

// The group in which the running sum of `sums` exceeds `goal`, and the sum before it. Where rounding
// hides it, the last one that is not zero.
static int64_t find_group(const double* sums, int64_t count, double goal, double* before) {
    double running = 0;
    int64_t found = 0;
    for (int64_t g = 0; g < count; ++g) {
        if (sums[g] > 0) {
            found = g;
            *before = running;
        }
        running += sums[g];
        if (running > goal) break;
    }
    return found;
}

// The same number by number.
static int64_t find(const float* weights, int64_t count, double goal) {
    double running = 0;
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (weights[i] > 0) found = i;
        running += (double)weights[i];
        if (running > goal) break;
    }
    return found;
}

// Sorts keys that agree but for their low 20 + 32 bits and of which equal ones are in order.
static void sort_keys(uint64_t* keys, uint64_t* spare, int64_t n) {
    for (int shift = 32; shift < 52; shift += 10) {
        uint32_t starts[kDigit] = {0}, next = 0;
        for (int64_t i = 0; i < n; ++i) ++starts[keys[i] >> shift & (kDigit - 1)];
        for (int d = 0; d < kDigit; ++d) {
            const uint32_t count = starts[d];
            starts[d] = next;
            next += count;
        }
        for (int64_t i = 0; i < n; ++i) spare[starts[keys[i] >> shift & (kDigit - 1)]++] = keys[i];
        uint64_t* swap = keys;
        keys = spare;
        spare = swap;
    }
}

static void insertion_sort(uint64_t* keys, int64_t n) {
    for (int64_t i = 1; i < n; ++i) {
        const uint64_t key = keys[i];
        int64_t at = i;
        for (; at && keys[at - 1] > key; --at) keys[at] = keys[at - 1];
        keys[at] = key;
    }
}

// In ascending order of (value, index): the key of the element with which the sum of the weights
// (null: 1 each) reaches `goal`; kAll if none does. Values are not negative.
static uint64_t cut(const Row* row, const float* values, const float* weights, int64_t n,
                    double goal) {
    uint64_t* keys = row->keys;
    double running = 0;
    int64_t held = 0;
    uint32_t bin = 0;
    const bool few = n <= kFew;
    if (!few) {  // only the bin in which the sum reaches the goal is sorted
        memset(row->bins, 0, kBins * sizeof(double));
        for (int64_t i = 0; i < n; ++i)
            row->bins[bits_of(values[i]) >> 20] += weights ? (double)weights[i] : 1.0;
        for (; bin < kBins && running + row->bins[bin] < goal; ++bin) running += row->bins[bin];
        if (bin == kBins) return kAll;
    }
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of(values[i]);
        keys[held] = (uint64_t)bits << 32 | (uint64_t)i;
        held += few || bits >> 20 == bin;
    }
    if (held <= kFew) insertion_sort(keys, held);
    else sort_keys(keys, row->spare, held);
    for (int64_t i = 0; i < held; ++i) {
        running += weights ? (double)weights[(uint32_t)keys[i]] : 1.0;
        if (running >= goal) return keys[i];
    }
    return few ? kAll : keys[held - 1];
}

// A logit below which every gap exceeds `limit`, whatever the rounding.
static float lowest(const Row* row, float limit) {
    const double gap = (double)limit * (double)row->temperature;
    double low = (double)row->best - gap * (1 + 0x1p-21) - (double)row->temperature * 0x1p-148;
    low -= __builtin_fabs(low) * 0x1p-22;
    return low > -3e38 ? (float)low : -INFINITY;
}

// Makes candidates of the tokens whose gap is at most `limit`, which is at most kFar.
static void collect(Row* row, float limit) {
    const VF low = set1(lowest(row, limit)), far = set1(limit);
    int64_t n = 0;
    for (int64_t g = 0; g < row->groups; ++g) {
        uint32_t found = 0;
        for (int v = 0; v < kPieces; ++v)
            found |= lanes_at_least(load(row->peaks + g * kPart + v * kLanes), low);
        if (!found) continue;
        const float* x = group_of(row, g);
        for (int i = 0; i < kGroup; i += kLanes) {
            const VF logits = load(x + i);
            if (!lanes_at_least(logits, low)) continue;
            float gaps[kLanes];
            const VF gap = gap_of(row, logits);
            store(gaps, gap);
            for (uint32_t left = lanes_at_least(far, gap); left; left &= left - 1) {
                const int lane = __builtin_ctz(left);
                row->ids[n] = (int32_t)(g * kGroup + i + lane);
                row->gaps[n++] = gaps[lane];
            }
        }
    }
    row->count = n;
}

// Drops the candidates whose (value, index) comes after `last`.
static void keep(Row* row, const float* values, uint64_t last) {
    if (last == kAll) return;
    int64_t n = 0;
    for (int64_t i = 0; i < row->count; ++i) {
        row->ids[n] = row->ids[i];
        row->gaps[n] = row->gaps[i];
        n += ((uint64_t)bits_of(values[i]) << 32 | (uint64_t)i) <= last;
    }
    row->count = n;
}

// A gap that at least `k` tokens do not exceed: that of the k-th of at least 8 k peaks.
static float rank_limit(Row* row, int64_t k) {
    if (row->groups * kPart < 2 * k) return kFar;
    int64_t fold = row->groups * kPart / (8 * k), n = 0;
    if (fold < 1) fold = 1;
    for (int64_t g = 0; g < row->groups; g += fold) {
        const int64_t end = g + fold < row->groups ? g + fold : row->groups;
        for (int v = 0; v < kPieces; ++v, n += kLanes) {
            VF peak = load(row->peaks + g * kPart + v * kLanes);
            for (int64_t other = g + 1; other < end; ++other)
                peak = max(peak, load(row->peaks + other * kPart + v * kLanes));
            store(row->gaps + n, gap_of(row, peak));
        }
    }
    const uint32_t bits = (uint32_t)(cut(row, row->gaps, nullptr, n, (double)k) >> 32);
    float limit;
    memcpy(&limit, &bits, 4);
    return limit < kFar ? limit : kFar;
}

// Tokens whose surprise is closest to the entropy, up to `mass`. The surprise less the entropy is
// the gap less the mean gap.
static void keep_typical(Row* row, double mass) {
    const double total = weigh_candidates(row);
    double mean = 0;
    for (int64_t i = 0; i < row->count; ++i)
        mean += (double)row->weights[i] * (double)row->gaps[i];
    const float center = (float)(mean / total);
    for (int64_t i = 0; i < row->count; ++i)
        row->distances[i] = __builtin_fabsf(row->gaps[i] - center);
    keep(row, row->distances, cut(row, row->distances, row->weights, row->count, mass * total));
}

// Of the candidates with at least `threshold` of the weight only the least likely can be drawn.
static void exclude_top(Row* row, double threshold, double total) {
    int64_t likely = 0;
    for (int64_t i = 0; i < row->count; ++i)
        likely += row->weights[i] >= threshold * total && row->weights[i] > 0;
    if (likely < 2) return;
    const uint64_t last = cut(row, row->gaps, nullptr, row->count, (double)(likely - 1));
    for (int64_t i = 0; i < row->count; ++i)
        if (((uint64_t)bits_of(row->gaps[i]) << 32 | (uint64_t)i) <= last) row->weights[i] = 0;
}

// Mirostat 2 replaces the other truncations.
INLINE bool surprising(const Draw* draw) { return draw->mirostat_mu == draw->mirostat_mu; }

// The largest gap that can matter, from the truncations that need no more than the row; `total`
// becomes the weight of the row where that was needed, else stays 0.
static float limit_of(Row* row, const Draw* draw, double* total) {
    float limit = kFar;
    if (surprising(draw)) {  // at most mu bits of surprise, or the best
        *total = weigh_row(row);
        const double most = draw->mirostat_mu * 0.6931471805599453 - log(*total);
        return most < 0 ? 0.0f : most < kFar ? (float)most : kFar;
    }
    if (draw->min_p > 0 && -log(draw->min_p) < kFar) limit = (float)-log(draw->min_p);
    if (draw->top_k > 0 && draw->top_k < row->width) {
        const float ranked = rank_limit(row, draw->top_k);
        if (ranked < limit) limit = ranked;
    } else if (draw->top_p < 1 && draw->typical_p >= 1 && limit == kFar) {
        // Tokens below the bound weigh less than (1 - mass) * total together, even if it were all
        // of them: the others reach the mass.
        *total = weigh_row(row);
        const double bound = -log((1 - draw->top_p) * *total / (double)row->width) + 1e-3;
        if (bound < kFar) limit = (float)bound;
    }
    return limit;
}

// Leaves the candidates that every truncation but XTC leaves.
static void truncate(Row* row, const Draw* draw) {
    double total = 0;
    collect(row, limit_of(row, draw, &total));
    if (surprising(draw)) return;
    if (draw->top_k > 0 && draw->top_k < row->count)
        keep(row, row->gaps, cut(row, row->gaps, nullptr, row->count, (double)draw->top_k));
    if (draw->typical_p < 1) keep_typical(row, draw->typical_p);
    if (draw->top_p < 1) {
        const double left = weigh_candidates(row);
        const double goal = draw->top_p * (total > 0 ? total : left);
        keep(row, row->gaps, cut(row, row->gaps, row->weights, row->count, goal));
    }
}

static int64_t draw_from_row(Row* row, double uniform, double* probability) {
    const double total = weigh_row(row);
    double before = 0;
    const int64_t group = find_group(row->sums, row->groups, uniform * total, &before);
    weigh_group(row, group);
    const int64_t chosen = find(row->room, kGroup, uniform * total - before);
    *probability = (double)row->room[chosen] / total;
    return group * kGroup + chosen;
}

static int64_t draw_from_candidates(Row* row, const Draw* draw, double* probability) {
    const double all = weigh_candidates(row);
    if (!surprising(draw) && draw->xtc_threshold >= 0) exclude_top(row, draw->xtc_threshold, all);
    const int64_t padded = (row->count + kPart - 1) / kPart * kPart;
    int64_t groups = 0;
    double total = 0, before = 0;
    for (int64_t at = 0; at < padded; at += kGroup) {
        const int64_t left = padded - at < kGroup ? padded - at : kGroup;
        total += row->sums[groups++] = sum_of(row->weights + at, left);
    }
    const double goal = draw->uniform * total;
    const int64_t start = find_group(row->sums, groups, goal, &before) * kGroup;
    const int64_t left = row->count - start < kGroup ? row->count - start : kGroup;
    const int64_t chosen = start + find(row->weights + start, left, goal - before);
    *probability = (double)row->weights[chosen] / total;
    return row->ids[chosen];
}

// The token of a row whose best logit is finite, and its share of what could be drawn.
static int64_t draw_token(Row* row, const Draw* draw, double* probability) {
    row->temperature = draw->temperature > 1e-30 ? (float)draw->temperature : 1e-30f;
    const bool ranked = draw->top_k > 0 && draw->top_k < row->width;
    if (!ranked && draw->min_p <= 0 && draw->typical_p >= 1 && draw->top_p >= 1 &&
        draw->xtc_threshold < 0 && !surprising(draw))
        return draw_from_row(row, draw->uniform, probability);
    truncate(row, draw);
    return draw_from_candidates(row, draw, probability);
}

static void sample(const SampleArgs* args, int64_t row_begin, int64_t row_end, uint8_t* scratch) {
    Row row;
    place(&row, args->width, scratch);
    for (int64_t r = row_begin; r < row_end; ++r) {
        row.logits = args->logits + r * args->stride;
        survey(&row);
        args->best[r] = row.best;
        const Draw* draw = args->draws ? args->draws + r : nullptr;
        if (!draw || !(draw->temperature > 0) || !(__builtin_fabsf(row.best) < INFINITY)) {
            args->tokens[r] = first_best(&row);
            args->probabilities[r] = 1;
        } else {
            args->tokens[r] = draw_token(&row, draw, args->probabilities + r);
        }
    }
}

}  // namespace LEVEL
