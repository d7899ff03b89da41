// Norms and activations.
//
// Every row (token) is computed alone in a fixed order, so the batch never changes a result.
#pragma once

#include "abi.hpp"
#include "simd.hpp"

namespace LEVEL {

// e^x for x in [-87.3, 88]; below, 0; above, e^88. NaN stays NaN. n = rint(x / ln 2), then a degree
// 6 Taylor-like polynomial on |r| <= ln(2) / 2 (Cephes expf); error below 2 ulp.
INLINE VF exp_of(VF x) {
    VF limited = max(set1(-87.3f), min(set1(88.0f), x));
    VI n = round_int(mul(limited, set1(1.44269504f)));
    VF whole = to_float(n);
    VF r = fma(whole, set1(-0.693359375f), limited);
    r = fma(whole, set1(2.12194440e-4f), r);
    VF p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), set1(1.0f));
    return select_less(x, set1(-87.3f), zero(), mul(p, power_of_two(n)));
}

// 2^x for x <= 0, NaN stays NaN. A polynomial of degree 6 (largest relative error 8e-8) of the distance
// to the nearest integer, which is exact. Below -126.5 it is 0.
INLINE VF exp2_of(VF x) {
    const VF limited = max(set1(-127.0f), x);
    const VF n = nearest(limited), r = sub(limited, n);
    VF p = set1(1.535336196e-4f);
    p = fma(p, r, set1(1.339887502e-3f));
    p = fma(p, r, set1(9.618436918e-3f));
    p = fma(p, r, set1(5.550332367e-2f));
    p = fma(p, r, set1(2.402264774e-1f));
    p = fma(p, r, set1(6.931471825e-1f));
    p = fma(p, r, set1(1.0f));
    return times_power_of_two(p, n);
}

// tanh: a polynomial below 0.625, where 1 - e^-2x would cancel (Cephes tanhf); else from exp.
INLINE VF tanh_of(VF x) {
    VF size = abs(x), square = mul(x, x);
    VF e = exp_of(mul(size, set1(-2.0f)));
    VF far = copysign(div(sub(set1(1.0f), e), add(set1(1.0f), e)), x);
    VF p = set1(-5.70498872745e-3f);
    p = fma(p, square, set1(2.06390887954e-2f));
    p = fma(p, square, set1(-5.37397155531e-2f));
    p = fma(p, square, set1(1.33314422036e-1f));
    p = fma(p, square, set1(-3.33332819422e-1f));
    VF near = fma(mul(p, square), x, x);
    return select_less(size, set1(0.625f), near, far);
}

static float mean_of(const float* x, int64_t width) {
    const int64_t body = width / kLanes * kLanes;
    VF sums[2] = {zero(), zero()};
    for (int64_t i = 0; i < body; i += kLanes)
        sums[(i / kLanes) & 1] = add(sums[(i / kLanes) & 1], load(x + i));
    float total = reduce_add(add(sums[0], sums[1]));
    for (int64_t i = body; i < width; ++i) total += x[i];
    return total / (float)width;
}

// WEIGHT, BIAS: whether there are any. The mean is taken from each value before it is squared: of large
// numbers close to each other, the mean of squares minus the square of the mean would be rounding errors.
template <bool CENTRED, bool WEIGHT, bool BIAS>
INLINE void normalize_row(const NormArgs* args, const float* x, const float* weight, float* out) {
    const int64_t width = args->width;
    const int64_t body = width / kLanes * kLanes;
    const float mean = CENTRED ? mean_of(x, width) : 0.0f;
    VF sums[2] = {zero(), zero()};
    for (int64_t i = 0; i < body; i += kLanes) {
        VF value = CENTRED ? sub(load(x + i), set1(mean)) : load(x + i);
        sums[(i / kLanes) & 1] = fma(value, value, sums[(i / kLanes) & 1]);
    }
    float total = reduce_add(add(sums[0], sums[1]));
    for (int64_t i = body; i < width; ++i) total += (x[i] - mean) * (x[i] - mean);
    const float scale = 1.0f / __builtin_sqrtf(total / (float)width + args->eps);
    for (int64_t i = 0; i < body; i += kLanes) {
        VF value = CENTRED ? sub(load(x + i), set1(mean)) : load(x + i);
        value = mul(value, set1(scale));
        if (WEIGHT) value = mul(value, load(weight + i));
        if (BIAS) value = add(value, load(args->bias + i));
        store(out + i, value);
    }
    for (int64_t i = body; i < width; ++i) {
        float value = (x[i] - mean) * scale;
        if (WEIGHT) value *= weight[i];
        if (BIAS) value += args->bias[i];
        out[i] = value;
    }
}

