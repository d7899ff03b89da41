// Scales of a product that it uses as the weight stores them.
#pragma once

#include "subgroup_scales.hpp"

namespace LEVEL {

// How a product finds its scales: as floats that were made before a panel, or of this element type as the
// weight stores them. A product of one row that makes them while it multiplies needs no store and no second
// loop, in which memory would wait.
enum { kMadeFloats = -1, kSuperBlocks = 256 / kTileDepth };  // and blocks of k that share a factor

// Bytes of the scales of a subgroup.
template <int SCALES>
constexpr int scale_step() {
    return SCALES == kMadeFloats ? 4 * kStripRows : (SCALES == kF16 ? 2 : 1) * kTileRows;
}

template <int SCALES>
constexpr bool has_supers() {
    return SCALES == kU8 || SCALES == kI8;
}

// The scales or minima of one subgroup, as subgroup_scales makes them, but for the scale of a table.
template <int SCALES>
INLINE VF load_scale(const uint8_t* p, VF super) {
    if (SCALES == kMadeFloats) return load((const float*)p);
    const VF value = load_as(SCALES, p, 0);
    return has_supers<SCALES>() ? mul(super, value) : value;
}

// The factors of the scales of two vectors of rows, and of their minima.
struct SuperScales {
    VF scale[2], minus[2];
};

// The type of the scales that a product may use as they are stored, one for each subgroup: float16, of any number
// of rows (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and groups of 32 with such scales); of one row, bytes with a float16
// factor for several of them (Q4_K, Q5_K, Q6_K, IQ4_XS), and MXFP4's powers of two. Otherwise kMadeFloats.
INLINE int stored_scales(const LinearArgs* args) {
    const Weight* w = args->w;
    if (!lone_groups(w)) return kMadeFloats;
    if (w->scale_type == kF16 && !w->super_scale && !w->table && (!w->minus || (w->minus_type == kF16 && !w->super_minus)))
        return kLoadsHalves ? kF16 : (int)kMadeFloats;
    if (args->m > 1) return kMadeFloats;
    if (w->scale_type == kE8M0) return w->super_scale || w->minus ? (int)kMadeFloats : kE8M0;
    if (!w->super_scale || w->subgroups_per_super * w->subgroup != kSuperBlocks * kTileDepth) return kMadeFloats;
    if (w->scale_type == kU8) return w->minus_type == kU8 && w->super_minus ? kU8 : (int)kMadeFloats;
    return w->scale_type == kI8 && !w->minus ? kI8 : (int)kMadeFloats;
}

INLINE void prefetch_bytes(const void* begin, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) prefetch((const uint8_t*)begin + i);
}

// The first scales that a thread needs in a matrix, before which no strip has asked for them. They are in up to
// eight places of memory, and the products of four blocks would wait for each of them.
template <int SCALES, bool MINUS>
INLINE void prefetch_scales(const Weight* w, int64_t strip, int64_t scales, int64_t supers) {
    if (SCALES == kMadeFloats) return;  // load_groups asks for its own
    const int64_t at = strip * kStripBlocks * w->groups * scale_step<SCALES>();
    prefetch_bytes((const uint8_t*)w->scale + at, scales);
    if (MINUS) prefetch_bytes((const uint8_t*)w->minus + at, scales);
    if (!has_supers<SCALES>()) return;
    const int64_t over = strip * kStripBlocks * w->supers * kTileRows;
    prefetch_bytes((const uint16_t*)w->super_scale + over, supers);
    if (MINUS) prefetch_bytes(w->super_minus + over, supers);
}

}  // namespace LEVEL
