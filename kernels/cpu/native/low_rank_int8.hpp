// Adapters with 8-bit factors: products in integers. x of a row, and then low, are rounded to 16 bits with
// a scale of the row, so that an instruction multiplies pairs and no factor is converted to float, which
// would be two of three instructions. Lane l of 16 sums k = 2 l and 2 l + 1 of each 32, exactly; then sums
// are added as for other factors. Every level has the same bits.
#pragma once

#include "low_rank_plan.hpp"
#include "pairs.hpp"

namespace LEVEL {

enum {
    kPairs = 2 * kTileRows,   // codes of 16 lanes
    kExactDepth = 8192,       // k whose sums fit 32 bits: 2 * 8192 / 32 * 127 * 32767 < 2^31
    kExactRanks = 512,        // the same for up, where a lane has all ranks
};

// ROWS rows of x times RANKS ranks of a unit from `at` on: `dots` of rows of 16 bits.
template <int TYPE, int ROWS, int RANKS>
__attribute__((noinline)) static void dots(const LowUnit& unit, int64_t at, int64_t k, bool fresh,
                                           const int16_t* const* x, float (*found)[kLowUnit]) {
    const int64_t depth = (k + kPairs - 1) / kPairs * kPairs, step = unit.ranks * kPairs;
    VF totals[ROWS][RANKS][kLowVectors];
    for (int64_t begin = 0; begin < depth; begin += kExactDepth) {
        const int64_t end = begin + kExactDepth < depth ? begin + kExactDepth : depth;
        VI sums[ROWS][RANKS][kLowVectors];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
            for (int j = 0; j < RANKS; ++j)
#pragma GCC unroll 4
                for (int v = 0; v < kLowVectors; ++v) sums[r][j][v] = zero_int();
        for (int64_t i = begin; i < end; i += kPairs) {
            const int64_t here = i / kPairs * step, ahead = here + kAhead;
            if (fresh)
                prefetch_lines(
                    ahead < unit.bytes ? unit.a + ahead : unit.next + (ahead - unit.bytes), step);
#pragma GCC unroll 4
            for (int v = 0; v < kLowVectors; ++v) {
                VI each[ROWS];
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) each[r] = load_pairs(x[r] + i + v * 2 * kLanes);
#pragma GCC unroll 16
                for (int j = 0; j < RANKS; ++j) {
                    const uint8_t* codes = unit.a + here + (at + j) * kPairs + v * 2 * kLanes;
                    const VI wide = widen_pairs((const int8_t*)codes);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; ++r)
                        sums[r][j][v] = dot_pairs(sums[r][j][v], wide, each[r]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
            for (int j = 0; j < RANKS; ++j)
#pragma GCC unroll 4
                for (int v = 0; v < kLowVectors; ++v) {
                    const VF sum = to_float(sums[r][j][v]);
                    totals[r][j][v] = begin ? add(totals[r][j][v], sum) : sum;
                }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < RANKS; ++j) found[r][at + j] = reduce_lanes(totals[r][j]);
}

// VECTORS vectors of columns of ROWS rows, as `outputs`. `low`: pairs of ranks, with `scales` of rows.
template <int ROWS, int VECTORS>
INLINE void outputs_int8(int64_t rank, const uint8_t* const* b, const int16_t* const* low,
                         const float* scales, VF (*found)[VECTORS], const uint8_t* ahead) {
    const int64_t step = VECTORS * 2 * kLanes;
    for (int64_t begin = 0; begin < rank; begin += kExactRanks) {
        const int64_t end = begin + kExactRanks < rank ? begin + kExactRanks : rank;
        VI sums[ROWS][VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = zero_int();
        for (int64_t j = begin; j < end; j += 2) {
            if (ahead) prefetch_lines(ahead + j / 2 * step, step);
            VI wide[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                wide[v] = widen_pairs((const int8_t*)b[v] + j * kTileRows);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const VI each = load_pair(low[r] + j);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v)
                    sums[r][v] = dot_pairs(sums[r][v], wide[v], each);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) {
                const VF sum = to_float(sums[r][v]);
                found[r][v] = begin ? add(found[r][v], sum) : sum;
            }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) found[r][v] = mul(found[r][v], set1(scales[r]));
}

}  // namespace LEVEL
