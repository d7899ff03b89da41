// What driver.cpp feeds the library with: memory without slack, random numbers and random weights.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <random>
#include <utility>

#include "levels.hpp"

extern "C" {
int embedlm_abi_version();
int embedlm_levels();
void* embedlm_engine_create(int threads, int level);
void embedlm_engine_destroy(void* handle);
int embedlm_engine_level(const void* engine);
int embedlm_pack(void* handle, const Weight* w, const void* source, int64_t row_bytes);
int embedlm_unpack(void* handle, const Weight* w, void* out, int64_t row_bytes);
int embedlm_run(void* handle, int kind, const void* args, int64_t rows);
void* embedlm_program_create();
void embedlm_program_destroy(void* program);
int embedlm_program_add(void* program, int kind, const void* args, int count, int64_t per);
int embedlm_program_run(void* handle, void* program, const int64_t* counts);
}

#define CHECK(condition)                                              \
    do {                                                              \
        if (!(condition)) {                                           \
            fprintf(stderr, "driver:%d: %s\n", __LINE__, #condition); \
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

// Memory exactly as large as asked for and not initialized: the tools see every byte that is touched
// outside of it and every one that is used before it was written.
template <typename T>
class Buffer {
public:
    explicit Buffer(int64_t size = 0) : size_(size) {
        void* data = nullptr;
        CHECK(posix_memalign(&data, 64, sizeof(T) * (size_t)(size ? size : 1)) == 0);
        data_ = static_cast<T*>(data);
    }
    Buffer(const Buffer& other) : Buffer(other.size_) {
        memcpy(data_, other.data_, sizeof(T) * (size_t)size_);
    }
    Buffer& operator=(Buffer other) {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~Buffer() { free(data_); }
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

inline int64_t size_of(int type) { return type == kF32 ? 4 : type == kU8 || type == kI8 ? 1 : 2; }

// Numbers of about 0.01 in a float type, any byte in the others.
inline Buffer<uint8_t> elements(Random& random, int type, int64_t count) {
    if (type == kU8 || type == kI8) return bytes(random, count);
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

class Engine {
public:
    Engine(int threads, int level) : handle(embedlm_engine_create(threads, level)) {
        CHECK(handle && embedlm_engine_level(handle) == level);
    }
    Engine(const Engine&) = delete;
    ~Engine() { embedlm_engine_destroy(handle); }
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
};

inline Packed shaped(int64_t n, int64_t k) {
    Packed made;
    made.w.n = n;
    made.w.k = k;
    made.w.row_blocks = (n + kRows - 1) / kRows;
    made.w.k_blocks = (k + kDepth - 1) / kDepth;
    made.w.unit = kDepth;
    made.w.group_units = made.w.super_units = 1;
    return made;
}

// Scales for what `made.w` says, and room for the codes.
inline void fill(Random& random, Packed& made, bool minus, bool zeros, bool supers) {
    Weight& w = made.w;
    made.codes = Buffer<uint8_t>(w.row_blocks * w.k_blocks * w.bits * 64);
    const int64_t scales = w.row_blocks * w.groups * kRows, over = w.row_blocks * w.supers * kRows;
    made.scale = elements(random, w.scale_type, scales);
    if (minus) made.minus = elements(random, w.minus_type, scales);
    if (zeros) made.zeros = bytes(random, scales);
    if (supers) made.super_scale = elements(random, kF16, over);
    if (supers && minus) made.super_minus = elements(random, kF16, over);
}

inline void point(Packed& made) {
    auto data = [](Buffer<uint8_t>& buffer) { return buffer.size() ? buffer.data() : nullptr; };
    made.w.codes = made.codes.data();
    made.w.scale = data(made.scale);
    made.w.minus = data(made.minus);
    made.w.zeros = data(made.zeros);
    made.w.super_scale = reinterpret_cast<uint16_t*>(data(made.super_scale));
    made.w.super_minus = reinterpret_cast<uint16_t*>(data(made.super_minus));
}

inline Packed affine(Random& random, int64_t n, int64_t k) {
    Packed made = shaped(n, k);
    Weight& w = made.w;
    w.bits = (int32_t)random.between(2, 8);
    w.flip = w.bits == 8 && random.below(2);
    w.zero = (float)random.below(1 << w.bits);
    const int64_t group = random.below(4) ? 16 * random.between(1, 8) : k;
    w.groups = (k + group - 1) / group;
    if (group >= k) {
        w.group_units = (int32_t)w.k_blocks;
    } else {
        w.unit = group % kDepth ? 16 : 32;
        w.group_units = (int32_t)(group / w.unit);
    }
    w.scale_type = (int32_t)random.below(3);
    w.minus_type = (int32_t)random.below(3);
    const int64_t kind = random.below(3);
    fill(random, made, kind == 1, kind == 2, false);
    made.row_bytes = (k * w.bits + 7) / 8;
    made.source = bytes(random, n * made.row_bytes);
    if (k * w.bits % 8)  // the last byte of a row holds nothing else
        for (int64_t r = 1; r <= n; ++r)
            made.source[r * made.row_bytes - 1] &= (uint8_t)((1 << k * w.bits % 8) - 1);
    return made;
}

inline Packed blocks(Random& random, int64_t n, int64_t k) {
    Packed made = shaped(n, k);
    Weight& w = made.w;
    w.source = (int32_t)random.between(kQ4K, kQ6K);
    w.bits = w.source + 3;
    w.unit = w.source == kQ6K ? 16 : 32;
    w.groups = k / w.unit;
    w.supers = k / 256;
    w.super_units = 256 / w.unit;
    w.scale_type = w.source == kQ6K ? kI8 : kU8;
    w.minus_type = kU8;
    fill(random, made, w.source != kQ6K, false, true);
    made.row_bytes = k / 256 * (w.source == kQ4K ? 144 : w.source == kQ5K ? 176 : 210);
    made.source = bytes(random, n * made.row_bytes);
    return made;
}

inline Packed dense(Random& random, int64_t n, int64_t k) {
    Packed made = shaped(n, k);
    made.w.dense = 1;
    made.w.scale_type = (int32_t)random.below(3);
    made.codes = Buffer<uint8_t>(made.w.row_blocks * kRows * k * size_of(made.w.scale_type));
    made.source = elements(random, made.w.scale_type, n * k);
    return made;
}
