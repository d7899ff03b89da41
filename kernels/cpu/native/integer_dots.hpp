// Integer dot products of one subgroup of two vectors of rows with MR rows of x. They are exact, so that
// every level may sum them in an order of its own.
#pragma once

#include "bit_planes.hpp"

namespace LEVEL {

// Adds the products of COUNT vectors of codes from vector `begin` on to dot0 and dot1. A dot is summed in
// CHAINS parts. `keep0`, `keep1`: where the operands go too, as expanded tiles; null: nowhere.
template <int BITS, int COUNT, int MR, int CHAINS>
INLINE void dots_of_codes(const uint8_t* tile0, const uint8_t* tile1, int begin, VB table,
                          const Q8Block* x, int64_t stride, VI* dot0, VI* dot1, uint8_t* keep0, uint8_t* keep1) {
    constexpr int kRun = short_run<BITS, COUNT>();
    Quads a[MR];
    ShortSums short0[MR], short1[MR];
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) {
        const int j = begin + i;
        const VB code0 = operands<BITS>(tile0, j, 0, table);
        const VB code1 = operands<BITS>(tile1, j, 0, table);
        if (keep0) store_codes(keep0 + 64 * j, code0);
        if (keep1) store_codes(keep1 + 64 * j, code1);
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
            if (i % 4 == 0) a[r] = load_quads(x[r * stride].q + 4 * j);
            if constexpr (kRun > 1) {
                short0[r] = dot_short(i % kRun ? short0[r] : ShortSums(), code0, a[r], i % 4);
                short1[r] = dot_short(i % kRun ? short1[r] : ShortSums(), code1, a[r], i % 4);
                if (i % kRun < kRun - 1) continue;
                dot0[r] = add_short(dot0[r], short0[r]);
                dot1[r] = add_short(dot1[r], short1[r]);
                continue;
            }
            const int c = j % CHAINS * MR + r;
            dot0[c] = is_wide<BITS>() ? dot4_wide(dot0[c], code0, a[r], i % 4)
                                      : dot4(dot0[c], code0, a[r], i % 4);
            dot1[c] = is_wide<BITS>() ? dot4_wide(dot1[c], code1, a[r], i % 4)
                                      : dot4(dot1[c], code1, a[r], i % 4);
        }
    }
}

// The same with activations as words; `stride` between rows of them.
template <int BITS, int COUNT, int MR>
INLINE void dots_of_words(const uint8_t* tile0, const uint8_t* tile1, int begin, VB table,
                          const int16_t* words, int64_t stride, VI* dot0, VI* dot1) {
    const int16_t* row[MR];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) row[r] = words + r * stride;
#pragma GCC unroll 8
    for (int j = begin; j < begin + COUNT; ++j) {
        const VB code0 = operands<BITS>(tile0, j, 0, table);
        const VB code1 = operands<BITS>(tile1, j, 0, table);
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
            dot0[r] = dot_words(dot0[r], code0, row[r] + 4 * j);
            dot1[r] = dot_words(dot1[r], code1, row[r] + 4 * j);
        }
    }
}

// The same of tiles that `expand` has ordered for products of two rows by two (kMatrixTile).
template <int COUNT, int MR>
INLINE void dots_of_matrix(const uint8_t* tile0, const uint8_t* tile1, int begin, const Q8Block* x,
                           int64_t stride, VI* dot0, VI* dot1) {
    constexpr int kPairs = (MR + 1) / 2;
    VI first0[kPairs], last0[kPairs], first1[kPairs], last1[kPairs];
#pragma GCC unroll 4
    for (int r = 0; r < kPairs; ++r) first0[r] = last0[r] = first1[r] = last1[r] = zero_int();
#pragma GCC unroll 2
    for (int j = begin; j < begin + COUNT; j += 4) {
        TwoRows a[kPairs];
#pragma GCC unroll 4
        for (int r = 0; r < kPairs; ++r) {  // a last odd row is multiplied twice
            const Q8Block &one = x[2 * r * stride], &other = x[(2 * r + (2 * r + 1 < MR)) * stride];
            a[r] = load_two_rows(one.q + 4 * j, other.q + 4 * j);
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const uint8_t *from0 = tile0 + 64 * (j + 2 * half), *from1 = tile1 + 64 * (j + 2 * half);
            const VB code0 = load_codes(from0), after0 = load_codes(from0 + 64);
            const VB code1 = load_codes(from1), after1 = load_codes(from1 + 64);
#pragma GCC unroll 4
            for (int r = 0; r < kPairs; ++r) {
                const auto k8 = half ? a[r].high : a[r].low;
                first0[r] = dot8(first0[r], code0, k8);
                last0[r] = dot8(last0[r], after0, k8);
                first1[r] = dot8(first1[r], code1, k8);
                last1[r] = dot8(last1[r], after1, k8);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
        const int p = r / 2;
        dot0[r] = add_int(dot0[r], r % 2 ? of_second(first0[p], last0[p]) : of_first(first0[p], last0[p]));
        dot1[r] = add_int(dot1[r], r % 2 ? of_second(first1[p], last1[p]) : of_first(first1[p], last1[p]));
    }
}

}  // namespace LEVEL
