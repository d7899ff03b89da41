// Mixtures of experts: a router chooses k matrices for each token, and each matrix multiplies its own
// tokens only. The rows of all tokens are brought into the order of their experts once (group_rows);
// an expert then has its rows side by side, so that its product is an ordinary one, and everything up
// to `combine` stays in that order. Plain C++: the same bits at every level.
#pragma once

#include "levels.hpp"
#include "linear_scratch.hpp"

// The k experts of tokens begin..end and their weights.
void route(const RouteArgs& args, int64_t begin, int64_t end);
// Fills the other tensors from `chosen`, which `route` has made.
void group_rows(const GroupArgs& args);
void add_biases(const BiasArgs& args, int64_t begin, int64_t end);
void combine(const CombineArgs& args, int64_t begin, int64_t end);

// Strips of all experts that have rows, expert by expert: there are at most as many as rows.
inline int64_t expert_strips(const ExpertsArgs& args) {
    const int64_t most = args.each.m < args.count ? args.each.m : args.count;
    return most * strips_of(*args.each.w);
}

// Rounds the rows begin..end of the products, each by the rule of its own expert.
void quantize_expert_rows(const KernelTable& kernels, const ExpertsArgs& args, int64_t begin, int64_t end);
// For one thread; an expert has one row of a token at most.
size_t expert_private_bytes(const ExpertsArgs& args);
// Some of the expert_strips.
void expert_tiles(const KernelTable& kernels, const ExpertsArgs& args, const ItemRange& share,
                  uint8_t* scratch);
