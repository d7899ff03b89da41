// A list of operators that runs as phases: a whole decode step, or a single operator, in one call.
//
// Row-wise operators that follow one another become one phase over the rows: every thread takes some
// tokens through all of them, and no thread waits for another in between. This is correct because row t
// of an operator needs only row t of its arguments, and because memory that two operators of a phase
// share has rows of the same width (kernels/graph.py). A matrix product is one phase over strips of 32
// output rows, and over groups of rows if it has many (linear_tiles.hpp); quantizing its activations is
// row-wise and joins the phase before. Attention is one phase over its work items (attention.hpp), and so is
// an operator with recurrent states (state_plan.hpp), a product of experts one over the strips of the experts
// that have rows (moe.hpp), one of heads over those of all heads (heads.hpp). The update of a product
// by adapters is two phases (low_rank.hpp), and so is an exchange with other ranks (rank_group.hpp), also
// one that combines the rows of experts (moe.hpp): its second phase is row-wise, and others join it. One
// thread alone sends or receives the rows of a transfer.
#pragma once

#include <vector>

#include "levels.hpp"
#include "low_rank_plan.hpp"
#include "operator_times.hpp"
#include "pool.hpp"
#include "rank_group.hpp"

struct Op {
    OpKind kind;
    Count count;      // what it runs over
    int64_t per;      // rows per counted thing
    int64_t items, work;  // of attention and of states; set for each run
    union {
        EmbeddingArgs embedding;
        LinearArgs linear;
        NormArgs norm;
        ActivationArgs activation;
        MapArgs map;
        AnglesArgs angles;
        GateArgs gate;
        HeadsArgs heads;
        SelectArgs select;
        PlaceRowsArgs place_rows;
        TakeArgs take;
        RopeArgs rope;
        AttentionArgs attention;
        PlacesArgs places;
        SampleArgs sample;
        RouteArgs route;
        GroupArgs group;
        ExpertsArgs experts;
        BiasArgs bias;
        CombineArgs combine;
        RecodeArgs recode;
        LowRankArgs low_rank;
        ExchangeArgs exchange;
        TransferArgs transfer;
        CombineRanksArgs combine_ranks;
        GatherRanksArgs gather_ranks;
        ConvArgs conv;
        DeltaArgs delta;
        SpaceArgs space;
        RatesArgs rates;
        GatedNormArgs gated_norm;
        FetchArgs fetch;
    };
};

// Bytes of the arguments of an operator; 0 for a kind that does not exist.
size_t args_size(int kind);

class Program {
public:
    // `args` points to the structure of `kind`. False for a kind that does not exist.
    bool add(int kind, const void* args, Count count, int64_t per);
    void clear();
    size_t operators() const { return ops_.size(); }

    OperatorTimes times;  // of the runs so far

private:
    friend class Runtime;
    // What a phase runs: row-wise parts one after another, or tiles of one operator. kMore: the second
    // kind of work of an operator that has two.
    enum Work { kRows, kMoreRows, kTiles, kMoreTiles };
    struct Part {
        int op;
        Work work;
    };
    struct Stage {
        int first, last;  // parts
        Count count;
        Work work;   // kRows for both kinds of rows
        int then;        // the next stage of tiles if it reads integer weights, else -1
        bool hinted;  // this stage is another's `then`
        bool alone;      // no other part may join: its rows depend on other rows
        int down;        // the update by adapters whose first product joins this one; else -1
    };
    bool joins_product(int op) const;
    void add_part(int op, Work work, bool alone = false);
    bool same_activations(const Op& op) const;

    std::vector<Op> ops_;
    std::vector<Part> parts_;
    std::vector<Stage> stages_;
    int last_tiles_ = -1;  // stage
    const int32_t* gathered_ = nullptr;  // the number of kGathered in each run
};

inline size_t aligned(size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

// Memory that grows and is reused: recorded steps allocate nothing.
class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { release(); }
    void release();
    bool reserve(size_t bytes, bool zeroed = false);
    uint8_t* data() { return data_; }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

// Rows of a weight to pack, from a row block on.
struct PackJob {
    const Weight* w;
    const void* source;
    int64_t row_bytes, first, blocks;
};

// Runs programs: threads, kernels and scratch memory. One caller at a time.
class Runtime {
public:
    Runtime(int threads, int level) : pool(threads), kernels(kernel_table(level)), level(level) {}
    ~Runtime() { settle(); }

    Status run(Program& program, const int64_t* counts);
    // Stops the threads and frees the memory.
    void close();
    // Runs body(begin, end, thread) over 0..total.
    template <typename Body>
    void parallel(int64_t total, int64_t work, const Body& body) {
        const Phase phase = {total, tasks_for(total, work)};
        pool.run(
            [](void* context, int, const ItemRange& share, int thread) {
                (*static_cast<const Body*>(context))(share.begin, share.end, thread);
            },
            const_cast<void*>(static_cast<const void*>(&body)), &phase, 1);
    }
    // Begins to pack, `work` codes; false: out of memory. `settle` must come before any other use of the
    // threads, and waits for it.
    bool begin_pack(const PackJob& job, int64_t work);
    void settle();
    // Private memory of `bytes` for every thread.
    bool reserve_private(size_t bytes);
    uint8_t* private_scratch(int thread) { return private_.data() + stride_ * (size_t)thread; }

    Pool pool;
    const KernelTable* kernels;
    int level;
    std::mutex mutex;
    std::atomic<bool> closed{false};  // nothing may run any more
    Program single;  // reused for calls of one operator

private:
    struct Frame;  // the run, for the threads
    int64_t tasks_for(int64_t total, int64_t work) const;
    int64_t product_tasks(const LinearArgs& each, int64_t items) const;
    struct Needs;
    Status prepare(Program& program, const int64_t* counts);
    Status bind(Op* op, int64_t n, Needs* needs);
    void note_file_part(LinearArgs* args);
    Status plan_items(Op* op, int64_t requests, Needs* needs);
    Status plan_states(Op* op, StateRows* rows, int64_t requests, Needs* needs);
    Phase tile_phase(const Op& op, Program::Work kind, int64_t count) const;
    void rows(const Op& op, Program::Work kind, int64_t begin, int64_t end);
    void tiles(const Op& op, Program::Work kind, const ItemRange& share, int thread);
    ItemRange down_units(const Program& program, int stage, const ItemRange& strips) const;
    void hint_next(const Program& program, int stage, int thread, ItemRange* share) const;
    bool usable(const Weight& w);
    void transfer(const TransferArgs& args);
    static void run_task(void* context, int phase, const ItemRange& share, int thread);

    Scratch activations_, attention_, private_, low_;
    SlotPlans slots_;
    FilePart* used_ = nullptr;  // last
    RankGroup* group_ = nullptr;  // of the exchanges of the run; null: it has none
    Status transferred_ = kOk;    // by the run so far
    std::atomic<int> unusable_{kOk};  // why a weight that the run used is not
    size_t stride_ = 0;
    std::vector<Phase> phases_;
    PackJob packing_ = {};  // without a weight: nothing is being packed
    Phase packing_phase_ = {};
};

// The right to use a runtime.
class Turn {
public:
    explicit Turn(Runtime* runtime) : lock_(runtime->mutex) { runtime->settle(); }

private:
    std::lock_guard<std::mutex> lock_;
};
