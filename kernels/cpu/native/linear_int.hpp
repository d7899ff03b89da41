// y = x W^T with activations quantized to 8 bits per 32 values and integer dot products.
//
// For each output and each block of 32 k in order, with its subgroups of 32 or twice 16 k:
//     t = (codes . q - zero * sum(q)) * scale_w    summed over the subgroups by fma, and
//     t = t - minus * sum(q)                       by fma, where there is a minimum
//     acc = fma(t, scale_x, acc)
// and after the blocks of a k panel (below) the same for the second terms of some of them
// (quantize_residuals). The integer part is exact, and so is its conversion (below 2^24). So neither
// the vector width nor the number of rows multiplied together (MR) changes a bit: a row gives the same
// result alone, in a batch and in chunked prefill. The levels with a fused multiply-add agree bit for
// bit too.
//
// A strip of two row blocks goes through k in panels that stay in the first-level cache. The scales of
// a panel become floats once, unless they are float16, which a load converts; from kExpandFrom rows on, codes
// of other than 4 and 8 bits become bytes once (codes that index a table sooner, codes of 4 bits later or
// never); and each group of MR rows of x runs over the panel with 2 * MR dot products in registers. Meanwhile
// the memory that comes next is prefetched (plan_prefetch), also across strips and calls: starting without it
// costs 2 us.
#pragma once

#include "integer_dots.hpp"
#include "quantize_activations.hpp"
#include "stored_scales.hpp"