template <bool CENTRED, bool WEIGHT, bool BIAS>
static void normalize(const NormArgs* args, int64_t t_begin, int64_t t_end) {
    const int64_t width = args->width;
    const int64_t body = width / kLanes * kLanes;
    for (int64_t t = t_begin; t < t_end; ++t) {
        const float* x = args->x + t / args->inner * args->outer_stride +
                         t % args->inner * args->inner_stride;
        if (args->residual) {
            float* residual = args->residual + t * width;
            for (int64_t i = 0; i < body; i += kLanes)
                store(residual + i, add(load(residual + i), load(x + i)));
            for (int64_t i = body; i < width; ++i) residual[i] += x[i];
            x = residual;
        }
        const float* weight = args->weight + t % args->inner * args->weight_stride;
        normalize_row<CENTRED, WEIGHT, BIAS>(args, x, WEIGHT ? weight : nullptr, args->out + t * width);
    }
}

static void norm(const NormArgs* args, int64_t t_begin, int64_t t_end) {
    if (args->centred) {
        if (args->weight && args->bias) normalize<true, true, true>(args, t_begin, t_end);
        else if (args->weight) normalize<true, true, false>(args, t_begin, t_end);
        else if (args->bias) normalize<true, false, true>(args, t_begin, t_end);
        else normalize<true, false, false>(args, t_begin, t_end);
    } else if (args->bias) {
        if (args->weight) normalize<false, true, true>(args, t_begin, t_end);
        else normalize<false, false, true>(args, t_begin, t_end);
    } else if (args->weight) {
        normalize<false, true, false>(args, t_begin, t_end);
    } else {
        normalize<false, false, false>(args, t_begin, t_end);
    }
}

// SiLU, or GELU with tanh.
template <int KIND>
INLINE VF with_sigmoid(VF x) {
    VF exponent = mul(x, set1(-1.0f));
    if (KIND == kGeluTanh) {  // 0.5 (1 + tanh u) = 1 / (1 + e^-2u), which does not cancel
        VF inner = fma(mul(mul(x, x), set1(0.044715f)), x, x);
        exponent = mul(inner, set1(-2.0f * 0.7978845608028654f));
    }
    return div(x, add(set1(1.0f), exp_of(exponent)));
}

// Of gpt-oss: both inputs clamped (a NaN stays NaN), a steeper sigmoid, one added to `up`.
INLINE VF clamped_swiglu(VF gate, VF up) {
    gate = min(set1(7.0f), gate);
    up = max(set1(-7.0f), min(set1(7.0f), up));
    const VF exponent = exp_of(mul(gate, set1(-1.702f)));
    return mul(add(up, set1(1.0f)), div(gate, add(set1(1.0f), exponent)));
}

// GELU, x times the normal distribution function of x. Below 1.4 by a polynomial of 0.5 erf(x / sqrt 2) / x
// in x^2, above by one of log(0.5 erfc(x / sqrt 2)), so that nothing cancels below 0. Both were fitted in
// float64; the largest error of the result is 6e-8 of max(1, |x|). NaN stays NaN.
INLINE VF gelu(VF x) {
    const VF size = min(set1(10.0f), abs(x)), square = mul(size, size);
    VF p = set1(4.3909407e-7f);
    p = fma(p, square, set1(-8.8795051e-6f));
    p = fma(p, square, set1(1.1470885e-4f));
    p = fma(p, square, set1(-1.186842e-3f));
    p = fma(p, square, set1(9.9734003e-3f));
    p = fma(p, square, set1(-6.649036e-2f));
    p = fma(p, square, set1(3.9894229e-1f));
    const VF near = mul(x, fma(x, p, set1(0.5f)));
    VF q = set1(4.919205e-8f);
    q = fma(q, size, set1(-2.4617682e-6f));
    q = fma(q, size, set1(5.4232594e-5f));
    q = fma(q, size, set1(-7.0151797e-4f));
    q = fma(q, size, set1(6.0372269e-3f));
    q = fma(q, size, set1(-3.7521359e-2f));
    q = fma(q, size, set1(-3.1795374e-1f));
    q = fma(q, size, set1(-7.9757369e-1f));
    q = fma(q, size, set1(-6.9336665e-1f));
    const VF rest = mul(x, exp_of(q));
    return select_less(size, set1(1.4f), near, select_less(x, zero(), rest, sub(x, rest)));
}

