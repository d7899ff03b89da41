// What this runtime can do at most: how fast memory is read, how many 8-bit multiply-adds per second,
// how soon a thread sees what another has written. A benchmark's speed is a share of these; nothing
// here is used to compute anything.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <chrono>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "levels.hpp"
#include "system.hpp"

namespace {

typedef std::chrono::steady_clock Clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// body(thread) returns a rate; all threads start together. The sum of the rates, 0 without threads.
template <typename Body>
double sum_of_rates(int threads, const Body& body) {
    if (threads < 1) return 0;
    try {
        std::vector<double> rates((size_t)threads);
        std::vector<std::thread> running;
        running.reserve((size_t)threads);
        std::atomic<int> ready{0};
        std::atomic<bool> stop{false};
        const auto run = [&](int thread) {
            ready.fetch_add(1);
            while (ready.load() < threads && !stop.load()) std::this_thread::yield();
            if (!stop.load()) rates[(size_t)thread] = body(thread);
        };
        try {
            for (int i = 1; i < threads; ++i) running.emplace_back(run, i);
            run(0);
        } catch (const std::system_error&) {  // no more threads: release the waiting ones
            stop.store(true);
        }
        for (std::thread& thread : running) thread.join();
        double sum = 0;
        for (const double rate : rates) sum += rate;
        return stop.load() ? 0 : sum;
    } catch (const std::bad_alloc&) {
        return 0;
    }
}

// Sums `count` (a multiple of 64) words, four streams at a time: one stream alone does not keep
// the prefetchers busy.
uint64_t read_all(const uint64_t* words, int64_t count) {
    const int64_t quarter = count / 4;
    uint64_t sums[8] = {0};
    for (int64_t i = 0; i < quarter; i += 8)
        for (int stream = 0; stream < 4; ++stream) {
            const uint64_t* line = words + stream * quarter + i;
            __builtin_prefetch(line + 256);
            for (int j = 0; j < 8; ++j) sums[j] += line[j];
        }
    uint64_t sum = 0;
    for (const uint64_t part : sums) sum += part;
    return sum;
}

#define TIMES_4(line, a, b, c, d) line(a) line(b) line(c) line(d)
#define TIMES_12(line)                                          \
    TIMES_4(line, 0, 1, 2, 3) TIMES_4(line, 4, 5, 6, 7) TIMES_4(line, 8, 9, 10, 11)

// A peak loop runs `loops` times over its accumulators, one register each. It is written in assembly,
// because a compiler that spills one accumulator halves the result. The operands are whatever the
// registers hold: integer instructions take the same time for all values.
#if defined(WITH_AVX512_VNNI)
__attribute__((target("avx512f"))) void loop_avx512_vnni(int64_t loops) {
#define DOT(n) "vpdpbusd %%zmm30, %%zmm31, %%zmm" #n "\n"
    asm volatile("1:\n" TIMES_12(DOT) TIMES_4(DOT, 12, 13, 14, 15) "dec %0\n jnz 1b\n vzeroupper\n"
                 : "+r"(loops)
                 :
                 : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
                   "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm30", "xmm31");
#undef DOT
}
#endif

#if defined(WITH_AVX2)
#define YMM_LOOP(body)                                                                           \
    asm volatile("1:\n" body "dec %0\n jnz 1b\n vzeroupper\n"                                    \
                 : "+r"(loops)                                                                   \
                 :                                                                               \
                 : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", \
                   "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")

#if defined(WITH_AVX2_VNNI)
__attribute__((target("avx2"))) void loop_avx2_vnni(int64_t loops) {
#define DOT(n) "%{vex%} vpdpbusd %%ymm14, %%ymm15, %%ymm" #n "\n"
    YMM_LOOP(TIMES_12(DOT));
#undef DOT
}
#endif

// Three instructions for one dot product: bytes to pairs, pairs to sums of four, accumulate.
__attribute__((target("avx2"))) void loop_avx2(int64_t loops) {
#define DOT(n)                                \
    "vpmaddubsw %%ymm14, %%ymm15, %%ymm12\n"  \
    "vpmaddwd %%ymm15, %%ymm12, %%ymm13\n"    \
    "vpaddd %%ymm13, %%ymm" #n ", %%ymm" #n "\n"
    YMM_LOOP(TIMES_12(DOT));
#undef DOT
}

// Codes of fewer bits (bit_planes.hpp, short_run): eight sums of 16 bits, each of `RUN` products, before
// they are added as 32 bits.
#define TIMES_8(line) TIMES_4(line, 0, 1, 2, 3) TIMES_4(line, 4, 5, 6, 7)
#define TWICE(body) body body
#define SHORT_DOT(n)                          \
    "vpmaddubsw %%ymm14, %%ymm15, %%ymm12\n"  \
    "vpaddw %%ymm12, %%ymm" #n ", %%ymm" #n "\n"
#define SHORT_END(n)                      \
    "vpmaddwd %%ymm15, %%ymm" #n ", %%ymm13\n" \
    "vpaddd %%ymm13, %%ymm11, %%ymm11\n"
__attribute__((target("avx2"))) void loop_avx2_short2(int64_t loops) {
    YMM_LOOP(TWICE(TIMES_8(SHORT_DOT)) TIMES_8(SHORT_END));
}
__attribute__((target("avx2"))) void loop_avx2_short4(int64_t loops) {
    YMM_LOOP(TWICE(TWICE(TIMES_8(SHORT_DOT))) TIMES_8(SHORT_END));
}
__attribute__((target("avx2"))) void loop_avx2_short8(int64_t loops) {
    YMM_LOOP(TWICE(TWICE(TWICE(TIMES_8(SHORT_DOT)))) TIMES_8(SHORT_END));
}
#endif

#if defined(WITH_NEON)
#define NEON_LOOP(body)                                                                             \
    asm volatile("1:\n" body "subs %0, %0, #1\n b.ne 1b\n"                                          \
                 : "+r"(loops)                                                                      \
                 :                                                                                  \
                 : "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11",  \
                   "v12", "v13", "v14", "v15", "v16", "v17", "v28", "v29", "v30", "v31")

// Four instructions for one dot product: bytes to products, products to pairs, accumulate.
void loop_neon(int64_t loops) {
#define DOT(n)                                 \
    "smull v28.8h, v30.8b, v31.8b\n"           \
    "smull2 v29.8h, v30.16b, v31.16b\n"        \
    "addp v28.8h, v28.8h, v29.8h\n"            \
    "sadalp v" #n ".4s, v28.8h\n"
    NEON_LOOP(TIMES_12(DOT));
#undef DOT
}

#if defined(WITH_NEON_DOTPROD)
__attribute__((target("arch=armv8.2-a+dotprod"))) void loop_neon_dotprod(int64_t loops) {
#define DOT(n) "sdot v" #n ".4s, v30.16b, v31.16b\n"
    NEON_LOOP(TIMES_12(DOT) TIMES_4(DOT, 12, 13, 14, 15));
#undef DOT
}
#endif

#if defined(WITH_NEON_I8MM)
__attribute__((target("arch=armv8.2-a+i8mm"))) void loop_neon_i8mm(int64_t loops) {
#define DOT(n) "usmmla v" #n ".4s, v30.16b, v31.16b\n"
    NEON_LOOP(TIMES_12(DOT) TIMES_4(DOT, 12, 13, 14, 15));
#undef DOT
}
#endif
#endif

// The plain loop as the compiler vectorizes it, like every kernel of this level.
void loop_portable(int64_t loops) {
    int8_t a[64];
    uint8_t b[64];
    int32_t sums[16] = {0};
    memset(a, 3, sizeof a);
    memset(b, 2, sizeof b);
    for (; loops; --loops) {
        asm volatile("" : : "r"(a), "r"(b) : "memory");  // read them again, every time
        for (int j = 0; j < 64; j += 16)
            for (int i = 0; i < 16; ++i) sums[i] += a[i + j] * b[i + j];
    }
    asm volatile("" : : "r"(sums) : "memory");
}

struct PeakLoop {
    void (*run)(int64_t loops);
    double operations;  // of one loop; a multiplication and an addition are two
};

PeakLoop peak_loop(int level, int bits) {
#if defined(WITH_AVX2)
    if (level == kAvx2 && bits <= 4) return {loop_avx2_short8, 8 * 8 * 32 * 2.0};
    if (level == kAvx2 && bits == 5) return {loop_avx2_short4, 4 * 8 * 32 * 2.0};
    if (level == kAvx2 && bits == 6) return {loop_avx2_short2, 2 * 8 * 32 * 2.0};
#endif
    switch (level) {
#if defined(WITH_AVX512_VNNI)
        case kAvx512Bf16:
        case kAvx512Vnni: return {loop_avx512_vnni, 16 * 64 * 2.0};
#endif
#if defined(WITH_AVX2_VNNI)
        case kAvx2Vnni: return {loop_avx2_vnni, 12 * 32 * 2.0};
#endif
#if defined(WITH_AVX2)
        case kAvx2: return {loop_avx2, 12 * 32 * 2.0};
#endif
#if defined(WITH_NEON_I8MM)
        case kNeonI8mm: return {loop_neon_i8mm, 16 * 32 * 2.0};
#endif
#if defined(WITH_NEON_DOTPROD)
        case kNeonDotprod: return {loop_neon_dotprod, 16 * 16 * 2.0};
#endif
#if defined(WITH_NEON)
        case kNeon: return {loop_neon, 12 * 16 * 2.0};
#endif
        default: return {loop_portable, 64 * 2.0};
    }
}

}  // namespace

// Bytes per second that `threads` threads read together, each reading its own `bytes` repeatedly for
// `seconds`. 0: no memory or no threads.
EXPORT double embedlm_probe_read(int64_t bytes, int threads, double seconds) {
    if (bytes < 1 || threads < 1) return 0;
    const size_t part = ((size_t)bytes + 4095) / 4096 * 4096, size = part * (size_t)threads;
    void* data = map_memory(size);  // like packed weights: 4 KiB pages would measure the TLB
    if (!data) return 0;
    const double rate = sum_of_rates(threads, [=](int thread) {
        uint64_t* words = static_cast<uint64_t*>(data) + (size_t)thread * part / 8;
        memset(words, 1, part);  // also places the pages in memory near this thread
        int64_t passes = 0;
        double taken = 0;
        for (const auto start = Clock::now(); taken < seconds; taken = seconds_since(start)) {
            const uint64_t sum = read_all(words, (int64_t)part / 8);
            asm volatile("" : : "r"(sum));
            ++passes;
        }
        return (double)passes * (double)part / taken;
    });
    unmap_memory(data, size);
    return rate;
}

// How often per second a line of memory goes from one thread to the next, in a ring of `threads`.
// 0: fewer than two threads, or no threads.
EXPORT double embedlm_probe_hand_over(int threads, double seconds) {
    if (threads < 2) return 0;
    struct alignas(kCacheLine) Line {
        std::atomic<int64_t> turn{0};  // the hand-overs so far; -1: over
    } line;
    return sum_of_rates(threads, [&](int thread) {
        const auto start = Clock::now();
        for (int64_t mine = thread;; mine += threads) {
            int64_t turn;
            for (int spins = 1; (turn = line.turn.load(std::memory_order_acquire)) != mine && turn >= 0; ++spins)
                if (spins % 1024 == 0) std::this_thread::yield();  // fewer CPUs than threads
            if (turn < 0) return 0.0;
            const double taken = thread ? 0 : seconds_since(start);
            if (taken >= seconds) {
                line.turn.store(-1);
                return (double)mine / taken;
            }
            line.turn.store(mine + 1, std::memory_order_release);
        }
    });
}

// Integer operations per second of `threads` threads with the instructions of `level`: the dot product
// of that level's matrix kernels for codes of `bits` bits and activations of 8, from registers. Fewer
// bits differ on AVX2 only. 0: no threads, or a level that does not run on this CPU.
EXPORT double embedlm_probe_int8_peak(int level, int bits, int threads, double seconds) {
    if (level < 0 || level >= kLevelCount || !(available_levels() >> level & 1)) return 0;
    const PeakLoop loop = peak_loop(level, bits);
    return sum_of_rates(threads, [=](int) {
        const int64_t loops = 20000;
        double operations = 0, taken = 0;
        for (const auto start = Clock::now(); taken < seconds; taken = seconds_since(start)) {
            loop.run(loops);
            operations += (double)loops * loop.operations;
        }
        return operations / taken;
    });
}
