#include "low_rank_plan.hpp"

namespace {

// Bytes of factors that a thread prefetches. With 512 KiB, half of a second-level cache, weights and
// factors displaced each other: eight adapters took 10 % longer.
constexpr int64_t kMostAhead = 160 << 10;

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

namespace {

void add_piece(MemoryStream* stream, const void* data, int64_t begin, int64_t end) {
    if (begin >= end || stream->count == MemoryStream::kMostPieces) return;
    if (stream->bytes + end - begin > kMostAhead) end = begin + kMostAhead - stream->bytes;
    if (begin >= end) return;
    const uint8_t* base = static_cast<const uint8_t*>(data);
    stream->pieces[stream->count++] = {base + begin, base + end};
    stream->bytes += end - begin;
}

int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

}  // namespace

void factors_of(const LowRankArgs& args, const ItemRange& down, const ItemRange& up,
                MemoryStream* stream) {
    stream->next = stream->count = 0;
    stream->bytes = 0;
    const int64_t stride = padded_low(args.k);
    int64_t item = 0;
    for (int64_t g = 0; !args.ids && g < args.rows->count; ++g) {
        const RowGroup& group = args.rows->groups[g];
        const LowRankSlot& slot = args.table[group.slot];
        const int64_t chunks = row_chunks(group), units = low_units(args, slot);
        // With more rows the factors are reused, and their first read is a small part of the work.
        for (int64_t p = 0, first = item; chunks == 1 && p < slot.count; ++p) {
            const LowRankPart& part = slot.parts[p];
            const int64_t own = (part.rank + kLowUnit - 1) / kLowUnit;
            const int64_t row = stride * (part.type == kF16 ? 2 : 4);
            const int64_t begin = clamp(down.begin - first, 0, own) * kLowUnit;
            const int64_t end = clamp(clamp(down.end - first, 0, own) * kLowUnit, 0, part.rank);
            add_piece(stream, part.a, begin * row, end * row);
            first += own;
        }
        item += chunks * units;
    }
    for (int64_t g = 0; g < args.rows->count; ++g) {
        const LowRankSlot& slot = args.table[args.rows->groups[g].slot];
        for (int64_t p = 0; p < slot.count; ++p) {
            const LowRankPart& part = slot.parts[p];
            const int64_t block = part.rank * kTileRows * (part.type == kF16 ? 2 : 4);
            const int64_t begin = clamp(up.begin * kUpBlocks - part.first_block, 0, part.blocks);
            const int64_t end = clamp(up.end * kUpBlocks - part.first_block, 0, part.blocks);
            add_piece(stream, part.b, begin * block, end * block);
        }
    }
}
