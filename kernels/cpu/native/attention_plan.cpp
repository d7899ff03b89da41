#include "attention_plan.hpp"

namespace {

constexpr int64_t kItemsPerThread = 8;

// A wrong length or page id would read outside of the pages. Checking 256 ids takes 30 ns.
bool tables_in_range(const AttentionArgs* a, int requests) {
    for (int r = 0; r < requests; ++r) {
        const int64_t tokens = a->query_start[r + 1] - a->query_start[r];
        const int64_t context = a->context_len[r];
        const int64_t pages = (context + a->page_size - 1) / a->page_size;
        if (tokens < 0 || context < tokens || pages > a->table_width) return false;
        const int32_t* table = a->page_table + r * a->table_width;
        uint32_t largest[kMaxLevels] = {};
        for (int64_t i = 0; i < pages; ++i) {
            const uint32_t level = (uint32_t)level_of(table[i]), page = (uint32_t)page_of(table[i]);
            if (level >= (uint32_t)a->num_levels) return false;  // a negative id's is large
            largest[level] = page > largest[level] ? page : largest[level];
        }
        for (int level = 0; level < a->num_levels && pages; ++level)
            if (largest[level] >= (uint64_t)a->num_pages << level) return false;
    }
    return a->query_start[0] >= 0 && a->query_start[requests] <= a->tokens;
}

}  // namespace

AttentionPlan plan_attention(AttentionArgs* a, int requests, int threads) {
    AttentionPlan plan = {0, 0, 0, 0, kOk};
    a->requests = requests;
    a->looks_ahead = 0;
    if (!tables_in_range(a, requests)) {
        plan.status = kBadIndex;
        return plan;
    }
    for (int64_t t = 0; a->ahead && t < a->query_start[requests]; ++t) a->looks_ahead |= a->ahead[t] > 0;
    const int group = a->heads / a->kv_heads;
    a->query_tile = group < kQueryRows ? kQueryRows / group : 1;
    a->split_blocks = INT32_MAX;
    int64_t blocks = 0;
    for (int r = 0; r < requests; ++r) {
        const RequestPlan s = request_plan(a, r);
        const int64_t all = (a->context_len[r] + kBlockKeys - 1) / kBlockKeys;
        blocks += a->kv_heads * (s.tiles == 1 ? s.end_block - s.first_block : s.tiles * all);
        plan.work += s.tokens * a->context_len[r] * a->heads * (a->head_dim + a->value_dim) / 2;
    }
    // Without items longer than a thread's share no thread waits; with enough requests none is split.
    if (threads > 1 && !a->rounded && (int64_t)requests * a->kv_heads <= kMaxSplitPairs) {
        const int64_t share = blocks / (threads * kItemsPerThread);
        a->split_blocks = share > 1 ? (int32_t)(share < INT32_MAX ? share : INT32_MAX) : 1;
    }
    int64_t records = 0;
    for (int r = 0; r < requests; ++r) {
        const RequestPlan s = request_plan(a, r);
        plan.items += s.tiles * s.splits * a->kv_heads;
        records += split_records(a, s);
    }
    const int64_t padded = padded_dim(a), value = padded_value(a), record = value + kPartExtra;
    const int64_t rows = (int64_t)a->query_tile * group;
    plan.shared_bytes = kMaxSplitPairs * sizeof(int32_t) + (size_t)(records * record) * 4;
    const int64_t groups = most_groups(a, &PageLevel::keys) + most_groups(a, &PageLevel::values);
    // Keys, values, their scales and zeros; weights and records of kAttentionRows rows; queries and states;
    // queries as 16 bits, with a scale and sums.
    plan.private_bytes = (size_t)((padded + value + 2 * groups) * kBlockKeys +
                                  kMostAttentionRows * (kBlockKeys + record) +
                                  rows * (padded + record + padded / 2 + 1 + kQuerySums)) * 4;
    return plan;
}

bool slots_in_range(const RopeArgs* a, int64_t tokens) {
    const uint64_t slots = (uint64_t)a->num_pages * (uint64_t)a->page_size;
    bool fits = true;
    for (int64_t t = 0; t < tokens; ++t) fits &= (uint64_t)a->slots[t] < slots;
    return fits;
}
