#include "weight_check.hpp"

#include <string.h>

#include <chrono>
#include <thread>

#include "system.hpp"

namespace {

constexpr int kLanes = 16;
// Pieces that are read ahead: 32 MiB keep disks of 3 GB/s busy for 10 ms.
constexpr int64_t kAhead = 32;
// Linux reads at most this much per request, whatever its length: read_ahead_kb of most disks.
constexpr int64_t kAskedAtOnce = 128 * 1024;

uint64_t mixed(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 32;
}

// If the piece is not in memory, asks for it.
void read_ahead(const uint8_t* at, int64_t bytes) {
    if (is_resident(at)) return;
    for (int64_t i = 0; i < bytes; i += kAskedAtOnce)
        will_need(at + i, (size_t)(bytes - i < kAskedAtOnce ? bytes - i : kAskedAtOnce));
}

}  // namespace

uint64_t sum_of(const uint8_t* data, int64_t bytes) {
    uint64_t first[kLanes] = {}, second[kLanes] = {}, words[kLanes];
    int64_t at = 0;
    for (; at + (int64_t)sizeof words <= bytes; at += (int64_t)sizeof words) {
        memcpy(words, data + at, sizeof words);
        for (int i = 0; i < kLanes; ++i) second[i] += first[i] += words[i];
    }
    if (at < bytes) {
        memset(words, 0, sizeof words);
        memcpy(words, data + at, (size_t)(bytes - at));
        for (int i = 0; i < kLanes; ++i) second[i] += first[i] += words[i];
    }
    uint64_t hash = mixed(0, (uint64_t)bytes);
    for (int i = 0; i < kLanes; ++i) hash = mixed(mixed(hash, first[i]), second[i]);
    return hash;
}

bool compare_sums(WeightCheck* check) {
    const int64_t pieces = (check->bytes + check->piece - 1) / check->piece;
    for (;;) {
        const int64_t i = __atomic_fetch_add(&check->next, 1, __ATOMIC_RELAXED);
        if (i >= pieces) break;
        const uint8_t* at = check->begin + i * check->piece;
        const uint8_t* ahead = at + kAhead * check->piece;
        if (ahead < check->end)
            read_ahead(ahead, check->end - ahead < check->piece ? check->end - ahead : check->piece);
        const int64_t rest = check->bytes - i * check->piece;
        const int64_t bytes = rest < check->piece ? rest : check->piece;
        populate_read(at, (size_t)bytes);  // 256 faults of a page, or 16 of 16 pages, take longer
        int32_t unchecked = kUnchecked;
        if (sum_of(at, bytes) != check->sums[i])
            __atomic_store_n(&check->state, kWrong, __ATOMIC_RELEASE);
        if (__atomic_add_fetch(&check->done, 1, __ATOMIC_ACQ_REL) == pieces)
            __atomic_compare_exchange_n(&check->state, &unchecked, kRight, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE);
    }
    int32_t state;
    while ((state = __atomic_load_n(&check->state, __ATOMIC_ACQUIRE)) == kUnchecked) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return state == kRight;
}
