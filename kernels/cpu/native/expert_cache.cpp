#include "expert_cache.hpp"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "linear_scratch.hpp"
#include "pack.hpp"
#include "system.hpp"
#include "weight_check.hpp"

namespace {

constexpr int64_t kBlock = 4096;  // of a disk, at most
// After this many tokens a use counts half: a paragraph or two.
constexpr double kHalfLife = 128.0;
constexpr double kGrowth = 1.0 + 0.6931471805599453 / kHalfLife;  // about 2^(1 / kHalfLife)
// A prompt says more of what comes than a token does, but not for longer than this many.
constexpr int64_t kMostTokens = 32;
constexpr double kRescale = 1e100;
constexpr double kRarest = 1e-4;  // share of tokens
// Guesses may take this part of the slots.
constexpr int64_t kGuessedShare = 4;
// Readers that may read guesses at a time: what is needed then waits for half a disk at most.
constexpr int kGuessing = 2;
// Uses are ranked once kUnranked tokens have been counted, for one token in kRankedOf.
constexpr int64_t kUnranked = 32, kRankedOf = 4;
// How much the last guess says about the next.
constexpr double kLearned = 0.05;

int64_t now_ns() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

// Lets other threads give slots back.
void pause(std::unique_lock<std::mutex>* lock) {
    lock->unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock->lock();
}

}  // namespace

ExpertCache::ExpertCache(int file, const char* path, bool direct, int readers)
    : file_(file), path_(path), direct_(direct), wanted_readers_(readers), owner_(process_id()) {
    start();
}

ExpertCache::~ExpertCache() {
    stop();
    for (Kind& kind : kinds_)
        if (kind.memory) unmap_memory(kind.memory, (size_t)(kind.bytes * kind.slots));
}

void ExpertCache::start() {
    try {
        for (int i = 0; i < wanted_readers_; ++i) readers_.emplace_back(&ExpertCache::run, this);
    } catch (...) {  // no more threads: those that started, or the threads of products read themselves
    }
}

void ExpertCache::stop() {
    if (process_id() != owner_) {  // a forked child has none of the threads
        new std::vector<std::thread>(std::move(readers_));
        readers_.clear();
        return;
    }
    {
        Lock lock(mutex_);
        stop_ = true;
    }
    work_.notify_all();
    for (std::thread& one : readers_) one.join();
    readers_.clear();
}

// A forked child has a copy of the slots, but no readers, and a lock that a reader may have held.
void ExpertCache::after_fork() {
    if (process_id() == owner_) return;
    owner_ = process_id();
    new (&mutex_) std::mutex;
    new (&work_) std::condition_variable;
    new (&done_) std::condition_variable;
    new std::vector<std::thread>(std::move(readers_));  // never joined
    readers_.clear();
    guessing_ = 0;
    urgent_.clear();
    needed_.clear();
    guessed_.clear();
    for (Group& group : groups_) {
        for (Unit& unit : group.units) {
            if (unit.state == kReading) kinds_[(size_t)unit.kind].owners[(size_t)unit.slot] = nullptr;
            if (unit.state == kReading || unit.state == kQueued) unit.state = kAbsent;
            unit.pins = unit.waiters = 0;
            unit.left = 0;
            set_expected(&unit, kNot);
        }
    }
    start();
}

int ExpertCache::add(int layer, int kind, const Weight* const* stored, Weight* const* views,
                     const int64_t* offsets, int64_t count) {
    const int number = (int)groups_.size();
    if ((int)layers_.size() <= layer) layers_.resize((size_t)layer + 1);
    if ((int)kinds_.size() <= kind) kinds_.resize((size_t)kind + 1);
    groups_.emplace_back();
    Group& group = groups_.back();
    group.layer = layer;
    group.other = -1;
    Layer& own = layers_[(size_t)layer];
    if (own.first < 0) {
        own.first = number;
        own.uses.assign((size_t)count, 0.0);
        own.chosen.assign((size_t)count, 0);
    } else {
        group.other = own.first;
        groups_[(size_t)own.first].other = number;
    }
    for (int64_t i = 0; i < count; ++i)
        group.units.push_back({stored[i], views[i], offsets[i], 0, number, kind, (int32_t)i, kAbsent,
                               -1, 0, 0, kNot});
    return number;
}

