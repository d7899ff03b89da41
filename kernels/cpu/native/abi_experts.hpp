// Routes of tokens to experts, and the products of experts. Part of abi.hpp, whose rules hold here.
#pragma once

#include "abi_weights.hpp"

// What makes scores of logits: `GATES` of kernels/operators/route_rule.py, which says what each one is.
enum RouteGate {
    kRouteSoftmax = 0,
    kRouteSigmoid = 1,
    kRouteSqrtSoftplus = 2,
    kRouteSparse = 3,
    kRouteKinds = 4,
};
enum { kMaxScored = 1024 };  // experts, unless the rule is a softmax alone

// The k best of `experts` experts of each token, best first, and their weights: `RouteRule` of
// kernels/operators/route_rule.py.
struct RouteArgs {
    const float* logits;  // [T, experts]
    const float* bias;    // [experts], added to the scores for the choice alone; null: none
    const float* factors;  // [experts], of the weights; null: none
    int32_t* chosen;      // [T, k]
    float* weights;       // [T, k]
    int64_t experts;
    int32_t k;
    int32_t gate;  // RouteGate
    int32_t normalized;
    int32_t groups, groups_used, group_best;
    float epsilon, least, scale;
    float reach;  // twice the rule's jitter
};

// The rows of a step in the order of experts: one row for each token and each of its k experts.
//
// With several ranks that have whole experts, `chosen` counts the experts of all of them. The n-th row
// of an expert since the counts in `load` began goes to the (n % copies)-th rank that has a copy. A rank
// places only its own rows; the buffers have room for all, so the last ones stay unused.
struct GroupArgs {
    const int32_t* chosen;  // [rows], token by token
    int32_t* places;        // [rows]: the row of each choice; -1: at another rank
    int32_t* tokens;        // [rows], by expert: the token of the row
    int32_t* owners;        // [rows], by expert: the expert of the row
    int32_t* starts;        // [count + 1]: the first row of each expert
    int32_t* active;        // [count + 1]: the experts that have rows; last, their number
    int64_t count;          // experts that this rank has
    int64_t rows;           // set by the runtime
    const int32_t* first;   // [all experts + 1]: where each one's part of `ranks` begins; null: one rank
    const int32_t* ranks;   // the ranks that have a copy of each expert, one expert after another
    const int32_t* local;   // [all experts]: their numbers on this rank, if it has them
    int32_t* servers;       // [rows]: the rank that computes each choice
    int64_t* load;          // [all experts]: the rows so far
    int32_t k, rank;
};

// One matrix per expert, all of one shape and format; `each` has the rows of all of them.
struct ExpertsArgs {
    LinearArgs each;  // w: the first expert's
    const Weight* const* experts;
    const int32_t* starts;
    const int32_t* active;
    int64_t count;
    int32_t k;
    int32_t group;             // of `cache`
    class ExpertCache* cache;  // experts that may be in a file (expert_cache.hpp); null: all are in memory
};

// Before the products of a group of experts that may be in a file: which ones it needs. `chosen`: which
// ones it will probably need; then there are neither `active` nor `starts`.
struct FetchArgs {
    class ExpertCache* cache;
    int32_t* active;        // as in GroupArgs; those in memory come first then
    const int32_t* starts;
    const int32_t* chosen;  // [rows]; null: the product comes now
    int64_t count;          // experts
    int64_t rows;           // set by the runtime
    int32_t k, group;
};

// What a cache of experts has done. Of the matrices that products needed: `hits` were in memory, `guessed`
// were being read or had been read ahead, `missed` neither.
struct ExpertCounts {
    int64_t hits, guessed, missed;
    int64_t asked_ahead;  // matrices asked for by a guess of the router
    int64_t reads, bytes, reading_ns;
    int64_t waited_ns;    // by threads of products, together
};

// How a cache of experts was used. ranks[i]: ranked uses of experts with i / kExpertRanks of all experts before
// them in the order of recent use. A cache with room for that share misses them.
enum { kExpertRanks = 64 };
struct ExpertRanks {
    int64_t tokens;                   // of which the experts were counted
    int64_t ranked;                   // of these, tokens whose uses were ranked
    int64_t ranks[kExpertRanks + 1];  // last: experts that had not been used before
};

// out[t][h] = x[t][h] times the weight of head h. Heads of x are x_head apart, tokens x_token; those of out
// out_head and each.out_stride.
struct HeadsArgs {
    LinearArgs each;  // w: the first head's
    const Weight* const* heads;
    int64_t count, x_token, x_head, out_head;
};

// x[row] += bias[owners[row]]
struct BiasArgs {
    float* x;
    const float* bias;  // [experts, width]
    const int32_t* owners;
    const int32_t* used;  // the number of rows that have values; null: all
    int64_t width;
};

// out[t] = the sum of weights[t][j] * x[places[t][j]], in the order of j, plus sigmoid(gate[t]) * shared[t].
struct CombineArgs {
    const float* x;
    const float* weights;
    const int32_t* places;
    const float* shared;  // [T, width]; null: none
    const float* gate;    // [T]; null: shared as it is
    float* out;
    int64_t width;
    int32_t k;
};
