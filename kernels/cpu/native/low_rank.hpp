// y += scale * b (a x) + bias of the adapter of each row, in fp32 on factors of 16 or 32 bits (8 bits:
// low_rank_int8.hpp).
//
// Down: low = scale * (a x). Lane l of 16 sums the products of k = l, l + 16, ... by fma in this order;
// then lanes i and i + 8 are added, i and i + 4, i and i + 2, i and i + 1. Up: each output sums its
// products over the ranks by fma, in order from zero, and is then added to y; the parts of an adapter one
// after another, last the bias. So a row gets the same bits for any other rows, items and threads, and
// the levels with a fused multiply-add agree bit for bit.
//
// Factors are read once per step, in the order in which they lie in memory, and prefetched kAhead bytes
// before: eight adapters nearly double the bytes of a step.
#pragma once

#include <type_traits>

#include "low_rank_plan.hpp"
#include "simd.hpp"
#include "subgroup_scales.hpp"

namespace LEVEL {

enum {
    kLowVectors = kTileRows / kLanes,  // of 16 lanes
    // Sums in registers: of 32 up to 16, of 16 up to 8.
    kLowSums = kRegisters == 32 ? 16 : 8,
    kLowMostRows = kLowSums / kLowVectors < 4 ? kLowSums / kLowVectors : 4,
    kUpVectors = 8,  // of one row
};

INLINE float reduce_lanes(const VF* x) {
    if (kLowVectors == 1) return reduce_add(x[0]);
    if (kLowVectors == 2) return reduce_add(add(x[0], x[kLowVectors - 1]));
    return reduce_add(add(add(x[0], x[kLowVectors / 2]), add(x[kLowVectors / 4], x[kLowVectors - 1])));
}

// Bytes of factors that are prefetched before they are needed: 100 ns at 20 GB/s.
enum { kAhead = 2048 };

// A unit of `a` of kLowUnit ranks or fewer. `next`: what is read after it.
struct LowUnit {
    const uint8_t* a;
    int64_t ranks, bytes;
    const uint8_t* next;
};

INLINE void prefetch_lines(const uint8_t* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(from + i);
}

// ROWS rows of x times RANKS ranks of a unit from `at` on. `fresh`: the unit is not in the cache yet.
template <int TYPE, int ROWS, int RANKS>
__attribute__((noinline)) static void dots(const LowUnit& unit, int64_t at, int64_t k, bool fresh,
                                           const float* const* x, float (*found)[kLowUnit]) {
    const int64_t whole = k / kTileRows * kTileRows, step = unit.ranks * element_bytes(TYPE);
    VF sums[ROWS][RANKS][kLowVectors];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < RANKS; ++j)
#pragma GCC unroll 4
            for (int v = 0; v < kLowVectors; ++v) sums[r][j][v] = zero();
    for (int64_t i = 0; i < whole; i += kTileRows) {
        if (fresh) {
            const int64_t ahead = i * step + kAhead;
            prefetch_lines(ahead < unit.bytes ? unit.a + ahead : unit.next + (ahead - unit.bytes),
                           kTileRows * step);
        }
        const uint8_t* a = unit.a + i * step;
#pragma GCC unroll 4
        for (int v = 0; v < kLowVectors; ++v) {
            VF each[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) each[r] = load(x[r] + i + v * kLanes);
#pragma GCC unroll 16
            for (int j = 0; j < RANKS; ++j) {
                const VF factor = load_as(TYPE, a, (at + j) * kTileRows + v * kLanes);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r)
                    sums[r][j][v] = fma(factor, each[r], sums[r][j][v]);
            }
        }
    }
    if (whole < k) {
        const uint8_t* a = unit.a + whole * step;
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            float rest[kTileRows] = {};
            memcpy(rest, x[r] + whole, sizeof(float) * (size_t)(k - whole));
#pragma GCC unroll 4
            for (int v = 0; v < kLowVectors; ++v)
#pragma GCC unroll 16
                for (int j = 0; j < RANKS; ++j)
                    sums[r][j][v] = fma(load_as(TYPE, a, (at + j) * kTileRows + v * kLanes),
                                        load(rest + v * kLanes), sums[r][j][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < RANKS; ++j) found[r][at + j] = reduce_lanes(sums[r][j]);
}

}  // namespace LEVEL

