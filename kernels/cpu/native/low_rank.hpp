// y += scale * b (a x) + bias of the adapter of each row, in fp32 on factors of 16 or 32 bits.
//
// Down: low = scale * (a x). Lane l of 16 sums the products of k = l, l + 16, ... by fma in this order;
// then lanes i and i + 8 are added, i and i + 4, i and i + 2, i and i + 1. Up: each output sums its
// products over the ranks by fma, in order from zero, and is then added to y; the parts of an adapter one
// after another, last the bias. So a row gets the same bits for any other rows, items and threads, and
// the levels with a fused multiply-add agree bit for bit.
#pragma once

#include "low_rank_plan.hpp"
#include "simd.hpp"

namespace LEVEL {

enum {
    kLowVectors = kTileRows / kLanes,  // of 16 lanes
    // Sums in registers: of 32 up to 16, of 16 up to 8.
    kLowSums = kRegisters == 32 ? 16 : 8,
    kLowMostRows = kLowSums / kLowVectors < 4 ? kLowSums / kLowVectors : 4,
    kUpVectors = 8,  // of one row
};

INLINE float reduce_lanes(const VF* x) {
    if (kLowVectors == 1) return reduce_add(x[0]);
    if (kLowVectors == 2) return reduce_add(add(x[0], x[kLowVectors - 1]));
    return reduce_add(add(add(x[0], x[kLowVectors / 2]), add(x[kLowVectors / 4], x[kLowVectors - 1])));
}

// ROWS rows of x times RANKS rows of a, `stride` numbers apart, from rank `at` on.
template <int TYPE, int ROWS, int RANKS>
__attribute__((noinline)) static void dots(const LowRankPart* part, int64_t at, int64_t k,
                                           const float* const* x, float* const* low) {
    const int64_t stride = padded_low(k), whole = k / kTileRows * kTileRows;
    const uint8_t* a = (const uint8_t*)part->a + at * stride * element_bytes(TYPE);
    VF sums[ROWS][RANKS][kLowVectors];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < RANKS; ++j)
#pragma GCC unroll 4
            for (int v = 0; v < kLowVectors; ++v) sums[r][j][v] = zero();
    for (int64_t i = 0; i < whole; i += kTileRows) {
#pragma GCC unroll 4
        for (int v = 0; v < kLowVectors; ++v) {
            VF each[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) each[r] = load(x[r] + i + v * kLanes);
#pragma GCC unroll 16
            for (int j = 0; j < RANKS; ++j) {
                const VF factor = load_as(TYPE, a, j * stride + i + v * kLanes);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r)
                    sums[r][j][v] = fma(factor, each[r], sums[r][j][v]);
            }
        }
    }
    if (whole < k) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            float rest[kTileRows] = {};
            memcpy(rest, x[r] + whole, sizeof(float) * (size_t)(k - whole));
#pragma GCC unroll 4
            for (int v = 0; v < kLowVectors; ++v)
#pragma GCC unroll 16
                for (int j = 0; j < RANKS; ++j)
                    sums[r][j][v] = fma(load_as(TYPE, a, j * stride + whole + v * kLanes),
                                        load(rest + v * kLanes), sums[r][j][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < RANKS; ++j) low[r][at + j] = part->scale * reduce_lanes(sums[r][j]);
}

// Ranks begin..end of a part for ROWS rows; `low` points to where the part's ranks begin.
template <int TYPE, int ROWS>
static void ranks(const LowRankPart* part, int64_t begin, int64_t end, int64_t k,
                  const float* const* x, float* const* low) {
    const int kMost = kLowSums / (ROWS * kLowVectors) < kLowUnit ? kLowSums / (ROWS * kLowVectors)
                                                                : (int)kLowUnit;
    while (begin < end) {
        const int64_t left = end - begin;
        int done = 1;
        if (kMost >= 8 && left >= 8) dots<TYPE, ROWS, kMost >= 8 ? 8 : 1>(part, begin, k, x, low), done = 8;
        else if (kMost >= 4 && left >= 4) dots<TYPE, ROWS, kMost >= 4 ? 4 : 1>(part, begin, k, x, low), done = 4;
        else if (kMost >= 2 && left >= 2) dots<TYPE, ROWS, kMost >= 2 ? 2 : 1>(part, begin, k, x, low), done = 2;
        else dots<TYPE, ROWS, 1>(part, begin, k, x, low);
        begin += done;
    }
}

