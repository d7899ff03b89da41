// The work items of one attention call and the memory they need.
#pragma once

#include <stddef.h>

#include "abi.hpp"

struct AttentionPlan {
    int64_t items;
    size_t shared_bytes;   // of all threads
    size_t private_bytes;  // of one thread
};

AttentionPlan plan_attention(AttentionArgs* args, int requests, int threads);
// After `shared` is set: fills item_start.
int64_t start_attention(AttentionArgs* args, int requests, int threads, int64_t* chunks);
