// y = x W^T in fp32 on exact weight values: dense weights, and compute="exact" for packed ones.
//
// Each output sums its products by fma in order of k, 128 at a time from zero, and adds these sums in
// order: one order for every M and level, and a shorter chain than one sum over all of k. Lanes are
// the rows of a block, so no horizontal sum is needed. Packed weights are dequantized with the
// operations of reference/decode.py, one rounding each, and equal it bit for bit.
#pragma once

#include "linear_int.hpp"

namespace LEVEL {

// Two sums per row, two values and a broadcast in registers.
enum { kMaxFloatRows = kRegisters < 32 ? 4 : 8, kConvertFrom = 9 };
static_assert(2 * kMaxFloatRows + 3 <= kRegisters, "the register tile fits the registers");
static_assert(kMaxFloatRows == 8 || kMaxFloatRows == 4, "rows_float has these cases");

// Whether a panel becomes floats once, before the products of m rows. With 8 rows at a time, conversions of
// 16-bit numbers fill the ports that multiply-adds leave (Zen 5; Intel's cores have not been measured).
template <int TYPE>
constexpr bool converts_first(int64_t m) {
    const bool quick = kLanes == 16 && (TYPE == kF16 || TYPE == kBF16);
    return TYPE != kF32 && !quick && m >= kConvertFrom;
}

// One k panel of one strip, for two vectors of rows.
struct FloatPanel {
    const void* values[2];  // [k][16] of TYPE, from the vector's first row on
    const uint8_t* ahead[2];  // bytes to prefetch meanwhile; null: none
    int64_t k;              // of the panel
    int64_t x_stride;
    bool first;  // sums start here
};

template <int TYPE, int MR>
__attribute__((noinline)) static void panel_float(const FloatPanel* p, const float* x,
                                                  float* sums) {
    const int64_t k = p->k, stride = p->x_stride;
    const void *value0 = p->values[0], *value1 = p->values[1];
    VF acc0[MR], acc1[MR];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) acc0[r] = acc1[r] = zero();
    const uint8_t *ahead0 = p->ahead[0], *ahead1 = p->ahead[1];
    const int64_t per_line = 64 / (element_bytes(TYPE) * kTileRows);  // k of a block in 64 bytes
    for (int64_t i = 0; i < k; ++i, ++x) {
        if (ahead0 && i % per_line == 0) {
            prefetch(ahead0);
            prefetch(ahead1);
            ahead0 += 64;
            ahead1 += 64;
        }
        const VF a = load_as(TYPE, value0, i * kTileRows), b = load_as(TYPE, value1, i * kTileRows);
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
            const VF each = set1(x[r * stride]);
            acc0[r] = fma(a, each, acc0[r]);
            acc1[r] = fma(b, each, acc1[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
        float* to = sums + r * kStripRows;
        store(to, p->first ? acc0[r] : add(load(to), acc0[r]));
        store(to + kLanes, p->first ? acc1[r] : add(load(to + kLanes), acc1[r]));
    }
}

template <int TYPE>
static void rows_float(FloatPanel* p, const float* x, int64_t m, float* sums) {
    while (m > 0) {
        int done = 1;
        if (kMaxFloatRows == 8 && m >= 8) {
            panel_float<TYPE, kMaxFloatRows>(p, x, sums);
            done = 8;
        } else if (m >= 4) {
            panel_float<TYPE, 4>(p, x, sums);
            done = 4;
        } else if (m >= 2) {
            panel_float<TYPE, 2>(p, x, sums);
            done = 2;
        } else {
            panel_float<TYPE, 1>(p, x, sums);
        }
        p->ahead[0] = p->ahead[1] = nullptr;
        m -= done;
        x += done * p->x_stride;
        sums += done * kStripRows;
    }
}

template <int BITS>
INLINE VF value_of(const Weight* w, VB code, int c, VF zero_point, VF scale, VF minus) {
    if (BITS >= kLookup) return mul(look_up_float(w->table, code_int(code, c)), scale);
    return sub(mul(sub(code_float(code, c), zero_point), scale), minus);
}

// kLanes numbers at k from row `first` on, of [k][rows] that repeat.
INLINE VF column(const Weight* w, int type, const void* base, int64_t k, int64_t first) {
    const int64_t row = k * w->scale_rows;
    if (first + kLanes <= w->scale_rows) return load_as(type, base, row + first);
    const int64_t bytes = element_bytes(type);
    uint8_t lanes[kLanes * sizeof(float)];  // they continue with the first row
    for (int i = 0; i < kLanes; ++i) {
        const int64_t at = row + (first + i) % w->scale_rows;
        memcpy(lanes + i * bytes, (const uint8_t*)base + at * bytes, (size_t)bytes);
    }
    return load_as(type, lanes, 0);
}

// The same as dequantize_blocks for weights where every k has its own scales.
template <int BITS>
static void dequantize_columns(const Weight* w, int64_t b, int64_t i, int64_t i_end, float* out) {
    const Tiles tiles = tiles_of(w, b);
    for (int h = 0; h < kPerBlock; ++h) {
        const int64_t first = (b * kTileRows + h * kLanes) % w->scale_rows;
        float* to = out + h * kLanes;
        for (int64_t k = i * kTileDepth; k < i_end * kTileDepth; ++k, to += kTileRows) {
            const int64_t at = k < w->k ? k : w->k - 1;
            const uint8_t* tile = tiles.first + k / kTileDepth * tiles.step;
            const VF code =
                code_float(codes_of<BITS>(tile, (int)(k % kTileDepth / 4), h), (int)(k % 4));
            VF value = w->zeros ? column(w, w->zeros_type, w->zeros, at, first) : set1(w->zero);
            value = mul(sub(code, value), column(w, w->scale_type, w->scale, at, first));
            if (w->minus) value = sub(value, column(w, w->minus_type, w->minus, at, first));
            store(to, value);
        }
    }
}

// k blocks [i, i_end) of one row block as floats, [32 * blocks][16].
template <int BITS>
static void dequantize_blocks(const Weight* w, int64_t b, int64_t i, int64_t i_end, float* out) {
    const Tiles tiles = tiles_of(w, b);
    const int per_subgroup = w->subgroup / 4;  // vectors j that share a scale
    for (; i < i_end; ++i, out += kTileDepth * kTileRows) {
        for (int h = 0; h < kPerBlock; ++h) {
            VF scale = zero(), zero_point = zero(), minus = zero();
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) {
                if (j % per_subgroup == 0)
                    scale_of(w, b, i * (kTileDepth / w->subgroup) + j / per_subgroup, h, &scale,
                             &zero_point, &minus);
                VB code = codes_of<BITS & kBitsMask>(tiles.first + i * tiles.step, j, h);
                float* to = out + 4 * j * kTileRows + h * kLanes;
#pragma GCC unroll 4
                for (int c = 0; c < 4; ++c)
                    store(to + c * kTileRows, value_of<BITS>(w, code, c, zero_point, scale, minus));
            }
        }
    }
}

static void dequantize_panel(const Weight* w, int64_t b, int64_t i, int64_t i_end, float* out) {
    if (w->subgroup == 1) {
        switch (w->bits) {
            case 2: dequantize_columns<2>(w, b, i, i_end, out); break;
            case 3: dequantize_columns<3>(w, b, i, i_end, out); break;
            case 4: dequantize_columns<4>(w, b, i, i_end, out); break;
            case 5: dequantize_columns<5>(w, b, i, i_end, out); break;
            case 6: dequantize_columns<6>(w, b, i, i_end, out); break;
            case 7: dequantize_columns<7>(w, b, i, i_end, out); break;
            case 8: dequantize_columns<8>(w, b, i, i_end, out); break;
        }
        return;
    }
    switch (w->table ? w->bits + kLookup : w->bits) {
        case 1 + kLookup: dequantize_blocks<1 + kLookup>(w, b, i, i_end, out); break;
        case 3 + kLookup: dequantize_blocks<3 + kLookup>(w, b, i, i_end, out); break;
        case 4 + kLookup: dequantize_blocks<4 + kLookup>(w, b, i, i_end, out); break;
        case 2: dequantize_blocks<2>(w, b, i, i_end, out); break;
        case 3: dequantize_blocks<3>(w, b, i, i_end, out); break;
        case 4: dequantize_blocks<4>(w, b, i, i_end, out); break;
        case 5: dequantize_blocks<5>(w, b, i, i_end, out); break;
        case 6: dequantize_blocks<6>(w, b, i, i_end, out); break;
        case 7: dequantize_blocks<7>(w, b, i, i_end, out); break;
        case 8: dequantize_blocks<8>(w, b, i, i_end, out); break;
    }
}

// One k panel of one strip for `m` rows of x; `blocks` are its two parts, [k][16] TYPE.
template <int TYPE>
static void multiply_float(FloatPanel panel, const void* const* blocks, const float* x, int64_t m,
                        float* sums, float* values) {
    if (converts_first<TYPE>(m)) {
        for (int b = 0; b < kStripBlocks; ++b)
            for (int64_t i = 0; i < panel.k * kTileRows; i += kLanes)
                store(values + b * kFloatPanelDepth * kTileRows + i, load_as(TYPE, blocks[b], i));
        const void* converted[] = {values, values + kFloatPanelDepth * kTileRows};
        panel.ahead[0] = panel.ahead[1] = nullptr;
        multiply_float<kF32>(panel, converted, x, m, sums, values);
        return;
    }
    for (int g = 0; g < kPerBlock; ++g) {
        for (int v = 0; v < 2; ++v) {
            const int b = (2 * g + v) / kPerBlock, at = (2 * g + v) % kPerBlock * kLanes;
            panel.values[v] = (const uint8_t*)blocks[b] + at * element_bytes(TYPE);
        }
        rows_float<TYPE>(&panel, x, m, sums + 2 * g * kLanes);
    }
}

static void multiply_as(int type, const FloatPanel& panel, const void* const* blocks, const float* x,
                     int64_t m, float* sums, float* values) {
    switch (type) {
        case kF16: multiply_float<kF16>(panel, blocks, x, m, sums, values); break;
        case kBF16: multiply_float<kBF16>(panel, blocks, x, m, sums, values); break;
        case kE4M3: multiply_float<kE4M3>(panel, blocks, x, m, sums, values); break;
        case kE5M2: multiply_float<kE5M2>(panel, blocks, x, m, sums, values); break;
        default: multiply_float<kF32>(panel, blocks, x, m, sums, values);
    }
}

static void linear_float(const LinearArgs* args, const ItemRange* strips, uint8_t* scratch) {
    const Weight* w = args->w;
    const int64_t k = w->k, pass = float_rows_per_pass(args->m, k);
    const float* const x = args->act.values ? args->act.values : args->x;
    const int64_t row_bytes = k * kTileRows * element_bytes(w->scale_type);
    float* sums = (float*)scratch;
    float* values = sums + pass * kStripRows;
    for (int64_t m = 0; m < args->m; m += pass) {
        const int64_t m_end = m + pass < args->m ? m + pass : args->m;
        for (int64_t s = strips->begin; s < strips->end; ++s) {
            const Strip strip = strip_at(w, s), after = strip_at(w, s + 1);
            for (int64_t i = 0; i < k; i += kFloatPanelDepth) {
                const int64_t i_end = i + kFloatPanelDepth < k ? i + kFloatPanelDepth : k;
                FloatPanel panel = {{}, {}, i_end - i, k, i == 0};
                const void* blocks[] = {values, values + kFloatPanelDepth * kTileRows};
                for (int b = 0; b < kStripBlocks; ++b) {
                    if (w->dense && w->scale) {
                        scaled_values(w, strip.block[b], i, i_end,
                                      values + b * kFloatPanelDepth * kTileRows);
                    } else if (w->dense) {
                        const int64_t step = row_bytes / (k * kTileRows) * kTileRows;
                        const Strip& next = i_end < k ? strip : after;
                        blocks[b] = w->codes + strip.block[b] * row_bytes + i * step;
                        panel.ahead[b] = w->codes + next.block[b] * row_bytes +
                                         (i_end < k ? i_end * step : 0);
                    } else {
                        dequantize_panel(w, strip.block[b], i / kTileDepth,
                                         (i_end + kTileDepth - 1) / kTileDepth,
                                         values + b * kFloatPanelDepth * kTileRows);
                    }
                }
                multiply_as(w->dense && !w->scale ? w->scale_type : (int)kF32, panel, blocks,
                            x + m * k + i, m_end - m, sums, values);
            }
            store_strip(args, s, strip.valid, m, m_end, sums);
        }
    }
}

}  // namespace LEVEL
