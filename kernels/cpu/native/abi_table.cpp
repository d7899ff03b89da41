// Sizes and offsets of the structures that Python mirrors, and the constants both sides use, by name:
// tests/kernels/test_native_abi.py compares them with Python's.
#include <stddef.h>

#include <type_traits>

#include "attention_plan.hpp"
#include "levels.hpp"

namespace {

struct AbiEntry {
    const char* name;
    int64_t value;
};

// offsetof needs standard layout, and ctypes and numpy lay structures out as C does.
template <typename T>
constexpr int64_t size_of_plain() {
    static_assert(std::is_standard_layout<T>::value && std::is_trivially_copyable<T>::value,
                  "a structure of the interface is plain C");
    return (int64_t)sizeof(T);
}

#define SIZE(type) {#type, size_of_plain<type>()}
#define FIELD(type, name) {#type "." #name, (int64_t)offsetof(type, name)}
#define CONSTANT(name) {#name, name}

constexpr AbiEntry kEntries[] = {
    SIZE(ActivationScheme), FIELD(ActivationScheme, codes), FIELD(ActivationScheme, rule),
        FIELD(ActivationScheme, bits), FIELD(ActivationScheme, symmetric),
        FIELD(ActivationScheme, group), FIELD(ActivationScheme, scale),
        FIELD(ActivationScheme, zero), FIELD(ActivationScheme, factor),
        FIELD(ActivationScheme, limit),
    SIZE(Weight), FIELD(Weight, n), FIELD(Weight, k), FIELD(Weight, row_blocks),
        FIELD(Weight, k_blocks), FIELD(Weight, dense), FIELD(Weight, bits), FIELD(Weight, source),
        FIELD(Weight, flip), FIELD(Weight, subgroup), FIELD(Weight, subgroups_per_group),
        FIELD(Weight, subgroups_per_super), FIELD(Weight, scale_blocks), FIELD(Weight, scale_type),
        FIELD(Weight, minus_type), FIELD(Weight, zeros_type), FIELD(Weight, zero),
        FIELD(Weight, super_type), FIELD(Weight, int8_table_scale), FIELD(Weight, int8_table),
        FIELD(Weight, groups), FIELD(Weight, supers), FIELD(Weight, scale_rows),
        FIELD(Weight, codes), FIELD(Weight, scale), FIELD(Weight, minus), FIELD(Weight, zeros),
        FIELD(Weight, super_scale), FIELD(Weight, super_minus), FIELD(Weight, table),
        FIELD(Weight, scale_table), FIELD(Weight, scale_offset), FIELD(Weight, scheme),
    SIZE(FilePart), FIELD(FilePart, begin), FIELD(FilePart, bytes), FIELD(FilePart, whole),
        FIELD(FilePart, next),
    SIZE(Q8Block), FIELD(Q8Block, q), FIELD(Q8Block, scale), FIELD(Q8Block, sum),
        FIELD(Q8Block, half),
    SIZE(Activations), FIELD(Activations, k_blocks), FIELD(Activations, values),
        FIELD(Activations, blocks), FIELD(Activations, residual),
    SIZE(LinearArgs), FIELD(LinearArgs, w), FIELD(LinearArgs, x), FIELD(LinearArgs, out),
        FIELD(LinearArgs, out_stride), FIELD(LinearArgs, exact), FIELD(LinearArgs, terms),
        FIELD(LinearArgs, m), FIELD(LinearArgs, act), FIELD(LinearArgs, source),
        FIELD(LinearArgs, file), FIELD(LinearArgs, done),
    SIZE(EmbeddingArgs), FIELD(EmbeddingArgs, w), FIELD(EmbeddingArgs, ids),
        FIELD(EmbeddingArgs, out), FIELD(EmbeddingArgs, file), FIELD(EmbeddingArgs, first),
        FIELD(EmbeddingArgs, whole),
    SIZE(NormArgs), FIELD(NormArgs, x), FIELD(NormArgs, residual), FIELD(NormArgs, weight),
        FIELD(NormArgs, out), FIELD(NormArgs, width), FIELD(NormArgs, inner),
        FIELD(NormArgs, outer_stride), FIELD(NormArgs, inner_stride), FIELD(NormArgs, eps),
    SIZE(GatedArgs), FIELD(GatedArgs, gate_up), FIELD(GatedArgs, out), FIELD(GatedArgs, width),
        FIELD(GatedArgs, used), FIELD(GatedArgs, kind),
    SIZE(MapArgs), FIELD(MapArgs, x), FIELD(MapArgs, other), FIELD(MapArgs, width),
        FIELD(MapArgs, factor), FIELD(MapArgs, kind),
    SIZE(AnglesArgs), FIELD(AnglesArgs, positions), FIELD(AnglesArgs, inv_freq),
        FIELD(AnglesArgs, cos), FIELD(AnglesArgs, sin), FIELD(AnglesArgs, half),
        FIELD(AnglesArgs, factor),
    SIZE(SelectArgs), FIELD(SelectArgs, x), FIELD(SelectArgs, rows), FIELD(SelectArgs, out),
        FIELD(SelectArgs, width), FIELD(SelectArgs, size),
    SIZE(TakeArgs), FIELD(TakeArgs, x), FIELD(TakeArgs, order), FIELD(TakeArgs, out),
        FIELD(TakeArgs, width), FIELD(TakeArgs, back),
    SIZE(PlacesArgs), FIELD(PlacesArgs, query_start), FIELD(PlacesArgs, context_len),
        FIELD(PlacesArgs, page_table), FIELD(PlacesArgs, positions), FIELD(PlacesArgs, slots),
        FIELD(PlacesArgs, table_width), FIELD(PlacesArgs, tokens), FIELD(PlacesArgs, page_size),
    SIZE(PageSide), FIELD(PageSide, data), FIELD(PageSide, scales), FIELD(PageSide, page),
        FIELD(PageSide, head), FIELD(PageSide, step), FIELD(PageSide, scale_page),
        FIELD(PageSide, scale_row), FIELD(PageSide, type), FIELD(PageSide, group),
        FIELD(PageSide, mixed),
    SIZE(PageLevel), FIELD(PageLevel, keys), FIELD(PageLevel, values),
    SIZE(RopeArgs), FIELD(RopeArgs, q), FIELD(RopeArgs, k), FIELD(RopeArgs, v),
        FIELD(RopeArgs, cos), FIELD(RopeArgs, sin), FIELD(RopeArgs, slots),
        FIELD(RopeArgs, key_centre), FIELD(RopeArgs, pages), FIELD(RopeArgs, q_token),
        FIELD(RopeArgs, q_head), FIELD(RopeArgs, k_token), FIELD(RopeArgs, k_head),
        FIELD(RopeArgs, v_token), FIELD(RopeArgs, v_head), FIELD(RopeArgs, cos_token),
        FIELD(RopeArgs, sin_token), FIELD(RopeArgs, num_pages), FIELD(RopeArgs, heads),
        FIELD(RopeArgs, kv_heads), FIELD(RopeArgs, head_dim), FIELD(RopeArgs, half),
        FIELD(RopeArgs, page_size),
    SIZE(AttentionArgs), FIELD(AttentionArgs, q), FIELD(AttentionArgs, out),
        FIELD(AttentionArgs, levels), FIELD(AttentionArgs, query_start),
        FIELD(AttentionArgs, context_len), FIELD(AttentionArgs, page_table),
        FIELD(AttentionArgs, sinks), FIELD(AttentionArgs, shared), FIELD(AttentionArgs, q_token),
        FIELD(AttentionArgs, q_head), FIELD(AttentionArgs, table_width),
        FIELD(AttentionArgs, num_pages), FIELD(AttentionArgs, tokens), FIELD(AttentionArgs, window),
        FIELD(AttentionArgs, requests), FIELD(AttentionArgs, heads), FIELD(AttentionArgs, kv_heads),
        FIELD(AttentionArgs, head_dim), FIELD(AttentionArgs, page_size),
        FIELD(AttentionArgs, num_levels), FIELD(AttentionArgs, scale),
        FIELD(AttentionArgs, softcap), FIELD(AttentionArgs, query_tile),
        FIELD(AttentionArgs, split_blocks),
    SIZE(RecodeArgs), FIELD(RecodeArgs, source), FIELD(RecodeArgs, target), FIELD(RecodeArgs, page),
        FIELD(RecodeArgs, to_page), FIELD(RecodeArgs, kv_heads), FIELD(RecodeArgs, head_dim),
        FIELD(RecodeArgs, page_size),
    SIZE(Draw), FIELD(Draw, temperature), FIELD(Draw, min_p), FIELD(Draw, typical_p),
        FIELD(Draw, top_p), FIELD(Draw, xtc_threshold), FIELD(Draw, mirostat_mu),
        FIELD(Draw, top_k), FIELD(Draw, uniform),
    SIZE(Change), FIELD(Change, ids), FIELD(Change, values), FIELD(Change, count),
        FIELD(Change, repetition), FIELD(Change, frequency), FIELD(Change, presence),
        FIELD(Change, kind),
    SIZE(Mask), FIELD(Mask, words), FIELD(Mask, count),
    SIZE(Shape), FIELD(Shape, mask), FIELD(Shape, changes), FIELD(Shape, count),
    SIZE(RowShape), FIELD(RowShape, shape), FIELD(RowShape, mask),
    SIZE(MaskTask), FIELD(MaskTask, matcher), FIELD(MaskTask, masks), FIELD(MaskTask, drafts),
        FIELD(MaskTask, count), FIELD(MaskTask, also), FIELD(MaskTask, failed),
    SIZE(MaskTasks), FIELD(MaskTasks, compute), FIELD(MaskTasks, validate),
        FIELD(MaskTasks, consume), FIELD(MaskTasks, rollback), FIELD(MaskTasks, stopped),
        FIELD(MaskTasks, words),
        FIELD(MaskTasks, count), FIELD(MaskTasks, tasks), FIELD(MaskTasks, waited_ns),
    SIZE(SampleArgs), FIELD(SampleArgs, logits), FIELD(SampleArgs, draws),
        FIELD(SampleArgs, shapes), FIELD(SampleArgs, masks), FIELD(SampleArgs, tokens),
        FIELD(SampleArgs, best),
        FIELD(SampleArgs, probabilities), FIELD(SampleArgs, width), FIELD(SampleArgs, stride),
    SIZE(RouteArgs), FIELD(RouteArgs, logits), FIELD(RouteArgs, chosen), FIELD(RouteArgs, weights),
        FIELD(RouteArgs, experts), FIELD(RouteArgs, k), FIELD(RouteArgs, normalized),
    SIZE(GroupArgs), FIELD(GroupArgs, chosen), FIELD(GroupArgs, places), FIELD(GroupArgs, tokens),
        FIELD(GroupArgs, owners), FIELD(GroupArgs, starts), FIELD(GroupArgs, active),
        FIELD(GroupArgs, count), FIELD(GroupArgs, rows), FIELD(GroupArgs, first),
        FIELD(GroupArgs, ranks), FIELD(GroupArgs, local), FIELD(GroupArgs, servers),
        FIELD(GroupArgs, load), FIELD(GroupArgs, k), FIELD(GroupArgs, rank),
    SIZE(ExpertsArgs), FIELD(ExpertsArgs, each), FIELD(ExpertsArgs, experts),
        FIELD(ExpertsArgs, starts), FIELD(ExpertsArgs, active), FIELD(ExpertsArgs, count),
        FIELD(ExpertsArgs, k),
    SIZE(BiasArgs), FIELD(BiasArgs, x), FIELD(BiasArgs, bias), FIELD(BiasArgs, owners),
        FIELD(BiasArgs, used), FIELD(BiasArgs, width),
    SIZE(CombineArgs), FIELD(CombineArgs, x), FIELD(CombineArgs, weights),
        FIELD(CombineArgs, places), FIELD(CombineArgs, out), FIELD(CombineArgs, width),
        FIELD(CombineArgs, k),
    SIZE(CombineRanksArgs), FIELD(CombineRanksArgs, own), FIELD(CombineRanksArgs, group),
        FIELD(CombineRanksArgs, servers), FIELD(CombineRanksArgs, number),
    SIZE(LowRankPart), FIELD(LowRankPart, a), FIELD(LowRankPart, b),
        FIELD(LowRankPart, scales), FIELD(LowRankPart, rank),
        FIELD(LowRankPart, first_block), FIELD(LowRankPart, blocks), FIELD(LowRankPart, scale),
        FIELD(LowRankPart, type),
    SIZE(LowRankSlot), FIELD(LowRankSlot, parts), FIELD(LowRankSlot, bias),
        FIELD(LowRankSlot, count), FIELD(LowRankSlot, ranks),
    SIZE(LowRankArgs), FIELD(LowRankArgs, x), FIELD(LowRankArgs, ids), FIELD(LowRankArgs, y),
        FIELD(LowRankArgs, slots), FIELD(LowRankArgs, table), FIELD(LowRankArgs, y_stride),
        FIELD(LowRankArgs, size), FIELD(LowRankArgs, k), FIELD(LowRankArgs, n),
        FIELD(LowRankArgs, rows), FIELD(LowRankArgs, low), FIELD(LowRankArgs, low_stride),
        FIELD(LowRankArgs, units),
    SIZE(ExchangeArgs), FIELD(ExchangeArgs, group), FIELD(ExchangeArgs, x), FIELD(ExchangeArgs, out),
        FIELD(ExchangeArgs, own), FIELD(ExchangeArgs, x_stride), FIELD(ExchangeArgs, width),
        FIELD(ExchangeArgs, out_width), FIELD(ExchangeArgs, number),
    SIZE(TransferArgs), FIELD(TransferArgs, link), FIELD(TransferArgs, x), FIELD(TransferArgs, width),
        FIELD(TransferArgs, rows),
    CONSTANT(kAbiVersion), CONSTANT(kTileRows), CONSTANT(kTileDepth), CONSTANT(kTileBytesPerBit),
    CONSTANT(kByteTile), CONSTANT(kTableSize), CONSTANT(kScaleTableSize), CONSTANT(kMaxLevels),
    CONSTANT(kLevelShift), CONSTANT(kMaxHeadDim), CONSTANT(kHeadDimStep),
    CONSTANT(kBlockKeys), CONSTANT(kLevelCount),
    CONSTANT(kF16), CONSTANT(kBF16), CONSTANT(kF32), CONSTANT(kU8), CONSTANT(kI8), CONSTANT(kE4M3),
    CONSTANT(kE5M2), CONSTANT(kLow4), CONSTANT(kHigh4), CONSTANT(kE8M0), CONSTANT(kI4),
    CONSTANT(kU2), CONSTANT(kU4), CONSTANT(kI6), CONSTANT(kStream), CONSTANT(kQ4K), CONSTANT(kQ5K),
    CONSTANT(kQ6K), CONSTANT(kQ2K), CONSTANT(kQ3K), CONSTANT(kQ4_0), CONSTANT(kQ4_1),
    CONSTANT(kQ5_0), CONSTANT(kQ5_1), CONSTANT(kQ8_0), CONSTANT(kIQ4NL), CONSTANT(kMXFP4),
    CONSTANT(kIQ4XS), CONSTANT(kOk), CONSTANT(kOutOfMemory), CONSTANT(kClosed),
    CONSTANT(kUnknownOp), CONSTANT(kBadIndex), CONSTANT(kRankLost), CONSTANT(kStatusCount), CONSTANT(kUnquantized),
    CONSTANT(kIntCodes), CONSTANT(kE4M3Codes), CONSTANT(kE2M1Codes), CONSTANT(kStaticScale),
    CONSTANT(kPlainScale), CONSTANT(kMxScale), CONSTANT(kPowerScale), CONSTANT(kNvScale),
    CONSTANT(kSilu), CONSTANT(kGeluTanh), CONSTANT(kGelu), CONSTANT(kClampedSwiglu),
    CONSTANT(kActivationKinds), CONSTANT(kMapZero), CONSTANT(kMapAdd), CONSTANT(kMapBias),
    CONSTANT(kMapScale), CONSTANT(kMapSoftcap), CONSTANT(kMapKinds), CONSTANT(kAdd),
    CONSTANT(kPenalize), CONSTANT(kForbid), CONSTANT(kForce), CONSTANT(kChangeKinds),
    CONSTANT(kOpEmbedding), CONSTANT(kOpLinear), CONSTANT(kOpNorm), CONSTANT(kOpGated),
    CONSTANT(kOpMap), CONSTANT(kOpAngles), CONSTANT(kOpSelect), CONSTANT(kOpRope),
    CONSTANT(kOpAttention), CONSTANT(kOpPlaces), CONSTANT(kOpSample), CONSTANT(kOpTake),
    CONSTANT(kOpRoute), CONSTANT(kOpGroup), CONSTANT(kOpExperts), CONSTANT(kOpBias),
    CONSTANT(kOpCombine), CONSTANT(kOpRecode), CONSTANT(kOpLowRank), CONSTANT(kOpExchange),
    CONSTANT(kOpTransfer),
    CONSTANT(kOpCombineRanks),
    CONSTANT(kOpKinds), CONSTANT(kTokens),
    CONSTANT(kOutputs), CONSTANT(kRequests), CONSTANT(kCounts),
};

}  // namespace

// The entries; `count` becomes their number.
EXPORT const AbiEntry* embedlm_abi_table(int64_t* count) {
    *count = sizeof kEntries / sizeof *kEntries;
    return kEntries;
}
