// Scales and minimums of some units of a row block as floats, from however they are stored.
#pragma once

#include "planes.hpp"

namespace LEVEL {

enum {
    kPerBlock = kRows / kLanes,  // vectors of a row block; they are worked on in pairs
    kPrefetch = 8192,            // bytes asked for ahead of what is read
};

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

// Some units of a row block.
struct Units {
    int64_t block, begin, end;
};

// Per unit the 16 values of its group as floats; `to` is [units][kStripRows].
template <int TYPE>
static void units_of(const Weight* w, const void* base, const Units& units, float* to) {
    const int64_t group_units = w->group_units;
    const int64_t row = bytes_of(TYPE, kStrip * w->groups * kRows);
    const int64_t ahead = row < kPrefetch ? row : (int64_t)kPrefetch;
    const int64_t last = (units.block + 1) * w->groups - 1;  // also for units of padding
    int64_t group = units.block * w->groups + units.begin / group_units;
    int64_t used = units.begin % group_units;
    VF values[kPerBlock] = {};
    for (int64_t u = units.begin; u < units.end; ++u, to += kStripRows) {
        if (u == units.begin || used == 0) {
            const int64_t at = (group < last ? group : last) * kRows;
            // The same units of the next strip, or 2 KiB ahead in a long row.
            __builtin_prefetch((const uint8_t*)base + bytes_of(TYPE, at) + ahead);
            for (int i = 0; i < kPerBlock; ++i) values[i] = load_as(TYPE, base, at + i * kLanes);
        }
        for (int i = 0; i < kPerBlock; ++i) store(to + i * kLanes, values[i]);
        if (++used == group_units) {
            used = 0;
            ++group;
        }
    }
}

static void units_as(int type, const Weight* w, const void* base, const Units& units, float* to) {
    switch (type) {
        case kF16: units_of<kF16>(w, base, units, to); break;
        case kBF16: units_of<kBF16>(w, base, units, to); break;
        case kF32: units_of<kF32>(w, base, units, to); break;
        case kU8: units_of<kU8>(w, base, units, to); break;
        case kI8: units_of<kI8>(w, base, units, to); break;
        case kE4M3: units_of<kE4M3>(w, base, units, to); break;
        case kE5M2: units_of<kE5M2>(w, base, units, to); break;
        case kLow4: units_of<kLow4>(w, base, units, to); break;
        case kHigh4: units_of<kHigh4>(w, base, units, to); break;
        case kE8M0: units_of<kE8M0>(w, base, units, to); break;
        case kU2: units_of<kU2>(w, base, units, to); break;
        case kU4: units_of<kU4>(w, base, units, to); break;
        case kI6: units_of<kI6>(w, base, units, to); break;
    }
}

static void times_super(const Weight* w, int type, const void* super, const Units& units,
                        float* to) {
    int64_t over = units.block * w->supers + units.begin / w->super_units;
    int64_t used = units.begin % w->super_units;
    for (int64_t u = units.begin; u < units.end; ++u, to += kStripRows) {
        for (int i = 0; i < kRows; i += kLanes)
            store(to + i, mul(load_as(type, super, over * kRows + i), load(to + i)));
        if (++used == w->super_units) {
            used = 0;
            ++over;
        }
    }
}

// The same for scales that are bytes with a table. They are looked up one by one and multiplied in a
// second pass: a vector load soon after stores of its parts would wait for them.
static void nested_units(const Weight* w, const Units& units, float* to) {
    const uint8_t* codes = (const uint8_t*)w->scale + units.block * w->groups * kRows;
    const float* offset = w->scale_offset + units.block * kRows;
    const int64_t last = w->groups - 1, first = units.begin / w->group_units;
    int64_t group = first, used = units.begin % w->group_units;
    const int64_t first_used = used;
    float* at = to;
    for (int64_t u = units.begin; u < units.end; ++u, at += kStripRows) {
        if (u == units.begin || used == 0) {
            const uint8_t* code = codes + (group < last ? group : last) * kRows;
            __builtin_prefetch(code + kPrefetch / 4);
            for (int i = 0; i < kRows; ++i) at[i] = w->scale_table[code[i]];
        } else {
            for (int i = 0; i < kRows; i += kLanes) store(at + i, load(at + i - kStripRows));
        }
        if (++used == w->group_units) {
            used = 0;
            ++group;
        }
    }
    float supers[kRows] = {};
    int64_t until = -1;
    group = first, used = first_used;
    for (int64_t u = units.begin; u < units.end; ++u, to += kStripRows) {
        if (group >= until && group <= last) until = nested_supers(w, units.block, group, supers);
        for (int i = 0; i < kRows; i += kLanes)
            store(to + i, add(mul(load(to + i), load(supers + i)), load(offset + i)));
        if (++used == w->group_units) {
            used = 0;
            ++group;
        }
    }
}

// Scales and, where there is a minimum or a zero point per group, scale * zero + minus.
static void unit_scales(const Weight* w, const Units& units, float* scales, float* minuses) {
    if (w->scale_table) {
        nested_units(w, units, scales);
    } else {
        units_as(w->scale_type, w, w->scale, units, scales);
        if (w->super_scale) times_super(w, w->super_type, w->super_scale, units, scales);
    }
    if (w->table)
        for (int64_t at = 0; at < (units.end - units.begin) * kStripRows; at += kStripRows)
            for (int i = 0; i < kRows; i += kLanes)
                store(scales + at + i, mul(load(scales + at + i), set1(w->step)));
    if (!w->minus && !w->zeros) return;
    if (w->zeros) units_as(w->zeros_type, w, w->zeros, units, minuses);
    else units_as(w->minus_type, w, w->minus, units, minuses);
    if (w->super_minus) times_super(w, kF16, w->super_minus, units, minuses);
    if (w->minus && w->zero == 0.0f) return;
    const VF zero_point = set1(w->zero);
    for (int64_t at = 0; at < (units.end - units.begin) * kStripRows; at += kStripRows) {
        for (int i = 0; i < kRows; i += kLanes) {
            const VF scale = load(scales + at + i), value = load(minuses + at + i);
            store(minuses + at + i,
                  w->zeros ? mul(scale, value) : add(mul(scale, zero_point), value));
        }
    }
}

}  // namespace LEVEL
