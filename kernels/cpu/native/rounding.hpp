// Activations rounded to 8 bits per 32 values, and again where 8 bits fit badly; or as the file of the
// weight says (file_rounding.hpp).
#pragma once

#include "file_rounding.hpp"

namespace LEVEL {

static void round_one(const float* x, Rounded* to) {
    VF peak = zero();
    for (int i = 0; i < kDepth; i += kLanes) peak = max_bits(peak, load(x + i));
    const float largest = reduce_bits(peak);
    // Not a number: the scale says so and the row's outputs become NaN. Below 1e-36 the
    // reciprocal would overflow: such a block counts as zero.
    if (largest > 1e-36f && largest <= 0x1.fffffep127f) {
        to->scale = largest / 127.0f;
        round_block(x, 127.0f / largest, to->q, to->half);
    } else {
        memset(to, 0, sizeof *to);
        if (!(largest <= 1e-36f)) to->scale = __builtin_nanf("");
    }
    to->sum = to->half[0] + to->half[1];
}

// What rounding left of a block, rounded again: x ~ scale * q + (scale / 254) * (the result's q).
static void round_rest(const float* x, const Rounded& first, Rounded* to) {
    const float scale = first.scale / 254.0f;
    if (!(scale > 1e-36f)) return;  // zero, not a number, or too small to have a reciprocal
    float rest[kDepth];
    for (int i = 0; i < kDepth; ++i) rest[i] = __builtin_fmaf(-first.scale, first.q[i], x[i]);
    to->scale = scale;
    round_block(rest, 1.0f / scale, to->q, to->half);
    to->sum = to->half[0] + to->half[1];
}

// The second plane of a row: blocks with a step above the row's root mean square. In the inputs of
// q, k, v and the head of a language model that is a fifth of the blocks with 4/5 of the error.
static void round_again(const LinearArgs* args, const float* x, const Rounded* first, Rounded* to,
                        uint32_t* rest) {
    const int64_t k = args->w->k, blocks = args->act.k_blocks, chunks = chunks_of(blocks);
    float padded[kDepth], total = 0.0f;
    for (int64_t b = 0; b < blocks; ++b) total += first[b].scale * first[b].scale;
    memset(to, 0, (size_t)blocks * sizeof *to);
    for (int64_t c = 0; c < chunks; ++c) {
        const int64_t begin = chunk_begin(blocks, c), end = chunk_begin(blocks, c + 1);
        rest[c] = 0;
        for (int64_t b = begin; b < end; ++b) {
            if (!(first[b].scale * first[b].scale * (float)blocks > total)) continue;
            round_rest(whole_block(x, k, b, padded), first[b], to + b);
            rest[c] |= 1u << (b - begin);
        }
    }
}

static void quantize(const LinearArgs* args, int64_t m_begin, int64_t m_end) {
    const int64_t k = args->w->k, blocks = args->act.k_blocks;
    float padded[kDepth];
    for (int64_t m = m_begin; m < m_end; ++m) {
        const float* x = args->x + (args->source ? args->source[m] : m) * k;
        if (args->act.values) {
            round_to_floats(args->w->inputs, x, k, args->act.values + m * k);
            continue;
        }
        Rounded* to = args->act.blocks + m * args->planes * blocks;
        if (args->w->inputs.codes != kAsTheyAre) {
            round_to_integers(args->w->inputs, x, k, to, args->act.rest + m * chunks_of(blocks));
            continue;
        }
        for (int64_t b = 0; b < blocks; ++b) round_one(whole_block(x, k, b, padded), to + b);
        if (args->planes == 2)
            round_again(args, x, to, to + blocks, args->act.rest + m * chunks_of(blocks));
    }
}

}  // namespace LEVEL
