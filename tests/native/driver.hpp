// What the parts of the driver share: memory of exact size, random numbers and random weights.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <random>
#include <utility>

#include "levels.hpp"
#include "system.hpp"

extern "C" {
int embedlm_abi_version();
int embedlm_levels();
void* embedlm_runtime_create(int threads, int level);
void embedlm_runtime_close(void* handle);
void embedlm_runtime_destroy(void* handle);
int embedlm_runtime_level(const void* runtime);
int embedlm_pack(void* handle, const Weight* w, const void* source, int64_t row_bytes, int64_t first,
                 int64_t rows);
void embedlm_pack_end(void* handle);
int embedlm_unpack(void* handle, const Weight* w, void* out, int64_t row_bytes);
int embedlm_run(void* handle, int kind, const void* args, int64_t rows);
void* embedlm_program_create();
void embedlm_program_destroy(void* program);
int embedlm_program_add(void* program, int kind, const void* args, int count, int64_t per);
int embedlm_program_time(void* handle, void* program, int on);
void embedlm_program_times(void* handle, const void* program, int64_t* out);
int embedlm_program_run(void* handle, void* program, const int64_t* counts);
void* embedlm_ranks_create(int rank, int size, int processes, int slots, double patience_s);
int embedlm_ranks_join(void* group, const char* folder, double seconds);
int embedlm_ranks_gather(void* group, const void* mine, int64_t bytes, void* out);
int embedlm_ranks_reserve(void* group, int64_t bytes);
int embedlm_ranks_transfer(void* link, void* data, int64_t bytes);
int64_t embedlm_ranks_waited_ns(void* group);
void embedlm_ranks_give_up(void* group);
void embedlm_ranks_destroy(void* group);
}

#define CHECK(condition)                                              \
    do {                                                              \
        if (!(condition)) {                                           \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                  \
        }                                                             \
    } while (0)

// A seed gives the same numbers everywhere.
class Random {
public:
    explicit Random(unsigned seed) : bits_(seed) {}
    int64_t below(int64_t n) { return (int64_t)(bits_() % (uint64_t)n); }
    int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
    float value() { return (float)below(2000) / 500.0f - 2.0f; }

private:
    std::mt19937 bits_;
};

