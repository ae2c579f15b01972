/* Products with AMX: 16 rows of the matrix, 16 rows of the input and 32 columns at a time. Included by layers.c. Each sum goes
 * over the columns in their order, so a row's bits do not depend on the number of rows. */

#include "../amx.h"

#define AMX_OUTPUTS (2 * SIDE) /* rows of a matrix, and of the input, that are multiplied together */

/* Rows in a tile: where there are fewer than 16, tiles of so many are loaded in less time. */
INLINE int amx_width(int64_t n) { return n < SIDE ? (int)n : SIDE; }

/* Bytes of `n` rows that are laid out for `amx_linear_part`. */
static int64_t amx_laid_out(int64_t n, int64_t inputs)
{
    const int64_t rows = n < SIDE ? n : (n + AMX_OUTPUTS - 1) / AMX_OUTPUTS * AMX_OUTPUTS;
    return rows * ((inputs + PAIRED - 1) / PAIRED * PAIRED) * 2;
}

/* Lays `n` rows out: [n / width][inputs / 32][16 words][width]. */
AMX void amx_lay_out(const bf16 *x, int64_t n, int64_t inputs, float *rows)
{
    const int width = amx_width(n);
    const int64_t words = inputs / 2, size = (words + SIDE - 1) / SIDE * SIDE * width;
    for (int64_t r = 0; r < n; r += SIDE, rows += size)
        amx_turn(x + r * inputs, inputs, n - r, words, width, rows);
}

/* Tiles 0 to 3 hold sums: of 16 outputs with 16 rows and the next 16 rows, and the same of the next 16 outputs; in memory they are
 * `[32 outputs][32 rows]`. */
