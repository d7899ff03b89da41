#include "levels.hpp"

extern "C" {
extern const KernelTable kernels_portable;
extern const KernelTable kernels_avx2;
extern const KernelTable kernels_avx2_vnni;
extern const KernelTable kernels_avx512_vnni;
extern const KernelTable kernels_neon;
extern const KernelTable kernels_neon_dotprod;
extern const KernelTable kernels_neon_i8mm;
}

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
