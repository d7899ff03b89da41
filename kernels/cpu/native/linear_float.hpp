// y = x W^T in fp32 on exact weight values: dense weights, and compute="exact" for packed ones.
//
// Each output has four accumulators, k mod 4, joined as (0 + 1) + (2 + 3): one order for every M.
// Lanes run over the 16 rows of a block, so no horizontal sum is needed. Packed weights are decoded
// with the operations of reference/decode.py, one rounding each, and equal it bit for bit.
#pragma once

#include "planes.hpp"

namespace LEVEL {

enum { kMaxFloatRows = kLanes == 16 ? 4 : 2 };

template <int TYPE>
INLINE VF load_value(const void* base, int64_t index) {
    return load_as(TYPE, base, index);
}

template <int TYPE, int MR>
static void block_float(const void* w, int64_t k, const float* x, float* out, int64_t stride,
                        int valid) {
    for (int h = 0; h < kRows / kLanes; ++h) {
        VF acc[MR][4];
        for (int r = 0; r < MR; ++r)
            for (int c = 0; c < 4; ++c) acc[r][c] = zero();
        int64_t i = 0;
        for (; i + 4 <= k; i += 4) {
#pragma GCC unroll 4
            for (int c = 0; c < 4; ++c) {
                VF value = load_value<TYPE>(w, (i + c) * kRows + h * kLanes);
#pragma GCC unroll 4
                for (int r = 0; r < MR; ++r)
                    acc[r][c] = fma(value, set1(x[r * k + i + c]), acc[r][c]);
            }
        }
        for (int c = 0; c < 3; ++c) {
            if (i + c >= k) break;
            VF value = load_value<TYPE>(w, (i + c) * kRows + h * kLanes);
            for (int r = 0; r < MR; ++r)
                acc[r][c] = fma(value, set1(x[r * k + i + c]), acc[r][c]);
        }
        for (int r = 0; r < MR; ++r) {
            VF sum = add(add(acc[r][0], acc[r][1]), add(acc[r][2], acc[r][3]));
            float* to = out + r * stride + h * kLanes;
            if (valid >= (h + 1) * kLanes) {
                store(to, sum);
            } else if (valid > h * kLanes) {
                float lanes[kLanes];
                store(lanes, sum);
                memcpy(to, lanes, sizeof(float) * (size_t)(valid - h * kLanes));
            }
        }
    }
}

template <int TYPE>
static void rows_float(const void* w, const LinearArgs* args, int64_t m, int64_t m_end,
                       int64_t b) {
    int64_t n = args->w->n, k = args->w->k, stride = args->out_stride;
    int valid = n - b * kRows < kRows ? (int)(n - b * kRows) : (int)kRows;
    float* out = args->out + b * kRows;
    if (kMaxFloatRows == 4)
        for (; m + 4 <= m_end; m += 4)
            block_float<TYPE, kMaxFloatRows>(w, k, args->x + m * k, out + m * stride, stride, valid);
    for (; m + 2 <= m_end; m += 2)
        block_float<TYPE, 2>(w, k, args->x + m * k, out + m * stride, stride, valid);
    if (m < m_end) block_float<TYPE, 1>(w, k, args->x + m * k, out + m * stride, stride, valid);
}

// The values of one row block, [k_blocks * 32][16] floats.
template <int BITS>
static void decode_block(const Weight* w, int64_t b, float* out) {
    const uint8_t* tiles = w->codes + b * w->k_blocks * 64 * BITS;
    const int per_unit = w->unit / 4;  // vectors j that share a scale
    for (int64_t i = 0; i < w->k_blocks; ++i) {
        for (int h = 0; h < kRows / kLanes; ++h) {
            VF scale = zero(), zero_point = zero(), minus = zero();
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) {
                if (j % per_unit == 0)
                    scale_of(w, b, i * (kDepth / w->unit) + j / per_unit, h, &scale, &zero_point,
                             &minus);
                VB code = codes_of<BITS>(tiles + i * 64 * BITS, j, h);
                float* to = out + (i * kDepth + 4 * j) * kRows + h * kLanes;
#pragma GCC unroll 4
                for (int c = 0; c < 4; ++c)
                    store(to + c * kRows,
                          sub(mul(sub(code_float(code, c), zero_point), scale), minus));
            }
        }
    }
}

static void linear_float(const LinearArgs* args, int64_t begin, int64_t end, uint8_t* scratch) {
    const Weight* w = args->w;
    // Activations of one pass stay within 256 KiB of the second-level cache.
    int64_t pass = 65536 / (w->k ? w->k : 1) / 4 * 4;
    if (pass < 16) pass = 16;
    for (int64_t m = 0; m < args->m; m += pass) {
        int64_t m_end = m + pass < args->m ? m + pass : args->m;
        for (int64_t b = begin; b < end; ++b) {
            float* values = (float*)scratch;
            if (w->dense && w->scale) {
                scaled_values(w, b, 0, w->k, values);
                rows_float<2>(values, args, m, m_end, b);
                continue;
            }
            if (w->dense) {
                int64_t at = b * w->k * kRows;
                switch (w->scale_type) {
                    case 0: rows_float<0>((const uint16_t*)w->codes + at, args, m, m_end, b); break;
                    case 1: rows_float<1>((const uint16_t*)w->codes + at, args, m, m_end, b); break;
                    case 5: rows_float<5>(w->codes + at, args, m, m_end, b); break;
                    case 6: rows_float<6>(w->codes + at, args, m, m_end, b); break;
                    default: rows_float<2>((const float*)w->codes + at, args, m, m_end, b);
                }
                continue;
            }
            switch (w->bits) {
                case 2: decode_block<2>(w, b, values); break;
                case 3: decode_block<3>(w, b, values); break;
                case 4: decode_block<4>(w, b, values); break;
                case 5: decode_block<5>(w, b, values); break;
                case 6: decode_block<6>(w, b, values); break;
                case 7: decode_block<7>(w, b, values); break;
                case 8: decode_block<8>(w, b, values); break;
            }
            rows_float<2>(values, args, m, m_end, b);
        }
    }
}

}  // namespace LEVEL
