// Causal depthwise convolutions over the tokens of requests: see state_plan.hpp for the work items.
#pragma once

#include "abi.hpp"
#include "elementwise.hpp"
#include "simd.hpp"
#include "state_plan.hpp"
#include "turn.hpp"

namespace LEVEL {

// A chunk of a request's tokens and a block of channels, and memory for rows of the block.
struct ConvItem {
    int64_t request, begin, end;  // tokens
    int64_t channel, width;       // first channel, channels
    float *tail, *products, *weights;  // [taps - 1], [taps], [several][taps] rows of kConvChannels
};

// The weights of a block of channels, one row for each tap. Three or four taps, of which each channel has as many
// in every released model, are turned four channels at a time; vectors of three read one number of the next channel.
static void conv_weights(const ConvArgs* a, const ConvItem* item) {
    const bool few = a->taps == 3 || a->taps == 4;
    for (int64_t m = 0; m < a->several; ++m) {
        const float* weight = a->weight + (m * a->width + item->channel) * a->taps;
        float* own = item->weights + m * a->taps * kConvChannels;
        int64_t c = 0;
        for (; few && c + 4 < item->width; c += 4) {
            Words of[4];
            for (int64_t r = 0; r < 4; ++r) memcpy(&of[r], weight + (c + r) * a->taps, sizeof of[r]);
            turn_words(of);
            for (int64_t j = 0; j < a->taps; ++j) memcpy(own + j * kConvChannels + c, &of[j], sizeof of[j]);
        }
        for (int64_t j = 0; j < a->taps; ++j)
            for (int64_t i = c; i < item->width; ++i) own[j * kConvChannels + i] = weight[i * a->taps + j];
    }
}

// What an item of the only token of its request reads from memory: weights and state of a block of channels.
static void prefetch_conv(const ConvArgs* a, int64_t request, int64_t channel) {
    const int64_t left = a->width - channel, width = left < kConvChannels ? left : (int64_t)kConvChannels;
    if (width <= 0 || a->rows.initial[request] < 0) return;
    const float* weight = a->weight + channel * a->taps;
    const float* state = a->rows.state + a->rows.initial[request] * a->rows.slot_step + channel;
    for (int64_t i = 0; i < width * a->taps; i += kCacheLine / 4) prefetch(weight + i);
    for (int64_t j = 0; j + 1 < a->taps; ++j)
        for (int64_t i = 0; i < width; i += kCacheLine / 4) prefetch(state + j * a->width + i);
}

// The input of a token of the request, at the item's channels.
static void conv_input(const ConvArgs* a, const ConvItem* item, int64_t token, float* out) {
    const float* x = a->x + token * a->x_token + item->channel;
    if (!a->before) {
        memcpy(out, x, sizeof(float) * (size_t)item->width);
        return;
    }
    const float* before = a->before + token * a->before_token + item->channel;
    for (int64_t c = 0; c < item->width; ++c) out[c] = x[c] * before[c];
}

// Reads the request's state into `tail`, then writes the states that it leaves, at the item's channels.
static void conv_states(const ConvArgs* a, const ConvItem* item) {
    const StateRows& rows = a->rows;
    const int64_t r = item->request, begin = rows.query_start[r], kept = a->taps - 1;
    const size_t bytes = sizeof(float) * (size_t)item->width;
    for (int64_t j = 0; j < kept; ++j) {
        float* tail = item->tail + j * kConvChannels;
        if (rows.initial[r] < 0) memset(tail, 0, bytes);
        else memcpy(tail, rows.state + rows.initial[r] * rows.slot_step + j * a->width + item->channel, bytes);
    }
    for (int64_t i = rows.save_start[r]; i < rows.save_start[r + 1]; ++i) {
        float* state = rows.state + rows.save_slot[i] * rows.slot_step + item->channel;
        for (int64_t j = 0; j < kept; ++j) {
            const int64_t token = rows.save_token[i] + 1 - kept + j;
            if (token >= begin) conv_input(a, item, token, state + j * a->width);
            else memcpy(state + j * a->width, item->tail + (kept + token - begin) * kConvChannels, bytes);
        }
    }
}

template <bool SILU>
INLINE VF conv_lanes(const ConvArgs* a, const float* bias, const float* weights, const float* const* in,
                     int64_t c) {
    VF y = bias ? load(bias + c) : zero();
    for (int64_t j = 0; j < a->taps; ++j) y = fma(load(weights + j * kConvChannels + c), load(in[j] + c), y);
    return SILU ? with_sigmoid<kSilu>(y) : y;
}

// A row of results of convolution m from the rows of inputs that a token sees.
template <bool SILU>
static void conv_row(const ConvArgs* a, const ConvItem* item, const float* const* in, int64_t token, int64_t m) {
    const float* after = a->after ? a->after + token * a->after_token + item->channel : nullptr;
    const float* bias = a->bias ? a->bias + m * a->width + item->channel : nullptr;
    const float* weights = item->weights + m * a->taps * kConvChannels;
    float* out = a->out + m * a->out_step + token * a->width + item->channel;
    int64_t c = 0;
    for (; c + kLanes <= item->width; c += kLanes) {
        const VF y = conv_lanes<SILU>(a, bias, weights, in, c);
        store(out + c, after ? mul(y, load(after + c)) : y);
    }
    for (; c < item->width; ++c) {  // as a vector would: a channel alone has the same bits everywhere
        float y = bias ? bias[c] : 0.0f, lanes[kLanes];
        for (int64_t j = 0; j < a->taps; ++j) y += weights[j * kConvChannels + c] * in[j][c];
        store(lanes, SILU ? with_sigmoid<kSilu>(set1(y)) : set1(y));
        out[c] = after ? lanes[0] * after[c] : lanes[0];
    }
}

static void conv_item(const ConvArgs* a, const ConvItem* item) {
    const int64_t first = a->rows.query_start[item->request], kept = a->taps - 1;
    if (item->begin == first) conv_states(a, item);
    // Inputs lie in the step's rows, or in `products` if they are products: those of a token in row
    // token % taps.
    const auto input_of = [&](int64_t token) -> const float* {
        if (token < first) return item->tail + (kept + token - first) * kConvChannels;
        if (!a->before) return a->x + token * a->x_token + item->channel;
        return item->products + token % a->taps * kConvChannels;
    };
    const int64_t known = item->begin - kept > first ? item->begin - kept : first;
    if (a->before)
        for (int64_t t = known; t < item->begin; ++t)
            conv_input(a, item, t, item->products + t % a->taps * kConvChannels);
    for (int64_t t = item->begin; t < item->end; ++t) {
        const float* in[kMaxTaps];
        if (a->before) conv_input(a, item, t, item->products + t % a->taps * kConvChannels);
        for (int64_t j = 0; j < a->taps; ++j) in[j] = input_of(t - kept + j);
        for (int64_t m = 0; m < a->several; ++m) {
            if (a->silu) conv_row<true>(a, item, in, t, m);
            else conv_row<false>(a, item, in, t, m);
        }
    }
}

static void conv(const ConvArgs* a, int64_t begin, int64_t end, uint8_t* scratch) {
    float* memory = (float*)scratch;
    const int64_t rows = a->taps * kConvChannels;
    ConvItem item = {0, 0, 0, -1, 0, memory, memory + rows, memory + 2 * rows};
    int64_t r = 0, before = 0;  // a request, and the chunks of those before it
    for (int64_t i = begin; i < end; ++i) {
        const int64_t chunk = i % a->chunks, channel = i / a->chunks * kConvChannels;
        if (chunk < before) r = before = 0;
        for (; chunk >= before + conv_chunks(a->rows, r); ++r) before += conv_chunks(a->rows, r);
        const int64_t first = a->rows.query_start[r] + (chunk - before) * kConvTokens;
        const int64_t last = a->rows.query_start[r + 1];
        item.request = r;
        item.begin = first;
        item.end = first + kConvTokens < last ? first + kConvTokens : last;
        const bool same = channel == item.channel;
        item.channel = channel;
        const int64_t left = a->width - channel;
        item.width = left < kConvChannels ? left : (int64_t)kConvChannels;
        if (a->chunks == 1 && i + 1 < end && item.end - item.begin == 1)
            prefetch_conv(a, r, channel + kConvChannels);
        if (!same) conv_weights(a, &item);
        conv_item(a, &item);
    }
}

}  // namespace LEVEL
