// `operator new` and `delete` for builds that link a C++ library of their own: that one offers its operators to the
// whole process, and the linker of such builds cannot hide them. Compiled with them hidden (.ci/zig.cmake), all of them,
// so that the library's are not linked. Its own functions use these too.
#include <stdlib.h>

#include <new>

namespace {

constexpr size_t kUsual = 16;  // alignment of malloc

void* allocated(size_t size, size_t alignment = kUsual) {
    if (alignment <= kUsual) return malloc(size ? size : 1);
    void* found = nullptr;
    return posix_memalign(&found, alignment, size ? size : 1) ? nullptr : found;
}

void* checked(void* found) {
    if (!found) throw std::bad_alloc();
    return found;
}

}  // namespace

using Aligned = std::align_val_t;
using Quiet = std::nothrow_t;

void* operator new(size_t size) { return checked(allocated(size)); }
void* operator new[](size_t size) { return checked(allocated(size)); }
void* operator new(size_t size, Aligned to) { return checked(allocated(size, (size_t)to)); }
void* operator new[](size_t size, Aligned to) { return checked(allocated(size, (size_t)to)); }
void* operator new(size_t size, const Quiet&) noexcept { return allocated(size); }
void* operator new[](size_t size, const Quiet&) noexcept { return allocated(size); }
void* operator new(size_t size, Aligned to, const Quiet&) noexcept { return allocated(size, (size_t)to); }
void* operator new[](size_t size, Aligned to, const Quiet&) noexcept { return allocated(size, (size_t)to); }
void operator delete(void* at) noexcept { free(at); }
void operator delete[](void* at) noexcept { free(at); }
void operator delete(void* at, size_t) noexcept { free(at); }
void operator delete[](void* at, size_t) noexcept { free(at); }
void operator delete(void* at, Aligned) noexcept { free(at); }
void operator delete[](void* at, Aligned) noexcept { free(at); }
void operator delete(void* at, size_t, Aligned) noexcept { free(at); }
void operator delete[](void* at, size_t, Aligned) noexcept { free(at); }
void operator delete(void* at, const Quiet&) noexcept { free(at); }
void operator delete[](void* at, const Quiet&) noexcept { free(at); }
void operator delete(void* at, Aligned, const Quiet&) noexcept { free(at); }
void operator delete[](void* at, Aligned, const Quiet&) noexcept { free(at); }
