// Runs programs (program.hpp): binds their operators to the counts of a run, reserves the memory they need and
// gives their phases to the threads.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "low_rank_plan.hpp"
#include "pool.hpp"
#include "program.hpp"

inline size_t aligned(size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

// Memory that grows and is reused: recorded steps allocate nothing.
class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { release(); }
    void release();
    bool reserve(size_t bytes, bool zeroed = false);
    uint8_t* data() { return data_; }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

// Rows of a weight to pack, from a row block on.
struct PackJob {
    const Weight* w;
    const void* source;
    int64_t row_bytes, first, blocks;
};

// Runs programs: threads, kernels and scratch memory. One caller at a time.
class Runtime {
public:
    Runtime(int threads, int level) : pool(threads), kernels(kernel_table(level)), level(level) {}
    ~Runtime() { settle(); }

    Status run(Program& program, const int64_t* counts);
    // Stops the threads and frees the memory.
    void close();
    // Runs body(begin, end, thread) over 0..total.
    template <typename Body>
    void parallel(int64_t total, int64_t work, const Body& body) {
        const Phase phase = {total, tasks_for(total, work)};
        pool.run(
            [](void* context, int, const ItemRange& share, int thread) {
                (*static_cast<const Body*>(context))(share.begin, share.end, thread);
            },
            const_cast<void*>(static_cast<const void*>(&body)), &phase, 1);
    }
    // Begins to pack, `work` codes; false: out of memory. `settle` must come before any other use of the
    // threads, and waits for it.
    bool begin_pack(const PackJob& job, int64_t work);
    void settle();
    // Private memory of `bytes` for every thread.
    bool reserve_private(size_t bytes);
    uint8_t* private_scratch(int thread) { return private_.data() + stride_ * (size_t)thread; }

    Pool pool;
    const KernelTable* kernels;
    int level;
    std::mutex mutex;
    std::atomic<bool> closed{false};  // nothing may run any more
    Program single;  // reused for calls of one operator

private:
    struct Frame;  // the run, for the threads
    int64_t tasks_for(int64_t total, int64_t work) const;
    int64_t product_tasks(const LinearArgs& each, int64_t items) const;
    struct Needs;
    Status prepare(Program& program, const int64_t* counts);
    Status bind(Op* op, int64_t n, Needs* needs);
    void note_file_part(LinearArgs* args);
    Status plan_items(Op* op, int64_t requests, Needs* needs);
    Status plan_states(Op* op, StateRows* rows, int64_t requests, Needs* needs);
    Phase tile_phase(const Op& op, Program::Work kind, int64_t count) const;
    Phase stage_phase(const Program& program, const Program::Stage& stage, int64_t count) const;
    void rows(const Op& op, Program::Work kind, int64_t begin, int64_t end);
    void tiles(const Op& op, Program::Work kind, const ItemRange& share, int thread);
    ItemRange down_units(const Program& program, int stage, const ItemRange& strips) const;
    void hint(const Program& program, int stage, const ItemRange& items, ItemRange* share) const;
    void products(const Program& program, int stage, const ItemRange& share, int thread, OperatorTimes::Laps* laps);
    bool usable(const Weight& w);
    void transfer(const TransferArgs& args);
    static void run_task(void* context, int phase, const ItemRange& share, int thread);

    Scratch activations_, attention_, private_, low_;
    SlotPlans slots_;
    FilePart* used_ = nullptr;  // last
    RankGroup* group_ = nullptr;  // of the exchanges of the run; null: it has none
    Status transferred_ = kOk;    // by the run so far
    std::atomic<int> unusable_{kOk};  // why a weight that the run used is not
    size_t stride_ = 0;
    std::vector<Phase> phases_;
    PackJob packing_ = {};  // without a weight: nothing is being packed
    Phase packing_phase_ = {};
};

// The right to use a runtime.
class Turn {
public:
    explicit Turn(Runtime* runtime) : lock_(runtime->mutex) { runtime->settle(); }

private:
    std::lock_guard<std::mutex> lock_;
};
