// Which instruction-set levels this CPU and its operating system offer, and which of them this library
// was compiled for.
#pragma once

#include "abi.hpp"

// Worst to best of each architecture; kernels/cpu/library.py and CMakeLists.txt name them in the same
// order.
enum Level {
    kPortable = 0,
    kAvx2 = 1,
    kAvx2Vnni = 2,
    kAvx512Vnni = 3,
    kAvx512Bf16 = 4,
    kNeon = 5,
    kNeonDotprod = 6,
    kNeonI8mm = 7,
    kLevelCount = 8
};
static_assert(kLevelCount < 31, "available_levels has a bit for each");

int cpu_levels();        // bit mask: what the CPU and its operating system offer
// Whether weights are prefetched into the first-level cache (simd.hpp): from Zen 5 on. Asks the CPU once.
bool first_cache_prefetch();
int available_levels();  // those of them that are in this library
int best_level();        // of those; kPortable if there are none
const KernelTable* kernel_table(int level);  // nullptr: not in this library
