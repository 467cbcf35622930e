// Two operations of a GPT on a CPU: causal attention and GELU. Tensors are fp32 and contiguous.
// oelm/models/compiled.py calls the functions at the end.
//
// Attention: torch's kernel is made for rows too long for the cache. Here, all data of a head stays in the cache, and
// masked scores are not computed. Rotary positions are included.
// q, k, v, y and their gradients are (B, T, nh, hs); log_sum is (B, nh, T). `rotation` is the table of `rotary_table()`
// in gpt.py, (T, 3, nh * hs), or null for no rotation.
//
// GELU: the value and its derivative share the exponential function, so they are computed together.
//
// The threads are those of torch's OpenMP library. A second set of threads would compete with them for the cores.

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr float MASKED = -INFINITY;
constexpr int CACHE_LINE = 64;  // bytes; vectors that cross two lines are slow

// The instruction sets for which the code is compiled: the floats of a vector register, and how many queries (ROWS) and
// floats (LANES) are processed together, in several registers. LANES is a multiple of ROWS.
#if defined(__x86_64__)
struct Avx2 {
    static constexpr int FLOATS = 8, ROWS = 4, LANES = 16;
};
struct Avx512 {
    static constexpr int FLOATS = 16, ROWS = 8, LANES = 32;
};
#else
struct Plain {
    static constexpr int FLOATS = 4, ROWS = 4, LANES = 16;
};
#endif

// A vector of F floats. Compilers make slow code for vectors larger than a register.
template <int F>
struct Of {
    typedef float Vec __attribute__((vector_size(F * sizeof(float))));  // GCC ignores the attribute after `using`
};

