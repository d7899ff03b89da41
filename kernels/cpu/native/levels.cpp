#include "levels.hpp"

extern "C" {
extern const KernelTable kernels_portable;
extern const KernelTable kernels_avx2;
extern const KernelTable kernels_avx2_vnni;
extern const KernelTable kernels_avx512_vnni;
void linear_bf16_avx512_bf16(const LinearArgs* a, const ItemRange* strips, uint8_t* scratch);
void attention_bf16_avx512_bf16(const AttentionArgs* a, const ItemRange* items, uint8_t* scratch);
extern const KernelTable kernels_neon;
extern const KernelTable kernels_neon_dotprod;
extern const KernelTable kernels_neon_i8mm;
}

#if defined(WITH_AVX512_BF16)
namespace {

// The kernels of AVX-512 with VNNI, and products in bfloat16 besides.
const KernelTable* bf16_table() {
    static const KernelTable table = [] {
        KernelTable found = kernels_avx512_vnni;
        found.linear_bf16 = linear_bf16_avx512_bf16;
        found.attention_bf16 = attention_bf16_avx512_bf16;
        return found;
    }();
    return &table;
}

}  // namespace
#endif

// CMakeLists.txt defines WITH_ for each level that this library was compiled for.
const KernelTable* kernel_table(int level) {
    switch (level) {
#if defined(WITH_PORTABLE)
        case kPortable: return &kernels_portable;
#endif
#if defined(WITH_AVX2)
        case kAvx2: return &kernels_avx2;
#endif
#if defined(WITH_AVX2_VNNI)
        case kAvx2Vnni: return &kernels_avx2_vnni;
#endif
#if defined(WITH_AVX512_VNNI)
        case kAvx512Vnni: return &kernels_avx512_vnni;
#endif
#if defined(WITH_AVX512_BF16)
        case kAvx512Bf16: return bf16_table();
#endif
#if defined(WITH_NEON)
        case kNeon: return &kernels_neon;
#endif
#if defined(WITH_NEON_DOTPROD)
        case kNeonDotprod: return &kernels_neon_dotprod;
#endif
#if defined(WITH_NEON_I8MM)
        case kNeonI8mm: return &kernels_neon_i8mm;
#endif
        default: return nullptr;
    }
}

int available_levels() {
    int built = 0;
    for (int level = kPortable; level < kLevelCount; ++level)
        if (kernel_table(level) != nullptr) built |= 1 << level;
    return built & cpu_levels();
}

int best_level() {
    const int levels = available_levels();
    int best = kPortable;
    for (int level = kPortable; level < kLevelCount; ++level)
        if (levels >> level & 1) best = level;
    return best;
}
