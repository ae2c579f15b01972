/* Products by dot products of rows: of the matrix, and of the input. Included by layers.c. */

#define OUTPUTS 4 /* rows of a matrix, and */
#define ROWS 4    /* rows of the input, that are multiplied together: 16 sums in registers */

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

/* Rows of the matrix from `first` to `stop` times all rows of `x`: `out[r, o] = w[o] · x[r] + bias[o]`. Memory for `spare`:
 * OUTPUTS rows of `inputs`, where the matrix is held in few bits. */
INLINE void linear_part(const void *x, const Weights *w, const void *bias, void *out, int64_t n, int64_t inputs,
                        int64_t stride, int64_t first, int64_t stop, int is_bf16, bf16 *spare)
{
    float sums[OUTPUTS][ROWS];
    for (int64_t o = first; o < stop; o += OUTPUTS) {
        const int count = stop - o < OUTPUTS ? (int)(stop - o) : OUTPUTS;
        const char *matrix = at(w->numbers, o * inputs, is_bf16);
        if (w->held) {
            fetch_held(w->held, o + OUTPUTS, OUTPUTS);
            for (int a = 0; a < count; a++)
                triforce_expand_part(w->held, o + a, 0, inputs, spare + a * inputs, 1, LEVEL_AVX512BF16);
            matrix = (const char *)spare;
        } else {
            for (int64_t i = 0; i < OUTPUTS * inputs * (is_bf16 ? 2 : 4); i += 64)
                __builtin_prefetch(matrix + FETCH_AHEAD + i);
        }
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
                    const int64_t place = (r + b) * stride + o + a;
                    if (is_bf16)
                        ((bf16 *)out)[place] = rounded(bias ? sums[a][b] + widened(((const bf16 *)bias)[o + a]) : sums[a][b]);
                    else
                        ((float *)out)[place] = bias ? sums[a][b] + ((const float *)bias)[o + a] : sums[a][b];
                }
        }
    }
}
