// Scales and minima of some subgroups of a row block as floats, from any stored type.
#pragma once

#include "bit_planes.hpp"

namespace LEVEL {

enum {
    kPerBlock = kTileRows / kLanes,  // vectors of a row block; they are multiplied in pairs
};
static_assert(kStripRows == 2 * kPerBlock * kLanes, "a strip is kPerBlock pairs of vectors");

INLINE int64_t element_bytes(int type) {
    return type == kF32 ? 4 : type == kF16 || type == kBF16 ? 2 : 1;
}

// Bytes of a number of elements, a multiple of 16, of any type.
INLINE int64_t bytes_of(int type, int64_t count) {
    switch (type) {
        case kU2: return count / 4;
        case kU4: return count / 2;
        case kI6: return count / 16 * 12;
        default: return count * element_bytes(type);
    }
}

// Some subgroups of a row block.
struct SubgroupRange {
    int64_t block, begin, end;
};

// How far ahead scales are prefetched, a row block of which has `bytes`: the same subgroups of the next
// strip, or further on in a long row.
INLINE int64_t scales_ahead(int64_t bytes) {
    return kStripBlocks * bytes < kPrefetch ? kStripBlocks * bytes : (int64_t)kPrefetch;
}

// The float16 factors of a row block's groups, one for `each` of them; null: none.
struct Supers {
    const uint16_t* factors;
    int64_t each;
};

// For each subgroup the 16 values of its group as floats; `to` is [subgroups][kStripRows].
template <int TYPE>
static void load_subgroups(const Weight* w, const void* base, const SubgroupRange& range, float* to) {
    const int64_t subgroups_per_group = w->subgroups_per_group;
    const int64_t ahead = scales_ahead(bytes_of(TYPE, w->groups * kTileRows));
    const int64_t last = (range.block + 1) * w->groups - 1;  // also for subgroups of padding
    int64_t group = range.block * w->groups + range.begin / subgroups_per_group;
    int64_t used = range.begin % subgroups_per_group;
    VF values[kPerBlock] = {};
    for (int64_t u = range.begin; u < range.end; ++u, to += kStripRows) {
        if (u == range.begin || used == 0) {
            const int64_t at = (group < last ? group : last) * kTileRows;
            prefetch((const uint8_t*)base + bytes_of(TYPE, at) + ahead);
            for (int i = 0; i < kPerBlock; ++i) values[i] = load_as(TYPE, base, at + i * kLanes);
        }
        for (int i = 0; i < kPerBlock; ++i) store(to + i * kLanes, values[i]);
        if (++used == subgroups_per_group) {
            used = 0;
            ++group;
        }
    }
}

// The scales of 16 rows in one group, times their factors and, with a TABLE, `then`.
template <int TYPE, bool TABLE>
INLINE void scaled_group(const void* base, int64_t at, const VF* factor, VF then, float* to) {
    for (int i = 0; i < kPerBlock; ++i) {
        const VF value = mul(factor[i], load_as(TYPE, base, at + i * kLanes));
        store(to + i * kLanes, TABLE ? mul(value, then) : value);
    }
}

// load_subgroups where each subgroup is a group (lone_groups), and their factors. A product of one row took a
// third of its time in loops that ask each subgroup where its group ends.
template <int TYPE, bool TABLE>
static void load_groups(const Weight* w, const void* base, const SubgroupRange& range, const Supers& supers,
                        float* to) {
    const VF then = set1(w->int8_table_scale);
    const int64_t row = range.block * w->groups, all = bytes_of(TYPE, w->groups * kTileRows);
    const int64_t stop = bytes_of(TYPE, (row + range.end) * kTileRows) + scales_ahead(all);
    int64_t ahead = bytes_of(TYPE, (row + range.begin) * kTileRows) + scales_ahead(all);
    for (; ahead < stop; ahead += 64) prefetch((const uint8_t*)base + ahead);
    VF factor[kPerBlock];
    for (int i = 0; i < kPerBlock; ++i) factor[i] = set1(1.0f);
    const int64_t each = supers.factors ? supers.each : range.end;
    int64_t over = range.begin / each, next = (over + 1) * each;
    for (int64_t u = range.begin; u < range.end; ++over, next += each) {
        for (int i = 0; supers.factors && i < kPerBlock; ++i)
            factor[i] = load_half(supers.factors + over * kTileRows + i * kLanes);
        const int64_t end = next < range.end ? next : range.end;
        for (; u + 4 <= end; u += 4, to += 4 * kStripRows) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j)
                scaled_group<TYPE, TABLE>(base, (row + u + j) * kTileRows, factor, then, to + j * kStripRows);
        }
        for (; u < end; ++u, to += kStripRows)
            scaled_group<TYPE, TABLE>(base, (row + u) * kTileRows, factor, then, to);
    }
}

#define FOR_TYPES(CASE)                                                                            \
    CASE(kF16) CASE(kBF16) CASE(kF32) CASE(kU8) CASE(kI8) CASE(kE4M3) CASE(kE5M2) CASE(kLow4)      \
    CASE(kHigh4) CASE(kE8M0) CASE(kU2) CASE(kU4) CASE(kI6)

static void load_subgroups_as(int type, const Weight* w, const void* base,
                              const SubgroupRange& range, float* to) {
    switch (type) {
#define CASE(TYPE) \
    case TYPE: load_subgroups<TYPE>(w, base, range, to); break;
        FOR_TYPES(CASE)
#undef CASE
    }
}

