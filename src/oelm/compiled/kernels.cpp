// Three operations of a GPT on a CPU: causal attention, GELU and cross-entropy. Tensors are fp32 and contiguous.
// oelm/compiled calls the functions at the end.
//
// Attention: torch's kernel is made for rows too long for the cache. Here, all data of a head (at most 2 MB) stays in it, and
// masked scores are not computed. Rotary positions are included. 16 queries are processed together, each in its own lane
// of the vector registers, so that sums and maxima over keys need no operations between lanes.
// q, k, v, y and their gradients are (B, T, nh, hs); log_sum is (B, nh, T). `rotation` is the table of `rotary_table()`
// in gpt.py, (T, 3, nh * hs), or null for no rotation.
//
// GELU: the value and its derivative share the exponential function, so they are computed together.
//
// Cross-entropy: the gradient of the logits replaces them in two passes, each through one row that stays in the cache.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "shared.h"

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr float MASKED = -INFINITY;
constexpr int QUERIES = 16;  // queries that are processed together

// The instruction sets for which the code is compiled: the floats of a vector register, and how many keys, columns and
// queries are held in registers in the three kinds of matrix products below.
#if defined(__x86_64__)
struct Avx2 {
    static constexpr int FLOATS = 8, KEYS = 4, COLUMNS = 4, HELD = 8;
};
struct Avx512 {
    static constexpr int FLOATS = 16, KEYS = 16, COLUMNS = 16, HELD = 16;
};
#else
struct Plain {
    static constexpr int FLOATS = 4, KEYS = 4, COLUMNS = 4, HELD = 16;
};
#endif

// Vectors of F numbers. Compilers make slow code for vectors larger than a register.
template <int F>
struct Of {
    typedef float Vec __attribute__((vector_size(F * sizeof(float))));  // GCC ignores the attribute after `using`
    typedef uint32_t Bits __attribute__((vector_size(F * sizeof(float))));
};

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

// exp(x) for x <= 0, with a relative error below 2e-7 (the polynomial of the Cephes library); 0 below -87, so that
// no denormal numbers arise, which are slow. NaN stays NaN. X is float or a vector, and Bits the integers of its size.
template <class X, class Bits>
INLINE X exp_of(X x) {
    const X zero = {}, lowest = zero - 87.0f;
    X bounded = x < lowest ? lowest : x;
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the lowest bits
    X shifted = bounded * 1.44269504088896341f + SHIFT;
    X n = shifted - SHIFT;
    X r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    X p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Bits bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;  // of the float 2^n
    X power;
    std::memcpy(&power, &bits, sizeof power);
    return x < lowest ? zero : p * power;
}

// s (n, QUERIES) = k (n, C) qt (C, QUERIES); KEYS divides n.
template <class Set, int C>
INLINE void multiply_keys(float* s, const float* k, const float* qt, int64_t n) {
    constexpr int F = Set::FLOATS, W = QUERIES / F, KEYS = Set::KEYS;
    for (int64_t j = 0; j < n; j += KEYS) {
        typename Of<F>::Vec sum[KEYS][W] = {};
        for (int c = 0; c < C; ++c)
            for (int l = 0; l < W; ++l) {
                auto queries = load<F>(qt + c * QUERIES + F * l);
                for (int i = 0; i < KEYS; ++i) sum[i][l] += k[(j + i) * C + c] * queries;
            }
        for (int i = 0; i < KEYS; ++i)
            for (int l = 0; l < W; ++l) store<F>(s + (j + i) * QUERIES + F * l, sum[i][l]);
    }
}

// yt (C, QUERIES) = v^T (C, n) p (n, QUERIES)
template <class Set, int C>
INLINE void sum_over_keys(float* yt, const float* v, const float* p, int64_t n) {
    constexpr int F = Set::FLOATS, W = QUERIES / F, COLUMNS = std::min(C, Set::COLUMNS);
    for (int c = 0; c < C; c += COLUMNS) {
        typename Of<F>::Vec sum[COLUMNS][W] = {};
        for (int64_t j = 0; j < n; ++j)
            for (int l = 0; l < W; ++l) {
                auto queries = load<F>(p + j * QUERIES + F * l);
                for (int i = 0; i < COLUMNS; ++i) sum[i][l] += v[j * C + c + i] * queries;
            }
        for (int i = 0; i < COLUMNS; ++i)
            for (int l = 0; l < W; ++l) store<F>(yt + (c + i) * QUERIES + F * l, sum[i][l]);
    }
}

// dk (n, C) += ds (n, QUERIES) q (QUERIES, C)
template <class Set, int C>
INLINE void add_over_queries(float* dk, const float* ds, const float* q, int64_t n) {
    constexpr int F = std::min(C, Set::FLOATS), HELD = Set::HELD;
    for (int r = 0; r < QUERIES; r += HELD)
        for (int c = 0; c < C; c += F) {
            typename Of<F>::Vec row[HELD];
            for (int i = 0; i < HELD; ++i) row[i] = load<F>(q + (r + i) * C + c);
            for (int64_t j = 0; j < n; ++j) {
                const float* weights = ds + j * QUERIES + r;
                auto even = load<F>(dk + j * C + c), odd = weights[1] * row[1];  // two sums, because one waits for itself
                for (int i = 0; i < HELD; i += 2) even += weights[i] * row[i];
                for (int i = 3; i < HELD; i += 2) odd += weights[i] * row[i];
                store<F>(dk + j * C + c, even + odd);
            }
        }
}

