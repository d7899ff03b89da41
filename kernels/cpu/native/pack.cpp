// Packs codes into tiles and back, and gathers single rows as floats. Compiled for the baseline, with
// vectors of 16 bytes.
#include "pack.hpp"

#include <math.h>
#include <string.h>

#include "sources.hpp"
#include "system.hpp"

namespace {

// Bytes before the 2-bit and 1-bit planes of a tile and the shifts of their bits (bit_planes.hpp).
struct Planes {
    int bits, low, mid, mid_shift, high, high_shift;
    explicit Planes(int b)
        : bits(b),
          low(b & 4),
          mid(low ? 256 : 0),
          mid_shift(low),
          high(mid + (b & 2 ? 128 : 0)),
          high_shift(low + (b & 2)) {}
};

uint32_t get_code(const Planes& p, const uint8_t* tile, int row, int k) {
    const int j = k / 4, at = row * 4 + k % 4;
    if (p.bits == 8) return tile[64 * j + at];
    uint32_t code = 0;
    if (p.low) code = tile[64 * (j & 3) + at] >> (j & 4) & 15u;
    if (p.bits & 2) code |= (tile[p.mid + 64 * (j & 1) + at] >> (j & 6) & 3u) << p.mid_shift;
    if (p.bits & 1) code |= (tile[p.high + at] >> j & 1u) << p.high_shift;
    return code;
}

// ggml's 256-element blocks: where the low and high bits of element i are (ggml-common.h).
// Block layouts, in bytes: q2_k scales[16] codes[64] d dmin; q3_k high bits[32] codes[64]
// scales[12] d; q4_k d dmin scales[12] codes[128]; q5_k d dmin scales[12] high bits[32] codes[128];
// q6_k low bits[128] high bits[64] scales[16] d.
struct BlockBits {
    int low_byte, low_shift, low_bits, high_byte, high_shift, high_bits, nbytes;
};

constexpr BlockBits block_bits(int source, int i) {
    const int half = i / 128, part = i / 32 % 4, l = i % 32;  // 128 codes share 32 bytes
    const int pair = i / 64, nibble = i / 32 % 2;             // 64 codes share 32 bytes
    switch (source) {
        case kQ2K: return {16 + 32 * half + l, 2 * part, 2, 0, 0, 0, 84};
        case kQ3K: return {32 + 32 * half + l, 2 * part, 2, l, i / 32, 1, 110};
        case kQ4K: return {16 + 32 * pair + l, 4 * nibble, 4, 0, 0, 0, 144};
        case kQ5K: return {48 + 32 * pair + l, 4 * nibble, 4, 16 + l, i / 32, 1, 176};
        default:
            return {64 * half + 32 * (part & 1) + l, 4 * (part >> 1), 4, 128 + 32 * half + l,
                    2 * part, 2, 210};
    }
}

constexpr int kQuantBlock = 256;  // values of a k-quant block
static_assert(kQuantBlock % kTileDepth == 0, "a block is whole tiles");
static_assert(block_bits(kQ2K, 0).nbytes == 16 + kQuantBlock / 4 + 2 + 2, "ggml's block_q2_K");
static_assert(block_bits(kQ3K, 0).nbytes == kQuantBlock / 8 + kQuantBlock / 4 + 12 + 2, "block_q3_K");
static_assert(block_bits(kQ4K, 0).nbytes == 2 + 2 + 12 + kQuantBlock / 2, "block_q4_K");
static_assert(block_bits(kQ5K, 0).nbytes == 2 + 2 + 12 + kQuantBlock / 8 + kQuantBlock / 2, "block_q5_K");
static_assert(block_bits(kQ6K, 0).nbytes == kQuantBlock / 2 + kQuantBlock / 4 + 16 + 2, "block_q6_K");

// The tiles of a row block of a k-quant with this many low and high bits per code. The bits of 32 codes
// are in 32 bytes.
template <int LOW, int HIGH>
void pack_k_tiles(const Weight& w, int64_t b, const uint8_t* const* rows, int count) {
    const Tiles tiles = tiles_of(&w, b);
    uint8_t* tile = tiles.first;
    for (int64_t t = 0; t < w.k_blocks; ++t, tile += tiles.step) {
        const BlockBits bits = block_bits(w.source, (int)(t % 8) * kTileDepth);
        const int64_t at = t / 8 * bits.nbytes;
        pack_plane<LOW>(rows, count, at + bits.low_byte, bits.low_shift, tile);
        if constexpr (HIGH > 0)
            pack_plane<HIGH>(rows, count, at + bits.high_byte, bits.high_shift, tile + LOW * kTileBytesPerBit);
    }
}

void pack_k_quants(const Weight& w, int64_t b, const uint8_t* const* rows, int count) {
    pack_k_scales(w, b, rows, count, block_bits(w.source, 0).nbytes);
    switch (w.source) {
        case kQ2K: return pack_k_tiles<2, 0>(w, b, rows, count);
        case kQ3K: return pack_k_tiles<2, 1>(w, b, rows, count);
        case kQ4K: return pack_k_tiles<4, 0>(w, b, rows, count);
        case kQ5K: return pack_k_tiles<4, 1>(w, b, rows, count);
        default: return pack_k_tiles<4, 2>(w, b, rows, count);
    }
}

uint32_t low_mask(int bits) { return (1u << bits) - 1; }

// One byte per code of a bit stream.
void read_row(const Weight& w, const uint8_t* row, uint8_t* codes) {
    if (w.bits == 8) {
        for (int64_t k = 0; k < w.k; ++k) codes[k] = row[k] ^ (w.flip ? 0x80 : 0);
    } else {
        expand_of(w.bits)(row, w.k, codes);
    }
}

void write_row(const Weight& w, const uint8_t* codes, uint8_t* row) {
    if (is_legacy(w.source)) {
        write_legacy(w, codes, row);
        return;
    }
    if (w.source != kStream) {  // the bytes of the codes only; scales are written by Python
        for (int i = 0; i < 256; ++i) {
            const BlockBits b = block_bits(w.source, i);
            for (int64_t block = 0; block * 256 < w.k; ++block) {
                uint8_t* p = row + block * b.nbytes;
                const uint32_t code = codes[block * 256 + i];
                p[b.low_byte] |= (uint8_t)((code & low_mask(b.low_bits)) << b.low_shift);
                if (b.high_bits) p[b.high_byte] |= (uint8_t)(code >> b.low_bits << b.high_shift);
            }
        }
        return;
    }
    if (w.bits == 8) {
        for (int64_t k = 0; k < w.k; ++k) row[k] = codes[k] ^ (w.flip ? 0x80 : 0);
        return;
    }
    uint32_t buffer = 0, filled = 0;
    for (int64_t k = 0; k < w.k; ++k) {
        buffer |= (uint32_t)codes[k] << filled;
        filled += (uint32_t)w.bits;
        if (filled >= 8) {
            *row++ = (uint8_t)buffer;
            buffer >>= 8;
            filled -= 8;
        }
    }
    if (filled) *row = (uint8_t)buffer;
}

float half_value(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fffu;
    uint32_t bits;
    float value;
    if (rest >= 0x7c00) {
        bits = rest << 13 | 0x7f800000;
    } else {
        bits = rest << 13;
        memcpy(&value, &bits, 4);
        value *= 0x1p112f;
        memcpy(&bits, &value, 4);
    }
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

float e4m3_value(uint8_t code) {  // no infinities; all bits set is NaN
    if ((code & 0x7f) == 0x7f) return __builtin_nanf("");
    return 256.0f * half_value((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7));
}

float e8m0_value(uint8_t code) {  // 2^(code - 127); 255 is NaN
    const uint32_t bits = code == 0 ? 0x00400000u : code == 255 ? 0x7fc00000u : (uint32_t)code << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// The number of row `r` of 16, of 4 and of 2 bits.
int nibble(const uint8_t* p, int r) { return p[r % 8] >> r / 8 * 4 & 15; }
int pair(const uint8_t* p, int r) { return p[r % 4] >> r / 4 * 2 & 3; }

float element(int type, const void* base, int64_t at) {
    float value;
    uint16_t h;
    switch (type) {
        case kF16:
            memcpy(&h, (const uint16_t*)base + at, 2);
            return half_value(h);
        case kBF16: {
            memcpy(&h, (const uint16_t*)base + at, 2);
            const uint32_t bits = (uint32_t)h << 16;
            memcpy(&value, &bits, 4);
            return value;
        }
        case kF32: return ((const float*)base)[at];
        case kU8: return (float)((const uint8_t*)base)[at];
        case kE5M2: return half_value((uint16_t)(((const uint8_t*)base)[at] << 8));
        case kE4M3: return e4m3_value(((const uint8_t*)base)[at]);
        case kLow4: return (float)(((const uint8_t*)base)[at] & 15);
        case kHigh4: return (float)(((const uint8_t*)base)[at] >> 4);
        case kE8M0: return e8m0_value(((const uint8_t*)base)[at]);
        case kU2: return (float)pair((const uint8_t*)base + at / 16 * 4, (int)(at % 16));
        case kU4: return (float)nibble((const uint8_t*)base + at / 16 * 8, (int)(at % 16));
        case kI6: {
            const uint8_t* six = (const uint8_t*)base + at / 16 * 12;
            return (float)(nibble(six, (int)(at % 16)) + 16 * pair(six + 8, (int)(at % 16)) - 32);
        }
        default: return (float)((const int8_t*)base)[at];
    }
}

}  // namespace

size_t pack_scratch(const Weight& w) {
    return (size_t)(w.k_blocks * kTileDepth) * kTileRows;
}

void pack_blocks(const Weight& w, const uint8_t* source, int64_t row_bytes, int64_t first,
                 int64_t begin, int64_t end, uint8_t* codes) {
    const int64_t stride = w.k_blocks * kTileDepth;
    const ToTile to_tile = to_tile_of(w.bits);
    for (int64_t b = begin; b < end; ++b) {
        const uint8_t* rows[kTileRows];
        const int64_t left = w.n - b * kTileRows;
        const int count = left < kTileRows ? (int)left : (int)kTileRows;
        for (int r = 0; r < count; ++r) rows[r] = source + ((b - first) * kTileRows + r) * row_bytes;
        if (is_legacy(w.source)) {
            pack_legacy(w, b, rows, count);
            continue;
        }
        if (w.source != kStream) {
            pack_k_quants(w, b, rows, count);
            continue;
        }
        for (int r = 0; r < kTileRows; ++r) {
            uint8_t* row = codes + r * stride;
            if (r < count) read_row(w, rows[r], row);
            memset(row + (r < count ? w.k : 0), 0, (size_t)(stride - (r < count ? w.k : 0)));
        }
        const Tiles tiles = tiles_of(&w, b);
        for (int64_t t = 0; t < w.k_blocks; ++t)
            to_tile(codes + t * kTileDepth, stride, tiles.first + t * tiles.step);
    }
}

void unpack_blocks(const Weight& w, uint8_t* out, int64_t row_bytes, int64_t begin, int64_t end,
                   uint8_t* codes) {
    const Planes planes(w.bits);
    for (int64_t b = begin; b < end; ++b) {
        const Tiles tiles = tiles_of(&w, b);
        for (int r = 0; r < kTileRows && b * kTileRows + r < w.n; ++r) {
            for (int64_t k = 0; k < w.k; ++k)
                codes[k] = (uint8_t)get_code(planes, tiles.first + k / kTileDepth * tiles.step, r,
                                             (int)(k % kTileDepth));
            write_row(w, codes, out + (b * kTileRows + r) * row_bytes);
        }
    }
}

namespace {

// Row r of a block of 16, T by T, 256 k at a time: that stays in the L1 cache.
template <typename T>
void dense_rows(const Weight& w, T* plain, bool unpack, int64_t origin, int64_t begin, int64_t end) {
    const int64_t stretch = 256;
    for (int64_t b = begin; b < end; ++b) {
        T* packed = (T*)w.codes + b * w.k * kTileRows;
        const int64_t left = w.n - b * kTileRows;
        for (int64_t first = 0; first < w.k; first += stretch) {
            const int64_t last = first + stretch < w.k ? first + stretch : w.k;
            for (int r = 0; r < kTileRows; ++r) {
                T* row = plain + ((b - origin) * kTileRows + r) * w.k;
                if (r >= left)
                    for (int64_t k = first; k < last && !unpack; ++k) packed[k * kTileRows + r] = 0;
                else if (unpack)
                    for (int64_t k = first; k < last; ++k) row[k] = packed[k * kTileRows + r];
                else  // a view of a file may be unaligned
                    for (int64_t k = first; k < last; ++k)
                        memcpy(packed + k * kTileRows + r, row + k, sizeof(T));
            }
        }
    }
}

}  // namespace

size_t element_size(int type) {
    if (type == kF32) return 4;
    return type == kF16 || type == kBF16 ? 2 : 1;
}

void dense_blocks(const Weight& w, void* plain, bool unpack, int64_t first, int64_t begin,
                  int64_t end) {
    switch (element_size(w.scale_type)) {
        case 1: dense_rows(w, (uint8_t*)plain, unpack, first, begin, end); break;
        case 2: dense_rows(w, (uint16_t*)plain, unpack, first, begin, end); break;
        default: dense_rows(w, (uint32_t*)plain, unpack, first, begin, end);
    }
}

namespace {

// Bytes first..first + count of a row; false if they cannot be read.
bool read_stored(const EmbeddingArgs& args, int64_t id, int64_t first, int64_t count, uint8_t* to) {
    const int64_t at = args.offset + id * args.row_bytes + first;
    for (int64_t done = 0; done < count;) {
        const int64_t more = read_at(args.descriptor, to + done, count - done, at + done);
        if (more <= 0) return false;
        done += more;
    }
    return true;
}

// Decodes rows of a file: each is packed, a part at a time, as a weight of one row, and so has the bits of
// a weight in memory. Rows that cannot be read, because the file was truncated, are not a number.
void gather_stored_rows(const EmbeddingArgs& args, int64_t begin, int64_t end) {
    enum { kRead = 16384 };
    const int64_t none = 0;
    alignas(kCacheLine) uint8_t read[kRead];
    alignas(kCacheLine) uint8_t tiles[kTileRows * kStoredColumns], codes[kTileRows * kStoredColumns];
    alignas(kCacheLine) uint8_t scale[kTileRows * 64], minus[kTileRows * 64];
    alignas(kCacheLine) uint16_t supers[2][kTileRows];
    Weight part = *args.w;
    part.codes = tiles;
    if (part.minus) part.minus = part.minus == part.scale ? scale : minus;
    part.scale = scale;
    if (part.super_scale) part.super_scale = supers[0];
    if (part.super_minus) part.super_minus = supers[1];
    const int64_t parts = args.width / kStoredColumns, bytes = args.row_bytes / parts;
    const int64_t at_once = kRead / bytes;
    for (int64_t t = begin; t < end; ++t) {
        float* to = args.out + t * args.width;
        for (int64_t p = 0; p < parts; ++p) {
            const int64_t left = parts - p < at_once ? parts - p : at_once;
            if (p % at_once == 0 && !read_stored(args, args.ids[t], p * bytes, left * bytes, read)) {
                for (int64_t k = 0; k < args.width; ++k) to[k] = NAN;
                break;
            }
            const uint8_t* from = read + p % at_once * bytes;
            if (part.dense) {
                for (int64_t k = 0; k < kStoredColumns; ++k)
                    to[p * kStoredColumns + k] = element(part.scale_type, from, k);
                continue;
            }
            pack_blocks(part, from, bytes, 0, 0, 1, codes);
            gather_rows({&part, &none, to + p * kStoredColumns, nullptr, 0, 0, 0, 0, 0, 0}, 0, 1);
        }
    }
}

}  // namespace

void gather_rows(const EmbeddingArgs& args, int64_t begin, int64_t end) {
    if (args.row_bytes) {
        gather_stored_rows(args, begin, end);
        return;
    }
    const Weight& w = *args.w;
    const Planes planes(w.bits);
    for (int64_t t = begin; t < end; ++t) {
        const int64_t id = args.ids[t] - args.first;
        float* to = args.out + t * w.k;
        if (id < 0 || id >= w.n) {  // another rank has it
            memset(to, 0, sizeof(float) * (size_t)w.k);
            continue;
        }
        const int64_t b = id / kTileRows;
        const int r = (int)(id % kTileRows);
        if (w.dense) {
            for (int64_t k = 0; k < w.k; ++k) {
                to[k] = element(w.scale_type, w.codes, (b * w.k + k) * kTileRows + r);
                const int64_t group = k / w.subgroups_per_group;
                const int64_t at = (b / w.scale_blocks * w.groups + group) * kTileRows + r;
                if (w.scale) to[k] *= element(w.super_type, w.scale, at);
            }
            continue;
        }
        const Tiles tiles = tiles_of(&w, b);
        for (int64_t u = 0; u * w.subgroup < w.k; ++u) {
            const int64_t at = w.subgroup == 1 ? u * w.scale_rows + id % w.scale_rows
                                           : (b * w.groups + u / w.subgroups_per_group) * kTileRows + r;
            float scale = element(w.scale_type, w.scale, at);
            float minus = w.minus ? element(w.minus_type, w.minus, at) : 0.0f;
            const float zero = w.zeros ? element(w.zeros_type, w.zeros, at) : w.zero;
            if (w.scale_table) {
                const int64_t group = id * w.groups + u / w.subgroups_per_group;
                const int64_t over = group / w.subgroups_per_super;
                scale = w.scale_table[((const uint8_t*)w.scale)[at]];
                scale = scale * ((const float*)w.super_scale)[over] + w.scale_offset[id];
            } else if (w.super_scale) {
                const int64_t over = (b * w.supers + u / w.subgroups_per_super) * kTileRows + r;
                scale = element(w.super_type, w.super_scale, over) * scale;
                if (w.super_minus) minus = element(kF16, w.super_minus, over) * minus;
            }
            const int64_t k_end = (u + 1) * w.subgroup < w.k ? (u + 1) * w.subgroup : w.k;
            for (int64_t k = u * w.subgroup; k < k_end; ++k) {
                const uint8_t* p = tiles.first + k / kTileDepth * tiles.step;
                const uint32_t code = get_code(planes, p, r, (int)(k % kTileDepth));
                to[k] = w.table ? w.table[code] * scale : ((float)code - zero) * scale - minus;
            }
        }
    }
}
