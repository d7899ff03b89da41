// Vectors of kLanes floats, int32 or 4-byte code groups, one set per instruction-set level.
//
// The kernels are written once on top of these and compiled once per level, each time in the
// namespace of the level (LEVEL). Everything here is `static inline`: the linker would merge a
// template or inline function with external linkage across levels, and AVX-512 code could run on a
// CPU without it. For the same reason no C++ standard header is included.
#pragma once

#include <math.h>

#include "levels.hpp"

#if defined(__AVX512VNNI__)
#include "simd_avx512.hpp"
#elif defined(__AVX2__)
#include "simd_avx2.hpp"
#elif defined(KERNELS_NEON)  // portable code on ARM has the same predefined macros
#include "simd_neon.hpp"
#else
#include "simd_portable.hpp"
#endif

namespace LEVEL {

static_assert(sizeof(VF) == kLanes * sizeof(float) && sizeof(VI) == kLanes * sizeof(int32_t),
              "kLanes floats or int32");
static_assert(sizeof(VB) == kLanes * 4, "four codes per 32-bit lane");
static_assert(sizeof(VD) == kLanes / 2 * sizeof(double), "two VD hold the lanes of a VF");
static_assert((kLanes & (kLanes - 1)) == 0 && kLanes >= 4, "lanes are a power of two");
static_assert(kLanes < 32, "a uint32_t holds one bit per lane, and kEvery all of them");
static_assert(kTileRows % kLanes == 0, "a row block is whole vectors: kU2, kU4, kI6, q and scales");
static_assert(kTileDepth % kLanes == 0 && 16 % kLanes == 0, "so are a block and a half block of k");
static_assert(kTableSize == 16, "look_up shuffles 16 bytes, look_up_float one or two vectors");

// What only some levels have, declared for the others.
#if !defined(WIDE_IN_WORDS)
enum { kWideInWords = 0 };
VI dot_words(VI acc, VB codes, const int16_t* x);
#endif
#if !defined(SHORT_SUMS)
enum { kShortProducts = 0, kLeastRun = kTileDepth };
struct ShortSums {};
ShortSums dot_short(ShortSums sums, VB codes, Quads a, int lane);
VI add_short(VI acc, ShortSums sums);
#endif
#if !defined(MATRIX_PRODUCTS)
enum { kMatrix = 0 };
struct TwoRows {
    VB low, high;
};
VB first_rows(VB a, VB b);
VB last_rows(VB a, VB b);
TwoRows load_two_rows(const int8_t* a, const int8_t* b);
VI dot8(VI acc, VB codes, VB x);
VI of_first(VI first, VI last);
VI of_second(VI first, VI last);
#endif

// Prefetches of weights, keys and values: how many bytes before they are read, and into which cache (2: the
// second level). A core of Zen 4 waits for more lines at a time in the second level. With one row of
// activations, that makes products of Q4_0, Q4_K and Q8_0 1.3 to 1.5 times as fast with AVX2, and whole models
// 1.2 times with AVX-512. On Zen 5, whose first-level cache is 48 KiB, codes come there: one row of Q4_K, Q6_K and
// Q8_0 is 1.06 to 1.1 times as fast. Intel's cores and ARM have not been measured.
#if defined(__AVX2__)
enum { kPrefetch = 16384, kPrefetchInto = 2 };
#else
enum { kPrefetch = 8192, kPrefetchInto = 3 };
#endif
static_assert(kPrefetch % kCacheLine == 0, "whole cache lines");
INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, kPrefetchInto); }
// Lines of codes; `first_cache`: first_cache_prefetch(). Returns where the next ones begin.
INLINE const uint8_t* prefetch_codes(const uint8_t* at, const uint8_t* end, bool first_cache) {
    if (first_cache)
        for (; at < end; at += 64) __builtin_prefetch(at, 0, 3);
    else
        for (; at < end; at += 64) prefetch(at);
    return at;
}
// One row of activations also asks for its codes in the first level, kNearAhead bytes before they are multiplied, where
// the second level was asked for them before: 1.01 to 1.07 times as fast where two threads share a core of Zen 4,
// 1.03 to 1.16 where each has its own.
enum { kNearAhead = 2048 };
template <int BYTES>
INLINE void prefetch_near(const uint8_t* at) {
#pragma GCC unroll 16
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(at + kNearAhead + i, 0, 3);
}

// Levels that convert float16 as they load it. ARM could, but there nobody has measured that it pays.
#if defined(__F16C__)
enum { kLoadsHalves = 1 };
#else
enum { kLoadsHalves = 0 };
#endif

INLINE VF code_float(VB p, int b) { return to_float(code_int(p, b)); }

#if defined(__AVX2__)
// Numbers of 16 rows in fewer than 8 bits (abi.hpp), from row `lane` on.
INLINE VF load_u4(const uint8_t* p, int64_t lane) { return lanes_float(nibbles(p), lane); }
INLINE VF load_u2(const uint8_t* p, int64_t lane) { return lanes_float(pairs(p), lane); }
INLINE VF load_i6(const uint8_t* p, int64_t lane) {
    const __m128i six = _mm_or_si128(nibbles(p), _mm_slli_epi16(pairs(p + 8), 4));
    return lanes_float(_mm_sub_epi8(six, _mm_set1_epi8(32)), lane);
}
#endif

// kLanes elements of any stored type, as float.
INLINE VF load_as(int type, const void* base, int64_t index) {
    switch (type) {
        case kF16: return load_half((const uint16_t*)base + index);
        case kBF16: return load_bf16((const uint16_t*)base + index);
        case kF32: return load((const float*)base + index);
        case kU8: return load_u8((const uint8_t*)base + index);
        case kE4M3: return load_e4m3((const uint8_t*)base + index);
        case kE5M2: return load_e5m2((const uint8_t*)base + index);
        case kLow4: return load_low4((const uint8_t*)base + index);
        case kHigh4: return load_high4((const uint8_t*)base + index);
        case kE8M0: return load_e8m0((const uint8_t*)base + index);
        case kU2: return load_u2((const uint8_t*)base + index / 16 * 4, index % 16);
        case kU4: return load_u4((const uint8_t*)base + index / 16 * 8, index % 16);
        case kI6: return load_i6((const uint8_t*)base + index / 16 * 12, index % 16);
        default: return load_i8((const uint8_t*)base + index);
    }
}

}  // namespace LEVEL
