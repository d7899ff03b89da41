// Low-rank adapters. Part of abi.hpp, whose rules hold here.
#pragma once

#include "abi_weights.hpp"

enum { kLowUnit = 8 };  // ranks of a factor that lie together

// What an adapter adds to 16-column blocks of a product: scale * b (a x), both factors kF16, kF32 or kI8.
struct LowRankPart {
    // Units of kLowUnit ranks, the last one of what is left: each [k / 16][ranks of the unit][16], of kI8
    // [k / 32][ranks][32]; k is rounded up, the rest zero. Of an embedding [k][rank].
    const void* a;
    const void* b;  // [blocks][rank][16]; of kI8 [blocks][rank / 2, rounded up][16][2]
    const float* scales;  // of kI8: [rank], of the rank's codes in a times those in b; else null
    int64_t rank, first_block, blocks;
    float scale;
    int32_t type;
};

// What is in an adapter slot of one product; count 0: nothing.
struct LowRankSlot {
    const LowRankPart* parts;
    const float* bias;  // [n]; null: none
    int64_t count;
    int64_t ranks;  // of all parts together
};

// Rows of a step with the same adapter slot: rows[first..first + count) of SlotRows.
struct RowGroup {
    int32_t slot, count;
    int64_t first;
};

// The rows of a step that have an adapter, by slot.
struct SlotRows {
    const RowGroup* groups;
    const int32_t* rows;
    int64_t count, total;  // groups, rows
};

// y[t] += what slot slots[t] adds for x[t]; the slots are read when the operator runs.
struct LowRankArgs {
    const float* x;      // [m, k]
    const int64_t* ids;  // [m], instead of x: one-hot rows of an embedding; else null
    float* y;            // [m, n], rows y_stride apart
    const int32_t* slots;  // [m]; -1: none
    const LowRankSlot* table;  // [size]
    int64_t y_stride, size, k, n;
    const SlotRows* rows;  // these and the rest are set by the runtime
    float* low;            // a x of the rows with an adapter, low_stride apart
    int64_t low_stride;
    int64_t units;  // work items of a x
};
