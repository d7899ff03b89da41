// Pairs of bfloat16 numbers, which one instruction multiplies and adds: twice the multiplications of float32.
//
// It rounds after each of the two additions, to nearest even, and takes numbers below 2^-126 as zero. A result
// depends on nothing but the order of pairs, so a row has the same bits alone and in a batch. AVX-512-BF16 alone.
#pragma once

#include "pairs.hpp"

namespace LEVEL {

// acc + the two products of every lane's pairs. In assembly for the reason that dot_pairs is.
INLINE VF dot_bf16(VF acc, VI a, VI b) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
}

// Two vectors rounded, the numbers of `low` first.
INLINE VI round_two(VF low, VF high) { return (VI)_mm512_cvtne2ps_pbh(high, low); }

// Of 32 numbers, numbers i and i + 16 become pair i.
INLINE VI zip_halves(VI x) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                           22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, x);
}

// 16 numbers of each, as pairs of one of `a` and one of `b`.
INLINE VI zip_bf16(const uint16_t* a, const uint16_t* b) {
    const __m256i low = _mm256_loadu_si256((const __m256i*)a), high = _mm256_loadu_si256((const __m256i*)b);
    return zip_halves(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

// The same with zeros in place of `b`.
INLINE VI with_zeros(const uint16_t* a) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a));
}

}  // namespace LEVEL
