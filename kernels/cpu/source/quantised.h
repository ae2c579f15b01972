/* A row at a time of matrices that are held in few bits: what expansions and products share. */

#ifndef TRIFORCE_QUANTISED
#define TRIFORCE_QUANTISED

#include "cpu.h"

/* A matrix in groups; see `triforce_expand`. */
typedef struct {
    const uint8_t *values;
    int kind;
    const float *scales, *zeros;
    const int64_t *group_of;
    const float *float8; /* what each byte stands for, where values are such */
    int64_t inputs, groups;
} Grouped;

/* Writes what each of 256 bytes stands for in e4m3. */
void triforce_float8(float *numbers);

/* Writes the numbers of row `r`, in float32 or rounded to bfloat16. */
void triforce_expand_grouped(const Grouped *matrix, int64_t r, void *out, int is_bf16, int level);

/* The same of a row of blocks. */
void triforce_expand_row_of_blocks(const uint8_t *row, int form, void *out, int64_t inputs, int is_bf16, int level);

#define MOST_ROWS_OF_BLOCKS 4

/* Its products with `n` rows of `x`, at most `MOST_ROWS_OF_BLOCKS`, `inputs` apart: to places of `out`, `out_stride` apart.
 * Needs AVX2. */
void triforce_multiply_blocks(const uint8_t *row, int form, const float *x, int64_t n, int64_t inputs, int is_bf16, float *out,
                              int64_t out_stride);

#endif
