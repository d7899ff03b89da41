// Packed weights, the activations they are multiplied with, and the products. Part of abi.hpp, whose rules hold here.
#pragma once

#include <stdint.h>

// Element types of scales, minima, pages and dense values; those of pages are also in
// kernels/kv/kv_types.py (cpu_element). kLow4 and kHigh4, for scales and minima only, are the two halves
// of one byte (q2_k stores both there). kE8M0, for scales, is a power of two.
// kI4, for pages only: element d of a head of D is the low half of byte d, or the high half of byte
// d - D / 2. kI16, for pages only: codes of at most kMostWord (abi_attention.hpp).
// kU2, kU4 and kI6, for scales and zero points only, pack the numbers of 16 rows into fewer bits. kU4
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
    kI6 = 13,
    kI16 = 14
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
    uint16_t* bf16;  // [M][bf16_row(k)]: activations rounded to bfloat16, then zeros; else null
};

struct LinearArgs {
    const Weight* w;
    const float* x;   // [m, k]
    float* out;       // [m, n], rows out_stride apart
    int64_t out_stride;
    int32_t exact;    // fp32 on the dequantized values
    int32_t terms;    // 2: blocks that 8 bits fit badly are sums of two Q8Blocks
    int32_t rounded;  // activations and 16-bit weights are multiplied in bfloat16, where the level can
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
