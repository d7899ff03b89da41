// The plain structures shared by Python (ctypes), the dispatcher and the kernels.
//
// No C++ types, no torch types: one library serves every Python and torch version. Change anything
// here, in the exported functions or in a packed layout, and kAbiVersion must change with it (also
// in kernels/cpu/library.py), so that a stale library is refused instead of computing nonsense.
#pragma once

#include <stdint.h>

enum { kAbiVersion = 15 };

// Element types of scales, minima, pages and dense values. kLow4 and kHigh4, for scales and minima
// only, are the two halves of one byte (q2_k keeps both in it); kE8M0, for scales, is a power of two.
// kI4, for pages only: element d of a head of D is the low half of byte d, or the high half of byte
// d - D / 2.
// The last three, for scales and zero points only, hold the numbers of 16 rows in fewer bits each: kU4
// in 8 bytes, byte i those of rows i and, above it, i + 8; kU2 in 4 bytes, byte i those of rows i,
// i + 4, i + 8 and i + 12; kI6 in 12: the low 4 bits of all, then their high 2 (q3_k's; minus 32).
enum ElementType {
    kF16 = 0,
    kBF16 = 1,
    kF32 = 2,
    kU8 = 3,
    kI8 = 4,
    kE4M3 = 5,
    kE5M2 = 6,
    kLow4 = 7,
    kHigh4 = 8,
    kE8M0 = 9,
    kI4 = 10,
    kU2 = 11,
    kU4 = 12,
    kI6 = 13
};

// How the codes of a weight lie in its file: one bit stream per row, or ggml's blocks.
// The blocks from kQ4_0 on have codes that move in words (sources.hpp), with one scale for 32 values;
// kIQ4XS and those before kQ4_0 are blocks of 256 with two levels of scales.
enum SourceKind {
    kStream = 0,
    kQ4K = 1,
    kQ5K = 2,
    kQ6K = 3,
    kQ2K = 4,
    kQ3K = 5,
    kQ4_0 = 16,
    kQ4_1 = 17,
    kQ5_0 = 18,
    kQ5_1 = 19,
    kQ8_0 = 20,
    kIQ4NL = 21,
    kMXFP4 = 22,
    kIQ4XS = 23
};

// What every exported function returns.
// kBadIndex: a token or page id, row, slot or length points outside of its tensor.
enum Status { kOk = 0, kOutOfMemory = 1, kClosed = 2, kUnknownOp = 3, kBadIndex = 4 };

enum { kRows = 16, kDepth = 32 };

// Matrix products hand out strips of two row blocks: a broadcast activation meets both.
enum { kStrip = 2, kStripRows = kStrip * kRows };

// How the file of a weight wants its inputs rounded (kernels/reference/fake_quantize.py). kPlainScale and
// those after it make a scale of the values it is for.
enum InputCodes { kAsTheyAre = 0, kIntCodes = 1, kE4M3Codes = 2, kE2M1Codes = 3 };
enum ScaleRule { kStaticScale = 0, kPlainScale = 1, kMxScale = 2, kPowerScale = 3, kNvScale = 4 };

struct Inputs {
    int32_t codes;      // InputCodes
    int32_t rule;       // ScaleRule
    int32_t bits;       // of kIntCodes
    int32_t symmetric;  // no zero but that of a static scale
    int64_t group;      // values that share a scale, 1..k
    float scale, zero;  // static ones
    float factor;       // of kNvScale
    float limit;        // of the magnitudes a scale is made of
};

