// The exported functions: one engine per Ops, its threads, scratch memory and instruction-set level.
//
// Nothing here throws or aborts: every function returns a Status. Calls on one engine from several
// threads wait for one another; engines are independent.
#include <stdlib.h>
#include <string.h>

#include <new>

#include "abi.hpp"
#include "attention_plan.hpp"
#include "levels.hpp"
#include "pack.hpp"
#include "pool.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kAlign = 64;
// Chunks per thread and op: enough that a thread that loses its core delays the others little.
constexpr int64_t kChunksPerThread = 4;

size_t round_up(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// Memory that grows and is kept: the hot path allocates nothing.
class Scratch {
public:
    ~Scratch() { free(data_); }
    bool reserve(size_t bytes) {
        if (bytes <= size_) return true;
        free(data_);
        data_ = static_cast<uint8_t*>(aligned_alloc(kAlign, round_up(bytes)));
        size_ = data_ ? bytes : 0;
        return data_ != nullptr;
    }
    // The same, all zero whenever it has grown.
    bool reserve_zeroed(size_t bytes) {
        if (bytes <= size_) return true;
        if (!reserve(bytes)) return false;
        memset(data_, 0, size_);
        return true;
    }
    uint8_t* data() { return data_; }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

struct Engine {
    Engine(int threads, int level_)
        : pool(threads), kernels(kernel_table(level_)), level(level_) {}
    // Private memory of `bytes` for every thread.
    bool reserve_private(size_t bytes) {
        stride = round_up(bytes);
        return thread_scratch.reserve(stride * (size_t)pool.threads());
    }
    uint8_t* private_scratch(int thread) { return thread_scratch.data() + stride * (size_t)thread; }

    Pool pool;
    const KernelTable* kernels;
    int level;
    std::mutex mutex;
    Scratch shared, thread_scratch, attention;
    size_t stride = 0;
};

// Runs body(begin, end, thread) over 0..total on the engine's threads.
template <typename Body>
void parallel(Engine* engine, int64_t total, int64_t chunks, const Body& body) {
    engine->pool.run(
        [](void* context, int64_t begin, int64_t end, int thread) {
            (*static_cast<const Body*>(context))(begin, end, thread);
        },
        const_cast<void*>(static_cast<const void*>(&body)), total, chunks);
}

// `work` (about one per multiply) below which waking the threads costs more than it gives.
int64_t chunks_for(const Engine* engine, int64_t work) {
    if (work < 65536) return 1;
    return kChunksPerThread * engine->pool.threads();
}

bool reserve_activations(Engine* engine, LinearArgs* args) {
    const size_t m = (size_t)args->m, blocks = (size_t)args->w->k_blocks;
    const size_t q = round_up(m * blocks * kDepth), scale = round_up(m * blocks * 4);
    const size_t pair = round_up(m * blocks * 8);
    if (!engine->shared.reserve(q + scale + 2 * pair)) return false;
    uint8_t* at = engine->shared.data();
    args->act.k_blocks = args->w->k_blocks;
    args->act.q = reinterpret_cast<int8_t*>(at);
    args->act.scale = reinterpret_cast<float*>(at + q);
    args->act.minus_sum = reinterpret_cast<float*>(at + q + scale);
    args->act.sum = reinterpret_cast<int32_t*>(at + q + scale + pair);
    return true;
}

}  // namespace

EXPORT int embedlm_abi_version() { return kAbiVersion; }

// Bit i: level i runs on this CPU (levels.hpp).
EXPORT int embedlm_levels() { return available_levels(); }

// `level` -1: the best. Null when the level does not run here or memory is out.
EXPORT void* embedlm_engine_create(int threads, int level) {
    if (level < 0) level = best_level();
    if (threads < 1 || level >= kLevelCount || !(available_levels() >> level & 1)) return nullptr;
    return new (std::nothrow) Engine(threads, level);
}

EXPORT void embedlm_engine_destroy(void* handle) {
    Engine* engine = static_cast<Engine*>(handle);
    // In a forked child the threads do not exist, yet the condition variables count them as
    // waiting and their destruction would block for ever: the child keeps its copy.
    if (!engine->pool.inherited()) delete engine;
}

EXPORT int embedlm_engine_level(const void* engine) {
    return static_cast<const Engine*>(engine)->level;
}

EXPORT int embedlm_pack(void* handle, const Weight* w, const void* source, int64_t row_bytes) {
    Engine* engine = static_cast<Engine*>(handle);
    if (!engine) return kClosed;
    std::lock_guard<std::mutex> lock(engine->mutex);
    if (!engine->reserve_private((size_t)w->k)) return kOutOfMemory;
    parallel(engine, w->row_blocks, chunks_for(engine, w->n * w->k),
             [=](int64_t begin, int64_t end, int thread) {
                 if (w->dense) dense_blocks(*w, const_cast<void*>(source), false, begin, end);
                 else
                     pack_blocks(*w, static_cast<const uint8_t*>(source), row_bytes, begin, end,
                                 engine->private_scratch(thread));
             });
    return kOk;
}

EXPORT int embedlm_unpack(void* handle, const Weight* w, void* out, int64_t row_bytes) {
    Engine* engine = static_cast<Engine*>(handle);
    if (!engine) return kClosed;
    std::lock_guard<std::mutex> lock(engine->mutex);
    if (!engine->reserve_private((size_t)w->k)) return kOutOfMemory;
    parallel(engine, w->row_blocks, chunks_for(engine, w->n * w->k),
             [=](int64_t begin, int64_t end, int thread) {
                 if (w->dense) dense_blocks(*w, out, true, begin, end);
                 else
                     unpack_blocks(*w, static_cast<uint8_t*>(out), row_bytes, begin, end,
                                   engine->private_scratch(thread));
             });
    return kOk;
}

EXPORT int embedlm_rows(void* handle, const Weight* w, const int64_t* ids, int64_t count,
                        float* out) {
    Engine* engine = static_cast<Engine*>(handle);
    if (!engine) return kClosed;
    std::lock_guard<std::mutex> lock(engine->mutex);
    parallel(engine, count, chunks_for(engine, count * w->k * 4),
             [=](int64_t begin, int64_t end, int) { gather_rows(*w, ids, out, begin, end); });
    return kOk;
}

// out [m, n] = x [m, k] W^T; exact: fp32 on the dequantized values.
EXPORT int embedlm_linear(void* handle, const Weight* w, const float* x, int64_t m, float* out,
                          int exact) {
    Engine* engine = static_cast<Engine*>(handle);
    if (!engine) return kClosed;
    std::lock_guard<std::mutex> lock(engine->mutex);
    LinearArgs args = {w, x, m, out, {}};
    const size_t depth = (size_t)w->k_blocks * kDepth;
    const int64_t chunks = chunks_for(engine, m * w->n * w->k / (exact || w->dense ? 1 : 4));
    if (w->dense || exact) {
        if (!w->dense && !engine->reserve_private(depth * kRows * sizeof(float)))
            return kOutOfMemory;
        parallel(engine, w->row_blocks, chunks, [=, &args](int64_t begin, int64_t end, int thread) {
            engine->kernels->linear_float(&args, begin, end,
                                          w->dense ? nullptr : engine->private_scratch(thread));
        });
        return kOk;
    }
    const size_t scales = depth / (size_t)w->unit * kRows * sizeof(float) * 2;
    if (!reserve_activations(engine, &args) ||
        !engine->reserve_private(scales + (m > 1 ? depth * kRows : 0)))
        return kOutOfMemory;
    parallel(engine, m, chunks_for(engine, m * w->k),
             [=, &args](int64_t begin, int64_t end, int) {
                 engine->kernels->quantize(&args, begin, end);
             });
    parallel(engine, w->row_blocks, chunks, [=, &args](int64_t begin, int64_t end, int thread) {
        engine->kernels->linear_int(&args, begin, end, engine->private_scratch(thread));
    });
    return kOk;
}

EXPORT int embedlm_rms_norm(void* handle, const NormArgs* args, int64_t tokens) {
    Engine* engine = static_cast<Engine*>(handle);
    if (!engine) return kClosed;
    std::lock_guard<std::mutex> lock(engine->mutex);
    parallel(engine, tokens, chunks_for(engine, tokens * args->width),
             [=](int64_t begin, int64_t end, int) { engine->kernels->rms_norm(args, begin, end); });
    return kOk;
}

EXPORT int embedlm_gated(void* handle, const GatedArgs* args, int64_t tokens) {
    Engine* engine = static_cast<Engine*>(handle);
    if (!engine) return kClosed;
    std::lock_guard<std::mutex> lock(engine->mutex);
    parallel(engine, tokens, chunks_for(engine, tokens * args->width * 8),
             [=](int64_t begin, int64_t end, int) { engine->kernels->gated(args, begin, end); });
    return kOk;
}

EXPORT int embedlm_rope(void* handle, const RopeArgs* args, int64_t tokens) {
    Engine* engine = static_cast<Engine*>(handle);
    if (!engine) return kClosed;
    std::lock_guard<std::mutex> lock(engine->mutex);
    if (!slots_in_range(args, tokens)) return kBadIndex;
    const int64_t width = (int64_t)(args->heads + 2 * args->kv_heads) * args->head_dim;
    parallel(engine, tokens, chunks_for(engine, tokens * width),
             [=](int64_t begin, int64_t end, int) { engine->kernels->rope(args, begin, end); });
    return kOk;
}

EXPORT int embedlm_rope_angles(void* handle, const AnglesArgs* args, int64_t tokens) {
    Engine* engine = static_cast<Engine*>(handle);
    if (!engine) return kClosed;
    std::lock_guard<std::mutex> lock(engine->mutex);
    parallel(engine, tokens, chunks_for(engine, tokens * args->half * 64),
             [=](int64_t begin, int64_t end, int) {
                 engine->kernels->rope_angles(args, begin, end);
             });
    return kOk;
}

EXPORT int embedlm_attention(void* handle, AttentionArgs* args) {
    Engine* engine = static_cast<Engine*>(handle);
    if (!engine) return kClosed;
    std::lock_guard<std::mutex> lock(engine->mutex);
    const AttentionPlan plan = plan_attention(args, args->requests, engine->pool.threads());
    if (plan.status != kOk) return plan.status;
    if (!engine->attention.reserve_zeroed(plan.shared_bytes) ||
        !engine->reserve_private(plan.private_bytes))
        return kOutOfMemory;
    args->shared = engine->attention.data();
    parallel(engine, plan.items, plan.work < 16384 ? 1 : plan.items,
             [=](int64_t begin, int64_t end, int thread) {
                 engine->kernels->attention(args, begin, end, engine->private_scratch(thread));
             });
    return kOk;
}
