// Where the time of a program's runs goes: nanoseconds of all threads together, for each operator its
// row-wise part and its tiles. Off unless somebody asks: a task then pays one comparison.
#pragma once

#include <stdint.h>

#include <chrono>
#include <vector>

#include "abi.hpp"

class OperatorTimes {
public:
    enum Part { kRowPart = 0, kTilePart = 1, kParts = 2 };

    // Times of no runs, for this many operators; without operators nothing is timed.
    void reset(size_t operators, int threads) {
        operators_ = operators;
        stride_ = (operators * kParts + kCacheLine / 8) / (kCacheLine / 8) * (kCacheLine / 8);
        times_.assign(operators ? stride_ * (size_t)threads : 0, 0);
        runs_ = run_ns_ = 0;
    }
    bool on() const { return operators_ > 0; }
    // `out` gets [operators][kParts], the nanoseconds that runs took, and their number.
    void read(int64_t* out) const {
        const size_t count = operators_ * kParts;
        for (size_t i = 0; i < count; ++i) {
            out[i] = 0;
            for (size_t at = i; at < times_.size(); at += stride_) out[i] += times_[at];
        }
        out[count] = run_ns_;
        out[count + 1] = runs_;
    }
    void add_run(int64_t ns) {
        run_ns_ += ns;
        ++runs_;
    }

    static int64_t now() {
        const auto time = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
    }

    // Adds the time since it was made, or since the last lap, to an operator.
    class Laps {
    public:
        Laps(OperatorTimes& times, int thread)
            : times_(times.on() ? times.times_.data() + times.stride_ * (size_t)thread : nullptr),
              last_(times_ ? now() : 0) {}
        void lap(int op, Part part) {
            if (!times_) return;
            const int64_t time = now();
            times_[op * kParts + part] += time - last_;
            last_ = time;
        }

    private:
        int64_t* times_;
        int64_t last_;
    };

private:
    std::vector<int64_t> times_;  // [threads][stride]: threads share no cache line
    size_t operators_ = 0, stride_ = 0;
    int64_t runs_ = 0, run_ns_ = 0;
};