// e^x - 1 - x for x <= 0, NaN stays NaN. Near 0 by the polynomial of exp_of, where 1 and x would cancel.
INLINE VF exp_rest(VF x) {
    VF p = set1(1.9875691500e-4f);
    p = fma(p, x, set1(1.3981999507e-3f));
    p = fma(p, x, set1(8.3334519073e-3f));
    p = fma(p, x, set1(4.1665795894e-2f));
    p = fma(p, x, set1(1.6666665459e-1f));
    p = fma(p, x, set1(5.0000001201e-1f));
    const VF far = sub(sub(exp_of(x), set1(1.0f)), x);
    return select_less(x, set1(-0.3465f), far, mul(mul(x, x), p));
}

// xIELU (Huang and Schlag 2024, arXiv 2411.13010), as transformers computes it: with `beta` b, and the
// limit e, which is below 0: above 0 alpha_p x^2 + b x, else alpha_n (e^min(x, e) - 1 - x) + b x.
INLINE VF xielu(VF x, const float* numbers) {
    const VF near = min(set1(numbers[3]), x);
    const VF low = mul(set1(numbers[1]), add(exp_rest(near), sub(near, x)));
    const VF high = mul(mul(set1(numbers[0]), x), x);
    return fma(set1(numbers[2]), x, select_less(zero(), x, high, low));
}

template <int KIND>
INLINE VF activate(const ActivationArgs* args, VF x) {
    if (KIND == kRelu) return max(zero(), x);
    if (KIND == kRelu2) return mul(max(zero(), x), max(zero(), x));
    if (KIND == kGelu) return gelu(x);
    return KIND == kXielu ? xielu(x, args->numbers) : with_sigmoid<KIND>(x);
}

template <int KIND, bool GATED>
INLINE VF activated(const ActivationArgs* args, VF gate, VF up) {
    if (KIND == kClampedSwiglu) return clamped_swiglu(gate, up);
    return GATED ? mul(activate<KIND>(args, gate), up) : activate<KIND>(args, gate);
}

template <int KIND, bool GATED>
static void activate_rows(const ActivationArgs* args, int64_t t_begin, int64_t t_end) {
    const int64_t width = args->width;
    for (int64_t t = t_begin; t < t_end; ++t) {
        const float* gate = args->x + (GATED ? 2 : 1) * t * width;
        const float* up = GATED ? gate + width : gate;
        float* out = args->out + t * width;
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes)
            store(out + i, activated<KIND, GATED>(args, load(gate + i), load(up + i)));
        if (i < width) {
            float padded[2][kLanes] = {{0.0f}};
            memcpy(padded[0], gate + i, (size_t)(width - i) * sizeof(float));
            memcpy(padded[1], up + i, (size_t)(width - i) * sizeof(float));
            store(padded[0], activated<KIND, GATED>(args, load(padded[0]), load(padded[1])));
            memcpy(out + i, padded[0], (size_t)(width - i) * sizeof(float));
        }
    }
}

template <int KIND>
static void activate_either(const ActivationArgs* args, int64_t t_begin, int64_t t_end) {
    if (args->gated) activate_rows<KIND, true>(args, t_begin, t_end);
    else activate_rows<KIND, false>(args, t_begin, t_end);
}

static void activation(const ActivationArgs* args, int64_t t_begin, int64_t t_end) {
    switch (args->kind) {
        case kSilu: activate_either<kSilu>(args, t_begin, t_end); break;
        case kGeluTanh: activate_either<kGeluTanh>(args, t_begin, t_end); break;
        case kClampedSwiglu: activate_rows<kClampedSwiglu, true>(args, t_begin, t_end); break;
        case kRelu: activate_either<kRelu>(args, t_begin, t_end); break;
        case kRelu2: activate_either<kRelu2>(args, t_begin, t_end); break;
        case kXielu: activate_either<kXielu>(args, t_begin, t_end); break;
        default: activate_either<kGelu>(args, t_begin, t_end);
    }
}

