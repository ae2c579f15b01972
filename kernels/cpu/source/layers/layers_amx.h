/* Products with AMX: 16 rows of the matrix, 16 rows of the input and 32 columns at a time. Included by layers.c. Each sum goes
 * over the columns in their order, so a row's bits do not depend on the number of rows. */

#include "../amx.h"

#define AMX_OUTPUTS (2 * SIDE) /* rows of a matrix, and of the input, that are multiplied together */

/* Bytes of `n` rows that are laid out for `amx_linear_part`. */
static int64_t amx_laid_out(int64_t n, int64_t inputs)
{
    return (n + AMX_OUTPUTS - 1) / AMX_OUTPUTS * AMX_OUTPUTS * ((inputs + PAIRED - 1) / PAIRED * PAIRED) * 2;
}

/* Lays `n` rows out: [n / 16][inputs / 32][16 words][16 rows]. */
AMX void amx_lay_out(const bf16 *x, int64_t n, int64_t inputs, float *rows)
{
    const int64_t words = inputs / 2, size = (words + SIDE - 1) / SIDE * TILE_WORDS;
    for (int64_t r = 0; r < n; r += SIDE, rows += size)
        amx_turn(x + r * inputs, inputs, n - r, words, rows);
}

/* 32 outputs, or 16, of 32 rows, or 16: `sums` [32 outputs][32 rows]. `w` are the matrix' rows, `stride` numbers apart. */
AMX_INLINE void amx_products(
    const int outputs, const int rows, const bf16 *w, int64_t stride, const float *x, int64_t tiles, float *sums, const bf16 *next,
    int64_t next_stride)
{
    AMX_WRITTEN;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t tile = 0; tile < tiles; tile++) {
        if (next)
#pragma GCC unroll 32
            for (int i = 0; i < AMX_OUTPUTS; i++)
                __builtin_prefetch(next + i * next_stride + tile * PAIRED, 0, 2);
        _tile_loadd(4, w + tile * PAIRED, stride * 2);
        _tile_loadd(6, x + tile * TILE_WORDS, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (rows > SIDE) {
            _tile_loadd(7, x + (tiles + tile) * TILE_WORDS, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (outputs > SIDE) {
            _tile_loadd(5, w + SIDE * stride + tile * PAIRED, stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            if (rows > SIDE)
                _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, AMX_OUTPUTS * 4);
    _tile_stored(1, sums + SIDE, AMX_OUTPUTS * 4);
    _tile_stored(2, sums + SIDE * AMX_OUTPUTS, AMX_OUTPUTS * 4);
    _tile_stored(3, sums + SIDE * AMX_OUTPUTS + SIDE, AMX_OUTPUTS * 4);
}

/* `linear_part` for rows that are laid out. Memory for `spare`: AMX_OUTPUTS rows of `inputs`, rounded up to whole tiles. */
AMX void amx_linear_part(
    const float *x, const bf16 *w, const bf16 *bias, bf16 *out, int64_t n, int64_t inputs, int64_t outputs, int64_t first,
    int64_t stop, bf16 *spare)
{
    const int64_t tiles = (inputs + PAIRED - 1) / PAIRED, whole = tiles * PAIRED;
    float sums[AMX_OUTPUTS * AMX_OUTPUTS] __attribute__((aligned(64)));
    for (int64_t o = first; o < stop; o += AMX_OUTPUTS) {
        const int64_t count = stop - o < AMX_OUTPUTS ? stop - o : AMX_OUTPUTS;
        const bf16 *matrix = w + o * inputs;
        int64_t stride = inputs;
        const bf16 *next = matrix + AMX_OUTPUTS * inputs;
        /* The last tile of a row goes on into the next rows, whose numbers, which must be finite, meet zeros of `x`. Behind the
         * last row nothing is read. */
        if (count % SIDE || (outputs - o - count) * inputs < whole - inputs) {
            for (int64_t i = 0; i < count; i++) {
                memcpy(spare + i * whole, matrix + i * inputs, inputs * 2);
                memset(spare + i * whole + inputs, 0, (whole - inputs) * 2);
            }
            matrix = spare;
            stride = whole;
        }
        for (int64_t r0 = 0; r0 < n; r0 += AMX_OUTPUTS) {
            const int64_t rows = n - r0 < AMX_OUTPUTS ? n - r0 : AMX_OUTPUTS;
            const float *input = x + r0 / SIDE * tiles * TILE_WORDS;
            if (count > SIDE && rows > SIDE)
                amx_products(2 * SIDE, 2 * SIDE, matrix, stride, input, tiles, sums, r0 ? NULL : next, inputs);
            else if (count > SIDE)
                amx_products(2 * SIDE, SIDE, matrix, stride, input, tiles, sums, r0 ? NULL : next, inputs);
            else if (rows > SIDE)
                amx_products(SIDE, 2 * SIDE, matrix, stride, input, tiles, sums, r0 ? NULL : next, inputs);
            else
                amx_products(SIDE, SIDE, matrix, stride, input, tiles, sums, r0 ? NULL : next, inputs);
            for (int64_t a = 0; a < count; a += SIDE) {
                const __mmask16 some = first16(count - a);
                const __m512 added = bias ? load16(bias + o + a, some, 1) : _mm512_setzero_ps();
                for (int64_t b = 0; b < rows; b += SIDE) {
                    __m512 r[SIDE];
#pragma GCC unroll 16
                    for (int i = 0; i < SIDE; i++)
                        r[i] = _mm512_load_ps(sums + (a + i) * AMX_OUTPUTS + b);
                    vec_transpose(r);
                    for (int64_t i = 0; i < SIDE && b + i < rows; i++)
                        store16(out + (r0 + b + i) * outputs + o + a, _mm512_add_ps(r[i], added), some, 1);
                }
            }
        }
    }
}
