// The plain structures shared by Python (ctypes), the dispatcher and the kernels.
//
// They use no C++ and no torch types, so one library serves every Python and torch version. When
// anything here, in the exported functions or in a packed layout changes, kAbiVersion must change too
// (also in kernels/cpu/library.py): Python then rejects a stale library instead of computing nonsense.
// abi_table.cpp lists the structures and constants; tests/kernels/test_native_abi.py compares both
// sides.
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { kAbiVersion = 44 };

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

// Element types of scales, minima, pages and dense values; those of pages are also in
// kernels/kv_types.py (cpu_element). kLow4 and kHigh4, for scales and minima only, are the two halves
// of one byte (q2_k stores both there). kE8M0, for scales, is a power of two.
// kI4, for pages only: element d of a head of D is the low half of byte d, or the high half of byte
// d - D / 2.
// The last three, for scales and zero points only, pack the numbers of 16 rows into fewer bits. kU4
// takes 8 bytes: byte i holds row i in its low half and row i + 8 in its high half. kU2 takes 4 bytes:
// byte i holds rows i, i + 4, i + 8 and i + 12. kI6 takes 12 bytes: the low 4 bits of all rows, then
// their high 2 bits (q3_k; minus 32).
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

// How a file stores the codes of a weight: one bit stream per row, or ggml's blocks.
// The codes of the blocks from kQ4_0 on are moved as words (sources.hpp), with one scale for 32 values.
// kIQ4XS and the blocks before kQ4_0 have 256 values and two levels of scales.
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
// kRankLost: another rank has ended, gave up, or did not answer in time.
// kDamaged: a weight of a file does not have the sums that were written with it.
// kUnreadable: an expert cannot be read from its file.
enum Status {
    kOk = 0,
    kOutOfMemory = 1,
    kClosed = 2,
    kUnknownOp = 3,
    kBadIndex = 4,
    kRankLost = 5,
    kDamaged = 6,
    kUnreadable = 7,
    kStatusCount = 8
};

// A tile of codes: 16 rows by 32 k.
enum { kTileRows = 16, kTileDepth = 32 };
// Bytes of a tile per bit of its codes, and of a tile expanded to one byte per code.
enum { kTileBytesPerBit = kTileRows * kTileDepth / 8, kByteTile = kTileRows * kTileDepth };
static_assert(kTileBytesPerBit == 64, "one bit plane of a tile is one cache line");
static_assert(kTileDepth % 16 == 0, "a tile is whole subgroups of 16 or 32 k");

// A matrix product is divided into strips of two row blocks: both use the same broadcast activation.
enum { kStripBlocks = 2, kStripRows = kStripBlocks * kTileRows };
static_assert(kStripBlocks == 2, "tiles_of pairs the blocks b and b ^ 1");

// A table of codes has 16 entries, one per 4-bit code; a table of 8-bit scales 256.
enum { kTableSize = 16, kScaleTableSize = 256 };

// How activations are quantized where the weight's file says so (kernels/reference/fake_quantize.py).
// kPlainScale and the rules after it compute a scale from the values it is for.
enum ActivationCodes { kUnquantized = 0, kIntCodes = 1, kE4M3Codes = 2, kE2M1Codes = 3 };
enum ScaleRule {
    kStaticScale = 0,
    kPlainScale = 1,
    kMxScale = 2,
    kPowerScale = 3,
    kNvScale = 4,
    kAbsmaxScale = 5
};

struct ActivationScheme {
    int32_t codes;      // ActivationCodes
    int32_t rule;       // ScaleRule
    int32_t bits;       // of kIntCodes
    int32_t symmetric;  // 1: no zero point, except that of a static scale
    int64_t group;      // values that share a scale, 1..k
    float scale, zero;  // static
    float factor;       // of kNvScale
    float limit;        // largest magnitude that a scale is computed from
};

