// Included before everything else (CMakeLists.txt), so that a library that was built with a new compiler
// and C library also loads on the oldest ones that a manylinux_2_28 wheel may meet: glibc 2.28 and the
// libstdc++ of g++ 8. A linker takes the newest version of a symbol. This file names older versions of
// the same functions, and old_symbols.cpp defines the one that has none.
// tests/structure/test_wheels.py reads which versions the library needs.
#pragma once

#include <cstddef>  // defines __GLIBCXX__ and, on glibc, __GLIBC__

#if defined(__GLIBC__) && defined(__GLIBCXX__)

// The version of glibc 2.29 differs only in that it does not call a host's matherr().
#if defined(__x86_64__)
__asm__(".symver log, log@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver log, log@GLIBC_2.17");
#endif

// The version of g++ 12 differs only in that it is declared noexcept.
__asm__(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "
        "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");

// Since g++ 11, called by containers that are asked for more than there can be.
namespace std {
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length();
}

#endif