namespace LEVEL {

// AVX2 without VNNI: registers hold the dots of four rows, and memory their sums of floats, which is 8 %
// faster than two rows with everything in registers.
enum { kSumsInMemory = kShortProducts == 2 };

enum {
    // Registers: two dots and two sums per row, two codes, a broadcast, scales and minima. NEON has no
    // broadcast from memory: sixteen activations of each row take its place. Its short sums take two.
    kMaxRows = kSumsInMemory ? 4 : kRegisters < 32 || kShortProducts == 1 ? 2 : kLanes == 16 ? 5 : 4,
    kMaxFineRows = kLanes == 16 ? 4 : 2,  // subgroups of 16 keep the first half's t as well
    kExpandFrom = kSumsInMemory ? 4 : 9,
    kExpandQuickFrom = kSumsInMemory ? 24 : INT32_MAX,  // codes of 4 bits
    kLookUpOnceFrom = 5,  // the same for 4-bit codes that index a table; other tables always
    // Rows of a product that expands codes while it multiplies: a loop that only expands waits for its stores, for
    // as long as three rows take. With AVX-512, whose registers hold all of it; from 5 rows on, or 4 with
    // second terms.
    kKeepingRows = kRegisters == 32 && kLanes == 16 ? 4 : 0,
};
static_assert((kSumsInMemory ? 2 : 4) * kMaxRows + 7 <= kRegisters, "the tile fits the registers");
static_assert(kRegisters < 32 || 6 * kMaxFineRows + 7 <= kRegisters, "with the first half's t too");
static_assert(!kKeepingRows || (kPerBlock == 1 && !kMatrix && !kWideInWords), "operands that are kept are in order");
static_assert(kMaxRows >= kMaxFineRows && kMaxFineRows >= 2, "every level has tiles of 1 and 2 rows");

// One k panel of one strip, for two vectors of rows.
struct Panel {
    const uint8_t* codes[2];
    int64_t step;  // bytes between tiles
    // What to prefetch meanwhile: `lines` of 64 bytes per block, in two ranges. `ahead` null: from
    // where the panel before this one ended.
    const uint8_t *ahead, *ahead_end, *then, *then_end;
    int64_t lines;
    const uint8_t *start, *reach;  // this panel; the end of the thread's memory
    const uint8_t *later, *later_end;  // what it will read after that
    int64_t tiles;  // bytes of a block's tiles, one or two
    bool fresh;     // little of this panel has been prefetched
    bool first_cache;  // prefetch_codes
    bool near;         // prefetch_near
    // Of both vectors. Floats [subgroups][kStripRows], zero points folded into the minima; or
    // [subgroups][kTileRows] of the type that the weight stores, of which more is prefetched.
    const uint8_t *scales[2], *minuses[2];
    int64_t scales_ahead;
    const uint16_t *supers[2], *super_minuses[2];  // their factors, from the panel's first block on
    int64_t supers_ahead, super_begin;  // blocks of the first factor before the panel
    float table_scale;
    int64_t blocks;        // of the panel
    int64_t x_stride;      // Q8Blocks between rows of x
    // Bits of the blocks of a row that have a second term, words between rows; null: no row has any.
    const uint32_t* residual;
    int64_t residual_stride, to_residual;  // to_residual: Q8Blocks from a block to its second term
    const Q8Block* first_block;  // of the activations
    const int16_t* words;        // of this block and all after it; null: there are none
    int64_t sums_stride;   // floats between rows of sums
    int32_t zero;
    bool first;            // sums start here
    const uint8_t* int8_table;  // a table's entries
    uint8_t* expanded[2];  // where a product that keeps them leaves operands
};

// How much to prefetch while a panel goes through `products` products, each of which reads it from the
// start. With one product: what the product itself needs a little later. With more: all of the next
// panel, a part during each product. If the first product prefetched everything, memory would be idle
// during the others.
INLINE void plan_prefetch(Panel* p, int64_t products, bool one_row) {
    const int64_t bytes = p->tiles * p->blocks, left = p->reach - p->start;
    const int64_t further = products > 1 && bytes > kPrefetch ? bytes : (int64_t)kPrefetch;
    const int64_t beyond = bytes + further - left;  // of what comes later
    if (!p->ahead) p->ahead = p->start + (further < left ? further : left);
    p->ahead_end = beyond < 0 ? p->start + bytes + further : p->reach;
    if (beyond > 0 && p->later)
        p->then_end = beyond < p->later_end - p->later ? p->later + beyond : p->later_end;
    const int64_t wanted = p->ahead_end - p->ahead + (p->then_end - p->then);
    const int seconds = one_row && p->residual ? __builtin_popcount(*p->residual) : 0;
    const int64_t lines = (wanted + 63) / 64, steps = products * (p->blocks + seconds);
    p->lines = p->fresh ? p->tiles / 64 : (lines + steps - 1) / steps;
}

// Those of block b of a panel; `prefetch_next`: and asks for what later strips need in their place.
template <bool MINUS>
INLINE void load_supers(const Panel* p, int64_t b, bool prefetch_next, SuperScales* to) {
    const int64_t at = (p->super_begin + b) / kSuperBlocks * kTileRows;
    for (int v = 0; v < 2; ++v) {
        to->scale[v] = load_half(p->supers[v] + at);
        if (MINUS) to->minus[v] = load_half(p->super_minuses[v] + at);
        if (!prefetch_next) continue;
        prefetch((const uint8_t*)(p->supers[v] + at) + p->supers_ahead);
        if (MINUS) prefetch((const uint8_t*)(p->super_minuses[v] + at) + p->supers_ahead);
    }
}

// What a product of a panel computes. kSecondTerms: only the second terms of one row, which has at least one.
// kKeeping: no second terms, and it leaves the operands in `expanded`.
enum PanelPart { kWhole = 0, kSecondTerms = 1, kKeeping = 2 };

template <int BITS, int SUBGROUP, bool MINUS, int MR, int SCALES, int PART = kWhole>
__attribute__((noinline)) static void panel_int(Panel* p, const Q8Block* x, float* sums) {
    const int kHalves = kTileDepth / SUBGROUP, kStep = scale_step<SCALES>();
    const bool kAlone = PART == kSecondTerms, kStored = SCALES != kMadeFloats, kSupers = has_supers<SCALES>();
    const int kLineBlocks = 64 / (kHalves * kStep) > 1 ? 64 / (kHalves * kStep) : 1;  // with scales in one line
    // A dot is summed in this many parts, so that enough of them are in flight: a vpdpbusd takes four
    // cycles, and two start in each cycle. ARM's cores forward the sum of a sdot to the next one.
    const int kChains = kMaxRows < 5 || MR > 4 ? 1 : MR == 4 ? (SUBGROUP == 16 ? 1 : 2) : SUBGROUP / 8;
    const bool kWords = kWideInWords && is_wide<BITS>() && MR > 1;
    const int kBeyond = is_wide<BITS>() && !kWords ? kWideOffset : 0;  // what dot4_wide takes off a code
    const bool kOffset = !MINUS || kBeyond;
    const int64_t stride = p->x_stride, sums_stride = p->sums_stride;
    const int64_t blocks = p->blocks, step = p->step, ahead_bytes = p->lines * 64;
    const uint8_t *tile0 = p->codes[0], *tile1 = p->codes[1];
    const Q8Block* const first_block = x;
    uint8_t *keep0 = PART == kKeeping ? p->expanded[0] : nullptr, *keep1 = PART == kKeeping ? p->expanded[1] : nullptr;
    uint32_t residual = 0;
    for (int r = 0; p->residual && r < MR; ++r) residual |= p->residual[r * p->residual_stride];
    const uint8_t *ahead = p->ahead, *ahead_end = p->ahead_end;
    const uint8_t *scales0 = p->scales[0], *scales1 = p->scales[1];
    const uint8_t *minuses0 = MINUS ? p->minuses[0] : nullptr, *minuses1 = MINUS ? p->minuses[1] : nullptr;
    const int64_t scales_ahead = p->scales_ahead;
    const int32_t less = kBeyond - p->zero;
    const bool first_cache = p->first_cache;
    const VB table = table_of<BITS>(p->int8_table);
    const bool kTableScale = looks_up<BITS>() && (SCALES == kI8 || SCALES == kE8M0);
    const VF table_scale = set1(p->table_scale);
    SuperScales super = {};
    int64_t super_until = 0;  // the block from which on other factors are needed
    VF acc0[MR], acc1[MR];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
        acc0[r] = p->first && !kAlone ? zero() : load(sums + r * sums_stride);
        acc1[r] = p->first && !kAlone ? zero() : load(sums + r * sums_stride + kLanes);
    }
    // Goes to the next block for which any row has a second term; in the other rows that term is 0.
    const auto to_second_term = [&] {
        const int64_t b = __builtin_ctz(residual);
        residual &= residual - 1;
        x = first_block + p->to_residual + b;
        if (kSupers) load_supers<MINUS>(p, b, false, &super);
        super_until = -1;
        tile0 = p->codes[0] + b * step;
        tile1 = p->codes[1] + b * step;
        scales0 = p->scales[0] + b * kHalves * kStep, scales1 = p->scales[1] + b * kHalves * kStep;
        if (!MINUS) return;
        minuses0 = p->minuses[0] + b * kHalves * kStep, minuses1 = p->minuses[1] + b * kHalves * kStep;
    };
    if (kAlone) to_second_term();
    for (int64_t i = 0;;) {
        if (!kAlone) {
            const uint8_t* stop = ahead + ahead_bytes < ahead_end ? ahead + ahead_bytes : ahead_end;
            ahead = prefetch_codes(ahead, stop, first_cache);
            if (ahead == ahead_end) {
                ahead = p->then;
                ahead_end = p->then = p->then_end;
            }
        }
        if (MR == 1 && !kAlone && p->near && i < blocks) prefetch_near<128 * (BITS & kBitsMask)>(tile0);
        if (kStored && !kAlone && i % kLineBlocks == 0) {
            prefetch(scales0 + scales_ahead);
            prefetch(scales1 + scales_ahead);
            if (MINUS) {
                prefetch(minuses0 + scales_ahead);
                prefetch(minuses1 + scales_ahead);
            }
        }
        if (kSupers && i == super_until) {
            load_supers<MINUS>(p, i, true, &super);
            super_until += kSuperBlocks - (i ? 0 : p->super_begin);
        }
        VF t0[MR], t1[MR];
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; ++half) {
            VI dot0[MR * kChains], dot1[MR * kChains];
#pragma GCC unroll 8
            for (int r = 0; r < MR; ++r) {  // from -zero * sum(q) on
                const Q8Block& block = x[r * stride];
                const int32_t sum = kHalves == 1 ? block.sum : block.half[half];
                dot0[r] = dot1[r] = kOffset ? set1_int(sum * less) : zero_int();
            }
#pragma GCC unroll 8
            for (int r = MR; r < MR * kChains; ++r) dot0[r] = dot1[r] = zero_int();
            const int kCount = SUBGROUP / 4, j = half * kCount;
            if constexpr (kWords)
                dots_of_words<BITS, kCount, MR>(tile0, tile1, j, table,
                                                p->words + (x - p->first_block) * kTileDepth,
                                                stride * kTileDepth, dot0, dot1);
            else if constexpr (BITS == kMatrixTile)
                dots_of_matrix<kCount, MR>(tile0, tile1, j, x, stride, dot0, dot1);
            else
                dots_of_codes<BITS, kCount, MR, kChains>(tile0, tile1, j, table, x, stride, dot0, dot1, keep0, keep1);
#pragma GCC unroll 8
            for (int c = MR; c < MR * kChains; ++c) {
                dot0[c % MR] = add_int(dot0[c % MR], dot0[c]);
                dot1[c % MR] = add_int(dot1[c % MR], dot1[c]);
            }
            VF scale0 = load_scale<SCALES>(scales0, super.scale[0]);
            VF scale1 = load_scale<SCALES>(kStored ? scales1 : scales0 + 4 * kLanes, super.scale[1]);
            if (kTableScale) scale0 = mul(scale0, table_scale), scale1 = mul(scale1, table_scale);
            VF minus0 = zero(), minus1 = zero();
            if (MINUS) {
                minus0 = load_scale<SCALES>(minuses0, super.minus[0]);
                minus1 = load_scale<SCALES>(kStored ? minuses1 : minuses0 + 4 * kLanes, super.minus[1]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < MR; ++r) {
                const VF value0 = to_float(dot0[r]), value1 = to_float(dot1[r]);
                t0[r] = half ? fma(value0, scale0, t0[r]) : mul(value0, scale0);
                t1[r] = half ? fma(value1, scale1, t1[r]) : mul(value1, scale1);
                if (MINUS) {
                    const Q8Block& block = x[r * stride];
                    const VF sum = to_float(set1_int(kHalves == 1 ? block.sum : block.half[half]));
                    t0[r] = fnma(minus0, sum, t0[r]);
                    t1[r] = fnma(minus1, sum, t1[r]);
                }
            }
            scales0 += kStep, scales1 += kStep;
            if (MINUS) minuses0 += kStep, minuses1 += kStep;
        }
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
            const VF scale = set1(x[r * stride].scale);
            acc0[r] = fma(t0[r], scale, acc0[r]);
            acc1[r] = fma(t1[r], scale, acc1[r]);
        }
        if (!kAlone && __builtin_expect(++i < blocks, 1)) {
            ++x;
            tile0 += step;
            tile1 += step;
            if (PART == kKeeping) keep0 += kByteTile, keep1 += kByteTile;
            continue;
        }
        if (PART == kKeeping || !residual) break;
        to_second_term();
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
        store(sums + r * sums_stride, acc0[r]);
        store(sums + r * sums_stride + kLanes, acc1[r]);
    }
    p->ahead = ahead;
    p->ahead_end = ahead_end;
}