#include "low_rank_int8.hpp"

namespace LEVEL {

// All ranks of a unit for ROWS rows. X: float, or int16_t for 8-bit factors.
template <int TYPE, int ROWS, typename X>
static void ranks(const LowUnit& unit, int64_t k, bool fresh, const X* const* x,
                  float (*found)[kLowUnit]) {
    const int kMost = kLowSums / (ROWS * kLowVectors) < kLowUnit ? kLowSums / (ROWS * kLowVectors)
                                                                : (int)kLowUnit;
    for (int64_t at = 0; at < unit.ranks; fresh = false) {
        const int64_t left = unit.ranks - at;
        int done = 1;
        if (kMost >= 8 && left >= 8)
            dots<TYPE, ROWS, kMost >= 8 ? 8 : 1>(unit, at, k, fresh, x, found), done = 8;
        else if (kMost >= 4 && left >= 4)
            dots<TYPE, ROWS, kMost >= 4 ? 4 : 1>(unit, at, k, fresh, x, found), done = 4;
        else if (kMost >= 2 && left >= 2)
            dots<TYPE, ROWS, kMost >= 2 ? 2 : 1>(unit, at, k, fresh, x, found), done = 2;
        else dots<TYPE, ROWS, 1>(unit, at, k, fresh, x, found);
        at += done;
    }
}

// The items of `down` one after another: ranks rank.. of a part for rows row.. of a group.
struct DownItem {
    const LowRankArgs* args;
    int64_t group, row, part, rank;
    int64_t offset;  // of the part's ranks in a row of `low`

    const RowGroup& rows() const { return args->rows->groups[group]; }
    const LowRankSlot& slot() const { return args->table[rows().slot]; }
    const LowRankPart& factors() const { return slot().parts[part]; }
    int64_t ranks() const {
        const int64_t left = factors().rank - rank;
        return left < kLowUnit ? left : (int64_t)kLowUnit;
    }
    const uint8_t* a() const {
        const LowRankPart& found = factors();
        return (const uint8_t*)found.a + rank * rank_bytes(args->k, found.type);
    }
    // False after the last one.
    bool advance() {
        rank += kLowUnit;
        if (rank < factors().rank) return true;
        rank = 0;
        offset += factors().rank;
        if (++part < slot().count) return true;
        part = offset = 0;
        row += kLowRows;
        if (row < rows().count) return true;
        row = 0;
        do {
            if (++group == args->rows->count) return false;
        } while (!slot().count);
        return true;
    }
};

// The rows of a chunk as 16 bits, made when its first item runs: several items of a thread share them.
struct LowRows {
    int64_t group = -1, row = -1, stride = 0;
    int16_t* x = nullptr;
    float scales[kLowRows];

