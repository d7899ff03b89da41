// Norms, activations, angles of rotations, and rows that move. Part of abi.hpp, whose rules hold here.
#pragma once

#include <stdint.h>

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
enum GateKind {
    kGateSigmoid = 0,
    kGateSoftplus = 1,
    kGateSilu = 2,
    kGateLinear = 3,
    kGateTanh = 4,  // of rates alone
    kGateKinds = 5,
};

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
