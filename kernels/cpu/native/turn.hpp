// Turns rows of a file into columns of a tile, where the numbers of 16 rows are next to each other. Words move
// four rows at a time in vectors of 16 bytes, which every CPU has; a row's words one by one took three times as
// long. Convolutions turn their weights with it, too.
#pragma once

#include <string.h>

#include "abi.hpp"

namespace {

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));

// 16 bytes of row r from byte `at` on; zeros if the row is not below `count`.
inline Bytes load_row(const uint8_t* const* rows, int count, int r, int64_t at) {
    Bytes bytes = {};
    if (r < count) memcpy(&bytes, rows[r] + at, sizeof bytes);
    return bytes;
}

// of[c][r] = of[r][c].
inline void turn_words(Words (&of)[4]) {
    const Words ab = __builtin_shufflevector(of[0], of[1], 0, 4, 1, 5);
    const Words cd = __builtin_shufflevector(of[2], of[3], 0, 4, 1, 5);
    const Words ba = __builtin_shufflevector(of[0], of[1], 2, 6, 3, 7);
    const Words dc = __builtin_shufflevector(of[2], of[3], 2, 6, 3, 7);
    of[0] = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
    of[1] = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    of[2] = __builtin_shufflevector(ba, dc, 0, 1, 4, 5);
    of[3] = __builtin_shufflevector(ba, dc, 2, 3, 6, 7);
}

// Bytes [16 rows][N columns], a row after the other, become [N columns][16 rows]. Interleaving the two halves of
// all bytes rotates the bits of a byte's position: four times exchange the bits of row and column.
template <int N>
inline void turn_bytes(Bytes (&of)[N]) {
    for (int round = 0; round < 4; ++round) {
        Bytes next[N];
        for (int i = 0; i < N / 2; ++i) {
            const Bytes a = of[i], b = of[i + N / 2];
            next[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            next[2 * i + 1] =
                __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        memcpy(of, next, sizeof of);
    }
}

// Four words of each row, XOR `flip`, to four vectors of a tile; those of the rows from `count` on are 0.
inline void move_words(const uint8_t* const* rows, int count, int64_t at, uint32_t flip, uint8_t* tile) {
    for (int q = 0; q < kTileRows / 4; ++q) {
        Words of[4];
        for (int r = 0; r < 4; ++r) {
            of[r] = (Words)load_row(rows, count, 4 * q + r, at);
            if (4 * q + r < count) of[r] ^= flip;
        }
        turn_words(of);
        for (int i = 0; i < 4; ++i) memcpy(tile + 64 * i + 16 * q, &of[i], sizeof of[i]);
    }
}

// The plane of W bits (bit_planes.hpp) of 32 codes of each row: bits `shift` .. `shift` + W of 32 bytes.
template <int W>
inline void pack_plane(const uint8_t* const* rows, int count, int64_t at, int shift, uint8_t* plane) {
    const uint32_t mask = 0x01010101u * ((1u << W) - 1);
    for (int q = 0; q < kTileRows / 4; ++q) {
        Words of[4];  // code i in the low half of a byte, code i + 16 in the high half
        for (int r = 0; r < 4; ++r) {
            const Words low = (Words)load_row(rows, count, 4 * q + r, at);
            const Words high = (Words)load_row(rows, count, 4 * q + r, at + 16);
            of[r] = (low >> shift & mask) | (high >> shift & mask) << 4;
        }
        turn_words(of);
        if (W < 4)
            for (int i = 0; i < 2; ++i) of[i] |= of[i + 2] << 2;
        if (W < 2) of[0] |= of[1] << 1;
        for (int i = 0; i < W; ++i) memcpy(plane + 64 * i + 16 * q, &of[i], sizeof of[i]);
    }
}

}  // namespace
