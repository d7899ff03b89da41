// Random shapes through every operator, one by one and recorded, for valgrind and the sanitizers.
//
// driver [rounds]. Results are compared with those of one thread, another number of rows, or single
// calls.
#include "driver.hpp"

#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace {

// --- weights ---

int pack(TestRuntime& runtime, const Weight& w, const void* source, int64_t row_bytes) {
    return embedlm_pack(runtime.handle, &w, source, row_bytes, 0, w.n);
}

void check_packing(TestRuntime& runtime, Packed& made) {
    CHECK(pack(runtime, made.w, made.source.data(), made.row_bytes) == kOk);
    Buffer<uint8_t> back(made.source.size());
    back.zero();
    CHECK(embedlm_unpack(runtime.handle, &made.w, back.data(), made.row_bytes) == kOk);
    if (made.w.source == kStream) {  // dense values too
        CHECK(back.starts_like(made.source, back.size()));
        return;
    }
    Buffer<uint8_t> codes(made.codes.size());  // of blocks only the codes come back
    Weight again = made.w;
    again.codes = codes.data();
    CHECK(pack(runtime, again, back.data(), made.row_bytes) == kOk);
    CHECK(codes.starts_like(made.codes, codes.size()));
}

// A row is the same in every batch and on every number of threads; nothing outside of it is written.
void check_products(Random& random, TestRuntime& one, TestRuntime& many, Packed& made) {
    const int64_t n = made.w.n, k = made.w.k, stride = n + random.below(3), most = 33;
    Buffer<float> x = floats(random, most * k);
    const bool floats_only = made.w.subgroup == 1 && !made.w.dense;
    for (int terms = 0; terms < (floats_only ? 1 : 3); ++terms) {  // 0: fp32
        Buffer<float> expected(most * n);
        LinearArgs args{};
        args.w = &made.w;
        args.exact = !terms;
        args.terms = terms && !made.w.dense ? terms : 1;
        for (int64_t m : {33, 7, 2, 1, 0}) {
            Buffer<float> mine(m * k), out(m ? (m - 1) * stride + n : 0);
            memcpy(mine.data(), x.data(), sizeof(float) * (size_t)(m * k));
            args.x = mine.data();
            args.out = m == most ? expected.data() : out.data();
            args.out_stride = m == most ? n : stride;
            for (int64_t i = 0; i < out.size(); ++i) out[i] = -77.0f;
            (m == most ? one : many).run(kOpLinear, args, m);
            for (int64_t r = 0; m < most && r < m; ++r) {
                CHECK(memcmp(&out[r * stride], &expected[r * n], sizeof(float) * (size_t)n) == 0);
                for (int64_t i = n; r + 1 < m && i < stride; ++i) CHECK(out[r * stride + i] == -77.0f);
            }
        }
    }
    Buffer<int64_t> ids = indices(random, 5, n);
    Buffer<float> first(5 * k), second(5 * k);
    one.run(kOpEmbedding, EmbeddingArgs{&made.w, ids.data(), first.data(), nullptr, 0, 0}, 5);
    many.run(kOpEmbedding, EmbeddingArgs{&made.w, ids.data(), second.data(), nullptr, 0, 0}, 5);
    CHECK(first.starts_like(second, 5 * k));
}

void check_weight(Random& random, TestRuntime& one, TestRuntime& many, Packed& made) {
    point(made);
    check_packing(many, made);
    check_products(random, one, many, made);
}

void weights(Random& random, TestRuntime& one, TestRuntime& many) {
    for (int i = 0; i < 10; ++i) {
        const int64_t n = random.below(4) ? random.between(1, 90) : 1;
        const int64_t k = random.below(4) ? random.between(1, 300) : 1;
        Packed made = i < 6   ? affine(random, n, k)
                      : i < 8 ? dense(random, n, k)
                              : columns(random, n, k);
        check_weight(random, one, many, made);
    }
    for (const BlockKind& kind : kBlockKinds) {
        Packed made = blocks(random, kind, random.between(1, 40), kind.elements == 32 ? 5 : 2);
        check_weight(random, one, many, made);
    }
}