// The sums of a weight in a mapped file, which are compared before its first use (weight_check.hpp).
// `next`, `done` and `state` are written by the library, by several threads.
struct WeightCheck {
    const uint8_t* begin;
    int64_t bytes;
    int64_t piece;         // bytes that have a sum, a multiple of a page; the last piece may be shorter
    const uint64_t* sums;
    const uint8_t* end;    // of the file: what is read ahead
    int64_t next, done;    // pieces that threads have taken, and compared
    int32_t state;         // CheckState
};
enum CheckState { kUnchecked = 0, kRight = 1, kWrong = 2 };

// A packed weight. Rows come in blocks of 16, k in blocks of 32; one tile of 16 x 32 codes is
// `bits * 64` bytes (bit_planes.hpp). The tiles of a strip's two blocks alternate, so that a strip is
// one stream of memory; a last block without a partner has its tiles in a row. Everything that belongs
// to a row is interleaved 16-fold: scale[row block][group][row in block]. A subgroup is the 16 or 32 k
// of a tile that share a scale; a group is one or more subgroups.
//
//   value = (code - zero) * scale - minus      scale = super_scale * scale   where there is one
//   value = table[code] * scale                where there is a table
//
// Integer products use 8-bit entries of the table: table[i] ~ (int8_table[i] - 128) * int8_table_scale.
//
// With a scale_table the scale is scale_table[scale] * super_scale + scale_offset[row]. super_scale
// continues across rows without padding: one for every `subgroups_per_super` scales, a power of two.
//
// Where `subgroup` is 1 every k has its own scales; row n uses those of n % scale_rows: scale, zeros
// and minus are [k][scale_rows]. Such weights are multiplied as floats only.
//
// `dense` weights have no codes: values[row block][k][row in block] in `scale_type`, multiplied by
// scale[row block / scale_blocks][k / subgroups_per_group][row in block] of super_type where there is
// one (subgroup is 1).
struct Weight {
    int64_t n, k;
    int64_t row_blocks, k_blocks;
    int32_t dense;         // 1: `codes` holds plain values of type scale_type
    int32_t bits;          // 2..8; with a table 1, 3 or 4
    int32_t source;        // SourceKind
    int32_t flip;          // 1: codes are stored with the top bit flipped (two's complement source)
    int32_t subgroup;      // k of a subgroup: 16 or 32; 1: see above
    int32_t subgroups_per_group;  // subgroups that share one scale
    int32_t subgroups_per_super;  // subgroups that share one super_scale; see scale_table
    int32_t scale_blocks;  // row blocks of a dense weight that share their scales
    int32_t scale_type, minus_type, zeros_type;
    float zero;            // used where `zeros` is null; includes the 128 of a flipped code or a table
    int32_t super_type;    // of super_scale kF16 or kF32; of a dense weight's scale kF32 or kE8M0
    float int8_table_scale;
    uint8_t int8_table[kTableSize];
    int64_t groups, supers;
    int64_t scale_rows;    // where subgroup is 1
    uint8_t* codes;
    const void* scale;
    const void* minus;        // may be null
    const void* zeros;        // of zeros_type, which may be a float; may be null
    const void* super_scale;  // may be null
    const uint16_t* super_minus;  // f16; may be null
    const float* table;        // [kTableSize]; may be null
    const float* scale_table;  // [kScaleTableSize]: what the bytes of `scale` mean; may be null
    const float* scale_offset;
    ActivationScheme scheme;
    WeightCheck* check;  // may be null
};

// The tiles of a row block, `step` bytes apart.
struct Tiles {
    uint8_t* first;
    int64_t step;
};

static inline Tiles tiles_of(const Weight* w, int64_t block) {
    const int64_t tile = w->bits * kTileBytesPerBit;
    const bool paired = (block | 1) < w->row_blocks;
    uint8_t* strip = w->codes + block / kStripBlocks * kStripBlocks * w->k_blocks * tile;
    return {paired && block % kStripBlocks ? strip + tile : strip, paired ? kStripBlocks * tile : tile};
}

// Packed weights in a mapped file (file_parts.hpp).
struct FilePart {
    uint8_t* begin;
    int64_t bytes;
    int64_t whole;   // 1: a product reads all of it; 0: it reads some of the experts in it
    FilePart* next;  // the part that was used after this one the last time; written by the library
};

