/* The operations of a decoder for few rows: projections with the norm before them, norms and gates, the gated MLP, the choice of
 * experts, and the rotation.
 *
 * With few rows, reading the matrix once is nearly all the work, and the preparations of a general matrix product would
 * take most of the time. Sums are float32, of dot products (layers_dots.h) or, with AMX, of matrix tiles (layers_amx.h). In
 * bfloat16, values are rounded wherever PyTorch rounds them. Each row is computed as if it were alone: its bits do not
 * depend on the number of rows. */

#include "../cpu.h"
#include "../quantised.h"

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

/* Bytes, at least, that a matrix is prefetched ahead of products: its rows are too short for the processor's own prefetching. */
#define FETCH_AHEAD (16 * 1024)

/* Bytes of a matrix below which one thread is faster than all. Never some of them: OpenMP ends the threads that a smaller
 * team does not need, and has to start them again for a larger one. */
#define SMALL_MATRIX (192 * 1024)

typedef uint16_t bf16;

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

/* 1 over the root of the mean square of `width` numbers and `eps`. */
INLINE __m512 inverse_rms(const void *row, float eps, int64_t width, int is_bf16)
{
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
        __m512 v = load16(at(row, i, is_bf16), first16(width - i), is_bf16);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    return _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)width + eps));
}

/* `out[r] = x[r] / rms(x[r]) * norm`, or a copy where there is no norm; rows of `x` are `stride` elements apart. */
INLINE void normalised(const void *x, int64_t stride, const void *norm, int norm_is_bf16, float eps, void *out, int64_t n,
                       int64_t inputs, int is_bf16)
{
    for (int64_t r = 0; r < n; r++) {
        const void *row = at(x, r * stride, is_bf16);
        char *result = (char *)at(out, r * inputs, is_bf16);
        if (!norm) {
            memcpy(result, row, inputs * (is_bf16 ? 2 : 4));
            continue;
        }
        const __m512 scale = inverse_rms(row, eps, inputs, is_bf16);
        for (int64_t i = 0; i < inputs; i += 16) {
            const __mmask16 mask = first16(inputs - i);
            __m512 v = _mm512_mul_ps(load16(at(row, i, is_bf16), mask, is_bf16), scale);
            v = _mm512_mul_ps(v, load16(at(norm, i, norm_is_bf16), mask, norm_is_bf16));
            store16(result + i * (is_bf16 ? 2 : 4), v, mask, is_bf16);
        }
    }
}

/* A matrix: its numbers, one row after another, or what holds them in few bits, where it has `outputs`. */
typedef struct {
    const void *numbers;
    const Quantised *held;
    int64_t outputs;
} Weights;

INLINE void fetch(const void *place, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char *)place + i, 0, 2);
}

/* Prefetches rows of a matrix that is held in few bits, as far as it has them. */
INLINE void fetch_held(const Quantised *held, int64_t first, int64_t count)
{
    if (first + count > held->outputs)
        count = held->outputs - first;
    fetch(row_of(held, first), count * held->row_bytes);
}

#include "layers_dots.h"
#ifdef HAS_AMX
#include "layers_amx.h"
#endif

/* Rows that are multiplied, and the memory that this takes. */
typedef struct {
    int64_t n, inputs;
    const void *rows;
    float *laid_out; /* the same rows for matrix tiles, or NULL */
    bf16 *spare;     /* for each thread, `spare_size` numbers */
    int64_t spare_size;
} Input;

