// Pages of keys and values, their rotation, and attention over them. Part of abi.hpp, whose rules hold here.
#pragma once

#include "abi_weights.hpp"

// Keys or values in pages: [num_pages][kv_heads][page_size][head_dim] of `type`; strides count
// elements, for kI4 bytes. Keys are transposed: neighbouring elements belong to neighbouring slots, so
// that keys are vector lanes, and the dimensions of a key are `step` apart. Values are not: the slots
// are `step` apart. Floats that are further apart than a value is long have room for whole vectors: up to
// kHeadPadding numbers of arbitrary contents are read after a value, also after the last one.
// Codes have a scale per slot and `group` dimensions: row (head * groups + g) of
// the page's scales, slots side by side; value = scale * (code - zero). It is an f16 (for kI16 a bf16), and zero 0,
// or for kI4 two bytes: the upper 8 bits of an f16 without sign, and then zero in sixteenths.
struct PageSide {
    void* data;
    uint16_t* scales;  // null: no scales
    int64_t page, head, step;
    int64_t scale_page, scale_row;
    int32_t type, group;
    int32_t mixed;     // by the Hadamard matrix (page_codes.hpp)
};

struct PageLevel {
    PageSide keys, values;
};

// Page ids of a tiered KV cache have the tier in the high bits; the first tier is 0.
enum { kMaxLevels = 3, kLevelShift = 28 };
static_assert(kMaxLevels <= 1 << (31 - kLevelShift), "the level is above the page, below the sign");
// Head sizes of the kernels that read or write KV pages: multiples of kHeadDimStep up to kMaxHeadDim.
enum { kMaxHeadDim = 576, kHeadDimStep = 8 };
// Dimensions that share a scale: integer products of so many are exact (attention_integers.hpp).
enum { kMaxScaleGroup = 512 };
// The largest code of kI16 pages. What such codes are multiplied with has at most kMostCodeSum as the sum of its
// sizes, so that 32 bits hold the result.
enum { kMostWord = 8191, kMostCodeSum = (1 << 18) - kMaxScaleGroup };
static_assert(kMaxHeadDim % kHeadDimStep == 0, "the largest head is one of them");
static_assert(kHeadDimStep % 2 == 0, "kI4 stores two dimensions of a head in a byte");
static inline int level_of(int32_t id) { return id >> kLevelShift; }
static inline int64_t page_of(int32_t id) { return id & ((1 << kLevelShift) - 1); }

struct RopeArgs {
    float* q;
    const float* k;
    const float* v;
    const float* cos;
    const float* sin;
    const int64_t* slots;
    const float* key_centre;  // [kv_heads][head_dim], taken from every key; null: none
    const float *q_norm, *k_norm, *v_norm;  // RMSNorms of each head, [head_dim]; null: none
    // Queries are multiplied by 1 + beta log(1 + (position + shift) / length); null: they are not.
    const int64_t* positions;
    // Of latent pages: the part of a query that turns, which becomes its dimensions from value_dim on; null:
    // pages have values. k is then that part of a key, v its first value_dim numbers.
    const float* q_turned;
    PageLevel pages;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, cos_token, sin_token;
    int64_t turned_token, turned_head;
    int64_t num_pages, length, shift;
    int32_t heads, kv_heads, head_dim, half, page_size;
    int32_t value_dim;   // of a value; head_dim is that of a key
    int32_t norm_after;  // norms of q and k come after the rotation
    float eps, beta;
};

struct AttentionArgs {
    const float* q;
    float* out;  // [T, heads * value_dim]
    PageLevel levels[kMaxLevels];  // of the same memory, each with twice the pages of the one before
    const int32_t* query_start;
    const int32_t* context_len;
    const int32_t* page_table;
    const float* sinks;  // null: none
    const float* slopes;  // of the linear biases, one for each head; null: none
    const float* biases;  // of a key by its distance from the query, [heads][2 reach + 1]; null: none
    const int32_t* ahead;  // how many tokens behind it each token sees too, [T]; null: none
    uint8_t* shared;     // memory that only attention uses, zero when allocated; set by the runtime
    int64_t q_token, q_head, table_width;
    int64_t num_pages, tokens;  // of the first level; tokens: rows of q and out
    int64_t window;             // 0: none; a token sees those less than this far away, or if `chunked`
                                // those from the last multiple of it on
    int32_t requests;           // set by plan_attention
    int32_t heads, kv_heads, head_dim, page_size;
    int32_t num_levels;     // with more than one, a page has 128 slots
    float scale, softcap;   // softcap 0: none
    int32_t query_tile;     // tokens of a query tile; set by plan_attention
    int32_t split_blocks;   // most key blocks of a split; set by plan_attention
    int32_t both_ways;      // tokens see those after them too
    int32_t reach;          // keys further away than this have the bias of this distance
    int32_t chunked;
    int32_t value_dim;      // of a value; head_dim is that of a query and a key
    int32_t latent;         // a value is the first value_dim numbers of its key: both sides are those of keys
    int32_t looks_ahead;    // whether some token of this step sees tokens behind it; set by plan_attention
    int32_t rounded;        // queries and weights are multiplied in bfloat16 (attention_bf16.hpp)
};

// Writes a page as one of another type; both are mixed. One row for each slot of each head of each
// layer.
struct RecodeArgs {
    const PageLevel* source;  // one for each layer
    const PageLevel* target;
    int64_t page, to_page;
    int32_t kv_heads, head_dim, page_size;
};