// Rows of x for one product: codes of other widths and subgroups of 16 need more registers.
constexpr int most_rows(int bits, int subgroup) {
    const bool few = bits == 4 || bits == 8 || bits >= kExpanded;
    return few && (subgroup == 32 || kSumsInMemory) ? kMaxRows : kMaxFineRows;
}

// Rows of x for the next product; m are left. Fours make the rest whole fives: as fast as these, and fewer than four
// are slower, as are eight, whose sums do not stay in registers.
INLINE int rows_at_once(int most, int64_t m) {
    if (most >= 5 && m >= 5 && (m < 8 || m % 5 == 0)) return 5;
    return most >= 4 && m >= 4 ? 4 : m >= 2 ? 2 : 1;
}

template <int BITS, int SUBGROUP, bool MINUS, int SCALES>
static void panel_rows(Panel* p, const Q8Block* x, int rows, float* sums) {
    const int kMost = SCALES == kMadeFloats || SCALES == kF16 ? most_rows(BITS, SUBGROUP) : 1;
    switch (rows) {
        case 5: panel_int<BITS, SUBGROUP, MINUS, kMost >= 5 ? 5 : 1, SCALES>(p, x, sums); break;
        case 4: panel_int<BITS, SUBGROUP, MINUS, kMost >= 4 ? 4 : 1, SCALES>(p, x, sums); break;
        case 2: panel_int<BITS, SUBGROUP, MINUS, kMost >= 2 ? 2 : 1, SCALES>(p, x, sums); break;
        default: panel_int<BITS, SUBGROUP, MINUS, 1, SCALES>(p, x, sums);
    }
}

