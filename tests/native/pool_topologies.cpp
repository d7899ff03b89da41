// The pool of threads on made-up machines: 1 to 16 threads, some of them on cores that are slow or that
// something else has taken.
//
// pool_topologies: exit code 0, or one line with what was wrong. A core's speed is simulated without a
// clock: a slow thread stays in the first task of each phase until nobody else has anything left to do.
#include <stdio.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "pool.hpp"

namespace {

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

constexpr int kMostThreads = 16, kPhases = 6;
constexpr auto kPatience = std::chrono::seconds(60);

struct Machine {
    Pool& pool;
    const Phase* phases;
    bool slow[kMostThreads] = {};
    std::vector<std::unique_ptr<std::atomic<int>[]>> runs;  // of each item of each phase
    std::atomic<int64_t> done[kPhases] = {};                // items
    std::atomic<int64_t> held[kPhases] = {};                // items of tasks that slow threads are in
    std::atomic<int> by_slow[kPhases][kMostThreads] = {};
    std::atomic<int> current{0};

    Machine(Pool& pool, const Phase* phases) : pool(pool), phases(phases) {
        for (int p = 0; p < kPhases; ++p)
            runs.emplace_back(new std::atomic<int>[(size_t)phases[p].total]());
    }

    // Until all tasks of the phase are done but those that slow threads are in.
    void crawl(int phase, int64_t items) {
        held[phase].fetch_add(items);
        const auto end = std::chrono::steady_clock::now() + kPatience;
        while (done[phase].load() + held[phase].load() < phases[phase].total) {
            CHECK(std::chrono::steady_clock::now() < end);  // else its other tasks wait for it
            std::this_thread::yield();
        }
    }

    void task(int phase, const ItemRange& share, int thread) {
        for (int p = 0; p < phase; ++p) CHECK(done[p].load() == phases[p].total);
        const ItemRange own = pool.own(phases[phase], thread);
        if (phases[phase].tasks == 1) {
            CHECK(share.begin == 0 && share.end == phases[phase].total);
        } else if (own.begin <= share.begin && share.end <= own.end) {
            CHECK(share.reach == own.end);
        } else {
            CHECK(share.reach == share.end && !share.resumed);  // nothing to prefetch behind it
        }
        for (int64_t i = share.begin; i < share.end; ++i) runs[(size_t)phase][i].fetch_add(1);
        if (slow[thread]) {
            by_slow[phase][thread].fetch_add(1);
            if (phases[phase].tasks > 1) crawl(phase, share.end - share.begin);
        }
        done[phase].fetch_add(share.end - share.begin);
    }
};

void run_task(void* machine, int phase, const ItemRange& share, int thread) {
    static_cast<Machine*>(machine)->task(phase, share, thread);
}

// Threads own runs of items that lie one after another and differ by one task at most.
void check_shares(const Pool& pool, const Phase& phase) {
    int64_t at = 0;
    const int64_t most = (phase.total + phase.tasks - 1) / phase.tasks;  // items of a task
    const int64_t least = phase.tasks / pool.threads() * (phase.total / phase.tasks);
    for (int t = 0; t < pool.threads(); ++t) {
        const ItemRange own = pool.own(phase, t);
        CHECK(own.begin == at && own.end >= own.begin && own.reach == own.end);
        const int64_t tasks = (phase.tasks + pool.threads() - 1) / pool.threads();
        CHECK(own.end - own.begin >= least && own.end - own.begin <= tasks * most);
        at = own.end;
    }
    CHECK(at == phase.total);
}

// `slow_from..slow_to` are the slow threads; thread 0 is the caller.
void run(int threads, int slow_from, int slow_to) {
    Pool pool(threads);
    CHECK(pool.threads() == threads);
    Phase phases[kPhases];
    for (int p = 0; p < kPhases; ++p) {
        // Fewer tasks than threads, one task, as many as threads, more, and items that do not divide.
        const int64_t tasks[kPhases] = {4 * threads, 1, threads, 4 * threads + 1, 2, 3 * threads};
        phases[p] = {tasks[p] * 5 + p, tasks[p]};
        check_shares(pool, phases[p]);
    }
    for (int round = 0; round < 8; ++round) {
        Machine machine(pool, phases);
        for (int t = slow_from; t < slow_to; ++t) machine.slow[t] = true;
        pool.run(run_task, &machine, phases, kPhases);
        for (int p = 0; p < kPhases; ++p) {
            CHECK(machine.done[p].load() == phases[p].total);
            for (int64_t i = 0; i < phases[p].total; ++i) CHECK(machine.runs[(size_t)p][i].load() == 1);
            // A slow thread delays a phase by the task that it is in.
            for (int t = slow_from; t < slow_to; ++t)
                CHECK(phases[p].tasks == 1 || machine.by_slow[p][t].load() <= 1);
        }
    }
}

}  // namespace

int main() {
    for (int threads = 1; threads <= kMostThreads; ++threads) {
        run(threads, 0, 0);                      // cores that are alike
        if (threads == 1) continue;
        run(threads, threads / 2, threads);      // half of them are efficiency cores
        run(threads, 0, threads - 1);            // one fast core; the caller is on a slow one
        run(threads, threads - 1, threads);      // something else has a core
    }
    printf("pool: 1 to %d threads\n", kMostThreads);
}