AMX_INLINE void amx_zero_sums(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

AMX_INLINE void amx_load_sums(const float *sums)
{
    _tile_loadd(0, sums, AMX_OUTPUTS * 4);
    _tile_loadd(1, sums + SIDE, AMX_OUTPUTS * 4);
    _tile_loadd(2, sums + SIDE * AMX_OUTPUTS, AMX_OUTPUTS * 4);
    _tile_loadd(3, sums + SIDE * AMX_OUTPUTS + SIDE, AMX_OUTPUTS * 4);
}

AMX_INLINE void amx_store_sums(float *sums)
{
    _tile_stored(0, sums, AMX_OUTPUTS * 4);
    _tile_stored(1, sums + SIDE, AMX_OUTPUTS * 4);
    _tile_stored(2, sums + SIDE * AMX_OUTPUTS, AMX_OUTPUTS * 4);
    _tile_stored(3, sums + SIDE * AMX_OUTPUTS + SIDE, AMX_OUTPUTS * 4);
}

/* 32 outputs, or 16, of 32 rows, or of `width` up to 16: `sums` [32 outputs][32 rows]. `w` are the matrix' rows, `stride` numbers
 * apart. */
AMX_INLINE void amx_products(
    const int outputs, const int rows, const bf16 *w, int64_t stride, const float *x, int width, int64_t tiles, float *sums,
    const bf16 *next, int64_t next_stride)
{
    const int64_t tile_words = SIDE * width;
    AMX_WRITTEN;
    amx_zero_sums();
    for (int64_t tile = 0; tile < tiles; tile++) {
        if (next)
#pragma GCC unroll 32
            for (int i = 0; i < AMX_OUTPUTS; i++)
                __builtin_prefetch(next + i * next_stride + tile * PAIRED, 0, 2);
        _tile_loadd(4, w + tile * PAIRED, stride * 2);
        _tile_loadd(6, x + tile * tile_words, width * 4);
        _tile_dpbf16ps(0, 4, 6);
        if (rows > SIDE) {
            _tile_loadd(7, x + (tiles + tile) * tile_words, width * 4);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (outputs > SIDE) {
            _tile_loadd(5, w + SIDE * stride + tile * PAIRED, stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            if (rows > SIDE)
                _tile_dpbf16ps(3, 5, 7);
        }
    }
    amx_store_sums(sums);
}

#define PARTS_AHEAD 2
#define HELD_INPUTS 256                     /* whose numbers are made at a time: a part of a row */
#define HELD_STRIDE (HELD_INPUTS + PAIRED) /* so that rows are not all in the same sets of the first cache */

/* Makes the numbers of 16 rows from `r` on, or of as many as there are, for inputs from `start` on, and prefetches what lies `ahead`
 * of them. */
AMX_INLINE void amx_make_numbers(const Quantised *held, int64_t r, int64_t start, bf16 *numbers, int64_t ahead)
{
    const int64_t count = held->inputs - start < HELD_INPUTS ? held->inputs - start : HELD_INPUTS;
    const int64_t rows = held->outputs - r < SIDE ? held->outputs - r : SIDE;
    const int at_once = triforce_expand_bfloat16(held, r, rows, start, count, numbers, HELD_STRIDE, ahead);
    for (int64_t o = 0; !at_once && o < rows; o++, numbers += HELD_STRIDE) {
        triforce_expand_part(held, r + o, start, count, numbers, 1, LEVEL_AMX);
        if (count % PAIRED)
            memset(numbers + count, 0, (PAIRED - count % PAIRED) * 2);
    }
}

/* How far ahead of part `part` of a row from `first` on, of `bytes`, lies what is prefetched meanwhile: parts of the same row, or
 * the first ones of that which is multiplied next. */
AMX_INLINE int64_t amx_ahead(const Quantised *held, int64_t first, int64_t part, int64_t parts, int64_t bytes)
{
    if (part + PARTS_AHEAD < parts)
        return PARTS_AHEAD * bytes;
    const int64_t next = AMX_OUTPUTS * held->row_bytes + (smaller(PARTS_AHEAD, parts) - parts) * bytes;
    return first + AMX_OUTPUTS < held->outputs ? next : 0;
}

/* `amx_products` with 32 outputs from `first` on of a matrix that is held in few bits. Numbers of 16 outputs are made and multiplied
 * in turns: where the unit that multiplies has waited for half a microsecond, it takes three times as long. */
AMX_INLINE void amx_held_products(
    const int rows, const Quantised *held, int64_t first, const float *x, int width, int64_t tiles, float *sums)
{
    bf16 numbers[SIDE * HELD_STRIDE] __attribute__((aligned(64)));
    const int64_t tile_words = SIDE * width, of_part = HELD_INPUTS / PAIRED;
    const int64_t parts = (held->inputs + HELD_INPUTS - 1) / HELD_INPUTS, bytes = HELD_INPUTS * held->row_bytes / held->inputs;
    amx_zero_sums();
    for (int64_t made = 0; made < 2 * parts; made++) {
        const int64_t part = made / 2, r = first + made % 2 * SIDE;
        amx_make_numbers(held, r, part * HELD_INPUTS, numbers, amx_ahead(held, r, part, parts, bytes));
        AMX_WRITTEN;
        for (int64_t i = 0, tile = part * of_part; i < of_part && tile < tiles; i++, tile++) {
            _tile_loadd(4, numbers + i * PAIRED, HELD_STRIDE * 2);
            _tile_loadd(6, x + tile * tile_words, width * 4);
            if (rows > SIDE)
                _tile_loadd(7, x + (tiles + tile) * tile_words, width * 4);
            if (made % 2) {
                _tile_dpbf16ps(2, 4, 6);
                if (rows > SIDE)
                    _tile_dpbf16ps(3, 4, 7);
            } else {
                _tile_dpbf16ps(0, 4, 6);
                if (rows > SIDE)
                    _tile_dpbf16ps(1, 4, 7);
            }
        }
        AMX_WRITTEN; /* nor is anything written before it was read */
    }
    amx_store_sums(sums);
}

/* The same with any number `n` of rows, of which each 32 have `sums` [32 outputs][32 rows]. */
AMX void amx_held_sums(const Quantised *held, int64_t first, const float *x, int64_t n, int64_t tiles, float *sums)
{
    bf16 numbers[AMX_OUTPUTS * HELD_STRIDE] __attribute__((aligned(64)));
    const int64_t of_start = HELD_INPUTS / PAIRED;
    memset(sums, 0, (n + AMX_OUTPUTS - 1) / AMX_OUTPUTS * AMX_OUTPUTS * AMX_OUTPUTS * 4);
    for (int64_t start = 0; start < held->inputs; start += HELD_INPUTS) {
        for (int64_t o = 0; o < AMX_OUTPUTS; o += SIDE)
            amx_make_numbers(held, first + o, start, numbers + o * HELD_STRIDE, 0);
        AMX_WRITTEN;
        for (int64_t r0 = 0; r0 < n; r0 += AMX_OUTPUTS) {
            float *here = sums + r0 * AMX_OUTPUTS;
            const float *some = x + r0 / SIDE * tiles * TILE_WORDS;
            const int is_wide = n - r0 > SIDE;
            amx_load_sums(here);
            for (int64_t i = 0, tile = start / PAIRED; i < of_start && tile < tiles; i++, tile++) {
                _tile_loadd(4, numbers + i * PAIRED, HELD_STRIDE * 2);
                _tile_loadd(5, numbers + SIDE * HELD_STRIDE + i * PAIRED, HELD_STRIDE * 2);
                _tile_loadd(6, some + tile * TILE_WORDS, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(2, 5, 6);
                if (is_wide) {
                    _tile_loadd(7, some + (tiles + tile) * TILE_WORDS, 64);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            amx_store_sums(here);
        }
    }
}

/* `linear_part` for rows that are laid out. Memory for `spare`: AMX_OUTPUTS rows of `inputs`, rounded up to whole tiles; where the
 * matrix is held in few bits, sums of AMX_OUTPUTS outputs with all rows, rounded up to as many. */
AMX void amx_linear_part(
    const float *x, const Weights *w, const bf16 *bias, bf16 *out, int64_t n, int64_t inputs, int64_t out_stride, int64_t first,
    int64_t stop, bf16 *spare)
{
    const int64_t tiles = (inputs + PAIRED - 1) / PAIRED, whole = tiles * PAIRED;
    const int width = amx_width(n);
    float sums[AMX_OUTPUTS * AMX_OUTPUTS] __attribute__((aligned(64)));
    for (int64_t o = first; w->held && o < first + AMX_OUTPUTS && o < stop; o++) /* nothing before has fetched these */
        fetch(row_of(w->held, o), smaller(PARTS_AHEAD * HELD_INPUTS * w->held->row_bytes / inputs, w->held->row_bytes));
    for (int64_t o = first; o < stop; o += AMX_OUTPUTS) {
        const int64_t count = stop - o < AMX_OUTPUTS ? stop - o : AMX_OUTPUTS;
        const bf16 *matrix = (const bf16 *)w->numbers + o * inputs;
        int64_t stride = inputs;
        const bf16 *next = w->held ? NULL : matrix + AMX_OUTPUTS * inputs;
        /* The last tile of a row goes on into the next rows, whose numbers, which must be finite, meet zeros of `x`. Behind the
         * last row nothing is read. */
        if (w->held && n > AMX_OUTPUTS) {
            fetch_held(w->held, o + AMX_OUTPUTS, AMX_OUTPUTS);
            amx_held_sums(w->held, o, x, n, tiles, (float *)(void *)spare);
        } else if (!w->held && (count % SIDE || (w->outputs - o - count) * inputs < whole - inputs)) {
            for (int64_t i = 0; i < count; i++) {
                memcpy(spare + i * whole, matrix + i * inputs, inputs * 2);
                memset(spare + i * whole + inputs, 0, (whole - inputs) * 2);
            }
            matrix = spare;
            stride = whole;
        }
        for (int64_t r0 = 0; r0 < n; r0 += AMX_OUTPUTS) {
            const int64_t rows = n - r0 < AMX_OUTPUTS ? n - r0 : AMX_OUTPUTS;
            const float *input = x + r0 / SIDE * tiles * SIDE * width;
            if (w->held && n > AMX_OUTPUTS)
                memcpy(sums, (float *)(void *)spare + r0 * AMX_OUTPUTS, sizeof sums);
            else if (w->held && rows > SIDE)
                amx_held_products(2 * SIDE, w->held, o, input, width, tiles, sums);
            else if (w->held)
                amx_held_products(SIDE, w->held, o, input, width, tiles, sums);
            else if (count > SIDE && rows > SIDE)
                amx_products(2 * SIDE, 2 * SIDE, matrix, stride, input, width, tiles, sums, r0 ? NULL : next, inputs);
            else if (count > SIDE)
                amx_products(2 * SIDE, SIDE, matrix, stride, input, width, tiles, sums, r0 ? NULL : next, inputs);
            else if (rows > SIDE)
                amx_products(SIDE, 2 * SIDE, matrix, stride, input, width, tiles, sums, r0 ? NULL : next, inputs);
            else
                amx_products(SIDE, SIDE, matrix, stride, input, width, tiles, sums, r0 ? NULL : next, inputs);
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
                        store16(out + (r0 + b + i) * out_stride + o + a, _mm512_add_ps(r[i], added), some, 1);
                }
            }
        }
    }
}