bool ExpertCache::reserve(int number, int64_t slots, int64_t bytes) {
    Kind& kind = kinds_[(size_t)number];
    void* found = map_memory((size_t)(slots * bytes));
    if (!found) return false;
    kind.memory = (uint8_t*)found;
    kind.bytes = bytes;
    kind.slots = slots;
    kind.owners.assign((size_t)slots, nullptr);
    return true;
}

// ---- what is needed ------------------------------------------------------------------------------

void ExpertCache::set_expected(Unit* unit, Reason expected) {
    kinds_[(size_t)unit->kind].expected += (expected != kNot) - (unit->expected != kNot);
    unit->expected = expected;
}

// What was expected of a group and is not being read is not needed any more, unless it is asked for.
void ExpertCache::forget_guesses(Group* group) {
    int right = 0, guessed = 0;
    for (Unit& unit : group->units) {
        if (unit.expected == kByGuess) {
            ++guessed;
            right += unit.left > 0;
        }
        if (!unit.left && !unit.waiters && unit.state == kQueued) unit.state = kAbsent;
        set_expected(&unit, kNot);
    }
    if (guessed) right_ += kLearned * ((double)right / guessed - right_);
}

void ExpertCache::ask(Unit* unit, std::deque<Unit*>* queue) {
    if (unit->state == kAbsent) unit->state = kQueued;
    if (unit->state != kQueued) return;
    queue->push_back(unit);
    asked_ = true;
}

// Wakes readers, if there is something new for them.
void ExpertCache::wake() {
    if (!asked_) return;
    asked_ = false;
    work_.notify_all();
}

void ExpertCache::count_uses(Layer* layer, const FetchArgs& args) {
    const int32_t used = args.active[args.count];
    const int64_t tokens = args.rows / args.k;
    const int64_t steps = tokens < kMostTokens ? tokens : kMostTokens;
    for (int64_t i = 0; i < steps; ++i) layer->weight *= kGrowth;  // pow() would need glibc 2.29
    for (int32_t i = 0; i < used; ++i) {
        const int32_t expert = args.active[i];
        const double rows = args.starts[expert + 1] - args.starts[expert];
        layer->uses[(size_t)expert] += layer->weight * rows * (double)steps / (double)tokens;
        layer->chosen[(size_t)expert] += (int64_t)rows;
    }
    if (layer->weight < kRescale) return;
    for (double& uses : layer->uses) uses /= layer->weight;
    layer->weight = 1.0;
}

// The share of recent tokens that chose an expert.
double ExpertCache::share_of(const Layer& layer, size_t expert) {
    return layer.uses[expert] / layer.weight * (1.0 - 1.0 / kGrowth);
}

void ExpertCache::rank_all() {
    ranked_.clear();
    for (const Layer& layer : layers_)
        for (size_t e = 0; e < layer.uses.size(); ++e) ranked_.push_back(share_of(layer, e));
    std::sort(ranked_.begin(), ranked_.end(), std::greater<double>());
}

// Before the uses of a layer are counted: the share of all experts that a cache must hold to have them. Only
// steps of one token show what one request needs.
void ExpertCache::count_ranks(const Layer& layer, const FetchArgs& args) {
    if (&layer == &layers_.front()) {
        ranks_token_ = args.rows == args.k && (knows_uses_ || ranks_.tokens >= kUnranked) &&
                       ranks_.tokens % kRankedOf == 0;
        ranks_.tokens += args.rows / args.k;
        if (!ranks_token_) return;
        ++ranks_.ranked;
        rank_all();
    }
    const int32_t used = args.active[args.count];
    for (int32_t i = 0; ranks_token_ && i < used; ++i) {
        const double share = share_of(layer, (size_t)args.active[i]);
        const auto like = std::equal_range(ranked_.begin(), ranked_.end(), share, std::greater<double>());
        // In the middle of the experts with the same share.
        const int64_t before = ((like.first - ranked_.begin()) + (like.second - ranked_.begin()) - 1) / 2;
        const int64_t rank = before * kExpertRanks / (int64_t)ranked_.size();
        ++ranks_.ranks[share > 0.0 ? rank : kExpertRanks];
    }
}

