/* Matrix products as dot products of rows of the matrix and rows of the input. Included by layers.c. */

#define OUTPUTS 4 /* rows of a matrix, twice as many with one or two rows of the input, and */
#define ROWS 4    /* rows of the input, that are multiplied together: 16 sums in registers */

/* Bytes that a matrix in few bits is prefetched ahead: less far, as its numbers are made more slowly than they are read. */
#define HELD_AHEAD (8 * 1024)

/* `a[i] + a[i + 8]` of eight lanes, and behind them the same of `b`. */
INLINE __m512 added_halves(__m512 a, __m512 b)
{
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}

/* The sums of sixteen vectors, each with the bits of `_mm512_reduce_add_ps`: it adds the same pairs. */
INLINE __m512 sums_of_16(const __m512 vectors[16])
{
    __m512 four[4], two[2]; /* vectors' lanes, four or two of each vector */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 *of = vectors + 4 * i, a = added_halves(of[0], of[1]), b = added_halves(of[2], of[3]);
        four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const __m512d a = _mm512_castps_pd(four[2 * i]), b = _mm512_castps_pd(four[2 * i + 1]);
        two[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(two[0], two[1], 0xdd), _mm512_shuffle_ps(two[0], two[1], 0x88));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), all);
}

INLINE __m512i numbers_at(const char *p, __mmask32 mask, int is_bf16)
{
    return is_bf16 ? _mm512_maskz_loadu_epi16(mask, p) : _mm512_castps_si512(_mm512_maskz_loadu_ps((__mmask16)mask, p));
}

/* Adds to `sums[r * outputs + o]` the products of 64 bytes, or what `mask` has of them, of row o of `w` and row r of `x`: rows of
 * `bytes`. What lies `ahead` in the matrix is prefetched into the second cache: prefetching into the first one makes loads wait. */
INLINE void add_products(const char *w, const char *x, int64_t bytes, int outputs, int rows, int is_bf16, __mmask32 mask,
                         int64_t ahead, __m512 *sums)
{
    __m512i b[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        b[r] = numbers_at(x + r * bytes, mask, is_bf16);
#pragma GCC unroll 8
    for (int o = 0; o < outputs; o++, w += bytes) {
        if (outputs > 4)
            __asm__("" : "+r"(w)); /* or all addresses are computed ahead of the loop, and do not fit into registers */
        if (ahead)
            __builtin_prefetch(w + ahead, 0, 2);
        const __m512i a = numbers_at(w, mask, is_bf16);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512 *sum = sums + r * outputs + o;
            *sum = is_bf16 ? _mm512_dpbf16_ps(*sum, (__m512bh)a, (__m512bh)b[r])
                           : _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b[r]), *sum);
        }
    }
}

/* `out[r, o] = w[o] · x[r] + bias[o]` of 1, 4 or 8 outputs and up to 4 rows: sixteen results at most. */
INLINE void block(const char *w, const char *x, const char *bias, char *out, int64_t inputs, int64_t stride, int outputs,
                  int rows, int is_bf16, int64_t ahead)
{
    const int64_t size = is_bf16 ? 2 : 4, bytes = inputs * size;
    __m512 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        sums[i] = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64)
        add_products(w + i, x + i, bytes, outputs, rows, is_bf16, 0xffffffffu, ahead, sums);
    if (i < bytes)
        add_products(w + i, x + i, bytes, outputs, rows, is_bf16, (1u << (bytes - i) / size) - 1, ahead, sums);
    __m512 all = sums_of_16(sums);
    if (bias) {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i o = _mm512_and_si512(lane, _mm512_set1_epi32(outputs - 1));
        all = _mm512_add_ps(all, _mm512_permutexvar_ps(o, load16(bias, first16(outputs), is_bf16)));
    }
    char results[64] __attribute__((aligned(64)));
    store16(results, all, 0xffff, is_bf16);
    for (int r = 0; r < rows; r++)
        memcpy(out + r * stride * size, results + r * outputs * size, outputs * size);
}