/* Points `input` to its memory in `room`; returns the bytes it takes, also where `room` is NULL. */
static int64_t carve(Input *input, char *room, int64_t n, int64_t inputs, const Weights *w, int is_bf16, int level, int threads)
{
    *input = (Input){.n = n, .inputs = inputs, .spare_size = w->held ? OUTPUTS * inputs : 0};
    int64_t laid_out = 0;
#ifdef HAS_AMX
    if (is_bf16 && level >= LEVEL_AMX && triforce_cpu_level() >= LEVEL_AMX && inputs % 2 == 0) {
        const int64_t whole = (inputs + PAIRED - 1) / PAIRED * PAIRED;
        if (w->held) /* in numbers of two bytes, as the others */
            input->spare_size = n <= AMX_OUTPUTS ? 0 : (n + AMX_OUTPUTS - 1) / AMX_OUTPUTS * AMX_OUTPUTS * AMX_OUTPUTS * 2;
        else
            input->spare_size = whole == inputs && w->outputs % SIDE == 0 ? 0 : AMX_OUTPUTS * whole;
        laid_out = amx_laid_out(n, inputs);
    }
#endif
    (void)is_bf16, (void)level;
    const int64_t taken = laid_out + threads * input->spare_size * 2;
    if (room && taken) {
        room += (64 - (uintptr_t)room % 64) % 64;
        input->laid_out = laid_out ? (float *)(void *)room : NULL;
        input->spare = (bf16 *)(void *)(room + laid_out);
    }
    return taken ? 64 + taken : 0;
}

/* Sets the input's rows, and lays them out for matrix tiles. */
static void lay_out(Input *input, const void *rows)
{
    input->rows = rows;
#ifdef HAS_AMX
    if (input->laid_out)
        amx_lay_out(rows, input->n, input->inputs, input->laid_out);
#endif
}

/* Outputs `first` to `stop` of all rows, to rows of `out` that are `stride` apart. */
INLINE void part(const Input *input, const Weights *w, const void *bias, void *out, int64_t stride, int64_t first,
                 int64_t stop, int is_bf16)
{
    bf16 *spare = input->spare + omp_get_thread_num() * input->spare_size;
#ifdef HAS_AMX
    if (input->laid_out) {
        amx_begin(amx_width(input->n));
        amx_linear_part(input->laid_out, w, bias, out, input->n, input->inputs, stride, first, stop, spare);
        amx_end();
        return;
    }
#endif
    if (is_bf16)
        linear_part_bf16(input->rows, w, bias, out, input->n, input->inputs, stride, first, stop, spare);
    else
        linear_part_float32(input->rows, w, bias, out, input->n, input->inputs, stride, first, stop, spare);
}

/* This thread's part of `count` outputs, in whole groups of those that are multiplied together: so a part for matrix tiles
 * ends with whole tiles if all outputs do, which `spare` relies on. */
INLINE void share(const Input *input, int64_t count, int64_t *first, int64_t *stop)
{
    const int64_t unit = input->laid_out ? 32 : OUTPUTS;
    const int64_t groups = (count + unit - 1) / unit, threads = omp_get_num_threads(), me = omp_get_thread_num();
    *first = groups * me / threads * unit;
    *stop = groups * (me + 1) / threads * unit;
    if (*stop > count)
        *stop = count;
}

INLINE int threads_for(int64_t bytes, int threads)
{
    return bytes < SMALL_MATRIX ? 1 : triforce_threads(threads);
}

/* Adds columns `first` to `stop` of `product` to those of `out`, both `[n, outputs]`. */
INLINE void add_part(void *out, const void *product, int64_t n, int64_t outputs, int64_t first, int64_t stop, int is_bf16)
{
    for (int64_t r = 0; r < n; r++)
        for (int64_t i = first; i < stop; i += 16) {
            const __mmask16 mask = first16(stop - i);
            void *place = (void *)at(out, r * outputs + i, is_bf16);
            const __m512 added = load16(at(product, r * outputs + i, is_bf16), mask, is_bf16);
            store16(place, _mm512_add_ps(load16(place, mask, is_bf16), added), mask, is_bf16);
        }
}