// --- the same numbers everywhere ---

// Every level with a fused multiply-add, of every architecture, has these products (linear_int.hpp,
// linear_float.hpp): the value is that of the AVX2 level, which tests/kernels compares with references.
constexpr uint64_t kFusedProducts = 0x83b4fe8731b5df3a;

void mix_in(uint64_t* hash, Buffer<float>& found) {
    for (int64_t i = 0; i < found.size(); ++i) {
        uint32_t bits = 0x7fc00000;  // NaN: its bits may differ
        if (found[i] == found[i]) memcpy(&bits, &found[i], sizeof bits);
        *hash = (*hash ^ bits) * 1099511628211u;
    }
}

// A hash of products with weights of every kind, of rows multiplied alone and together.
uint64_t products_hash(int level) {
    Random random(11);
    TestRuntime runtime(2, level);
    uint64_t hash = 14695981039346656037u;
    const auto add = [&](Packed made) {
        point(made);
        const int64_t n = made.w.n, k = made.w.k;
        CHECK(pack(runtime, made.w, made.source.data(), made.row_bytes) == kOk);
        const bool floats_only = made.w.subgroup == 1 && !made.w.dense;
        for (int32_t terms = 0; terms < (floats_only ? 1 : 3); ++terms) {
            for (int64_t m : {1, 3, 8, 21}) {
                Buffer<float> x = floats(random, m * k), out(m * n);
                LinearArgs args{};
                args.w = &made.w;
                args.x = x.data();
                args.out = out.data();
                args.out_stride = n;
                args.exact = !terms;
                args.terms = terms && !made.w.dense ? terms : 1;
                runtime.run(kOpLinear, args, m);
                mix_in(&hash, out);
            }
        }
    };
    for (int64_t i = 0; i < 24; ++i) add(affine(random, 20 + 3 * i, 33 + 20 * i));
    for (int64_t i = 0; i < 6; ++i) add(dense(random, 37, 40 + 30 * i));
    for (int64_t i = 0; i < 3; ++i) add(columns(random, 40, 70 + i));
    for (const BlockKind& kind : kBlockKinds) add(blocks(random, kind, 37, 3));
    return hash;
}

// --- row-wise operators ---

