// The threads of one engine. No global state: two engines never meet.
//
// A job is a list of phases, run one after another; a phase is a number of tasks, of which every
// thread owns a run. It claims its own one by one, so that it reads memory in one direction, and then
// those that others have left. A thread that the host's scheduler has taken away costs at most the
// chunk it holds, and nobody waits for a thread that has not woken up yet. Whoever finishes the
// last chunk of a phase opens the next one; phases of one chunk it runs itself, so that a decode
// step's small operators cost no meeting of the threads (about 0.2 us each time).
// Which thread computes a chunk never changes a result.
// Idle threads spin for a bounded time (a decode step opens a phase every few microseconds; a futex
// wake costs about 5), then sleep: an idle engine uses no CPU.
#pragma once

#include <stdint.h>
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "abi.hpp"

struct Phase {
    int64_t total;   // items
    int64_t tasks;  // pieces of them; at least 1, at most kMaxTasks
};

enum { kMaxTasks = 4096 };

class Pool {
public:
    // Runs a chunk of a phase.
    typedef void (*TaskBody)(void* context, int phase, const ItemRange& share, int thread);

    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }
    // The items of a phase that a thread owns.
    ItemRange own(const Phase& phase, int thread) const {
        const int64_t begin = phase.total * first_task(phase.tasks, thread) / phase.tasks;
        const int64_t end = phase.total * first_task(phase.tasks, thread + 1) / phase.tasks;
        return {begin, end, end, 0};
    }
    // Ends the threads; nothing may run afterwards. Idempotent.
    void stop();
    // True in a forked child, which has none of the threads.
    bool inherited() const;
    // Runs all phases; returns when the last is done. One caller at a time (the engine holds a lock).
    void run(TaskBody task, void* context, const Phase* phases, int count);

private:
    void work(int thread);
    bool claim_and_run(int thread);
    bool claim(int owner, int thread);
    void open(int phase, int thread);
    int64_t first_task(int64_t tasks, int thread) const { return tasks * thread / threads_; }
    template <typename Ready>
    void await(std::condition_variable& signal, std::atomic<int>& waiting, Ready ready);

    // Of each thread's own tasks: epoch (32 bits) | end (16) | next (16). One word, so that a late
    // thread can never mistake a new phase's chunk for one of the phase it woke up for. The epoch
    // counts phases.
    struct alignas(64) Own {
        std::atomic<uint64_t> word{0};
    };
    std::unique_ptr<Own[]> own_;
    alignas(64) std::atomic<uint32_t> opened_{0};  // phases with more than one chunk so far
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) std::atomic<bool> finished_{true};
    std::atomic<int> sleepers_{0}, callers_{0};
    std::atomic<bool> stop_{false};
    TaskBody task_ = nullptr;
    void* context_ = nullptr;
    const Phase* phases_ = nullptr;
    int count_ = 0;
    uint32_t base_ = 1;  // the epoch of phase 0
    int threads_;
    pid_t owner_;
    std::mutex mutex_;
    std::condition_variable wake_, end_;
    std::vector<std::thread> workers_;
};
