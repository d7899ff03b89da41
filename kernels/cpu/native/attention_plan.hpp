// How one attention call is cut into work items: plain arithmetic, shared by the caller, who needs
// sizes, and by the kernels, which find their items with it. Nothing here changes a result.
//
// A context is cut into blocks of 128 keys at absolute positions. A request whose rows fit one
// query tile (decode, short ends of prompts) may have its blocks spread over several items, each
// of which leaves one record per chunk and row in shared memory; the last one folds them. Longer
// ones are cut into query tiles, each of which goes through its blocks alone.
#pragma once

#include <stddef.h>

#include "abi.hpp"

enum {
    kBlockKeys = 128,
    kQueryRows = 96,        // rows (tokens x query heads of a key head) of a query tile
    kMaxSplitPairs = 1024,  // counters at the start of the shared memory: one per (request, head)
    kPartExtra = 16,        // floats of a record beside its values: peak, total, padding
};

// Floats of a head, padded to the widest vector: the same at every instruction-set level.
static inline int64_t padded_dim(const AttentionArgs* a) { return (a->head_dim + 15) / 16 * 16; }

// Scales of a key or value of the level that has the most.
static inline int most_groups(const AttentionArgs* a, PageSide PageLevel::*side) {
    int most = 0;
    for (int level = 0; level < a->num_levels; ++level) {
        const PageSide& pages = a->levels[level].*side;
        const int groups = pages.scales ? (a->head_dim + pages.group - 1) / pages.group : 0;
        most = groups > most ? groups : most;
    }
    return most;
}

// Work of one request: `tiles` query tiles, or one whose blocks first_block..end_block are spread
// over `runs` items; that times the key heads.
struct RequestPlan {
    int64_t tokens, tiles, splits, first_block, end_block;
};

static inline RequestPlan request_plan(const AttentionArgs* a, int r) {
    RequestPlan s = {a->query_start[r + 1] - a->query_start[r], 0, 1, 0, 0};
    s.tiles = (s.tokens + a->query_tile - 1) / a->query_tile;
    if (s.tiles != 1) return s;
    int64_t lowest = a->window ? a->context_len[r] - s.tokens + 1 - a->window : 0;
    s.first_block = lowest > 0 ? lowest / kBlockKeys : 0;
    s.end_block = (a->context_len[r] + kBlockKeys - 1) / kBlockKeys;
    s.splits = (s.end_block - s.first_block + a->split_blocks - 1) / a->split_blocks;
    return s;
}

// Records of a request's split blocks in shared memory, all key heads together.
static inline int64_t split_records(const AttentionArgs* a, const RequestPlan& s) {
    return s.splits > 1 ? (s.end_block - s.first_block) * s.tokens * a->heads : 0;
}

struct AttentionPlan {
    int64_t items;
    int64_t work;  // about one per multiply
    size_t shared_bytes, private_bytes;
    int status;  // Status; anything but kOk: nothing must run
};

// Checks the index tensors, cuts `requests` requests into items for `threads` threads and writes
// how into `args`. Before the items run, args->shared must point at shared_bytes bytes that were
// zero when they were allocated and that nobody else writes to.
AttentionPlan plan_attention(AttentionArgs* args, int requests, int threads);

// Whether all slots lie in the pages.
bool slots_in_range(const RopeArgs* args, int64_t tokens);
