// The plain structures shared by Python (ctypes), the dispatcher and the kernels.
//
// They use no C++ and no torch types, so one library serves every Python and torch version. When
// anything here, in the headers of each area, in the exported functions or in a packed layout changes,
// kAbiVersion must change too (also in kernels/cpu/library.py): Python then rejects a stale library
// instead of computing nonsense. abi_table.cpp lists the structures and constants;
// tests/kernels/test_native_abi.py compares both sides.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "abi_adapters.hpp"
#include "abi_attention.hpp"
#include "abi_elementwise.hpp"
#include "abi_experts.hpp"
#include "abi_ranks.hpp"
#include "abi_rounding.hpp"
#include "abi_sampling.hpp"
#include "abi_states.hpp"
#include "abi_weights.hpp"

enum { kAbiVersion = 48 };

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

// The operators. Most are row-wise: row t of the result depends only on row t of the arguments.
// Exceptions: kOpAttention, kOpConv, kOpDelta, kOpSpace, kOpSample, kOpGroup, kOpFetch, kOpLowRank, and
// kOpLinear, kOpExperts and kOpHeads except for quantizing their activations; kOpCombine reads rows of
// other tokens, kOpExchange, kOpTransfer, kOpCombineRanks and kOpGatherRanks those of other ranks.
// kOpPlaces prepares the step for the others.
enum OpKind {
    kOpEmbedding = 0,
    kOpLinear = 1,
    kOpNorm = 2,
    kOpActivation = 3,
    kOpMap = 4,
    kOpAngles = 5,
    kOpSelect = 6,
    kOpRope = 7,
    kOpAttention = 8,
    kOpPlaces = 9,
    kOpSample = 10,
    kOpTake = 11,
    kOpRoute = 12,
    kOpGroup = 13,
    kOpExperts = 14,
    kOpBias = 15,
    kOpCombine = 16,
    kOpRecode = 17,
    kOpLowRank = 18,
    kOpExchange = 19,
    kOpTransfer = 20,
    kOpCombineRanks = 21,
    kOpGatherRanks = 22,
    kOpGate = 23,
    kOpConv = 24,
    kOpDelta = 25,
    kOpSpace = 26,
    kOpRates = 27,
    kOpGatedNorm = 28,
    kOpHeads = 29,
    kOpFetch = 30,
    kOpPlaceRows = 31,
    kOpKinds = 32,
};

// What a step counts; an operator runs over one of these (row-wise operators: times `per`).
// kGathered: the tokens of all ranks, where each has its own.
enum Count { kTokens = 0, kOutputs = 1, kRequests = 2, kGathered = 3, kCounts = 4 };

// Items of a phase for one thread. The thread usually continues with the items up to `reach`, and
// often comes from the items before `begin` (then `resumed`): one call may prefetch for the next.
struct ItemRange {
    int64_t begin, end, reach;
    int32_t resumed;
    // What the thread will read first in a later phase: prefetched after `reach`; null: unknown.
    const uint8_t *then = nullptr, *then_end = nullptr;
};

// Scratch memory and everything laid out in it starts at a cache line.
enum { kCacheLine = 64 };

// The kernels of one instruction-set level. Ranges are half open; `scratch` is 64-byte aligned.
struct KernelTable {
    bool wide_in_words;  // products of wide codes need Activations::words
    void (*quantize)(const LinearArgs*, int64_t m_begin, int64_t m_end);
    void (*linear_int)(const LinearArgs*, const ItemRange* strips, uint8_t* scratch);
    void (*linear_float)(const LinearArgs*, const ItemRange* strips, uint8_t* scratch);
    // Inputs in bfloat16 (linear_bf16.hpp, attention_bf16.hpp); null: the level has none.
    void (*linear_bf16)(const LinearArgs*, const ItemRange* strips, uint8_t* scratch);
    void (*attention_bf16)(const AttentionArgs*, const ItemRange* items, uint8_t* scratch);
    void (*norm)(const NormArgs*, int64_t t_begin, int64_t t_end);
    void (*activation)(const ActivationArgs*, int64_t t_begin, int64_t t_end);
    void (*map)(const MapArgs*, int64_t t_begin, int64_t t_end);
    void (*gate)(const GateArgs*, int64_t t_begin, int64_t t_end);
    void (*rope)(const RopeArgs*, int64_t t_begin, int64_t t_end);
    void (*attention)(const AttentionArgs*, const ItemRange* items, uint8_t* scratch);
    void (*recode)(const RecodeArgs*, int64_t row_begin, int64_t row_end);
    void (*rope_angles)(const AnglesArgs*, int64_t t_begin, int64_t t_end);
    void (*sample)(const SampleArgs*, int64_t row_begin, int64_t row_end, uint8_t* scratch);
    int64_t (*sample_scratch)(int64_t width);  // bytes
    void (*conv)(const ConvArgs*, int64_t item_begin, int64_t item_end, uint8_t* scratch);
    void (*delta)(const DeltaArgs*, int64_t item_begin, int64_t item_end, uint8_t* scratch);
    void (*space)(const SpaceArgs*, int64_t item_begin, int64_t item_end, uint8_t* scratch);
    void (*rates)(const RatesArgs*, int64_t t_begin, int64_t t_end);
    void (*gated_norm)(const GatedNormArgs*, int64_t t_begin, int64_t t_end);
    void (*low_rank_down)(const LowRankArgs*, int64_t item_begin, int64_t item_end, uint8_t* scratch);
    void (*low_rank_up)(const LowRankArgs*, int64_t item_begin, int64_t item_end, uint8_t* scratch);
    void (*round_rows)(RoundArgs*);
};