INLINE int linear(const void *x, int64_t stride, const void *norm, float eps, const void *numbers, const Quantised *held,
                  int64_t matrices, const void *bias, void *out, int adds, int64_t n, int64_t inputs, int64_t outputs, int is_bf16,
                  int level, int threads)
{
    const Weights w = {numbers, held, held ? held->outputs : outputs};
    const int64_t size = is_bf16 ? 2 : 4, copied = norm || stride != inputs ? n * inputs * size : 0;
    const int64_t apart = adds ? n * outputs * size : 0;
    threads = threads_for(outputs * inputs * size, threads);
    Input input;
    const int64_t room = copied + apart + carve(&input, NULL, n, inputs, &w, is_bf16, level, threads);
    char *rows = room ? malloc(room) : NULL;
    if (room && !rows)
        return 1;
    void *product = adds ? rows + copied : out;
    carve(&input, rows + copied + apart, n, inputs, &w, is_bf16, level, threads);
    if (copied) {
        normalised(x, stride, norm, is_bf16, eps, rows, n, inputs, is_bf16);
        x = rows;
    }
    lay_out(&input, x);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t done = 0, first, stop;
        for (int64_t m = 0; m < matrices; m++) {
            const Weights one = {numbers, held ? held + m : NULL, held ? held[m].outputs : outputs};
            share(&input, one.outputs, &first, &stop);
            const void *added = bias ? at(bias, done, is_bf16) : NULL;
            part(&input, &one, added, (void *)at(product, done, is_bf16), outputs, first, stop, is_bf16);
            if (adds)
                add_part(out, product, n, outputs, done + first, done + stop, is_bf16);
            done += one.outputs;
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

/* The same of any x: 0 below -87.3, and NaN of NaN. */
INLINE __m512 whole_exponential(__m512 x)
{
    const __m512 e = _mm512_mask_mov_ps(exponential(x), _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_LT_OQ), _mm512_setzero_ps());
    return _mm512_mask_mov_ps(e, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
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

/* This thread's part of `silu(gate · x) * (up · x)`: to `wide` [n][2 * width], and in rows that follow one another to `narrow`. */
INLINE void activated_part(const Input *input, const Weights *gate, const Weights *up, char *wide, char *narrow, int64_t width,
                           int is_bf16)
{
    const int64_t n = input->n, size = is_bf16 ? 2 : 4;
    int64_t first, stop;
    share(input, width, &first, &stop);
    part(input, gate, NULL, wide, 2 * width, first, stop, is_bf16);
    part(input, up, NULL, wide + width * size, 2 * width, first, stop, is_bf16);
    activate(wide, n, width, first, stop, is_bf16);
    for (int64_t r = 0; r < n; r++)
        memcpy(narrow + (r * width + first) * size, wide + (2 * r * width + first) * size, (stop - first) * size);
}

INLINE int gated_mlp(const void *x, int64_t stride, const void *norm, float eps, const Weights *gate, const Weights *up,
                     const Weights *down, void *out, int adds, int64_t n, int64_t hidden, int64_t width, int is_bf16, int level,
                     int threads)
{
    const int64_t size = is_bf16 ? 2 : 4, copied = n * ((adds ? 2 : 1) * hidden + 3 * width) * size;
    threads = threads_for(3 * hidden * width * size, threads);
    Input input, activated;
    const int64_t first_room = carve(&input, NULL, n, hidden, gate, is_bf16, level, threads);
    char *rows = malloc(copied + first_room + carve(&activated, NULL, n, width, down, is_bf16, level, threads));
    if (!rows)
        return 1;
    char *wide = rows + n * hidden * size, *narrow = wide + 2 * n * width * size;
    void *product = adds ? narrow + n * width * size : out;
    carve(&input, rows + copied, n, hidden, gate, is_bf16, level, threads);
    carve(&activated, rows + copied + first_room, n, width, down, is_bf16, level, threads);
    normalised(x, stride, norm, is_bf16, eps, rows, n, hidden, is_bf16);
    lay_out(&input, rows);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        activated_part(&input, gate, up, wide, narrow, width, is_bf16);
#pragma omp barrier
#pragma omp single
        lay_out(&activated, narrow);
        int64_t first, stop;
        share(&activated, hidden, &first, &stop);
        part(&activated, down, NULL, product, hidden, first, stop, is_bf16);
        if (adds)
            add_part(out, product, n, hidden, first, stop, is_bf16);
    }
    free(rows);
    return 0;
}

/* An expert that rows have: of the pairs of a row and one of its experts, in the order of experts, `n` from `first` on. */
typedef struct {
    Weights gate, up, down;
    int64_t first, n;
    Input input, activated;
} Expert;

/* Adds columns `first` to `stop` of an expert's results, each times its share, to those of its rows. A sum is rounded after the
 * product is. */
INLINE void add_shares(const Expert *one, const bf16 *results, const int64_t *pairs, const float *shares, int64_t used, float *out,
                       int64_t hidden, int64_t first, int64_t stop)
{
    for (int64_t i = one->first; i < one->first + one->n; i++) {
        const __m512 part = _mm512_set1_ps(shares[pairs[i]]);
        float *row = out + pairs[i] / used * hidden;
        for (int64_t c = first; c < stop; c += 16) {
            const __mmask16 mask = first16(stop - c);
            const __m512 result = load16(results + i * hidden + c, mask, 1);
            const __m512 product = _mm512_mul_round_ps(result, part, _MM_FROUND_CUR_DIRECTION);
            _mm512_mask_storeu_ps(row + c, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, row + c), product));
        }
    }
}

