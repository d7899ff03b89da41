// Mixture of experts (MoE): a router chooses k experts for each token, and each expert multiplies only
// its own tokens. The rows of all tokens are sorted by expert once (group_rows). The rows of an expert
// are then contiguous, so that its product is an ordinary one, and everything up to `combine` stays in
// that order. Plain C++: the same bits at every level.
#pragma once

#include "levels.hpp"
#include "linear_scratch.hpp"

// The k experts of tokens begin..end and their weights.
void route(const RouteArgs& args, int64_t begin, int64_t end);
// Fills the other tensors from `chosen`, the result of `route`.
void group_rows(const GroupArgs& args);
void add_biases(const BiasArgs& args, int64_t begin, int64_t end);
void combine(const CombineArgs& args, int64_t begin, int64_t end);
// The two parts of kOpCombineRanks for the tokens begin..end. Row (t, j) lies at t * k + j in the area
// of the rank that has computed it. Every rank combines only its own tokens if it has some.
void send_expert_rows(const CombineRanksArgs& args, int64_t begin, int64_t end);
void combine_ranks(const CombineRanksArgs& args, int64_t begin, int64_t end);
// The two parts of kOpGatherRanks for the tokens begin..end of all ranks.
void send_token_rows(const GatherRanksArgs& args, int64_t begin, int64_t end);
void gather_ranks(const GatherRanksArgs& args, int64_t begin, int64_t end);

// Strips of all experts that have rows, expert by expert: at most as many experts as rows.
inline int64_t expert_strips(const ExpertsArgs& args) {
    const int64_t most = args.each.m < args.count ? args.each.m : args.count;
    return most * strips_of(*args.each.w);
}

// Quantizes the rows begin..end of the products, each by the scheme of its expert.
void quantize_expert_rows(const KernelTable& kernels, const ExpertsArgs& args, int64_t begin,
                          int64_t end);
// Bytes for one thread; an expert has at most one row of each token.
size_t expert_private_bytes(const ExpertsArgs& args);
// Some of the expert_strips. kDamaged or kUnreadable: an expert cannot be used.
Status expert_tiles(const KernelTable& kernels, const ExpertsArgs& args, const ItemRange& share,
                  uint8_t* scratch);