// Whether rows that are multiplied together take their second terms one by one: with few in common, most of the
// products of all rows would be by 0. A row alone takes up to 1.5 times as long for each.
INLINE bool apart(const uint32_t* residual, int64_t stride, int rows) {
    uint32_t any = 0;
    int terms = 0;
    for (int r = 0; r < rows; ++r) {
        any |= residual[r * stride];
        terms += __builtin_popcount(residual[r * stride]);
    }
    return 3 * terms < 2 * rows * __builtin_popcount(any);
}

// The second terms of `count` rows, one row at a time.
template <int BITS, int SUBGROUP, bool MINUS, int SCALES>
static void second_terms(Panel* p, const Q8Block* x, int count, const uint32_t* residual, float* sums) {
    if constexpr (SCALES == kMadeFloats || SCALES == kF16) {  // others have one row
        for (int r = 0; r < count; ++r, x += p->x_stride, sums += p->sums_stride) {
            p->residual = residual + r * p->residual_stride;
            if (*p->residual) panel_int<BITS, SUBGROUP, MINUS, 1, SCALES, kSecondTerms>(p, x, sums);
        }
    }
}

// All rows of one pass over one k panel, for kPerBlock vectors of each block.
// STORED other than BITS: the first rows read codes of STORED bits and leave them in `expanded` for the others.
template <int BITS, int SUBGROUP, bool MINUS, int SCALES, int STORED = BITS>
static void rows_int(Panel* p, const Q8Block* x, int64_t m, float* sums) {
    const int kMost = most_rows(BITS, SUBGROUP), kLaneBytes = SCALES == kMadeFloats ? 4 : scale_step<SCALES>() / kTileRows;
    int64_t products = STORED != BITS;
    const int64_t alone = STORED != BITS ? (int)kKeepingRows : 0;
    for (int64_t left = m - alone; left > 0; left -= rows_at_once(kMost, left)) ++products;
    plan_prefetch(p, products * kPerBlock, m == 1);
    const uint8_t* const codes[2] = {p->codes[0], p->codes[1]};
    const uint8_t* const scales[2] = {p->scales[0], p->scales[1]};
    const uint8_t* const minuses[2] = {MINUS ? p->minuses[0] : nullptr, MINUS ? p->minuses[1] : nullptr};
    const uint16_t* const supers[2] = {p->supers[0], p->supers[1]};
    const uint16_t* const super_minuses[2] = {p->super_minuses[0], p->super_minuses[1]};
    // With AVX2 instructions limit products of codes that index a table: 0.98 with these prefetches.
    const bool near = m == 1 && kPrefetchInto == 2 && !p->first_cache && (kPerBlock == 1 || !looks_up<BITS>());
    for (int g = 0; g < kPerBlock; ++g) {
        for (int v = 0; v < 2; ++v) {
            const int b = (2 * g + v) / kPerBlock, lane = (2 * g + v) % kPerBlock * kLanes;
            p->codes[v] = codes[b] + lane * 4;
            p->scales[v] = scales[b] + lane * kLaneBytes;
            if (MINUS) p->minuses[v] = minuses[b] + lane * kLaneBytes;
            if (has_supers<SCALES>()) p->supers[v] = supers[b] + lane;
            if (has_supers<SCALES>() && MINUS) p->super_minuses[v] = super_minuses[b] + lane;
        }
        p->near = near && g == 0;
        const Q8Block* rows = x;
        const uint32_t *const residual = p->residual, *seconds = residual;
        float* to = sums + 2 * g * kLanes;
        for (int64_t left = m; left > 0;) {
            const bool keeps = STORED != BITS && rows == x;
            const int count = keeps ? (int)kKeepingRows : rows_at_once(kMost, left);
            const bool ones = seconds && (keeps || apart(seconds, p->residual_stride, count));
            p->residual = ones ? nullptr : seconds;
            if constexpr (STORED != BITS) {
                if (keeps) {
                    panel_int<STORED, SUBGROUP, MINUS, kKeepingRows, SCALES, kKeeping>(p, rows, to);
                    for (int v = 0; v < 2; ++v) p->codes[v] = p->expanded[v];
                    p->step = kByteTile;
                }
            }
            if (!keeps) panel_rows<BITS, SUBGROUP, MINUS, SCALES>(p, rows, count, to);
            if (ones) second_terms<BITS, SUBGROUP, MINUS, SCALES>(p, rows, count, seconds, to);
            left -= count;
            rows += count * p->x_stride;
            to += count * p->sums_stride;
            if (seconds) seconds += count * p->residual_stride;
        }
        p->residual = residual;
    }
    p->ahead = nullptr;
}