/* The same of all rows, for 1 or 4 outputs. The first four rows prefetch: the others find the matrix in a cache. */
INLINE void blocks(const char *w, const char *x, const char *bias, char *out, int64_t n, int64_t inputs, int64_t stride,
                   int outputs, int is_bf16, int64_t ahead)
{
    const int64_t size = is_bf16 ? 2 : 4;
    for (; n > 0; n -= ROWS, x += ROWS * inputs * size, out += ROWS * stride * size, ahead = 0)
        if (n >= 4)
            block(w, x, bias, out, inputs, stride, outputs, 4, is_bf16, ahead);
        else if (n == 3)
            block(w, x, bias, out, inputs, stride, outputs, 3, is_bf16, ahead);
        else if (n == 2)
            block(w, x, bias, out, inputs, stride, outputs, 2, is_bf16, ahead);
        else
            block(w, x, bias, out, inputs, stride, outputs, 1, is_bf16, ahead);
}

/* Writes the numbers of `count` rows from `r` on, in bfloat16. */
INLINE void make_numbers(const Quantised *held, int64_t r, int64_t count, bf16 *numbers)
{
    for (const int64_t end = r + count; r < end; r++, numbers += held->inputs)
        if (!triforce_expand_bfloat16(held, r, 1, 0, held->inputs, numbers, 0, HELD_AHEAD)) {
            fetch_held(held, r + OUTPUTS, 1);
            triforce_expand_part(held, r, 0, held->inputs, numbers, 1, LEVEL_AVX512BF16);
        }
}

/* Rows of the matrix from `first` to `stop` times all rows of `x`: `out[r, o] = w[o] · x[r] + bias[o]`. Memory for `spare`:
 * OUTPUTS rows of `inputs`, where the matrix is held in few bits. */
INLINE void linear_part(const void *x, const Weights *w, const void *bias, void *out, int64_t n, int64_t inputs,
                        int64_t stride, int64_t first, int64_t stop, int is_bf16, bf16 *spare)
{
    const int64_t size = is_bf16 ? 2 : 4, most = n > 0 && n <= 2 && !w->held ? 2 * OUTPUTS : OUTPUTS;
    const int64_t further = larger(FETCH_AHEAD, most * inputs * size); /* than the rows that are multiplied now */
    for (int64_t o = first, count; o < stop; o += count) {
        const char *matrix = (const char *)w->numbers + o * inputs * size, *added = bias ? (const char *)bias + o * size : NULL;
        char *place = (char *)out + o * size;
        const int64_t ahead = w->held || (stop - o) * inputs * size <= further ? 0 : further;
        count = stop - o >= most ? most : stop - o >= OUTPUTS ? OUTPUTS : 1;
        if (w->held) {
            make_numbers(w->held, o, count, spare);
            matrix = (const char *)spare;
        }
        if (count == 2 * OUTPUTS && n == 2)
            block(matrix, x, added, place, inputs, stride, 2 * OUTPUTS, 2, is_bf16, ahead);
        else if (count == 2 * OUTPUTS)
            block(matrix, x, added, place, inputs, stride, 2 * OUTPUTS, 1, is_bf16, ahead);
        else if (count == OUTPUTS)
            blocks(matrix, x, added, place, n, inputs, stride, OUTPUTS, is_bf16, ahead);
        else
            blocks(matrix, x, added, place, n, inputs, stride, 1, is_bf16, 0);
    }
}

/* Compiled once for each type, which is no constant where threads begin. */
static void linear_part_bf16(const void *x, const Weights *w, const void *bias, void *out, int64_t n, int64_t inputs,
                             int64_t stride, int64_t first, int64_t stop, bf16 *spare)
{
    linear_part(x, w, bias, out, n, inputs, stride, first, stop, 1, spare);
}

static void linear_part_float32(const void *x, const Weights *w, const void *bias, void *out, int64_t n, int64_t inputs,
                                int64_t stride, int64_t first, int64_t stop, bf16 *spare)
{
    linear_part(x, w, bias, out, n, inputs, stride, first, stop, 0, spare);
}
