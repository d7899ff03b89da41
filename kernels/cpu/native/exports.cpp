// The exported functions: runtimes, and programs recorded for them.
//
// Nothing here throws or aborts: every function returns a Status. Calls on one runtime from several
// threads wait for one another; runtimes are independent.
#include <new>

#include "expert_cache.hpp"
#include "pack.hpp"
#include "runtime.hpp"
#include "rank_group.hpp"
#include "system.hpp"
#include "weight_check.hpp"

namespace {

// Runs body, which may allocate, and returns its status.
template <typename Body>
int guarded(const Body& body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
}

}  // namespace

EXPORT int embedlm_abi_version() { return kAbiVersion; }

// Bit i: level i runs on this CPU (levels.hpp).
EXPORT int embedlm_levels() { return available_levels(); }

// `level` -1: the best. Null if the level does not run on this CPU or memory is exhausted.
EXPORT void* embedlm_runtime_create(int threads, int level) {
    if (level < 0) level = best_level();
    if (threads < 1 || level >= kLevelCount || !(available_levels() >> level & 1)) return nullptr;
    return new (std::nothrow) Runtime(threads, level);
}

// Waits for the running call, then stops the threads and frees the memory. Later calls, including calls
// that already wait, return kClosed; the handle stays valid until it is destroyed.
EXPORT void embedlm_runtime_close(void* handle) {
    Runtime* runtime = static_cast<Runtime*>(handle);
    // A forked child has no threads to stop, and a lock that was held during the fork stays held.
    if (runtime->pool.inherited()) {
        runtime->closed = true;
        return;
    }
    Turn turn(runtime);
    runtime->close();
}

EXPORT void embedlm_runtime_destroy(void* handle) {
    Runtime* runtime = static_cast<Runtime*>(handle);
    // In a forked child the threads do not exist, but the condition variables count them as waiting
    // and their destruction would block forever: the child keeps its copy.
    if (!runtime->pool.inherited()) delete runtime;
}

EXPORT int embedlm_runtime_level(const void* handle) {
    return static_cast<const Runtime*>(handle)->level;
}

// Packs `rows` rows of `source`, which are those of the weight from `first` on: whole strips, except at
// its end. Other threads go on with it after the return. It is done when the next call that runs something
// has returned, or embedlm_pack_end: `w`, its memory and the source must stay until then.
EXPORT int embedlm_pack(void* handle, const Weight* w, const void* source, int64_t row_bytes,
                        int64_t first, int64_t rows) {
    Runtime* runtime = static_cast<Runtime*>(handle);
    Turn turn(runtime);
    if (runtime->closed) return kClosed;
    const int64_t blocks = (rows + kTileRows - 1) / kTileRows;
    const PackJob job = {w, source, row_bytes, first / kTileRows, blocks};
    return runtime->begin_pack(job, rows * w->k) ? kOk : kOutOfMemory;
}

// Waits until everything is packed.
EXPORT void embedlm_pack_end(void* handle) { Turn turn(static_cast<Runtime*>(handle)); }

EXPORT int embedlm_unpack(void* handle, const Weight* w, void* out, int64_t row_bytes) {
    Runtime* runtime = static_cast<Runtime*>(handle);
    Turn turn(runtime);
    if (runtime->closed) return kClosed;
    if (!is_right(*w)) return kDamaged;
    if (!runtime->reserve_private(w->dense ? 0 : pack_scratch(*w))) return kOutOfMemory;
    runtime->parallel(w->row_blocks, w->n * w->k, [=](int64_t begin, int64_t end, int thread) {
        if (w->dense) dense_blocks(*w, out, true, 0, begin, end);
        else
            unpack_blocks(*w, static_cast<uint8_t*>(out), row_bytes, begin, end,
                          runtime->private_scratch(thread));
    });
    return kOk;
}

// Rounds rows in the calling thread with the kernels of a level that runs on this CPU (-1: the best one); any
// number of threads at a time.
EXPORT int embedlm_round(int level, RoundArgs* args) {
    const KernelTable* kernels = kernel_table(level < 0 ? best_level() : level);
    if (!kernels) return kUnknownOp;
    kernels->round_rows(args);
    return kOk;
}

// Runs one operator over `rows` rows (kOpAttention and kOpPlaces: requests).
EXPORT int embedlm_run(void* handle, int kind, const void* args, int64_t rows) {
    Runtime* runtime = static_cast<Runtime*>(handle);
    Turn turn(runtime);
    if (runtime->closed) return kClosed;
    return guarded([=]() -> int {
        runtime->single.clear();
        if (!runtime->single.add(kind, args, kTokens, 1)) return kUnknownOp;
        const int64_t counts[kCounts] = {rows};
        return runtime->run(runtime->single, counts);
    });
}

// Bytes of the arguments of operator `kind`; 0 for a kind that does not exist.
EXPORT int64_t embedlm_args_size(int kind) { return (int64_t)args_size(kind); }

EXPORT void* embedlm_program_create() { return new (std::nothrow) Program; }

EXPORT void embedlm_program_destroy(void* program) { delete static_cast<Program*>(program); }

// Adds an operator: `per` rows for each of what `count` counts (Count in abi.hpp).
EXPORT int embedlm_program_add(void* program, int kind, const void* args, int count, int64_t per) {
    return guarded([=]() -> int {
        return static_cast<Program*>(program)->add(kind, args, (Count)count, per) ? kOk : kUnknownOp;
    });
}