// The two row blocks of a strip; a last strip of one block uses it twice.
struct Strip {
    int64_t block[2];
    int valid;  // rows
};

INLINE Strip strip_at(const Weight* w, int64_t index) {
    Strip strip;
    const int64_t b = index * kStripBlocks, rows = w->n - b * kTileRows;
    strip.block[0] = b < w->row_blocks ? b : w->row_blocks - 1;
    strip.block[1] = b + 1 < w->row_blocks ? b + 1 : strip.block[0];
    strip.valid = rows < kStripRows ? (int)rows : (int)kStripRows;
    return strip;
}

// [m][kStripRows] into the strip's columns of out.
static void store_strip(const LinearArgs* args, int64_t index, int valid, int64_t m, int64_t m_end,
                        const float* sums) {
    for (; m < m_end; ++m, sums += kStripRows) {
        float* to = args->out + m * args->out_stride + index * kStripRows;
        if (valid == kStripRows)
            for (int i = 0; i < kStripRows; i += kLanes) store(to + i, load(sums + i));
        else memcpy(to, sums, sizeof(float) * (size_t)valid);
    }
}

// Prefetches the strip's columns of out for writing. Rows of logits are 192 KiB apart, so each store
// waited for its line (with this the head takes 0.94 of its time, 16 rows).
INLINE void own_lines(const LinearArgs* args, int64_t index, int64_t m, int64_t m_end) {
    for (; m < m_end; ++m) {
        const float* to = args->out + m * args->out_stride + index * kStripRows;
        for (int i = 0; i < kStripRows; i += 16) __builtin_prefetch(to + i, 1);
    }
}

