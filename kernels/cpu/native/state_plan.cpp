#include "state_plan.hpp"

namespace {

// Items of at least this many threads' tasks; more cost preparations of keys and queries again.
constexpr int64_t kItemsPerThread = 2;

int64_t active_requests(const StateRows& rows) {
    int64_t active = 0;
    for (int64_t r = 0; r < rows.requests; ++r) active += rows.query_start[r + 1] > rows.query_start[r];
    return active;
}

int64_t all_tokens(const StateRows& rows) {
    return rows.requests ? rows.query_start[rows.requests] - rows.query_start[0] : 0;
}

int32_t splits_of(int64_t items, int64_t most, int threads) {
    if (threads == 1 || items <= 0) return 1;
    const int64_t wanted = (kItemsPerThread * threads + items - 1) / items;
    return (int32_t)(wanted < most ? wanted : most);
}

}  // namespace

bool states_in_range(const StateRows& rows, int64_t requests) {
    if (requests && (rows.query_start[0] < 0 || rows.save_start[0] < 0)) return false;
    const auto is_slot = [&](int64_t slot) { return slot >= 0 && slot < rows.slots; };
    for (int64_t r = 0; r < requests; ++r) {
        const int64_t begin = rows.query_start[r], end = rows.query_start[r + 1];
        const int64_t first = rows.save_start[r], last = rows.save_start[r + 1];
        if (end < begin || end > rows.tokens || last < first || last > rows.saves) return false;
        if (begin == end) {
            if (first != last) return false;
            continue;
        }
        if (rows.initial[r] != -1 && !is_slot(rows.initial[r])) return false;
        int64_t before = begin;
        for (int64_t i = first; i < last; ++i) {
            if (rows.save_token[i] < before || rows.save_token[i] >= end) return false;
            if (!is_slot(rows.save_slot[i])) return false;
            before = rows.save_token[i];
        }
        if (first != last && before != end - 1) return false;
    }
    return true;
}

StatePlan plan_conv(ConvArgs* a) {
    a->chunks = 0;
    for (int64_t r = 0; r < a->rows.requests; ++r) a->chunks += conv_chunks(a->rows, r);
    const int64_t blocks = (a->width + kConvChannels - 1) / kConvChannels;
    // weights, inputs before the request, products with `before`
    const int64_t rows = (a->several + 2) * a->taps;
    return {blocks * a->chunks, all_tokens(a->rows) * a->width * a->several * (a->taps + 8),
            (size_t)(rows * kConvChannels) * sizeof(float)};
}

StatePlan plan_delta(DeltaArgs* a, int threads) {
    const int64_t heads = active_requests(a->rows) * a->heads;
    a->splits = splits_of(heads, (a->value_dim + kDeltaColumns - 1) / kDeltaColumns, threads);
    const int64_t rows = (a->rate ? 6 : 4) * kDeltaTokens;
    const int64_t floats = rows * a->key_dim + a->key_dim * kDeltaColumns + spare_state(a);
    return {a->rows.requests * a->heads * a->splits,
            4 * all_tokens(a->rows) * a->heads * a->key_dim * (int64_t)a->value_dim,
            (size_t)floats * sizeof(float)};
}

StatePlan plan_space(SpaceArgs* a, int threads) {
    const int64_t heads = active_requests(a->rows) * a->heads;
    a->splits = splits_of(heads, (a->width + kSpaceRows - 1) / kSpaceRows, threads);
    const int64_t floats = 2 * kSpaceTokens * a->size + spare_state(a);
    const int64_t each = a->by_row ? 16 : 4;  // an exponential for each number
    return {a->rows.requests * a->heads * a->splits,
            each * all_tokens(a->rows) * a->heads * a->width * (int64_t)a->size,
            (size_t)floats * sizeof(float)};
}
