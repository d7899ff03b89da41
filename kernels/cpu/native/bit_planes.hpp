// The layout of the codes in a 16 x 32 tile, and the scales of a row block as floats.
//
// Eight vectors j = 0..7 hold the codes of 16 rows x 4 k (k = 4 j .. 4 j + 3), one 32-bit lane per
// row: the operand of vpdpbusd. A tile stores them as bit planes of 4, 2 and 1 bits:
//   4-bit plane, 256 bytes: byte vector i holds j = i in its low and j = i + 4 in its high nibbles
//   2-bit plane, 128 bytes: byte vector i (0, 1) holds j = i, i + 2, i + 4, i + 6 from low to high
//   1-bit plane,  64 bytes: bit j of every byte
// bits = 1: 1 | 2: 2 | 3: 2 1 | 4: 4 | 5: 4 1 | 6: 4 2 | 7: 4 2 1 (low plane first) | 8: plain bytes, 512.
// So one load serves two, four or eight vectors, and unpacking is a shift and a mask each.
#pragma once

#include "abi.hpp"
#include "simd.hpp"

namespace LEVEL {

static_assert(kTileDepth / 4 == 8, "a tile is eight vectors j: one bit each of a 1-bit plane");
static_assert(kTileRows * 4 == kTileBytesPerBit, "a vector j is 64 bytes, and so is a 1-bit plane");
static_assert(kByteTile == 8 * kTileBytesPerBit, "plain bytes are eight planes");

// Added to a number of bits: the codes index a table, whose entries become the operands; or `expand` has
// expanded them to one byte each. With kMatrix the vectors 2 i and 2 i + 1 of an expanded tile hold the
// codes of rows 0 and 1, and 2 and 3, of 8 k each.
enum { kLookup = 16, kExpanded = 32, kMatrixTile = 64, kBitsMask = 15 };
static_assert(kLookup > (int)kBitsMask && kExpanded >= 2 * kLookup, "the number of bits can be recovered");

template <int BITS>
constexpr bool looks_up() {
    return BITS >= kLookup && BITS < kExpanded;
}

// Whether operands exceed 127 (dot4_wide).
template <int BITS>
constexpr bool is_wide() {
    return BITS == 8 || looks_up<BITS>();
}

// How many vectors of codes can be summed in 16 bits before their sum is added to a dot: a power of two, 1
// if there are no such sums. Each adds kShortProducts products to a lane, at most 127 times the largest
// code.
template <int BITS, int COUNT>
constexpr int short_run() {
    int run = is_wide<BITS>() ? 1 : COUNT;
    while (run > 1 && run * kShortProducts * ((1 << (BITS & kBitsMask)) - 1) * 127 > INT16_MAX) run /= 2;
    return run < kLeastRun ? 1 : run;
}

// What a tile of BITS is after `expand`. Codes of fewer bits are multiplied like the widest that have as
// long a run.
template <int BITS, int COUNT>
constexpr int expanded_as() {
    if (kMatrix) return kMatrixTile;
    if (is_wide<BITS>()) return 8;
    constexpr int kRun = short_run<BITS, COUNT>();
    if (kRun == short_run<7, COUNT>()) return kExpanded + 7;
    if (kRun == short_run<4, COUNT>()) return kExpanded + 4;
    return kExpanded + BITS;
}

template <int BITS>
INLINE VB codes_of(const uint8_t* tile, int j, int h) {
    const uint8_t* p = tile + h * (4 * kLanes);
    if (BITS == 8 || BITS >= kExpanded) return load_codes(p + 64 * j);
    const int low = BITS & 4 ? 256 : 0;            // bytes before the 2-bit plane
    const int mid = low + (BITS & 2 ? 128 : 0);    // bytes before the 1-bit plane
    const int low_bits = BITS & 4;
    const int mid_bits = low_bits + (BITS & 2);
    VB code;
    if (BITS & 4) {
        code = field(load_codes(p + 64 * (j & 3)), j & 4, 15, 0);
        if (BITS & 2)
            code = code_or(code, field(load_codes(p + low + 64 * (j & 1)), j & 6, 3, low_bits));
    } else if (BITS & 2) {
        code = field(load_codes(p + 64 * (j & 1)), j & 6, 3, 0);
    } else {
        return field(load_codes(p), j, 1, 0);
    }
    if (BITS & 1) code = code_or(code, field(load_codes(p + mid), j, 1, mid_bits));
    return code;
}

template <int BITS>
INLINE VB table_of(const uint8_t* int8_table) {
    return looks_up<BITS>() ? load_table(int8_table) : VB();
}

// The operands of a product: the codes, or the table entries that they index.
template <int BITS>
INLINE VB operands(const uint8_t* tile, int j, int h, VB table) {
    if constexpr (looks_up<BITS>()) return look_up(table, codes_of<BITS & kBitsMask>(tile, j, h));
    return codes_of<BITS>(tile, j, h);
}

// One tile of a lane group, one byte per operand: [8][16 rows][4].
template <int BITS>
INLINE void expand(const uint8_t* tile, uint8_t* out, VB table) {
    for (int h = 0; h < kTileRows / kLanes; ++h) {
#pragma GCC unroll 4
        for (int j = 0; j < 8; j += 2) {
            uint8_t* to = out + 64 * j + h * 4 * kLanes;
            const VB a = operands<BITS>(tile, j, h, table), b = operands<BITS>(tile, j + 1, h, table);
            if constexpr (kMatrix) {
                store_codes(to, first_rows(a, b));
                store_codes(to + 64, last_rows(a, b));
            } else {
                store_codes(to, a);
                store_codes(to + 64, b);
            }
        }
    }
}

// The super scales of 16 rows at one group, where they continue across rows; returns the first group
// at which one of them changes.
static int64_t nested_supers(const Weight* w, int64_t b, int64_t group, float* to) {
    const int shift = __builtin_ctz((unsigned)w->subgroups_per_super);
    int64_t until = w->groups;
    for (int r = 0; r < kTileRows; ++r) {
        const int64_t row = b * kTileRows + r, at = row * w->groups + group, over = at >> shift;
        const int64_t change = group + ((over + 1) << shift) - at;
        to[r] = ((const float*)w->super_scale)[row < w->n ? over : 0];
        if (change < until) until = change;
    }
    return until;
}

// scale, zero and minus of subgroup u of row block b, lanes h * kLanes ...
__attribute__((noinline)) static void scale_of(const Weight* w, int64_t b, int64_t u, int h,
                                               VF* scale, VF* zero_point, VF* minus) {
    int64_t group = u / w->subgroups_per_group;
    if (group >= w->groups) group = w->groups - 1;  // only padding
    int64_t at = (b * w->groups + group) * kTileRows + h * kLanes;
    VF s, m = zero();
    if (w->scale_table) {
        float coded[kTileRows], supers[kTileRows];
        nested_supers(w, b, group, supers);
        for (int i = h * kLanes; i < (h + 1) * kLanes; ++i)
            coded[i] = w->scale_table[((const uint8_t*)w->scale)[at - h * kLanes + i]];
        s = mul(load(coded + h * kLanes), load(supers + h * kLanes));
        s = add(s, load(w->scale_offset + b * kTileRows + h * kLanes));
    } else {
        s = load_as(w->scale_type, w->scale, at);
    }
    if (w->minus) m = load_as(w->minus_type, w->minus, at);
    if (w->super_scale && !w->scale_table) {
        int64_t over = (b * w->supers + u / w->subgroups_per_super) * kTileRows + h * kLanes;
        s = mul(load_as(w->super_type, w->super_scale, over), s);
        if (w->super_minus) m = mul(load_half(w->super_minus + over), m);
    }
    *scale = s;
    *minus = m;
    *zero_point = w->zeros ? load_as(w->zeros_type, w->zeros, at) : set1(w->zero);
}

template <int TYPE>
static void scaled_values_of(const Weight* w, int64_t b, int64_t begin, int64_t end, float* out) {
    const uint8_t* values = w->codes + b * w->k * kTileRows;
    while (begin < end) {
        const int64_t group = begin / w->subgroups_per_group;
        const int64_t scale = (b / w->scale_blocks * w->groups + group) * kTileRows;
        VF scales[kTileRows / kLanes];
        for (int h = 0; h < kTileRows / kLanes; ++h)
            scales[h] = load_as(w->super_type, w->scale, scale + h * kLanes);
        int64_t group_end = (group + 1) * w->subgroups_per_group;
        if (group_end > end) group_end = end;
        for (; begin < group_end; ++begin, out += kTileRows) {
            for (int h = 0; h < kTileRows / kLanes; ++h) {
                VF value = load_as(TYPE, values, begin * kTileRows + h * kLanes);
                store(out + h * kLanes, mul(value, scales[h]));
            }
        }
    }
}

// k in [begin, end) of row block b of a dense weight with scales, [end - begin][16].
static void scaled_values(const Weight* w, int64_t b, int64_t begin, int64_t end, float* out) {
    if (w->scale_type == kE4M3) scaled_values_of<kE4M3>(w, b, begin, end, out);
    else scaled_values_of<kE5M2>(w, b, begin, end, out);
}

}  // namespace LEVEL
