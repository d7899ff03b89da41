#include "pool.hpp"

#include "spin.hpp"
#include "system.hpp"

namespace {

constexpr uint32_t kTaskMask = (1u << kTaskBits) - 1;
static_assert(2 * kTaskBits == 32, "end and next are below the 32 bits of the epoch");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "claiming a task takes no lock");

constexpr uint32_t epoch_of(uint64_t own) { return (uint32_t)(own >> 32); }
constexpr uint32_t end_of(uint64_t own) { return (uint32_t)(own >> kTaskBits) & kTaskMask; }
constexpr uint32_t next_of(uint64_t own) { return (uint32_t)own & kTaskMask; }

}  // namespace

Pool::Pool(int threads) : own_(new Own[(size_t)threads]), threads_(threads), owner_(process_id()) {
    try {
        for (int i = 1; i < threads; ++i) workers_.emplace_back(&Pool::work, this, i);
    } catch (...) {  // the system has no more threads: use those that started
        threads_ = (int)workers_.size() + 1;
    }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
    stop_.store(true);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    for (auto& worker : workers_) worker.join();
    workers_.clear();
}

bool Pool::inherited() const { return process_id() != owner_; }

// Runs phases of one task from `phase` on, then opens the first one with more tasks to all threads.
void Pool::open(int phase, int thread) {
    for (; phase < count_ && phases_[phase].tasks <= 1; ++phase) {
        const int64_t total = phases_[phase].total;
        task_(context_, phase, {0, total, total, 0}, thread);
    }
    if (phase == count_) {
        finished_.store(true, std::memory_order_seq_cst);
        if (callers_.load(std::memory_order_seq_cst)) {
            std::lock_guard<std::mutex> lock(mutex_);
            end_.notify_all();
        }
        return;
    }
    done_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = base_ + (uint32_t)phase;
    const int64_t tasks = phases_[phase].tasks;
    for (int t = 0; t < threads_; ++t) {
        const uint64_t next = (uint64_t)first_task(tasks, t);
        const uint64_t end = (uint64_t)first_task(tasks, t + 1);
        own_[t].word.store(epoch << 32 | end << kTaskBits | next, std::memory_order_release);
    }
    opened_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    // The caller may be asleep: it has tasks to claim again.
    if (callers_.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> lock(mutex_);
        end_.notify_all();
    }
}

// Runs the next of `owner`'s tasks, if there is one left.
bool Pool::claim(int owner, int thread) {
    std::atomic<uint64_t>& word = own_[owner].word;
    uint64_t own = word.load(std::memory_order_acquire);
    if (next_of(own) >= end_of(own)) return false;
    own = word.fetch_add(1, std::memory_order_acq_rel);
    if (next_of(own) >= end_of(own)) return false;
    // Our task is not done, so the phase cannot end, and the description of the job cannot change.
    const int phase = (int)(epoch_of(own) - base_);
    const int64_t total = phases_[phase].total, tasks = phases_[phase].tasks;
    const int64_t index = next_of(own);
    ItemRange share = {total * index / tasks, total * (index + 1) / tasks, 0, 0};
    share.reach = share.end;
    if (owner == thread) {
        const ItemRange all = this->own(phases_[phase], thread);
        share.reach = all.reach;
        share.resumed = share.begin > all.begin;
    }
    task_(context_, phase, share, thread);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) open(phase + 1, thread);
    return true;
}

bool Pool::claim_and_run(int thread) {
    for (int i = 0; i < threads_; ++i)
        if (claim((thread + i) % threads_, thread)) return true;
    return false;
}

// Spins, then sleeps until `ready()`; `waiting` counts the threads that others have to wake.
template <typename Ready>
void Pool::await(std::condition_variable& signal, std::atomic<int>& waiting, Ready ready) {
    if (spin_until(ready)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    waiting.fetch_add(1, std::memory_order_seq_cst);
    signal.wait(lock, ready);
    waiting.fetch_sub(1, std::memory_order_seq_cst);
}

void Pool::work(int thread) {
    begin_computing_thread();
    uint32_t seen = 0;  // no phase is open before the constructor is done
    while (!stop_.load(std::memory_order_relaxed)) {
        await(wake_, sleepers_, [=] {
            return opened_.load(std::memory_order_seq_cst) != seen ||
                   stop_.load(std::memory_order_seq_cst);
        });
        seen = opened_.load(std::memory_order_seq_cst);
        while (claim_side() || claim_and_run(thread)) continue;
    }
}

void Pool::arm_side(SideBody body, void* context, int count) {
    side_body_ = body;
    side_context_ = context;
    side_count_ = count;
    side_done_.store(0, std::memory_order_relaxed);
    side_.store((uint64_t)count << 32, std::memory_order_release);
}

// A thread that read `side_` in an earlier run may claim here too: what it runs is read after the claim.
bool Pool::claim_side() {
    uint64_t side = side_.load(std::memory_order_acquire);
    if ((uint32_t)side >= side >> 32) return false;
    side = side_.fetch_add(1, std::memory_order_acq_rel);
    if ((uint32_t)side >= side >> 32) return false;
    side_body_(side_context_, (int)(uint32_t)side);
    side_done_.fetch_add(1, std::memory_order_release);
    return true;
}

void Pool::finish_side() {
    while (claim_side()) continue;
    while (side_done_.load(std::memory_order_acquire) < side_count_) relax();
}

void Pool::run(TaskBody task, void* context, const Phase* phases, int count) {
    begin(task, context, phases, count);
    finish();
}

void Pool::begin(TaskBody task, void* context, const Phase* phases, int count) {
    if (workers_.empty() || inherited()) {
        for (int i = 0; i < count; ++i)
            task(context, i, {0, phases[i].total, phases[i].total, 0}, 0);
        finished_.store(true, std::memory_order_relaxed);  // a fork may have copied false
        return;
    }
    base_ += (uint32_t)count_;
    task_ = task;
    context_ = context;
    phases_ = phases;
    count_ = count;
    finished_.store(false, std::memory_order_relaxed);
    open(0, 0);
}

void Pool::finish() {
    while (!finished_.load(std::memory_order_acquire)) {
        const uint32_t seen = opened_.load(std::memory_order_seq_cst);
        if (claim_and_run(0)) continue;
        await(end_, callers_, [=] {
            return opened_.load(std::memory_order_seq_cst) != seen ||
                   finished_.load(std::memory_order_seq_cst);
        });
    }
}
