// How operators with recurrent states are divided into work items: plain arithmetic, shared by the caller,
// which needs sizes, and by the kernels, which find their items with it. Nothing here changes a result.
//
// A convolution depends on the inputs before a token, not on its results: an item is a chunk of a request's
// tokens and a block of channels. The first chunk of a request reads its state and writes all that it leaves.
// An item of the other two is a head of a request, or some of its columns (delta rule) or rows (Mamba),
// which do not depend on each other, if there are fewer heads than threads want. Its tokens run in order.
#pragma once

#include <stddef.h>

#include "abi.hpp"

enum {
    kConvTokens = 64,     // of a chunk
    kConvChannels = 512,  // of a block
    kDeltaTokens = 8,     // whose keys and queries are prepared together
    kDeltaColumns = 32,   // least columns of an item, and at least those that a level keeps in registers
    kSpaceTokens = 16,
    kSpaceRows = 4,
};
static_assert((int)kConvTokens >= (int)kMaxTaps, "only the first chunk of a request sees its state");

// Whether all tokens and slots are inside of their tensors.
bool states_in_range(const StateRows& rows, int64_t requests);

struct StatePlan {
    int64_t items, work;
    size_t private_bytes;
};

StatePlan plan_conv(ConvArgs* args);
StatePlan plan_delta(DeltaArgs* args, int threads);
StatePlan plan_space(SpaceArgs* args, int threads);

static inline int64_t conv_chunks(const StateRows& rows, int64_t r) {
    return (rows.query_start[r + 1] - rows.query_start[r] + kConvTokens - 1) / kConvTokens;
}

// Numbers of a state that a thread works on where a request saves none.
static inline int64_t spare_state(const DeltaArgs* a) { return (int64_t)a->key_dim * a->value_dim; }
static inline int64_t spare_state(const SpaceArgs* a) { return (int64_t)a->width * a->size; }
