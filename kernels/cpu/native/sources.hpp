// Packs ggml's blocks of 32 values, and iq4_xs's of eight times 32, into tiles (bit_planes.hpp), 16
// rows at a time, and the scales of all of ggml's blocks. Only pack.cpp includes this file.
//
// Codes are moved in words of four, which have the same layout in a 4-bit tile and in ggml's blocks of
// 32: byte i holds code i in its low and code i + 16 in its high nibble.
#pragma once

#include <string.h>

#include "turn.hpp"

namespace {

// A type whose 32 codes are contiguous: the offsets of its parts, and how many times 32 values a block
// has.
struct Legacy {
    int nbytes, minus, fifth, codes, tiles;  // minus, fifth: 0 if absent; the scale is at 0
};

constexpr Legacy legacy_of(int source) {
    switch (source) {
        case kQ4_0: case kIQ4NL: return {18, 0, 0, 2, 1};
        case kQ4_1: return {20, 2, 0, 4, 1};
        case kQ5_0: return {22, 0, 2, 6, 1};
        case kQ5_1: return {24, 2, 4, 8, 1};
        case kMXFP4: return {17, 0, 0, 1, 1};
        case kIQ4XS: return {136, 0, 0, 8, 8};
        default: return {34, 0, 0, 2, 1};  // kQ8_0
    }
}

static_assert(legacy_of(kQ4_0).nbytes == 2 + 16 && legacy_of(kIQ4NL).nbytes == 2 + 16, "4 bits");
static_assert(legacy_of(kQ4_1).nbytes == 2 + 2 + 16, "scale, minimum, 4 bits");
static_assert(legacy_of(kQ5_0).nbytes == 2 + 4 + 16, "scale, fifth bits, 4 bits");
static_assert(legacy_of(kQ5_1).nbytes == 2 + 2 + 4 + 16, "scale, minimum, fifth bits, 4 bits");
static_assert(legacy_of(kQ8_0).nbytes == 2 + 32, "scale, 8 bits");
static_assert(legacy_of(kMXFP4).nbytes == 1 + 16, "power of two, 4 bits");
static_assert(legacy_of(kIQ4XS).nbytes == 2 + 2 + 4 + 8 * 16, "super scale, 6-bit scales, 4 bits");
static_assert(kTileDepth == 32, "a tile is one of ggml's blocks of 32");

bool is_legacy(int source) { return source >= kQ4_0; }

// Offset of the codes of tile t in a row, minus kind.codes.
int64_t tile_at(const Legacy& kind, int64_t t) {
    return t / kind.tiles * kind.nbytes + t % kind.tiles * 16;
}

// Offsets of the float16 scale of a k-quant block and of that of its minima (0: none).
struct Supers {
    int scale, minus;
};

Supers supers_of(int source) {
    switch (source) {
        case kQ2K: return {80, 82};
        case kQ3K: return {108, 0};
        case kQ6K: return {208, 0};
        default: return {0, 2};
    }
}

uint16_t half_at(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return h;
}

// Bits 0, 4, 8 ... 28 of x, moved together.
uint32_t every_fourth(uint32_t x) {
    x &= 0x11111111u;
    x = (x | x >> 3) & 0x03030303u;
    x = (x | x >> 6) & 0x000f000fu;
    return (x | x >> 12) & 255u;
}

// One tile from the blocks `rows[0..count)`, all of them at byte `at` of their rows.
void legacy_tile(const Legacy& kind, int bits, uint32_t flip, const uint8_t* const* rows, int count,
                 int64_t at, uint8_t* tile) {
    if (bits == 8) {
        move_words(rows, count, at + kind.codes, flip, tile);
        move_words(rows, count, at + kind.codes + 16, flip, tile + 4 * 64);
        return;
    }
    move_words(rows, count, at + kind.codes, 0, tile);
    if (!kind.fifth) return;
    if (count < kTileRows) memset(tile + 256, 0, 64);
    for (int r = 0; r < count; ++r) {
        uint32_t fifth;
        memcpy(&fifth, rows[r] + at + kind.fifth, 4);
        for (int t = 0; t < 4; ++t)
            tile[256 + 4 * r + t] = (uint8_t)every_fourth(fifth >> t);
    }
}

// One float16 of each row, XOR `flip`; 0 in the rows from `count` on.
void move_halves(const uint8_t* const* rows, int count, int64_t at, uint16_t flip, uint16_t* to) {
    for (int r = 0; r < count; ++r) to[r] = half_at(rows[r] + at) ^ flip;
    for (int r = count; r < kTileRows; ++r) to[r] = 0;
}

// The scales of iq4_xs in tile t: d, the high 2 bits of eight scales, their low 4 bits; minus 32.
void move_xs_scales(const uint8_t* const* rows, int count, int64_t at, int g, int8_t* to) {
    for (int r = 0; r < count; ++r) {
        const uint8_t* p = rows[r] + at;
        to[r] = (int8_t)(((p[4 + g / 2] >> g % 2 * 4 & 15) | (half_at(p + 2) >> 2 * g & 3) << 4) - 32);
    }
    for (int r = count; r < kTileRows; ++r) to[r] = 0;
}

// The scales of tile t, with super scales and minima; 0 in the rows from `count` on.
void pack_tile_scales(const Weight& w, const Legacy& kind, int64_t b, int64_t t, const uint8_t* const* rows,
                      int count) {
    const int64_t to = (b * w.groups + t) * kTileRows, at = t / kind.tiles * kind.nbytes;
    void* const scale = const_cast<void*>(w.scale);
    if (w.source == kIQ4XS) {
        move_xs_scales(rows, count, at, (int)(t % kind.tiles), (int8_t*)scale + to);
        uint16_t* const supers = (uint16_t*)const_cast<void*>(w.super_scale);
        if (t % kind.tiles == 0) move_halves(rows, count, at, 0, supers + (b * w.supers + t / 8) * kTileRows);
    } else if (w.source == kMXFP4) {
        for (int r = 0; r < kTileRows; ++r) ((uint8_t*)scale)[to + r] = r < count ? rows[r][at] : 0;
    } else {
        move_halves(rows, count, at, 0, (uint16_t*)scale + to);
    }
    if (w.minus)  // the file adds what the kernels subtract
        move_halves(rows, count, at + kind.minus, 0x8000, (uint16_t*)const_cast<void*>(w.minus) + to);
}

// Codes and scales of one row block; rows beyond `count` become zeros.
void pack_legacy(const Weight& w, int64_t b, const uint8_t* const* rows, int count) {
    const Legacy kind = legacy_of(w.source);
    const uint32_t flip = w.flip ? 0x80808080u : 0;
    const Tiles tiles = tiles_of(&w, b);
    uint8_t* codes = tiles.first;
    for (int64_t t = 0; t < w.k_blocks; ++t, codes += tiles.step) {
        legacy_tile(kind, w.bits, flip, rows, count, tile_at(kind, t), codes);
        pack_tile_scales(w, kind, b, t, rows, count);
    }
}

// The bytes of the codes of one row; scales are written by Python.
void write_legacy(const Weight& w, const uint8_t* codes, uint8_t* row) {
    const Legacy kind = legacy_of(w.source);
    uint8_t* const first = row;
    for (int64_t t = 0; t < w.k_blocks; ++t, codes += kTileDepth) {
        row = first + tile_at(kind, t);
        if (w.bits == 8) {
            for (int i = 0; i < kTileDepth; ++i) row[kind.codes + i] = codes[i] ^ (w.flip ? 0x80 : 0);
            continue;
        }
        for (int i = 0; i < 16; ++i)
            row[kind.codes + i] = (uint8_t)((codes[i] & 15) | codes[i + 16] << 4);
        if (!kind.fifth) continue;
        uint32_t fifth = 0;
        for (int k = 0; k < kTileDepth; ++k) fifth |= (uint32_t)(codes[k] >> 4 & 1) << k;
        memcpy(row + kind.fifth, &fifth, 4);
    }
}

// The scales of one q3_k block, 6 bits each, into the scales of 16 rows (kI6), which are zero at row r.
void six_bit_scales(const uint8_t* block, int r, uint8_t* scales) {
    const uint8_t *low = block + 96, *high = block + 104;
    for (int g = 0; g < 16; ++g, scales += 12) {
        scales[r % 8] |= (uint8_t)((low[g & 7] >> (g & 8) / 2 & 15) << r / 8 * 4);
        scales[8 + r % 4] |= (uint8_t)((high[g & 3] >> g / 4 * 2 & 3) << r / 4 * 2);
    }
}

// The scales and minima inside a k-quant block of 16 rows, those from `count` on being 0.
void inner_scales(int source, const uint8_t* const* rows, int count, int64_t at, uint8_t* scale, uint8_t* minus) {
    if (source == kQ2K || source == kQ6K) {  // 16 bytes
        Bytes of[kTileRows];
        for (int r = 0; r < kTileRows; ++r) of[r] = load_row(rows, count, r, at + (source == kQ6K ? 192 : 0));
        turn_bytes(of);
        memcpy(scale, of, sizeof of);
        return;
    }
    // d and dmin, then 6 bits each: scales 0..3, minima 0..3, the low bits of the rest; their high bits are above
    // those of the first four.
    Bytes first[2][4], rest[2][4];  // of scales and of minima
    for (int q = 0; q < 4; ++q) {
        Words of[4];
        for (int r = 0; r < 4; ++r) of[r] = (Words)load_row(rows, count, 4 * q + r, at);
        turn_words(of);
        for (int kind = 0; kind < 2; ++kind) {
            first[kind][q] = (Bytes)(of[1 + kind] & 0x3f3f3f3fu);
            rest[kind][q] = (Bytes)((of[3] >> 4 * kind & 0x0f0f0f0fu) | (of[1 + kind] >> 2 & 0x30303030u));
        }
    }
    for (int kind = 0; kind < 2; ++kind) {
        uint8_t* const to = kind ? minus : scale;
        turn_bytes(first[kind]);
        turn_bytes(rest[kind]);
        memcpy(to, first[kind], sizeof first[kind]);
        memcpy(to + 4 * kTileRows, rest[kind], sizeof rest[kind]);
    }
}

// Both levels of scales of one k-quant row block; rows beyond `count` become zeros.
void pack_k_scales(const Weight& w, int64_t b, const uint8_t* const* rows, int count, int nbytes) {
    const bool six = w.scale_type == kI6;
    const int64_t bytes = six ? 12 : kTileRows;  // of a group
    const int64_t groups = w.groups * bytes, supers = w.supers * kTileRows;
    const int64_t step = w.groups / w.supers * bytes;
    const Supers at = supers_of(w.source);
    uint8_t* scale = (uint8_t*)const_cast<void*>(w.scale) + b * groups;
    uint8_t* minus = w.minus ? (uint8_t*)const_cast<void*>(w.minus) + b * groups : nullptr;
    uint16_t* super_scale = (uint16_t*)const_cast<void*>(w.super_scale) + b * supers;
    uint16_t* super_minus = at.minus ? const_cast<uint16_t*>(w.super_minus) + b * supers : nullptr;
    if (six) memset(scale, 0, (size_t)groups);
    for (int64_t block = 0; block < w.supers; ++block) {
        const int64_t from = block * nbytes;
        if (six)
            for (int r = 0; r < count; ++r) six_bit_scales(rows[r] + from, r, scale + block * step);
        else
            inner_scales(w.source, rows, count, from, scale + block * step, minus ? minus + block * step : nullptr);
        move_halves(rows, count, from + at.scale, 0, super_scale + block * kTileRows);
        if (at.minus) move_halves(rows, count, from + at.minus, 0, super_minus + block * kTileRows);
    }
}

// One tile from 16 rows of one byte per code, `stride` bytes apart.
template <int BITS>
void bytes_to_tile(const uint8_t* codes, int64_t stride, uint8_t* tile) {
    static_assert(kTileDepth / 4 == 8 && kTileRows * 4 == 64, "the vectors j of a tile");
    uint8_t v[8][64];
    for (int r = 0; r < kTileRows; ++r)
        for (int j = 0; j < 8; ++j) memcpy(v[j] + 4 * r, codes + r * stride + 4 * j, 4);
    if (BITS == 8) {
        static_assert(sizeof v == kByteTile, "one byte per code");
        memcpy(tile, v, sizeof v);
        return;
    }
    const int mid = BITS & 4 ? 256 : 0, high = mid + (BITS & 2 ? 128 : 0);
    const int mid_bit = BITS & 4, high_bit = mid_bit + (BITS & 2);
    for (int i = 0; i < 4 && (BITS & 4); ++i)
        for (int x = 0; x < 64; ++x)
            tile[64 * i + x] = (uint8_t)((v[i][x] & 15) | (v[i + 4][x] & 15) << 4);
    for (int i = 0; i < 2 && (BITS & 2); ++i)
        for (int x = 0; x < 64; ++x)
            tile[mid + 64 * i + x] =
                (uint8_t)((v[i][x] >> mid_bit & 3) | (v[i + 2][x] >> mid_bit & 3) << 2 |
                          (v[i + 4][x] >> mid_bit & 3) << 4 | (v[i + 6][x] >> mid_bit & 3) << 6);
    for (int x = 0; x < 64 && (BITS & 1); ++x) {
        int byte = 0;
        for (int j = 0; j < 8; ++j) byte |= (v[j][x] >> high_bit & 1) << j;
        tile[high + x] = (uint8_t)byte;
    }
}

typedef void (*ToTile)(const uint8_t* codes, int64_t stride, uint8_t* tile);

ToTile to_tile_of(int bits) {
    switch (bits) {
        case 1: return bytes_to_tile<1>;
        case 2: return bytes_to_tile<2>;
        case 3: return bytes_to_tile<3>;
        case 4: return bytes_to_tile<4>;
        case 5: return bytes_to_tile<5>;
        case 6: return bytes_to_tile<6>;
        case 7: return bytes_to_tile<7>;
        default: return bytes_to_tile<8>;
    }
}

// Codes of BITS bits (1..7), eight at a time: they fill whole bytes.
template <int BITS>
void expand_stream(const uint8_t* row, int64_t k, uint8_t* codes) {
    const uint64_t mask = (1u << BITS) - 1;
    for (; k >= 8; k -= 8, row += BITS, codes += 8) {
        uint64_t eight = 0;
        memcpy(&eight, row, BITS);
        for (int c = 0; c < 8; ++c) codes[c] = (uint8_t)(eight >> (BITS * c) & mask);
    }
    uint64_t rest = 0;
    memcpy(&rest, row, (size_t)(k * BITS + 7) / 8);
    for (int c = 0; c < k; ++c) codes[c] = (uint8_t)(rest >> (BITS * c) & mask);
}

typedef void (*Expand)(const uint8_t* row, int64_t k, uint8_t* codes);

Expand expand_of(int bits) {
    switch (bits) {
        case 1: return expand_stream<1>;
        case 2: return expand_stream<2>;
        case 3: return expand_stream<3>;
        case 4: return expand_stream<4>;
        case 5: return expand_stream<5>;
        case 6: return expand_stream<6>;
        default: return expand_stream<7>;
    }
}

}  // namespace