// 32 activations quantized to 8 bits: x ~ scale * q. Codes, scale and sums are one record, so that one
// pointer addresses a row.
struct Q8Block {
    int8_t q[kTileDepth];
    float scale;
    int32_t sum;      // of q
    int32_t half[2];  // sum of q[0..15] and q[16..31]
};
static_assert(sizeof(Q8Block) == kTileDepth + 16, "no padding: rows of blocks are one stream");
static_assert(sizeof(Q8Block::half) / sizeof(int32_t) == kTileDepth / 16, "a sum per subgroup of 16");

struct Activations {
    int64_t k_blocks;
    float* values;       // [M][k]: quantized activations as floats, for float products; else null
    Q8Block* blocks;     // [M][terms][k_blocks]
    uint32_t* residual;  // [M][k panels]: a bit for each block of the panel that has a second term
    int16_t* words;  // [M][terms][k_blocks][32]: codes of blocks, of each four 0, 2, 1, 3; may be null
};

struct LinearArgs {
    const Weight* w;
    const float* x;   // [m, k]
    float* out;       // [m, n], rows out_stride apart
    int64_t out_stride;
    int32_t exact;    // fp32 on the dequantized values
    int32_t terms;    // 2: blocks that 8 bits fit badly are sums of two Q8Blocks
    int64_t m;        // rows; set by the runtime
    Activations act;  // set by the runtime
    const int32_t* source;  // row m is row source[m] of x; null: row m
    FilePart* file;         // the part of the weight that is in a file; null: none
    const FilePart* done;   // the previous part, whose pages this product releases; set by the runtime
};

// out[t] = dequantized row ids[t] of the weight.
struct EmbeddingArgs {
    const Weight* w;
    const int64_t* ids;
    float* out;
    FilePart* file;  // as in LinearArgs
    int64_t first;   // the weight has the rows from here on of a matrix of
    int64_t whole;   // this many; the others give zeros. 0: it has all rows
    // Rows in the open file `descriptor` from byte `offset` on, `row_bytes` apart, in place of the weight's
    // tiles; row_bytes 0: those. Then `w` describes kStoredColumns of the `width` columns of one row.
    int64_t offset, row_bytes, width;
    int32_t descriptor;
};
enum { kStoredColumns = 256 };  // of a row that are decoded at a time: a k-quant block

// Row t of x is row (t / inner, t % inner): the heads of a wider projection need no copy.
struct NormArgs {
    const float* x;
    float* residual;      // is added first and gets the sum; null: none; contiguous, like out
    const float* weight;  // null: 1
    const float* bias;    // null: 0
    float* out;
    int64_t width;
    int64_t inner, outer_stride, inner_stride;
    int64_t weight_stride;  // row (i, j) has the weights j * weight_stride on
    float eps;
    int32_t centred;      // 1: LayerNorm, 0: RMSNorm
};

// kClampedSwiglu, of gpt-oss: gate * sigmoid(1.702 gate) * (up + 1), gate at most 7, up within +-7.
// It always has a gate. kRelu2: relu(x)^2.
enum ActivationKind {
    kSilu = 0,
    kGeluTanh = 1,
    kGelu = 2,
    kClampedSwiglu = 3,
    kRelu = 4,
    kRelu2 = 5,
    kXielu = 6,
    kActivationKinds = 7
};

// act(x), in rows of `width`, or with `gated` act(gate) * up of rows of gate, then up. Without a gate out
// may be x.
struct ActivationArgs {
    const float* x;
    float* out;
    int64_t width;  // of the output
    const int32_t* used;  // the number of rows that have values; null: all
    int32_t kind;
    int32_t gated;
    float numbers[4];  // of kXielu: alpha_p, alpha_n, beta and eps
};