// A packed weight. Rows come in blocks of 16, k in blocks of 32; one tile of 16 x 32 codes is
// `bits * 64` bytes (planes.hpp). The tiles of a strip's two blocks take turns, so that a strip is
// one stream of memory; a last block alone has its tiles in a row. Everything that belongs to a row
// is interleaved 16-fold: scale[row block][group][row in block]. A tile unit is 16 or 32 k that
// share their scale.
//
//   value = (code - zero) * scale - minus      scale = super_scale * scale   where there is one
//   value = table[code] * scale                where there is a table
//
// Integer products take a table's entries as 8 bits: table[i] ~ (steps[i] - 128) * step.
//
// With a scale_table the scale is scale_table[scale] * super_scale + scale_offset[row], and super_scale
// runs on over the ends of rows: one for every `super_units` scales, a power of two, without padding.
//
// Where `unit` is 1 every k has scales of its own, those of row n being of n % scale_rows: scale, zeros
// and minus are [k][scale_rows]. Such weights are multiplied as floats only.
//
// `dense` weights have no codes: values[row block][k][row in block] in `scale_type`, multiplied by
// a scale[row block / scale_blocks][k / group_units][row in block] of super_type where there is one
// (unit is 1).
struct Weight {
    int64_t n, k;
    int64_t row_blocks, k_blocks;
    int32_t dense;         // 1: `codes` holds plain values of type scale_type
    int32_t bits;          // 2..8; with a table 1, 3 or 4
    int32_t source;        // SourceKind
    int32_t flip;          // 1: codes are stored with the top bit flipped (two's complement source)
    int32_t unit;          // 16 or 32; 1: see above
    int32_t group_units;   // units that share one scale
    int32_t super_units;   // units that share one super_scale; see scale_table
    int32_t scale_blocks;  // row blocks of a dense weight that share their scales
    int32_t scale_type, minus_type, zeros_type;
    float zero;            // used where `zeros` is null; includes the 128 of a flipped code or a step
    int32_t super_type;    // kF16 or kF32, of super_scale; of a dense weight's scale kF32 or kE8M0
    float step;
    uint8_t steps[16];
    int64_t groups, supers;
    int64_t scale_rows;    // where unit is 1
    uint8_t* codes;
    const void* scale;
    const void* minus;        // may be null
    const void* zeros;        // of zeros_type, which may be a float; may be null
    const void* super_scale;  // may be null
    const uint16_t* super_minus;  // f16; may be null
    const float* table;       // 16; may be null
    const float* scale_table;  // 256: what the bytes of `scale` mean; may be null
    const float* scale_offset;
    Inputs inputs;
};

// The tiles of a row block, `step` bytes apart.
struct Tiles {
    uint8_t* first;
    int64_t step;
};

static inline Tiles tiles_of(const Weight* w, int64_t block) {
    const int64_t tile = w->bits * 64;
    const bool paired = (block | 1) < w->row_blocks;
    uint8_t* strip = w->codes + block / kStrip * kStrip * w->k_blocks * tile;
    return {paired && block % kStrip ? strip + tile : strip, paired ? kStrip * tile : tile};
}

// Packed weights that lie in a mapped file (file_parts.hpp).
struct FilePart {
    uint8_t* begin;
    int64_t bytes;
    int64_t whole;   // 1: a product reads all of it; of a mixture's experts it reads some
    FilePart* next;  // what was multiplied with after it the last time; the library writes it
};

// 32 activations rounded to 8 bits: x ~ scale * q. One record, so that a row is one pointer.
struct Rounded {
    int8_t q[kDepth];
    float scale;
    int32_t sum;      // of q
    int32_t half[2];  // sum of q[0..15] and q[16..31]
};

struct Activations {
    int64_t k_blocks;
    float* values;    // [M][k], of weights in floats whose inputs are rounded; else null
    Rounded* blocks;  // [M][planes][k_blocks]
    uint32_t* rest;   // [M][chunks of k]: a bit for each block of the chunk that is rounded twice
};

struct LinearArgs {
    const Weight* w;
    const float* x;   // [m, k]
    float* out;       // [m, n], rows out_stride apart
    int64_t out_stride;
    int32_t exact;    // fp32 on the dequantized values
    int32_t planes;   // 2: blocks that 8 bits do not fit are sums of two rounded ones
    int64_t m;        // rows; filled by the executor
    Activations act;  // filled by the executor
    const int32_t* source;  // row m is row source[m] of x; null: row m
    FilePart* file;         // what of the weight lies in a file; null: nothing
    const FilePart* done;   // the part before, for this product to hand back; filled by the executor
};

// out[t] = dequantized row ids[t] of the weight.
struct EmbeddingArgs {
    const Weight* w;
    const int64_t* ids;
    float* out;
    FilePart* file;  // as in LinearArgs
};

// Row t of x is its (t / inner, t % inner) one: heads of a wider projection need no copy.
struct NormArgs {
    const float* x;
    float* residual;  // null: plain rms_norm; contiguous, like out
    const float* weight;
    float* out;
    int64_t width;
    int64_t inner, outer_stride, inner_stride;
    float eps;
};

// kClampedSwiglu is gpt-oss': gate * sigmoid(1.702 gate) * (up + 1), gate at most 7, up within +-7.
enum ActivationKind { kSilu = 0, kGeluTanh = 1, kGelu = 2, kClampedSwiglu = 3 };

struct GatedArgs {
    const float* gate_up;
    float* out;
    int64_t width;  // of the output
    int32_t kind;
};

