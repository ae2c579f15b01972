/* A decoder's products for a few rows: projections with the norm before them, the gated MLP, and the rotation.
 *
 * With few rows, reading the matrix once is nearly all the work, and the preparations of a general matrix product would
 * take most of the time. Sums are float32; in bfloat16, values are rounded wherever PyTorch rounds them. Each row is
 * computed as if it were alone: its bits do not depend on the number of rows. */

#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define OUTPUTS 4 /* rows of a matrix, and */
#define ROWS 4    /* rows of the input, that are multiplied together: 16 sums in registers */

/* Bytes that a matrix is prefetched ahead of the products: its rows are too short for the processor's own prefetching. */
#define FETCH_AHEAD (16 * 1024)

/* Bytes of a matrix below which one thread is faster than all. Never some of them: OpenMP ends the threads that a smaller
 * team does not need, and has to start them again for a larger one. */
#define SMALL_MATRIX (192 * 1024)

typedef uint16_t bf16;

INLINE float widened(bf16 x)
{
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

INLINE bf16 rounded(float x)
{
    return (bf16)_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)), 0);
}

INLINE __m512 load16(const void *p, __mmask16 mask, int is_bf16)
{
    if (!is_bf16)
        return _mm512_maskz_loadu_ps(mask, p);
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

INLINE void store16(void *p, __m512 x, __mmask16 mask, int is_bf16)
{
    if (is_bf16)
        _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(x));
    else
        _mm512_mask_storeu_ps(p, mask, x);
}

INLINE __mmask16 first16(int64_t n)
{
    return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1);
}

INLINE const char *at(const void *p, int64_t element, int is_bf16)
{
    return (const char *)p + element * (is_bf16 ? 2 : 4);
}

/* `sums[o][r]` = row o of `w` times row r of `x`; both have rows of `inputs` elements. */
INLINE void products(const void *w, const void *x, int64_t inputs, int outputs, int rows, int is_bf16,
                     float sums[OUTPUTS][ROWS])
{
    __m512 sum[OUTPUTS][ROWS];
#pragma GCC unroll 4
    for (int o = 0; o < outputs; o++)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            sum[o][r] = _mm512_setzero_ps();
    const int64_t step = is_bf16 ? 32 : 16;
    for (int64_t i = 0; i < inputs; i += step) {
        const int64_t left = inputs - i;
        const __mmask32 mask = left >= step ? 0xffffffffu : (__mmask32)((1ull << left) - 1);
        __m512i a[OUTPUTS];
#pragma GCC unroll 4
        for (int o = 0; o < outputs; o++)
            a[o] = is_bf16 ? _mm512_maskz_loadu_epi16(mask, at(w, o * inputs + i, 1))
                           : _mm512_castps_si512(_mm512_maskz_loadu_ps((__mmask16)mask, at(w, o * inputs + i, 0)));
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512i b = is_bf16 ? _mm512_maskz_loadu_epi16(mask, at(x, r * inputs + i, 1))
                                : _mm512_castps_si512(_mm512_maskz_loadu_ps((__mmask16)mask, at(x, r * inputs + i, 0)));
#pragma GCC unroll 4
            for (int o = 0; o < outputs; o++)
                sum[o][r] = is_bf16 ? _mm512_dpbf16_ps(sum[o][r], (__m512bh)a[o], (__m512bh)b)
                                    : _mm512_fmadd_ps(_mm512_castsi512_ps(a[o]), _mm512_castsi512_ps(b), sum[o][r]);
        }
    }
#pragma GCC unroll 4
    for (int o = 0; o < outputs; o++)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            sums[o][r] = _mm512_reduce_add_ps(sum[o][r]);
}

/* Rows of the matrix from `first` to `stop` times all rows of `x`: `out[r, o] = w[o] · x[r] + bias[o]`. */
INLINE void linear_part(const void *x, const void *w, const void *bias, void *out, int64_t n, int64_t inputs,
                        int64_t outputs, int64_t first, int64_t stop, int is_bf16)
{
    float sums[OUTPUTS][ROWS];
    for (int64_t o = first; o < stop; o += OUTPUTS) {
        const int count = stop - o < OUTPUTS ? (int)(stop - o) : OUTPUTS;
        const char *matrix = at(w, o * inputs, is_bf16);
        for (int64_t i = 0; i < OUTPUTS * inputs * (is_bf16 ? 2 : 4); i += 64)
            __builtin_prefetch(matrix + FETCH_AHEAD + i);
        for (int64_t r = 0; r < n; r += ROWS) {
            const int rows = n - r < ROWS ? (int)(n - r) : ROWS;
            const void *input = at(x, r * inputs, is_bf16);
            if (count == OUTPUTS) {
                if (rows == 4)
                    products(matrix, input, inputs, OUTPUTS, 4, is_bf16, sums);
                else if (rows == 3)
                    products(matrix, input, inputs, OUTPUTS, 3, is_bf16, sums);
                else if (rows == 2)
                    products(matrix, input, inputs, OUTPUTS, 2, is_bf16, sums);
                else
                    products(matrix, input, inputs, OUTPUTS, 1, is_bf16, sums);
            } else {
                for (int a = 0; a < count; a++)
                    for (int b = 0; b < rows; b++) {
                        float one[OUTPUTS][ROWS];
                        products(at(matrix, a * inputs, is_bf16), at(input, b * inputs, is_bf16), inputs, 1, 1, is_bf16,
                                 one);
                        sums[a][b] = one[0][0];
                    }
            }
            for (int b = 0; b < rows; b++)
                for (int a = 0; a < count; a++) {
                    const int64_t place = (r + b) * outputs + o + a;
                    if (is_bf16)
                        ((bf16 *)out)[place] = rounded(bias ? sums[a][b] + widened(((const bf16 *)bias)[o + a]) : sums[a][b]);
                    else
                        ((float *)out)[place] = bias ? sums[a][b] + ((const float *)bias)[o + a] : sums[a][b];
                }
        }
    }
}

