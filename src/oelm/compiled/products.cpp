// Products of fp32 matrices with AVX-512, for CPUs on which torch's own products use only half of each vector register:
// Intel's MKL, which torch contains, uses AVX-512 on Intel CPUs only. oelm/compiled/products.py calls the functions at the
// end.
//
// The method is that of Goto and van de Geijn (2008). b is copied in blocks that fit into the cache, and transposed if
// necessary, so that it is read contiguously. A tile of ROWS x COLUMNS sums is held in registers. The terms of a sum are
// always added in the same order, so the result has the same bits for any number of threads.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "shared.h"

namespace {

// A matrix: element (i, j) is at[i * row + j * column].
struct Matrix {
    const float* at;
    int64_t row, column;
};

// c (M, N) = a (M, K) b (K, N) + bias (N,). If `add`, the product is added to c, and `bias` must be null.
// The rows of c are `stride` floats apart.
struct Product {
    float* c;
    int64_t stride;
    Matrix a, b;
    const float* bias;
    int64_t M, N, K, add;
};

#if defined(__x86_64__)
#define AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,fma")))

constexpr int F = 16;             // floats of a vector register
constexpr int ROWS = 14;          // 14 x 2 vectors of sums, 2 of b and one of a: 31 of 32 registers
constexpr int COLUMNS = 2 * F;
constexpr int64_t DEPTH = 1024;   // maximum number of rows of a block of b
constexpr int64_t WIDTH = 2048;   // maximum number of columns of a block of b
constexpr int64_t A_BLOCK = 96 * 1024;  // maximum number of floats of a block of a: 384 KiB, for the L2 cache
constexpr int64_t CONFLICT = 1024;      // rows whose distance is a multiple of this (4 KiB) map to few sets of the cache

int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// The size of the parts into which n is cut, so that they are almost equal and no larger than `most`.
int64_t part_size(int64_t n, int64_t most) {
    int64_t parts = (n + most - 1) / most;
    return (n + parts - 1) / parts;
}

// c (R, COLUMNS) = a (R, depth) b (depth, COLUMNS) + bias (COLUMNS,), without the bias if it is null. If `add`, the product is
// added to c instead. b is contiguous. With `add`, the sums also start from 0: adding many terms one by one to a large c
// would cause larger rounding errors.
template <int R>
AVX512 void tile(float* c, int64_t stride, Matrix a, const float* b, const float* bias, int64_t depth, bool add) {
    __m512 sum[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) sum[r][h] = bias ? _mm512_loadu_ps(bias + h * F) : _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; ++k, b += COLUMNS, a.at += a.column) {
        __m512 left = _mm512_loadu_ps(b), right = _mm512_loadu_ps(b + F);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            __m512 x = _mm512_set1_ps(a.at[r * a.row]);
            sum[r][0] = _mm512_fmadd_ps(x, left, sum[r][0]);
            sum[r][1] = _mm512_fmadd_ps(x, right, sum[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) {
            float* to = c + r * stride + h * F;
            _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), sum[r][h]) : sum[r][h]);
        }
}

using Tile = void (*)(float*, int64_t, Matrix, const float*, const float*, int64_t, bool);
constexpr Tile TILES[ROWS + 1] = {nullptr,  tile<1>,  tile<2>,  tile<3>,  tile<4>,  tile<5>,  tile<6>, tile<7>,
                                  tile<8>,  tile<9>,  tile<10>, tile<11>, tile<12>, tile<13>, tile<14>};

// Transpose F vectors in four stages, in which blocks of 8, 4, 2 and 1 numbers are swapped.
template <int S = F / 2>
AVX512 inline void transpose(__m512* x) {
    alignas(CACHE_LINE) int32_t low[F], high[F];  // indices of the new numbers in two vectors
    for (int j = 0; j < F; ++j) {
        low[j] = j & S ? F + j - S : j;
        high[j] = j & S ? F + j : j + S;
    }
    __m512i from_low = _mm512_load_si512(low), from_high = _mm512_load_si512(high);
#pragma GCC unroll 16
    for (int i = 0; i < F; ++i) {
        if (i & S) continue;
        __m512 first = x[i];
        x[i] = _mm512_permutex2var_ps(first, from_low, x[i + S]);
        x[i + S] = _mm512_permutex2var_ps(first, from_high, x[i + S]);
    }
    if constexpr (S > 1) transpose<S / 2>(x);
}

