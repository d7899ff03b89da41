// The changes to one row of logits before its token is drawn: kernels/operators/sampling.py explains them.
#pragma once

#include "logits_row.hpp"

namespace LEVEL {

static_assert(32 % kLanes == 0, "a word of a mask is whole vectors");

INLINE uint32_t bits_at(const Mask* mask, int64_t word) {
    return !mask->words ? ~0u : word < mask->count ? mask->words[word] : 0;
}

// Copies the logits that both masks allow; the others become minus infinity.
static void copy_masked(const Row* row, const Mask* first, const Mask* second) {
    const float* x = row->logits;
    const int64_t whole = row->width / 32;
    for (int64_t word = 0; word < whole; ++word) {
        const uint32_t bits = bits_at(first, word) & bits_at(second, word);
        for (int i = 0; i < 32; i += kLanes) {
            const int64_t at = word * 32 + i;
            store(row->copy + at, lanes_kept(load(x + at), bits >> i));
        }
    }
    const uint32_t bits = bits_at(first, whole) & bits_at(second, whole);
    for (int64_t i = whole * 32; i < row->width; ++i)
        row->copy[i] = bits >> i % 32 & 1 ? x[i] : -INFINITY;
}

static void apply(const Change* change, float* x, int64_t width) {
    const float repetition = change->repetition, frequency = change->frequency;
    if (change->kind == kForce)
        for (int64_t i = 0; i < width; ++i) x[i] = -INFINITY;
    const int64_t count = change->kind == kForce && change->count > 1 ? 1 : change->count;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t id = change->ids[i];
        if ((uint64_t)id >= (uint64_t)width) continue;
        switch (change->kind) {
            case kAdd: x[id] += change->values[i]; break;
            case kPenalize: {
                const float times = change->values[i];
                const float value = x[id] > 0 ? x[id] / repetition : x[id] * repetition;
                x[id] = value - frequency * times - (times > 0 ? change->presence : 0.0f);
                break;
            }
            case kForbid: x[id] = -INFINITY; break;
            case kForce: x[id] = 0; break;
            default: break;
        }
    }
}

// Copies the row into the thread's memory and changes the copy; the logits stay unchanged.
static void change(Row* row, const RowShape* how) {
    const Shape none = {{nullptr, 0}, nullptr, 0};
    const Shape* shape = how->shape ? how->shape : &none;
    if (shape->mask.words || how->mask.words) copy_masked(row, &shape->mask, &how->mask);
    else memcpy(row->copy, row->logits, (size_t)row->width * sizeof(float));
    for (int64_t i = 0; i < shape->count; ++i) apply(shape->changes[i], row->copy, row->width);
    row->logits = row->copy;
}

}  // namespace LEVEL
