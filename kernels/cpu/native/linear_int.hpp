// y = x W^T with activations rounded to 8 bits per 32 values and integer dot products.
//
// Per output: for each unit u of 16 or 32 k, in order,
//     acc = fma(float(codes . q), scale_w * scale_x, acc)
//     acc = fma(minus, -scale_x * sum(q), acc)
// The integer dot is exact, so neither the vector width nor the number of rows handled at a time
// (MR) changes a bit: a row alone, in a batch, or in a chunk gives the same result. The levels with
// a fused multiply-add agree with one another bit for bit too.
#pragma once

#include "planes.hpp"

namespace LEVEL {

// Registers: MR dots and MR accumulators, a code vector, scale and minus.
enum { kMaxRows = kLanes == 16 ? 8 : 4, kPrefetch = 2048 };

static void quantize(const LinearArgs* args, int64_t m_begin, int64_t m_end) {
    const Activations& act = args->act;
    int64_t k = args->w->k, blocks = act.k_blocks;
    for (int64_t m = m_begin; m < m_end; ++m) {
        const float* row = args->x + m * k;
        int8_t* q = act.q + m * blocks * kDepth;
        for (int64_t b = 0; b < blocks; ++b, q += kDepth) {
            float padded[kDepth];
            const float* x = row + b * kDepth;
            if ((b + 1) * kDepth > k) {
                memset(padded, 0, sizeof padded);
                memcpy(padded, x, (size_t)(k - b * kDepth) * sizeof(float));
                x = padded;
            }
            // The bits of |x| order like the values, with inf and NaN above every number.
            uint32_t peak = 0;
            for (int i = 0; i < kDepth; ++i) {
                uint32_t bits;
                memcpy(&bits, x + i, 4);
                bits &= 0x7fffffff;
                peak = bits > peak ? bits : peak;
            }
            float largest;
            memcpy(&largest, &peak, 4);
            float scale = largest / 127.0f;
            // Not a number: the scale says so and the row's outputs become NaN. Below 1e-36 the
            // reciprocal would overflow: such a block counts as zero.
            bool ordinary = peak < 0x7f800000 && largest > 1e-36f;
            if (peak >= 0x7f800000) scale = __builtin_nanf("");
            if (peak < 0x7f800000 && !ordinary) scale = 0.0f;
            float inverse = ordinary ? 127.0f / largest : 0.0f;
            int32_t sums[2] = {0, 0};
            for (int half = 0; half < 2; ++half) {
                for (int i = 16 * half; i < 16 * half + 16; ++i) {
                    // + 1.5 * 2^23 rounds to nearest even
                    float shifted = (ordinary ? x[i] : 0.0f) * inverse + 12582912.0f;
                    int32_t code;
                    memcpy(&code, &shifted, 4);
                    code -= 0x4b400000;
                    q[i] = (int8_t)code;
                    sums[half] += code;
                }
            }
            int64_t at = m * blocks + b;
            act.scale[at] = scale;
            if (args->w->unit == kDepth) sums[0] += sums[1];
            for (int half = 0; half < 2; ++half) {
                act.sum[2 * at + half] = sums[half];
                act.minus_sum[2 * at + half] = -scale * (float)sums[half];
            }
        }
    }
}

// MR rows of x times one row block. UNIT is 16 or 32.
template <int BITS, int UNIT, int MR>
static void block_int(const uint8_t* tiles, const float* scales, const float* minuses,
                      const Activations& act, int64_t m, float* out, int64_t stride, int valid) {
    const int kTile = BITS >= 8 ? 512 : 64 * BITS;
    const int kHalves = kDepth / UNIT;
    const int64_t blocks = act.k_blocks;
    const int8_t* q = act.q + m * blocks * kDepth;
    for (int h = 0; h < kRows / kLanes; ++h) {
        VF acc[MR];
        for (int r = 0; r < MR; ++r) acc[r] = zero();
        for (int64_t b = 0; b < blocks; ++b) {
            const uint8_t* tile = tiles + b * kTile;
            if (h == 0) {  // few rows are bound by memory: ask ahead
#pragma GCC unroll 8
                for (int line = 0; line < kTile; line += 64)
                    __builtin_prefetch(tile + kPrefetch + line);
            }
#pragma GCC unroll 2
            for (int half = 0; half < kHalves; ++half) {
                VI dot[MR];
#pragma GCC unroll 8
                for (int r = 0; r < MR; ++r) {
                    dot[r] = zero_int();
                    if (BITS == 8 && kWideOffset != 0) {
                        dot[r] = set1_int(kWideOffset *
                                          act.sum[2 * ((m + r) * blocks + b) + half]);
                    }
                }
#pragma GCC unroll 8
                for (int j = half * UNIT / 4; j < (half + 1) * UNIT / 4; ++j) {
                    VB code = codes_of<BITS>(tile, j, h);
#pragma GCC unroll 8
                    for (int r = 0; r < MR; ++r) {
                        const int8_t* a = q + (r * blocks + b) * kDepth + 4 * j;
                        dot[r] = BITS == 8 ? dot4_wide(dot[r], code, a) : dot4(dot[r], code, a);
                    }
                }
                int64_t unit = (b * kHalves + half) * kRows + h * kLanes;
                VF scale = load(scales + unit), minus = load(minuses + unit);
#pragma GCC unroll 8
                for (int r = 0; r < MR; ++r) {
                    int64_t at = (m + r) * blocks + b;
                    acc[r] = fma(to_float(dot[r]), mul(scale, set1(act.scale[at])), acc[r]);
                    acc[r] = fma(minus, set1(act.minus_sum[2 * at + half]), acc[r]);
                }
            }
        }
        for (int r = 0; r < MR; ++r) {
            float* to = out + r * stride + h * kLanes;
            if (valid >= (h + 1) * kLanes) {
                store(to, acc[r]);
            } else if (valid > h * kLanes) {
                float lanes[kLanes];
                store(lanes, acc[r]);
                memcpy(to, lanes, sizeof(float) * (size_t)(valid - h * kLanes));
            }
        }
    }
}

// All M rows of x times one row block, the largest MR first.
template <int BITS, int UNIT>
static void rows_int(const uint8_t* tiles, const float* scales, const float* minuses,
                     const Activations& act, int64_t m, int64_t m_end, float* out, int64_t stride,
                     int valid) {
    if (kMaxRows == 8)
        for (; m + 8 <= m_end; m += 8)
            block_int<BITS, UNIT, kMaxRows>(tiles, scales, minuses, act, m, out + m * stride, stride,
                                    valid);
    for (; m + 4 <= m_end; m += 4)
        block_int<BITS, UNIT, 4>(tiles, scales, minuses, act, m, out + m * stride, stride,
                                    valid);
    for (; m + 2 <= m_end; m += 2)
        block_int<BITS, UNIT, 2>(tiles, scales, minuses, act, m, out + m * stride, stride,
                                    valid);
    if (m < m_end)
        block_int<BITS, UNIT, 1>(tiles, scales, minuses, act, m, out + m * stride, stride,
                                    valid);
}

template <int BITS, int UNIT>
static void blocks_int(const LinearArgs* args, int64_t begin, int64_t end, uint8_t* scratch) {
    const Weight* w = args->w;
    const int64_t units = w->k_blocks * (kDepth / UNIT);
    float* scales = (float*)scratch;
    float* minuses = scales + units * kRows;
    uint8_t* expanded = (uint8_t*)(minuses + units * kRows);
    // Activations of one pass stay within 256 KiB of the second-level cache.
    int64_t pass = 262144 / (w->k_blocks * kDepth) / 8 * 8;
    if (pass < 8) pass = 8;
    for (int64_t m = 0; m < args->m; m += pass) {
        int64_t m_end = m + pass < args->m ? m + pass : args->m;
        for (int64_t b = begin; b < end; ++b) {
            const uint8_t* tiles = w->codes + b * w->k_blocks * 64 * BITS;
            int valid = w->n - b * kRows < kRows ? (int)(w->n - b * kRows) : (int)kRows;
            float* out = args->out + b * kRows;
            integer_scales(w, b, scales, minuses);
            if (BITS != 8 && BITS != 4 && m_end - m >= 2 * kMaxRows) {
                for (int64_t i = 0; i < w->k_blocks; ++i)
                    expand<BITS>(tiles + i * 64 * BITS, expanded + i * 512);
                rows_int<kExpanded, UNIT>(expanded, scales, minuses, args->act, m, m_end, out,
                                          args->out_stride, valid);
            } else {
                rows_int<BITS, UNIT>(tiles, scales, minuses, args->act, m, m_end, out,
                                     args->out_stride, valid);
            }
        }
    }
}

static void linear_int(const LinearArgs* args, int64_t begin, int64_t end, uint8_t* scratch) {
    bool fine = args->w->unit == 16;
    switch (args->w->bits) {
#define CASE(BITS)                                                        \
    case BITS:                                                            \
        if (fine) blocks_int<BITS, 16>(args, begin, end, scratch);        \
        else blocks_int<BITS, 32>(args, begin, end, scratch);             \
        break
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(7);
        CASE(8);
#undef CASE
    }
}

}  // namespace LEVEL
