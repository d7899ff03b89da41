// Which instruction-set levels this CPU and its operating system offer.
#pragma once

#include "abi.hpp"

// Worst to best of each architecture; kernels/cpu/library.py names them in the same order.
enum Level {
    kPortable = 0,
    kAvx2 = 1,
    kAvx2Vnni = 2,
    kAvx512Vnni = 3,
    kNeon = 4,
    kNeonDotprod = 5,
    kNeonI8mm = 6,
    kLevelCount = 7
};
static_assert(kLevelCount < 31, "available_levels has a bit for each");

int available_levels();  // bit mask
int best_level();
const KernelTable* kernel_table(int level);