/* `out[r] = x[r] / rms(x[r]) * norm`, or a copy where there is no norm; rows of `x` are `stride` elements apart. */
INLINE void normalised(const void *x, int64_t stride, const void *norm, float eps, void *out, int64_t n, int64_t inputs,
                       int is_bf16)
{
    for (int64_t r = 0; r < n; r++) {
        const void *row = at(x, r * stride, is_bf16);
        char *result = (char *)at(out, r * inputs, is_bf16);
        if (!norm) {
            memcpy(result, row, inputs * (is_bf16 ? 2 : 4));
            continue;
        }
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < inputs; i += 16) {
            __m512 v = load16(at(row, i, is_bf16), first16(inputs - i), is_bf16);
            squares = _mm512_fmadd_ps(v, v, squares);
        }
        const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)inputs + eps));
        for (int64_t i = 0; i < inputs; i += 16) {
            const __mmask16 mask = first16(inputs - i);
            __m512 v = _mm512_mul_ps(load16(at(row, i, is_bf16), mask, is_bf16), scale);
            store16(result + i * (is_bf16 ? 2 : 4), _mm512_mul_ps(v, load16(at(norm, i, is_bf16), mask, is_bf16)), mask,
                    is_bf16);
        }
    }
}

/* This thread's part of `count` outputs, in whole groups of OUTPUTS. */
INLINE void share(int64_t count, int64_t *first, int64_t *stop)
{
    const int64_t groups = (count + OUTPUTS - 1) / OUTPUTS, threads = omp_get_num_threads(), me = omp_get_thread_num();
    *first = groups * me / threads * OUTPUTS;
    *stop = groups * (me + 1) / threads * OUTPUTS;
    if (*stop > count)
        *stop = count;
}

INLINE int threads_for(int64_t bytes, int threads)
{
    return bytes < SMALL_MATRIX ? 1 : threads;
}

INLINE int linear(const void *x, int64_t stride, const void *norm, float eps, const void *w, const void *bias, void *out,
                  int64_t n, int64_t inputs, int64_t outputs, int is_bf16, int threads)
{
    const int64_t size = is_bf16 ? 2 : 4;
    void *rows = NULL;
    if (norm || stride != inputs) {
        rows = malloc(n * inputs * size);
        if (!rows)
            return 1;
        normalised(x, stride, norm, eps, rows, n, inputs, is_bf16);
        x = rows;
    }
    threads = threads_for(outputs * inputs * size, threads);
    if (threads <= 1) {
        linear_part(x, w, bias, out, n, inputs, outputs, 0, outputs, is_bf16);
    } else {
#pragma omp parallel num_threads(threads)
        {
            int64_t first, stop;
            share(outputs, &first, &stop);
            linear_part(x, w, bias, out, n, inputs, outputs, first, stop, is_bf16);
        }
    }
    free(rows);
    return 0;
}

/* e^x for finite x, by 2^k times a polynomial (Cephes); about one unit in the last place. */
INLINE __m512 exponential(__m512 x)
{
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.3f)), _mm512_set1_ps(88.3f));
    const __m512 k = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(k, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(k, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, k);
}

INLINE __m512 as_stored(__m512 x, int is_bf16)
{
    if (!is_bf16)
        return x;
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}

/* `gate = silu(gate) * up`, from `first` to `stop` of each of the `n` rows `[gate | up]`, each `width` wide. */
INLINE void activate(void *gate_up, int64_t n, int64_t width, int64_t first, int64_t stop, int is_bf16)
{
    for (int64_t r = 0; r < n; r++) {
        char *gate = (char *)at(gate_up, r * 2 * width, is_bf16);
        const char *up = at(gate, width, is_bf16);
        for (int64_t i = first; i < stop; i += 16) {
            const __mmask16 mask = first16(stop - i);
            const __m512 g = load16(at(gate, i, is_bf16), mask, is_bf16);
            const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), g));
            const __m512 silu = as_stored(_mm512_div_ps(g, _mm512_add_ps(e, _mm512_set1_ps(1.0f))), is_bf16);
            store16(gate + i * (is_bf16 ? 2 : 4), _mm512_mul_ps(silu, load16(at(up, i, is_bf16), mask, is_bf16)), mask,
                    is_bf16);
        }
    }
}

