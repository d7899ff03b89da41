// Rotary embedding with norms of heads and the write into the KV pages, and its angles.
//
// Every row (token) is computed alone, so the batch never changes a result.
#pragma once

#include "elementwise.hpp"
#include "page_codes.hpp"

namespace LEVEL {

// Halves rotate against each other: (a, b) -> (a c - b s, b c + a s), as Hugging Face models do.
// `out` may be x.
INLINE void rotate(const float* x, float* out, const float* cos, const float* sin, int half,
                   int width) {
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        VF a = load(x + i), b = load(x + i + half), c = load(cos + i), s = load(sin + i);
        store(out + i, sub(mul(a, c), mul(b, s)));
        store(out + i + half, add(mul(b, c), mul(a, s)));
    }
    for (; i < half; ++i) {
        float a = x[i], b = x[i + half];
        out[i] = a * cos[i] - b * sin[i];
        out[i + half] = b * cos[i] + a * sin[i];
    }
    if (out != x) memcpy(out + 2 * half, x + 2 * half, sizeof(float) * (size_t)(width - 2 * half));
}

// The RMSNorm of a head. `out` may be x.
INLINE void norm_head(const float* x, float* out, const float* weight, const RopeArgs* a, int width) {
    NormArgs args = {};
    args.width = width;
    args.eps = a->eps;
    normalize_row<false, true, false>(&args, x, weight, out);
}

// What a head is before it goes to a page: rotated, and normalized if it has a norm. `out` may be x.
INLINE void prepare_head(const RopeArgs* a, const float* x, float* out, const float* cos, const float* sin,
                         const float* norm) {
    if (norm && !a->norm_after) {
        norm_head(x, out, norm, a, a->head_dim);
        x = out;
    }
    rotate(x, out, cos, sin, a->half, a->head_dim);
    if (norm && a->norm_after) norm_head(out, out, norm, a, a->head_dim);
}

// A key in its slot.
INLINE void write_key(const RopeArgs* a, int64_t t, int h, float* key, int block) {
    const PageSide& keys = a->pages.keys;
    const int64_t page = a->slots[t] / a->page_size, slot = a->slots[t] % a->page_size;
    const float* centre = a->key_centre ? a->key_centre + h * a->head_dim : nullptr;
    for (int d = 0; d < a->head_dim && centre; ++d) key[d] -= centre[d];
    if (prepares(keys)) prepare(keys, key, key, a->head_dim, block);
    to_page(keys, page * keys.page + h * keys.head + slot, keys.step,
            scales_of(keys, a->head_dim, page, h, slot), key, a->head_dim);
}

// What a query gets by its position.
INLINE float query_factor(const RopeArgs* a, int64_t t) {
    return a->positions ? 1.0f + a->beta * log1pf((float)((a->positions[t] + a->shift) / a->length)) : 1.0f;
}

// Latent pages: the parts that turn are the last dimensions of queries and of keys.
static void rope_latent(const RopeArgs* a, int64_t t_begin, int64_t t_end) {
    float key[kMaxHeadDim];
    const int first = a->value_dim, turned = a->head_dim - first, block = mixed_block(a->head_dim, first);
    for (int64_t t = t_begin; t < t_end; ++t) {
        const float *cos = a->cos + t * a->cos_token, *sin = a->sin + t * a->sin_token;
        const float factor = query_factor(a, t);
        for (int h = 0; h < a->heads; ++h) {
            float* q = a->q + t * a->q_token + h * a->q_head;
            rotate(a->q_turned + t * a->turned_token + h * a->turned_head, q + first, cos, sin, a->half, turned);
            for (int d = 0; d < a->head_dim && a->positions; ++d) q[d] *= factor;
            if (a->pages.keys.mixed) mix(q, a->head_dim, block);
        }
        for (int h = 0; h < a->kv_heads; ++h) {
            memcpy(key, a->v + t * a->v_token + h * a->v_head, sizeof(float) * (size_t)first);
            rotate(a->k + t * a->k_token + h * a->k_head, key + first, cos, sin, a->half, turned);
            write_key(a, t, h, key, block);
        }
    }
}

static void rope(const RopeArgs* a, int64_t t_begin, int64_t t_end) {
    if (a->q_turned) {
        rope_latent(a, t_begin, t_end);
        return;
    }
    const int block = mixed_block(a->head_dim, 0), value_block = mixed_block(a->value_dim, 0);
    const PageSide &keys = a->pages.keys, &values = a->pages.values;
    float key[kMaxHeadDim];
    for (int64_t t = t_begin; t < t_end; ++t) {
        const float* cos = a->cos + t * a->cos_token;
        const float* sin = a->sin + t * a->sin_token;
        const float factor = query_factor(a, t);
        for (int h = 0; h < a->heads; ++h) {
            float* q = a->q + t * a->q_token + h * a->q_head;
            prepare_head(a, q, q, cos, sin, a->q_norm);
            if (a->positions)
                for (int d = 0; d < a->head_dim; ++d) q[d] *= factor;
            if (keys.mixed) mix(q, a->head_dim, block);
        }
        const int64_t page = a->slots[t] / a->page_size, slot = a->slots[t] % a->page_size;
        for (int h = 0; h < a->kv_heads; ++h) {
            prepare_head(a, a->k + t * a->k_token + h * a->k_head, key, cos, sin, a->k_norm);
            write_key(a, t, h, key, block);
            const float* v = a->v + t * a->v_token + h * a->v_head;
            float prepared[kMaxHeadDim];
            if (a->v_norm) {
                norm_head(v, prepared, a->v_norm, a, a->value_dim);
                v = prepared;
            }
            if (prepares(values)) {
                prepare(values, v, prepared, a->value_dim, value_block);
                v = prepared;
            }
            to_page(values, page * values.page + h * values.head + slot * values.step, 1,
                    scales_of(values, a->value_dim, page, h, slot), v, a->value_dim);
        }
    }
}

static void rope_angles(const AnglesArgs* a, int64_t t_begin, int64_t t_end) {
    for (int64_t t = t_begin; t < t_end; ++t) {
        float position = (float)a->positions[t];
        for (int64_t i = 0; i < a->half; ++i) {
            if (a->axes) {
                const int64_t axis = a->axes[i];
                const int64_t shift = a->shifts ? a->shifts[axis * a->shift_stride + t] : 0;
                position = (float)(a->positions[axis * a->axis_stride + t] + shift);
            }
            const float angle = position * a->inv_freq[i];
            a->cos[t * a->half + i] = cosf(angle) * a->factor;
            a->sin[t * a->half + i] = sinf(angle) * a->factor;
        }
    }
}

}  // namespace LEVEL
