// Two operations of small models on a CPU, with one thread: causal attention and GELU. Tensors are fp32 and contiguous.
// oelm/models/compiled.py calls the functions at the end.
//
// Attention: torch's kernel is made for long rows and large heads. With 128 tokens and 16 elements per head, this code
// is faster: all data of a head stays in the cache, and masked scores are not computed. Rotary positions are included.
// q, k, v, y and their gradients are (B, T, nh, hs); log_sum is (B, nh, T). `rotation` is the table of `rotary_table()`
// in gpt.py, (T, 3, nh * hs), or null for no rotation.
//
// GELU: the forward pass also returns the derivative, which shares the exponential function with the value.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int ROWS = 4;    // queries that are processed together
constexpr int LANES = 16;  // floats that are processed together, in several registers
constexpr float MASKED = -INFINITY;

// A vector register: 8 floats with AVX2, 4 elsewhere. Compilers make slow code for vectors larger than a register.
#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,fma")))
using Vec = float __attribute__((vector_size(32)));
#else
#define TARGET
using Vec = float __attribute__((vector_size(16)));
#endif
constexpr int FLOATS = sizeof(Vec) / sizeof(float);
constexpr int WIDE = LANES / FLOATS;

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

INLINE Vec load(const float* from) {
    Vec x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }

// y (ROWS, n) = x (ROWS, C) m (C, n); the rows of y and m are `stride` floats apart, and LANES divides n.
template <int C>
INLINE void multiply_wide(float* y, const float* x, const float* m, int64_t stride, int64_t n) {
    for (int64_t j = 0; j < n; j += LANES) {
        Vec sum[ROWS][WIDE] = {};
        for (int c = 0; c < C; ++c)
            for (int l = 0; l < WIDE; ++l) {
                Vec column = load(m + c * stride + j + FLOATS * l);
                for (int r = 0; r < ROWS; ++r) sum[r][l] += x[r * C + c] * column;
            }
        for (int r = 0; r < ROWS; ++r)
            for (int l = 0; l < WIDE; ++l) store(y + r * stride + j + FLOATS * l, sum[r][l]);
    }
}

// y (ROWS, C) = p (ROWS, n) x (n, C); the rows of p are `stride` floats apart.
template <int C>
INLINE void multiply_narrow(float* y, const float* p, const float* x, int64_t stride, int64_t n) {
    constexpr int W = std::min(C / FLOATS, WIDE);
    for (int c = 0; c < C; c += FLOATS * W) {
        Vec sum[ROWS][W] = {};
        for (int64_t j = 0; j < n; ++j)
            for (int l = 0; l < W; ++l) {
                Vec row = load(x + j * C + c + FLOATS * l);
                for (int r = 0; r < ROWS; ++r) sum[r][l] += p[r * stride + j] * row;
            }
        for (int r = 0; r < ROWS; ++r)
            for (int l = 0; l < W; ++l) store(y + r * C + c + FLOATS * l, sum[r][l]);
    }
}

// y (n, C) += p^T (n, ROWS) x (ROWS, C); the rows of p are `stride` floats apart.
template <int C>
INLINE void add_transposed(float* y, const float* p, const float* x, int64_t stride, int64_t n) {
    constexpr int W = std::min(C / FLOATS, WIDE);
    for (int c = 0; c < C; c += FLOATS * W) {
        Vec row[ROWS][W];
        for (int r = 0; r < ROWS; ++r)
            for (int l = 0; l < W; ++l) row[r][l] = load(x + r * C + c + FLOATS * l);
        for (int64_t j = 0; j < n; ++j) {
            Vec sum[W];
            for (int l = 0; l < W; ++l) sum[l] = load(y + j * C + c + FLOATS * l);
            for (int r = 0; r < ROWS; ++r)
                for (int l = 0; l < W; ++l) sum[l] += p[r * stride + j] * row[r][l];
            for (int l = 0; l < W; ++l) store(y + j * C + c + FLOATS * l, sum[l]);
        }
    }
}

INLINE int64_t padded(int64_t tokens) { return (tokens + LANES - 1) / LANES * LANES; }

