// Recorded programs, mixtures of experts and adapters.
#include "driver.hpp"

#include <tuple>
#include <vector>

// A small model of every row-wise operator: the recorded program gives the results of single calls.
void program(Random& random, TestRuntime& one, TestRuntime& many) {
    const int64_t tokens = 24, outputs = 6, width = 96, wide = 160, vocabulary = 40;
    Packed embedding = affine(random, vocabulary, width), up = affine(random, 2 * wide, width);
    Packed down = affine(random, width, wide), head = dense(random, vocabulary, width);
    for (Packed* made : {&embedding, &up, &down, &head}) {
        point(*made);
        check_packing(many, *made);
    }
    Buffer<int64_t> ids = indices(random, tokens, vocabulary), rows(outputs);
    rows.zero();
    Buffer<float> norm = floats(random, width), bias = floats(random, 2 * wide);
    Buffer<float> sum(tokens * width), x(tokens * width), delta(tokens * width);
    Buffer<float> taken(tokens * width);
    Buffer<int32_t> order(width);
    for (int64_t k = 0; k < width; ++k) order[k] = (int32_t)((k * 5 + 3) % width);
    Buffer<float> gate_up(tokens * 2 * wide), gated(tokens * wide);
    Buffer<float> chosen(outputs * width), logits(outputs * vocabulary);
    auto linear = [](Packed& w, Buffer<float>& from, Buffer<float>& to) {
        LinearArgs args{};
        args.w = &w.w;
        args.x = from.data();
        args.out = to.data();
        args.out_stride = w.w.n;
        args.terms = 1;
        return args;
    };
    struct Line {
        int kind;
        Count count;
        std::vector<uint8_t> args;
    };
    std::vector<Line> lines;
    auto add = [&](int kind, Count count, const auto& args) {
        const uint8_t* begin = reinterpret_cast<const uint8_t*>(&args);
        lines.push_back({kind, count, std::vector<uint8_t>(begin, begin + sizeof args)});
    };
    add(kOpEmbedding, kTokens, EmbeddingArgs{&embedding.w, ids.data(), delta.data(), nullptr, 0, 0, 0, 0, 0, 0});
    add(kOpMap, kTokens, MapArgs{sum.data(), nullptr, width, 0, kMapZero});
    for (int layer = 0; layer < 2; ++layer) {
        add(kOpNorm, kTokens,
            NormArgs{delta.data(), sum.data(), norm.data(), nullptr, x.data(), width, 1, width, 0, 0, 1e-5f, 0});
        add(kOpTake, kTokens, TakeArgs{x.data(), order.data(), taken.data(), width, 0});
        add(kOpLinear, kTokens, linear(up, taken, gate_up));
        add(kOpLinear, kTokens, linear(up, taken, gate_up));  // the same rows: quantized once
        add(kOpMap, kTokens, MapArgs{gate_up.data(), bias.data(), 2 * wide, 0, kMapBias});
        add(kOpActivation, kTokens, ActivationArgs{gate_up.data(), gated.data(), wide, nullptr, kSilu, 1, {}});
        add(kOpLinear, kTokens, linear(down, gated, delta));
    }
    add(kOpMap, kTokens, MapArgs{sum.data(), delta.data(), width, 0, kMapAdd});
    add(kOpSelect, kOutputs, SelectArgs{sum.data(), rows.data(), chosen.data(), width, tokens});
    add(kOpLinear, kOutputs, linear(head, chosen, logits));
    add(kOpMap, kOutputs, MapArgs{logits.data(), nullptr, vocabulary, 5.0f, kMapSoftcap});

    void* recorded = embedlm_program_create();
    CHECK(recorded);
    for (const Line& line : lines)
        CHECK(embedlm_program_add(recorded, line.kind, line.args.data(), line.count, 1) == kOk);
    CHECK(embedlm_program_add(recorded, 99, lines[0].args.data(), kTokens, 1) == kUnknownOp);
    CHECK(embedlm_program_time(many.handle, recorded, 1) == kOk);
    const int64_t runs[][kCounts] = {{1, 1, 1}, {24, 6, 4}, {7, 3, 1}, {2, 0, 1}, {0, 0, 0}};
    for (const int64_t* counts : runs) {
        for (const Line& line : lines)
            CHECK(embedlm_run(one.handle, line.kind, line.args.data(), counts[line.count]) == kOk);
        const Buffer<float> hidden = sum, expected = logits;
        logits.zero();
        CHECK(embedlm_program_run(many.handle, recorded, counts) == kOk);
        CHECK(sum.starts_like(hidden, counts[kTokens] * width));
        CHECK(logits.starts_like(expected, counts[kOutputs] * vocabulary));
    }
    std::vector<int64_t> times(2 * lines.size() + 2, -1);
    embedlm_program_times(many.handle, recorded, times.data());
    CHECK(times.back() == sizeof runs / sizeof *runs);
    for (const int64_t time : times) CHECK(time >= 0);
    embedlm_program_destroy(recorded);
}

