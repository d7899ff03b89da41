#include "program.hpp"

#include <string.h>

#include <type_traits>

#include "rank_group.hpp"

namespace {

bool same_quantization(const LinearArgs& a, const LinearArgs& b) {
    const ActivationScheme &p = a.w->scheme, &q = b.w->scheme;
    return in_integers(a) == in_integers(b) && a.terms == b.terms && a.rounded == b.rounded &&
           (wide_codes(*a.w) || !wide_codes(*b.w)) && p.codes == q.codes &&
           p.rule == q.rule && p.bits == q.bits && p.symmetric == q.symmetric &&
           p.group == q.group && p.scale == q.scale && p.zero == q.zero &&
           p.factor == q.factor && p.limit == q.limit;
}

}  // namespace

size_t args_size(int kind) {
    switch (kind) {
        case kOpEmbedding: return sizeof(EmbeddingArgs);
        case kOpLinear: return sizeof(LinearArgs);
        case kOpNorm: return sizeof(NormArgs);
        case kOpActivation: return sizeof(ActivationArgs);
        case kOpMap: return sizeof(MapArgs);
        case kOpAngles: return sizeof(AnglesArgs);
        case kOpGate: return sizeof(GateArgs);
        case kOpPlaceRows: return sizeof(PlaceRowsArgs);
        case kOpSelect: return sizeof(SelectArgs);
        case kOpTake: return sizeof(TakeArgs);
        case kOpRope: return sizeof(RopeArgs);
        case kOpAttention: return sizeof(AttentionArgs);
        case kOpPlaces: return sizeof(PlacesArgs);
        case kOpSample: return sizeof(SampleArgs);
        case kOpRoute: return sizeof(RouteArgs);
        case kOpGroup: return sizeof(GroupArgs);
        case kOpExperts: return sizeof(ExpertsArgs);
        case kOpHeads: return sizeof(HeadsArgs);
        case kOpBias: return sizeof(BiasArgs);
        case kOpCombine: return sizeof(CombineArgs);
        case kOpRecode: return sizeof(RecodeArgs);
        case kOpLowRank: return sizeof(LowRankArgs);
        case kOpExchange: return sizeof(ExchangeArgs);
        case kOpTransfer: return sizeof(TransferArgs);
        case kOpCombineRanks: return sizeof(CombineRanksArgs);
        case kOpGatherRanks: return sizeof(GatherRanksArgs);
        case kOpConv: return sizeof(ConvArgs);
        case kOpDelta: return sizeof(DeltaArgs);
        case kOpSpace: return sizeof(SpaceArgs);
        case kOpRates: return sizeof(RatesArgs);
        case kOpGatedNorm: return sizeof(GatedNormArgs);
        case kOpFetch: return sizeof(FetchArgs);
        default: return 0;
    }
}

static_assert(std::is_trivially_copyable<Op>::value, "operators are copied as bytes");
static_assert(alignof(Op) == alignof(void*), "no arguments need a larger alignment");

bool Program::add(int kind, const void* args, Count count, int64_t per) {
    const size_t size = args_size(kind);
    if (!size) return false;
    Op op;
    memset(static_cast<void*>(&op), 0, sizeof op);
    op.kind = (OpKind)kind;
    op.count = count;
    op.per = per;
    memcpy(static_cast<void*>(&op.embedding), args, size);
    const bool quantized = quantizes(op) && same_activations(op);
    ops_.push_back(op);
    const int index = (int)ops_.size() - 1;
    switch (op.kind) {
        case kOpLinear:
            if (quantizes(op) && !quantized) add_part(index, kRows);
            add_part(index, kTiles);
            break;
        case kOpExperts:
            if (quantizes(op.experts.each)) add_part(index, kRows);
            add_part(index, kTiles);
            break;
        case kOpHeads:
            if (quantizes(op.heads.each)) add_part(index, kRows);
            add_part(index, kTiles);
            break;
        case kOpLowRank:
            add_part(index, kTiles);
            add_part(index, kMoreTiles);
            break;
        case kOpAttention:
        case kOpConv:
        case kOpDelta:
        case kOpSpace:
        case kOpGroup:
        case kOpFetch:
        case kOpTransfer:
        case kOpSample: add_part(index, kTiles); break;
        case kOpPlaces: break;  // before the threads start: see prepare
        case kOpCombine: add_part(index, kRows, true); break;
        case kOpGatherRanks:
            gathered_ = op.gather_ranks.starts + op.gather_ranks.group->size();
            add_part(index, kRows, true);
            add_part(index, kMoreRows);
            break;
        case kOpExchange:
        case kOpCombineRanks:
            add_part(index, kRows, true);
            add_part(index, kMoreRows);
            break;
        default: add_part(index, kRows);
    }
    return true;
}

// The previous operator has quantized the same rows that this one multiplies.
bool Program::same_activations(const Op& op) const {
    if (ops_.empty()) return false;
    const Op& last = ops_.back();
    return quantizes(last) && last.linear.x == op.linear.x && last.linear.w->k == op.linear.w->k &&
           same_quantization(last.linear, op.linear) && last.count == op.count && last.per == op.per;
}

// The first product of an update reads what the product before it reads, so they share a stage.
bool Program::joins_product(int op) const {
    if (!op || ops_[(size_t)op].kind != kOpLowRank || ops_[(size_t)op - 1].kind != kOpLinear) return false;
    const Op &product = ops_[(size_t)op - 1], &update = ops_[(size_t)op];
    return update.low_rank.x && update.low_rank.x == product.linear.x &&
           update.low_rank.k == product.linear.w->k && update.count == product.count &&
           update.per == product.per;
}

// Products of the same quantized rows need no order, so they share a stage. Parts of files are read in one order.
bool Program::joins_products(int op) const {
    const Op& own = ops_[(size_t)op];
    if (!op || !quantizes(own) || own.linear.file || stages_.back().down >= 0) return false;
    const Op& last = ops_[(size_t)op - 1];  // without rows to quantize in between, the last part is its tiles
    return last.kind == kOpLinear && !last.linear.file && parts_.back().op == op - 1;
}

void Program::add_part(int op, Work work, bool alone) {
    if (work == kTiles && joins_product(op)) {
        stages_.back().down = op;
        return;
    }
    if (work == kTiles && joins_products(op)) {
        parts_.push_back({op, work});
        stages_.back().last = (int)parts_.size();
        return;
    }
    const Count count = ops_[(size_t)op].count;
    const int part = (int)parts_.size();
    parts_.push_back({op, work});
    if (work <= kMoreRows && !alone && !stages_.empty() && stages_.back().work == kRows &&
        !stages_.back().alone && stages_.back().count == count) {
        stages_.back().last = part + 1;
        return;
    }
    const bool hinted = work == kTiles && last_tiles_ >= 0 && integer(ops_[(size_t)op]);
    if (hinted) stages_[(size_t)last_tiles_].then = (int)stages_.size();
    // Updates by adapters, most of which have no rows, leave it to the stage before to prefetch; so do
    // operators with states.
    const OpKind own = ops_[(size_t)op].kind;
    const bool leaves = own == kOpLowRank || own == kOpTransfer || own == kOpFetch || with_states(own);
    if (work == kTiles && !leaves) last_tiles_ = (int)stages_.size();
    const Work kind = work == kMoreRows ? kRows : work;
    stages_.push_back({part, part + 1, count, kind, -1, hinted, alone, -1});
}

void Program::clear() {
    ops_.clear();
    parts_.clear();
    stages_.clear();
    last_tiles_ = -1;
    gathered_ = nullptr;
}