// Memory of exactly the requested size, not initialized: the tools see every byte that is accessed
// outside of it and every byte that is read before it was written.
template <typename T>
class Buffer {
public:
    explicit Buffer(int64_t size = 0) : size_(size) {
        data_ = static_cast<T*>(aligned_memory(sizeof(T) * (size_t)(size ? size : 1)));
        CHECK(data_);
    }
    Buffer(const Buffer& other) : Buffer(other.size_) {
        memcpy(data_, other.data_, sizeof(T) * (size_t)size_);
    }
    Buffer& operator=(Buffer other) {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~Buffer() { free_aligned(data_); }
    T* data() { return data_; }
    T& operator[](int64_t i) { return data_[i]; }
    int64_t size() const { return size_; }
    void zero() { memset(data_, 0, sizeof(T) * (size_t)size_); }
    bool starts_like(const Buffer& other, int64_t count) const {
        return memcmp(data_, other.data_, sizeof(T) * (size_t)count) == 0;
    }

private:
    T* data_;
    int64_t size_;
};

inline Buffer<float> floats(Random& random, int64_t count) {
    Buffer<float> made(count);
    for (int64_t i = 0; i < count; ++i) made[i] = random.value();
    return made;
}

inline Buffer<uint8_t> bytes(Random& random, int64_t count) {
    Buffer<uint8_t> made(count);
    for (int64_t i = 0; i < count; ++i) made[i] = (uint8_t)random.below(256);
    return made;
}

inline Buffer<int64_t> indices(Random& random, int64_t count, int64_t below) {
    Buffer<int64_t> made(count);
    for (int64_t i = 0; i < count; ++i) made[i] = random.below(below);
    return made;
}

inline int64_t size_of(int type) { return type == kF32 ? 4 : type == kF16 || type == kBF16 ? 2 : 1; }

// Numbers of about 0.01 in a float type, any byte that is not NaN in the others.
inline Buffer<uint8_t> elements(Random& random, int type, int64_t count) {
    if (size_of(type) == 1) {
        Buffer<uint8_t> made = bytes(random, count);
        const uint8_t mask = type == kE8M0 ? 0x7f : 0xbf;  // at most 1, as a power of two
        for (int64_t i = 0; type >= kE4M3 && i < count; ++i) made[i] &= mask;
        return made;
    }
    Buffer<uint8_t> made(count * size_of(type));
    for (int64_t i = 0; i < count; ++i) {
        const uint16_t half = (uint16_t)(type == kF16 ? 0x2000 + random.below(1024)
                                                      : 0x3c00 + random.below(128));
        const float single = 0.008f + (float)random.below(1000) * 1e-5f;
        if (type == kF32) memcpy(made.data() + 4 * i, &single, 4);
        else memcpy(made.data() + 2 * i, &half, 2);
    }
    return made;
}

class TestRuntime {
public:
    TestRuntime(int threads, int level) : handle(embedlm_runtime_create(threads, level)) {
        CHECK(handle && embedlm_runtime_level(handle) == level);
    }
    TestRuntime(const TestRuntime&) = delete;
    ~TestRuntime() { embedlm_runtime_destroy(handle); }
    template <typename Args>
    void run(int kind, const Args& args, int64_t rows) {
        CHECK(embedlm_run(handle, kind, &args, rows) == kOk);
    }
    void* const handle;
};

// --- weights ---

struct Packed {
    Weight w{};
    int64_t row_bytes = 0;
    Buffer<uint8_t> source, codes, scale, minus, zeros, super_scale, super_minus;
    Buffer<float> table, scale_table, scale_offset;
};

inline Packed shaped(int64_t n, int64_t k) {
    Packed made;
    made.w.n = n;
    made.w.k = k;
    made.w.row_blocks = (n + kTileRows - 1) / kTileRows;
    made.w.k_blocks = (k + kTileDepth - 1) / kTileDepth;
    made.w.subgroup = kTileDepth;
    made.w.subgroups_per_group = made.w.subgroups_per_super = made.w.scale_blocks = 1;
    return made;
}

inline void point(Packed& made) {
    auto data = [](Buffer<uint8_t>& buffer) { return buffer.size() ? buffer.data() : nullptr; };
    made.w.codes = made.codes.data();
    made.w.scale = data(made.scale);
    made.w.minus = made.w.source == kQ2K ? made.w.scale : data(made.minus);
    made.w.zeros = data(made.zeros);
    made.w.super_scale = data(made.super_scale);
    made.w.super_minus = reinterpret_cast<uint16_t*>(data(made.super_minus));
    made.w.table = made.table.size() ? made.table.data() : nullptr;
    made.w.scale_table = made.scale_table.size() ? made.scale_table.data() : nullptr;
    made.w.scale_offset = made.scale_offset.size() ? made.scale_offset.data() : nullptr;
}

// Makes codes index a table.
inline void tabulate(Random& random, Packed& made) {
    made.table = floats(random, 16);
    made.w.zero = 128.0f;
    made.w.int8_table_scale = 0.01f;
    for (uint8_t& step : made.w.int8_table) step = (uint8_t)random.between(1, 255);
}

// Makes scales codes, whose super scales continue across rows.
inline void nest(Random& random, Packed& made) {
    Weight& w = made.w;
    w.scale_type = kU8;
    w.super_type = kF32;
    w.subgroups_per_super = 1 << random.below(9);
    w.supers = (w.n * w.groups + w.subgroups_per_super - 1) / w.subgroups_per_super;
    made.super_scale = elements(random, kF32, w.supers);
    made.scale_table = floats(random, 256);
    made.scale_offset = floats(random, w.row_blocks * kTileRows);
}

// Codes for the file, and room for them once they are packed.
inline void fill(Random& random, Packed& made) {
    const Weight& w = made.w;
    const int64_t bits = w.k * w.bits;
    made.codes = Buffer<uint8_t>(w.row_blocks * w.k_blocks * w.bits * 64);
    made.row_bytes = (bits + 7) / 8;
    made.source = bytes(random, w.n * made.row_bytes);
    if (bits % 8)  // the last byte of a row holds nothing else
        for (int64_t r = 1; r <= w.n; ++r)
            made.source[r * made.row_bytes - 1] &= (uint8_t)((1 << bits % 8) - 1);
}

inline Packed affine(Random& random, int64_t n, int64_t k) {
    Packed made = shaped(n, k);
    Weight& w = made.w;
    w.bits = (int32_t)random.between(2, 8);
    const bool table = random.below(3) == 0;
    if (table) {
        constexpr int32_t widths[] = {1, 3, 4};
        w.bits = widths[random.below(3)];
    }
    w.flip = w.bits == 8 && random.below(2);
    w.zero = (float)random.below(1 << w.bits);
    const int64_t group = random.below(4) ? 16 * random.between(1, 8) : k;
    w.groups = (k + group - 1) / group;
    if (group >= k) {
        w.subgroups_per_group = (int32_t)w.k_blocks;
    } else {
        w.subgroup = group % kTileDepth ? 16 : 32;
        w.subgroups_per_group = (int32_t)(group / w.subgroup);
    }
    w.scale_type = (int32_t)random.below(3);
    w.minus_type = (int32_t)random.below(3);
    const int64_t scales = w.row_blocks * w.groups * kTileRows, kind = table ? 0 : random.below(3);
    if (table) {
        constexpr int32_t types[] = {kF16, kF32, kU8, kI8, kE4M3, kE8M0};
        tabulate(random, made);
        w.scale_type = types[random.below(6)];
        if (k % group == 0 && random.below(2)) {
            nest(random, made);
        } else if (random.below(2)) {  // a second level: one scale for the row, or one for 64 k
            const int64_t units = w.k_blocks * kTileDepth / w.subgroup;
            w.super_type = random.below(2) ? kF32 : kF16;
            w.subgroups_per_super = (int32_t)(random.below(2) ? units : 64 / w.subgroup);
            w.supers = (units + w.subgroups_per_super - 1) / w.subgroups_per_super;
            made.super_scale = elements(random, w.super_type, w.row_blocks * w.supers * kTileRows);
        }
    }
    made.scale = elements(random, w.scale_type, scales);
    if (kind == 1) made.minus = elements(random, w.minus_type, scales);
    if (kind == 2) {
        constexpr int32_t types[] = {kU2, kU4, kU8, kF16};
        w.zeros_type = types[random.below(4)];
        const int64_t parts = w.zeros_type == kU2 ? 4 : w.zeros_type == kU4 ? 2 : 1;
        made.zeros = parts > 1 ? bytes(random, scales / parts) : elements(random, w.zeros_type, scales);
    }
    fill(random, made);
    return made;
}

// Every k has its own scales, repeated after some rows; multiplied as floats only.
inline Packed columns(Random& random, int64_t n, int64_t k) {
    Packed made = shaped(n, k);
    Weight& w = made.w;
    w.bits = (int32_t)random.between(2, 8);
    w.subgroup = 1;
    w.groups = k;
    w.scale_rows = random.between(1, n);
    w.scale_type = (int32_t)random.below(3);
    w.zeros_type = random.below(2) ? kU8 : kF16;
    made.scale = elements(random, w.scale_type, k * w.scale_rows);
    if (random.below(2)) made.zeros = elements(random, w.zeros_type, k * w.scale_rows);
    fill(random, made);
    return made;
}

// ggml's blocks: offsets of the float16 scale and minimum; -1: none.
struct BlockKind {
    int source, bits, elements, nbytes, subgroup, scale, minus;
};

constexpr BlockKind kBlockKinds[] = {
    {kQ2K, 2, 256, 84, 16, 80, 82},  {kQ3K, 3, 256, 110, 16, 108, -1},
    {kQ4K, 4, 256, 144, 32, 0, 2},   {kQ5K, 5, 256, 176, 32, 0, 2},
    {kQ6K, 6, 256, 210, 16, 208, -1}, {kQ4_0, 4, 32, 18, 32, 0, -1},
    {kQ4_1, 4, 32, 20, 32, 0, 2},    {kQ5_0, 5, 32, 22, 32, 0, -1},
    {kQ5_1, 5, 32, 24, 32, 0, 2},    {kQ8_0, 8, 32, 34, 32, 0, -1},
    {kIQ4NL, 4, 32, 18, 32, 0, -1},  {kMXFP4, 4, 32, 17, 32, 0, -1},
    {kIQ4XS, 4, 256, 136, 32, 0, -1},
};

// One to `most` blocks wide. Packing fills the scales.
inline Packed blocks(Random& random, const BlockKind& kind, int64_t n, int64_t most) {
    const int64_t wide = random.between(1, most), k = wide * kind.elements;
    Packed made = shaped(n, k);
    Weight& w = made.w;
    w.source = kind.source;
    w.bits = kind.bits;
    w.flip = kind.source == kQ8_0;
    w.zero = kind.minus < 0 ? (float)(1 << (kind.bits - 1)) : 0.0f;
    if (kind.source >= kIQ4NL) tabulate(random, made);
    w.subgroup = kind.subgroup;
    w.groups = k / kind.subgroup;
    made.codes = Buffer<uint8_t>(w.row_blocks * w.k_blocks * w.bits * 64);
    const int64_t scales = w.row_blocks * w.groups * kTileRows;
    if (kind.elements == 32) {
        w.scale_type = kind.source == kMXFP4 ? kE8M0 : kF16;
        w.minus_type = kF16;
        made.scale = Buffer<uint8_t>(2 * scales);
        if (kind.minus >= 0) made.minus = Buffer<uint8_t>(2 * scales);
    } else {
        w.supers = wide;
        w.subgroups_per_super = kind.elements / kind.subgroup;
        w.scale_type = kind.source == kQ2K ? kLow4 : kind.minus < 0 ? kI8 : kU8;
        if (kind.source == kQ3K) w.scale_type = kI6;
        w.minus_type = kind.source == kQ2K ? kHigh4 : kU8;
        made.scale = Buffer<uint8_t>(w.scale_type == kI6 ? scales / 16 * 12 : scales);
        if (kind.minus >= 0 && kind.source != kQ2K) made.minus = Buffer<uint8_t>(scales);
        made.super_scale = Buffer<uint8_t>(2 * w.row_blocks * wide * kTileRows);
        if (kind.minus >= 0) made.super_minus = Buffer<uint8_t>(made.super_scale.size());
    }
    made.row_bytes = wide * kind.nbytes;
    made.source = bytes(random, n * made.row_bytes);
    for (int64_t at = 0; at < made.source.size(); at += kind.nbytes) {  // below 1: never NaN
        if (kind.source == kMXFP4) made.source[at] &= 0x7f;
        else made.source[at + kind.scale + 1] &= 0x3b;
        if (kind.minus >= 0) made.source[at + kind.minus + 1] &= 0x3b;
    }
    return made;
}

// Plain values; 8-bit floats with scales of their own or without.
inline Packed dense(Random& random, int64_t n, int64_t k) {
    constexpr int types[] = {kF16, kBF16, kF32, kE4M3, kE5M2};
    Packed made = shaped(n, k);
    Weight& w = made.w;
    w.dense = 1;
    w.scale_type = types[random.below(5)];
    if (w.scale_type >= kE4M3 && random.below(3)) {
        w.subgroup = 1;
        w.subgroups_per_group = (int32_t)random.between(1, k);
        w.groups = (k + w.subgroups_per_group - 1) / w.subgroups_per_group;
        w.super_type = kF32;
        w.scale_blocks = (int32_t)random.between(1, 3);
        const int64_t high = (w.row_blocks + w.scale_blocks - 1) / w.scale_blocks;
        made.scale = elements(random, kF32, high * w.groups * kTileRows);
    }
    made.codes = Buffer<uint8_t>(w.row_blocks * kTileRows * k * size_of(w.scale_type));
    made.source = elements(random, w.scale_type, n * k);
    return made;
}

// Packs a weight into `made`, and again from what unpacking gives.
void check_packing(TestRuntime& runtime, Packed& made);
// Both runtimes run `call(runtime, output)`, each with an output of `size` floats; the results are
// equal.
void both(TestRuntime& one, TestRuntime& many, int64_t size,
          const std::function<void(TestRuntime&, float*)>& call);

// The parts. Each compares the results of one thread with those of many, or with others that must have the
// same bits.
void weights(Random& random, TestRuntime& one, TestRuntime& many);
uint64_t products_hash(int level);
void rowwise(Random& random, TestRuntime& one, TestRuntime& many);
void sampling(Random& random, TestRuntime& one, TestRuntime& many);
void states(Random& random, TestRuntime& one, TestRuntime& many);
void state_gates(Random& random, TestRuntime& one, TestRuntime& many);
void attention(Random& random, TestRuntime& one, TestRuntime& many);
void program(Random& random, TestRuntime& one, TestRuntime& many);
void experts(Random& random, TestRuntime& one, TestRuntime& many);
void adapters(Random& random, TestRuntime& one, TestRuntime& many);
void ranks(int size, int level);
void pipeline(int stages, int level);
