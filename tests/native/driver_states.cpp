// Operators with recurrent states: one thread and many agree, and no part of a step changes another's.
#include "driver.hpp"

#include <math.h>

namespace {

// Requests of some tokens, each with saves, in memory of exact size. Slot r is that of request r: it is read
// and replaced; the others are of saves in the middle.
struct Step {
    Buffer<int32_t> starts, initial, save_starts, tokens, slots;
    int64_t requests, total, saves, count;

    explicit Step(Random& random) : requests(random.between(1, 4)), total(0), saves(0) {
        starts = Buffer<int32_t>(requests + 1);
        initial = Buffer<int32_t>(requests);
        save_starts = Buffer<int32_t>(requests + 1);
        tokens = Buffer<int32_t>(2 * requests);
        slots = Buffer<int32_t>(2 * requests);
        count = 2 * requests;
        starts[0] = save_starts[0] = 0;
        for (int64_t r = 0; r < requests; ++r) {
            const int64_t own = random.below(3) ? random.below(6) : 70 + random.below(70);
            starts[r + 1] = (int32_t)(total + own);
            initial[r] = random.below(2) ? (int32_t)r : -1;
            if (own > 1 && random.below(2)) {
                tokens[saves] = (int32_t)(total + random.below(own - 1));
                slots[saves++] = (int32_t)(requests + r);
            }
            if (own && random.below(4)) {
                tokens[saves] = (int32_t)(total + own - 1);
                slots[saves++] = (int32_t)r;
            } else if (own) {
                saves = save_starts[r];
            }
            save_starts[r + 1] = (int32_t)saves;
            total += own;
        }
    }

    StateRows rows(float* state, int64_t size) {
        return {starts.data(), initial.data(), save_starts.data(), tokens.data(), slots.data(), state,
                count,         size,           total,              saves,         0};
    }
};

// Both runtimes give the same results and leave the same states. What neither writes differs: an operator
// that does nothing is noticed without valgrind, too.
template <typename Args>
void agree(TestRuntime& one, TestRuntime& many, int kind, Step& step, Args args, const Buffer<float>& state,
           int64_t slot, int64_t results) {
    Buffer<float> out[2] = {Buffer<float>(results), Buffer<float>(results)};
    Buffer<float> left[2] = {state, state};
    TestRuntime* runtimes[2] = {&one, &many};
    for (int i = 0; i < 2; ++i) {
        memset(out[i].data(), i + 1, sizeof(float) * (size_t)results);
        args.rows = step.rows(left[i].data(), slot);
        args.out = out[i].data();
        runtimes[i]->run(kind, args, step.requests);
    }
    CHECK(out[0].starts_like(out[1], results));
    CHECK(left[0].starts_like(left[1], state.size()));
}

}  // namespace

