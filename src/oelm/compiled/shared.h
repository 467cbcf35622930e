// What kernels.cpp and products.cpp share: aligned memory, and the threads of torch.

#pragma once

#include <dlfcn.h>

#include <cstdint>

constexpr int CACHE_LINE = 64;  // bytes; vectors that cross two lines are slow

// The first address in `memory` at which a cache line begins.
inline float* aligned(float* memory) {
    uintptr_t lines = (reinterpret_cast<uintptr_t>(memory) + CACHE_LINE - 1) / CACHE_LINE;
    return reinterpret_cast<float*>(lines * CACHE_LINE);
}

using Start = void (*)(void (*)(void*), void*, unsigned, unsigned);

// GOMP_parallel of the OpenMP library that torch has loaded: calls a function on several threads. Null if there is none.
// A second set of threads would compete with torch's for the cores.
inline Start openmp() {
    static const Start found = reinterpret_cast<Start>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return found;
}

// Call compute(work) on `threads` threads at the same time.
inline void on_threads(void (*compute)(void*), void* work, int64_t threads) {
    if (threads > 1 && openmp()) openmp()(compute, work, static_cast<unsigned>(threads), 0);
    else compute(work);
}
