// Waiting without sleeping.
#pragma once

#include <chrono>

// What a waiting thread spins before it sleeps: a decode step opens a phase every few microseconds, and
// a futex wake costs about 5 us.
constexpr std::chrono::microseconds kSpin(200);

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // `yield` does nothing on most cores; this waits some ten cycles
#endif
}

// Spins until `ready()` or until kSpin is over; reads the clock every 32 turns (about 1 us).
template <typename Ready>
bool spin_until(Ready ready) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    return false;
}