// Copy x (count, depth) in panels of SIZE rows: to[panel][k][row]. Missing rows of the last panel become 0.
template <int SIZE>
AVX512 void pack(float* to, Matrix x, int64_t count, int64_t depth) {
    for (int64_t p = 0; p < count; p += SIZE, to += SIZE * depth) {
        const float* from = x.at + p * x.row;
        int64_t n = std::min<int64_t>(SIZE, count - p), k = 0;
        if (x.row == 1 && n == SIZE) {
            for (; k < depth; ++k) std::memcpy(to + k * SIZE, from + k * x.column, SIZE * sizeof(float));
        } else if (x.column == 1 && SIZE % F == 0 && n == SIZE) {
            for (; k + F <= depth; k += F)
                for (int h = 0; h < SIZE; h += F) {
                    __m512 block[F];
#pragma GCC unroll 16
                    for (int i = 0; i < F; ++i) block[i] = _mm512_loadu_ps(from + (h + i) * x.row + k);
                    transpose(block);
#pragma GCC unroll 16
                    for (int i = 0; i < F; ++i) _mm512_storeu_ps(to + (k + i) * SIZE + h, block[i]);
                }
        }
        for (; k < depth; ++k)
            for (int i = 0; i < SIZE; ++i) to[k * SIZE + i] = i < n ? from[i * x.row + k * x.column] : 0;
    }
}

// The rows of a that are used with one block of b of this depth.
int64_t rows_at_once(int64_t depth) { return std::max<int64_t>(1, A_BLOCK / depth / ROWS) * ROWS; }

// Floats of memory that `compute` needs.
int64_t memory_size(const Product& p) {
    int64_t depth = part_size(p.K, DEPTH), width = std::min(WIDTH, rounded_up(p.N, COLUMNS));
    return width * depth + rows_at_once(depth) * (depth + F) + 2 * CACHE_LINE;
}

// As `tile`, for m <= ROWS rows and n <= COLUMNS columns of c. All COLUMNS columns of b are in memory.
AVX512 void border_tile(float* c, int64_t stride, Matrix a, const float* b, const float* bias, int64_t m, int64_t n,
                        int64_t depth, bool add) {
    alignas(CACHE_LINE) float whole[ROWS * COLUMNS] = {}, whole_bias[COLUMNS] = {};
    for (int64_t r = 0; add && r < m; ++r) std::memcpy(whole + r * COLUMNS, c + r * stride, n * sizeof(float));
    if (bias) std::memcpy(whole_bias, bias, n * sizeof(float));
    TILES[m](whole, COLUMNS, a, b, whole_bias, depth, add);
    for (int64_t r = 0; r < m; ++r) std::memcpy(c + r * stride, whole + r * COLUMNS, n * sizeof(float));
}