// A token's sum is the same alone and in a batch, on any number of threads.
void experts(Random& random, TestRuntime& one, TestRuntime& many) {
    const int64_t count = 6, width = 96, wide = 72, tokens = 17;
    const int32_t k = 2;
    for (int plain = 0; plain < 2; ++plain) {
        std::vector<Packed> made;
        std::vector<const Weight*> views;
        const auto kind = [](const Packed& made) {
            return std::make_tuple(made.w.subgroup, made.w.bits, made.table.size() > 0);
        };
        while ((int64_t)made.size() < count) {  // of one format
            Packed weight = plain ? dense(random, wide, width) : affine(random, wide, width);
            if (made.empty() || kind(weight) == kind(made[0])) made.push_back(weight);
        }
        for (Packed& weight : made) {
            point(weight);
            check_packing(many, weight);
            views.push_back(&weight.w);
        }
        Buffer<float> x = floats(random, tokens * width), logits = floats(random, tokens * count);
        Buffer<float> bias = floats(random, count * wide), selection = floats(random, count);
        Buffer<float> beside = floats(random, tokens * wide);
        const int32_t gate = (int32_t)random.below(kRouteKinds);
        const bool biased = gate != kRouteSparse && random.below(2);
        const int32_t groups = gate != kRouteSparse && count % 2 == 0 ? 2 : 1;
        auto mixture = [&](TestRuntime& runtime, int64_t first, int64_t number) {
            const int64_t rows = number * k;
            Buffer<float> given(number * width), scores(number * count), weights(rows);
            Buffer<float> product(rows * wide), sum(number * wide);
            Buffer<int32_t> chosen(rows), places(rows), owners(rows), whose(rows);
            Buffer<int32_t> starts(count + 1), active(count + 1);
            memcpy(given.data(), &x[first * width], sizeof(float) * (size_t)(number * width));
            memcpy(scores.data(), &logits[first * count], sizeof(float) * (size_t)(number * count));
            LinearArgs each{};
            each.w = views[0];
            each.x = given.data();
            each.out = product.data();
            each.out_stride = wide;
            each.terms = 1;
            each.source = whose.data();
            runtime.run(kOpRoute,
                       RouteArgs{scores.data(), biased ? selection.data() : nullptr, nullptr, chosen.data(),
                                 weights.data(), count, k, gate, plain, groups, groups, 1, 1e-20f,
                                 0.0f, 2.5f, 0.02f},
                       number);
            runtime.run(kOpGroup,
                       GroupArgs{chosen.data(), places.data(), whose.data(), owners.data(),
                                 starts.data(), active.data(), count, 0, nullptr, nullptr, nullptr,
                                 nullptr, nullptr, k, 0},
                       rows);
            runtime.run(kOpExperts,
                       ExpertsArgs{each, views.data(), starts.data(), active.data(), count, k}, rows);
            runtime.run(kOpBias,
                       BiasArgs{product.data(), bias.data(), owners.data(), nullptr, wide}, rows);
            runtime.run(kOpCombine,
                       CombineArgs{product.data(), weights.data(), places.data(),
                                   biased ? beside.data() + first * wide : nullptr,
                                   gate ? logits.data() + first : nullptr, sum.data(), wide, k},
                       number);
            return sum;
        };
        Buffer<float> whole = mixture(many, 0, tokens);
        CHECK(mixture(one, 0, tokens).starts_like(whole, tokens * wide));
        for (int64_t t = 0; t < tokens; t += 5) {
            Buffer<float> alone = mixture(many, t, 1);
            CHECK(memcmp(&alone[0], &whole[t * wide], sizeof(float) * (size_t)wide) == 0);
        }
        mixture(many, 0, 0);
    }
}

namespace {

// A table whose slots have 0 to 3 parts with factors of 8 or 16 bits.
struct Table {
    std::vector<Buffer<uint8_t>> factors;
    std::vector<Buffer<float>> scales;
    std::vector<std::vector<LowRankPart>> parts;
    std::vector<LowRankSlot> slots;
    Buffer<float> bias;

    Table(Random& random, int64_t size, int64_t k, int64_t n, bool ids) : bias(floats(random, n)) {
        factors.reserve((size_t)(6 * size));  // they must not move
        scales.reserve((size_t)(3 * size));
        for (int64_t s = 0; s < size; ++s) {
            parts.emplace_back();
            int64_t ranks = 0;
            for (int64_t count = ids ? 1 : random.below(4); count; --count) {
                parts.back().push_back(part(random, k, n, ids));
                ranks += parts.back().back().rank;
            }
            slots.push_back({parts.back().data(), random.below(2) ? bias.data() : nullptr,
                             (int64_t)parts.back().size(), ranks});
        }
    }

