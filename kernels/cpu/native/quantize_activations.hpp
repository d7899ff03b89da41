// Quantizes activations to 8 bits per 32 values, with a second 8-bit term where 8 bits fit badly; or
// as the weight's file says (activation_schemes.hpp).
#pragma once

#include "activation_schemes.hpp"

namespace LEVEL {

static void quantize_block(const float* x, Q8Block* to) {
    VF peak = zero();
    for (int i = 0; i < kTileDepth; i += kLanes) peak = max_bits(peak, load(x + i));
    const float largest = reduce_bits(peak);
    // With a value that is not finite the scale is NaN, and so are the row's outputs. Below 1e-36 the
    // reciprocal would overflow: such a block counts as zero.
    if (largest > 1e-36f && largest <= 0x1.fffffep127f) {
        to->scale = largest / 127.0f;
        to_int8(x, 127.0f / largest, to->q, to->half);
    } else {
        memset(to, 0, sizeof *to);
        if (!(largest <= 1e-36f)) to->scale = __builtin_nanf("");
    }
    to->sum = to->half[0] + to->half[1];
}

// Quantizes the residual of a block: x ~ scale * q + (scale / 254) * (the result's q).
static void quantize_residual(const float* x, const Q8Block& first, Q8Block* to) {
    const float scale = first.scale / 254.0f;
    if (!(scale > 1e-36f)) return;  // zero, not a number, or too small to have a reciprocal
    float rest[kTileDepth];
    for (int i = 0; i < kTileDepth; ++i) rest[i] = __builtin_fmaf(-first.scale, first.q[i], x[i]);
    to->scale = scale;
    to_int8(rest, 1.0f / scale, to->q, to->half);
    to->sum = to->half[0] + to->half[1];
}

// A block gets a second term if the square of its scale is above this many times the mean square of its row's scales.
// Of normally distributed activations those are 10 of 100 blocks; with 1 they would be 42. In trained models large blocks are
// few: the error of their logits is at most 1.4 % larger than with 1.
static const float kWorthTwoTerms = 1.5f;

// The second terms of a row. In the inputs of q, k, v and the head of a language model a fifth of the blocks have 4/5
// of the error.
static void quantize_residuals(const LinearArgs* args, const float* x, const Q8Block* first,
                               Q8Block* to, uint32_t* residual) {
    const int64_t k = args->w->k, blocks = args->act.k_blocks, panels = panels_of(blocks);
    float padded[kTileDepth], total = 0.0f;
    for (int64_t b = 0; b < blocks; ++b) total += first[b].scale * first[b].scale;
    const float least = kWorthTwoTerms * total;
    memset(to, 0, (size_t)blocks * sizeof *to);
    for (int64_t c = 0; c < panels; ++c) {
        const int64_t begin = panel_begin(blocks, c), end = panel_begin(blocks, c + 1);
        residual[c] = 0;
        for (int64_t b = begin; b < end; ++b) {
            if (!(first[b].scale * first[b].scale * (float)blocks > least)) continue;
            quantize_residual(padded_block(x, k, b, padded), first[b], to + b);
            residual[c] |= 1u << (b - begin);
        }
    }
}

// Codes of `blocks` blocks as words.
static void widen(const Q8Block* from, int64_t blocks, int16_t* to) {
    for (int64_t b = 0; b < blocks; ++b)
        for (int i = 0; i < kTileDepth; i += 4, to += 4) {
            const int8_t* q = from[b].q + i;
            to[0] = q[0], to[1] = q[2], to[2] = q[1], to[3] = q[3];
        }
}

static void round_row(const float* x, int64_t k, uint16_t* to) {
    for (int64_t i = 0; i < k; ++i) to[i] = float_to_bf16(x[i]);
    memset(to + k, 0, (size_t)(bf16_row(k) - k) * sizeof *to);
}

static void quantize(const LinearArgs* args, int64_t m_begin, int64_t m_end) {
    const int64_t k = args->w->k, blocks = args->act.k_blocks;
    float padded[kTileDepth];
    for (int64_t m = m_begin; m < m_end; ++m) {
        const float* x = args->x + (args->source ? args->source[m] : m) * k;
        if (args->act.bf16) {
            round_row(x, k, args->act.bf16 + m * bf16_row(k));
            continue;
        }
        if (args->act.values) {
            quantize_to_floats(args->w->scheme, x, k, args->act.values + m * k);
            continue;
        }
        const int64_t terms = args->terms * blocks;
        Q8Block* to = args->act.blocks + m * terms;
        uint32_t* residual = args->act.residual + m * panels_of(blocks);
        if (args->w->scheme.codes != kUnquantized) {
            quantize_to_integers(args->w->scheme, x, k, to, residual);
        } else {
            for (int64_t b = 0; b < blocks; ++b) quantize_block(padded_block(x, k, b, padded), to + b);
            if (args->terms == 2) quantize_residuals(args, x, to, to + blocks, residual);
        }
        if (args->act.words) widen(to, terms, args->act.words + m * terms * kTileDepth);
    }
}

}  // namespace LEVEL
