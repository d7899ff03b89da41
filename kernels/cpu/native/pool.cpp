#include "pool.hpp"

#include <unistd.h>

#include <chrono>

namespace {

constexpr std::chrono::microseconds kSpin(50);

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins until `ready()` or the time is over; the clock is read every 32 turns (about 1 us).
template <typename Ready>
bool spin(Ready ready) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    return false;
}

constexpr uint32_t count_of(uint64_t job) { return (uint32_t)(job >> 16) & 0xffff; }
constexpr uint32_t next_of(uint64_t job) { return (uint32_t)job & 0xffff; }

}  // namespace

Pool::Pool(int threads) : threads_(threads), owner_(getpid()) {
    try {
        for (int i = 1; i < threads; ++i) workers_.emplace_back(&Pool::work, this, i);
    } catch (...) {  // the system has no more threads: run with those there are
        threads_ = (int)workers_.size() + 1;
    }
}

Pool::~Pool() {
    stop_.store(true);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    for (auto& worker : workers_) worker.join();
}

bool Pool::inherited() const { return getpid() != owner_; }

void Pool::execute(uint32_t index, uint32_t count, int thread) {
    task_(context_, total_ * index / count, total_ * (index + 1) / count, thread);
}

bool Pool::claim_and_run(int thread) {
    uint64_t job = job_.load(std::memory_order_acquire);
    if (next_of(job) >= count_of(job)) return false;
    job = job_.fetch_add(1, std::memory_order_acq_rel);
    if (next_of(job) >= count_of(job)) return false;
    // Our chunk is not done, so the job cannot end: task_ and context_ are stable until we say so.
    const uint32_t count = count_of(job);
    execute(next_of(job), count, thread);
    if (done_.fetch_add(1, std::memory_order_seq_cst) + 1 == count &&
        caller_sleeps_.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_one();
    }
    return true;
}

void Pool::work(int thread) {
    while (!stop_.load(std::memory_order_relaxed)) {
        if (claim_and_run(thread)) continue;
        auto ready = [this] {
            const uint64_t job = job_.load(std::memory_order_acquire);
            return next_of(job) < count_of(job) || stop_.load(std::memory_order_relaxed);
        };
        if (spin(ready)) continue;
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [this] {
            const uint64_t job = job_.load(std::memory_order_seq_cst);
            return next_of(job) < count_of(job) || stop_.load();
        });
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
}

void Pool::run(Task task, void* context, int64_t total, int64_t chunks) {
    if (chunks > total) chunks = total;
    if (chunks > 4096) chunks = 4096;
    if (workers_.empty() || chunks <= 1 || inherited()) {
        task(context, 0, total, 0);
        return;
    }
    task_ = task;
    context_ = context;
    total_ = total;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (job_.load(std::memory_order_relaxed) >> 32) + 1;
    const uint32_t count = (uint32_t)chunks;
    job_.store(epoch << 32 | (uint64_t)count << 16, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    while (claim_and_run(0)) {
    }
    auto all_done = [this, count] { return done_.load(std::memory_order_seq_cst) >= count; };
    if (spin(all_done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    caller_sleeps_.store(true, std::memory_order_seq_cst);
    finished_.wait(lock, all_done);
    caller_sleeps_.store(false, std::memory_order_seq_cst);
}