// One row of `width` floats at a time.
enum MapKind {
    kMapZero = 0,     // x = 0
    kMapAdd = 1,      // x += other, row by row
    kMapBias = 2,     // x += other, one vector for all rows
    kMapScale = 3,    // x *= factor
    kMapSoftcap = 4,  // x = factor * tanh(x / factor)
};

struct MapArgs {
    float* x;
    const float* other;
    int64_t width;
    float factor;
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

// out[t] = x[rows[t]], `width` floats.
struct SelectArgs {
    const float* x;
    const int64_t* rows;
    float* out;
    int64_t width;
    int64_t size;  // rows of x
};

// out[t][k] = x[t][order[k]]; back: out[t][order[k]] = x[t][k]. `width` floats a row, order a
// permutation of 0..width - 1. out is not x.
struct TakeArgs {
    const float* x;
    const int32_t* order;
    float* out;
    int64_t width;
    int32_t back;
};

// Where every token of a step stands, from what a request is: the last query_len tokens of
// context_len, whose keys lie in the request's row of the page table.
struct PlacesArgs {
    const int32_t* query_start;
    const int32_t* context_len;
    const int32_t* page_table;
    int64_t* positions;
    int64_t* slots;
    int64_t table_width;
    int64_t tokens;  // room in positions and slots
    int32_t page_size;
};

// Keys or values in pages: [num_pages][kv_heads][page_size][head_dim] of `type`; strides count
// elements, for kI4 bytes. A key lies across its page, one slot beside the next, so that keys are
// vector lanes: `step` apart are its dimensions. A value lies along it: `step` apart are the slots.
// Codes of 8 and 4 bits have a scale per slot and `group` dimensions: row (head * groups + g) of
// the page's scales, slots side by side; value = scale * (code - zero). It is an f16, and zero 0, or
// for kI4 two bytes: the upper 8 bits of an f16 without sign, and then zero in sixteenths.
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

// The page ids of a ladder: the level in the high bits, the first being 0.
enum { kMaxLevels = 3, kLevelShift = 28 };
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
    PageLevel pages;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, cos_token, sin_token;
    int64_t num_pages;
    int32_t heads, kv_heads, head_dim, half, page_size;
};

struct AttentionArgs {
    const float* q;
    float* out;  // [T, heads * head_dim]
    PageLevel levels[kMaxLevels];  // of the same memory, each with twice the pages of the one before
    const int32_t* query_start;
    const int32_t* context_len;
    const int32_t* page_table;
    const float* sinks;  // null: none
    uint8_t* shared;     // of attention alone, zero when allocated; set by the engine
    int64_t q_token, q_head, table_width;
    int64_t num_pages, tokens;  // of the first level; tokens: rows of q and out
    int64_t window;             // 0: none
    int32_t requests;           // filled by plan_attention
    int32_t heads, kv_heads, head_dim, page_size;
    int32_t num_levels;     // with more than one, a page has 128 slots
    float scale, softcap;   // softcap 0: none
    int32_t query_tile;     // tokens of a query tile; filled by plan_attention
    int32_t run_chunks;     // most chunks of an item of a split request; filled by plan_attention
};

// A page written as one of another type; both lie mixed. One row for each slot of each head of each
// layer.
struct RecodeArgs {
    const PageLevel* source;  // one for each layer
    const PageLevel* target;
    int64_t page, to_page;
    int32_t kv_heads, head_dim, page_size;
};

// How one row's token is chosen; kernels/sampling.py says what each number means. Temperature 0 is
// the argmax, whatever the others are.
struct Draw {
    double temperature, min_p, typical_p, top_p;
    double xtc_threshold;  // negative: off
    double mirostat_mu;    // NaN: off
    int64_t top_k;         // 0: off
    double uniform;        // in [0, 1)
};

// One way in which the logits of a row change: kernels/sampling.py.
enum ChangeKind { kAdd = 0, kPenalize = 1, kForbid = 2, kForce = 3 };

struct Change {
    const int32_t* ids;   // distinct; those outside of the row change nothing
    const float* values;  // kAdd: what is added; kPenalize: how often the id is in the output
    int64_t count;
    float repetition, frequency, presence;  // kPenalize
    int32_t kind;
};

// Bit i % 32 of word i / 32: token i may be drawn. Those after the last word may not.
struct Mask {
    const uint32_t* words;  // null: all may
    int64_t count;
};

struct Shape {
    Mask mask;
    const Change* const* changes;  // in this order, after the masks
    int64_t count;
};

struct RowShape {
    const Shape* shape;  // null: none
    Mask mask;
};

