// Exchanges between the ranks of one machine: every rank writes its part into shared memory and reads
// those of the others.
//
// Each rank owns one file, which all map: a header, and two areas of the same size. In exchange n a rank
// writes into its area n % 2, sets `count` of its header to n, waits until the others' count is n, and
// reads their areas. Two areas suffice: who writes exchange n has seen count n - 1 of every rank, and a
// rank counts n - 1 only after it has read exchange n - 2, the last one in this area.
//
// A rank that waits spins for a while and then sleeps in the kernel. It wakes every 100 ms to see whether
// the ranks it waits for are alive: a rank holds a lock on its file, which the kernel releases when the
// process ends, however it ends. An exchange that fails leaves the group broken: all later ones fail at
// once, on every rank.
//
// A link is a group of two in which rank 0 only sends and rank 1 only receives. The areas are slots in the
// sender's file, which it fills in turn. Here the sender's count says what is written, the receiver's what
// is read: the sender waits only if all slots are unread.
#pragma once

#include <stdint.h>

#include <atomic>

#include "abi.hpp"
#include "system.hpp"

class RankGroup {
public:
    // What a call found: kOk, kOutOfMemory or kRankLost.
    // `processes`: how many compute at the same time, in this group and in others. `slots`: of a link, a
    // power of two; 0: not a link.
    RankGroup(int rank, int size, int processes, int slots, double patience_s)
        : rank_(rank), size_(size), processes_(processes), link_(slots > 0), areas_(slots ? slots : 2),
          patience_s_(patience_s), owner_(process_id()) {}
    ~RankGroup();
    RankGroup(const RankGroup&) = delete;
    RankGroup& operator=(const RankGroup&) = delete;

    // Creates this rank's file in `folder`, and waits for those of the others.
    Status join(const char* folder, double seconds);
    // Makes every exchange fail, here and on the other ranks, also those that wait now. Any thread. No
    // effect in a forked child: the rank is the process that created the group.
    void give_up();

    int rank() const { return rank_; }
    int size() const { return size_; }
    bool broken() const { return broken_.load(std::memory_order_relaxed); }

    // All ranks make these calls in the same order, with the same sizes.

    // Areas of at least `bytes`.
    Status reserve(int64_t bytes);
    // The number of the next exchange.
    uint32_t next() { return ++number_; }
    // Where a rank's part of exchange `number` is.
    uint8_t* area(int rank, uint32_t number) const {
        return peers_[rank].memory + kHeaderBytes + (number & (uint32_t)(areas_ - 1)) * capacity_;
    }
    // This rank's part is written: publishes it and waits for the others. False: a rank is lost. Any
    // number of threads.
    bool wait(uint32_t number);
    // Gathers `bytes` of each rank: `out` has them one after the other.
    Status gather(const void* mine, int64_t bytes, void* out);

    // Of a link: sends `data`, or receives into it. Both ends give the same size.
    Status transfer(void* data, int64_t bytes);
    // How long transfers have waited for the other end so far. Any thread.
    int64_t waited_ns() const { return waited_ns_.load(std::memory_order_relaxed); }

private:
    enum { kMaxRanks = 256, kHeaderBytes = 4096 };
    struct Header {
        std::atomic<uint32_t> count;  // what others sleep on
        std::atomic<uint32_t> lost;   // this rank has given up
        alignas(kCacheLine) std::atomic<uint32_t> sleepers;
    };
    static_assert(sizeof(Header) <= kHeaderBytes, "the areas follow the header");
    struct Peer {
        FileHandle file = kNoFile;
        uint8_t* memory = nullptr;
        int64_t mapped = 0;
    };
    Header& header(int rank) const { return *reinterpret_cast<Header*>(peers_[rank].memory); }
    void choose_spinning();
    Status open_own(const char* folder);
    Status open_peer(const char* folder, int rank, double seconds);
    void unmap(int rank);
    bool map(int rank, int64_t bytes);
    // Whether there are areas in a rank's file, and the file's size with areas of `bytes`.
    bool writes(int rank) const { return !link_ || rank == 0; }
    int64_t file_bytes(int rank, int64_t bytes) const {
        return kHeaderBytes + (writes(rank) ? areas_ * bytes : 0);
    }
    bool grow(int64_t bytes);
    bool arrived(int rank, uint32_t number) const;
    bool await(int rank, uint32_t number);
    void publish(uint32_t number);
    bool alive(int rank) const;

    int rank_, size_, processes_;
    bool link_;
    int areas_;  // in a file
    double patience_s_;
    int64_t owner_;
    uint32_t number_ = 0;
    bool spins_ = true;
    int64_t capacity_ = 0;
    std::atomic<int64_t> waited_ns_{0};
    std::atomic<bool> broken_{false};
    Peer peers_[kMaxRanks];
};
