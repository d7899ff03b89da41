// A page of one level of a ladder written as one of another type, value by value.
//
// Row (head, slot) is computed on its own, so threads never matter. Both pages lie mixed, and where
// keys have a centre it is the same, so neither is undone.
#pragma once

#include "page_codes.hpp"

namespace LEVEL {

// One head of one slot as floats: elements `stride` apart, from element `at`.
static void from_page(const PageSide& side, int64_t at, int64_t stride, const uint16_t* scales,
                      float* to, int count) {
    const int half = side.type == kI4 ? count / 2 : count;
    for (int d = 0; d < count; ++d)
        to[d] = load_one(side, at + (d < half ? d : d - half) * stride, d >= half);
    for (int d = 0; d < count && scales; d += side.group, scales += side.scale_row) {
        const int end = d + side.group < count ? d + side.group : count;
        const bool nibbles = side.type == kI4;
        const float scale = nibbles ? short_scale((uint8_t)*scales) : half_to_float(*scales);
        const float zero = nibbles ? (float)(*scales >> 8) * 0.0625f : 0.0f;
        for (int i = d; i < end; ++i) to[i] = scale * (to[i] - zero);
    }
}

static void recode_side(const RecodeArgs* a, PageSide PageLevel::*side, bool keys, int head,
                        int64_t slot) {
    const PageSide &from = a->source.*side, &to = a->target.*side;
    float x[kMaxHeadDim];
    const int64_t given = a->page * from.page + head * from.head + slot * (keys ? 1 : from.step);
    from_page(from, given, keys ? from.step : 1, scales_of(from, a->head_dim, a->page, head, slot),
              x, a->head_dim);
    const int64_t at = a->to_page * to.page + head * to.head + slot * (keys ? 1 : to.step);
    to_page(to, at, keys ? to.step : 1, scales_of(to, a->head_dim, a->to_page, head, slot), x,
            a->head_dim);
}

static void recode(const RecodeArgs* a, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const int head = (int)(row / a->page_size);
        recode_side(a, &PageLevel::keys, true, head, row % a->page_size);
        recode_side(a, &PageLevel::values, false, head, row % a->page_size);
    }
}

}  // namespace LEVEL
