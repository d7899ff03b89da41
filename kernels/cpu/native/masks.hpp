// Masks of allowed tokens, computed by grammar matchers while the model runs (structured output).
#pragma once

#include <string.h>

#include "abi.hpp"

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
