// What ranks send each other. Part of abi.hpp, whose rules hold here.
#pragma once

#include "abi_experts.hpp"

// What the ranks of a group compute together. A sum: x[t] becomes the sum of all ranks' x[t], added in
// the order of the ranks. Otherwise out[t] = the x[t] of all ranks, side by side.
struct ExchangeArgs {
    class RankGroup* group;
    float* x;         // [m, own], rows x_stride apart
    float* out;       // [m, out_width], contiguous; null: a sum
    int64_t own, x_stride;
    int64_t width;    // columns of every rank's x, except that the last may have fewer
    int64_t out_width;
    int64_t number;   // of the exchange; set by the runtime
};

// Rows that one process sends to another, which receives them into its x (rank_group.hpp).
struct TransferArgs {
    class RankGroup* link;
    float* x;       // [rows, width]
    int64_t width;
    int64_t rows;   // set by the runtime
};

// The sum of CombineArgs where the rows are at several ranks: every rank sends those that it has computed, and
// adds all of a token in the order of j. So the bits do not depend on which rank computes which row.
struct CombineRanksArgs {
    CombineArgs own;         // places: -1 for rows of other ranks
    class RankGroup* group;
    const int32_t* servers;  // [T, k]: the rank of each row
    // [ranks + 1]: rank r has the tokens starts[r]..starts[r + 1] of the T, and `own.out` is only for
    // those; null: every rank has all tokens.
    const int32_t* starts;
    int64_t number;          // of the exchange; set by the runtime
};

// The rows of all ranks, where each has tokens of its own: see CombineRanksArgs::starts.
struct GatherRanksArgs {
    class RankGroup* group;
    const float* x;  // of this rank, [its tokens, width]
    float* out;      // of all, [starts[ranks], width]
    const int32_t* starts;
    int64_t width;
    int64_t number;  // of the exchange; set by the runtime
};