// How many rows of x make it pay to expand codes to bytes; other tables than those of 4 bits always.
template <int BITS, int SUBGROUP>
INLINE int64_t expand_from(const uint32_t* residual) {
    if (BITS == 4 && SUBGROUP == 32 && !kMatrix) return kExpandQuickFrom;
    if (looks_up<BITS>() && BITS != kLookup + 4) return 0;
    if (kKeepingRows) return residual ? (int)kKeepingRows : BITS == 2 ? (int)kExpandFrom : kKeepingRows + 1;
    return looks_up<BITS>() ? (int)kLookUpOnceFrom : (int)kExpandFrom;
}

// One k panel of one strip for `m` rows of x.
template <int BITS, int SUBGROUP, bool MINUS, int SCALES>
static void multiply_int(Panel* panel, const Q8Block* x, int64_t m, float* sums, uint8_t* expanded) {
    constexpr bool kOneRow = SCALES != kMadeFloats && SCALES != kF16;
    if constexpr (kOneRow || (BITS == 8 && !kMatrix)) {
        rows_int<BITS, SUBGROUP, MINUS, SCALES>(panel, x, m, sums);
        return;
    } else {
        constexpr int kBytes = expanded_as<BITS, SUBGROUP / 4>();
        if (m < expand_from<BITS, SUBGROUP>(panel->residual)) {
            rows_int<BITS, SUBGROUP, MINUS, SCALES>(panel, x, m, sums);
            return;
        }
        if constexpr (kKeepingRows != 0) {
            for (int b = 0; b < kStripBlocks; ++b) panel->expanded[b] = expanded + b * kPanelBlocks * kByteTile;
            if (m >= kKeepingRows) {
                rows_int<kBytes, SUBGROUP, MINUS, SCALES, BITS>(panel, x, m, sums);
                return;
            }
        }
        const VB table = table_of<BITS>(panel->int8_table);
        for (int b = 0; b < kStripBlocks; ++b) {
            uint8_t* to = expanded + b * kPanelBlocks * kByteTile;
            for (int64_t i = 0; i < panel->blocks; ++i)
                expand<BITS>(panel->codes[b] + i * panel->step, to + i * kByteTile, table);
            panel->codes[b] = to;
        }
        panel->step = kByteTile;
        rows_int<kBytes, SUBGROUP, MINUS, SCALES>(panel, x, m, sums);
    }
}

