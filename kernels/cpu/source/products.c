/* Products of few rows with a matrix in few bits. Some outputs are expanded at a time, and multiplied by all rows while they are
 * in the cache. With blocks and very few rows, each number is multiplied as soon as it is expanded. The sums of a row do not
 * depend on other rows. */

#include "cpu.h"
#include "quantised.h"

#include <stdlib.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include "avx2.h"

#define OUTPUTS 4 /* expanded at a time */
#define TILE 512  /* inputs that all rows are multiplied by before the next ones */

/* Adds to `sums[r][o]` the products of a tile of `OUTPUTS` outputs, `TILE` apart, with `n` rows of `x`. */
VEC void add_tile(const float *tile, int64_t count, const float *x, int64_t stride, int64_t n, __m256 *sums)
{
    for (int64_t r = 0; r < n; r++, x += stride) {
        __m256 a = sums[r * OUTPUTS], b = sums[r * OUTPUTS + 1], c = sums[r * OUTPUTS + 2], d = sums[r * OUTPUTS + 3];
        for (int64_t i = 0; i < count; i += LANES) {
            const __m256 here = vec_load(x + i);
            a = vec_fma(vec_load(tile + i), here, a);
            b = vec_fma(vec_load(tile + TILE + i), here, b);
            c = vec_fma(vec_load(tile + 2 * TILE + i), here, c);
            d = vec_fma(vec_load(tile + 3 * TILE + i), here, d);
        }
        sums[r * OUTPUTS] = a;
        sums[r * OUTPUTS + 1] = b;
        sums[r * OUTPUTS + 2] = c;
        sums[r * OUTPUTS + 3] = d;
    }
}

/* How expanded numbers are held, and what they are to be. */
enum { FLOATS, FLOATS_TO_ROUND, BFLOATS };

/* The numbers of a tile, of which there are `count`, a multiple of 8, in float32. */
VEC void take_tile(const void *numbers, int64_t inputs, int held, int64_t first, int64_t count, float *tile)
{
    for (int o = 0; o < OUTPUTS; o++) {
        const float *floats = (const float *)numbers + o * inputs + first;
        const uint16_t *bfloats = (const uint16_t *)numbers + o * inputs + first;
        for (int64_t i = 0; i < count; i += LANES) {
            __m256 some;
            if (held == BFLOATS) {
                const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(bfloats + i)));
                some = _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
            } else {
                some = vec_load(floats + i);
            }
            vec_store(tile + o * TILE + i, held == FLOATS_TO_ROUND ? vec_rounded(some) : some);
        }
    }
}

__attribute__((target(AVX2_TARGET))) static void multiply(const void *numbers, int64_t inputs, int held, const float *x,
                                                          int64_t n, int64_t outputs, __m256 *sums, float *out,
                                                          int64_t out_stride)
{
    float tile[OUTPUTS * TILE];
    for (int64_t i = 0; i < n * OUTPUTS; i++)
        sums[i] = vec_zero();
    for (int64_t first = 0; first < inputs; first += TILE) {
        const int64_t count = inputs - first < TILE ? inputs - first : TILE;
        switch (held) {
        case BFLOATS: take_tile(numbers, inputs, BFLOATS, first, count, tile); break;
        case FLOATS_TO_ROUND: take_tile(numbers, inputs, FLOATS_TO_ROUND, first, count, tile); break;
        default: take_tile(numbers, inputs, FLOATS, first, count, tile);
        }
        add_tile(tile, count, x + first, inputs, n, sums);
    }
    for (int64_t r = 0; r < n; r++)
        for (int64_t o = 0; o < outputs; o++)
            out[r * out_stride + o] = vec_sum(sums[r * OUTPUTS + o]);
}

int triforce_product(const Quantised *w, const float *x, int64_t n, float *out, int is_bf16, int threads)
{
    /* No other level's numbers in bfloat16 differ, but by zeros in the place of very small ones. */
    const int level = triforce_cpu_level() < LEVEL_AVX2 ? LEVEL_NONE : LEVEL_AVX2, form = (int)w->kind - BLOCKS;
    if (level == LEVEL_NONE)
        return 2;
    const int64_t inputs = w->inputs, outputs = w->outputs;
    const int held = !is_bf16 ? FLOATS : form < 0 ? BFLOATS : FLOATS_TO_ROUND;
    const int64_t row_size = inputs * (held == BFLOATS ? 2 : 4), sets = (outputs + OUTPUTS - 1) / OUTPUTS;
    int failed = 0;
#pragma omp parallel num_threads(triforce_threads(threads)) reduction(| : failed)
    {
        char *numbers = aligned_alloc(64, (size_t)(OUTPUTS * row_size + 63) / 64 * 64);
        __m256 *sums = aligned_alloc(64, (size_t)(n * OUTPUTS) * sizeof *sums);
        failed = !numbers || !sums;
#pragma omp for schedule(static)
        for (int64_t set = 0; set < sets; set++) {
            const int64_t first = set * OUTPUTS, count = outputs - first < OUTPUTS ? outputs - first : OUTPUTS;
            if (failed)
                continue;
            if (form >= 0 && n > 0 && n <= MOST_ROWS_OF_BLOCKS) {
                for (int64_t o = first; o < first + count; o++)
                    triforce_multiply_blocks(row_of(w, o), form, x, n, inputs, is_bf16, out + o, outputs);
                continue;
            }
            for (int64_t o = 0; o < OUTPUTS; o++) { /* of those that there are not, the first again */
                const int64_t r = first + (o < count ? o : 0);
                triforce_expand_part(w, r, 0, inputs, numbers + o * row_size, held == BFLOATS, level);
            }
            multiply(numbers, inputs, held, x, n, count, sums, out + first, outputs);
        }
        free(numbers);
        free(sums);
    }
    return failed;
}
#else
int triforce_product(const Quantised *w, const float *x, int64_t n, float *out, int is_bf16, int threads)
{
    (void)w, (void)x, (void)n, (void)out, (void)is_bf16, (void)threads;
    return 2;
}
#endif