struct SampleArgs {
    const float* logits;
    const Draw* draws;       // null: the argmax of every row
    const RowShape* shapes;  // null: no row has one
    int64_t* tokens;
    float* best;            // the changed row's maximum; the row's own unless that is finite
    double* probabilities;  // the token's share of what could be drawn; 1 where there is no draw, 0
                            // where the row was finite before its changes and its maximum is not now
    int64_t width, stride;
};

// The k best of `experts` logits of each token, best first, and their weights: a softmax over those
// (normalized) or the part they have in the softmax over all.
struct RouteArgs {
    const float* logits;  // [T, experts]
    int32_t* chosen;      // [T, k]
    float* weights;       // [T, k]
    int64_t experts;
    int32_t k;
    int32_t normalized;
};

// The rows of a step by expert: one for each token and each of its k experts.
struct GroupArgs {
    const int32_t* chosen;  // [rows], token by token
    int32_t* places;        // [rows]: where the row of a choice is
    int32_t* tokens;        // [rows], by expert: whose row it is
    int32_t* owners;        // [rows], by expert: the expert's own number
    int32_t* starts;        // [count + 1]: the first row of an expert
    int32_t* active;        // [count + 1]: the experts that have rows; last, how many there are
    int64_t count;          // experts
    int64_t rows;           // filled by the executor
    int32_t k;
};

// One matrix per expert, all of one shape and format; `each` has the rows of all of them.
struct ExpertsArgs {
    LinearArgs each;  // w: the first expert's
    const Weight* const* experts;
    const int32_t* starts;
    const int32_t* active;
    int64_t count;
    int32_t k;
};

// x[row] += bias[owners[row]]
struct BiasArgs {
    float* x;
    const float* bias;  // [experts, width]
    const int32_t* owners;
    int64_t width;
};

// out[t] = the sum of weights[t][j] * x[places[t][j]], in the order of j.
struct CombineArgs {
    const float* x;
    const float* weights;
    const int32_t* places;
    float* out;
    int64_t width;
    int32_t k;
};

// The operators. Most are row-wise: row t of the result depends on row t of the arguments alone.
// Not so kOpAttention, kOpSample, kOpGroup and, but for the rounding of their activations, kOpLinear
// and kOpExperts; kOpCombine reads rows of other tokens. kOpPlaces prepares the step for the others.
enum OpKind {
    kOpEmbedding = 0,
    kOpLinear = 1,
    kOpNorm = 2,
    kOpGated = 3,
    kOpMap = 4,
    kOpAngles = 5,
    kOpSelect = 6,
    kOpRope = 7,
    kOpAttention = 8,
    kOpPlaces = 9,
    kOpSample = 10,
    kOpTake = 11,
    kOpRoute = 12,
    kOpGroup = 13,
    kOpExperts = 14,
    kOpBias = 15,
    kOpCombine = 16,
    kOpRecode = 17,
};

// What a step counts; an operator runs over one of these (times `per` for row-wise ones).
enum Count { kTokens = 0, kOutputs = 1, kRequests = 2, kCounts = 3 };

// Items of a phase for one thread. It usually goes on with those up to `reach`, and often comes from
// those before `begin` (then it is resumed): what one call asks memory for may serve the next.
struct Share {
    int64_t begin, end, reach;
    int32_t resumed;
    // What the thread will read first in a later phase: asked for when `reach` is; null: unknown.
    const uint8_t *then = nullptr, *then_end = nullptr;
};

// One instruction-set level's kernels. Ranges are half open; `scratch` is 64-byte aligned.
struct KernelTable {
    void (*quantize)(const LinearArgs*, int64_t m_begin, int64_t m_end);
    void (*linear_int)(const LinearArgs*, const Share* strips, uint8_t* scratch);
    void (*linear_float)(const LinearArgs*, const Share* strips, uint8_t* scratch);
    void (*rms_norm)(const NormArgs*, int64_t t_begin, int64_t t_end);
    void (*gated)(const GatedArgs*, int64_t t_begin, int64_t t_end);
    void (*map)(const MapArgs*, int64_t t_begin, int64_t t_end);
    void (*rope)(const RopeArgs*, int64_t t_begin, int64_t t_end);
    void (*attention)(const AttentionArgs*, const Share* items, uint8_t* scratch);
    void (*recode)(const RecodeArgs*, int64_t row_begin, int64_t row_end);
    void (*rope_angles)(const AnglesArgs*, int64_t t_begin, int64_t t_end);
    void (*sample)(const SampleArgs*, int64_t row_begin, int64_t row_end, uint8_t* scratch);
    int64_t (*sample_scratch)(int64_t width);  // bytes
};
