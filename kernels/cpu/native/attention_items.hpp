// The work items of an attention call, one after another, and the memory they will read.
#pragma once

#include "attention_plan.hpp"
#include "page_codes.hpp"

namespace LEVEL {

// Rows that share a loaded vector: as many accumulators as the registers hold.
enum { kAttentionRows = kRegisters < 32 ? 3 : 6, kKeyVectors = kBlockKeys / kLanes };
static_assert(kAttentionRows * 5 + 1 <= kRegisters, "4 accumulators and a factor for each row, and a vector");
static_assert((int)kAttentionRows <= (int)kMostAttentionRows, "plan_attention counts memory for this many rows");
static_assert(kBlockKeys % kLanes == 0 && kKeyVectors % 4 == 0, "vectors of keys in fours and pairs");
static_assert(kHeadPadding % kLanes == 0, "a padded head is whole vectors at every level");
static_assert(kMaxHeadDim % kLanes == 0, "the codes of a head have room for whole vectors");

// The sum of sixteen partial sums, which are the lanes of 16 / kLanes vectors: the same at every level.
INLINE float sum_of_sixteen(VF* sums) {
    for (int n = 8 / kLanes; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) sums[i] = add(sums[i], sums[i + n]);
    return reduce_add(sums[0]);
}

// Bytes of `count` elements of a page.
INLINE int64_t page_bytes(int type, int64_t count) {
    switch (type) {
        case kF32: return count * 4;
        case kF16: case kBF16: case kI16: return count * 2;
        case kI4: return count / 2;
        default: return count;
    }
}

// Strides of kI4 pages count bytes.
INLINE const uint8_t* element(const PageSide& side, int64_t index) {
    return (const uint8_t*)side.data + (side.type == kI4 ? index : page_bytes(side.type, index));
}

// The rows and keys of an item, and its private memory.
struct Item {
    const AttentionArgs* a;
    const int32_t* table;
    int head, group, rows;
    int64_t token;           // the item's first row of q and out
    int64_t position;        // of that token in its request
    int64_t sees;            // the end of the keys that any of its tokens sees
    int64_t context;         // tokens of the request
    int64_t padded, value, record;  // floats of a key, of a value and of a record
    float *keys, *values;    // [head_dim][128], [128][value]: converted copies
    float *key_scale, *key_zero, *value_scale, *value_zero;  // [groups][128]
    float *weights, *parts, *q, *states;
    // For keys that are integer codes: queries as 16 bits, [rows][padded]; their scales, [rows]; the sums of
    // the codes of the first 0, kSumDims, ... dimensions, [rows][kQuerySums].
    int16_t* q_codes;
    float* q_scales;
    int32_t* q_sums;
};

// Pages whose slots are whole vectors: a vector of keys can be loaded from its page.
INLINE bool whole_slots(const AttentionArgs* a) {
    return (a->page_size & (a->page_size - 1)) == 0 && a->page_size % kLanes == 0;
}

// Pages whose values are whole vectors too, or floats with room for one after them, can be read in place.
INLINE bool in_place(const AttentionArgs* a, const PageLevel& from) {
    const PageSide& values = from.values;
    const int vector = values.type == kI4 ? 2 * kLanes : kLanes;
    const bool padded = !values.scales && values.step >= padded_value(a);
    return whole_slots(a) && (padded || a->value_dim % vector == 0);
}

// Integer codes are multiplied as such (attention_integers.hpp).
INLINE bool multiplies_codes(const PageSide& side) {
    return side.type == kI8 || side.type == kI4 || side.type == kI16;
}

// Few rows read pages in place; many rows read a copy that is converted once.
INLINE bool reads_pages(const Item& item, const PageLevel& from) {
    // The values of latent pages are copies of a copy: pages have their numbers the other way round.
    return !item.a->latent && in_place(item.a, from) && (item.rows <= 2 * kAttentionRows ||
                                      (from.keys.type == kF32 && from.values.type == kF32));
}

// The end of the keys that the token at `position` sees.
INLINE int64_t keys_end(const Item& item, int64_t position) {
    if (item.a->looks_ahead) {
        const int32_t ahead = item.a->ahead[item.token + position - item.position];
        const int64_t end = position + 1 + (ahead > 0 ? ahead : 0);
        return end < item.context ? end : item.context;
    }
    if (!item.a->both_ways) return position + 1;
    const int64_t window = item.a->window;
    return window && window < item.context - position ? position + window : item.context;
}

// Tokens t_begin..t_end of request r under one key head.
static Item make_item(const AttentionArgs* a, int r, int head, int64_t t_begin, int64_t t_end,
                      uint8_t* scratch) {
    Item item;
    item.a = a;
    item.table = a->page_table + r * a->table_width;
    item.head = head;
    item.group = a->heads / a->kv_heads;
    item.rows = (int)(t_end - t_begin) * item.group;
    item.token = a->query_start[r] + t_begin;
    item.context = a->context_len[r];
    item.position = item.context - (a->query_start[r + 1] - item.token);
    item.padded = padded_dim(a);
    item.value = padded_value(a);
    item.record = item.value + kPartExtra;
    item.keys = (float*)scratch;
    item.values = item.keys + item.padded * kBlockKeys;
    const int key_groups = most_groups(a, &PageLevel::keys) * kBlockKeys;
    const int value_groups = most_groups(a, &PageLevel::values) * kBlockKeys;
    item.key_scale = item.values + item.value * kBlockKeys;
    item.key_zero = item.key_scale + key_groups;
    item.value_scale = item.key_zero + key_groups;
    item.value_zero = item.value_scale + value_groups;
    item.weights = item.value_zero + value_groups;
    item.parts = item.weights + kAttentionRows * kBlockKeys;
    item.q = item.parts + kAttentionRows * item.record;
    item.states = item.q + item.rows * item.padded;
    item.q_scales = item.states + item.rows * item.record;
    item.q_sums = (int32_t*)(item.q_scales + item.rows);
    item.q_codes = (int16_t*)(item.q_sums + item.rows * kQuerySums);
    item.sees = keys_end(item, item.position + t_end - t_begin - 1);
    for (int64_t t = t_begin; a->looks_ahead && t < t_end; ++t) {
        const int64_t end = keys_end(item, item.position + t - t_begin);
        item.sees = end > item.sees ? end : item.sees;
    }
    return item;
}

// An item and the positions begin..end that it goes through, one key block at a time.
struct Stretch {
    Item item;
    int64_t begin, end;
    // For a split request: the records of its head, [key block][row][record], the position of the
    // first key block, the number of key blocks and of splits, and how many splits are done.
    float* records;
    int64_t records_begin, blocks, splits;
    int32_t* counter;
};

// Item n of request r; `split` are the records of the request.
static Stretch stretch_at(const AttentionArgs* a, int r, const RequestPlan& s, int64_t n,
                          float* split, uint8_t* scratch) {
    const int head = (int)(n % a->kv_heads);
    const int64_t part = n / a->kv_heads;
    Stretch to = {};
    if (s.splits > 1) {
        to.item = make_item(a, r, head, 0, s.tokens, scratch);
        to.blocks = s.end_block - s.first_block;
        to.splits = s.splits;
        to.records = split + to.blocks * to.item.rows * to.item.record * head;
        to.records_begin = s.first_block * kBlockKeys;
        to.counter = (int32_t*)a->shared + r * a->kv_heads + head;
        to.begin = to.records_begin + to.blocks * part / s.splits * kBlockKeys;
        to.end = to.records_begin + to.blocks * (part + 1) / s.splits * kBlockKeys;
    } else {
        // The last tokens see the most keys. They go first, so that no thread ends with them.
        const int64_t t = (s.tiles - 1 - part) * a->query_tile;
        const int64_t t_end = t + a->query_tile < s.tokens ? t + a->query_tile : s.tokens;
        to.item = make_item(a, r, head, t, t_end, scratch);
        const int64_t lowest = first_seen(a, to.item.position);
        to.begin = (lowest > 0 ? lowest : 0) / kBlockKeys * kBlockKeys;
        to.end = INT64_MAX;
    }
    to.end = to.end < to.item.sees ? to.end : to.item.sees;
    return to;
}

// A thread's items, one after the other.
struct Walk {
    const AttentionArgs* a;
    int r;               // the request
    RequestPlan share;  // of the request
    int64_t item, items, left;  // next item and items of the request; items left to the thread
    float* split;        // the request's records
};

static void enter(Walk* walk, int r) {
    walk->r = r;
    walk->share = request_plan(walk->a, r);
    walk->items = walk->share.tiles * walk->share.splits * walk->a->kv_heads;
}

static Walk walk_from(const AttentionArgs* a, int64_t begin, int64_t end) {
    Walk walk = {};
    walk.a = a;
    walk.left = end - begin;
    walk.item = begin;
    walk.split = (float*)(a->shared + kMaxSplitPairs * sizeof(int32_t));
    if (walk.left > 0) enter(&walk, 0);
    return walk;
}

// False at the end.
static bool next_stretch(Walk* walk, uint8_t* scratch, Stretch* to) {
    if (walk->left <= 0) return false;
    while (walk->item >= walk->items) {
        walk->item -= walk->items;
        walk->split += split_records(walk->a, walk->share) * (padded_value(walk->a) + kPartExtra);
        enter(walk, walk->r + 1);
    }
    *to = stretch_at(walk->a, walk->r, walk->share, walk->item++, walk->split, scratch);
    --walk->left;
    return true;
}

// Whether `item` prefetches its pages. Those of latent pages and of odd shapes are left to the hardware.
INLINE bool prefetches(const Item& item) { return whole_slots(item.a) && !item.a->latent; }

// Pages are scattered, so the hardware prefetcher finds each one too late. The keys and values of the
// next pages are prefetched a constant distance ahead, between the current multiplications. Prefetched
// all at once they would fill the queue of misses, and memory and arithmetic would alternate.
struct MemoryRange {
    const uint8_t *at, *end;
};

// Pages that are prefetched have whole vectors of keys.
enum { kMinPageKeys = 4 };
static_assert((int)kMinPageKeys <= (int)kLanes, "Ahead::ranges has room for the pages of a key block");

struct Ahead {
    Walk walk;
    Stretch stretch;        // the cursor is in it
    int64_t position;       // of the next page in it
    const uint8_t *then, *then_end;  // what the thread reads after its items
    uint8_t* scratch;
    int64_t then_bytes;     // of that, at a time
    MemoryRange values;     // of the page whose keys were the range before
    MemoryRange ranges[2 * kBlockKeys / kMinPageKeys];  // keys and values of this block's pages
    int count, next;    // ranges; the one after `range`
    MemoryRange range;  // what is left of it
    int per_step;       // cache lines
};
static_assert(sizeof(Ahead) <= 4096, "on the stack");

enum { kAheadBytes = 32768 };  // pages are scattered: more than for weights

// Keys of a page, at most those of a key block.
INLINE int64_t page_keys(const AttentionArgs* a) {
    return a->page_size < kBlockKeys ? a->page_size : (int64_t)kBlockKeys;
}

INLINE MemoryRange range_of(const uint8_t* at, int64_t bytes) { return {at, at + bytes}; }

// Prefetches the scales of a head in a page, which are few lines; for a page longer than a key block
// another part each time.
INLINE void prefetch_scales(const AttentionArgs* a, const PageSide& side, int width, int64_t page, int head,
                       int64_t slot) {
    if (!side.scales) return;
    const int groups = groups_of(side, width);
    const uint8_t* at = (const uint8_t*)(scales_of(side, width, page, head, 0) + slot * groups);
    const uint8_t* end = at + 2 * page_keys(a) * groups;
    for (at -= (uintptr_t)at % 64; at < end; at += 64) prefetch(at);
}

// The keys of the cursor's page, then its values, then the memory after the items; empty at the end.
static MemoryRange next_range(Ahead* ahead) {
    const AttentionArgs* a = ahead->walk.a;
    if (ahead->values.at) {
        const MemoryRange values = ahead->values;
        ahead->values = {};
        return values;
    }
    while (ahead->position >= ahead->stretch.end) {
        if (!next_stretch(&ahead->walk, ahead->scratch, &ahead->stretch)) {
            const uint8_t* then = ahead->then;
            if (ahead->then_end - then < ahead->then_bytes) return {};
            ahead->then += ahead->then_bytes;
            return range_of(then, ahead->then_bytes);
        }
        ahead->position = prefetches(ahead->stretch.item) ? ahead->stretch.begin : ahead->stretch.end;
    }
    const Item& item = ahead->stretch.item;
    const int32_t id = item.table[ahead->position / a->page_size];
    const PageSide &keys = a->levels[level_of(id)].keys, &values = a->levels[level_of(id)].values;
    const int64_t page = page_of(id), slot = ahead->position % a->page_size;
    const int64_t value = page * values.page + item.head * values.head + slot * values.step;
    const int64_t count = page_keys(a);
    prefetch_scales(a, keys, a->head_dim, page, item.head, slot);
    prefetch_scales(a, values, a->value_dim, page, item.head, slot);
    ahead->position += page_keys(a);
    ahead->values = range_of(element(values, value), page_bytes(values.type, count * a->value_dim));
    // for a page longer than a key block, another part of all keys each time
    return range_of(element(keys, page * keys.page + item.head * keys.head) +
                      page_bytes(keys.type, slot * a->head_dim),
                  page_bytes(keys.type, count * a->head_dim));
}

INLINE void prefetch_step(Ahead* ahead) {
    for (int i = 0; i < ahead->per_step; ++i, ahead->range.at += 64) {
        if (ahead->range.at >= ahead->range.end) {
            if (ahead->next == ahead->count) {
                ahead->per_step = 0;
                return;
            }
            ahead->range = ahead->ranges[ahead->next++];
        }
        prefetch(ahead->range.at);
    }
}

// Prefetches what the first items need, unless the previous call did.
static void prefetch_first(const AttentionArgs* a, const ItemRange& share, uint8_t* scratch,
                           Ahead* ahead) {
    memset(ahead, 0, sizeof *ahead);
    ahead->walk = walk_from(a, share.begin, share.reach);
    ahead->scratch = scratch;
    ahead->then = share.then;
    ahead->then_end = share.then_end;
    ahead->then_bytes = page_bytes(a->levels[0].keys.type, page_keys(a) * a->head_dim);
    for (int64_t bytes = 0; bytes < kAheadBytes;) {
        const MemoryRange range = next_range(ahead);
        if (!range.at) return;
        bytes += range.end - range.at;
        for (const uint8_t* at = range.at; at < range.end && !share.resumed; at += 64)
            prefetch(at);
    }
}

// While `item` works on the key block at `begin`, prefetches as much as the block reads.
static void plan_prefetch(Ahead* ahead, const Item& item, int64_t begin, int64_t end) {
    const AttentionArgs* a = item.a;
    const int64_t keys = end - begin < kBlockKeys ? end - begin : (int64_t)kBlockKeys;
    const int64_t pages = prefetches(item) ? (keys + page_keys(a) - 1) / page_keys(a) : 0;
    int64_t lines = 0;
    ahead->count = ahead->next = ahead->per_step = 0;
    ahead->range = {};
    while (ahead->count < 2 * pages) {
        const MemoryRange range = next_range(ahead);
        if (!range.at) break;
        lines += (range.end - range.at + 63) / 64;
        ahead->ranges[ahead->count++] = range;
    }
    if (!ahead->count) return;
    const int64_t vectors = 4 * kLanes;  // see score_rows, value_rows
    const PageLevel& first = a->levels[0];  // products of codes take two steps at a time
    const int64_t turns = (item.rows + kAttentionRows - 1) / kAttentionRows;
    const int64_t steps = (keys + vectors - 1) / vectors * (a->head_dim >> multiplies_codes(first.keys)) +
                          (a->value_dim + vectors - 1) / vectors * ((keys + 1) >> multiplies_codes(first.values));
    ahead->per_step = (int)((lines + turns * steps - 1) / (turns * steps));
}

}  // namespace LEVEL
