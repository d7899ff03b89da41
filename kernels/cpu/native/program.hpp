// A list of operators that runs as phases: a whole decode step, or a single operator, in one call.
//
// Row-wise operators that follow one another become one phase over the rows: every thread takes some
// tokens through all of them, and no thread waits for another in between. This is correct because row t
// of an operator needs only row t of its arguments, and because memory that two operators of a phase
// share has rows of the same width (kernels/graph.py). A matrix product is one phase over strips of 32
// output rows, and over groups of rows if it has many (linear_tiles.hpp); quantizing its activations is
// row-wise and joins the phase before. Products that follow one another and multiply the same quantized rows are one
// phase over the strips of all. Attention is one phase over its work items (attention.hpp), and so is
// an operator with recurrent states (state_plan.hpp), a product of experts one over the strips of the experts
// that have rows (moe.hpp), one of heads over those of all heads (heads.hpp). The update of a product
// by adapters is two phases (low_rank.hpp), and so is an exchange with other ranks (rank_group.hpp), also
// one that combines the rows of experts (moe.hpp): its second phase is row-wise, and others join it. One
// thread alone sends or receives the rows of a transfer.
#pragma once

#include <vector>

#include "levels.hpp"
#include "linear_scratch.hpp"
#include "operator_times.hpp"

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

// Whether activations are quantized before the product.
inline bool quantizes(const LinearArgs& args) { return in_integers(args) || in_quantized_floats(args) || args.rounded; }

inline bool quantizes(const Op& op) { return op.kind == kOpLinear && quantizes(op.linear); }

inline bool integer(const Op& op) { return op.kind == kOpLinear && in_integers(op.linear); }

inline bool with_states(OpKind kind) { return kind == kOpConv || kind == kOpDelta || kind == kOpSpace; }

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
    // What a phase runs: row-wise parts one after another, tiles of one operator, or those of several products.
    // kMore: the second kind of work of an operator that has two.
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
    bool joins_products(int op) const;
    void add_part(int op, Work work, bool alone = false);
    bool same_activations(const Op& op) const;

    std::vector<Op> ops_;
    std::vector<Part> parts_;
    std::vector<Stage> stages_;
    int last_tiles_ = -1;  // stage
    const int32_t* gathered_ = nullptr;  // the number of kGathered in each run
};
