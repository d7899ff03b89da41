// Experts of a model that is larger than memory: those that are used often stay in slots, the others are
// read from the file of packed weights when a token is routed to them.
//
// The slots are private memory of a size that is known before a weight is read, so the process never holds
// more than was planned; the system's page cache is passed by (O_DIRECT where the file system has it). A
// few reader threads read whole matrices, compare their sums, and set the addresses of a view. Products
// hold a matrix while they multiply with it (`acquire`), and wait only for their own.
//
// What leaves a slot is what will be needed last: the expected number of steps until the next use, 1 / p - 1
// with p the share of recent tokens that chose the expert, plus the way around the layers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "abi.hpp"

class ExpertCache {
public:
    // `file` is open for reading and stays so; `path`: its name, which is removed if a sum is wrong.
    // `direct`: reads of the file must begin and end at kBlock.
    ExpertCache(int file, const char* path, bool direct, int readers);
    ~ExpertCache();
    ExpertCache(const ExpertCache&) = delete;
    ExpertCache& operator=(const ExpertCache&) = delete;

    // The matrices of the experts of a layer. `stored`: with addresses and sums as in the mapped file,
    // whose bytes lie in it from offsets[i] on; `views`: copies, whose addresses the cache sets. `kind`:
    // which slots they take. Returns the number of the group.
    int add(int layer, int kind, const Weight* const* stored, Weight* const* views,
            const int64_t* offsets, int64_t count);
    // Slots of `bytes` each for `kind`; all kinds before the first use. False: no memory.
    bool reserve(int kind, int64_t slots, int64_t bytes);

    // Before the products of a group: the experts of `active` that are in memory come first, the others
    // are asked for, and those of the layer's other group too.
    void fetch(const FetchArgs& args);
    // Experts that a group will probably need soon: `chosen`.
    void expect(const FetchArgs& args);
    // The matrix of an expert, which stays until `release`; waits for it. Null: see `status`.
    const Weight* acquire(int group, int32_t expert);
    // `strips`: how many of the product's strips are done with it.
    void release(int group, int32_t expert, int64_t strips);

    // Starts with the uses of earlier runs, as shares of tokens. Of all layers before `preload`.
    void begin_with(int layer, const double* shares, int64_t count);
    // Reads the experts used most into free slots while readers are idle.
    void preload();
    // How often each expert of a layer was chosen since the cache was made.
    void read_uses(int layer, int64_t* out, int64_t count);
    void read_ranks(ExpertRanks* out);

    // kDamaged or kUnreadable once a matrix could not be read.
    Status status() const { return (Status)status_.load(std::memory_order_acquire); }
    void read_counts(ExpertCounts* out);
    // Ends the readers; nothing may use the cache afterwards. Idempotent.
    void stop();

private:
    enum State { kAbsent, kQueued, kReading, kThere };
    enum Reason { kNot, kByRoute, kByGuess };  // kByRoute: by the layer's other group
    struct Unit {
        const Weight* stored;
        Weight* view;
        int64_t offset;
        int64_t left;  // strips of the current product
        int group, kind;
        int32_t expert;
        State state;
        int slot, pins, waiters;
        Reason expected;  // soon
    };
    struct Group {
        int layer, other;  // the layer's other group, or -1
        std::vector<Unit> units;
    };
    struct Layer {
        int first = -1;      // its group that is fetched first
        double weight = 1.0; // of a use now
        std::vector<double> uses;
        std::vector<int64_t> chosen;  // rows
    };
    struct Kind {
        uint8_t* memory = nullptr;
        int64_t bytes = 0, slots = 0, expected = 0;
        bool full = false;  // no slot is free
        std::vector<Unit*> owners;  // null: free
    };
    typedef std::unique_lock<std::mutex> Lock;

    void start();
    void after_fork();
    void run();
    bool read_next(Lock& lock);
    Unit* next(std::deque<Unit*>* queue, int* slot);
    int place_for(const Unit& unit);
    double wait_of(const Unit& unit) const;
    Status read(const Unit& unit, uint8_t* to) const;
    void point(const Unit& unit, uint8_t* data) const;
    void ask(Unit* unit, std::deque<Unit*>* queue);
    Unit* next_ahead(int* slot);
    void wake();
    void forget_guesses(Group* group);
    void set_expected(Unit* unit, Reason expected);
    void count_uses(Layer* layer, const FetchArgs& args);
    static double share_of(const Layer& layer, size_t expert);
    void rank_all();
    void count_ranks(const Layer& layer, const FetchArgs& args);

    int file_;
    std::string path_;
    bool direct_;
    int wanted_readers_;
    int64_t owner_;
    std::deque<Group> groups_;  // addresses stay
    std::vector<Layer> layers_;
    std::vector<Kind> kinds_;
    int layer_ = 0;  // of the last fetch
    std::deque<Unit*> urgent_, needed_, guessed_;
    std::deque<Unit*> ahead_;  // of `preload`, used most first
    std::mutex mutex_;
    std::condition_variable work_, done_;
    std::vector<std::thread> readers_;
    int guessing_ = 0;      // readers
    double right_ = 0.75;   // share of guesses
    bool stop_ = false;
    bool asked_ = false;    // since readers were woken
    bool starved_ = false;  // readers wait for a slot
    std::atomic<int> status_{kOk};
    ExpertCounts counts_ = {};
    ExpertRanks ranks_ = {};
    std::vector<double> ranked_;  // shares of all experts, largest first
    bool ranks_token_ = false;    // the uses of the present token are ranked
    bool knows_uses_ = false;     // those of earlier runs
};
