// Packed weights and their products.
#include "driver.hpp"

namespace {

int pack(TestRuntime& runtime, const Weight& w, const void* source, int64_t row_bytes) {
    return embedlm_pack(runtime.handle, &w, source, row_bytes, 0, w.n);
}

}  // namespace

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
    embedlm_pack_end(runtime.handle);
    CHECK(codes.starts_like(made.codes, codes.size()));
    codes.zero();
    {
        TestRuntime brief(2, embedlm_runtime_level(runtime.handle));
        CHECK(pack(brief, again, back.data(), made.row_bytes) == kOk);
    }  // a runtime that is destroyed finishes what it packs
    CHECK(codes.starts_like(made.codes, codes.size()));
}

namespace {

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
    one.run(kOpEmbedding, EmbeddingArgs{&made.w, ids.data(), first.data(), nullptr, 0, 0, 0, 0, 0, 0}, 5);
    many.run(kOpEmbedding, EmbeddingArgs{&made.w, ids.data(), second.data(), nullptr, 0, 0, 0, 0, 0, 0}, 5);
    CHECK(first.starts_like(second, 5 * k));
}

void check_weight(Random& random, TestRuntime& one, TestRuntime& many, Packed& made) {
    point(made);
    check_packing(many, made);
    check_products(random, one, many, made);
}

}  // namespace

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

namespace {

void mix_in(uint64_t* hash, Buffer<float>& found) {
    for (int64_t i = 0; i < found.size(); ++i) {
        uint32_t bits = 0x7fc00000;  // NaN: its bits may differ
        if (found[i] == found[i]) memcpy(&bits, &found[i], sizeof bits);
        *hash = (*hash ^ bits) * 1099511628211u;
    }
}

}  // namespace

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