template <bool TABLE>
static void load_groups_as(int type, const Weight* w, const void* base, const SubgroupRange& range,
                           const Supers& supers, float* to) {
    switch (type) {
#define CASE(TYPE) \
    case TYPE: load_groups<TYPE, TABLE>(w, base, range, supers, to); break;
        FOR_TYPES(CASE)
#undef CASE
    }
}
#undef FOR_TYPES

// Whether each subgroup has a scale of its own, perhaps times a float16 for several of them, and k is not
// padded: k-quants, IQ4_XS, MXFP4, groups of 32.
INLINE bool lone_groups(const Weight* w) {
    if (w->subgroups_per_group != 1 || w->scale_table || w->zeros) return false;
    if (w->minus && w->zero != 0.0f) return false;
    if (w->super_scale && w->super_type != kF16) return false;
    return w->groups * w->subgroup == w->k_blocks * kTileDepth;
}

// Scales and minima of such a weight.
static void lone_scales(const Weight* w, const SubgroupRange& range, float* scales, float* minuses) {
    const int64_t block = range.block * w->supers * kTileRows;
    const auto of = [&](const void* factors) -> Supers {
        if (!factors) return {nullptr, w->groups};
        return {(const uint16_t*)factors + block, w->subgroups_per_super};
    };
    const int type = w->scale_type;
    if (w->table) load_groups_as<true>(type, w, w->scale, range, of(w->super_scale), scales);
    else load_groups_as<false>(type, w, w->scale, range, of(w->super_scale), scales);
    if (w->minus) load_groups_as<false>(w->minus_type, w, w->minus, range, of(w->super_minus), minuses);
}

static void multiply_by_super(const Weight* w, int type, const void* super, const SubgroupRange& range,
                        float* to) {
    int64_t over = range.block * w->supers + range.begin / w->subgroups_per_super;
    int64_t used = range.begin % w->subgroups_per_super;
    for (int64_t u = range.begin; u < range.end; ++u, to += kStripRows) {
        for (int i = 0; i < kTileRows; i += kLanes)
            store(to + i, mul(load_as(type, super, over * kTileRows + i), load(to + i)));
        if (++used == w->subgroups_per_super) {
            used = 0;
            ++over;
        }
    }
}

// The same for scales that are bytes with a table. A first pass looks them up one by one, a second one
// multiplies: a vector load right after the stores of its parts would wait for them.
static void nested_scales(const Weight* w, const SubgroupRange& range, float* to) {
    const uint8_t* codes = (const uint8_t*)w->scale + range.block * w->groups * kTileRows;
    const float* offset = w->scale_offset + range.block * kTileRows;
    const int64_t last = w->groups - 1, first = range.begin / w->subgroups_per_group;
    int64_t group = first, used = range.begin % w->subgroups_per_group;
    const int64_t first_used = used;
    float* at = to;
    for (int64_t u = range.begin; u < range.end; ++u, at += kStripRows) {
        if (u == range.begin || used == 0) {
            const uint8_t* code = codes + (group < last ? group : last) * kTileRows;
            prefetch(code + kPrefetch / 4);
            for (int i = 0; i < kTileRows; ++i) at[i] = w->scale_table[code[i]];
        } else {
            for (int i = 0; i < kTileRows; i += kLanes) store(at + i, load(at + i - kStripRows));
        }
        if (++used == w->subgroups_per_group) {
            used = 0;
            ++group;
        }
    }
    float supers[kTileRows] = {};
    int64_t until = -1;
    group = first, used = first_used;
    for (int64_t u = range.begin; u < range.end; ++u, to += kStripRows) {
        if (group >= until && group <= last) until = nested_supers(w, range.block, group, supers);
        for (int i = 0; i < kTileRows; i += kLanes)
            store(to + i, add(mul(load(to + i), load(supers + i)), load(offset + i)));
        if (++used == w->subgroups_per_group) {
            used = 0;
            ++group;
        }
    }
}

// Scales and, where there is a minimum or a zero point per group, scale * zero + minus.
static void subgroup_scales(const Weight* w, const SubgroupRange& range, float* scales,
                            float* minuses) {
    if (lone_groups(w)) return lone_scales(w, range, scales, minuses);
    if (w->scale_table) {
        nested_scales(w, range, scales);
    } else {
        load_subgroups_as(w->scale_type, w, w->scale, range, scales);
        if (w->super_scale) multiply_by_super(w, w->super_type, w->super_scale, range, scales);
    }
    if (w->table)
        for (int64_t at = 0; at < (range.end - range.begin) * kStripRows; at += kStripRows)
            for (int i = 0; i < kTileRows; i += kLanes)
                store(scales + at + i, mul(load(scales + at + i), set1(w->int8_table_scale)));
    if (!w->minus && !w->zeros) return;
    if (w->zeros) load_subgroups_as(w->zeros_type, w, w->zeros, range, minuses);
    else load_subgroups_as(w->minus_type, w, w->minus, range, minuses);
    if (w->super_minus) multiply_by_super(w, kF16, w->super_minus, range, minuses);
    if (w->minus && w->zero == 0.0f) return;
    const VF zero_point = set1(w->zero);
    for (int64_t at = 0; at < (range.end - range.begin) * kStripRows; at += kStripRows) {
        for (int i = 0; i < kTileRows; i += kLanes) {
            const VF scale = load(scales + at + i), value = load(minuses + at + i);
            store(minuses + at + i,
                  w->zeros ? mul(scale, value) : add(mul(scale, zero_point), value));
        }
    }
}

}  // namespace LEVEL
