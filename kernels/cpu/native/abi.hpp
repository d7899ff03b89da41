// The plain structures shared by Python (ctypes), the dispatcher and the kernels.
//
// No C++ types, no torch types: one library serves every Python and torch version. Change anything
// here, in the exported functions or in a packed layout, and kAbiVersion must change with it (also
// in kernels/cpu/library.py), so that a stale library is refused instead of computing nonsense.
#pragma once

#include <stdint.h>

enum { kAbiVersion = 3 };

// Element types of scales, minima, pages and dense values.
enum ElementType { kF16 = 0, kBF16 = 1, kF32 = 2, kU8 = 3, kI8 = 4 };

// How the codes of a weight lie in its file: one bit stream per row, or ggml's blocks.
enum SourceKind { kStream = 0, kQ4K = 1, kQ5K = 2, kQ6K = 3 };

// What every exported function returns.
// kBadIndex: a page table, slot or length points outside of its tensor.
enum Status { kOk = 0, kOutOfMemory = 1, kClosed = 2, kBadIndex = 3 };

enum { kRows = 16, kDepth = 32 };

// A packed weight. Rows come in blocks of 16, k in blocks of 32; one tile of 16 x 32 codes is
// `bits * 64` bytes (planes.hpp). Everything that belongs to a row is interleaved 16-fold:
// scale[row block][group][row in block]. A tile unit is 16 or 32 k that share their scale.
//
//   value = (code - zero) * scale - minus      scale = super_scale * scale   where there is one
//
// `dense` weights have no codes: values[row block][k][row in block] in `scale_type`.
struct Weight {
    int64_t n, k;
    int64_t row_blocks, k_blocks;
    int32_t dense;         // 1: `codes` holds plain values of type scale_type
    int32_t bits;          // 2..8
    int32_t source;        // SourceKind
    int32_t flip;          // 1: codes are stored with the top bit flipped (two's complement source)
    int32_t unit;          // 16 or 32
    int32_t group_units;   // units that share one scale
    int32_t super_units;   // units that share one super_scale
    int32_t scale_type, minus_type;
    float zero;            // used where `zeros` is null; includes the 128 of a flipped code
    int64_t groups, supers;
    uint8_t* codes;
    const void* scale;
    const void* minus;        // may be null
    const uint8_t* zeros;     // may be null
    const uint16_t* super_scale;  // f16; may be null
    const uint16_t* super_minus;  // f16; may be null
};

// Activations rounded to 8 bits per 32 values: x ~ scale * q.
struct Activations {
    int64_t k_blocks;
    int8_t* q;          // [M][k_blocks * 32]
    float* scale;       // [M][k_blocks]
    int32_t* sum;       // [M][k_blocks][2]: sum(q) over each half block, or first all of it
                        // where the weight's unit is 32
    float* minus_sum;   // [M][k_blocks][2]: -scale * sum
};

struct LinearArgs {
    const Weight* w;
    const float* x;
    int64_t m;
    float* out;
    Activations act;
};

struct NormArgs {
    const float* x;
    float* residual;  // null: plain rms_norm
    const float* weight;
    float* out;
    int64_t width;
    float eps;
};

enum ActivationKind { kSilu = 0, kGeluTanh = 1, kGelu = 2 };

struct GatedArgs {
    const float* gate_up;
    float* out;
    int64_t width;  // of the output
    int32_t kind;
};

// cos and sin [T, half] = factor * cos, sin (position * inv_freq), the angle in float32.
struct AnglesArgs {
    const int64_t* positions;
    const float* inv_freq;
    float* cos;
    float* sin;
    int64_t half;
    float factor;
};

// Strides count elements. A key lies across its page, one slot beside the next (k_page_dim apart
// are its dimensions), so that keys are vector lanes; a value lies along it. 8-bit pages have one
// f16 scale per slot and head, [num_pages][kv_heads][page_size], slots side by side.
struct RopeArgs {
    float* q;
    const float* k;
    const float* v;
    const float* cos;
    const float* sin;
    const int64_t* slots;
    void* k_pages;
    void* v_pages;
    uint16_t* k_scales;  // null unless the pages are kI8
    uint16_t* v_scales;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, cos_token, sin_token;
    int64_t k_page, k_page_head, k_page_dim, v_page, v_page_head, v_page_slot;
    int64_t scale_page, scale_head;  // of both
    int64_t num_pages;
    int32_t heads, kv_heads, head_dim, half, page_size, page_type;
};

struct AttentionArgs {
    const float* q;
    float* out;  // [T, heads * head_dim]
    const void* k_pages;
    const void* v_pages;
    const uint16_t* k_scales;  // as in RopeArgs
    const uint16_t* v_scales;
    const int32_t* query_start;
    const int32_t* context_len;
    const int32_t* page_table;
    const float* sinks;  // null: none
    uint8_t* shared;     // of attention alone, zero when allocated; set by the engine
    int64_t q_token, q_head, table_width;
    int64_t k_page, k_page_head, k_page_dim, v_page, v_page_head, v_page_slot;
    int64_t scale_page, scale_head;
    int64_t num_pages, tokens;  // tokens: rows of q and out
    int64_t window;             // 0: none
    int32_t requests;           // filled by plan_attention
    int32_t heads, kv_heads, head_dim, page_size, page_type;
    float scale, softcap;   // softcap 0: none
    int32_t query_tile;     // tokens of a query tile; filled by plan_attention
    int32_t run_chunks;     // most chunks of an item of a split request; filled by plan_attention
};

// One instruction-set level's kernels. Ranges are half open; `scratch` is 64-byte aligned.
struct KernelTable {
    void (*quantize)(const LinearArgs*, int64_t m_begin, int64_t m_end);
    void (*linear_int)(const LinearArgs*, int64_t block_begin, int64_t block_end, uint8_t* scratch);
    void (*linear_float)(const LinearArgs*, int64_t block_begin, int64_t block_end,
                         uint8_t* scratch);
    void (*rms_norm)(const NormArgs*, int64_t t_begin, int64_t t_end);
    void (*gated)(const GatedArgs*, int64_t t_begin, int64_t t_end);
    void (*rope)(const RopeArgs*, int64_t t_begin, int64_t t_end);
    void (*attention)(const AttentionArgs*, int64_t item_begin, int64_t item_end,
                      uint8_t* scratch);
    void (*rope_angles)(const AnglesArgs*, int64_t t_begin, int64_t t_end);
};
