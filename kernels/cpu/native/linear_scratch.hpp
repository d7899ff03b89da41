// Sizes of the scratch memory of matrix products, and how they divide their work; plain C++.
#pragma once

#include <stddef.h>

#include "abi.hpp"

enum {
    kPanelBlocks = 24,       // k blocks whose scales and expanded codes stay in the first-level cache
    kFloatPanelDepth = 128,  // the same for fp32 values, in k
    // Activations of one pass over the weights: 8-bit ones, which stream from the third-level cache at 8 GB/s for
    // a thread, because each pass expands all codes again; floats stay in the second-level cache.
    kPassBytes = 2 << 20,
    kFloatPassBytes = 393216,
    kPassRows = 24,          // rows of x go through the weights in multiples of this
    kBf16Depth = 256,        // k of pairs of weights in bfloat16 in the first-level cache
    kBf16PassBytes = 655360, // activations in bfloat16 of one pass
};
static_assert(kPanelBlocks <= 32, "Activations::residual has one bit per block of a k panel");
static_assert(kPanelBlocks * (kTileDepth + 2 * (int)sizeof(float)) * kStripRows <= 32 * 1024,
              "expanded codes, scales and minima of a strip's k panel fit a 32 KiB cache");
static_assert(kFloatPanelDepth % kTileDepth == 0, "float panels dequantize whole k blocks");
static_assert(kFloatPanelDepth * kStripRows * (int)sizeof(float) <= 32 * 1024, "they fit it too");
static_assert(kBf16Depth * kStripRows * (int)sizeof(uint16_t) <= 32 * 1024, "they fit it too");
static_assert(kPassRows % 8 == 0, "a pass is whole groups of 8, 4 and 2 rows of x");
static_assert(kStripRows * sizeof(float) % kCacheLine == 0, "the parts of the scratch stay aligned");
static_assert(kTileDepth * 255 * 127 * 2 < 1 << 24, "integer sums of a block convert to float exactly");

// The k blocks of a row are divided into k panels of equal length, at most kPanelBlocks each.
static inline int64_t panels_of(int64_t blocks) {
    return (blocks + kPanelBlocks - 1) / kPanelBlocks;
}
static inline int64_t panel_begin(int64_t blocks, int64_t c) {
    return blocks * c / panels_of(blocks);
}

// Whether activations become integers before the product; whether they are quantized but stay floats.
static inline bool in_integers(const LinearArgs& args) { return !args.exact && !args.w->dense; }
static inline bool in_quantized_floats(const LinearArgs& args) {
    return !in_integers(args) && args.w->scheme.codes != kUnquantized;
}

// Numbers from one row of activations in bfloat16 to the next: whole cache lines.
static inline int64_t bf16_row(int64_t k) { return (k + 31) / 32 * 32; }

// Whether operands of the product are codes of 8 bits: plain ones, or the entries of a table.
static inline bool wide_codes(const Weight& w) { return w.bits == 8 || w.table; }

static inline size_t q8_bytes(const LinearArgs& args) {
    return (size_t)(args.m * args.terms * args.w->k_blocks) * sizeof(Q8Block);
}

// Whether the activations of a product are wanted as words too, by kernels that read them (`words`). A
// product of one row takes as long without them.
static inline bool takes_words(const LinearArgs& args, bool words) {
    return words && args.m > 1 && wide_codes(*args.w);
}

static inline size_t activation_bytes(const LinearArgs& args, bool words) {
    if (args.rounded) return (size_t)(args.m * bf16_row(args.w->k)) * sizeof(uint16_t);
    if (in_quantized_floats(args)) return (size_t)(args.m * args.w->k) * sizeof(float);
    const int64_t blocks = args.m * args.terms * args.w->k_blocks;
    const int64_t flags = args.terms == 2 ? args.m * panels_of(args.w->k_blocks) : 0;
    return q8_bytes(args) + (size_t)flags * sizeof(uint32_t) +
           (takes_words(args, words) ? (size_t)blocks * kTileDepth * sizeof(int16_t) : 0);
}