void states(Random& random, TestRuntime& one, TestRuntime& many) {
    Step step(random);
    const int64_t total = step.total;
    {
        const int64_t width = random.below(2) ? random.between(1, 90) : 700, taps = random.between(2, 5);
        const int64_t apart = width + random.below(5), slot = (taps - 1) * width;
        const int64_t convolutions = random.between(1, 3);
        Buffer<float> x = floats(random, total * apart), weight = floats(random, convolutions * width * taps);
        Buffer<float> bias = floats(random, convolutions * width), state = floats(random, step.count * slot);
        for (bool gated : {false, true}) {
            const float* gate = gated ? x.data() : nullptr;
            const int64_t several = gated ? 1 : convolutions;
            ConvArgs args = {};
            args.x = x.data();
            args.weight = weight.data();
            args.bias = gated ? nullptr : bias.data();
            args.before = args.after = gate;
            args.x_token = args.before_token = args.after_token = apart;
            args.width = width;
            args.taps = (int32_t)taps;
            args.silu = !gated;
            args.several = (int32_t)several;
            args.out_step = total * width;
            agree(one, many, kOpConv, step, args, state, slot, several * total * width);
        }
    }
    const int64_t heads = 2 * random.between(1, 3);
    Buffer<float> rate = floats(random, total * heads);
    for (int64_t i = 0; i < rate.size(); ++i) rate[i] = fabsf(rate[i]);
    {
        const int64_t dim = random.between(1, 40), width = random.between(1, 140);
        const int64_t token = heads / 2 * dim, slot = heads * dim * width;
        Buffer<float> k = floats(random, total * token), q = floats(random, total * token);
        Buffer<float> v = floats(random, total * heads * width), state = floats(random, step.count * slot);
        Buffer<float> decay = floats(random, total * heads * dim);
        for (int64_t i = 0; i < decay.size(); ++i) decay[i] = -fabsf(decay[i]);
        for (bool by_row : {false, true}) {
            DeltaArgs args = {};
            args.q = q.data();
            args.k = k.data();
            args.v = v.data();
            args.decay = decay.data();
            args.beta = rate.data();
            args.q_token = args.k_token = token;
            args.q_head = args.k_head = dim;
            args.v_token = heads * width;
            args.v_head = width;
            args.decay_token = by_row ? heads * dim : heads;
            args.decay_head = by_row ? dim : 1;
            args.beta_token = heads;
            args.beta_head = 1;
            args.key_heads = (int32_t)(heads / 2);
            args.heads = (int32_t)heads;
            args.key_dim = (int32_t)dim;
            args.value_dim = (int32_t)width;
            args.tiled = args.by_row = by_row;
            args.normalized = 1;
            args.eps = 1e-6f;
            args.scale = 0.5f;
            agree(one, many, kOpDelta, step, args, state, slot, total * heads * width);
        }
    }
    {  // RWKV-7
        const int64_t dim = random.between(1, 40), wide = heads * dim, slot = heads * dim * dim;
        Buffer<float> x = floats(random, total * wide), y = floats(random, total * wide);
        Buffer<float> decay = floats(random, total * wide), rates = floats(random, total * wide);
        Buffer<float> mix = floats(random, wide), state = floats(random, step.count * slot);
        for (int64_t i = 0; i < decay.size(); ++i) decay[i] = -fabsf(decay[i]);
        for (int64_t i = 0; i < rates.size(); ++i) rates[i] = 0.2f * fabsf(rates[i]);
        for (bool mixed : {false, true}) {
            Buffer<float> own(total * wide);
            DeltaArgs args = {};
            args.q = args.v = x.data();
            args.k = y.data();
            args.decay = decay.data();
            args.rate = args.mix = rates.data();
            args.first = y.data();
            if (!mixed) args.first = args.mix = nullptr;
            args.key_norm = args.key_mix = args.key_read = mix.data();
            args.own = own.data();
            args.q_token = args.k_token = args.v_token = args.decay_token = wide;
            args.rate_token = args.first_token = args.mix_token = wide;
            args.q_head = args.k_head = args.v_head = args.decay_head = dim;
            args.rate_head = args.first_head = args.mix_head = dim;
            args.key_heads = args.heads = (int32_t)heads;
            args.key_dim = args.value_dim = (int32_t)dim;
            args.by_row = 1;
            agree(one, many, kOpDelta, step, args, state, slot, total * wide);
        }
    }
    {
        const int64_t width = random.between(1, 40), size = random.between(1, 70);
        const int64_t slot = heads * width * size;
        Buffer<float> x = floats(random, total * heads * width), b = floats(random, total * 2 * size);
        Buffer<float> a(heads), state = floats(random, step.count * slot);
        for (int64_t h = 0; h < heads; ++h) a[h] = -0.1f * (float)(h + 1);
        SpaceArgs args = {};
        args.x = x.data();
        args.dt = rate.data();
        args.a = a.data();
        args.b = args.c = b.data();
        args.d = random.below(2) ? a.data() : nullptr;
        args.x_token = heads * width;
        args.x_head = width;
        args.dt_token = heads;
        args.dt_head = 1;
        args.b_token = args.c_token = 2 * size;
        args.b_group = args.c_group = size;
        args.heads = (int32_t)heads;
        args.groups = 2;
        args.width = (int32_t)width;
        args.size = (int32_t)size;
        agree(one, many, kOpSpace, step, args, state, slot, total * heads * width);
    }
    {  // Mamba-1: each row has its own rate, each number its own decay
        const int64_t width = random.below(3) ? random.between(1, 90) : 300, size = random.between(1, 20);
        Buffer<float> x = floats(random, total * width), b = floats(random, total * 2 * size);
        Buffer<float> rates = floats(random, total * width), a = floats(random, width * size);
        Buffer<float> d = floats(random, width), state = floats(random, step.count * width * size);
        for (int64_t i = 0; i < rates.size(); ++i) rates[i] = fabsf(rates[i]);
        for (int64_t i = 0; i < a.size(); ++i) a[i] = -fabsf(a[i]);
        SpaceArgs args = {};
        args.x = x.data();
        args.dt = rates.data();
        args.a = a.data();
        args.b = b.data();
        args.c = b.data() + (total ? size : 0);
        args.d = random.below(2) ? d.data() : nullptr;
        args.x_token = args.dt_token = width;
        args.b_token = args.c_token = 2 * size;
        args.heads = args.groups = args.by_row = 1;
        args.width = (int32_t)width;
        args.size = (int32_t)size;
        agree(one, many, kOpSpace, step, args, state, width * size, total * width);
    }
}

void state_gates(Random& random, TestRuntime& one, TestRuntime& many) {
    const int64_t rows = random.below(3) ? random.below(9) : 300, width = random.between(1, 150);
    const int64_t heads = random.between(1, 3), apart = heads * width + random.below(5);
    Buffer<float> x = floats(random, rows * apart), weight = floats(random, heads * width);
    TestRuntime* runtimes[2] = {&one, &many};
    for (int kind = 0; kind < 2; ++kind) {
        Buffer<float> out[2] = {Buffer<float>(rows * width), Buffer<float>(rows * width)};
        Buffer<float> normed[2] = {Buffer<float>(rows * heads * width), Buffer<float>(rows * heads * width)};
        for (int i = 0; i < 2; ++i) {
            runtimes[i]->run(kOpRates,
                             RatesArgs{x.data(), weight.data(), kind ? weight.data() : nullptr, out[i].data(),
                                       apart, width, kind ? width : 0, kind, !kind, 0.1f, 2.0f},
                             rows);
            runtimes[i]->run(kOpGatedNorm,
                             GatedNormArgs{x.data(), x.data(), kind ? weight.data() : nullptr,
                                           normed[i].data(), width, heads, apart, width, apart, width, width,
                                           kind, kind, 1e-6f},
                             rows * heads);
        }
        CHECK(out[0].starts_like(out[1], rows * width));
        CHECK(normed[0].starts_like(normed[1], rows * heads * width));
    }
}