void ExpertCache::begin_with(int number, const double* shares, int64_t count) {
    Lock lock(mutex_);
    Layer& layer = layers_[(size_t)number];
    for (int64_t e = 0; e < count; ++e)
        layer.uses[(size_t)e] = shares[e] * layer.weight / (1.0 - 1.0 / kGrowth);
    knows_uses_ = true;
}

void ExpertCache::preload() {
    Lock lock(mutex_);
    for (Group& group : groups_)
        for (Unit& unit : group.units) ahead_.push_back(&unit);
    std::stable_sort(ahead_.begin(), ahead_.end(), [&](const Unit* a, const Unit* b) {
        const Layer &of_a = layers_[(size_t)groups_[(size_t)a->group].layer],
                    &of_b = layers_[(size_t)groups_[(size_t)b->group].layer];
        return share_of(of_a, (size_t)a->expert) > share_of(of_b, (size_t)b->expert);
    });
    work_.notify_all();
}

void ExpertCache::read_uses(int number, int64_t* out, int64_t count) {
    Lock lock(mutex_);
    const std::vector<int64_t>& chosen = layers_[(size_t)number].chosen;
    for (int64_t e = 0; e < count; ++e) out[e] = chosen[(size_t)e];
}

void ExpertCache::read_ranks(ExpertRanks* out) {
    Lock lock(mutex_);
    *out = ranks_;
}

void ExpertCache::fetch(const FetchArgs& args) {
    after_fork();
    const int32_t used = args.active[args.count];
    Group& group = groups_[(size_t)args.group];
    Layer& layer = layers_[(size_t)group.layer];
    const bool first = layer.first == args.group;
    {
        Lock lock(mutex_);
        if (first) {
            count_ranks(layer, args);
            count_uses(&layer, args);
        }
        layer_ = group.layer;
        for (int32_t i = 0; i < used; ++i) {
            Unit& unit = group.units[(size_t)args.active[i]];
            unit.left = strips_of(*unit.stored);
            if (unit.expected == kByGuess) ++counts_.guessed;
            else if (unit.state == kThere && unit.expected == kNot) ++counts_.hits;
            else ++counts_.missed;
        }
        forget_guesses(&group);
        std::stable_sort(args.active, args.active + used, [&](int32_t a, int32_t b) {
            return group.units[(size_t)a].state > group.units[(size_t)b].state;
        });
        for (int32_t i = 0; i < used; ++i) ask(&group.units[(size_t)args.active[i]], &needed_);
        Group* other = first && group.other >= 0 ? &groups_[(size_t)group.other] : nullptr;
        for (int32_t i = 0; other && i < used; ++i) {
            Unit& unit = other->units[(size_t)args.active[i]];
            if (unit.state == kThere) continue;
            if (unit.expected == kNot) set_expected(&unit, kByRoute);
            ask(&unit, &needed_);
        }
        wake();
    }
}

void ExpertCache::expect(const FetchArgs& args) {
    after_fork();
    Group* group = &groups_[(size_t)args.group];
    // Best first: of each token only as many as are usually right.
    const int64_t most = (int64_t)ceil(args.k * right_);
    std::vector<int32_t> rows(group->units.size(), 0);
    for (int64_t i = 0; i < args.rows; ++i) rows[(size_t)args.chosen[i]] += i % args.k < most;
    std::vector<int32_t> found;
    for (size_t e = 0; e < rows.size(); ++e)
        if (rows[e]) found.push_back((int32_t)e);
    std::stable_sort(found.begin(), found.end(), [&](int32_t a, int32_t b) {
        return rows[(size_t)a] > rows[(size_t)b];
    });
    {
        Lock lock(mutex_);
        for (const int32_t expert : found) {
            for (int number = args.group, i = 0; number >= 0 && i < 2; ++i) {
                Unit& unit = groups_[(size_t)number].units[(size_t)expert];
                const Kind& kind = kinds_[(size_t)unit.kind];
                if (unit.state == kAbsent && kind.expected < kind.slots / kGuessedShare) {
                    ++counts_.asked_ahead;
                    set_expected(&unit, kByGuess);
                    ask(&unit, &guessed_);
                }
                number = groups_[(size_t)number].other;
            }
        }
        wake();
    }
}