struct Shape {
    int64_t rows, tokens, heads, size;  // B, T, nh, hs
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
template <int C>
INLINE void compute_head(const Forward& f, const Shape& shape, int64_t row, int64_t head, float* memory) {
    int64_t T = shape.tokens, P = padded(T), width = shape.width();
    int64_t offset = row * T * width + head * C;
    float *q = memory, *k = q + P * C, *kt = k + P * C, *v = kt + P * C, *y = v + P * C, *s = y + P * C;
    gather<C>(q, f.q + offset, f.rotation, shape, 1 / std::sqrt(static_cast<float>(C)));
    gather<C>(k, f.k + offset, f.rotation, shape, 1);
    gather<C>(v, f.v + offset, nullptr, shape, 1);
    transpose<C>(kt, k, P);
    float* log_sum = f.log_sum + (row * shape.heads + head) * T;
    for (int64_t i = 0; i < T; i += ROWS) {
        int64_t seen = i + ROWS, n = padded(seen);  // number of keys that these queries see, and with padding
        multiply_wide<C>(s, q + i * C, kt, P, n);
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
        multiply_narrow<C>(y + i * C, s, v, P, seen);
    }
    scatter<C>(f.y + offset, y, nullptr, shape, 1);
}

// As in FlashAttention, the probabilities are computed again from q, k and log_sum. `delta` (P) is the inner product of
// each token's output and its gradient.
struct Backward {
    const float *q, *k, *v, *rotation, *y, *log_sum, *grad_y;
    float *grad_q, *grad_k, *grad_v;
};

template <int C>
INLINE void compute_head(const Backward& f, const Shape& shape, int64_t row, int64_t head, float* memory) {
    int64_t T = shape.tokens, P = padded(T), width = shape.width();
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
        int64_t seen = i + ROWS, n = padded(seen);
        multiply_wide<C>(s, q + i * C, kt, P, n);
        multiply_wide<C>(ds, g + i * C, vt, P, n);
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
        multiply_narrow<C>(dq + i * C, ds, k, P, seen);
        add_transposed<C>(dk, ds, q + i * C, P, seen);
        add_transposed<C>(dv, s, g + i * C, P, seen);
    }
    scatter<C>(f.grad_q + offset, dq, f.rotation, shape, scale);
    scatter<C>(f.grad_k + offset, dk, f.rotation, shape, 1);
    scatter<C>(f.grad_v + offset, dv, nullptr, shape, 1);
}

template <class Pass>
INLINE void one_head(const Pass& pass, const Shape& shape, int64_t row, int64_t head, float* memory) {
    if (shape.size == 8) compute_head<8>(pass, shape, row, head, memory);
    if (shape.size == 16) compute_head<16>(pass, shape, row, head, memory);
    if (shape.size == 32) compute_head<32>(pass, shape, row, head, memory);
    if (shape.size == 64) compute_head<64>(pass, shape, row, head, memory);
}

template <class Pass>
TARGET void all_heads(const Pass& pass, const Shape& shape) {
    std::vector<float> memory((9 * shape.size + 2 * ROWS + 1) * padded(shape.tokens));  // padding tokens stay 0
    for (int64_t row = 0; row < shape.rows; ++row)
        for (int64_t head = 0; head < shape.heads; ++head) one_head(pass, shape, row, head, memory.data());
}

struct Gelu {
    const float* x;
    float *y, *derivative;
};

// y = x Phi(x) with the normal distribution Phi, and its derivative Phi(x) + x phi(x) with the density phi.
//
// Phi(-|x|) = erfc(a) / 2 with a = |x| / sqrt(2), and erfc(a) = exp(-a^2) t p(t) with t = 1 / (1 + 0.4 a) and a polynomial
// p that was fitted to it (as in Abramowitz and Stegun 7.1.26). The error of erfc is below 3e-8, half the rounding error
// of 1 - erfc in fp32.
TARGET void gelu(const Gelu& pass, int64_t n) {
    const float* __restrict x = pass.x;
    float *__restrict y = pass.y, *__restrict derivative = pass.derivative;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        float a = std::fabs(x[i]) * 0.70710678f, t = 1 / (1 + 0.4f * a), e = exp_of(-a * a);
        float p = -0.2002567817f;
        p = p * t + 0.7091375666f;
        p = p * t - 0.3708925712f;
        p = p * t + 0.4682621633f;
        p = p * t + 0.1618282170f;
        p = p * t + 0.2319213786f;
        float tail = 0.5f * e * t * p;
        float phi = x[i] < 0 ? tail : 1 - tail;
        y[i] = x[i] * phi;
        derivative[i] = phi + x[i] * (0.39894228f * e);
    }
}

}  // namespace

// Return whether this CPU can run the functions below.
extern "C" int oelm_runs_here() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

extern "C" void oelm_attention_forward(const Forward* pass, const Shape* shape) { all_heads(*pass, *shape); }

extern "C" void oelm_attention_backward(const Backward* pass, const Shape* shape) { all_heads(*pass, *shape); }

extern "C" void oelm_gelu(const Gelu* pass, const int64_t* elements) { gelu(*pass, *elements); }
