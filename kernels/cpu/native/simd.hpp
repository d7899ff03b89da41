// Vectors of kLanes floats, int32 or 4-byte code groups, one set per instruction-set level.
//
// The kernels are written once on top of these and compiled once per level, each time inside its
// own namespace (LEVEL). Everything here is `static inline`: a template or inline function with
// external linkage, merged by the linker across levels, would let AVX-512 code run on a CPU without
// it. For the same reason no C++ standard header is included.
#pragma once

#include <math.h>

#if defined(__AVX512VNNI__)
#include "simd_avx512.hpp"
#elif defined(__AVX2__)
#include "simd_avx2.hpp"
#else
#include "simd_portable.hpp"
#endif

namespace LEVEL {

INLINE VF code_float(VB p, int b) { return to_float(code_int(p, b)); }

#if defined(__AVX2__)
// Numbers of 16 rows in fewer bits than 8 (abi.hpp), from row `lane` on.
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
        case 0: return load_half((const uint16_t*)base + index);
        case 1: return load_bf16((const uint16_t*)base + index);
        case 2: return load((const float*)base + index);
        case 3: return load_u8((const uint8_t*)base + index);
        case 5: return load_e4m3((const uint8_t*)base + index);
        case 6: return load_e5m2((const uint8_t*)base + index);
        case 7: return load_low4((const uint8_t*)base + index);
        case 8: return load_high4((const uint8_t*)base + index);
        case 9: return load_e8m0((const uint8_t*)base + index);
        case 11: return load_u2((const uint8_t*)base + index / 16 * 4, index % 16);
        case 12: return load_u4((const uint8_t*)base + index / 16 * 8, index % 16);
        case 13: return load_i6((const uint8_t*)base + index / 16 * 12, index % 16);
        default: return load_i8((const uint8_t*)base + index);
    }
}

}  // namespace LEVEL
