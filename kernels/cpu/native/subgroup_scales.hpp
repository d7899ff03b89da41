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

static void load_subgroups_as(int type, const Weight* w, const void* base,
                              const SubgroupRange& range, float* to) {
    switch (type) {
        case kF16: load_subgroups<kF16>(w, base, range, to); break;
        case kBF16: load_subgroups<kBF16>(w, base, range, to); break;
        case kF32: load_subgroups<kF32>(w, base, range, to); break;
        case kU8: load_subgroups<kU8>(w, base, range, to); break;
        case kI8: load_subgroups<kI8>(w, base, range, to); break;
        case kE4M3: load_subgroups<kE4M3>(w, base, range, to); break;
        case kE5M2: load_subgroups<kE5M2>(w, base, range, to); break;
        case kLow4: load_subgroups<kLow4>(w, base, range, to); break;
        case kHigh4: load_subgroups<kHigh4>(w, base, range, to); break;
        case kE8M0: load_subgroups<kE8M0>(w, base, range, to); break;
        case kU2: load_subgroups<kU2>(w, base, range, to); break;
        case kU4: load_subgroups<kU4>(w, base, range, to); break;
        case kI6: load_subgroups<kI6>(w, base, range, to); break;
    }
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
