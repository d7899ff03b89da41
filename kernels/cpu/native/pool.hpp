// The threads of one runtime. There is no global state: runtimes are independent.
//
// A job is a list of phases, run one after another. A phase is divided into tasks, and every thread
// owns a contiguous run of them. A thread claims its own tasks one by one, so that it reads memory in
// one direction, and then the tasks that others have left. A thread that the host's scheduler has
// preempted delays the others by at most the task it holds, and no thread waits for one that has not
// woken up yet. The thread that finishes the last task of a phase opens the next phase. It runs phases
// of one task itself, so that the small operators of a decode step need no synchronization (about 0.2
// us each time). Which thread computes a task never changes a result. Idle threads spin for a bounded
// time (a decode step opens a phase every few microseconds; a futex wake costs about 5 us), then sleep:
// an idle runtime uses no CPU.
#pragma once

#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "abi.hpp"

struct Phase {
    int64_t total;   // items
    int64_t tasks;  // at least 1, at most kMaxTasks
};

enum { kMaxTasks = 4096, kTaskBits = 16 };
// Threads that find no task left have counted `next` beyond `end`, by one each.
static_assert(2 * kMaxTasks < 1 << kTaskBits, "Own::word holds begin and end of a thread's tasks");

class Pool {
public:
    // Runs a task of a phase.
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
    // Runs all phases; returns when the last is done. One caller at a time (the runtime holds a lock).
    void run(TaskBody task, void* context, const Phase* phases, int count);
    // The two halves of run: begin returns while other threads run the tasks, if there are any, and finish
    // runs those that are left. Nothing else may begin in between.
    void begin(TaskBody task, void* context, const Phase* phases, int count);
    void finish();

    // Side tasks of the next run, which depend on none of its phases: threads other than the caller run
    // them before they join the phases. A phase that needs their results calls finish_side() first.
    typedef void (*SideBody)(void* context, int index);
    void arm_side(SideBody body, void* context, int count);
    // Runs the side tasks that no thread has begun, and waits for the others.
    void finish_side();

private:
    bool claim_side();
    void work(int thread);
    bool claim_and_run(int thread);
    bool claim(int owner, int thread);
    void open(int phase, int thread);
    int64_t first_task(int64_t tasks, int thread) const { return tasks * thread / threads_; }
    template <typename Ready>
    void await(std::condition_variable& signal, std::atomic<int>& waiting, Ready ready);

    // A thread's own tasks: epoch (32 bits) | end (16) | next (16). In one word, so that a late thread
    // can never mistake a task of a new phase for one of the phase it woke up for. The epoch counts
    // phases.
    struct alignas(kCacheLine) Own {
        std::atomic<uint64_t> word{0};
    };
    static_assert(sizeof(Own) == kCacheLine, "the words of two threads never share a cache line");
    std::unique_ptr<Own[]> own_;
    alignas(kCacheLine) std::atomic<uint32_t> opened_{0};  // phases with more than one task so far
    alignas(kCacheLine) std::atomic<uint32_t> done_{0};
    alignas(kCacheLine) std::atomic<bool> finished_{true};
    // Side tasks: end (32 bits) | next (32), and how many are done.
    alignas(kCacheLine) std::atomic<uint64_t> side_{0};
    std::atomic<int> side_done_{0};
    SideBody side_body_ = nullptr;
    void* side_context_ = nullptr;
    int side_count_ = 0;
    alignas(kCacheLine) std::atomic<int> sleepers_{0}, callers_{0};
    std::atomic<bool> stop_{false};
    TaskBody task_ = nullptr;
    void* context_ = nullptr;
    const Phase* phases_ = nullptr;
    int count_ = 0;
    uint32_t base_ = 1;  // the epoch of phase 0
    int threads_;
    int64_t owner_;
    std::mutex mutex_;
    std::condition_variable wake_, end_;
    std::vector<std::thread> workers_;
};
