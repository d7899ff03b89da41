// Weights of a mapped file that other processes write: what protects a reader.
//
// A file that lay on a disk may have other bits than were written. Each piece of a weight has a sum, and
// the threads that use the weight first compare them together: nothing is computed with wrong bits, and
// a weight that nobody uses is not read. The sums find damage, not an attacker.
#pragma once

#include "abi.hpp"

// Of `bytes` bytes. Two sums in each of 16 lanes (Fletcher's checksum): every changed bit shows in the
// first, and every exchange of words of a lane in the second.
uint64_t sum_of(const uint8_t* data, int64_t bytes);

// Takes pieces that nobody has taken, and returns when all are compared: whether they are right.
bool compare_sums(WeightCheck* check);

// Whether a weight may be used. Costs a comparison once it is known.
inline bool is_right(const Weight& w) {
    return !w.check || __atomic_load_n(&w.check->state, __ATOMIC_ACQUIRE) == kRight ||
           compare_sums(w.check);
}
