/* The first half of attention over a tile of keys: scores, and their exponentials. Included by attention_body.h, for each
 * instruction set and input type anew, with the names defined there. */

/* Writes the first `count` keys, transposed, to `transposed` [words][TILE], followed by zeros. */
FN void F(transpose_keys)(const element *keys, int64_t row, int64_t count, int64_t dim, float *transposed)
{
    static const float zeros[MAX_DIM];
    for (int64_t key = 0; key < TILE; key += LANES) {
        const float *rows[LANES];
        for (int i = 0; i < LANES; i++)
            rows[i] = key + i < count ? (const float *)(const void *)(keys + (key + i) * row) : zeros;
        for (int64_t word = 0; word < dim * (int64_t)sizeof(element) / 4; word += LANES) {
            vec r[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                r[i] = V(load)(rows[i] + word);
            V(transpose)(r);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
#if IS_BF16 && !HAS_DOT
                V(store)(transposed + 2 * (word + i) * TILE + key, V(first)(r[i]));
                V(store)(transposed + (2 * (word + i) + 1) * TILE + key, V(second)(r[i]));
#else
                V(store)(transposed + (word + i) * TILE + key, r[i]);
#endif
            }
        }
    }
}

/* Copies a query row in the format that `DOT` multiplies. */
FN void F(copy_query)(const element *row, int64_t dim, float *q)
{
#if IS_BF16 && !HAS_DOT
    for (int64_t i = 0; i < dim; i++) {
        const uint32_t wide = (uint32_t)row[i] << 16;
        memcpy(q + i, &wide, sizeof wide);
    }
#else
    memcpy(q, row, dim * sizeof(element));
#endif
}

/* The products of `rows` query rows with a tile of keys: scores [rows][TILE]. */
INLINE void F(score)(const int rows, const float *q, const float *transposed, int64_t words, float *scores)
{
    for (int64_t key = 0; key < TILE; key += STEP * LANES) {
        vec sums[ROWS_AT_A_TIME][STEP];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int j = 0; j < STEP; j++)
                sums[r][j] = V(zero)();
        for (int64_t word = 0; word < words; word++) {
            vec keys[STEP];
#pragma GCC unroll 8
            for (int j = 0; j < STEP; j++)
                keys[j] = V(load)(transposed + word * TILE + key + j * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const vec query = V(all)(q[r * words + word]);
#pragma GCC unroll 8
                for (int j = 0; j < STEP; j++)
                    sums[r][j] = DOT(query, keys[j], sums[r][j]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int j = 0; j < STEP; j++)
                V(store)(scores + r * TILE + key + j * LANES, sums[r][j]);
    }
}

/* Replaces a row's scores by their exponentials relative to the row's highest score so far, and adds these to its sums
 * (one per vector lane). Returns the factor by which the row's earlier output must be multiplied. */
INLINE float F(exponentiate)(float *scores, float scale, int start, int stop, float *peak, float *sums)
{
    vec x[TILE / LANES];
#pragma GCC unroll 8
    for (int j = 0; j < TILE / LANES; j++)
        x[j] = V(mul)(V(load)(scores + j * LANES), V(all)(scale));
    const int partly = start > 0 || stop < TILE;
    if (partly)
#pragma GCC unroll 8
        for (int j = 0; j < TILE / LANES; j++)
            x[j] = V(within)(x[j], EMPTY, start - j * LANES, stop - j * LANES);
    vec most = V(all)(EMPTY);
#pragma GCC unroll 8
    for (int j = 0; j < TILE / LANES; j++)
        most = V(max)(x[j], most); /* ignores NaN: its exponential is NaN, which then reaches the result */
    const float highest = V(largest)(most);
    float shrink = 1.0f;
    vec total = V(load)(sums);
    if (highest > *peak) {
        shrink = V(largest)(V(exp2)(V(all)(*peak - highest)));
        total = V(mul)(total, V(all)(shrink));
        *peak = highest;
    }
#pragma GCC unroll 8
    for (int j = 0; j < TILE / LANES; j++) {
        x[j] = V(exp2)(V(sub)(x[j], V(all)(*peak)));
        if (partly)
            x[j] = V(within)(x[j], 0.0f, start - j * LANES, stop - j * LANES);
        total = V(add)(total, x[j]);
        V(store)(scores + j * LANES, x[j]);
    }
    V(store)(sums, total);
    return shrink;
}