/* Writes columns `first` to `stop` of `sums` [n][hidden], or adds them to what is there, once they are rounded. */
INLINE void put_sums(const float *sums, bf16 *out, int adds, int64_t n, int64_t hidden, int64_t first, int64_t stop)
{
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = first; c < stop; c += 16) {
            const __mmask16 mask = first16(stop - c);
            bf16 *place = out + r * hidden + c;
            const __m512 sum = as_stored(_mm512_maskz_loadu_ps(mask, sums + r * hidden + c), 1);
            store16(place, adds ? _mm512_add_ps(load16(place, mask, 1), sum) : sum, mask, 1);
        }
}

/* `shares[i] = softmax(logits)[ids[i]]` of the `used` likeliest of `count` experts, the likeliest first and of equal ones the
 * first; or so many times that as makes their sum 1. `logits` are overwritten. */
INLINE void choose(float *logits, int64_t count, int64_t used, int normalised, int64_t *ids, float *shares)
{
    __m512 largest = _mm512_set1_ps(-INFINITY), sums = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16)
        largest = _mm512_mask_max_ps(largest, first16(count - i), largest, _mm512_maskz_loadu_ps(first16(count - i), logits + i));
    const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 mask = first16(count - i);
        const __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, logits + i), most);
        const __m512 e = whole_exponential(x);
        _mm512_mask_storeu_ps(logits + i, mask, e);
        sums = _mm512_mask_add_ps(sums, mask, sums, e);
    }
    const float sum = _mm512_reduce_add_ps(sums);
    float together = 0.0f;
    for (int64_t i = 0; i < count; i++)
        logits[i] /= sum;
    for (int64_t k = 0; k < used; k++) {
        int64_t best = k; /* where all are NaN */
        float likely = -1.0f;
        for (int64_t i = 0; i < count; i++)
            if (logits[i] > likely) {
                likely = logits[i];
                best = i;
            }
        ids[k] = best;
        shares[k] = logits[best];
        together += shares[k];
        if (logits[best] == likely)
            logits[best] = -1.0f;
    }
    for (int64_t k = 0; k < used && normalised; k++)
        shares[k] /= together;
}