template <int BITS, int SUBGROUP, bool MINUS, int SCALES>
static void strips_int(const LinearArgs* args, const ItemRange* strips, uint8_t* scratch) {
    const Weight* w = args->w;
    const int64_t blocks = w->k_blocks, panels = panels_of(blocks), row = args->terms * blocks;
    const int64_t pass = rows_per_pass(args->m, blocks);
    const int64_t per_block = kTileDepth / SUBGROUP;
    const int64_t row_bytes = blocks * kTileBytesPerBit * (BITS & kBitsMask);
    float* sums = (float*)scratch;
    float* scales = sums + pass * kStripRows;
    float* minuses = scales + kPanelBlocks * per_block * kStripRows;
    uint8_t* expanded = (uint8_t*)(minuses + kPanelBlocks * per_block * kStripRows);
    const bool first_cache = args->m == 1 && first_cache_prefetch();  // more rows prefetch a whole panel
    const bool again = pass < args->m;  // over the same strips: the strips after them do not come next
    const int64_t last = (again ? strips->end : strips->reach) * kStripBlocks;
    for (int64_t m = 0; m < args->m; m += pass) {
        const int64_t m_end = m + pass < args->m ? m + pass : args->m;
        Panel panel;
        panel.reach = w->codes + (last < w->row_blocks ? last : w->row_blocks) * row_bytes;
        panel.ahead = nullptr;
        panel.first_cache = first_cache;
        panel.later = again ? nullptr : strips->then;
        panel.then = panel.then_end = panel.later ? panel.later : panel.reach;
        panel.later_end = strips->then_end;
        panel.fresh = again || !strips->resumed;
        panel.scales_ahead = scales_ahead(w->groups * scale_step<SCALES>());
        panel.supers_ahead = scales_ahead(w->supers * 2 * kTileRows);
        panel.table_scale = w->int8_table_scale;
        if (panel.fresh) {
            const uint8_t* start = w->codes + strips->begin * kStripBlocks * row_bytes;
            panel.ahead = start + kPrefetch < panel.reach ? start + kPrefetch : panel.reach;
            prefetch_codes(start, panel.ahead, panel.first_cache);
        }
        if (args->m == 1) prefetch_scales<SCALES, MINUS>(w, strips->begin, panel.scales_ahead, panel.supers_ahead);
        for (int64_t s = strips->begin; s < strips->end; ++s) {
            const Strip strip = strip_at(w, s);
            const bool direct = panels == 1 && strip.valid == kStripRows;  // straight into out
            float* to = direct ? args->out + m * args->out_stride + s * kStripRows : sums;
            if (direct && s + 1 < strips->end) own_lines(args, s + 1, m, m_end);
            for (int64_t c = 0; c < panels; ++c) {
                const int64_t i = panel_begin(blocks, c), i_end = panel_begin(blocks, c + 1);
                for (int b = 0; b < kStripBlocks; ++b) {
                    const Tiles tiles = tiles_of(w, strip.block[b]);
                    panel.codes[b] = tiles.first + i * tiles.step;
                    panel.step = panel.tiles = tiles.step;
                    if constexpr (SCALES != kMadeFloats) {
                        const int64_t at = (strip.block[b] * w->groups + i * per_block) * scale_step<SCALES>();
                        const int64_t over = (strip.block[b] * w->supers + i / kSuperBlocks) * kTileRows;
                        panel.scales[b] = (const uint8_t*)w->scale + at;
                        if (MINUS) panel.minuses[b] = (const uint8_t*)w->minus + at;
                        if (!has_supers<SCALES>()) continue;
                        panel.supers[b] = (const uint16_t*)w->super_scale + over;
                        if (MINUS) panel.super_minuses[b] = w->super_minus + over;
                        panel.super_begin = i % kSuperBlocks;
                    } else {
                        panel.scales[b] = (const uint8_t*)(scales + b * kTileRows);
                        panel.minuses[b] = (const uint8_t*)(minuses + b * kTileRows);
                        subgroup_scales(w, {strip.block[b], i * per_block, i_end * per_block},
                                        scales + b * kTileRows, minuses + b * kTileRows);
                    }
                }
                panel.start = panel.codes[0];
                panel.blocks = i_end - i;
                panel.x_stride = row;
                panel.residual = args->terms == 2 ? args->act.residual + m * panels + c : nullptr;
                panel.residual_stride = panels;
                panel.to_residual = blocks;
                panel.sums_stride = direct ? args->out_stride : (int64_t)kStripRows;
                panel.zero = MINUS ? 0 : (int32_t)w->zero;
                panel.first_block = args->act.blocks;
                panel.words = args->act.words;
                panel.int8_table = w->int8_table;
                panel.first = c == 0;
                multiply_int<BITS, SUBGROUP, MINUS, SCALES>(&panel, args->act.blocks + m * row + i, m_end - m,
                                                            to, expanded);
                panel.fresh = false;
            }
            if (!direct) store_strip(args, s, strip.valid, m, m_end, sums);
        }
    }
}