// One row of `width` floats at a time.
enum MapKind {
    kMapZero = 0,     // x = 0
    kMapAdd = 1,      // x += other, row by row
    kMapBias = 2,     // x += other, one vector for all rows
    kMapScale = 3,    // x *= factor
    kMapSoftcap = 4,  // x = factor * tanh(x / factor)
    kMapClamp = 5,    // x within +-factor
    kMapKinds = 6,
};

struct MapArgs {
    float* x;
    const float* other;
    int64_t width;
    float factor;
    int32_t kind;
};

// Row t of x, `gates` runs of `width` numbers each: run g is multiplied by the function of gate[t][g].
enum GateKind { kGateSigmoid = 0, kGateSoftplus = 1, kGateSilu = 2, kGateLinear = 3, kGateKinds = 4 };

struct GateArgs {
    float* x;
    const float* gate;
    int64_t width, gates;
    int64_t gate_stride;  // from one row of gate to the next
    int32_t kind;
};

// cos and sin [T, half] = factor * cos, sin (position * inv_freq), the angle in float32. With `axes`
// [half] frequency i turns by the position along axis n = axes[i], positions[n * axis_stride + t], to
// which shifts[n * shift_stride + t] is added; null: nothing is.
struct AnglesArgs {
    const int64_t* positions;
    const float* inv_freq;
    float* cos;
    float* sin;
    const int32_t* axes;
    const int32_t* shifts;
    int64_t half, axis_stride, shift_stride;
    float factor;
};

// x[t] becomes rows[index[t]], or with `add` their sum, `width` floats; not where index[t] is -1.
struct PlaceRowsArgs {
    float* x;
    const float* rows;
    const int32_t* index;
    int64_t width, row_stride;
    int64_t size;  // rows of `rows`
    int32_t add;
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

// Positions and page slots of all tokens of a step. A request's tokens are the last query_len of
// context_len; its row of the page table names the pages.
struct PlacesArgs {
    const int32_t* query_start;
    const int32_t* context_len;
    const int32_t* page_table;
    int64_t* positions;
    int64_t* slots;
    int64_t table_width;
    int64_t tokens;  // capacity of positions and slots
    int32_t page_size;
};

// Keys or values in pages: [num_pages][kv_heads][page_size][head_dim] of `type`; strides count
// elements, for kI4 bytes. Keys are transposed: neighbouring elements belong to neighbouring slots, so
// that keys are vector lanes, and the dimensions of a key are `step` apart. Values are not: the slots
// are `step` apart. Floats that are further apart than a value is long have room for whole vectors: up to
// kHeadPadding numbers of arbitrary contents are read after a value, also after the last one.
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

// Page ids of a tiered KV cache have the tier in the high bits; the first tier is 0.
enum { kMaxLevels = 3, kLevelShift = 28 };
static_assert(kMaxLevels <= 1 << (31 - kLevelShift), "the level is above the page, below the sign");
// Head sizes of the kernels that read or write KV pages: multiples of kHeadDimStep up to kMaxHeadDim.
enum { kMaxHeadDim = 576, kHeadDimStep = 8 };
// Dimensions that share a scale: integer products of so many are exact (attention_integers.hpp).
enum { kMaxScaleGroup = 512 };
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
};

// Writes a page as one of another type; both are mixed. One row for each slot of each head of each
// layer.
struct RecodeArgs {
    const PageLevel* source;  // one for each layer
    const PageLevel* target;
    int64_t page, to_page;
    int32_t kv_heads, head_dim, page_size;
};

// How one row's token is chosen; kernels/sampling.py explains the numbers. Temperature 0 is the
// argmax, whatever the others are.
struct Draw {
    double temperature, min_p, typical_p, top_p;
    double xtc_threshold;  // negative: off
    double mirostat_mu;    // NaN: off
    int64_t top_k;         // 0: off
    double uniform;        // in [0, 1)
};

// One way in which the logits of a row change: kernels/sampling.py.
enum ChangeKind { kAdd = 0, kPenalize = 1, kForbid = 2, kForce = 3, kChangeKinds = 4 };