int triforce_choose_experts(const void *x, int64_t n, int64_t hidden, int is_bf16, const float *router, int64_t count, int64_t used,
                            int normalised, int64_t *ids, float *shares, int level, int threads)
{
    float *logits = malloc((n * count + (is_bf16 ? n * hidden : 0)) * sizeof(float)), *wide = logits + n * count;
    if (!logits)
        return 1;
    for (int64_t i = 0; i < n * hidden && is_bf16; i += 16) {
        const __mmask16 mask = first16(n * hidden - i);
        _mm512_mask_storeu_ps(wide + i, mask, load16(at(x, i, 1), mask, 1));
    }
    const int failed = linear(is_bf16 ? wide : x, hidden, NULL, 0.0f, router, NULL, 1, NULL, logits, 0, n, hidden, count, 0, level,
                              threads);
    for (int64_t r = 0; r < n && !failed; r++)
        choose(logits + r * count, count, used, normalised, ids + r * used, shares + r * used);
    free(logits);
    return failed;
}

int triforce_expert_mlps(const void *x, int64_t n, int64_t hidden, int64_t width, const Quantised *held, int64_t count,
                         const int64_t *ids, const float *shares, int64_t used, void *out, int adds, int level, int threads)
{
    const int64_t all = n * used;
    threads = threads_for((all < count ? all : count) * 3 * hidden * width * 2, threads);
    /* Pairs, by their places in `ids`, in the order of experts, and those of an expert in the order of rows. */
    Expert *experts = malloc((all + 1) * (sizeof(Expert) + sizeof(int64_t)));
    if (!experts)
        return 1;
    *experts = (Expert){.n = 0};
    int64_t *pairs = (int64_t *)(void *)(experts + all + 1), active = 0, placed = 0, room = 0, spare = 0;
    for (int64_t e = 0; e < count && placed < all; e++) {
        const int64_t first = placed;
        for (int64_t i = 0; i < all; i++)
            if (ids[i] == e)
                pairs[placed++] = i;
        if (placed == first)
            continue;
        Expert *one = experts + active++;
        *one = (Expert){.first = first, .n = placed - first};
        one->gate = (Weights){NULL, held + 3 * e, width};
        one->up = (Weights){NULL, held + 3 * e + 1, width};
        one->down = (Weights){NULL, held + 3 * e + 2, hidden};
        room += carve(&one->input, NULL, one->n, hidden, &one->gate, 1, level, 0);
        room += carve(&one->activated, NULL, one->n, width, &one->down, 1, level, 0);
        spare = one->input.spare_size > spare ? one->input.spare_size : spare;
        spare = one->activated.spare_size > spare ? one->activated.spare_size : spare;
    }
    /* A thread works on one expert at a time: its spare memory is for all of them. */
    float *sums = malloc(n * hidden * 4 + all * (2 * hidden + 3 * width) * 2 + 64 + threads * spare * 2 + room);
    if (!sums) {
        free(experts);
        return 1;
    }
    bf16 *rows = (bf16 *)(void *)(sums + n * hidden), *wide = rows + all * hidden;
    bf16 *narrow = wide + all * 2 * width, *results = narrow + all * width;
    char *rest = (char *)(results + all * hidden);
    rest += (64 - (uintptr_t)rest % 64) % 64;
    bf16 *shared = (bf16 *)(void *)rest;
    rest += threads * spare * 2;
    for (Expert *one = experts; one < experts + active; one++) {
        rest += carve(&one->input, rest, one->n, hidden, &one->gate, 1, level, 0);
        rest += carve(&one->activated, rest, one->n, width, &one->down, 1, level, 0);
        one->input.spare = one->activated.spare = shared;
        one->input.spare_size = one->activated.spare_size = spare;
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const int64_t step = omp_get_num_threads(), me = omp_get_thread_num();
        for (Expert *one = experts + me; one < experts + active; one += step) {
            for (int64_t i = one->first; i < one->first + one->n; i++)
                memcpy(rows + i * hidden, (const bf16 *)x + pairs[i] / used * hidden, hidden * 2);
            lay_out(&one->input, rows + one->first * hidden);
        }
#pragma omp barrier
        for (Expert *one = experts; one < experts + active; one++)
            activated_part(&one->input, &one->gate, &one->up, (char *)(wide + one->first * 2 * width),
                           (char *)(narrow + one->first * width), width, 1);
#pragma omp barrier
        for (Expert *one = experts + me; one < experts + active; one += step)
            lay_out(&one->activated, narrow + one->first * width);
#pragma omp barrier
        int64_t first, stop;
        share(&experts->activated, hidden, &first, &stop);
        for (int64_t r = 0; r < n; r++)
            memset(sums + r * hidden + first, 0, (stop - first) * 4);
        for (Expert *one = experts; one < experts + active; one++) {
            part(&one->activated, &one->down, NULL, results + one->first * hidden, hidden, first, stop, 1);
            add_shares(one, results, pairs, shares, used, sums, hidden, first, stop);
        }
        put_sums(sums, out, adds, n, hidden, first, stop);
    }
    free(sums);
    free(experts);
    return 0;
}

