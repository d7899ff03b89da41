// Random shapes through every operator, one by one and recorded, for valgrind and the sanitizers.
//
// driver [rounds]. Results are compared with those of one thread, another number of rows, or single
// calls.
#include "driver.hpp"

#include <stdlib.h>

#include <thread>

namespace {

// Every level with a fused multiply-add, of every architecture, has these products (linear_int.hpp,
// linear_float.hpp): the value is that of the AVX2 level, which tests/kernels compares with references.
constexpr uint64_t kFusedProducts = 0x83b4fe8731b5df3a;

void everything(Random& random, TestRuntime& one, TestRuntime& many) {
    weights(random, one, many);
    rowwise(random, one, many);
    sampling(random, one, many);
    states(random, one, many);
    state_gates(random, one, many);
    attention(random, one, many);
    program(random, one, many);
    experts(random, one, many);
    adapters(random, one, many);
}

// Two threads at once, each with its own runtime, and both with the same one.
void together(int level, bool shared) {
    TestRuntime one(1, level), first(2, level), second(3, level);
    std::thread threads[2];
    for (int i = 0; i < 2; ++i) {
        threads[i] = std::thread([&, i] {
            Random random(100u + (unsigned)i);
            TestRuntime alone(1, level);
            everything(random, alone, shared || i == 0 ? first : second);
        });
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 3;
    CHECK(embedlm_abi_version() == kAbiVersion);
    CHECK(!embedlm_runtime_create(0, -1) && !embedlm_runtime_create(1, kLevelCount));
    void* closed = embedlm_runtime_create(3, 0);
    embedlm_runtime_close(closed);
    embedlm_runtime_close(closed);
    CHECK(embedlm_run(closed, kOpMap, nullptr, 1) == kClosed);
    embedlm_runtime_destroy(closed);
    for (int level = 0; level < kLevelCount; ++level) {
        if (!(embedlm_levels() >> level & 1)) continue;
        for (int threads = 1; threads <= 4; ++threads) TestRuntime(threads, level);  // never used
        for (int round = 0; round < rounds; ++round) {
            Random random((unsigned)(level * 1000 + round));
            TestRuntime one(1, level), many((int)random.between(2, 4), level);
            everything(random, one, many);
        }
        together(level, false);
        together(level, true);
        for (int size : {2, 3}) ranks(size, level);
        for (int stages : {2, 3}) pipeline(stages, level);
        const uint64_t hash = products_hash(level);
        bool fused = level != kPortable;
#if defined(__aarch64__)
        fused = true;
        // Here all levels have vectors of the same width, so all results have the same bits.
        Random random(77);
        TestRuntime portable(1, kPortable), own(2, level);
        for (int round = 0; round < rounds; ++round) everything(random, portable, own);
#endif
        printf("driver: level %d, %d rounds, products %016llx\n", level, rounds, (unsigned long long)hash);
        CHECK(!fused || hash == kFusedProducts);
    }
}