template <int TYPE>
static void down(const LowRankArgs* args, const RowGroup& group, int64_t row, int64_t row_end,
                 const LowRankPart* part, int64_t offset, int64_t begin, int64_t end) {
    while (row < row_end) {
        const int count = kLowMostRows >= 4 && row_end - row >= 4   ? 4
                          : kLowMostRows >= 2 && row_end - row >= 2 ? 2
                                                                    : 1;
        const float* x[4];
        float* low[4];
        for (int r = 0; r < count; ++r) {
            x[r] = args->x + args->rows->rows[group.first + row + r] * args->k;
            low[r] = args->low + (group.first + row + r) * args->low_stride + offset;
        }
        if (count == 4) ranks<TYPE, kLowMostRows >= 4 ? 4 : 1>(part, begin, end, args->k, x, low);
        else if (count == 2) ranks<TYPE, kLowMostRows >= 2 ? 2 : 1>(part, begin, end, args->k, x, low);
        else ranks<TYPE, 1>(part, begin, end, args->k, x, low);
        row += count;
    }
}

// Rows of an embedding: column ids[t] of a, which is row ids[t] of it as it is stored.
static void take_low(const LowRankArgs* args, const RowGroup& group, int64_t row, int64_t row_end) {
    const LowRankSlot& slot = args->table[group.slot];
    for (; row < row_end; ++row) {
        const int64_t id = args->ids[args->rows->rows[group.first + row]];
        float* low = args->low + (group.first + row) * args->low_stride;
        for (int64_t p = 0; p < slot.count; ++p) {
            const LowRankPart& part = slot.parts[p];
            for (int64_t j = 0; j < part.rank; ++j) {
                const int64_t at = id * part.rank + j;
                const float value = part.type == kF16 ? half_to_float(((const uint16_t*)part.a)[at])
                                                      : ((const float*)part.a)[at];
                low[j] = part.scale * value;
            }
            low += part.rank;
        }
    }
}

// One unit of a group's rows from `row` on: see low_units.
static void down_unit(const LowRankArgs* args, const RowGroup& group, int64_t row, int64_t unit) {
    const LowRankSlot& slot = args->table[group.slot];
    const int64_t row_end = row + kLowRows < group.count ? row + kLowRows : group.count;
    if (args->ids) return take_low(args, group, row, row_end);
    int64_t offset = 0;
    for (const LowRankPart* part = slot.parts;; offset += part->rank, ++part) {
        const int64_t units = (part->rank + kLowUnit - 1) / kLowUnit;
        if (unit >= units) {
            unit -= units;
            continue;
        }
        const int64_t begin = unit * kLowUnit;
        const int64_t end = begin + kLowUnit < part->rank ? begin + kLowUnit : part->rank;
        if (part->type == kF16) down<kF16>(args, group, row, row_end, part, offset, begin, end);
        else down<kF32>(args, group, row, row_end, part, offset, begin, end);
        return;
    }
}

static void low_rank_down(const LowRankArgs* args, int64_t begin, int64_t end) {
    int64_t before = 0;
    for (int64_t g = 0; g < args->rows->count && before < end; ++g) {
        const RowGroup& group = args->rows->groups[g];
        const int64_t units = low_units(*args, args->table[group.slot]);
        const int64_t after = before + row_chunks(group) * units;
        for (int64_t i = begin > before ? begin : before; i < after && i < end; ++i)
            down_unit(args, group, (i - before) / units * kLowRows, (i - before) % units);
        before = after;
    }
}

// VECTORS vectors of columns of ROWS rows. `b`: the first vector's rank 0; `left`: columns from there on.
template <int TYPE, int ROWS, int VECTORS>
INLINE void outputs(const LowRankPart* part, const uint8_t* const* b, const float* const* low,
                    float* const* y, int64_t left) {
    VF sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = zero();
    for (int64_t j = 0; j < part->rank; ++j) {
        VF factors[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) factors[v] = load_as(TYPE, b[v], j * kTileRows);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const VF each = set1(low[r][j]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = fma(factors[v], each, sums[r][v]);
        }
    }
    if (VECTORS * kLanes <= left) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                store(y[r] + v * kLanes, add(load(y[r] + v * kLanes), sums[r][v]));
        return;
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {  // the end of a row
        float last[VECTORS * kLanes];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) store(last + v * kLanes, sums[r][v]);
        for (int64_t i = 0; i < left; ++i) y[r][i] += last[i];
    }
}