INLINE void rms_norm(const void *x, int64_t head_stride, int64_t row_stride, const void *norm, int norm_is_bf16, float eps,
                     void *out, int64_t heads, int64_t n, int64_t width, int is_bf16, int threads)
{
    threads = threads_for(heads * n * width * (is_bf16 ? 2 : 4), threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < heads * n; i++)
        normalised(at(x, i / n * head_stride + i % n * row_stride, is_bf16), 0, norm, norm_is_bf16, eps,
                   (void *)at(out, i * width, is_bf16), 1, width, is_bf16);
}

INLINE __m512 sigmoid(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f), none = _mm512_setzero_ps();
    const __m512 y = _mm512_div_ps(one, _mm512_add_ps(exponential(_mm512_sub_ps(none, x)), one));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(_mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_LT_OQ), none), is_nan, x);
}

INLINE void gated_norm(const void *x, const void *gate, int64_t gate_stride, const void *weight, float eps, void *out, int64_t n,
                       int64_t heads, int64_t width, int is_bf16, int threads)
{
    threads = threads_for(2 * n * heads * width * (is_bf16 ? 2 : 4), threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t h = 0; h < n * heads; h++) {
        const char *row = at(x, h * width, is_bf16), *gates = at(gate, h / heads * gate_stride + h % heads * width, is_bf16);
        const __m512 scale = inverse_rms(row, eps, width, is_bf16);
        for (int64_t i = 0; i < width; i += 16) {
            const __mmask16 mask = first16(width - i);
            const __m512 g = load16(at(gates, i, is_bf16), mask, is_bf16);
            __m512 v = as_stored(_mm512_mul_ps(load16(at(row, i, is_bf16), mask, is_bf16), scale), is_bf16);
            v = as_stored(_mm512_mul_ps(v, load16(at(weight, i, is_bf16), mask, is_bf16)), is_bf16);
            store16((void *)at(out, h * width + i, is_bf16), _mm512_mul_ps(v, _mm512_mul_ps(g, sigmoid(g))), mask, is_bf16);
        }
    }
}

INLINE void by_sigmoid(const void *x, const void *gate, int64_t gates, void *out, int64_t n, int64_t width, int is_bf16)
{
    for (int64_t r = 0; r < n; r++)
        for (int64_t i = 0; i < width; i += 16) {
            const __mmask16 mask = first16(width - i);
            const char *place = at(gate, r * gates + (gates == 1 ? 0 : i), is_bf16);
            __m512 g = load16(place, gates == 1 ? 1 : mask, is_bf16);
            if (gates == 1)
                g = _mm512_broadcastss_ps(_mm512_castps512_ps128(g));
            const __m512 y = _mm512_mul_ps(as_stored(sigmoid(g), is_bf16), load16(at(x, r * width + i, is_bf16), mask, is_bf16));
            store16((void *)at(out, r * width + i, is_bf16), y, mask, is_bf16);
        }
}

