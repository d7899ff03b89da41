// Row-wise operators and sampling.
#include "driver.hpp"

#include <math.h>

#include <vector>

void both(TestRuntime& one, TestRuntime& many, int64_t size,
          const std::function<void(TestRuntime&, float*)>& call) {
    Buffer<float> first(size), second(size);
    call(one, first.data());
    call(many, second.data());
    CHECK(first.starts_like(second, size));
}

void rowwise(Random& random, TestRuntime& one, TestRuntime& many) {
    const int64_t rows = random.below(3) ? random.below(9) : 400, width = random.between(1, 200);
    const int64_t inner = random.between(1, 3), apart = width + random.below(9);
    const int64_t token = inner * apart + random.below(5);
    Buffer<float> wide = floats(random, rows * token), weight = floats(random, width);
    const int64_t count = rows * inner;
    Buffer<float> residual = floats(random, count * width), other = floats(random, count * width);
    Buffer<float> of_heads = floats(random, inner * width), shift = floats(random, width);
    for (int form = 0; form < 16; ++form) {
        const bool adding = form & 1, centred = form & 2, biased = form & 8;
        const bool by_head = random.below(2);
        const float* own = form & 4 ? by_head ? of_heads.data() : weight.data() : nullptr;
        both(one, many, count * width, [&](TestRuntime& runtime, float* out) {
            Buffer<float> sum = residual;
            runtime.run(kOpNorm,
                       NormArgs{wide.data(), adding ? sum.data() : nullptr, own,
                                biased ? shift.data() : nullptr, out, width, inner, token, apart,
                                by_head ? width : 0, 1e-5f, centred},
                       count);
        });
    }
    Buffer<float> gate_up = floats(random, count * 2 * width);
    for (int kind = kSilu; kind < kActivationKinds; ++kind) {
        for (int gated = kind == kClampedSwiglu; gated < 2; ++gated) {
            both(one, many, count * width, [&](TestRuntime& runtime, float* out) {
                runtime.run(kOpActivation,
                            ActivationArgs{gate_up.data(), out, width, nullptr, kind, gated,
                                           {0.8f, 0.9f, 0.5f, -1e-6f}},
                            count);
            });
        }
    }
    for (int kind = kGateSigmoid; kind < kGateKinds; ++kind) {
        for (bool by_row : {false, true}) {  // one gate for each number, or for each row
            both(one, many, count * width, [&](TestRuntime& runtime, float* out) {
                memcpy(out, residual.data(), sizeof(float) * (size_t)(count * width));
                runtime.run(kOpGate,
                            GateArgs{out, gate_up.data(), by_row ? width : 1, by_row ? 1 : width, 2 * width, kind},
                            count);
            });
        }
    }
    for (int kind = kMapZero; kind < kMapKinds; ++kind) {
        both(one, many, count * width, [&](TestRuntime& runtime, float* out) {
            if (kind != kMapZero) memcpy(out, residual.data(), sizeof(float) * (size_t)(count * width));
            float* add = kind == kMapAdd ? other.data() : kind == kMapBias ? weight.data() : nullptr;
            runtime.run(kOpMap, MapArgs{out, add, width, 2.5f, kind}, count);
        });
    }
    Buffer<int64_t> positions = indices(random, rows, 5000);
    both(one, many, 2 * rows * width, [&](TestRuntime& runtime, float* out) {
        runtime.run(kOpAngles,
                   AnglesArgs{positions.data(), weight.data(), out, out + rows * width, nullptr, nullptr,
                              width, 0, 0, 1.5f},
                   rows);
    });
    if (!count) return;
    Buffer<int64_t> chosen = indices(random, 7, count);
    both(one, many, 7 * width, [&](TestRuntime& runtime, float* out) {
        runtime.run(kOpSelect, SelectArgs{residual.data(), chosen.data(), out, width, count}, 7);
    });
    Buffer<int32_t> order(width);
    for (int64_t k = 0; k < width; ++k) order[k] = (int32_t)(width - 1 - k);
    for (int32_t back : {0, 1}) {
        both(one, many, count * width, [&](TestRuntime& runtime, float* out) {
            runtime.run(kOpTake, TakeArgs{residual.data(), order.data(), out, width, back}, count);
        });
    }
}

void sampling(Random& random, TestRuntime& one, TestRuntime& many) {
    const int64_t rows = random.between(1, 5), width = random.below(2) ? random.between(1, 90) : 30000;
    const int64_t stride = width + random.below(3);
    Buffer<float> logits = floats(random, rows * stride);
    std::vector<Draw> draws;
    for (int64_t r = 0; r < rows; ++r) {
        const bool typical = random.below(2), exclude = random.below(2);
        const double mu = random.below(3) ? (double)NAN : 5.0;
        draws.push_back({random.below(4) ? 0.8 : 0.0, random.below(2) ? 0.05 : 0.0,
                         typical ? 0.7 : 1.0, random.below(2) ? 0.9 : 1.0, exclude ? 0.1 : -1.0, mu,
                         random.below(2) ? random.between(1, 50) : 0,
                         (double)random.below(1000) / 1000.0});
    }
    // Two changes and two masks, of ids and words in the row and beyond it.
    Buffer<int32_t> ids(20);
    Buffer<float> values = floats(random, 20);
    for (int i = 0; i < 20; ++i) ids[i] = (int32_t)random.below(width + 3) - 1;
    const int64_t words = random.between(1, width / 32 + 2);
    Buffer<uint32_t> bits(words);
    for (int64_t i = 0; i < words; ++i) bits[i] = (uint32_t)random.below((int64_t)1 << 32);
    const Mask none = {nullptr, 0}, mask = {bits.data(), words};
    const Change changes[] = {
        {ids.data(), values.data(), 20, 1.3f, 0.2f, 0.1f, (int32_t)random.below(4)},
        {ids.data(), nullptr, 10, 1, 0, 0, kForbid}};
    const Change* const both_changes[] = {changes, changes + 1};
    const Shape shape = {random.below(2) ? mask : none, both_changes, 2};
    std::vector<RowShape> shapes;
    for (int64_t r = 0; r < rows; ++r)
        shapes.push_back({random.below(3) ? &shape : nullptr, random.below(3) ? none : mask});
    for (const Draw* draw : {static_cast<const Draw*>(nullptr), (const Draw*)draws.data()}) {
        Buffer<int64_t> tokens[2] = {Buffer<int64_t>(rows), Buffer<int64_t>(rows)};
        Buffer<double> shares[2] = {Buffer<double>(rows), Buffer<double>(rows)};
        Buffer<float> best(rows);
        for (int i = 0; i < 2; ++i) {
            SampleArgs args{logits.data(), draw, draw ? shapes.data() : nullptr, nullptr,
                            tokens[i].data(), best.data(), shares[i].data(), width, stride};
            (i ? many : one).run(kOpSample, args, rows);
        }
        CHECK(tokens[0].starts_like(tokens[1], rows) && shares[0].starts_like(shares[1], rows));
        for (int64_t r = 0; r < rows; ++r) CHECK(tokens[0][r] >= 0 && tokens[0][r] < width);
    }
}
