#include "rank_group.hpp"

#include <stdio.h>
#include <string.h>

#include <chrono>
#include <new>
#include <thread>

#include "spin.hpp"

namespace {

// How long a sleeping rank waits before it looks whether the others live.
constexpr int64_t kTickNs = 100 * 1000 * 1000;
constexpr int kNameBytes = 4096;

bool name_of(char* name, const char* folder, int rank, const char* suffix) {
    const int length = snprintf(name, kNameBytes, "%s/rank-%d%s", folder, rank, suffix);
    return length > 0 && length < kNameBytes;
}

}  // namespace

static_assert(std::atomic<uint32_t>::is_always_lock_free, "a count is shared by processes");

void RankGroup::unmap(int rank) {
    Peer& peer = peers_[rank];
    if (peer.memory) unmap_shared(peer.memory, peer.mapped);
    peer.memory = nullptr;
}

bool RankGroup::map(int rank, int64_t bytes) {
    Peer& peer = peers_[rank];
    unmap(rank);
    peer.memory = static_cast<uint8_t*>(map_shared(peer.file, bytes));
    peer.mapped = bytes;
    return peer.memory != nullptr;
}

Status RankGroup::open_own(const char* folder) {
    char hidden[kNameBytes], name[kNameBytes];
    if (!name_of(hidden, folder, rank_, ".new") || !name_of(name, folder, rank_, "")) return kRankLost;
    const FileHandle file = peers_[rank_].file = create_locked(hidden);
    if (file == kNoFile) return kRankLost;
    if (!extend_file(file, kHeaderBytes) || !map(rank_, kHeaderBytes)) return kOutOfMemory;
    new (&header(rank_)) Header();
    return rename_file(hidden, name) ? kOk : kRankLost;  // the others see it complete, or not at all
}

Status RankGroup::open_peer(const char* folder, int rank, double seconds) {
    char name[kNameBytes];
    if (!name_of(name, folder, rank, "")) return kRankLost;
    for (double waited = 0;; waited += 0.001) {
        peers_[rank].file = open_shared(name);
        if (peers_[rank].file != kNoFile) return map(rank, kHeaderBytes) ? kOk : kOutOfMemory;
        if (waited >= seconds || broken()) return kRankLost;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

// With fewer CPUs than processes, a rank that spins takes the time of the one it waits for.
void RankGroup::choose_spinning() {
    if (const int cpus = usable_cpus()) spins_ = cpus >= processes_;
}

Status RankGroup::join(const char* folder, double seconds) {
    choose_spinning();
    if (size_ > kMaxRanks) return kRankLost;
    Status status = open_own(folder);
    for (int rank = 0; rank < size_ && status == kOk; ++rank)
        if (rank != rank_) status = open_peer(folder, rank, seconds);
    if (status == kOk && !wait(next())) status = kRankLost;
    if (status != kOk) give_up();
    return status;
}

void RankGroup::give_up() {
    if (process_id() != owner_) return;
    broken_.store(true);
    if (!peers_[rank_].memory) return;
    Header& own = header(rank_);
    own.lost.store(1);
    wake_all(&own.count);
}

RankGroup::~RankGroup() {
    give_up();
    for (int rank = 0; rank < size_ && rank < kMaxRanks; ++rank) {
        Peer& peer = peers_[rank];
        unmap(rank);
        if (peer.file != kNoFile) close_shared(peer.file);
    }
}

bool RankGroup::alive(int rank) const { return is_locked(peers_[rank].file); }

bool RankGroup::arrived(int rank, uint32_t number) const {
    return (int32_t)(header(rank).count.load(std::memory_order_acquire) - number) >= 0;
}

bool RankGroup::await(int rank, uint32_t number) {
    Header& other = header(rank);
    if (arrived(rank, number)) return true;
    if (spins_) spin_until([&] { return arrived(rank, number) || broken(); });
    // Ticks instead of a clock: a host that was suspended does not give up its ranks when it wakes up.
    for (double waited = 0; !arrived(rank, number); waited += 1e-9 * kTickNs) {
        if (broken() || other.lost.load() || waited >= patience_s_) return false;
        // The lock of a rank that has just arrived may be gone already.
        if (waited > 0 && !alive(rank)) return arrived(rank, number);
        const auto begin = std::chrono::steady_clock::now();
        do {
            other.sleepers.fetch_add(1);
            const uint32_t seen = other.count.load();
            if ((int32_t)(seen - number) < 0 && !other.lost.load()) sleep_on(&other.count, seen, kTickNs);
            other.sleepers.fetch_sub(1);
        } while (!arrived(rank, number) && !broken() && !other.lost.load() &&
                 std::chrono::steady_clock::now() - begin < std::chrono::nanoseconds(kTickNs / 2));
    }
    return true;
}

void RankGroup::publish(uint32_t number) {
    Header& own = header(rank_);
    if (own.count.load(std::memory_order_relaxed) == number) return;
    own.count.store(number);
    if (own.sleepers.load()) wake_all(&own.count);
}

bool RankGroup::wait(uint32_t number) {
    if (broken()) return false;
    publish(number);
    for (int rank = 0; rank < size_; ++rank) {
        if (rank == rank_ || await(rank, number)) continue;
        give_up();
        return false;
    }
    return true;
}

bool RankGroup::grow(int64_t bytes) {
    if (!extend_file(peers_[rank_].file, file_bytes(rank_, bytes))) return false;
    return wait(next());  // all files have the new size
}

Status RankGroup::reserve(int64_t bytes) {
    if (bytes <= capacity_) return broken() ? kRankLost : kOk;
    bytes = (bytes + kHeaderBytes - 1) / kHeaderBytes * kHeaderBytes;
    // Nobody reads an area any more once all have come here.
    if (!wait(next())) return kRankLost;
    if (!grow(bytes)) {
        const bool lost = broken();
        give_up();
        return lost ? kRankLost : kOutOfMemory;
    }
    for (int rank = 0; rank < size_; ++rank) {
        if (map(rank, file_bytes(rank, bytes))) continue;
        broken_.store(true);
        return kOutOfMemory;
    }
    capacity_ = bytes;
    return kOk;
}

Status RankGroup::transfer(void* data, int64_t bytes) {
    const Status status = reserve(bytes);
    if (status != kOk) return status;
    const uint32_t number = next();
    const bool sends = rank_ == 0;
    const auto begin = std::chrono::steady_clock::now();
    const bool ready = await(1 - rank_, sends ? number - (uint32_t)areas_ : number);
    const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - begin;
    waited_ns_.fetch_add(waited.count(), std::memory_order_relaxed);
    if (!ready) {
        give_up();
        return kRankLost;
    }
    if (sends) memcpy(area(0, number), data, (size_t)bytes);
    else memcpy(data, area(0, number), (size_t)bytes);
    publish(number);
    return kOk;
}

Status RankGroup::gather(const void* mine, int64_t bytes, void* out) {
    const Status status = reserve(bytes);
    if (status != kOk) return status;
    const uint32_t number = next();
    memcpy(area(rank_, number), mine, (size_t)bytes);
    if (!wait(number)) return kRankLost;
    for (int rank = 0; rank < size_; ++rank)
        memcpy(static_cast<uint8_t*>(out) + rank * bytes, area(rank, number), (size_t)bytes);
    return kOk;
}