INLINE int gated_mlp(const void *x, int64_t stride, const void *norm, float eps, const void *gate_up, const void *down,
                     void *out, int64_t n, int64_t hidden, int64_t width, int is_bf16, int threads)
{
    const int64_t size = is_bf16 ? 2 : 4;
    char *rows = malloc(n * (hidden + 3 * width) * size);
    if (!rows)
        return 1;
    char *wide = rows + n * hidden * size, *narrow = wide + 2 * n * width * size;
    normalised(x, stride, norm, eps, rows, n, hidden, is_bf16);
    threads = threads_for(3 * hidden * width * size, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t first, stop;
        share(width, &first, &stop);
        linear_part(rows, gate_up, NULL, wide, n, hidden, 2 * width, first, stop, is_bf16);
        linear_part(rows, gate_up, NULL, wide, n, hidden, 2 * width, width + first, width + stop, is_bf16);
        activate(wide, n, width, first, stop, is_bf16);
        for (int64_t r = 0; r < n; r++)
            memcpy(narrow + (r * width + first) * size, wide + (2 * r * width + first) * size, (stop - first) * size);
#pragma omp barrier
        share(hidden, &first, &stop);
        linear_part(narrow, down, NULL, out, n, width, hidden, first, stop, is_bf16);
    }
    free(rows);
    return 0;
}

INLINE void rotate(const void *x, int64_t head_stride, int64_t row_stride, const float *cosines, const float *sines,
                   int64_t table_stride, void *out, int64_t out_head_stride, int64_t out_row_stride, int64_t heads,
                   int64_t n, int64_t dim, int is_bf16)
{
    const int64_t half = dim / 2;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t r = 0; r < n; r++) {
            const char *from = at(x, h * head_stride + r * row_stride, is_bf16);
            char *to = (char *)at(out, h * out_head_stride + r * out_row_stride, is_bf16);
            const float *cosine = cosines + r * table_stride, *sine = sines + r * table_stride;
            for (int64_t i = 0; i < half; i += 16) {
                const __mmask16 mask = first16(half - i);
                const __m512 a = load16(at(from, i, is_bf16), mask, is_bf16);
                const __m512 b = load16(at(from, half + i, is_bf16), mask, is_bf16);
                const __m512 c = _mm512_maskz_loadu_ps(mask, cosine + i), s = _mm512_maskz_loadu_ps(mask, sine + i);
                const __m512 c2 = _mm512_maskz_loadu_ps(mask, cosine + half + i);
                const __m512 s2 = _mm512_maskz_loadu_ps(mask, sine + half + i);
                store16((char *)at(to, i, is_bf16), _mm512_fmadd_ps(b, s, _mm512_mul_ps(a, c)), mask, is_bf16);
                store16((char *)at(to, half + i, is_bf16), _mm512_fmadd_ps(a, s2, _mm512_mul_ps(b, c2)), mask, is_bf16);
            }
        }
}

/* Each is compiled twice, once per input type, so that the type is a constant there. */

int triforce_linear(const void *x, int64_t stride, const void *norm, float eps, const void *w, const void *bias,
                    void *out, int64_t n, int64_t inputs, int64_t outputs, int is_bf16, int threads)
{
    return is_bf16 ? linear(x, stride, norm, eps, w, bias, out, n, inputs, outputs, 1, threads)
                   : linear(x, stride, norm, eps, w, bias, out, n, inputs, outputs, 0, threads);
}

int triforce_gated_mlp(const void *x, int64_t stride, const void *norm, float eps, const void *gate_up,
                       const void *down, void *out, int64_t n, int64_t hidden, int64_t width, int is_bf16, int threads)
{
    return is_bf16 ? gated_mlp(x, stride, norm, eps, gate_up, down, out, n, hidden, width, 1, threads)
                   : gated_mlp(x, stride, norm, eps, gate_up, down, out, n, hidden, width, 0, threads);
}

void triforce_rotate(const void *x, int64_t head_stride, int64_t row_stride, const float *cosines, const float *sines,
                     int64_t table_stride, void *out, int64_t out_head_stride, int64_t out_row_stride, int64_t heads,
                     int64_t n, int64_t dim, int is_bf16)
{
    if (is_bf16)
        rotate(x, head_stride, row_stride, cosines, sines, table_stride, out, out_head_stride, out_row_stride, heads, n,
               dim, 1);
    else
        rotate(x, head_stride, row_stride, cosines, sines, table_stride, out, out_head_stride, out_row_stride, heads, n,
               dim, 0);
}

#endif