template <int BITS, int SUBGROUP, bool MINUS>
static void strips_of(const LinearArgs* args, const ItemRange* strips, uint8_t* scratch) {
    const int scales = stored_scales(args);
    constexpr bool kHalves = kLoadsHalves && SUBGROUP == 32 && (BITS == 4 || BITS == 5 || BITS == 8);
    constexpr bool kBytes = SUBGROUP == 32 && MINUS && (BITS == 4 || BITS == 5);
    constexpr bool kSigned = !MINUS && ((SUBGROUP == 16 && BITS == 6) || (SUBGROUP == 32 && BITS == kLookup + 4));
    constexpr bool kPowers = !MINUS && SUBGROUP == 32 && BITS == kLookup + 4;
    if constexpr (kHalves)
        if (scales == kF16) return strips_int<BITS, SUBGROUP, MINUS, kF16>(args, strips, scratch);
    if constexpr (kBytes)
        if (scales == kU8) return strips_int<BITS, SUBGROUP, MINUS, kU8>(args, strips, scratch);
    if constexpr (kSigned)
        if (scales == kI8) return strips_int<BITS, SUBGROUP, MINUS, kI8>(args, strips, scratch);
    if constexpr (kPowers)
        if (scales == kE8M0) return strips_int<BITS, SUBGROUP, MINUS, kE8M0>(args, strips, scratch);
    strips_int<BITS, SUBGROUP, MINUS, kMadeFloats>(args, strips, scratch);
}

static void linear_int(const LinearArgs* args, const ItemRange* strips, uint8_t* scratch) {
    const bool fine = args->w->subgroup == 16, minus = args->w->minus || args->w->zeros;
    if (args->w->table) {
        switch (args->w->bits) {
#define CASE(BITS)                                                                    \
    case BITS:                                                                        \
        if (fine) strips_of<kLookup + BITS, 16, false>(args, strips, scratch);        \
        else strips_of<kLookup + BITS, 32, false>(args, strips, scratch);             \
        break
            CASE(1);
            CASE(3);
            CASE(4);
#undef CASE
        }
        return;
    }
    switch (args->w->bits) {
#define CASE(BITS)                                                           \
    case BITS:                                                               \
        if (fine && minus) strips_of<BITS, 16, true>(args, strips, scratch); \
        else if (fine) strips_of<BITS, 16, false>(args, strips, scratch);    \
        else if (minus) strips_of<BITS, 32, true>(args, strips, scratch);    \
        else strips_of<BITS, 32, false>(args, strips, scratch);              \
        break
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(7);
        CASE(8);
#undef CASE
    }
}

}  // namespace LEVEL
