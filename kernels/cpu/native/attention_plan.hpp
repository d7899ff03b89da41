// How one attention call is divided into work items: plain arithmetic, shared by the caller, which
// needs sizes, and by the kernels, which find their items with it. Nothing here changes a result.
//
// A context is divided into key blocks of 128 keys at absolute positions. A request whose rows fit one
// query tile (decode, short ends of prompts) may be split: its key blocks are spread over several
// items, each of which leaves one record per block and row in shared memory, and the last item merges
// the records. Longer requests are divided into query tiles, and one item goes through all key blocks
// of a tile.
#pragma once

#include <stddef.h>

#include "abi.hpp"

enum {
    kBlockShift = 7,
    kBlockKeys = 1 << kBlockShift,  // keys of a key block
    kQueryRows = 96,         // rows (tokens x query heads of a key head) of a query tile
    kMaxSplitPairs = 1024,   // counters at the start of the shared memory: one per (request, head)
    kHeadPadding = 16,       // a head is padded to a multiple of it, the widest vector of any level
    kPartExtra = 16,         // floats of a record in addition to its values: peak, total, padding
    kMostAttentionRows = 8,  // at least kAttentionRows of every level
    kSumDims = 4,            // dimensions of a query whose codes are summed for products with integer codes
    kQuerySums = kMaxHeadDim / kSumDims + 1,
};
static_assert(kPartExtra >= 2, "a record has a peak and a total");
static_assert(kPartExtra % kHeadPadding == 0, "records are aligned like heads");
static_assert(kHeadPadding * sizeof(float) == kCacheLine, "padded heads are whole cache lines");
static_assert(kMaxHeadDim % kHeadPadding == 0, "the largest head needs no padding");
static_assert(kMaxSplitPairs * sizeof(int32_t) % kCacheLine == 0, "records after the counters are aligned");
static_assert(kQueryRows >= kMostAttentionRows, "a query tile has at least one block of rows");
static_assert((kMostAttentionRows + kQueryRows) *
                      (5 * kMaxHeadDim / 2 + 1 + kQuerySums + kPartExtra + kBlockKeys) * (int)sizeof(float) +
                  2 * kBlockKeys * kMaxHeadDim * (int)sizeof(float) <= 3 << 19,
              "the private memory of a thread, without scales, stays below 1.5 MiB");

// Floats of a padded key and of a padded value: the same at every instruction-set level.
static inline int64_t padded_dim(const AttentionArgs* a) {
    return (a->head_dim + kHeadPadding - 1) / kHeadPadding * kHeadPadding;
}

static inline int64_t padded_value(const AttentionArgs* a) {
    return (a->value_dim + kHeadPadding - 1) / kHeadPadding * kHeadPadding;
}

// Dimensions that a side of a page stores: a latent key is also the value.
static inline int stored_dim(const AttentionArgs* a, PageSide PageLevel::*side) {
    return side == &PageLevel::keys || a->latent ? a->head_dim : a->value_dim;
}

// Scales of a key or value of the level that has the most.
static inline int most_groups(const AttentionArgs* a, PageSide PageLevel::*side) {
    int most = 0;
    for (int level = 0; level < a->num_levels; ++level) {
        const PageSide& pages = a->levels[level].*side;
        const int groups = pages.scales ? (stored_dim(a, side) + pages.group - 1) / pages.group : 0;
        most = groups > most ? groups : most;
    }
    return most;
}

// The first position that the token at `position` sees; negative: all before it.
static inline int64_t first_seen(const AttentionArgs* a, int64_t position) {
    if (!a->window) return 0;
    return a->chunked ? position / a->window * a->window : position - a->window + 1;
}

// Items of one request: `tiles` query tiles, or one tile whose key blocks first_block..end_block are
// spread over `splits` items; times the number of key heads.
struct RequestPlan {
    int64_t tokens, tiles, splits, first_block, end_block;
};

static inline RequestPlan request_plan(const AttentionArgs* a, int r) {
    RequestPlan s = {a->query_start[r + 1] - a->query_start[r], 0, 1, 0, 0};
    s.tiles = (s.tokens + a->query_tile - 1) / a->query_tile;
    if (s.tiles != 1) return s;
    const int64_t lowest = first_seen(a, a->context_len[r] - s.tokens);
    s.first_block = lowest > 0 ? lowest / kBlockKeys : 0;
    s.end_block = (a->context_len[r] + kBlockKeys - 1) / kBlockKeys;
    s.splits = (s.end_block - s.first_block + a->split_blocks - 1) / a->split_blocks;
    return s;
}

// Records of a split request in shared memory, all key heads together.
static inline int64_t split_records(const AttentionArgs* a, const RequestPlan& s) {
    return s.splits > 1 ? (s.end_block - s.first_block) * s.tokens * a->heads : 0;
}

struct AttentionPlan {
    int64_t items;
    int64_t work;  // about one per multiply
    size_t shared_bytes, private_bytes;
    int status;  // Status; unless kOk nothing may run
};

// Checks the index tensors, divides `requests` requests into items for `threads` threads and writes
// the result into `args`. Before the items run, args->shared must point to shared_bytes bytes that were
// zero when they were allocated and that only attention writes.
AttentionPlan plan_attention(AttentionArgs* args, int requests, int threads);

// Whether all page slots are inside the pages.
bool slots_in_range(const RopeArgs* args, int64_t tokens);
