#include "weight_check.hpp"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

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
    unsigned char there = 0;
    if (mincore(const_cast<uint8_t*>(at), 1, &there) || there & 1) return;
    for (int64_t i = 0; i < bytes; i += kAskedAtOnce)
        madvise(const_cast<uint8_t*>(at) + i, (size_t)(bytes - i < kAskedAtOnce ? bytes - i : kAskedAtOnce),
                MADV_WILLNEED);
}

// Maps a piece in one call: 256 faults of a page, or 16 of 16 pages, take longer.
void map_pages(const uint8_t* at, int64_t bytes) {
#ifdef MADV_POPULATE_READ
    madvise(const_cast<uint8_t*>(at), (size_t)bytes, MADV_POPULATE_READ);
#else
    madvise(const_cast<uint8_t*>(at), (size_t)bytes, 22);  // older headers; EINVAL before Linux 5.14
#endif
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
        map_pages(at, bytes);
        int32_t unchecked = kUnchecked;
        if (sum_of(at, bytes) != check->sums[i])
            __atomic_store_n(&check->state, kWrong, __ATOMIC_RELEASE);
        if (__atomic_add_fetch(&check->done, 1, __ATOMIC_ACQ_REL) == pieces)
            __atomic_compare_exchange_n(&check->state, &unchecked, kRight, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE);
    }
    int32_t state;
    while ((state = __atomic_load_n(&check->state, __ATOMIC_ACQUIRE)) == kUnchecked) {
        const timespec wait = {0, 50 * 1000};
        nanosleep(&wait, nullptr);
    }
    return state == kRight;
}

int read_over(int file, int64_t offset, void* at, int64_t bytes) {
    const size_t size = (size_t)bytes;
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return errno;
    madvise(memory, size, MADV_HUGEPAGE);
    int error = 0;
    for (int64_t done = file < 0 ? bytes : 0; done < bytes && !error;) {
        const ssize_t got = pread(file, (uint8_t*)memory + done, (size_t)(bytes - done), offset + done);
        if (got < 0 && errno != EINTR) error = errno;
        else if (!got) error = ENODATA;
        else if (got > 0) done += got;
    }
    if (!error && mprotect(memory, size, PROT_READ)) error = errno;
    if (!error && mremap(memory, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED) error = errno;
    if (error) munmap(memory, size);
    return error;
}