// exp(x) for x <= 0, with a relative error below 2e-7 (the polynomial of the Cephes library); 0 below -87, so that
// no denormal numbers arise, which are slow. NaN stays NaN.
INLINE float exp_of(float x) {
    float bounded = x < -87.0f ? -87.0f : x;
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the lowest bits
    float shifted = bounded * 1.44269504088896341f + SHIFT;
    float n = shifted - SHIFT;
    float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;  // of the float 2^n
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

template <int F>
INLINE typename Of<F>::Vec load(const float* from) {
    typename Of<F>::Vec x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

template <int F>
INLINE void store(float* to, typename Of<F>::Vec x) {
    std::memcpy(to, &x, sizeof x);
}

// y (ROWS, n) = x (ROWS, C) m (C, n); the rows of y and m are `stride` floats apart, and LANES divides n.
template <class Set, int C>
INLINE void multiply_wide(float* y, const float* x, const float* m, int64_t stride, int64_t n) {
    constexpr int F = Set::FLOATS, W = Set::LANES / F;
    using Vec = typename Of<F>::Vec;
    for (int64_t j = 0; j < n; j += Set::LANES) {
        Vec sum[Set::ROWS][W] = {};
        for (int c = 0; c < C; ++c)
            for (int l = 0; l < W; ++l) {
                Vec column = load<F>(m + c * stride + j + F * l);
                for (int r = 0; r < Set::ROWS; ++r) sum[r][l] += x[r * C + c] * column;
            }
        for (int r = 0; r < Set::ROWS; ++r)
            for (int l = 0; l < W; ++l) store<F>(y + r * stride + j + F * l, sum[r][l]);
    }
}

// y (ROWS, C) = p (ROWS, n) x (n, C); the rows of p are `stride` floats apart.
template <class Set, int C>
INLINE void multiply_narrow(float* y, const float* p, const float* x, int64_t stride, int64_t n) {
    constexpr int F = std::min(C, Set::FLOATS), W = std::min(C, Set::LANES) / F;
    using Vec = typename Of<F>::Vec;
    for (int c = 0; c < C; c += F * W) {
        Vec sum[Set::ROWS][W] = {};
        for (int64_t j = 0; j < n; ++j)
            for (int l = 0; l < W; ++l) {
                Vec row = load<F>(x + j * C + c + F * l);
                for (int r = 0; r < Set::ROWS; ++r) sum[r][l] += p[r * stride + j] * row;
            }
        for (int r = 0; r < Set::ROWS; ++r)
            for (int l = 0; l < W; ++l) store<F>(y + r * C + c + F * l, sum[r][l]);
    }
}

// y (n, C) += p^T (n, ROWS) x (ROWS, C); the rows of p are `stride` floats apart.
template <class Set, int C>
INLINE void add_transposed(float* y, const float* p, const float* x, int64_t stride, int64_t n) {
    constexpr int F = std::min(C, Set::FLOATS), W = std::min(C, Set::LANES) / F;
    using Vec = typename Of<F>::Vec;
    for (int c = 0; c < C; c += F * W) {
        Vec row[Set::ROWS][W];
        for (int r = 0; r < Set::ROWS; ++r)
            for (int l = 0; l < W; ++l) row[r][l] = load<F>(x + r * C + c + F * l);
        for (int64_t j = 0; j < n; ++j) {
            Vec sum[W];
            for (int l = 0; l < W; ++l) sum[l] = load<F>(y + j * C + c + F * l);
            for (int r = 0; r < Set::ROWS; ++r)
                for (int l = 0; l < W; ++l) sum[l] += p[r * stride + j] * row[r][l];
            for (int l = 0; l < W; ++l) store<F>(y + j * C + c + F * l, sum[l]);
        }
    }
}

template <class Set>
INLINE int64_t padded(int64_t tokens) {
    return (tokens + Set::LANES - 1) / Set::LANES * Set::LANES;
}

struct Shape {
    int64_t rows, tokens, heads, size;  // B, T, nh, hs
    int64_t threads, set;               // `set`: the instruction set, as oelm_instruction_set() returns it
    int64_t width() const { return heads * size; }
};

// Copy one head, (T, C) with rows `width` floats apart, to contiguous rows, times `scale`; rotate it by its positions.
template <int C>
INLINE void gather(float* __restrict to, const float* __restrict from, const float* __restrict rotation,
                   const Shape& shape, float scale) {
    constexpr int H = C / 2;
    int64_t width = shape.width();
    for (int64_t t = 0; t < shape.tokens; ++t, from += width, to += C) {
        if (!rotation) {
            for (int c = 0; c < C; ++c) to[c] = from[c] * scale;
            continue;
        }
        const float *cosine = rotation + 3 * t * width, *sine = cosine + 2 * width + H;
#pragma omp simd
        for (int c = 0; c < H; ++c) {
            to[c] = (from[c] * cosine[c] - from[c + H] * sine[c]) * scale;
            to[c + H] = (from[c + H] * cosine[c] + from[c] * sine[c]) * scale;
        }
    }
}

// The inverse of `gather` for gradients: rotate back, and copy to rows that are `width` floats apart.
template <int C>
INLINE void scatter(float* __restrict to, const float* __restrict from, const float* __restrict rotation,
                    const Shape& shape, float scale) {
    constexpr int H = C / 2;
    int64_t width = shape.width();
    for (int64_t t = 0; t < shape.tokens; ++t, from += C, to += width) {
        if (!rotation) {
            for (int c = 0; c < C; ++c) to[c] = from[c] * scale;
            continue;
        }
        const float *cosine = rotation + 3 * t * width, *sine = cosine + 2 * width + H;
#pragma omp simd
        for (int c = 0; c < H; ++c) {
            to[c] = (from[c] * cosine[c] + from[c + H] * sine[c]) * scale;
            to[c + H] = (from[c + H] * cosine[c] - from[c] * sine[c]) * scale;
        }
    }
}

// to (C, P) = transpose of from (P, C)
template <int C>
INLINE void transpose(float* __restrict to, const float* __restrict from, int64_t P) {
    for (int64_t t = 0; t < P; ++t)
        for (int c = 0; c < C; ++c) to[c * P + t] = from[t * C + c];
}

struct Forward {
    const float *q, *k, *v, *rotation;
    float *y, *log_sum;
};

// In the two functions below, `memory` holds the data of one head: tensors (P, C) with the tokens padded to P,
// their transposes `kt` and `vt` (C, P), and for ROWS queries the scores and then probabilities `s` (ROWS, P).
template <class Set, int C>
INLINE void compute_head(const Forward& f, const Shape& shape, int64_t row, int64_t head, float* memory) {
    constexpr int ROWS = Set::ROWS;
    int64_t T = shape.tokens, P = padded<Set>(T), width = shape.width();
    int64_t offset = row * T * width + head * C;
    float *q = memory, *k = q + P * C, *kt = k + P * C, *v = kt + P * C, *y = v + P * C, *s = y + P * C;
    gather<C>(q, f.q + offset, f.rotation, shape, 1 / std::sqrt(static_cast<float>(C)));
    gather<C>(k, f.k + offset, f.rotation, shape, 1);
    gather<C>(v, f.v + offset, nullptr, shape, 1);
    transpose<C>(kt, k, P);
    float* log_sum = f.log_sum + (row * shape.heads + head) * T;
    for (int64_t i = 0; i < T; i += ROWS) {
        int64_t seen = i + ROWS, n = padded<Set>(seen);  // number of keys that these queries see, and with padding
        multiply_wide<Set, C>(s, q + i * C, kt, P, n);
        for (int r = 0; r < ROWS; ++r) {
            float *p = s + r * P, largest = MASKED, sum = 0;
            std::fill(p + i + r + 1, p + n, MASKED);
#pragma omp simd reduction(max : largest)
            for (int64_t j = 0; j < n; ++j) largest = p[j] > largest ? p[j] : largest;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < n; ++j) sum += p[j] = exp_of(p[j] - largest);
            float factor = 1 / sum;
#pragma omp simd
            for (int64_t j = 0; j < n; ++j) p[j] *= factor;
            if (i + r < T) log_sum[i + r] = largest + std::log(sum);
        }
        multiply_narrow<Set, C>(y + i * C, s, v, P, seen);
    }
    scatter<C>(f.y + offset, y, nullptr, shape, 1);
}

// As in FlashAttention, the probabilities are computed again from q, k and log_sum. `delta` (P) is the inner product of
// each token's output and its gradient.
struct Backward {
    const float *q, *k, *v, *rotation, *y, *log_sum, *grad_y;
    float *grad_q, *grad_k, *grad_v;
};

template <class Set, int C>
INLINE void compute_head(const Backward& f, const Shape& shape, int64_t row, int64_t head, float* memory) {
    constexpr int ROWS = Set::ROWS;
    int64_t T = shape.tokens, P = padded<Set>(T), width = shape.width();
    int64_t offset = row * T * width + head * C;
    float scale = 1 / std::sqrt(static_cast<float>(C));
    float *q = memory, *k = q + P * C, *v = k + P * C, *g = v + P * C;
    float *kt = g + P * C, *vt = kt + P * C, *dq = vt + P * C, *dk = dq + P * C, *dv = dk + P * C;
    float *s = dv + P * C, *ds = s + ROWS * P, *delta = ds + ROWS * P;
    gather<C>(q, f.q + offset, f.rotation, shape, scale);
    gather<C>(k, f.k + offset, f.rotation, shape, 1);
    gather<C>(v, f.v + offset, nullptr, shape, 1);
    gather<C>(g, f.grad_y + offset, nullptr, shape, 1);
    for (int64_t t = 0; t < T; ++t) {
        const float* y = f.y + offset + t * width;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < C; ++c) sum += g[t * C + c] * y[c];
        delta[t] = sum;
    }
    transpose<C>(kt, k, P);
    transpose<C>(vt, v, P);
    std::fill(dk, dv + P * C, 0.0f);
    const float* log_sum = f.log_sum + (row * shape.heads + head) * T;
    for (int64_t i = 0; i < T; i += ROWS) {
        int64_t seen = i + ROWS, n = padded<Set>(seen);
        multiply_wide<Set, C>(s, q + i * C, kt, P, n);
        multiply_wide<Set, C>(ds, g + i * C, vt, P, n);
        for (int r = 0; r < ROWS; ++r) {
            float *p = s + r * P, *dp = ds + r * P;
            float shift = i + r < T ? log_sum[i + r] : 0, inner = delta[i + r];
            std::fill(p + i + r + 1, p + n, MASKED);
#pragma omp simd
            for (int64_t j = 0; j < n; ++j) {
                p[j] = exp_of(p[j] - shift);
                dp[j] = p[j] * (dp[j] - inner);
            }
        }
        multiply_narrow<Set, C>(dq + i * C, ds, k, P, seen);
        add_transposed<Set, C>(dk, ds, q + i * C, P, seen);
        add_transposed<Set, C>(dv, s, g + i * C, P, seen);
    }
    scatter<C>(f.grad_q + offset, dq, f.rotation, shape, scale);
    scatter<C>(f.grad_k + offset, dk, f.rotation, shape, 1);
    scatter<C>(f.grad_v + offset, dv, nullptr, shape, 1);
}