    LowRankPart part(Random& random, int64_t k, int64_t n, bool ids) {
        const int64_t rank = random.between(1, 20), blocks = (n + kTileRows - 1) / kTileRows;
        const int64_t first = random.below(blocks), own = random.between(1, blocks - first);
        const bool small = random.below(2);
        const int64_t bytes = small ? 1 : 2, depth = small ? 32 : 16, even = (rank + 1) / 2 * 2;
        const int64_t width = ids ? k : (k + depth - 1) / depth * depth;
        factors.push_back(codes(random, rank * width, bytes));
        Buffer<uint8_t>& a = factors.back();
        // behind k: zeros, in the last block of each rank of a unit
        for (int64_t unit = 0; !ids && k % depth && unit < rank; unit += kLowUnit) {
            const int64_t count = rank - unit < kLowUnit ? rank - unit : (int64_t)kLowUnit;
            uint8_t* last = &a[(unit * width + count * (width - depth)) * bytes];
            for (int64_t r = 0; r < count; ++r)
                memset(last + (r * depth + k % depth) * bytes, 0, (size_t)((depth - k % depth) * bytes));
        }
        factors.push_back(codes(random, own * (small ? even : rank) * kTileRows, bytes));
        scales.push_back(floats(random, rank));
        return {a.data(), factors.back().data(), small ? scales.back().data() : nullptr,
                rank, first, own, 0.5f, small ? kI8 : kF16};
    }

    static Buffer<uint8_t> codes(Random& random, int64_t count, int64_t bytes) {
        Buffer<uint8_t> made(count * bytes);
        for (int64_t i = 0; i < count; ++i) {
            const uint16_t half = (uint16_t)(0x2c00 + random.below(0x1000));
            if (bytes == 2) memcpy(&made[2 * i], &half, 2);
            else made[i] = (uint8_t)(int8_t)random.between(-127, 127);
        }
        return made;
    }
};

}  // namespace

// A row gets the same from its adapter alone and in a batch, called and recorded, on any number of
// threads; rows without one stay.
void adapters(Random& random, TestRuntime& one, TestRuntime& many) {
    for (int ids = 0; ids < 2; ++ids) {
        const int64_t size = 3, m = random.between(1, 70), k = random.between(1, 200);
        const int64_t n = random.between(1, 150), stride = n + random.below(3);
        Table table(random, size, k, n, ids);
        Packed weight = affine(random, n, k);
        point(weight);
        check_packing(many, weight);
        Buffer<float> x = floats(random, m * k), y((m - 1) * stride + n);
        Buffer<int64_t> tokens = indices(random, m, k);
        Buffer<int32_t> slots(m);
        for (int64_t t = 0; t < m; ++t) slots[t] = (int32_t)random.below(size + 1) - 1;
        LinearArgs product{};
        product.w = &weight.w;
        product.x = x.data();
        product.out = y.data();
        product.out_stride = stride;
        product.terms = 1;
        LowRankArgs args{};
        args.x = ids ? nullptr : x.data();
        args.ids = ids ? tokens.data() : nullptr;
        args.y = y.data();
        args.slots = slots.data();
        args.table = table.slots.data();
        args.y_stride = stride;
        args.size = size;
        args.k = k;
        args.n = n;
        for (int64_t i = 0; i < y.size(); ++i) y[i] = -77.0f;
        one.run(kOpLinear, product, m);
        const Buffer<float> plain = y;
        one.run(kOpLowRank, args, m);
        Buffer<float> expected = y;
        void* recorded = embedlm_program_create();
        CHECK(embedlm_program_add(recorded, kOpLinear, &product, kTokens, 1) == kOk);
        CHECK(embedlm_program_add(recorded, kOpLowRank, &args, kTokens, 1) == kOk);
        for (int64_t rows : {m, (m + 1) / 2, (int64_t)1, (int64_t)0}) {
            for (int64_t i = 0; i < y.size(); ++i) y[i] = -77.0f;
            const int64_t counts[kCounts] = {rows};
            CHECK(embedlm_program_run(many.handle, recorded, counts) == kOk);
            for (int64_t t = 0; t < rows; ++t) {
                Buffer<float> unchanged = plain;
                const float* wanted = slots[t] < 0 ? &unchanged[t * stride] : &expected[t * stride];
                CHECK(memcmp(&y[t * stride], wanted, sizeof(float) * (size_t)n) == 0);
                for (int64_t i = n; t + 1 < m && i < stride; ++i) CHECK(y[t * stride + i] == -77.0f);
            }
        }
        slots[m - 1] = (int32_t)size;
        const int64_t counts[kCounts] = {m};
        CHECK(embedlm_program_run(many.handle, recorded, counts) == kBadIndex);
        embedlm_program_destroy(recorded);
    }
}