INLINE void rotate(const void *x, int64_t head_stride, int64_t row_stride, const float *cosines, const float *sines,
                   int64_t table_stride, void *out, int64_t out_head_stride, int64_t out_row_stride,
                   const int64_t *slots, int64_t heads, int64_t n, int64_t dim, int is_bf16)
{
    const int64_t half = dim / 2;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t r = 0; r < n; r++) {
            const char *from = at(x, h * head_stride + r * row_stride, is_bf16);
            char *to = (char *)at(out, h * out_head_stride + (slots ? slots[r] : r) * out_row_stride, is_bf16);
            if (!cosines) {
                memcpy(to, from, dim * (is_bf16 ? 2 : 4));
                continue;
            }
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

/* Each is compiled twice, once per input type, so that the type is a constant there; but in what threads begin, see layers_dots.h. */

int triforce_linear(const void *x, int64_t stride, const void *norm, float eps, const void *w, const void *bias,
                    const Quantised *held, int64_t matrices, void *out, int adds, int64_t n, int64_t inputs, int64_t outputs,
                    int is_bf16, int level, int threads)
{
    return is_bf16 ? linear(x, stride, norm, eps, w, held, matrices, bias, out, adds, n, inputs, outputs, 1, level, threads)
                   : linear(x, stride, norm, eps, w, held, matrices, bias, out, adds, n, inputs, outputs, 0, level, threads);
}

int triforce_gated_mlp(const void *x, int64_t stride, const void *norm, float eps, const void *gate_up, const void *down,
                       const Quantised *held, void *out, int adds, int64_t n, int64_t hidden, int64_t width, int is_bf16,
                       int level, int threads)
{
    const Weights gate = {gate_up, held, width}, lower = {down, held ? held + 2 : NULL, hidden};
    const Weights up = {held ? NULL : at(gate_up, width * hidden, is_bf16), held ? held + 1 : NULL, width};
    return is_bf16 ? gated_mlp(x, stride, norm, eps, &gate, &up, &lower, out, adds, n, hidden, width, 1, level, threads)
                   : gated_mlp(x, stride, norm, eps, &gate, &up, &lower, out, adds, n, hidden, width, 0, level, threads);
}

void triforce_rms_norm(const void *x, int64_t head_stride, int64_t row_stride, const void *norm, int norm_is_bf16, float eps,
                       void *out, int64_t heads, int64_t n, int64_t width, int is_bf16, int threads)
{
    if (!is_bf16)
        rms_norm(x, head_stride, row_stride, norm, 0, eps, out, heads, n, width, 0, threads);
    else if (norm_is_bf16)
        rms_norm(x, head_stride, row_stride, norm, 1, eps, out, heads, n, width, 1, threads);
    else
        rms_norm(x, head_stride, row_stride, norm, 0, eps, out, heads, n, width, 1, threads);
}

void triforce_gated_norm(const void *x, const void *gate, int64_t gate_stride, const void *weight, float eps, void *out, int64_t n,
                         int64_t heads, int64_t width, int is_bf16, int threads)
{
    if (is_bf16)
        gated_norm(x, gate, gate_stride, weight, eps, out, n, heads, width, 1, threads);
    else
        gated_norm(x, gate, gate_stride, weight, eps, out, n, heads, width, 0, threads);
}

void triforce_by_sigmoid(const void *x, const void *gate, int64_t gates, void *out, int64_t n, int64_t width, int is_bf16)
{
    if (is_bf16)
        by_sigmoid(x, gate, gates, out, n, width, 1);
    else
        by_sigmoid(x, gate, gates, out, n, width, 0);
}

void triforce_rotate(const void *x, int64_t head_stride, int64_t row_stride, const float *cosines, const float *sines,
                     int64_t table_stride, void *out, int64_t out_head_stride, int64_t out_row_stride,
                     const int64_t *slots, int64_t heads, int64_t n, int64_t dim, int is_bf16)
{
    if (is_bf16)
        rotate(x, head_stride, row_stride, cosines, sines, table_stride, out, out_head_stride, out_row_stride, slots,
               heads, n, dim, 1);
    else
        rotate(x, head_stride, row_stride, cosines, sines, table_stride, out, out_head_stride, out_row_stride, slots,
               heads, n, dim, 0);
}

#endif