template <class Set, class Pass>
INLINE void one_head(const Pass& pass, const Shape& shape, int64_t row, int64_t head, float* memory) {
    if (shape.size == 8) compute_head<Set, 8>(pass, shape, row, head, memory);
    if (shape.size == 16) compute_head<Set, 16>(pass, shape, row, head, memory);
    if (shape.size == 32) compute_head<Set, 32>(pass, shape, row, head, memory);
    if (shape.size == 64) compute_head<Set, 64>(pass, shape, row, head, memory);
}

// Work that several threads share: each takes the next part until none is left.
template <class Pass>
struct Work {
    const Pass& pass;
    const Shape& shape;
    std::atomic<int64_t> next{0};
};

template <class Set, class Pass>
INLINE void take_parts(Work<Pass>& work) {
    const Shape& shape = work.shape;
    int64_t floats = (9 * shape.size + 2 * Set::ROWS + 1) * padded<Set>(shape.tokens);
    std::vector<float> memory(floats + CACHE_LINE);  // padding tokens stay 0
    uintptr_t lines = (reinterpret_cast<uintptr_t>(memory.data()) + CACHE_LINE - 1) / CACHE_LINE;
    float* aligned = reinterpret_cast<float*>(lines * CACHE_LINE);
    for (int64_t part; (part = work.next++) < shape.rows * shape.heads;)
        one_head<Set>(work.pass, shape, part / shape.heads, part % shape.heads, aligned);
}

