// How threads divide a product: into strips of its weights, and with many rows also into groups of rows,
// one for each thread.
//
// A line of memory that two cores use in turn costs a transfer each time: 10 ns for a line that the
// other core has read, 46 ns if the two share no third-level cache. With strips alone every thread reads
// what all threads quantized. In groups, rows stay with the thread that has them in row-wise operators
// too: prompts of 256 to 512 tokens (two threads) are 1.09 times as fast across caches, 1.01 within one.
#pragma once

#include "levels.hpp"
#include "linear_scratch.hpp"

// At least 1. With one group per thread each of them reads all weights: a group has enough rows for that
// (weights of 4 bits are needed at 1 GB/s).
int64_t row_groups(const LinearArgs& args, int threads);
// Strips of all groups.
int64_t linear_items(const LinearArgs& args, int threads);
// Some of the items, group by group.
void linear_tiles(const KernelTable& kernels, const LinearArgs& args, int threads,
                  const ItemRange& share, uint8_t* scratch);
