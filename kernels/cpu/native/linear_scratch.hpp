// How much scratch memory a matrix product needs, and how rounded activations lie in theirs.
#pragma once

#include <stddef.h>

#include "abi.hpp"

inline size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

inline size_t activation_bytes(int64_t m, int64_t k_blocks) {
    const size_t blocks = (size_t)(m * k_blocks);
    return aligned(blocks * kDepth) + aligned(blocks * 4) + 2 * aligned(blocks * 8);
}

inline void place_activations(Activations* act, uint8_t* at, int64_t m, int64_t k_blocks) {
    const size_t blocks = (size_t)(m * k_blocks);
    act->k_blocks = k_blocks;
    act->q = reinterpret_cast<int8_t*>(at);
    at += aligned(blocks * kDepth);
    act->scale = reinterpret_cast<float*>(at);
    at += aligned(blocks * 4);
    act->minus_sum = reinterpret_cast<float*>(at);
    at += aligned(blocks * 8);
    act->sum = reinterpret_cast<int32_t*>(at);
}

// Of one thread.
inline size_t linear_private_bytes(const Weight& w, int64_t m, bool exact) {
    const size_t depth = (size_t)w.k_blocks * kDepth;
    if (!needs_values(&w)) return 0;
    if (exact || w.dense) return depth * kRows * sizeof(float);
    return depth / (size_t)w.unit * kRows * sizeof(float) * 2 + (m > 1 ? depth * kRows : 0);
}
