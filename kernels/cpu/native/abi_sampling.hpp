// How logits become tokens. Part of abi.hpp, whose rules hold here.
#pragma once

#include <stddef.h>
#include <stdint.h>

// How one row's token is chosen; kernels/operators/sampling.py explains the numbers. Temperature 0 is the
// argmax, whatever the others are.
struct Draw {
    double temperature, min_p, typical_p, top_p;
    double xtc_threshold;  // negative: off
    double mirostat_mu;    // NaN: off
    int64_t top_k;         // 0: off
    double uniform;        // in [0, 1)
};

// One way in which the logits of a row change: kernels/operators/sampling.py.
enum ChangeKind { kAdd = 0, kPenalize = 1, kForbid = 2, kForce = 3, kChangeKinds = 4 };

struct Change {
    const int32_t* ids;   // distinct; ids outside of the row change nothing
    const float* values;  // kAdd: what is added; kPenalize: how often the id is in the output
    int64_t count;
    float repetition, frequency, presence;  // kPenalize
    int32_t kind;
};

// Bit i % 32 of word i / 32: token i may be drawn. Tokens after the last word may not.
struct Mask {
    const uint32_t* words;  // null: all tokens may be drawn
    int64_t count;
};

struct Shape {
    Mask mask;
    const Change* const* changes;  // in this order, after the masks
    int64_t count;
};

struct RowShape {
    const Shape* shape;  // null: none
    Mask mask;
};

// The masks of the output rows of one request, computed by its grammar matcher: one for its next
// token, then one after each draft token.
struct MaskTask {
    void* matcher;
    uint32_t* masks;         // count masks, one after another
    const uint32_t* drafts;  // count - 1 tokens
    int32_t count;
    int32_t also;    // a token that the first mask allows too; -1: none
    int32_t failed;  // set to 1 if the matcher reports an error; its masks then allow nothing
};

// The functions of the matchers' library (llguidance's C interface); all but validate return 0 or, on an
// error, something else.
struct MaskTasks {
    int32_t (*compute)(void* matcher, uint32_t* mask, size_t bytes);
    int32_t (*validate)(void* matcher, const uint32_t* tokens, size_t count);  // how many are allowed
    int32_t (*consume)(void* matcher, const uint32_t* tokens, size_t count);
    int32_t (*rollback)(void* matcher, size_t count);
    bool (*stopped)(const void* matcher);  // whether the structure is complete
    int64_t words;  // of a mask
    int64_t count;
    MaskTask* tasks;
    mutable int64_t waited_ns;  // the longest that a thread waited for them in the last run
};

struct SampleArgs {
    const float* logits;
    const Draw* draws;       // null: the argmax of every row
    const RowShape* shapes;  // null: no row has a shape
    const MaskTasks* masks;  // null: none; computed before any row is drawn
    int64_t* tokens;
    float* best;            // the changed row's maximum; the row's own unless that is finite
    double* probabilities;  // the token's share of the tokens that could be drawn; 1 without a draw, 0
                            // if the changes made the maximum of a finite row not finite
    int64_t width, stride;
};
