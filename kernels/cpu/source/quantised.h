/* Reads rows of matrices in few bits. Shared by expansions and products. */

#ifndef TRIFORCE_QUANTISED
#define TRIFORCE_QUANTISED

#include "cpu.h"

/* The bytes of row `r`. */
INLINE const uint8_t *row_of(const Quantised *matrix, int64_t r)
{
    return (const uint8_t *)matrix->values + r * matrix->row_bytes;
}

/* What the float16 in two bytes stands for. */
INLINE float float16_at(const uint8_t *place)
{
    const uint32_t sign = (uint32_t)(place[1] & 0x80) << 24, magnitude = (uint32_t)(place[1] & 0x7f) << 8 | place[0];
    const float small = (float)magnitude * 0x1p-24f; /* subnormal */
    uint32_t bits;
    memcpy(&bits, &small, 4);
    if (magnitude >= 0x400)
        bits = (magnitude << 13) + (magnitude >= 0x7c00 ? 0x70000000 : 0x38000000);
    return float_of_bits(bits | sign);
}

/* The scale, and the zero, of a group of row `r`. */
INLINE float scale_of(const Quantised *matrix, int64_t r, int64_t group)
{
    const void *scales = (const void *)matrix->scales;
    const int64_t i = r * matrix->groups + group;
    switch (matrix->scales_are) {
    case NUMBERS_FLOAT32: return ((const float *)scales)[i];
    case NUMBERS_FLOAT16: return float16_at((const uint8_t *)scales + i * 2);
    default: return float_of_bits((uint32_t)((const uint16_t *)scales)[i] << 16);
    }
}

INLINE float zero_of(const Quantised *matrix, int64_t r, int64_t group)
{
    const void *zeros = (const void *)matrix->zeros;
    const int64_t i = r * matrix->groups + group;
    if (!zeros)
        return (float)matrix->zero;
    switch (matrix->zeros_are) {
    case NUMBERS_UINT8: return (float)((const uint8_t *)zeros)[i];
    case NUMBERS_INT8: return (float)((const int8_t *)zeros)[i];
    default: return (float)((const int16_t *)zeros)[i];
    }
}

INLINE int inputs_of_block(int form) { return form >= BLOCKS_Q4_K ? 256 : 32; }

INLINE int bytes_of_block(int form)
{
    switch (form) {
    case BLOCKS_Q4_1: return 20;
    case BLOCKS_Q5_0: return 22;
    case BLOCKS_Q5_1: return 24;
    case BLOCKS_Q4_K: return 144;
    case BLOCKS_Q5_K: return 176;
    default: return 210;
    }
}

/* Writes `count` numbers of row `r` from `first` on, a multiple of 256, in float32 or rounded to bfloat16: as many, or what is
 * left of the row. */
void triforce_expand_part(const Quantised *matrix, int64_t r, int64_t first, int64_t count, void *out, int is_bf16, int level);

/* The same of a matrix of blocks. */
void triforce_expand_blocks(const Quantised *matrix, int64_t r, int64_t first, int64_t count, void *out, int is_bf16, int level);

/* The same of `rows` rows from `r` on, rounded to bfloat16, to rows of `out` that are `stride` apart. Meanwhile it prefetches what
 * lies `ahead` bytes behind each row's numbers (0: nothing): a line now and then, as the processor waits where many are asked for at
 * once. Needs LEVEL_AVX512BF16. Returns 0, having written nothing, for groups that it does not know. */
int triforce_expand_bfloat16(const Quantised *matrix, int64_t r, int64_t rows, int64_t first, int64_t count, uint16_t *out,
                             int64_t stride, int64_t ahead);

#define MOST_ROWS_OF_BLOCKS 4

/* Its products with `n` rows of `x`, at most `MOST_ROWS_OF_BLOCKS`, `inputs` apart: to places of `out`, `out_stride` apart.
 * Needs AVX2. */
void triforce_multiply_blocks(const uint8_t *row, int form, const float *x, int64_t n, int64_t inputs, int is_bf16, float *out,
                              int64_t out_stride);

#endif