// to (C, QUERIES) = transpose of from (QUERIES, C)
template <int C>
INLINE void transpose(float* __restrict to, const float* __restrict from) {
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < QUERIES; ++r) to[c * QUERIES + r] = from[r * C + c];
}

// to (QUERIES, C) = transpose of from (C, QUERIES), times the `factor` of each query
template <int C>
INLINE void transpose_back(float* __restrict to, const float* __restrict from, const float* __restrict factor) {
    for (int r = 0; r < QUERIES; ++r)
        for (int c = 0; c < C; ++c) to[r * C + c] = from[c * QUERIES + r] * factor[r];
}

// Hide the keys after each of the queries i to i + QUERIES.
INLINE void hide_later_keys(float* s, int64_t i) {
    for (int later = 1; later < QUERIES; ++later) {
        float* scores = s + (i + later) * QUERIES;
#pragma omp simd
        for (int r = 0; r < QUERIES; ++r) scores[r] = r < later ? MASKED : scores[r];
    }
}

INLINE int64_t padded(int64_t tokens) { return (tokens + QUERIES - 1) / QUERIES * QUERIES; }

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

struct Forward {
    const float *q, *k, *v, *rotation;
    float *y, *log_sum;
};

// In the two functions below, `memory` holds the data of one head: tensors (P, C) with the tokens padded to P, and for the
// present queries their transposes (C, QUERIES) and the scores and then probabilities `s` (P, QUERIES).
template <class Set, int C>
INLINE void compute_head(const Forward& f, const Shape& shape, int64_t row, int64_t head, float* memory) {
    constexpr int F = Set::FLOATS, W = QUERIES / F;
    using Vec = typename Of<F>::Vec;
    using Bits = typename Of<F>::Bits;
    int64_t T = shape.tokens, P = padded(T), width = shape.width();
    int64_t offset = row * T * width + head * C;
    float *q = memory, *k = q + P * C, *v = k + P * C, *y = v + P * C;
    float *s = y + P * C, *qt = s + P * QUERIES, *yt = qt + C * QUERIES;
    alignas(CACHE_LINE) float largest[QUERIES], factor[QUERIES];
    gather<C>(q, f.q + offset, f.rotation, shape, 1 / std::sqrt(static_cast<float>(C)));
    gather<C>(k, f.k + offset, f.rotation, shape, 1);
    gather<C>(v, f.v + offset, nullptr, shape, 1);
    float* log_sum = f.log_sum + (row * shape.heads + head) * T;
    for (int64_t i = 0; i < T; i += QUERIES) {
        int64_t seen = i + QUERIES;  // number of keys that these queries see
        transpose<C>(qt, q + i * C);
        multiply_keys<Set, C>(s, k, qt, seen);
        hide_later_keys(s, i);
        for (int l = 0; l < W; ++l) {
            float* p = s + F * l;
            Vec most = load<F>(p), sum = {}, one = sum + 1.0f;
            for (int64_t j = 1; j < seen; ++j) {
                Vec score = load<F>(p + j * QUERIES);
                most = score > most ? score : most;
            }
            for (int64_t j = 0; j < seen; ++j) {
                Vec weight = exp_of<Vec, Bits>(load<F>(p + j * QUERIES) - most);
                sum += weight;
                store<F>(p + j * QUERIES, weight);
            }
            store<F>(largest + F * l, most);
            store<F>(factor + F * l, one / sum);
        }
        for (int r = 0; r < QUERIES && i + r < T; ++r) log_sum[i + r] = largest[r] - std::log(factor[r]);
        sum_over_keys<Set, C>(yt, v, s, seen);
        transpose_back<C>(y + i * C, yt, factor);
    }
    scatter<C>(f.y + offset, y, nullptr, shape, 1);
}

// As in FlashAttention, the probabilities are computed again from q, k and log_sum. `delta` is the inner product of each
// token's output and its gradient.
struct Backward {
    const float *q, *k, *v, *rotation, *y, *log_sum, *grad_y;
    float *grad_q, *grad_k, *grad_v;
};

