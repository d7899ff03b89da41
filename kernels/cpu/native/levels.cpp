#include "levels.hpp"

extern "C" {
extern const KernelTable kernels_portable;
#if defined(WITH_AVX2)
extern const KernelTable kernels_avx2;
#endif
#if defined(WITH_AVX2_VNNI)
extern const KernelTable kernels_avx2_vnni;
#endif
#if defined(WITH_AVX512_VNNI)
extern const KernelTable kernels_avx512_vnni;
#endif
#if defined(WITH_NEON)
extern const KernelTable kernels_neon;
#endif
#if defined(WITH_NEON_DOTPROD)
extern const KernelTable kernels_neon_dotprod;
#endif
#if defined(WITH_NEON_I8MM)
extern const KernelTable kernels_neon_i8mm;
#endif
}

#if defined(__x86_64__)
#include <cpuid.h>

namespace {

struct Registers {
    unsigned a, b, c, d;
};

Registers cpuid(unsigned leaf, unsigned sub) {
    Registers r = {0, 0, 0, 0};
    if (!__get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d)) r = {0, 0, 0, 0};
    return r;
}

// Register state the operating system saves (XCR0). The CPU having AVX is not enough.
unsigned saved_state() {
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

}  // namespace
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

namespace {

// Bits of AT_HWCAP and AT_HWCAP2 (asm/hwcap.h; older headers lack the second).
bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }
bool has_i8mm() { return has_dotprod() && getauxval(AT_HWCAP2) >> 13 & 1; }

}  // namespace
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

namespace {

bool has(const char* feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value;
}

bool has_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has_dotprod() && has("hw.optional.arm.FEAT_I8MM"); }

}  // namespace
#elif defined(__aarch64__)
namespace {

bool has_dotprod() { return false; }
bool has_i8mm() { return false; }

}  // namespace
#endif

int available_levels() {
    int levels = 1 << kPortable;
#if defined(__x86_64__)
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0), seven_one = cpuid(7, 1);
    if (!(one.c >> 27 & 1)) return levels;  // OSXSAVE: xgetbv exists
    const unsigned state = saved_state();
    const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6;
    // FMA, AVX, F16C; AVX2
    const bool avx2 = ymm && one.c >> 12 & 1 && one.c >> 28 & 1 && one.c >> 29 & 1 &&
                      seven.b >> 5 & 1;
    // AVX512 F, DQ, BW, VL; VNNI
    const bool avx512 = avx2 && zmm && seven.b >> 16 & 1 && seven.b >> 17 & 1 &&
                        seven.b >> 30 & 1 && seven.b >> 31 & 1 && seven.c >> 11 & 1;
    const bool avx_vnni = avx2 && seven_one.a >> 4 & 1;
    (void)avx_vnni;
    (void)avx512;
    (void)avx2;
#if defined(WITH_AVX2)
    if (avx2) levels |= 1 << kAvx2;
#endif
#if defined(WITH_AVX2_VNNI)
    if (avx_vnni) levels |= 1 << kAvx2Vnni;
#endif
#if defined(WITH_AVX512_VNNI)
    if (avx512) levels |= 1 << kAvx512Vnni;
#endif
#endif
#if defined(WITH_NEON)
    levels |= 1 << kNeon;
#endif
#if defined(WITH_NEON_DOTPROD)
    if (has_dotprod()) levels |= 1 << kNeonDotprod;
#endif
#if defined(WITH_NEON_I8MM)
    if (has_i8mm()) levels |= 1 << kNeonI8mm;
#endif
    return levels;
}

int best_level() {
    const int levels = available_levels();
    int best = kPortable;
    for (int level = kPortable; level < kLevelCount; ++level)
        if (levels >> level & 1) best = level;
    return best;
}

const KernelTable* kernel_table(int level) {
    switch (level) {
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
        default: return &kernels_portable;
    }
}
