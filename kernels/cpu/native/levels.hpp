// Which instruction-set levels this CPU and its operating system offer.
#pragma once

#include "abi.hpp"

// Worst to best; the Python side names them in the same order (kernels/cpu/library.py).
enum Level { kPortable = 0, kAvx2 = 1, kAvx2Vnni = 2, kAvx512Vnni = 3, kLevelCount = 4 };

int available_levels();  // bit mask
int best_level();
const KernelTable* kernel_table(int level);
