// Unpacking and sums that all x86 levels share.
#pragma once

#include <immintrin.h>

#include "numbers.hpp"

namespace LEVEL {

// 16 numbers of 4 bits: byte i holds number i in its low and number i + 8 in its high half.
INLINE __m128i nibbles(const uint8_t* p) {
    const __m128i x = _mm_loadl_epi64((const __m128i*)p);
    return _mm_and_si128(_mm_unpacklo_epi64(x, _mm_srli_epi64(x, 4)), _mm_set1_epi8(15));
}
// 16 numbers of 2 bits: byte i holds numbers i, i + 4, i + 8 and i + 12, from low to high.
INLINE __m128i pairs(const uint8_t* p) {
    int32_t word;
    memcpy(&word, p, 4);
    const __m128i x = _mm_srlv_epi32(_mm_set1_epi32(word), _mm_setr_epi32(0, 2, 4, 6));
    return _mm_and_si128(x, _mm_set1_epi8(3));
}

// Sixteen activations: `dot4` broadcasts four of them from memory, those of `lane`.
typedef const int8_t* Quads;
INLINE Quads load_quads(const int8_t* q) { return q; }

// sums[h] = sum of bytes 16 h .. 16 h + 15 of q
INLINE void half_sums(__m256i q, int32_t* sums) {
    __m256i s = _mm256_sad_epu8(_mm256_xor_si256(q, _mm256_set1_epi8((char)0x80)),
                                _mm256_setzero_si256());
    s = _mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0x4e));
    sums[0] = _mm256_extract_epi32(s, 0) - 16 * 128;
    sums[1] = _mm256_extract_epi32(s, 4) - 16 * 128;
}

}  // namespace LEVEL
