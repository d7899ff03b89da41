// Attention over pages of all types.
#include "driver.hpp"

namespace {

struct AttentionShape {
    int64_t requests, heads, kv_heads, head_dim, page_size, pages, table_width;
    int key_type, value_type;
    int32_t group;  // dimensions that share a scale
    bool latent;    // a value is the first half of its key
    int64_t value_dim() const { return latent ? head_dim / 2 : head_dim; }
};

bool has_scales(int type) { return type != kF32 && type != kF16 && type != kBF16; }

// Elements of one head in a page, for kI4 bytes.
int64_t head_size(const AttentionShape& s, int type) {
    return s.page_size * s.head_dim / (type == kI4 ? 2 : 1);
}

// Keys and values as far as they were written. Vectors of keys also read slots that were not written,
// and discard them: NaN shows that they have no effect. Pairs of integer values do so too, and multiply them by
// 0. Other values stay uninitialized.
struct Cache {
    explicit Cache(const AttentionShape& s)
        : k(s.pages * s.kv_heads * head_size(s, s.key_type) * size_of(s.key_type)),
          v(s.latent ? 0 : s.pages * s.kv_heads * head_size(s, s.value_type) * size_of(s.value_type)),
          k_scales(s.pages * s.kv_heads * groups(s) * s.page_size),
          v_scales(k_scales.size()) {
        for (int64_t i = 0; i < k.size(); ++i) k[i] = 0xff;
        const bool pairs = s.value_type == kI8 || s.value_type == kI4;
        for (int64_t i = 0; pairs && i < v.size(); ++i) v[i] = 0xff;
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
    const PageSide keys = side(s, s.key_type, cache.k, cache.k_scales, s.page_size);
    if (s.latent) return {keys, keys};
    return {keys,
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
    rope.value_dim = args.value_dim = (int32_t)s.value_dim();
    args.latent = s.latent;
    rope.half = (int32_t)half;
    rope.page_size = args.page_size = (int32_t)s.page_size;
    Buffer<float> norm(s.head_dim);
    for (int64_t i = 0; i < s.head_dim; ++i) norm[i] = 0.5f + 0.01f * (float)i;
    if (s.heads > s.kv_heads) {  // of some shapes: norms, also of values, and a scale by position
        rope.q_norm = rope.k_norm = rope.v_norm = norm.data();
        rope.norm_after = s.requests % 2;
        rope.eps = 1e-5f;
        rope.positions = slots;
        rope.length = 7;
        rope.beta = 0.1f;
    }
    if (s.latent) {  // the parts that turn are the last halves
        rope.q_norm = rope.k_norm = rope.v_norm = nullptr;
        rope.q_turned = rope.q + s.value_dim();
        rope.turned_token = token;
        rope.turned_head = s.head_dim;
    }
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

}  // namespace

// A prompt and a few more tokens of every request, in random pages.
void attention(Random& random, TestRuntime& one, TestRuntime& many) {
    const int64_t most = 300, sizes[] = {1, 7, 16, 64};
    const int types[] = {kF32, kF16, kBF16, kI8, kE4M3, kE5M2, kI4};
    AttentionShape s{};
    s.requests = random.between(1, 4);
    s.kv_heads = random.between(1, 3);
    s.heads = s.kv_heads * random.between(1, 4);
    s.latent = !random.below(4);
    s.head_dim = s.latent ? 16 * random.between(1, 6) : 8 * random.between(1, 9);
    s.page_size = sizes[random.below(4)];
    s.table_width = (most + s.page_size - 1) / s.page_size;
    s.pages = s.requests * s.table_width;
    s.key_type = types[random.below(7)];
    s.value_type = s.latent ? s.key_type : types[random.below(7)];
    s.group = (int32_t)(32 * random.between(1, 3));
    Buffer<int32_t> table(s.pages), start(s.requests + 1), context(s.requests);
    for (int64_t i = 0; i < s.pages; ++i) {
        table[i] = (int32_t)i;
        std::swap(table[i], table[random.below(i + 1)]);
    }
    context.zero();
    Buffer<float> sinks = floats(random, s.heads), slopes = floats(random, s.heads);
    const int32_t reach = (int32_t)random.below(40);
    Buffer<float> biases = floats(random, s.heads * (2 * reach + 1));
    Buffer<float> frequencies = floats(random, s.head_dim / 4);
    Cache first(s), second(s);
    AttentionArgs args{};
    args.query_start = start.data();
    args.context_len = context.data();
    args.page_table = table.data();
    args.table_width = s.table_width;
    args.sinks = random.below(2) ? sinks.data() : nullptr;
    args.slopes = random.below(2) ? slopes.data() : nullptr;
    args.biases = random.below(2) ? biases.data() : nullptr;
    args.reach = reach;
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
                 AnglesArgs{positions.data(), frequencies.data(), cos.data(), sin.data(), nullptr, nullptr,
                            half, 0, 0, 1},
                 tokens);
        const Buffer<float> qkv = floats(random, tokens * (s.heads + 2 * s.kv_heads) * s.head_dim);
        Cache* cache = &first;
        both(one, many, tokens * s.heads * s.value_dim(), [&](TestRuntime& runtime, float* out) {
            args.out = out;
            attend(runtime, s, *cache, qkv, args, cos.data(), sin.data(), slots.data(), tokens);
            cache = &second;
            for (int64_t i = 0; i < tokens * s.heads * s.value_dim(); ++i) CHECK(out[i] == out[i]);
        });
    }
    if (context[0] >= s.page_size && !s.latent) recode(one, many, s, first, table[0]);
}