    void make(const DownItem& item, uint8_t* scratch) {
        if (group == item.group && row == item.row) return;
        group = item.group, row = item.row;
        x = (int16_t*)scratch;
        stride = (item.args->k + kPairs - 1) / kPairs * kPairs;
        const RowGroup& rows = item.rows();
        for (int64_t r = 0; r < kLowRows && row + r < rows.count; ++r) {
            const float* from = item.args->x + item.args->rows->rows[rows.first + row + r] * item.args->k;
            scales[r] = to_int16(from, item.args->k, kPairs, x + r * stride);
        }
    }
};

template <int TYPE>
static void down(const DownItem& item, const LowUnit& unit, const LowRows& codes) {
    typedef typename std::conditional<TYPE == kI8, int16_t, float>::type X;
    const LowRankArgs* args = item.args;
    const RowGroup& group = item.rows();
    const LowRankPart& part = item.factors();
    const int64_t row_end = item.row + kLowRows < group.count ? item.row + kLowRows : group.count;
    for (int64_t row = item.row; row < row_end;) {
        const int count = kLowMostRows >= 4 && row_end - row >= 4   ? 4
                          : kLowMostRows >= 2 && row_end - row >= 2 ? 2
                                                                    : 1;
        const bool fresh = row == item.row;
        const X* x[4];
        float found[4][kLowUnit];
        for (int r = 0; r < count; ++r) {
            if constexpr (TYPE == kI8) x[r] = codes.x + (row - item.row + r) * codes.stride;
            else x[r] = args->x + args->rows->rows[group.first + row + r] * args->k;
        }
        if (count == 4) ranks<TYPE, kLowMostRows >= 4 ? 4 : 1>(unit, args->k, fresh, x, found);
        else if (count == 2) ranks<TYPE, kLowMostRows >= 2 ? 2 : 1>(unit, args->k, fresh, x, found);
        else ranks<TYPE, 1>(unit, args->k, fresh, x, found);
        for (int r = 0; r < count; ++r) {
            float* low = args->low + (group.first + row + r) * args->low_stride + item.offset + item.rank;
            for (int64_t j = 0; j < unit.ranks; ++j) {
                float scale = part.scale;
                if constexpr (TYPE == kI8)
                    scale *= part.scales[item.rank + j] * codes.scales[row - item.row + r];
                low[j] = scale * found[r][j];
            }
        }
        row += count;
    }
}

// Rows of an embedding: column ids[t] of a, which is row ids[t] of it as it is stored.
static void take_low(const LowRankArgs* args, const RowGroup& group, int64_t row, int64_t row_end) {
    const LowRankSlot& slot = args->table[group.slot];
    for (; row < row_end; ++row) {
        const int64_t id = args->ids[args->rows->rows[group.first + row]];
        float* low = args->low + (group.first + row) * args->low_stride;
        for (int64_t p = 0; p < slot.count; ++p) {
            const LowRankPart& part = slot.parts[p];
            for (int64_t j = 0; j < part.rank; ++j) {
                const int64_t at = id * part.rank + j;
                float value;
                if (part.type == kF16) value = half_to_float(((const uint16_t*)part.a)[at]);
                else if (part.type == kF32) value = ((const float*)part.a)[at];
                else value = part.scales[j] * ((const int8_t*)part.a)[at];
                low[j] = part.scale * value;
            }
            low += part.rank;
        }
    }
}

// Items of an embedding: rows of a group.
static void low_rank_take(const LowRankArgs* args, int64_t begin, int64_t end) {
    int64_t before = 0;
    for (int64_t g = 0; g < args->rows->count && before < end; ++g) {
        const RowGroup& group = args->rows->groups[g];
        const int64_t units = low_units(*args, args->table[group.slot]);
        const int64_t after = before + row_chunks(group) * units;
        for (int64_t i = begin > before ? begin : before; i < after && i < end; ++i) {
            const int64_t row = (i - before) * kLowRows;
            take_low(args, group, row, row + kLowRows < group.count ? row + kLowRows : group.count);
        }
        before = after;
    }
}

static void low_rank_down(const LowRankArgs* args, int64_t begin, int64_t end, uint8_t* scratch) {
    if (args->ids) return low_rank_take(args, begin, end);
    if (begin >= end) return;
    DownItem item = {args, 0, 0, 0, 0, 0};
    while (!item.slot().count) ++item.group;
    for (int64_t i = 0; i < begin; ++i) item.advance();
    LowRows codes;
    for (bool more = true; begin < end; ++begin) {
        const DownItem now = item;
        more = item.advance();
        const LowRankPart& part = now.factors();
        const int64_t bytes = now.ranks() * rank_bytes(args->k, part.type);
        const LowUnit unit = {now.a(), now.ranks(), bytes, more ? item.a() : now.a() + bytes};
        if (part.type == kF16) {
            down<kF16>(now, unit, codes);
        } else if (part.type == kF32) {
            down<kF32>(now, unit, codes);
        } else {
            codes.make(now, scratch);
            if (more) __builtin_prefetch(item.factors().scales + item.rank);
            down<kI8>(now, unit, codes);
        }
    }
}

// VECTORS vectors of columns of ROWS rows. `b`: the first vector's rank 0. `ahead`: what to prefetch, as
// many bytes as are read; null: nothing.
template <int TYPE, int ROWS, int VECTORS>
INLINE void outputs(int64_t rank, const uint8_t* const* b, const float* const* low, VF (*sums)[VECTORS],
                    const uint8_t* ahead) {
    const int64_t step = VECTORS * kLanes * element_bytes(TYPE);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = zero();
    for (int64_t j = 0; j < rank; ++j) {
        if (ahead) prefetch_lines(ahead + j * step, step);
        VF factors[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) factors[v] = load_as(TYPE, b[v], j * kTileRows);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const VF each = set1(low[r][j]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = fma(factors[v], each, sums[r][v]);
        }
    }
}

// y += sums; `left`: columns of y from here on.
template <int ROWS, int VECTORS>
INLINE void add_outputs(const VF (*sums)[VECTORS], float* const* y, int64_t left) {
    if (VECTORS * kLanes <= left) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                store(y[r] + v * kLanes, add(load(y[r] + v * kLanes), sums[r][v]));
        return;
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {  // the end of a row
        float last[VECTORS * kLanes];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) store(last + v * kLanes, sums[r][v]);
        for (int64_t i = 0; i < left; ++i) y[r][i] += last[i];
    }
}