const Weight* ExpertCache::acquire(int number, int32_t expert) {
    Lock lock(mutex_);
    Unit& unit = groups_[(size_t)number].units[(size_t)expert];
    if (unit.state != kThere) {
        const int64_t begin = now_ns();
        ++unit.waiters;
        if (unit.state != kReading) {
            unit.state = kQueued;
            urgent_.push_front(&unit);
            work_.notify_all();
        }
        while (unit.state != kThere && status() == kOk && !stop_) {
            if (!readers_.empty()) done_.wait(lock);
            else if (!read_next(lock)) pause(&lock);
        }
        --unit.waiters;
        counts_.waited_ns += now_ns() - begin;
    }
    if (unit.state != kThere || status() != kOk) return nullptr;
    ++unit.pins;
    return unit.view;
}

void ExpertCache::release(int number, int32_t expert, int64_t strips) {
    bool wanted = false;
    {
        Lock lock(mutex_);
        Unit& unit = groups_[(size_t)number].units[(size_t)expert];
        unit.left = unit.left > strips ? unit.left - strips : 0;
        if (!--unit.pins && starved_) {
            wanted = true;
            starved_ = false;
        }
    }
    if (wanted) work_.notify_all();
}

void ExpertCache::read_counts(ExpertCounts* out) {
    Lock lock(mutex_);
    *out = counts_;
}

// ---- readers -------------------------------------------------------------------------------------

void ExpertCache::run() {
    Lock lock(mutex_);
    while (!stop_) {
        if (!read_next(lock)) work_.wait(lock);
    }
}

// Expected steps until an expert in memory is used again.
double ExpertCache::wait_of(const Unit& unit) const {
    const int number = groups_[(size_t)unit.group].layer;
    const Layer& layer = layers_[(size_t)number];
    const double uses = share_of(layer, (size_t)unit.expert);
    const int count = (int)layers_.size();
    const int ahead = (number - layer_ + count) % count;
    const double way = (double)(ahead ? ahead : count) / count;
    return way + 1.0 / (uses > kRarest ? uses : kRarest) - 1.0;
}

// A slot for a matrix, whose owner leaves; -1: all are in use.
int ExpertCache::place_for(const Unit& unit) {
    Kind& kind = kinds_[(size_t)unit.kind];
    const bool urgent = unit.waiters > 0;
    int best = -1, last = -1;
    double longest = -1.0;
    for (int i = 0; i < (int)kind.slots; ++i) {
        const Unit* owner = kind.owners[(size_t)i];
        if (!owner) return i;
        if (owner->state != kThere || owner->pins || owner->waiters) continue;
        if (owner->left || owner->expected) {
            last = i;
            continue;
        }
        const double wait = wait_of(*owner);
        if (wait <= longest) continue;
        longest = wait;
        best = i;
    }
    // A thread that waits comes first, whoever else will need what leaves.
    return best >= 0 || !urgent ? best : last;
}

// The first of a queue that has a slot, which is then its own.
ExpertCache::Unit* ExpertCache::next(std::deque<Unit*>* queue, int* slot) {
    std::vector<bool> full(kinds_.size(), false);
    for (size_t i = 0; i < queue->size();) {
        Unit* unit = (*queue)[i];
        if (unit->state != kQueued) {
            queue->erase(queue->begin() + (ptrdiff_t)i);
            continue;
        }
        if (!full[(size_t)unit->kind]) {
            *slot = place_for(*unit);
            if (*slot >= 0) {
                queue->erase(queue->begin() + (ptrdiff_t)i);
                return unit;
            }
            full[(size_t)unit->kind] = true;
        }
        ++i;
    }
    return nullptr;
}