// Runs the whole program with these counts.
EXPORT int embedlm_program_run(void* handle, void* program, const int64_t* counts) {
    Runtime* runtime = static_cast<Runtime*>(handle);
    Turn turn(runtime);
    if (runtime->closed) return kClosed;
    return guarded([=]() -> int { return runtime->run(*static_cast<Program*>(program), counts); });
}

// Times the operators of later runs (`on`), from zero, or no longer.
EXPORT int embedlm_program_time(void* handle, void* recorded, int on) {
    Runtime* runtime = static_cast<Runtime*>(handle);
    Program* program = static_cast<Program*>(recorded);
    std::lock_guard<std::mutex> lock(runtime->mutex);
    return guarded([=]() -> int {
        program->times.reset(on ? program->operators() : 0, runtime->pool.threads());
        return kOk;
    });
}

// See OperatorTimes::read.
EXPORT void embedlm_program_times(void* handle, const void* program, int64_t* out) {
    std::lock_guard<std::mutex> lock(static_cast<Runtime*>(handle)->mutex);
    static_cast<const Program*>(program)->times.read(out);
}

// See sum_of.
EXPORT uint64_t embedlm_sum(const void* data, int64_t bytes) {
    return sum_of(static_cast<const uint8_t*>(data), bytes);
}

// Compares the sums of a weight with other threads that do the same: kOk or kDamaged.
EXPORT int embedlm_check(WeightCheck* check) { return compare_sums(check) ? kOk : kDamaged; }

// See read_over.
EXPORT int embedlm_read_over(int file, int64_t offset, void* at, int64_t bytes) {
    return read_over(file, offset, at, bytes);
}

// See ExpertCache.
EXPORT void* embedlm_experts_create(int file, const char* path, int direct, int readers) {
    return new (std::nothrow) ExpertCache(file, path, direct != 0, readers);
}

// The number of the group, or -1: out of memory.
EXPORT int embedlm_experts_add(void* cache, int layer, int kind, const Weight* const* stored,
                               Weight* const* views, const int64_t* offsets, int64_t count) {
    int number = -1;
    guarded([&]() -> int {
        number = static_cast<ExpertCache*>(cache)->add(layer, kind, stored, views, offsets, count);
        return kOk;
    });
    return number;
}

EXPORT int embedlm_experts_reserve(void* cache, int kind, int64_t slots, int64_t bytes) {
    return guarded([=]() -> int {
        return static_cast<ExpertCache*>(cache)->reserve(kind, slots, bytes) ? kOk : kOutOfMemory;
    });
}

EXPORT void embedlm_experts_counts(void* cache, ExpertCounts* out) {
    static_cast<ExpertCache*>(cache)->read_counts(out);
}

EXPORT void embedlm_experts_begin_with(void* cache, int layer, const double* shares, int64_t count) {
    static_cast<ExpertCache*>(cache)->begin_with(layer, shares, count);
}

EXPORT int embedlm_experts_preload(void* cache) {
    return guarded([=]() -> int {
        static_cast<ExpertCache*>(cache)->preload();
        return kOk;
    });
}

EXPORT void embedlm_experts_uses(void* cache, int layer, int64_t* out, int64_t count) {
    static_cast<ExpertCache*>(cache)->read_uses(layer, out, count);
}

EXPORT void embedlm_experts_ranks(void* cache, ExpertRanks* out) {
    static_cast<ExpertCache*>(cache)->read_ranks(out);
}

EXPORT void embedlm_experts_stop(void* cache) { static_cast<ExpertCache*>(cache)->stop(); }

EXPORT void embedlm_experts_destroy(void* cache) { delete static_cast<ExpertCache*>(cache); }

// A group that nobody has joined yet. Exchanges wait `patience_s` seconds for a rank that is alive.
// `processes`, `slots`: see RankGroup.
EXPORT void* embedlm_ranks_create(int rank, int size, int processes, int slots, double patience_s) {
    return new (std::nothrow) RankGroup(rank, size, processes, slots, patience_s);
}

// Meets the other ranks of this machine in `folder`; waits `seconds` for their files.
EXPORT int embedlm_ranks_join(void* group, const char* folder, double seconds) {
    return static_cast<RankGroup*>(group)->join(folder, seconds);
}

// `out` gets `bytes` of every rank, by rank.
EXPORT int embedlm_ranks_gather(void* group, const void* mine, int64_t bytes, void* out) {
    return static_cast<RankGroup*>(group)->gather(mine, bytes, out);
}

// See RankGroup::reserve: all ranks call it.
EXPORT int embedlm_ranks_reserve(void* group, int64_t bytes) {
    return static_cast<RankGroup*>(group)->reserve(bytes);
}

// See RankGroup::transfer.
EXPORT int embedlm_ranks_transfer(void* link, void* data, int64_t bytes) {
    return static_cast<RankGroup*>(link)->transfer(data, bytes);
}

// See RankGroup::waited_ns.
EXPORT int64_t embedlm_ranks_waited_ns(void* group) { return static_cast<RankGroup*>(group)->waited_ns(); }

// See RankGroup::give_up.
EXPORT void embedlm_ranks_give_up(void* group) { static_cast<RankGroup*>(group)->give_up(); }

// Gives the memory back; no exchange may run.
EXPORT void embedlm_ranks_destroy(void* group) { delete static_cast<RankGroup*>(group); }