struct Change {
    const int32_t* ids;   // distinct; ids outside of the row change nothing
    const float* values;  // kAdd: what is added; kPenalize: how often the id is in the output
    int64_t count;
    float repetition, frequency, presence;  // kPenalize
    int32_t kind;
};

// Bit i % 32 of word i / 32: token i may be drawn. Tokens after the last word may not.
struct Mask {
    const uint32_t* words;  // null: all tokens may be drawn
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

// The masks of the output rows of one request, computed by its grammar matcher: one for its next
// token, then one after each draft token.
struct MaskTask {
    void* matcher;
    uint32_t* masks;         // count masks, one after another
    const uint32_t* drafts;  // count - 1 tokens
    int32_t count;
    int32_t also;    // a token that the first mask allows too; -1: none
    int32_t failed;  // set to 1 if the matcher reports an error; its masks then allow nothing
};

// The functions of the matchers' library (llguidance's C interface); all but validate return 0 or, on an
// error, something else.
struct MaskTasks {
    int32_t (*compute)(void* matcher, uint32_t* mask, size_t bytes);
    int32_t (*validate)(void* matcher, const uint32_t* tokens, size_t count);  // how many are allowed
    int32_t (*consume)(void* matcher, const uint32_t* tokens, size_t count);
    int32_t (*rollback)(void* matcher, size_t count);
    bool (*stopped)(const void* matcher);  // whether the structure is complete
    int64_t words;  // of a mask
    int64_t count;
    MaskTask* tasks;
    mutable int64_t waited_ns;  // the longest that a thread waited for them in the last run
};

struct SampleArgs {
    const float* logits;
    const Draw* draws;       // null: the argmax of every row
    const RowShape* shapes;  // null: no row has a shape
    const MaskTasks* masks;  // null: none; computed before any row is drawn
    int64_t* tokens;
    float* best;            // the changed row's maximum; the row's own unless that is finite
    double* probabilities;  // the token's share of the tokens that could be drawn; 1 without a draw, 0
                            // if the changes made the maximum of a finite row not finite
    int64_t width, stride;
};

// What makes scores of logits: `GATES` of kernels/route_rule.py, which says what each one is.
enum RouteGate {
    kRouteSoftmax = 0,
    kRouteSigmoid = 1,
    kRouteSqrtSoftplus = 2,
    kRouteSparse = 3,
    kRouteKinds = 4,
};
enum { kMaxScored = 1024 };  // experts, unless the rule is a softmax alone

// The k best of `experts` experts of each token, best first, and their weights: `RouteRule` of
// kernels/route_rule.py.
struct RouteArgs {
    const float* logits;  // [T, experts]
    const float* bias;    // [experts], added to the scores for the choice alone; null: none
    const float* factors;  // [experts], of the weights; null: none
    int32_t* chosen;      // [T, k]
    float* weights;       // [T, k]
    int64_t experts;
    int32_t k;
    int32_t gate;  // RouteGate
    int32_t normalized;
    int32_t groups, groups_used, group_best;
    float epsilon, least, scale;
    float reach;  // twice the rule's jitter
};

// The rows of a step in the order of experts: one row for each token and each of its k experts.
//
// With several ranks that have whole experts, `chosen` counts the experts of all of them. The n-th row
// of an expert since the counts in `load` began goes to the (n % copies)-th rank that has a copy. A rank
// places only its own rows; the buffers have room for all, so the last ones stay unused.
struct GroupArgs {
    const int32_t* chosen;  // [rows], token by token
    int32_t* places;        // [rows]: the row of each choice; -1: at another rank
    int32_t* tokens;        // [rows], by expert: the token of the row
    int32_t* owners;        // [rows], by expert: the expert of the row
    int32_t* starts;        // [count + 1]: the first row of each expert
    int32_t* active;        // [count + 1]: the experts that have rows; last, their number
    int64_t count;          // experts that this rank has
    int64_t rows;           // set by the runtime
    const int32_t* first;   // [all experts + 1]: where each one's part of `ranks` begins; null: one rank
    const int32_t* ranks;   // the ranks that have a copy of each expert, one expert after another
    const int32_t* local;   // [all experts]: their numbers on this rank, if it has them
    int32_t* servers;       // [rows]: the rank that computes each choice
    int64_t* load;          // [all experts]: the rows so far
    int32_t k, rank;
};

// One matrix per expert, all of one shape and format; `each` has the rows of all of them.
struct ExpertsArgs {
    LinearArgs each;  // w: the first expert's
    const Weight* const* experts;
    const int32_t* starts;
    const int32_t* active;
    int64_t count;
    int32_t k;
    int32_t group;             // of `cache`
    class ExpertCache* cache;  // experts that may be in a file (expert_cache.hpp); null: all are in memory
};

// Before the products of a group of experts that may be in a file: which ones it needs. `chosen`: which
// ones it will probably need; then there are neither `active` nor `starts`.
struct FetchArgs {
    class ExpertCache* cache;
    int32_t* active;        // as in GroupArgs; those in memory come first then
    const int32_t* starts;
    const int32_t* chosen;  // [rows]; null: the product comes now
    int64_t count;          // experts
    int64_t rows;           // set by the runtime
    int32_t k, group;
};

// What a cache of experts has done. Of the matrices that products needed: `hits` were in memory, `guessed`
// were being read or had been read ahead, `missed` neither.
struct ExpertCounts {
    int64_t hits, guessed, missed;
    int64_t asked_ahead;  // matrices asked for by a guess of the router
    int64_t reads, bytes, reading_ns;
    int64_t waited_ns;    // by threads of products, together
};

// out[t][h] = x[t][h] times the weight of head h. Heads of x are x_head apart, tokens x_token; those of out
// out_head and each.out_stride.
struct HeadsArgs {
    LinearArgs each;  // w: the first head's
    const Weight* const* heads;
    int64_t count, x_token, x_head, out_head;
};

// x[row] += bias[owners[row]]
struct BiasArgs {
    float* x;
    const float* bias;  // [experts, width]
    const int32_t* owners;
    const int32_t* used;  // the number of rows that have values; null: all
    int64_t width;
};

// out[t] = the sum of weights[t][j] * x[places[t][j]], in the order of j, plus sigmoid(gate[t]) * shared[t].
struct CombineArgs {
    const float* x;
    const float* weights;
    const int32_t* places;
    const float* shared;  // [T, width]; null: none
    const float* gate;    // [T]; null: shared as it is
    float* out;
    int64_t width;
    int32_t k;
};

// The same sum where the rows are at several ranks: every rank sends those that it has computed, and
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

enum { kLowUnit = 8 };  // ranks of a factor that lie together

// What an adapter adds to 16-column blocks of a product: scale * b (a x), both factors kF16, kF32 or kI8.
struct LowRankPart {
    // Units of kLowUnit ranks, the last one of what is left: each [k / 16][ranks of the unit][16], of kI8
    // [k / 32][ranks][32]; k is rounded up, the rest zero. Of an embedding [k][rank].
    const void* a;
    const void* b;  // [blocks][rank][16]; of kI8 [blocks][rank / 2, rounded up][16][2]
    const float* scales;  // of kI8: [rank], of the rank's codes in a times those in b; else null
    int64_t rank, first_block, blocks;
    float scale;
    int32_t type;
};

// What is in an adapter slot of one product; count 0: nothing.
struct LowRankSlot {
    const LowRankPart* parts;
    const float* bias;  // [n]; null: none
    int64_t count;
    int64_t ranks;  // of all parts together
};

// Rows of a step with the same adapter slot: rows[first..first + count) of SlotRows.
struct RowGroup {
    int32_t slot, count;
    int64_t first;
};

// The rows of a step that have an adapter, by slot.
struct SlotRows {
    const RowGroup* groups;
    const int32_t* rows;
    int64_t count, total;  // groups, rows
};

// y[t] += what slot slots[t] adds for x[t]; the slots are read when the operator runs.
struct LowRankArgs {
    const float* x;      // [m, k]
    const int64_t* ids;  // [m], instead of x: one-hot rows of an embedding; else null
    float* y;            // [m, n], rows y_stride apart
    const int32_t* slots;  // [m]; -1: none
    const LowRankSlot* table;  // [size]
    int64_t y_stride, size, k, n;
    const SlotRows* rows;  // these and the rest are set by the runtime
    float* low;            // a x of the rows with an adapter, low_stride apart
    int64_t low_stride;
    int64_t units;  // work items of a x
};

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

// The states that the requests of a step begin with and leave: kernels/states.py. The tokens of a request
// are query_start[r]..query_start[r + 1].
struct StateRows {
    const int32_t* query_start;
    const int32_t* initial;     // slot of each request; -1: zeros
    const int32_t* save_start;
    const int32_t* save_token;
    const int32_t* save_slot;
    float* state;
    int64_t slots, slot_step;  // their number; floats from one to the next
    int64_t tokens, saves;     // capacity: of the step's tensors, of save_token and save_slot
    int64_t requests;          // set by the runtime
};

// The most inputs of a convolution, and numbers of a row of a state.
enum { kMaxTaps = 16, kMaxStateDim = 512 };

// out[t] = act(sum over j of weight[:, j] * x[t - taps + 1 + j] + bias) * after[t], x times `before` first.
// A state is [taps - 1][width]: the last inputs.
struct ConvArgs {
    StateRows rows;
    const float* x;
    const float* weight;  // [width][taps]
    const float* bias;    // null: none; so are the next two
    const float* before;
    const float* after;
    float* out;  // [T, width]
    int64_t x_token, before_token, after_token, width;
    int64_t chunks;  // of tokens; set by the runtime
    int32_t taps, silu;
};

// S = e^decay S + k (beta (v - k e^decay S)), out = scale q S, for each token of a head; a state is
// [heads][key_dim][value_dim].
struct DeltaArgs {
    StateRows rows;
    const float *q, *k, *v, *decay, *beta;
    float* out;  // [T, heads, value_dim]
    int64_t q_token, q_head, k_token, k_head, v_token, v_head;
    int64_t decay_token, decay_head, beta_token, beta_head;
    int32_t key_heads, heads, key_dim, value_dim;
    int32_t tiled;       // head h uses the keys of h % key_heads; 0: of h / (heads / key_heads)
    int32_t by_row;      // decay has a number for each row of a state
    int32_t normalized;  // q and k are divided by sqrt(sum of squares + eps)
    int32_t splits;      // parts of the columns of a head; set by the runtime
    float eps, scale;
};

// S = e^(dt a) S + dt x b^T, out = S c + d x, for each token of a head; a state is [heads][width][size].
struct SpaceArgs {
    StateRows rows;
    const float *x, *dt, *a, *b, *c;
    const float* d;  // null: none
    float* out;      // [T, heads, width]
    int64_t x_token, x_head, dt_token, dt_head, b_token, b_group, c_token, c_group;
    int32_t heads, groups, width, size;
    int32_t splits;  // parts of the rows of a head; set by the runtime
};

// out[t] = factor * f(x[t] + bias), f within limits: `width` numbers, one factor for width / factors
// neighbours.
struct RatesArgs {
    const float* x;
    const float* bias;    // null: 0
    const float* factor;  // null: 1
    float* out;
    int64_t x_token, width, factors;
    int32_t kind;  // GateKind
    int32_t limited;
    float low, high;
};

// Row t of x is row (t / heads, t % heads), times f of its gate after an RMSNorm, or before it.
enum NormGate { kNormSilu = 0, kNormSigmoid = 1, kNormGates = 2 };

struct GatedNormArgs {
    const float* x;
    const float* gate;
    const float* weight;  // null: 1
    float* out;           // contiguous
    int64_t width, heads, x_token, x_head, gate_token, gate_head;
    int64_t weight_head;  // a head has the weights from head * weight_head on
    int32_t kind;         // NormGate
    int32_t first;        // the gate comes before the norm
    float eps;
};

// The operators. Most are row-wise: row t of the result depends only on row t of the arguments.
// Exceptions: kOpAttention, kOpConv, kOpDelta, kOpSpace, kOpSample, kOpGroup, kOpFetch, kOpLowRank, and kOpLinear,
// kOpExperts and kOpHeads except for
// quantizing their activations; kOpCombine reads rows of other tokens, kOpExchange,
// kOpTransfer, kOpCombineRanks and kOpGatherRanks those of other ranks. kOpPlaces prepares the step for the others.
enum OpKind {
    kOpEmbedding = 0,
    kOpLinear = 1,
    kOpNorm = 2,
    kOpActivation = 3,
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
    kOpLowRank = 18,
    kOpExchange = 19,
    kOpTransfer = 20,
    kOpCombineRanks = 21,
    kOpGatherRanks = 22,
    kOpGate = 23,
    kOpConv = 24,
    kOpDelta = 25,
    kOpSpace = 26,
    kOpRates = 27,
    kOpGatedNorm = 28,
    kOpHeads = 29,
    kOpFetch = 30,
    kOpPlaceRows = 31,
    kOpKinds = 32,
};

// What a step counts; an operator runs over one of these (row-wise operators: times `per`).
// kGathered: the tokens of all ranks, where each has its own.
enum Count { kTokens = 0, kOutputs = 1, kRequests = 2, kGathered = 3, kCounts = 4 };

// Items of a phase for one thread. The thread usually continues with the items up to `reach`, and
// often comes from the items before `begin` (then `resumed`): one call may prefetch for the next.
struct ItemRange {
    int64_t begin, end, reach;
    int32_t resumed;
    // What the thread will read first in a later phase: prefetched after `reach`; null: unknown.
    const uint8_t *then = nullptr, *then_end = nullptr;
};

// Scratch memory and everything laid out in it starts at a cache line.
enum { kCacheLine = 64 };

// The kernels of one instruction-set level. Ranges are half open; `scratch` is 64-byte aligned.
struct KernelTable {
    bool wide_in_words;  // products of wide codes need Activations::words
    void (*quantize)(const LinearArgs*, int64_t m_begin, int64_t m_end);
    void (*linear_int)(const LinearArgs*, const ItemRange* strips, uint8_t* scratch);
    void (*linear_float)(const LinearArgs*, const ItemRange* strips, uint8_t* scratch);
    void (*norm)(const NormArgs*, int64_t t_begin, int64_t t_end);
    void (*activation)(const ActivationArgs*, int64_t t_begin, int64_t t_end);
    void (*map)(const MapArgs*, int64_t t_begin, int64_t t_end);
    void (*gate)(const GateArgs*, int64_t t_begin, int64_t t_end);
    void (*rope)(const RopeArgs*, int64_t t_begin, int64_t t_end);
    void (*attention)(const AttentionArgs*, const ItemRange* items, uint8_t* scratch);
    void (*recode)(const RecodeArgs*, int64_t row_begin, int64_t row_end);
    void (*rope_angles)(const AnglesArgs*, int64_t t_begin, int64_t t_end);
    void (*sample)(const SampleArgs*, int64_t row_begin, int64_t row_end, uint8_t* scratch);
    int64_t (*sample_scratch)(int64_t width);  // bytes
    void (*conv)(const ConvArgs*, int64_t item_begin, int64_t item_end, uint8_t* scratch);
    void (*delta)(const DeltaArgs*, int64_t item_begin, int64_t item_end, uint8_t* scratch);
    void (*space)(const SpaceArgs*, int64_t item_begin, int64_t item_end, uint8_t* scratch);
    void (*rates)(const RatesArgs*, int64_t t_begin, int64_t t_end);
    void (*gated_norm)(const GatedNormArgs*, int64_t t_begin, int64_t t_end);
    void (*low_rank_down)(const LowRankArgs*, int64_t item_begin, int64_t item_end, uint8_t* scratch);
    void (*low_rank_up)(const LowRankArgs*, int64_t item_begin, int64_t item_end, uint8_t* scratch);
};
