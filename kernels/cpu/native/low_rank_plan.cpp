#include "low_rank_plan.hpp"

namespace {

int64_t widest(const LowRankArgs& args) {
    int64_t most = 0;
    for (int64_t g = 0; g < args.rows->count; ++g) {
        const int64_t ranks = args.table[args.rows->groups[g].slot].ranks;
        most = ranks > most ? ranks : most;
    }
    return most;
}

}  // namespace

// Sorts the rows by slot; the order of rows within a slot stays.
bool SlotPlans::fill(Plan* plan) {
    starts_.assign((size_t)plan->size + 1, 0);
    plan->groups.clear();
    plan->view = {nullptr, nullptr, 0, 0};
    for (int64_t t = 0; t < plan->m; ++t) {
        if (plan->slots[t] >= plan->size) return false;
        if (plan->slots[t] >= 0) ++starts_[(size_t)plan->slots[t] + 1];
    }
    for (size_t s = 0; s < (size_t)plan->size; ++s) {
        const int64_t count = starts_[s + 1];
        if (count) plan->groups.push_back({(int32_t)s, (int32_t)count, starts_[s]});
        starts_[s + 1] += starts_[s];
    }
    const int64_t total = starts_[(size_t)plan->size];
    plan->rows.resize((size_t)total);
    for (int64_t t = 0; t < plan->m; ++t)
        if (plan->slots[t] >= 0)
            plan->rows[(size_t)starts_[(size_t)plan->slots[t]]++] = (int32_t)t;
    plan->view = {plan->groups.data(), plan->rows.data(), (int64_t)plan->groups.size(), total};
    return true;
}

bool SlotPlans::assign(LowRankArgs* args, int64_t m) {
    Plan* plan = nullptr;
    for (size_t i = 0; i < used_ && !plan; ++i) {
        Plan& known = plans_[i];
        if (known.slots == args->slots && known.m == m && known.size == args->size) plan = &known;
    }
    if (!plan) {
        if (used_ == plans_.size()) plans_.emplace_back();
        plan = &plans_[used_++];
        plan->slots = args->slots;
        plan->m = m;
        plan->size = args->size;
        plan->fits = fill(plan);
    }
    args->rows = &plan->view;
    args->low_stride = padded_low(widest(*args));
    return plan->fits;
}

size_t low_bytes(const LowRankArgs& args) {
    return (size_t)(args.rows->total * args.low_stride) * sizeof(float);
}

size_t low_scratch(const LowRankArgs& args) {
    bool codes = false;
    for (int64_t g = 0; g < args.rows->count; ++g) {
        const LowRankSlot& slot = args.table[args.rows->groups[g].slot];
        for (int64_t p = 0; p < slot.count; ++p) codes |= slot.parts[p].type == kI8;
    }
    if (!codes) return 0;
    const int64_t rows = args.rows->total < kLowRows ? args.rows->total : (int64_t)kLowRows;
    // 16 bits for each of 8; an embedding has no x, and k is its vocabulary.
    const int64_t down = args.ids ? 0 : rows * rank_bytes(args.k, kI8) * 2;
    const int64_t up = args.rows->total * (4 + 2 * args.low_stride);
    return (size_t)(down > up ? down : up);
}

LowRankItems down_items(const LowRankArgs& args) {
    LowRankItems items = {0, 0};
    for (int64_t g = 0; g < args.rows->count; ++g) {
        const RowGroup& group = args.rows->groups[g];
        const LowRankSlot& slot = args.table[group.slot];
        items.count += row_chunks(group) * low_units(args, slot);
        items.work += group.count * slot.ranks * (args.ids ? 1 : args.k);
    }
    return items;
}

LowRankItems up_items(const LowRankArgs& args) {
    int64_t work = 0;
    for (int64_t g = 0; g < args.rows->count; ++g) {
        const RowGroup& group = args.rows->groups[g];
        const LowRankSlot& slot = args.table[group.slot];
        for (int64_t p = 0; p < slot.count; ++p)
            work += group.count * slot.parts[p].rank * slot.parts[p].blocks * kTileRows;
        if (slot.bias) work += group.count * args.n;
    }
    return {work ? (column_blocks(args) + kUpBlocks - 1) / kUpBlocks : 0, work};
}