template <class Set, int C>
INLINE void compute_head(const Backward& f, const Shape& shape, int64_t row, int64_t head, float* memory) {
    constexpr int F = Set::FLOATS, W = QUERIES / F;
    using Vec = typename Of<F>::Vec;
    using Bits = typename Of<F>::Bits;
    int64_t T = shape.tokens, P = padded(T), width = shape.width();
    int64_t offset = row * T * width + head * C;
    float scale = 1 / std::sqrt(static_cast<float>(C));
    float *q = memory, *k = q + P * C, *v = k + P * C, *g = v + P * C, *dq = g + P * C, *dk = dq + P * C, *dv = dk + P * C;
    float *s = dv + P * C, *ds = s + P * QUERIES, *qt = ds + P * QUERIES, *gt = qt + C * QUERIES, *dqt = gt + C * QUERIES;
    alignas(CACHE_LINE) float shift[QUERIES], delta[QUERIES], ones[QUERIES];
    std::fill(ones, ones + QUERIES, 1.0f);
    gather<C>(q, f.q + offset, f.rotation, shape, scale);
    gather<C>(k, f.k + offset, f.rotation, shape, 1);
    gather<C>(v, f.v + offset, nullptr, shape, 1);
    gather<C>(g, f.grad_y + offset, nullptr, shape, 1);
    std::fill(dk, dv + P * C, 0.0f);
    const float* log_sum = f.log_sum + (row * shape.heads + head) * T;
    for (int64_t i = 0; i < T; i += QUERIES) {
        int64_t seen = i + QUERIES;
        for (int r = 0; r < QUERIES; ++r) {
            const float *y = f.y + offset + (i + r) * width, *gradient = g + (i + r) * C;
            float sum = 0;
            if (i + r < T) {
#pragma omp simd reduction(+ : sum)
                for (int c = 0; c < C; ++c) sum += gradient[c] * y[c];
            }
            delta[r] = sum;
            shift[r] = i + r < T ? log_sum[i + r] : 0;
        }
        transpose<C>(qt, q + i * C);
        transpose<C>(gt, g + i * C);
        multiply_keys<Set, C>(s, k, qt, seen);
        multiply_keys<Set, C>(ds, v, gt, seen);
        hide_later_keys(s, i);
        for (int l = 0; l < W; ++l) {
            Vec log_sums = load<F>(shift + F * l), inner = load<F>(delta + F * l);
            for (int64_t j = 0; j < seen; ++j) {
                int64_t at = j * QUERIES + F * l;
                Vec p = exp_of<Vec, Bits>(load<F>(s + at) - log_sums);
                store<F>(s + at, p);
                store<F>(ds + at, p * (load<F>(ds + at) - inner));
            }
        }
        sum_over_keys<Set, C>(dqt, k, ds, seen);
        transpose_back<C>(dq + i * C, dqt, ones);
        add_over_queries<Set, C>(dk, ds, q + i * C, seen);
        add_over_queries<Set, C>(dv, s, g + i * C, seen);
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
    int64_t P = padded(shape.tokens), C = shape.size;
    int64_t floats = 7 * P * C + 2 * P * QUERIES + 3 * C * QUERIES;
    std::vector<float> memory(floats + CACHE_LINE);  // padding tokens stay 0
    for (int64_t part; (part = work.next++) < shape.rows * shape.heads;)
        one_head<Set>(work.pass, shape, part / shape.heads, part % shape.heads, aligned(memory.data()));
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
        float a = std::fabs(x[i]) * 0.70710678f, t = 1 / (1 + 0.4f * a), e = exp_of<float, uint32_t>(-a * a);
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

// `losses` (n,) = cross-entropies of `logits` (n, V), whose rows are `stride` floats apart. The gradient of the logits is
// `factors` (n,) times what replaces the logits. A row whose target is IGNORED gets 0 everywhere.
struct CrossEntropy {
    float* logits;
    const int64_t* targets;
    float *losses, *factors;
};

constexpr int64_t IGNORED = -100;

INLINE void cross_entropy(const CrossEntropy& pass, int64_t row, int64_t columns, int64_t stride) {
    float* x = pass.logits + row * stride;
    int64_t target = pass.targets[row];
    if (target == IGNORED) {
        std::fill(x, x + columns, 0.0f);
        pass.losses[row] = pass.factors[row] = 0;
        return;
    }
    float most = MASKED, sum = 0, own = x[target];
#pragma omp simd reduction(max : most)
    for (int64_t j = 0; j < columns; ++j) most = x[j] > most ? x[j] : most;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < columns; ++j) {
        x[j] = exp_of<float, uint32_t>(x[j] - most);
        sum += x[j];
    }
    pass.losses[row] = std::log(sum) + (most - own);
    pass.factors[row] = 1 / sum;
    x[target] -= sum;
}

template <class Set>
INLINE void take_parts(Work<CrossEntropy>& work) {
    const Shape& shape = work.shape;
    for (int64_t row; (row = work.next++) < shape.rows;)
        cross_entropy(work.pass, row, shape.tokens, shape.heads);
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
    on_threads(compute, &work, shape.threads);
}

}  // namespace

// Increase it, and VERSION in __init__.py, with every change of these functions: a library that was compiled from an
// older version of this file is then not used.
extern "C" int oelm_version() { return 4; }

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

// `shape` has n as its rows, V as its tokens, and the stride as its heads. Return whether all targets are valid; if not,
// nothing is computed.
extern "C" int oelm_cross_entropy(const CrossEntropy* pass, const Shape* shape) {
    for (int64_t row = 0; row < shape->rows; ++row) {
        int64_t target = pass->targets[row];
        if (target != IGNORED && (target < 0 || target >= shape->tokens)) return 0;
    }
    run(*pass, *shape);
    return 1;
}