// The pieces of b that an item range reads: 16-column blocks first..last of a part for a group.
struct UpPiece {
    const LowRankArgs* args;
    int64_t begin, end;   // blocks of y
    int64_t group, part, offset;

    const RowGroup& rows() const { return args->rows->groups[group]; }
    const LowRankSlot& slot() const { return args->table[rows().slot]; }
    const LowRankPart& factors() const { return slot().parts[part]; }
    // Blocks of the part.
    int64_t first() const {
        const int64_t from = begin - factors().first_block;
        return from > 0 ? from : 0;
    }
    int64_t last() const {
        const int64_t to = end - factors().first_block;
        return to < factors().blocks ? to : factors().blocks;
    }
    const uint8_t* b(int64_t block) const {
        const LowRankPart& found = factors();
        return (const uint8_t*)found.b + block * column_ranks(found) * kTileRows * element_bytes(found.type);
    }
    bool valid() const { return group < args->rows->count; }
    // Goes to the next piece that is not empty.
    void advance() {
        if (part < slot().count) offset += factors().rank;
        ++part;
        settle();
    }
    void settle() {
        for (; valid(); ++group, part = offset = 0)
            for (; part < slot().count; offset += factors().rank, ++part)
                if (first() < last()) return;
    }
};

// low of a group's rows as 16 bits, for one piece.
struct LowCodes {
    const int16_t* codes;
    const float* scales;
    int64_t stride;
};

// ROWS rows from `row` on: see `up`.
template <int TYPE, int ROWS, int VECTORS>
INLINE void up_rows(const UpPiece& piece, const LowCodes& codes, int64_t row, const uint8_t* const* b,
                    int64_t vector, const uint8_t* ahead) {
    const LowRankArgs* args = piece.args;
    const RowGroup& group = piece.rows();
    const LowRankPart& part = piece.factors();
    const int64_t column = part.first_block * kTileRows + vector * kLanes;
    VF sums[ROWS][VECTORS];
    float* y[ROWS];
    for (int r = 0; r < ROWS; ++r)
        y[r] = args->y + args->rows->rows[group.first + row + r] * args->y_stride + column;
    if constexpr (TYPE == kI8) {
        const int16_t* low[ROWS];
        for (int r = 0; r < ROWS; ++r) low[r] = codes.codes + (row + r) * codes.stride;
        outputs_int8<ROWS, VECTORS>(part.rank, b, low, codes.scales + row, sums, ahead);
    } else {
        const float* low[ROWS];
        for (int r = 0; r < ROWS; ++r)
            low[r] = args->low + (group.first + row + r) * args->low_stride + piece.offset;
        outputs<TYPE, ROWS, VECTORS>(part.rank, b, low, sums, ahead);
    }
    add_outputs<ROWS, VECTORS>(sums, y, args->n - column);
}

