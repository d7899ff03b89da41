#include "attention_plan.hpp"

#include "program.hpp"

AttentionPlan plan_attention(AttentionArgs* args, int requests, int) {
    const int group = args->heads / args->kv_heads;
    // 48 rows amortize the transposition of a tile and keep the item's state within 1 MiB.
    args->requests = requests;
    args->query_tile = group < 48 ? 48 / group : 1;
    const size_t padded = aligned((size_t)args->head_dim * 4) / 4;
    const size_t rows = (size_t)(args->query_tile * group);
    const size_t floats = padded * kKeyTile * 2 + rows * (kKeyTile + padded + 2);
    return {0, sizeof(int64_t) * (size_t)(requests + 1), floats * sizeof(float)};
}

int64_t start_attention(AttentionArgs* args, int requests, int, int64_t* chunks) {
    int64_t* items = reinterpret_cast<int64_t*>(args->shared);
    int64_t work = 0;
    items[0] = 0;
    for (int r = 0; r < requests; ++r) {
        const int64_t tokens = args->query_start[r + 1] - args->query_start[r];
        items[r + 1] =
            items[r] + (tokens + args->query_tile - 1) / args->query_tile * args->kv_heads;
        work += tokens * args->context_len[r] * args->heads * args->head_dim;
    }
    args->item_start = items;
    const int64_t total = items[requests];
    *chunks = work < 16384 ? 1 : total < 4096 ? total : 4096;
    if (*chunks < 1) *chunks = 1;
    return total;
}