// Columns of a part from its vector `vector` on, VECTORS vectors, for all rows of a group.
template <int TYPE, int VECTORS>
__attribute__((noinline)) static void up(const LowRankArgs* args, const RowGroup& group,
                                         const LowRankPart* part, int64_t offset, int64_t vector) {
    const int kRows = VECTORS * 4 <= kLowSums ? 4 : VECTORS * 2 <= kLowSums ? 2 : 1;
    const uint8_t* b[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t block = (vector + v) / kLowVectors, lane = (vector + v) % kLowVectors * kLanes;
        b[v] = (const uint8_t*)part->b +
               (block * part->rank * kTileRows + lane) * element_bytes(TYPE);
    }
    const int64_t column = part->first_block * kTileRows + vector * kLanes;
    for (int64_t row = 0; row < group.count;) {
        const int count = group.count - row >= kRows ? kRows : 1;
        const float* low[kRows];
        float* y[kRows];
        for (int r = 0; r < count; ++r) {
            low[r] = args->low + (group.first + row + r) * args->low_stride + offset;
            y[r] = args->y + args->rows->rows[group.first + row + r] * args->y_stride + column;
        }
        if (count == kRows) outputs<TYPE, kRows, VECTORS>(part, b, low, y, args->n - column);
        else outputs<TYPE, 1, VECTORS>(part, b, low, y, args->n - column);
        row += count;
    }
}

// 16-column blocks begin..end of y.
template <int TYPE>
static void up_part(const LowRankArgs* args, const RowGroup& group, const LowRankPart* part,
                    int64_t offset, int64_t begin, int64_t end) {
    const int64_t last = part->first_block + part->blocks;
    int64_t vector = ((begin > part->first_block ? begin : part->first_block) - part->first_block) *
                     kLowVectors;
    const int64_t vectors = ((end < last ? end : last) - part->first_block) * kLowVectors;
    while (vector < vectors) {
        const int64_t left = vectors - vector;
        if (group.count == 1 && left >= kUpVectors) {
            up<TYPE, kUpVectors>(args, group, part, offset, vector);
            vector += kUpVectors;
        } else if (left >= 4) {
            up<TYPE, 4>(args, group, part, offset, vector);
            vector += 4;
        } else if (left >= 2) {
            up<TYPE, 2>(args, group, part, offset, vector);
            vector += 2;
        } else {
            up<TYPE, 1>(args, group, part, offset, vector);
            vector += 1;
        }
    }
}

static void low_rank_up(const LowRankArgs* args, int64_t item_begin, int64_t item_end) {
    const int64_t blocks = column_blocks(*args);
    const int64_t begin = item_begin * kUpBlocks;
    const int64_t end = item_end * kUpBlocks < blocks ? item_end * kUpBlocks : blocks;
    for (int64_t g = 0; g < args->rows->count; ++g) {
        const RowGroup& group = args->rows->groups[g];
        const LowRankSlot& slot = args->table[group.slot];
        int64_t offset = 0;
        for (int64_t p = 0; p < slot.count; ++p) {
            const LowRankPart* part = slot.parts + p;
            if (part->type == kF16) up_part<kF16>(args, group, part, offset, begin, end);
            else up_part<kF32>(args, group, part, offset, begin, end);
            offset += part->rank;
        }
        if (!slot.bias) continue;
        const int64_t first = begin * kTileRows;
        const int64_t last = end * kTileRows < args->n ? end * kTileRows : args->n;
        for (int64_t row = 0; row < group.count; ++row) {
            float* y = args->y + args->rows->rows[group.first + row] * args->y_stride;
            for (int64_t i = first; i < last; ++i) y[i] += slot.bias[i];
        }
    }
}

}  // namespace LEVEL
