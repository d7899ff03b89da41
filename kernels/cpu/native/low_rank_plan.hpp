// How the updates of a step by adapters are divided into work items: plain arithmetic, shared by the
// runtime, which needs sizes, and by the kernels, which find their items with it (low_rank.hpp). Nothing
// here changes a result.
//
// Rows with the same slot are a group, so that a step reads the factors of an adapter once. Down, the
// product with a: an item is 8 ranks of one part for up to 32 rows of a group. Up, the product with b: an
// item is 64 columns for all rows.
#pragma once

#include <stddef.h>

#include <deque>
#include <vector>

#include "abi.hpp"

enum {
    kLowRows = 32,          // its rows: their x (up to 2048 features) stays in the second-level cache
    kUpBlocks = 4,          // 16-column blocks of an item: the columns of up to four vectors
    kLowPadding = 16,       // a row of `low` is padded to a multiple of it, the widest vector
};

static inline int64_t padded_low(int64_t width) {
    return (width + kLowPadding - 1) / kLowPadding * kLowPadding;
}

// Bytes of a rank of `a`: 8-bit factors are in blocks of 32.
static inline int64_t rank_bytes(int64_t k, int32_t type) {
    if (type == kI8) return (k + 2 * kTileRows - 1) / (2 * kTileRows) * (2 * kTileRows);
    return padded_low(k) * (type == kF32 ? 4 : 2);
}

// Ranks of a column of `b`: 8-bit factors are in pairs.
static inline int64_t column_ranks(const LowRankPart& part) {
    return part.type == kI8 ? (part.rank + 1) / 2 * 2 : part.rank;
}

static inline int64_t row_chunks(const RowGroup& group) {
    return (group.count + kLowRows - 1) / kLowRows;
}

// Items of up to kLowRows rows of a group. An embedding copies rows of `a`: one item.
static inline int64_t low_units(const LowRankArgs& args, const LowRankSlot& slot) {
    if (args.ids) return slot.count > 0;
    int64_t units = 0;
    for (int64_t p = 0; p < slot.count; ++p)
        units += (slot.parts[p].rank + kLowUnit - 1) / kLowUnit;
    return units;
}

static inline int64_t column_blocks(const LowRankArgs& args) {
    return (args.n + kTileRows - 1) / kTileRows;
}

struct LowRankItems {
    int64_t count, work;  // work: about one per multiplication
};

LowRankItems down_items(const LowRankArgs& args);
LowRankItems up_items(const LowRankArgs& args);
// Bytes of a thread's scratch, which only 8-bit factors need.
size_t low_scratch(const LowRankArgs& args);
// Bytes of args.low.
size_t low_bytes(const LowRankArgs& args);

// The rows of a run by slot. Operators over the same rows share them; nothing is allocated once the
// vectors have grown.
class SlotPlans {
public:
    void clear() { used_ = 0; }
    // Sets args->rows and args->low_stride; false if a slot is outside of the table.
    bool assign(LowRankArgs* args, int64_t m);

private:
    struct Plan {
        const int32_t* slots;
        int64_t m, size;
        bool fits;
        std::vector<int32_t> rows;
        std::vector<RowGroup> groups;
        SlotRows view;
    };
    bool fill(Plan* plan);
    std::deque<Plan> plans_;  // never moves
    size_t used_ = 0;
    std::vector<int64_t> starts_;
};
