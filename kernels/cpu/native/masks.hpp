// Masks of allowed tokens, computed by grammar matchers while the model runs (structured output).
#pragma once

#include <string.h>

#include <chrono>

#include "abi.hpp"
#include "pool.hpp"

// The masks of one task, a side task of a run (pool.hpp). After a draft that its mask forbids, and after
// one that completes the structure, nothing is accepted: the masks there allow everything.
inline void compute_masks(void* context, int index) {
    const MaskTasks& all = *static_cast<const MaskTasks*>(context);
    MaskTask& task = all.tasks[index];
    const size_t bytes = (size_t)all.words * sizeof(uint32_t);
    task.failed = all.compute(task.matcher, task.masks, bytes) != 0;
    if (task.failed) memset(task.masks, 0, bytes);
    else if (task.also >= 0) task.masks[task.also / 32] |= 1u << task.also % 32;
    size_t consumed = 0;
    int32_t row = 1;
    for (; row < task.count && !task.failed; ++row) {
        const uint32_t* draft = task.drafts + row - 1;
        if (all.validate(task.matcher, draft, 1) != 1) break;
        task.failed = all.consume(task.matcher, draft, 1) != 0;
        if (task.failed) break;
        ++consumed;
        if (all.stopped(task.matcher)) break;
        task.failed = all.compute(task.matcher, task.masks + row * all.words, bytes) != 0;
    }
    if (row < task.count)
        memset(task.masks + row * all.words, 0xff, bytes * (size_t)(task.count - row));
    if (consumed && all.rollback(task.matcher, consumed) != 0) task.failed = 1;
}

// Waits for all masks, computing those that nobody has begun, and notes how long that took. Several
// threads may do it at once: the longest wait counts.
inline void wait_for_masks(Pool& pool, const MaskTasks& all) {
    const auto begin = std::chrono::steady_clock::now();
    pool.finish_side();
    const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - begin;
    int64_t known = __atomic_load_n(&all.waited_ns, __ATOMIC_RELAXED);
    while (waited.count() > known &&
           !__atomic_compare_exchange_n(&all.waited_ns, &known, (int64_t)waited.count(), true,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}
