// From logits to one token per row: argmax, or temperature, truncation and the draw.
//
// kernels/reference/sampling.py defines every step. A row is computed alone, in an order that depends
// neither on other rows nor on threads or vector width.
//
// A token's `gap` is (best - logit) / temperature: float32, never negative, 0 for the best token.
// Its weight is e^-gap, 0 beyond kFar. "Likelier" means a smaller gap, then the lower id, so the
// first tokens of that order are those whose key (bits of the gap, index) is at most a cut. The row is
// not sorted: a first pass finds the best of every 32 logits, which give a bound for the cut, and only
// the few logits within the bound become candidates.
#pragma once

#include "logits_row.hpp"
#include "logit_changes.hpp"

namespace LEVEL {

enum { kDigitBits = 10, kDigit = 1 << kDigitBits, kFew = 48, kNear = 500, kBinShift = 20 };
static_assert(kBins == 1 << (31 - kBinShift), "a bin for the upper 11 bits below the sign");
static_assert(kBinShift == 2 * kDigitBits, "sort_keys sorts the bits below a bin in two passes");
static_assert(kFew <= kGroup, "a row has memory for at least one group of keys");

static const uint64_t kAll = ~(uint64_t)0;

// Sorts keys that differ only in their low 20 + 32 bits; keys with equal values must be in order
// already.
static void sort_keys(uint64_t* keys, uint64_t* spare, int64_t n) {
    for (int shift = 32; shift < 32 + kBinShift; shift += kDigitBits) {
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

INLINE uint64_t key_of(const float* values, int64_t i) {
    return (uint64_t)bits_of(values[i]) << 32 | (uint64_t)i;
}

// In ascending order of (value, index): the key of the element with which the sum of the weights
// (null: 1 each) reaches `goal`, or exceeds 0; kAll if none does. Values are not negative.
static uint64_t cut(const Row* row, const float* values, const float* weights, int64_t n,
                    double goal) {
    uint64_t* keys = row->keys;
    if (!(goal > 0)) goal = 5e-324;  // a tiny share of a total below 1
    double running = 0;
    int64_t held = 0;
    uint32_t bin = 0;
    const bool few = n <= kFew;
    if (!few) {  // only the bin in which the sum reaches the goal is sorted
        memset(row->bins, 0, kBins * sizeof(double));
        for (int64_t i = 0; i < n; ++i)
            row->bins[bits_of(values[i]) >> kBinShift] += weights ? (double)weights[i] : 1.0;
        for (; bin < kBins && running + row->bins[bin] < goal; ++bin) running += row->bins[bin];
        if (bin == kBins) return kAll;
    }
    for (int64_t i = 0; i < n; ++i) {
        keys[held] = key_of(values, i);
        held += few || keys[held] >> (32 + kBinShift) == bin;
    }
    if (held <= kFew) insertion_sort(keys, held);
    else sort_keys(keys, row->spare, held);
    for (int64_t i = 0; i < held; ++i) {
        running += weights ? (double)weights[(uint32_t)keys[i]] : 1.0;
        if (running >= goal) return keys[i];
    }
    return few ? kAll : keys[held - 1];
}

// A logit below which every gap exceeds `limit`, with any rounding error.
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
            const int32_t id = (int32_t)(g * kGroup) + i;
            uint32_t left = lanes_at_least(far, gap);
            if (left == kEvery) {
                for (int lane = 0; lane < kLanes; ++lane) row->ids[n + lane] = id + lane;
                store(row->gaps + n, gap);
                n += kLanes;
                continue;
            }
            for (; left; left &= left - 1) {
                const int lane = __builtin_ctz(left);
                row->ids[n] = id + lane;
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
        n += key_of(values, i) <= last;
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

// Tokens whose surprise is closest to the entropy, up to `mass`. The surprise minus the entropy is the
// gap minus the mean gap.
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

// Of the candidates with at least `threshold` of the weight only the least likely stays.
static void exclude_top(Row* row, double threshold, double total) {
    const double bound = threshold * total;
    uint64_t last = 0;
    int64_t likely = 0;
    for (int64_t i = 0; i < row->count; ++i) {
        if (!(row->weights[i] >= bound) || !(row->weights[i] > 0)) continue;
        const uint64_t key = row->keys[likely++] = key_of(row->gaps, i);
        if (key > last) last = key;
    }
    for (int64_t i = 0; i < likely; ++i)
        if (row->keys[i] != last) row->weights[(uint32_t)row->keys[i]] = 0;
}

// Mirostat 2 replaces the other truncations.
INLINE bool surprising(const Draw* draw) { return draw->mirostat_mu == draw->mirostat_mu; }

INLINE bool ranked(const Row* row, const Draw* draw) {
    return draw->top_k > 0 && draw->top_k < row->width;
}

// The largest gap that min_p and top_k, or mirostat, leave; for top_k an upper bound.
static float limit_of(Row* row, const Draw* draw) {
    if (surprising(draw)) {  // at most mu bits of surprise, or the best
        const double most = draw->mirostat_mu * 0.6931471805599453 - log(weigh_row(row));
        return most < 0 ? 0.0f : most < kFar ? (float)most : kFar;
    }
    const float limit = ranked(row, draw) ? rank_limit(row, draw->top_k) : kFar;
    const float least = draw->min_p > 0 ? (float)-log(draw->min_p) : kFar;
    return least < limit ? least : limit;
}

// Collects and weighs tokens that reach `mass` of the row's weight; returns the weight to reach.
static double collect_mass(Row* row, double mass) {
    const double total = weigh_row(row), goal = mass * total;
    // The likeliest 500 are nearly always enough; then no other token is read again.
    collect(row, rank_limit(row, kNear));
    if (row->count < 2 * kNear && weigh_candidates(row) >= goal) return goal;
    // Tokens beyond the bound weigh less than (1 - mass) * total together, even if all were beyond it.
    // 1e-3 is more than any rounding error.
    const double bound = -log((1 - mass) * total / (double)row->width) + 1e-3;
    collect(row, bound < kFar ? (float)bound : kFar);
    weigh_candidates(row);
    return goal;
}

// Keeps the candidates that all truncations except XTC keep.
static void truncate(Row* row, const Draw* draw) {
    const bool plain = draw->min_p <= 0 && !ranked(row, draw) && draw->typical_p >= 1;
    double goal = 0;
    if (plain && draw->top_p < 1 && !surprising(draw)) goal = collect_mass(row, draw->top_p);
    else collect(row, limit_of(row, draw));
    if (surprising(draw)) return;
    if (ranked(row, draw) && draw->top_k < row->count)
        keep(row, row->gaps, cut(row, row->gaps, nullptr, row->count, (double)draw->top_k));
    if (draw->typical_p < 1) keep_typical(row, draw->typical_p);
    if (draw->top_p < 1) {
        if (!(goal > 0)) goal = draw->top_p * weigh_candidates(row);
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
    if (!ranked(row, draw) && draw->min_p <= 0 && draw->typical_p >= 1 && draw->top_p >= 1 &&
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
        bool finite = __builtin_fabsf(row.best) < INFINITY;
        double undrawn = 1;
        const RowShape* shape = args->shapes ? args->shapes + r : nullptr;
        if (shape && (shape->shape || shape->mask.words) && finite) {
            change(&row, shape);
            survey(&row);
            finite = __builtin_fabsf(row.best) < INFINITY;
            if (!finite) undrawn = 0;
        }
        args->best[r] = row.best;
        const Draw* draw = args->draws ? args->draws + r : nullptr;
        if (!draw || !(draw->temperature > 0) || !finite) {
            args->tokens[r] = first_best(&row);
            args->probabilities[r] = undrawn;
        } else {
            args->tokens[r] = draw_token(&row, draw, args->probabilities + r);
        }
    }
}

}  // namespace LEVEL
