// Rounding of floats to codes while a model is loaded. Part of abi.hpp, whose rules hold here.
#pragma once

#include <stdint.h>

// kRoundLargest only finds the largest magnitude.
enum RoundMethod {
    kRoundLargest = 0,
    kRoundIntegers = 1,
    kRoundHqq = 2,
    kRoundE4M3 = 3,
    kRoundE2M1 = 4
};

// Columns of a group that HQQ takes at most here: 16 groups are on the stack.
enum { kMostHqqGroup = 256 };

// HQQ (quant/methods/hqq.py): rounds; the bits of x^-0.3 are about kSlopeOffset - kSlopeFactor times those of x;
// kHqqInverse[i] is 1 / (10 * 1.01^i).
enum { kHqqRounds = 10 };
static const float kSlopeFactor = 0.3f, kSlopeOffset = 1384409216.0f;
static const float kHqqInverse[kHqqRounds] = {0.1f,         0.0990099f,  0.098029606f, 0.09705901f, 0.096098036f,
                                              0.09514657f, 0.09420452f, 0.09327181f,  0.09234832f, 0.09143398f};

struct RoundArgs {
    const void* x;      // [rows, k]
    uint8_t* codes;     // rows of row_bytes: a stream of `bits` each, e4m3, or two e2m1 a byte
    // Of integers float16 and of HQQ too, [rows, groups]; e4m3 float [rows / height, groups], null with a factor;
    // e2m1 bytes: e8m0, or e4m3 with a factor.
    void* scale;
    float* zero;        // [rows, groups]: zero points of integers; HQQ: what is subtracted
    int64_t rows, k;
    int64_t group;      // columns that share a scale
    int64_t height;     // rows that do, of e4m3
    int64_t row_bytes;
    int32_t method;     // RoundMethod
    int32_t type;       // of x: kF16, kBF16 or kF32
    int32_t bits;
    int32_t symmetric;  // of kRoundIntegers: the zero point is in the middle
    float factor;       // e4m3: the largest magnitude of the whole matrix, e2m1: of the scales; 0: none
    float largest;      // result: the largest scale of integers before it became a float16, or magnitude
    int32_t bad;        // result: 1 if there is an infinity or NaN
};
