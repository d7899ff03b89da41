// One row of logits for sampling.hpp: best logits, gaps and weights of tokens, sums of weights.
#pragma once

#include "abi.hpp"
#include "elementwise.hpp"
#include "simd.hpp"

namespace LEVEL {

enum { kPart = 16, kPieces = kPart / kLanes, kBins = 2048 };
static const int64_t kGroup = 512;
static const uint32_t kEvery = (1u << kLanes) - 1;
static_assert(kPart % kLanes == 0, "16 maxima per group are whole vectors");
static_assert(kGroup % (4 * kPart) == 0, "survey reads four vectors at a time");
static_assert(kGroup * sizeof(float) % kCacheLine == 0 && kBins * sizeof(double) % kCacheLine == 0,
              "the arrays that `place` lays out stay aligned");

// exp_of is 0 beyond this gap: such a token is never drawn.
static const float kFar = 87.3f;

// One row, and the thread's memory for it.
struct Row {
    const float* logits;
    int64_t width, groups;
    float best, temperature;
    float* peaks;    // [groups][16]: lane i has the best of the group's logits i, i + 16, ...
    double* sums;    // [groups] weights of a group added up
    double* bins;    // [kBins]
    float* room;     // [kGroup]
    float* copy;     // [width]: of a row whose logits change
    // Candidates, ids ascending.
    int64_t count;
    int32_t* ids;
    float* gaps;
    float* weights;
    float* distances;
    uint64_t* keys;
    uint64_t* spare;
};

// Bytes that `place` lays out: peaks, copy, ids, gaps, weights, distances, keys and spare per group.
static int64_t sample_scratch(int64_t width) {
    const int64_t groups = (width + kGroup - 1) / kGroup;
    return kGroup * 4 + kBins * 8 + (groups + 7) / 8 * 64 + groups * (kPart * 4 + kGroup * 36);
}

static void place(Row* row, int64_t width, uint8_t* at) {
    const int64_t groups = (width + kGroup - 1) / kGroup, n = groups * kGroup;
    row->width = width;
    row->groups = groups;
    row->room = (float*)at, at += kGroup * 4;
    row->bins = (double*)at, at += kBins * 8;
    row->sums = (double*)at, at += (groups + 7) / 8 * 64;
    row->peaks = (float*)at, at += groups * kPart * 4;
    row->copy = (float*)at, at += n * 4;
    row->ids = (int32_t*)at, at += n * 4;
    row->gaps = (float*)at, at += n * 4;
    row->weights = (float*)at, at += n * 4;
    row->distances = (float*)at, at += n * 4;
    row->keys = (uint64_t*)at, at += n * 8;
    row->spare = (uint64_t*)at;
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

// The group in which the running sum of `sums` exceeds `goal`, and the sum before it. If rounding
// errors hide it: the last group that is not zero.
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

// The same for single weights.
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

}  // namespace LEVEL