// `at` is 64-byte aligned and has activation_bytes(*args, words).
static inline void place_activations(LinearArgs* args, uint8_t* at, bool words) {
    args->act.k_blocks = args->w->k_blocks;
    args->act.values = in_quantized_floats(*args) ? (float*)at : nullptr;
    args->act.bf16 = args->rounded ? (uint16_t*)at : nullptr;
    args->act.blocks = (Q8Block*)at;
    args->act.residual = (uint32_t*)(at + q8_bytes(*args));
    const int64_t flags = args->terms == 2 ? args->m * panels_of(args->w->k_blocks) : 0;
    args->act.words = takes_words(*args, words) ? (int16_t*)(args->act.residual + flags) : nullptr;
}

// The product of rows first..end alone, whose activations are placed.
static inline LinearArgs rows_of(const LinearArgs& args, int64_t first, int64_t end) {
    LinearArgs part = args;
    const int64_t blocks = first * args.terms * args.act.k_blocks;
    part.m = end - first;
    part.out += first * args.out_stride;
    if (!in_integers(args)) {
        if (args.act.bf16) part.act.bf16 += first * bf16_row(args.w->k);
        else if (args.act.values) part.act.values += first * args.w->k;
        else part.x += first * args.w->k;
        return part;
    }
    part.act.blocks += blocks;
    if (args.act.words) part.act.words += blocks * kTileDepth;
    if (args.terms == 2) part.act.residual += first * panels_of(args.act.k_blocks);
    return part;
}

// Bytes of the codes before a strip.
static inline int64_t code_bytes(const Weight& w, int64_t strip) {
    const int64_t before = strip * kStripBlocks;
    const int64_t row_blocks = before < w.row_blocks ? before : w.row_blocks;
    return row_blocks * w.k_blocks * kTileBytesPerBit * w.bits;
}

static inline int64_t strips_of(const Weight& w) {
    return (w.row_blocks + kStripBlocks - 1) / kStripBlocks;
}

static inline int64_t whole_groups(int64_t m, int64_t rows) {
    rows = rows / kPassRows * kPassRows;
    if (rows < kPassRows) rows = kPassRows;
    return rows < m ? rows : m;
}

// Rows of x that go through the weights together: of quantized activations, and of floats.
static inline int64_t rows_per_pass(int64_t m, int64_t k_blocks) {
    return whole_groups(m, kPassBytes / (k_blocks * (int64_t)sizeof(Q8Block)));
}
static inline int64_t float_rows_per_pass(int64_t m, int64_t k) {
    return whole_groups(m, kFloatPassBytes / ((k ? k : 1) * (int64_t)sizeof(float)));
}

// The same for rows in bfloat16, in passes of equal length. CPUs with AVX-512-BF16 have a second-level cache
// of 1 MiB or more, and each pass turns the weights into pairs.
static inline int64_t bf16_pass(int64_t m, int64_t k) {
    const int64_t most = kBf16PassBytes / (bf16_row(k) * 2), least = most < kPassRows ? (int64_t)kPassRows : most;
    const int64_t passes = (m + least - 1) / least;
    return passes ? ((m + passes - 1) / passes + 7) / 8 * 8 : 0;
}

static inline size_t bf16_private_bytes(const Weight& w, int64_t m) {
    return (size_t)bf16_pass(m, w.k) * kStripRows * 4 + (size_t)kBf16Depth * kStripRows * 2;
}

// Running sums of a pass, then scales and minima and expanded codes, or values as floats.
static inline size_t linear_private_bytes(const Weight& w, int64_t m, bool exact) {
    const bool floats = exact || w.dense;
    const int64_t rows = floats ? float_rows_per_pass(m, w.k) : rows_per_pass(m, w.k_blocks);
    const size_t sums = (size_t)rows * kStripRows * 4;
    if (floats) return sums + (size_t)kFloatPanelDepth * kStripRows * 4;
    const size_t scales = (size_t)(kPanelBlocks * kTileDepth / w.subgroup) * kStripRows * 4;
    return sums + 2 * scales + (size_t)kPanelBlocks * kTileDepth * kStripRows;
}