// The next matrix of `preload` that is not in memory, and a free slot for it; null: there is none.
ExpertCache::Unit* ExpertCache::next_ahead(int* slot) {
    while (!ahead_.empty()) {
        Unit* unit = ahead_.front();
        ahead_.pop_front();
        Kind& kind = kinds_[(size_t)unit->kind];
        if (unit->state != kAbsent || kind.full) continue;
        *slot = place_for(*unit);
        if (*slot >= 0 && !kind.owners[(size_t)*slot]) return unit;
        kind.full = true;
    }
    return nullptr;
}

// Reads one matrix that was asked for; false: there is none, or no slot for it.
bool ExpertCache::read_next(Lock& lock) {
    int slot = -1;
    Unit* unit = nullptr;
    bool guess = false;
    for (std::deque<Unit*>* queue : {&urgent_, &needed_, &guessed_}) {
        if (unit || (queue == &guessed_ && guessing_ >= kGuessing)) continue;
        unit = next(queue, &slot);
        guess = unit && queue == &guessed_;
    }
    if (!unit && guessing_ < kGuessing) {
        unit = next_ahead(&slot);
        guess = unit != nullptr;
    }
    if (!unit) {
        starved_ = !urgent_.empty() || !needed_.empty() || !guessed_.empty();
        return false;
    }
    Kind& kind = kinds_[(size_t)unit->kind];
    if (Unit* before = kind.owners[(size_t)slot]) {
        before->state = kAbsent;
        before->slot = -1;
        set_expected(before, kNot);
    }
    kind.owners[(size_t)slot] = unit;
    unit->state = kReading;
    unit->slot = slot;
    uint8_t* const to = kind.memory + kind.bytes * slot;
    guessing_ += guess;
    lock.unlock();
    const int64_t begin = now_ns();
    const Status found = read(*unit, to);
    lock.lock();
    guessing_ -= guess;
    counts_.reading_ns += now_ns() - begin;
    ++counts_.reads;
    counts_.bytes += unit->stored->check->bytes;
    if (found == kOk) {
        point(*unit, to + unit->offset % kBlock);
        unit->state = kThere;
    } else {
        kind.owners[(size_t)slot] = nullptr;
        unit->state = kAbsent;
        status_.store(found, std::memory_order_release);
    }
    done_.notify_all();
    return true;
}

Status ExpertCache::read(const Unit& unit, uint8_t* to) const {
    const WeightCheck& check = *unit.stored->check;
    const int64_t begin = unit.offset / kBlock * kBlock, needed = unit.offset + check.bytes - begin;
    const int64_t bytes = (needed + kBlock - 1) / kBlock * kBlock;
    for (int64_t done = 0; done < needed;) {
        const int64_t got = read_at(file_, to + done, bytes - done, begin + done);
        if (got <= 0) return kUnreadable;
        done += got;
    }
    if (!direct_) forget_cached(file_, begin, bytes);
    const uint8_t* const data = to + unit.offset % kBlock;
    for (int64_t at = 0; at < check.bytes; at += check.piece) {
        const int64_t rest = check.bytes - at;
        if (sum_of(data + at, rest < check.piece ? rest : check.piece) == check.sums[at / check.piece])
            continue;
        remove_if_same(file_, path_.c_str());
        return kDamaged;
    }
    return kOk;
}

// The view's addresses: those of `stored` that lie in the matrix's bytes are there now.
void ExpertCache::point(const Unit& unit, uint8_t* data) const {
    const WeightCheck& check = *unit.stored->check;
    const Weight& from = *unit.stored;
    Weight& to = *unit.view;
    const auto moved = [&](const void* at) -> uint8_t* {
        const uint8_t* const found = (const uint8_t*)at;
        const bool inside = found >= check.begin && found < check.begin + check.bytes;
        return inside ? data + (found - check.begin) : const_cast<uint8_t*>(found);
    };
    to.codes = moved(from.codes);
    to.scale = moved(from.scale);
    to.minus = moved(from.minus);
    to.zeros = moved(from.zeros);
    to.super_scale = moved(from.super_scale);
    to.super_minus = (const uint16_t*)moved(from.super_minus);
    to.table = (const float*)moved(from.table);
    to.scale_table = (const float*)moved(from.scale_table);
    to.scale_offset = (const float*)moved(from.scale_offset);
}
