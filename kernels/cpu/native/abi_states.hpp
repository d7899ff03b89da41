// Recurrent states, the operators over them, and their norms. Part of abi.hpp, whose rules hold here.
#pragma once

#include <stdint.h>

// The states that the requests of a step begin with and leave: kernels/operators/states.py. The tokens of a request
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
// A state is [taps - 1][width]: the last inputs. There may be several convolutions of the same inputs, without
// `before` and `after`.
struct ConvArgs {
    StateRows rows;
    const float* x;
    const float* weight;  // [several][width][taps]
    const float* bias;    // [several][width]; null: none; so are the next two
    const float* before;
    const float* after;
    float* out;  // [several] times [T, width], out_step apart
    int64_t x_token, before_token, after_token, out_step, width;
    int64_t chunks;  // of tokens; set by the runtime
    int32_t taps, silu, several;
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
    // RWKV-7, if rate is not null: by_row, one head of keys for each of values, of the same size; beta, eps and
    // scale are not read. With u = k * key_norm / |k * key_norm|: S = (e^decay - (u * rate) u^T) S + key v,
    // out = q S; key = k (1 + (rate - 1) key_mix), v moves towards `first` by `mix`. own = (q * key_read . key) v.
    const float *rate, *first, *mix;                // first, mix null: v stays
    const float *key_norm, *key_mix, *key_read;     // [heads][key_dim]
    float* own;                                     // as out
    int64_t rate_token, rate_head, first_token, first_head, mix_token, mix_head;
};

// S = e^(dt a) S + dt x b^T, out = S c + d x, for each token of a head; a state is [heads][width][size].
// With by_row each row of a state has its own dt and d, next to each other, and each number of it its own a
// (Mamba-1): a is [heads][width][size], d [heads][width].
struct SpaceArgs {
    StateRows rows;
    const float *x, *dt, *a, *b, *c;
    const float* d;  // null: none
    float* out;      // [T, heads, width]
    int64_t x_token, x_head, dt_token, dt_head, b_token, b_group, c_token, c_group;
    int32_t heads, groups, width, size;
    int32_t by_row;
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