void compute(const Product& p, float* memory) {
    int64_t depth = part_size(p.K, DEPTH), height = rows_at_once(depth);
    float *packed_b = memory, *packed_a = memory + std::min(WIDTH, rounded_up(p.N, COLUMNS)) * depth;
    for (int64_t j = 0; j < p.N; j += WIDTH)
        for (int64_t k = 0; k < p.K; k += depth) {
            int64_t width = std::min(WIDTH, p.N - j), d = std::min(depth, p.K - k);
            bool add = p.add || k > 0;
            pack<COLUMNS>(packed_b, {p.b.at + j * p.b.column + k * p.b.row, p.b.column, p.b.row}, width, d);
            for (int64_t i = 0; i < p.M; i += height) {
                int64_t rows = std::min(height, p.M - i), next = ROWS * p.a.row;  // from one tile's rows to the next
                Matrix a = {p.a.at + i * p.a.row + k * p.a.column, p.a.row, p.a.column};
                if (a.column != 1) {
                    pack<ROWS>(packed_a, a, rows, d);
                    a = {packed_a, 1, ROWS};
                    next = ROWS * d;
                } else if (a.row % CONFLICT == 0) {
                    for (int64_t r = 0; r < rows; ++r)
                        std::memcpy(packed_a + r * (d + F), a.at + r * a.row, d * sizeof(float));
                    a = {packed_a, d + F, 1};
                    next = ROWS * a.row;
                }
                for (int64_t q = 0; q < width; q += COLUMNS) {
                    Matrix left = a;
                    for (int64_t r = 0; r < rows; r += ROWS, left.at += next) {
                        float* c = p.c + (i + r) * p.stride + j + q;
                        const float *b = packed_b + q * d, *bias = p.bias && !add ? p.bias + j + q : nullptr;
                        int64_t m = std::min<int64_t>(ROWS, rows - r), n = std::min<int64_t>(COLUMNS, width - q);
                        if (n == COLUMNS) TILES[m](c, p.stride, left, b, bias, d, add);
                        else border_tile(c, p.stride, left, b, bias, m, n, d, add);
                    }
                }
            }
        }
}

// A product that several threads share. It is cut into row_parts x column_parts parts.
struct Shared {
    const Product& whole;
    int64_t row_parts, column_parts;
    std::atomic<int64_t> next{0};
};

// Memory of a thread that its next product uses again: new memory is slow.
struct Memory {
    std::unique_ptr<float[]> floats;
    int64_t size = 0;
};

void take_parts(void* shared) {
    static thread_local Memory memory;
    Shared& work = *static_cast<Shared*>(shared);
    const Product& p = work.whole;
    int64_t rows = (p.M + work.row_parts - 1) / work.row_parts;
    int64_t columns = rounded_up((p.N + work.column_parts - 1) / work.column_parts, COLUMNS);
    for (int64_t next; (next = work.next++) < work.row_parts * work.column_parts;) {
        int64_t i = next / work.column_parts * rows, j = next % work.column_parts * columns;
        if (i >= p.M || j >= p.N) continue;
        Product part = p;
        part.c += i * p.stride + j;
        part.a.at += i * p.a.row;
        part.b.at += j * p.b.column;
        if (p.bias) part.bias += j;
        part.M = std::min(rows, p.M - i);
        part.N = std::min(columns, p.N - j);
        if (memory.size < memory_size(part)) {
            memory.floats.reset(new float[memory_size(part)]);
            memory.size = memory_size(part);
        }
        compute(part, aligned(memory.floats.get()));
    }
}

// The number of parts into which the columns are cut for `threads` threads, so that they read as little of a and b as
// possible.
int64_t best_column_parts(const Product& p, int64_t threads) {
    int64_t best = 1;
    for (int64_t n = 2; n <= threads; ++n)
        if (threads % n == 0 && p.M * n / threads + p.N / n < p.M * best / threads + p.N / best) best = n;
    return best;
}
#endif

}  // namespace

// Return whether to compute products with `oelm_product`: on an AMD CPU from Zen 5 on, with AVX-512.
extern "C" int oelm_runs_products() {
#if defined(__x86_64__)
    unsigned a = 0, b, c, d;
    if (!__builtin_cpu_is("amd") || !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) return 0;
    __get_cpuid(1, &a, &b, &c, &d);
    return ((a >> 8) & 15) + ((a >> 20) & 255) >= 26;  // the family of the CPU
#else
    return 0;
#endif
}

extern "C" void oelm_product(const Product* product, int64_t threads) {
#if defined(__x86_64__)
    int64_t column_parts = best_column_parts(*product, threads);
    Shared work{*product, threads / column_parts, column_parts};
    on_threads(take_parts, &work, threads);
#endif
}
