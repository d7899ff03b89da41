// The threads of one engine. No global state: two engines never meet.
//
// A job is `count` chunks that threads claim one by one from an atomic counter, so a thread that
// the host's scheduler has taken away costs at most the chunk it holds, and the caller never waits
// for a thread that has not woken up yet. Which thread computes a chunk never changes a result.
// Idle threads spin for a bounded time (a decode step calls every few microseconds; a futex wake
// costs about 5), then sleep: an idle engine uses no CPU.
#pragma once

#include <stdint.h>
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

class Pool {
public:
    // A chunk: (context, first, last, thread).
    typedef void (*Task)(void* context, int64_t begin, int64_t end, int thread);

    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }
    // True in a forked child, which has none of the threads.
    bool inherited() const;
    // Runs task over 0..total in at most `chunks` pieces; returns when all are done. One caller at
    // a time (the engine holds a lock).
    void run(Task task, void* context, int64_t total, int64_t chunks);

private:
    void work(int thread);
    bool claim_and_run(int thread);
    void execute(uint32_t index, uint32_t count, int thread);

    // epoch (32 bits) | chunks (16) | next chunk (16): one word, so that a late thread can never
    // mistake a new job's chunk for one of the job it woke up for.
    std::atomic<uint64_t> job_{0};
    std::atomic<uint32_t> done_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> caller_sleeps_{false};
    std::atomic<bool> stop_{false};
    Task task_ = nullptr;
    void* context_ = nullptr;
    int64_t total_ = 0;
    int threads_;
    pid_t owner_;
    std::mutex mutex_;
    std::condition_variable wake_, finished_;
    std::vector<std::thread> workers_;
};