// Columns of a piece from its vector `vector` on, VECTORS vectors, for all rows of the group.
template <int TYPE, int VECTORS>
__attribute__((noinline)) static void up(const UpPiece& piece, const LowCodes& codes, int64_t vector,
                                         const uint8_t* ahead) {
    const int kRows = VECTORS * 4 <= kLowSums ? 4 : VECTORS * 2 <= kLowSums ? 2 : 1;
    const int64_t count = piece.rows().count;
    const int kPerLane = TYPE == kI8 ? 2 : element_bytes(TYPE);  // bytes
    const uint8_t* b[VECTORS];
    for (int v = 0; v < VECTORS; ++v)
        b[v] = piece.b((vector + v) / kLowVectors) + (vector + v) % kLowVectors * kLanes * kPerLane;
    for (int64_t row = 0; row < count; ahead = nullptr) {
        if (count - row >= kRows) {
            up_rows<TYPE, kRows, VECTORS>(piece, codes, row, b, vector, ahead);
            row += kRows;
        } else {
            up_rows<TYPE, 1, VECTORS>(piece, codes, row, b, vector, ahead);
            row += 1;
        }
    }
}

// `next`: what is read after the piece; null: nothing.
template <int TYPE>
static void up_piece(const UpPiece& piece, const uint8_t* next, uint8_t* scratch) {
    LowCodes codes = {};
    if constexpr (TYPE == kI8) {
        const RowGroup& group = piece.rows();
        const int64_t rank = piece.factors().rank;
        float* scales = (float*)scratch;
        int16_t* to = (int16_t*)(scales + group.count);
        codes = {to, scales, column_ranks(piece.factors())};
        for (int64_t r = 0; r < group.count; ++r, to += codes.stride)
            scales[r] = to_int16(piece.args->low + (group.first + r) * piece.args->low_stride + piece.offset,
                                 rank, 2, to);
    }
    const int64_t end = piece.last() * kLowVectors;
    for (int64_t vector = piece.first() * kLowVectors; vector < end;) {
        const int64_t left = end - vector;
        const int count = piece.rows().count == 1 && left >= kUpVectors ? (int)kUpVectors
                          : left >= 4                                  ? 4
                          : left >= 2                                  ? 2
                                                                       : 1;
        const uint8_t* ahead = count < left ? piece.b((vector + count) / kLowVectors) : next;
        if (count == kUpVectors) up<TYPE, kUpVectors>(piece, codes, vector, ahead);
        else if (count == 4) up<TYPE, 4>(piece, codes, vector, ahead);
        else if (count == 2) up<TYPE, 2>(piece, codes, vector, ahead);
        else up<TYPE, 1>(piece, codes, vector, ahead);
        vector += count;
    }
}

static void add_bias(const LowRankArgs* args, const RowGroup& group, int64_t begin, int64_t end) {
    const float* bias = args->table[group.slot].bias;
    const int64_t first = begin * kTileRows;
    const int64_t last = end * kTileRows < args->n ? end * kTileRows : args->n;
    for (int64_t row = 0; bias && row < group.count; ++row) {
        float* y = args->y + args->rows->rows[group.first + row] * args->y_stride;
        for (int64_t i = first; i < last; ++i) y[i] += bias[i];
    }
}

static void low_rank_up(const LowRankArgs* args, int64_t item_begin, int64_t item_end, uint8_t* scratch) {
    const int64_t blocks = column_blocks(*args);
    const int64_t begin = item_begin * kUpBlocks;
    const int64_t end = item_end * kUpBlocks < blocks ? item_end * kUpBlocks : blocks;
    UpPiece piece = {args, begin, end, 0, 0, 0};
    piece.settle();
    while (piece.valid()) {
        const UpPiece now = piece;
        piece.advance();
        const uint8_t* next = piece.valid() ? piece.b(piece.first()) : nullptr;
        const int32_t type = now.factors().type;
        if (type == kF16) up_piece<kF16>(now, next, scratch);
        else if (type == kF32) up_piece<kF32>(now, next, scratch);
        else up_piece<kI8>(now, next, scratch);
    }
    for (int64_t g = 0; g < args->rows->count; ++g) add_bias(args, args->rows->groups[g], begin, end);
}

}  // namespace LEVEL