INLINE VF sigmoid_of(VF x) { return div(set1(1.0f), add(set1(1.0f), exp_of(mul(x, set1(-1.0f))))); }

static float gate_value(float x, int kind) {
    if (kind == kGateLinear) return x;
    if (kind == kGateSoftplus) return (x > 0.0f ? x : 0.0f) + log1pf(expf(x > 0.0f ? -x : x));
    const float sigmoid = 1.0f / (1.0f + expf(-x));
    return kind == kGateSilu ? x * sigmoid : sigmoid;
}

static void gate(const GateArgs* args, int64_t t_begin, int64_t t_end) {
    const int64_t width = args->width, gates = args->gates;
    for (int64_t t = t_begin; t < t_end; ++t) {
        float* x = args->x + t * width * gates;
        const float* gate = args->gate + t * args->gate_stride;
        if (width > 1) {  // one of a head: few, so that the C library's functions are fast enough
            for (int64_t g = 0; g < gates; ++g) {
                const float value = gate_value(gate[g], args->kind);
                for (int64_t i = 0; i < width; ++i) x[g * width + i] *= value;
            }
            continue;
        }
        int64_t g = 0;
        if (args->kind == kGateSigmoid)
            for (; g + kLanes <= gates; g += kLanes)
                store(x + g, mul(load(x + g), sigmoid_of(load(gate + g))));
        if (args->kind == kGateSilu)
            for (; g + kLanes <= gates; g += kLanes) {
                const VF value = load(gate + g);
                store(x + g, mul(load(x + g), mul(value, sigmoid_of(value))));
            }
        if (args->kind == kGateLinear)
            for (; g + kLanes <= gates; g += kLanes) store(x + g, mul(load(x + g), load(gate + g)));
        for (; g < gates; ++g) x[g] *= gate_value(gate[g], args->kind);
    }
}

// log(1 + e) for e in 0..1, NaN stays NaN: 2 artanh(s) by its series, s = e / (2 + e) is at most 1/3. The
// first term left out is below 2e-8 of the result.
INLINE VF log_of_one_plus(VF e) {
    const VF s = div(e, add(set1(2.0f), e)), square = mul(s, s);
    VF p = set1(1.0f / 15.0f);
    p = fma(p, square, set1(1.0f / 13.0f));
    p = fma(p, square, set1(1.0f / 11.0f));
    p = fma(p, square, set1(1.0f / 9.0f));
    p = fma(p, square, set1(1.0f / 7.0f));
    p = fma(p, square, set1(1.0f / 5.0f));
    p = fma(p, square, set1(1.0f / 3.0f));
    const VF twice = add(s, s);
    return fma(mul(twice, square), p, twice);
}

INLINE VF softplus_of(VF x) {
    return add(max(zero(), x), log_of_one_plus(exp_of(mul(abs(x), set1(-1.0f)))));
}

// The first `count` lanes, or all; the others are 0, and are not written.
INLINE VF load_some(const float* p, int64_t count) {
    if (count >= kLanes) return load(p);
    float padded[kLanes] = {0.0f};
    memcpy(padded, p, (size_t)count * sizeof(float));
    return load(padded);
}

INLINE void store_some(float* p, VF x, int64_t count) {
    if (count >= kLanes) return store(p, x);
    float padded[kLanes];
    store(padded, x);
    memcpy(p, padded, (size_t)count * sizeof(float));
}

INLINE VF rates_of(const RatesArgs* args, VF x) {
    VF y = args->kind == kGateSoftplus ? softplus_of(x) : args->kind == kGateTanh ? tanh_of(x) : sigmoid_of(x);
    return args->limited ? max(set1(args->low), min(set1(args->high), y)) : y;
}