// y = gelu(x), and its derivative, times the gradient of y if `grad_y` is not null.
struct Gelu {
    const float *x, *grad_y;
    float *y, *derivative;
};

constexpr int64_t GELU_PART = 1 << 14;  // elements that a thread takes at once

// gelu(x) = x Phi(x) with the normal distribution Phi; the derivative is Phi(x) + x phi(x) with the density phi.
//
// Phi(-|x|) = erfc(a) / 2 with a = |x| / sqrt(2), and erfc(a) = exp(-a^2) t p(t) with t = 1 / (1 + 0.4 a) and a polynomial
// p that was fitted to it (as in Abramowitz and Stegun 7.1.26). The error of erfc is below 3e-8, half the rounding error
// of 1 - erfc in fp32.
template <bool GRADIENT>
INLINE void gelu(const Gelu& pass, int64_t begin, int64_t end) {
    const float *x = pass.x, *grad_y = pass.grad_y;
    float *y = pass.y, *derivative = pass.derivative;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
        float a = std::fabs(x[i]) * 0.70710678f, t = 1 / (1 + 0.4f * a), e = exp_of(-a * a);
        float p = -0.2002567817f;
        p = p * t + 0.7091375666f;
        p = p * t - 0.3708925712f;
        p = p * t + 0.4682621633f;
        p = p * t + 0.1618282170f;
        p = p * t + 0.2319213786f;
        float tail = 0.5f * e * t * p;
        float phi = x[i] < 0 ? tail : 1 - tail;
        float slope = phi + x[i] * (0.39894228f * e);
        derivative[i] = GRADIENT ? slope * grad_y[i] : slope;
        y[i] = x[i] * phi;
    }
}

template <class Set>
INLINE void take_parts(Work<Gelu>& work) {
    int64_t elements = work.shape.rows;
    for (int64_t begin; (begin = GELU_PART * work.next++) < elements;) {
        int64_t end = std::min(begin + GELU_PART, elements);
        if (work.pass.grad_y) gelu<true>(work.pass, begin, end);
        else gelu<false>(work.pass, begin, end);
    }
}

using Start = void (*)(void (*)(void*), void*, unsigned, unsigned);

// GOMP_parallel of the OpenMP library that torch has loaded: calls a function on several threads. Null if there is none.
Start openmp() {
    static const Start found = reinterpret_cast<Start>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return found;
}

#if defined(__x86_64__)
template <class Pass>
__attribute__((target("avx2,fma"))) void with_avx2(void* work) {
    take_parts<Avx2>(*static_cast<Work<Pass>*>(work));
}

template <class Pass>
__attribute__((target("avx512f,avx512dq,avx512vl,fma"))) void with_avx512(void* work) {
    take_parts<Avx512>(*static_cast<Work<Pass>*>(work));
}
#else
template <class Pass>
void plain(void* work) {
    take_parts<Plain>(*static_cast<Work<Pass>*>(work));
}
#endif

template <class Pass>
void run(const Pass& pass, const Shape& shape) {
    Work<Pass> work{pass, shape};
#if defined(__x86_64__)
    void (*compute)(void*) = shape.set == 512 ? with_avx512<Pass> : with_avx2<Pass>;
#else
    void (*compute)(void*) = plain<Pass>;
#endif
    if (shape.threads > 1 && openmp()) openmp()(compute, &work, static_cast<unsigned>(shape.threads), 0);
    else compute(&work);
}

}  // namespace

// Return the best instruction set of this CPU for the functions below: 512 (AVX-512), 256 (AVX2), 128 (CPUs other than x86),
// or 0 if this CPU cannot run them.
extern "C" int oelm_instruction_set() {
#if defined(__x86_64__)
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx2 && avx512 ? 512 : avx2 ? 256 : 0;
#else
    return 128;
#endif
}

// Return whether the functions below can use several threads.
extern "C" int oelm_has_threads() { return openmp() != nullptr; }

extern "C" void oelm_attention_forward(const Forward* pass, const Shape* shape) { run(*pass, *shape); }

extern "C" void oelm_attention_backward(const Backward* pass, const Shape* shape) { run(*pass, *shape); }

// `shape` has the number of elements as its rows.
extern "C" void oelm_gelu(const Gelu* pass, const Shape* shape) { run(*pass, *shape); }
