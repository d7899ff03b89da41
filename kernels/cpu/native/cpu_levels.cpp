#include "levels.hpp"

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

bool first_cache_prefetch() {
#if defined(__x86_64__)
    static const bool found = [] {
        const Registers vendor = cpuid(0, 0);
        const bool amd = vendor.b == 0x68747541 && vendor.d == 0x69746e65 && vendor.c == 0x444d4163;
        const unsigned one = cpuid(1, 0).a;
        return amd && (one >> 8 & 15) + (one >> 20 & 255) >= 0x1a;
    }();
    return found;
#else
    return false;
#endif
}

int cpu_levels() {
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
    if (avx2) levels |= 1 << kAvx2;
    if (avx2 && seven_one.a >> 4 & 1) levels |= 1 << kAvx2Vnni;
    if (avx512) levels |= 1 << kAvx512Vnni;
    if (avx512 && seven_one.a >> 5 & 1) levels |= 1 << kAvx512Bf16;
#elif defined(__aarch64__)
    levels |= 1 << kNeon;
    if (has_dotprod()) levels |= 1 << kNeonDotprod;
    if (has_i8mm()) levels |= 1 << kNeonI8mm;
#endif
    return levels;
}