static void rates(const RatesArgs* args, int64_t t_begin, int64_t t_end) {
    const int64_t width = args->width;
    for (int64_t t = t_begin; t < t_end; ++t) {
        const float* x = args->x + t * args->x_token;
        float* out = args->out + t * width;
        for (int64_t i = 0; i < width; i += kLanes) {
            const VF bias = args->bias ? load_some(args->bias + i, width - i) : zero();
            store_some(out + i, rates_of(args, add(load_some(x + i, width - i), bias)), width - i);
        }
        if (!args->factor) continue;
        const int64_t run = width / args->factors;
        for (int64_t f = 0; f < args->factors; ++f)
            for (int64_t i = 0; i < run; ++i) out[f * run + i] *= args->factor[f];
    }
}

template <int KIND>
INLINE VF norm_gate(VF gate) {
    return KIND == kNormSilu ? with_sigmoid<kSilu>(gate) : sigmoid_of(gate);
}

// A row: `out` is x times its gate if that is FIRST, else x, then normalized.
template <int KIND, bool FIRST>
static void gated_norm_row(const GatedNormArgs* args, const float* x, const float* gate, const float* weight,
                           float* out) {
    const int64_t width = args->width;
    VF sum = zero();
    for (int64_t i = 0; i < width; i += kLanes) {
        VF value = load_some(x + i, width - i);
        if (FIRST) value = mul(value, norm_gate<KIND>(load_some(gate + i, width - i)));
        sum = fma(value, value, sum);
        store_some(out + i, value, width - i);
    }
    const VF scale = set1(1.0f / __builtin_sqrtf(reduce_add(sum) / (float)width + args->eps));
    for (int64_t i = 0; i < width; i += kLanes) {
        VF value = mul(load_some(out + i, width - i), scale);
        if (weight) value = mul(value, load_some(weight + i, width - i));
        if (!FIRST) value = mul(value, norm_gate<KIND>(load_some(gate + i, width - i)));
        store_some(out + i, value, width - i);
    }
}

static void gated_norm(const GatedNormArgs* args, int64_t t_begin, int64_t t_end) {
    for (int64_t t = t_begin; t < t_end; ++t) {
        const int64_t token = t / args->heads, head = t % args->heads;
        const float* x = args->x + token * args->x_token + head * args->x_head;
        const float* gate = args->gate + token * args->gate_token + head * args->gate_head;
        const float* weight = args->weight ? args->weight + head * args->weight_head : nullptr;
        float* out = args->out + t * args->width;
        if (args->kind == kNormSilu) {
            if (args->first) gated_norm_row<kNormSilu, true>(args, x, gate, weight, out);
            else gated_norm_row<kNormSilu, false>(args, x, gate, weight, out);
        } else {
            if (args->first) gated_norm_row<kNormSigmoid, true>(args, x, gate, weight, out);
            else gated_norm_row<kNormSigmoid, false>(args, x, gate, weight, out);
        }
    }
}

static void map(const MapArgs* args, int64_t t_begin, int64_t t_end) {
    const int64_t width = args->width;
    for (int64_t t = t_begin; t < t_end; ++t) {
        float* x = args->x + t * width;
        const float* other = args->kind == kMapAdd ? args->other + t * width : args->other;
        switch (args->kind) {
            case kMapZero: memset(x, 0, sizeof(float) * (size_t)width); break;
            case kMapAdd:
            case kMapBias:
                for (int64_t i = 0; i < width; ++i) x[i] += other[i];
                break;
            case kMapScale:
                for (int64_t i = 0; i < width; ++i) x[i] *= args->factor;
                break;
            case kMapClamp:  // a NaN stays NaN
                for (int64_t i = 0; i < width; ++i) {
                    if (x[i] > args->factor) x[i] = args->factor;
                    if (x[i] < -args->factor) x[i] = -args->factor;
                }
                break;
            default: {
                const VF cap = set1(args->factor);
                int64_t i = 0;
                for (; i + kLanes <= width; i += kLanes)
                    store(x + i, mul(tanh_of(div(load(x + i), cap)), cap));
                if (i < width) {
                    float padded[kLanes] = {0.0f};
                    memcpy(padded, x + i, (size_t)(width - i) * sizeof(float));
                    store(padded, mul(tanh_of(div(load(padded), cap)), cap));
                    memcpy(x + i, padded, (size_t)(width - i) * sizeof(float));
                }
            }
        }
    }
}

}  // namespace LEVEL