// Both runtimes run `call(runtime, output)`, each with an output of `size` floats; the results are
// equal.
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
    for (bool adding : {false, true}) {
        both(one, many, count * width, [&](TestRuntime& runtime, float* out) {
            Buffer<float> sum = residual;
            runtime.run(kOpNorm,
                       NormArgs{wide.data(), adding ? sum.data() : nullptr, weight.data(), out,
                                width, inner, token, apart, 1e-5f},
                       count);
        });
    }
    Buffer<float> gate_up = floats(random, count * 2 * width);
    for (int kind = kSilu; kind <= kGelu; ++kind) {
        both(one, many, count * width, [&](TestRuntime& runtime, float* out) {
            runtime.run(kOpGated, GatedArgs{gate_up.data(), out, width, nullptr, kind}, count);
        });
    }
    for (int kind = kMapZero; kind <= kMapSoftcap; ++kind) {
        both(one, many, count * width, [&](TestRuntime& runtime, float* out) {
            if (kind != kMapZero) memcpy(out, residual.data(), sizeof(float) * (size_t)(count * width));
            float* add = kind == kMapAdd ? other.data() : kind == kMapBias ? weight.data() : nullptr;
            runtime.run(kOpMap, MapArgs{out, add, width, 2.5f, kind}, count);
        });
    }
    Buffer<int64_t> positions = indices(random, rows, 5000);
    both(one, many, 2 * rows * width, [&](TestRuntime& runtime, float* out) {
        runtime.run(kOpAngles,
                   AnglesArgs{positions.data(), weight.data(), out, out + rows * width, width, 1.5f},
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

// --- attention ---

struct AttentionShape {
    int64_t requests, heads, kv_heads, head_dim, page_size, pages, table_width;
    int key_type, value_type;
    int32_t group;  // dimensions that share a scale
};

bool has_scales(int type) { return type != kF32 && type != kF16 && type != kBF16; }

// Elements of one head in a page, for kI4 bytes.
int64_t head_size(const AttentionShape& s, int type) {
    return s.page_size * s.head_dim / (type == kI4 ? 2 : 1);
}

// Keys and values as far as they were written. Vectors of keys also read slots that were not written,
// and discard them: NaN shows that they have no effect. Values stay uninitialized.
struct Cache {
    explicit Cache(const AttentionShape& s)
        : k(s.pages * s.kv_heads * head_size(s, s.key_type) * size_of(s.key_type)),
          v(s.pages * s.kv_heads * head_size(s, s.value_type) * size_of(s.value_type)),
          k_scales(s.pages * s.kv_heads * groups(s) * s.page_size),
          v_scales(k_scales.size()) {
        for (int64_t i = 0; i < k.size(); ++i) k[i] = 0xff;
    }
    static int64_t groups(const AttentionShape& s) { return (s.head_dim + s.group - 1) / s.group; }
    Buffer<uint8_t> k, v;
    Buffer<uint16_t> k_scales, v_scales;
};

PageSide side(const AttentionShape& s, int type, Buffer<uint8_t>& codes, Buffer<uint16_t>& scales,
              int64_t step) {
    PageSide to{};
    const int64_t head = head_size(s, type);
    to.data = codes.data();
    to.page = head * s.kv_heads;
    to.head = head;
    to.step = step;
    to.type = type;
    to.mixed = type == kI8 || type == kI4;
    if (!has_scales(type)) return to;
    to.scales = scales.data();
    to.scale_page = s.kv_heads * Cache::groups(s) * s.page_size;
    to.scale_row = s.page_size;
    to.group = s.group;
    return to;
}

// Keys and values of a cache.
PageLevel level(const AttentionShape& s, Cache& cache) {
    return {side(s, s.key_type, cache.k, cache.k_scales, s.page_size),
            side(s, s.value_type, cache.v, cache.v_scales,
                 s.head_dim / (s.value_type == kI4 ? 2 : 1))};
}

// A full page becomes one of 4-bit codes.
void recode(TestRuntime& one, TestRuntime& many, AttentionShape s, Cache& cache, int64_t page) {
    RecodeArgs args{};
    const PageLevel source[2] = {level(s, cache), level(s, cache)};  // two layers, one as the other
    args.source = source;
    args.page = page;
    args.kv_heads = (int32_t)s.kv_heads;
    args.head_dim = (int32_t)s.head_dim;
    args.page_size = (int32_t)s.page_size;
    s.key_type = s.value_type = kI4;
    s.pages = 1;
    Cache low[2] = {Cache(s), Cache(s)}, other[2] = {Cache(s), Cache(s)};
    for (int i = 0; i < 2; ++i) {
        const PageLevel target[2] = {level(s, low[i]), level(s, other[i])};
        args.target = target;
        (i ? many : one).run(kOpRecode, args, 2 * s.kv_heads * s.page_size);
        CHECK(low[i].k.starts_like(other[i].k, low[i].k.size()));
        CHECK(low[i].v.starts_like(other[i].v, low[i].v.size()));
    }
    CHECK(low[0].k.starts_like(low[1].k, low[0].k.size()));
    CHECK(low[0].v.starts_like(low[1].v, low[0].v.size()));
}

// One step of one runtime: rotates and writes `qkv`, attends.
void attend(TestRuntime& runtime, const AttentionShape& s, Cache& cache, Buffer<float> qkv,
            AttentionArgs args, float* cos, float* sin, const int64_t* slots, int64_t tokens) {
    const int64_t token = (s.heads + 2 * s.kv_heads) * s.head_dim, half = s.head_dim / 4;
    RopeArgs rope{};
    rope.q = qkv.data();
    rope.k = rope.q + s.heads * s.head_dim;
    rope.v = rope.k + s.kv_heads * s.head_dim;
    rope.cos = cos;
    rope.sin = sin;
    rope.slots = slots;
    rope.pages = level(s, cache);
    rope.q_token = rope.k_token = rope.v_token = token;
    rope.q_head = rope.k_head = rope.v_head = s.head_dim;
    rope.cos_token = rope.sin_token = half;
    rope.num_pages = args.num_pages = s.pages;
    rope.heads = args.heads = (int32_t)s.heads;
    rope.kv_heads = args.kv_heads = (int32_t)s.kv_heads;
    rope.head_dim = args.head_dim = (int32_t)s.head_dim;
    rope.half = (int32_t)half;
    rope.page_size = args.page_size = (int32_t)s.page_size;
    runtime.run(kOpRope, rope, tokens);
    args.q = rope.q;
    args.q_token = token;
    args.q_head = s.head_dim;
    args.tokens = tokens;
    args.levels[0] = rope.pages;
    args.num_levels = 1;
    args.scale = 0.3f;
    runtime.run(kOpAttention, args, s.requests);
}

// A prompt and a few more tokens of every request, in random pages.
void attention(Random& random, TestRuntime& one, TestRuntime& many) {
    const int64_t most = 300, sizes[] = {1, 7, 16, 64};
    const int types[] = {kF32, kF16, kBF16, kI8, kE4M3, kE5M2, kI4};
    AttentionShape s{};
    s.requests = random.between(1, 4);
    s.kv_heads = random.between(1, 3);
    s.heads = s.kv_heads * random.between(1, 4);
    s.head_dim = 8 * random.between(1, 9);
    s.page_size = sizes[random.below(4)];
    s.table_width = (most + s.page_size - 1) / s.page_size;
    s.pages = s.requests * s.table_width;
    s.key_type = types[random.below(7)];
    s.value_type = types[random.below(7)];
    s.group = (int32_t)(32 * random.between(1, 3));
    Buffer<int32_t> table(s.pages), start(s.requests + 1), context(s.requests);
    for (int64_t i = 0; i < s.pages; ++i) {
        table[i] = (int32_t)i;
        std::swap(table[i], table[random.below(i + 1)]);
    }
    context.zero();
    Buffer<float> sinks = floats(random, s.heads), frequencies = floats(random, s.head_dim / 4);
    Cache first(s), second(s);
    AttentionArgs args{};
    args.query_start = start.data();
    args.context_len = context.data();
    args.page_table = table.data();
    args.table_width = s.table_width;
    args.sinks = random.below(2) ? sinks.data() : nullptr;
    args.window = random.below(2) ? random.between(1, most) : 0;
    args.softcap = random.below(2) ? 3.0f : 0.0f;
    for (int step = 0; step < 4; ++step) {
        start[0] = 0;
        for (int64_t r = 0; r < s.requests; ++r) {
            const int32_t added = (int32_t)(step ? random.below(4) : random.between(1, most - 10));
            start[r + 1] = start[r] + added;
            context[r] += added;
        }
        const int64_t tokens = start[s.requests], half = s.head_dim / 4;
        Buffer<int64_t> positions(tokens), slots(tokens);
        Buffer<float> cos(tokens * half), sin(tokens * half);
        PlacesArgs places{start.data(),     context.data(), table.data(),           positions.data(),
                          slots.data(),     s.table_width,  tokens,               (int32_t)s.page_size};
        many.run(kOpPlaces, places, s.requests);
        many.run(kOpAngles,
                 AnglesArgs{positions.data(), frequencies.data(), cos.data(), sin.data(), half, 1},
                 tokens);
        const Buffer<float> qkv = floats(random, tokens * (s.heads + 2 * s.kv_heads) * s.head_dim);
        Cache* cache = &first;
        both(one, many, tokens * s.heads * s.head_dim, [&](TestRuntime& runtime, float* out) {
            args.out = out;
            attend(runtime, s, *cache, qkv, args, cos.data(), sin.data(), slots.data(), tokens);
            cache = &second;
            for (int64_t i = 0; i < tokens * s.heads * s.head_dim; ++i) CHECK(out[i] == out[i]);
        });
    }
    if (context[0] >= s.page_size) recode(one, many, s, first, table[0]);
}

// --- programs ---

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
    add(kOpEmbedding, kTokens, EmbeddingArgs{&embedding.w, ids.data(), delta.data(), nullptr, 0, 0});
    add(kOpMap, kTokens, MapArgs{sum.data(), nullptr, width, 0, kMapZero});
    for (int layer = 0; layer < 2; ++layer) {
        add(kOpNorm, kTokens,
            NormArgs{delta.data(), sum.data(), norm.data(), x.data(), width, 1, width, 0, 1e-5f});
        add(kOpTake, kTokens, TakeArgs{x.data(), order.data(), taken.data(), width, 0});
        add(kOpLinear, kTokens, linear(up, taken, gate_up));
        add(kOpLinear, kTokens, linear(up, taken, gate_up));  // the same rows: quantized once
        add(kOpMap, kTokens, MapArgs{gate_up.data(), bias.data(), 2 * wide, 0, kMapBias});
        add(kOpGated, kTokens, GatedArgs{gate_up.data(), gated.data(), wide, nullptr, kSilu});
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

// --- mixtures of experts ---

// A token's sum is the same alone and in a batch, on any number of threads.
void experts(Random& random, TestRuntime& one, TestRuntime& many) {
    const int64_t count = 5, width = 96, wide = 72, tokens = 17;
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
        Buffer<float> bias = floats(random, count * wide);
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
                       RouteArgs{scores.data(), chosen.data(), weights.data(), count, k, plain},
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
                       CombineArgs{product.data(), weights.data(), places.data(), sum.data(), wide, k},
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

// --- adapters ---

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

// --- ranks ---

// Whole experts on each rank, the first on all: every row of expert e is e + 1, added up over tokens.
void share_experts(RankGroup* group, TestRuntime& runtime, int rank, int size) {
    const int64_t tokens = 9, width = 24;
    const int32_t k = 2, all = 2 * size + 1;
    Buffer<int32_t> first(all + 1), ranks(all + size), local(all);
    int32_t copies = 0, count = 0;
    for (int32_t e = 0; e < all; ++e) {
        first[e] = copies;
        local[e] = e == 0 || e % size == rank ? count++ : -1;
        for (int32_t r = 0; r < size; ++r)
            if (e == 0 || e % size == r) ranks[copies++] = r;
    }
    first[all] = copies;
    const int64_t rows = tokens * k;
    Buffer<int64_t> load(all);
    Buffer<int32_t> chosen(rows), places(rows), whose(rows), owners(rows), servers(rows);
    Buffer<int32_t> starts(count + 1), active(count + 1);
    Buffer<float> x(rows * width), bias(count * width), weights(rows), sum(tokens * width);
    for (int32_t e = 0; e < all; ++e) {
        load[e] = 0;
        for (int64_t i = 0; local[e] >= 0 && i < width; ++i) bias[local[e] * width + i] = (float)(e + 1);
    }
    for (int64_t i = 0; i < rows; ++i) {
        chosen[i] = (int32_t)(i % 3 ? i % all : 0);
        weights[i] = 1.0f;
    }
    const GroupArgs grouped = {chosen.data(), places.data(), whose.data(), owners.data(), starts.data(),
                               active.data(), count, 0, first.data(), ranks.data(), local.data(),
                               servers.data(), load.data(), k, rank};
    const MapArgs zero = {x.data(), nullptr, width, 0.0f, kMapZero};
    const BiasArgs biased = {x.data(), bias.data(), owners.data(), &starts[count], width};
    const CombineRanksArgs combined = {
        {x.data(), weights.data(), places.data(), sum.data(), width, k}, group, servers.data(), 0};
    void* recorded = embedlm_program_create();
    CHECK(embedlm_program_add(recorded, kOpGroup, &grouped, kTokens, k) == kOk);
    CHECK(embedlm_program_add(recorded, kOpMap, &zero, kTokens, k) == kOk);
    CHECK(embedlm_program_add(recorded, kOpBias, &biased, kTokens, k) == kOk);
    CHECK(embedlm_program_add(recorded, kOpCombineRanks, &combined, kTokens, 1) == kOk);
    for (int64_t m : {tokens, (int64_t)0, (int64_t)1, tokens}) {
        const int64_t counts[kCounts] = {m};
        CHECK(embedlm_program_run(runtime.handle, recorded, counts) == kOk);
        for (int64_t t = 0; t < m; ++t)
            for (int64_t i = 0; i < width; ++i)
                CHECK(sum[t * width + i] == (float)(chosen[t * k] + chosen[t * k + 1] + 2));
    }
    embedlm_program_destroy(recorded);
}

// Every rank has tokens of its own, some of them none; who computes which row goes in turn.
void gather_tokens(RankGroup* group, TestRuntime& runtime, int rank, int size) {
    const int64_t width = 33, most = 16;
    Buffer<float> x(most * width), all(size * most * width), sum(most * width), weights(size * most);
    Buffer<int32_t> starts(size + 1), places(size * most), servers(size * most);
    starts[0] = 0;
    for (int64_t t = 0; t < size * most; ++t) {
        weights[t] = 1.0f;
        servers[t] = (int32_t)(t % size);
        places[t] = servers[t] == rank ? (int32_t)t : -1;
    }
    const GatherRanksArgs gathered = {group, x.data(), all.data(), starts.data(), width, 0};
    const CombineRanksArgs combined = {{all.data(), weights.data(), places.data(), sum.data(), width, 1},
                                       group, servers.data(), starts.data(), 0};
    void* recorded = embedlm_program_create();
    CHECK(embedlm_program_add(recorded, kOpGatherRanks, &gathered, kGathered, 1) == kOk);
    CHECK(embedlm_program_add(recorded, kOpCombineRanks, &combined, kGathered, 1) == kOk);
    for (int turn = 0; turn < 20; ++turn) {
        for (int r = 0; r < size; ++r)
            starts[r + 1] = starts[r] + (int32_t)((5 * r + 3 * turn) % (most + 1));
        const int64_t own = starts[rank + 1] - starts[rank];
        for (int64_t i = 0; i < own * width; ++i) x[i] = (float)(1000 * rank + i);
        const int64_t counts[kCounts] = {own};
        CHECK(embedlm_program_run(runtime.handle, recorded, counts) == kOk);
        for (int r = 0; r < size; ++r)
            for (int64_t i = 0; i < (starts[r + 1] - starts[r]) * width; ++i)
                CHECK(all[starts[r] * width + i] == (float)(1000 * r + i));
        for (int64_t i = 0; i < own * width; ++i) CHECK(sum[i] == x[i]);
    }
    embedlm_program_destroy(recorded);
}

// A rank: sums recorded in one program, single sums, gathers of bytes; sizes vary, so that areas grow.
void take_part(const char* folder, int rank, int size, int level) {
    void* group = embedlm_ranks_create(rank, size, size, 0, 60.0);
    CHECK(embedlm_ranks_join(group, folder, 60.0) == kOk);
    TestRuntime runtime(1 + rank % 2, level);
    Random sizes(7);  // the same on every rank
    for (int turn = 0; turn < 12; ++turn) {
        const int64_t most = sizes.between(1, 40), width = sizes.between(1, 300);
        Buffer<float> x(most * width), all(most * width * size);
        const ExchangeArgs sum = {static_cast<RankGroup*>(group), x.data(), nullptr, width, width,
                                  width, width, 0};
        ExchangeArgs gather = sum;
        gather.out = all.data();
        gather.out_width = width * size;
        const MapArgs twice = {x.data(), nullptr, width, 2.0f, kMapScale};
        void* recorded = embedlm_program_create();
        const auto add = [&](OpKind kind, const void* args) {
            CHECK(embedlm_program_add(recorded, kind, args, kTokens, 1) == kOk);
        };
        for (int i = 0; i < 3; ++i) {
            add(kOpExchange, &sum);
            add(kOpMap, &twice);
        }
        add(kOpExchange, &gather);
        for (int64_t m : {most, (int64_t)0, (int64_t)1}) {
            for (int64_t i = 0; i < m * width; ++i) x[i] = (float)(rank + 1);
            const int64_t counts[kCounts] = {m};
            CHECK(embedlm_program_run(runtime.handle, recorded, counts) == kOk);
            const float total = (float)(size * (size + 1) / 2 * size * size * 8);
            for (int64_t i = 0; i < m * width * size; ++i) CHECK(all[i] == total);
        }
        embedlm_program_destroy(recorded);
        Buffer<int32_t> numbers(size);
        CHECK(embedlm_ranks_gather(group, &rank, sizeof rank, numbers.data()) == kOk);
        for (int i = 0; i < size; ++i) CHECK(numbers[i] == i);
    }
    share_experts(static_cast<RankGroup*>(group), runtime, rank, size);
    gather_tokens(static_cast<RankGroup*>(group), runtime, rank, size);
    if (rank == 0) embedlm_ranks_give_up(group);
    int32_t own = rank;
    Buffer<int32_t> numbers(size);
    CHECK(embedlm_ranks_gather(group, &own, sizeof own, numbers.data()) == kRankLost);
    embedlm_ranks_destroy(group);
}

void ranks(int size, int level) {
    char folder[] = "/tmp/embedlm-driver-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) threads.emplace_back(take_part, folder, rank, size, level);
    for (std::thread& thread : threads) thread.join();
    for (int rank = 0; rank < size; ++rank)
        CHECK(unlink((folder + std::string("/rank-") + std::to_string(rank)).c_str()) == 0);
    CHECK(rmdir(folder) == 0);
}

// A stage of a pipeline: receives rows from the one before, doubles them, sends them to the next one.
// Sizes vary, so that slots grow and are used again.
void run_stage(const char* folder, int stage, int stages, int level) {
    void* links[2] = {nullptr, nullptr};  // from the stage before, to the next one
    for (int i = 0; i < 2; ++i) {
        if (stage + i == 0 || stage + i == stages) continue;
        const std::string own = folder + std::string("/link-") + std::to_string(stage + i);
        links[i] = embedlm_ranks_create(1 - i, 2, stages, 4, 60.0);
        CHECK(embedlm_ranks_join(links[i], own.c_str(), 60.0) == kOk);
    }
    TestRuntime runtime(1 + stage % 2, level);
    Random sizes(11);  // the same in every stage
    for (int turn = 0; turn < 12; ++turn) {
        const int64_t most = sizes.between(1, 40), width = sizes.between(1, 300);
        Buffer<float> x(most * width);
        void* recorded = embedlm_program_create();
        const auto add = [&](OpKind kind, const void* args) {
            CHECK(embedlm_program_add(recorded, kind, args, kTokens, 1) == kOk);
        };
        const auto move = [&](void* link) {
            const TransferArgs args = {static_cast<RankGroup*>(link), x.data(), width, 0};
            if (link) add(kOpTransfer, &args);
        };
        const MapArgs twice = {x.data(), nullptr, width, 2.0f, kMapScale};
        move(links[0]);
        add(kOpMap, &twice);
        move(links[1]);
        for (int64_t m : {most, (int64_t)0, (int64_t)1, most, most}) {
            for (int64_t i = 0; i < m * width; ++i) x[i] = stage ? -1.0f : (float)(turn + i);
            const int64_t counts[kCounts] = {m};
            CHECK(embedlm_program_run(runtime.handle, recorded, counts) == kOk);
            const float factor = (float)(2 << stage);
            for (int64_t i = 0; i < m * width; ++i) CHECK(x[i] == factor * (float)(turn + i));
        }
        embedlm_program_destroy(recorded);
    }
    Buffer<uint8_t> bytes(5000);
    for (int64_t i = 0; i < bytes.size(); ++i) bytes[i] = stage ? 0 : (uint8_t)i;
    for (void* link : links)
        if (link) CHECK(embedlm_ranks_transfer(link, bytes.data(), bytes.size()) == kOk);
    for (int64_t i = 0; i < bytes.size(); ++i) CHECK(bytes[i] == (uint8_t)i);
    // Behind a stage that gives up, the next one fails, gives up too, and so on.
    float x = 0;
    for (int i = 0; i < 2; ++i) {
        const TransferArgs args = {static_cast<RankGroup*>(links[i]), &x, 1, 0};
        if (i == 1 && links[i]) embedlm_ranks_give_up(links[i]);
        if (links[i]) CHECK(embedlm_run(runtime.handle, kOpTransfer, &args, 1) == kRankLost);
    }
    for (void* link : links) {
        CHECK(!link || embedlm_ranks_waited_ns(link) >= 0);
        if (link) embedlm_ranks_destroy(link);
    }
}

void pipeline(int stages, int level) {
    char folder[] = "/tmp/embedlm-driver-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    const auto link = [&](int stage) { return folder + std::string("/link-") + std::to_string(stage); };
    for (int stage = 1; stage < stages; ++stage) CHECK(mkdir(link(stage).c_str(), 0700) == 0);
    std::vector<std::thread> threads;
    for (int stage = 0; stage < stages; ++stage)
        threads.emplace_back(run_stage, folder, stage, stages, level);
    for (std::thread& thread : threads) thread.join();
    for (int stage = 1; stage < stages; ++stage) {
        for (const char* end : {"/rank-0", "/rank-1"}) CHECK(unlink((link(stage) + end).c_str()) == 0);
        CHECK(rmdir(link(stage).c_str()) == 0);
    }
    CHECK(rmdir(folder) == 0);
}

// --- runtimes ---

void everything(Random& random, TestRuntime& one, TestRuntime& many) {
    weights(random, one, many);
    rowwise(random, one, many);
    sampling(random, one, many);
    attention(random, one, many);
    program(random, one, many);
    experts(random, one, many);
    adapters(random, one, many);
}

// Two threads at once, each with its own runtime, and both with the same one.
void together(int level, bool shared) {
    TestRuntime one(1, level), first(2, level), second(3, level);
    std::thread threads[2];
    for (int i = 0; i < 2; ++i) {
        threads[i] = std::thread([&, i] {
            Random random(100u + (unsigned)i);
            TestRuntime alone(1, level);
            everything(random, alone, shared || i == 0 ? first : second);
        });
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 3;
    CHECK(embedlm_abi_version() == kAbiVersion);
    CHECK(!embedlm_runtime_create(0, -1) && !embedlm_runtime_create(1, kLevelCount));
    void* closed = embedlm_runtime_create(3, 0);
    embedlm_runtime_close(closed);
    embedlm_runtime_close(closed);
    CHECK(embedlm_run(closed, kOpMap, nullptr, 1) == kClosed);
    embedlm_runtime_destroy(closed);
    for (int level = 0; level < kLevelCount; ++level) {
        if (!(embedlm_levels() >> level & 1)) continue;
        for (int threads = 1; threads <= 4; ++threads) TestRuntime(threads, level);  // never used
        for (int round = 0; round < rounds; ++round) {
            Random random((unsigned)(level * 1000 + round));
            TestRuntime one(1, level), many((int)random.between(2, 4), level);
            everything(random, one, many);
        }
        together(level, false);
        together(level, true);
        for (int size : {2, 3}) ranks(size, level);
        for (int stages : {2, 3}) pipeline(stages, level);
        const uint64_t hash = products_hash(level);
        bool fused = level != kPortable;
#if defined(__aarch64__)
        fused = true;
        // Here all levels have vectors of the same width, so all results have the same bits.
        Random random(77);
        TestRuntime portable(1, kPortable), own(2, level);
        for (int round = 0; round < rounds; ++round) everything(random, portable, own);
#endif
        printf("driver: level %d, %d rounds, products %016llx\n", level, rounds, (unsigned long long)hash);
        CHECK(!fused || hash == kFusedProducts);
    }
}
