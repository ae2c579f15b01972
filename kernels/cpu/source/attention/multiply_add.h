/* Attention with products and sums in float32. Inputs are float32, or bfloat16, which is converted first. A file that includes
 * this one first includes avx2.h or avx512.h, whose vectors are used, and defines the type of inputs (`element`).
 *
 * The shares of a row are relative to the highest score so far, including this tile. Query rows are computed AT_A_TIME, so that
 * keys and values are loaded into registers once for all of them. */

#include "rows.h"

#define STEP (LANES / 4) /* vectors of scores, or of columns, that fit into registers with so many rows */
#define IS_BF16 (sizeof(element) == 2)

/* Columns from 2 * LANES * i on of a row: in order for float32; for bfloat16 the even ones in `x`, the odd ones in `y`. */
INLINE void load_columns(const element *row, int64_t i, vec *x, vec *y)
{
    const float *words = (const float *)(const void *)(row + 2 * LANES * i);
    if (IS_BF16) {
        *x = vec_first(vec_load(words));
        *y = vec_second(vec_load(words));
    } else {
        *x = vec_load(words);
        *y = vec_load(words + LANES);
    }
}

/* Writes the first `count` keys, transposed, to `transposed` [words][TILE], followed by zeros. */
static void transpose_keys(const element *keys, int64_t row, int64_t count, int64_t dim, float *transposed)
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
                r[i] = vec_load(rows[i] + word);
            vec_transpose(r);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                if (IS_BF16) {
                    vec_store(transposed + 2 * (word + i) * TILE + key, vec_first(r[i]));
                    vec_store(transposed + (2 * (word + i) + 1) * TILE + key, vec_second(r[i]));
                } else
                    vec_store(transposed + (word + i) * TILE + key, r[i]);
            }
        }
    }
}

/* Fills work->rows and work->q for a block of rows. */
static void prepare(const Attention *call, int64_t kv_head, int64_t first, int64_t rows, const Work *work)
{
    const int64_t dim = call->head_dim;
    see(call, kv_head, first, rows, work);
    for (int64_t r = 0; r < rows; r++) {
        const element *from = query_row(call, kv_head, first + r);
        float *q = work->q + r * dim;
        for (int64_t i = 0; i < dim; i++)
            if (IS_BF16) {
                const uint32_t wide = (uint32_t)from[i] << 16;
                memcpy(q + i, &wide, sizeof wide);
            } else
                q[i] = (float)from[i];
    }
}

/* The products of `rows` query rows with a tile of keys: scores [rows][TILE]. */
INLINE void score(const int rows, const float *q, const float *transposed, int64_t dim, float *scores)
{
    for (int64_t key = 0; key < TILE; key += STEP * LANES) {
        vec sums[AT_A_TIME][STEP];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int j = 0; j < STEP; j++)
                sums[r][j] = vec_zero();
        for (int64_t i = 0; i < dim; i++) {
            vec keys[STEP];
#pragma GCC unroll 8
            for (int j = 0; j < STEP; j++)
                keys[j] = vec_load(transposed + i * TILE + key + j * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const vec query = vec_all(q[r * dim + i]);
#pragma GCC unroll 8
                for (int j = 0; j < STEP; j++)
                    sums[r][j] = vec_fma(query, keys[j], sums[r][j]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int j = 0; j < STEP; j++)
                vec_store(scores + r * TILE + key + j * LANES, sums[r][j]);
    }
}

/* Replaces a row's scores by their exponentials relative to the row's highest score so far, and adds these to its sums
 * (one per vector lane). Returns the factor by which the row's earlier output must be multiplied. */
INLINE float exponentiate(float *scores, float scale, int start, int stop, float *peak, float *sums)
{
    vec x[TILE / LANES];
#pragma GCC unroll 8
    for (int j = 0; j < TILE / LANES; j++)
        x[j] = vec_mul(vec_load(scores + j * LANES), vec_all(scale));
    const int partly = start > 0 || stop < TILE;
    if (partly)
#pragma GCC unroll 8
        for (int j = 0; j < TILE / LANES; j++)
            x[j] = vec_within(x[j], EMPTY, start - j * LANES, stop - j * LANES);
    vec most = vec_all(EMPTY);
#pragma GCC unroll 8
    for (int j = 0; j < TILE / LANES; j++)
        most = vec_max(x[j], most); /* ignores NaN: its exponential is NaN, which then reaches the result */
    const float highest = vec_largest(most);
    float shrink = 1.0f;
    vec total = vec_load(sums);
    if (highest > *peak) {
        shrink = vec_largest(vec_exp2(vec_all(*peak - highest)));
        total = vec_mul(total, vec_all(shrink));
        *peak = highest;
    }
#pragma GCC unroll 8
    for (int j = 0; j < TILE / LANES; j++) {
        x[j] = vec_exp2(vec_sub(x[j], vec_all(*peak)));
        if (partly)
            x[j] = vec_within(x[j], 0.0f, start - j * LANES, stop - j * LANES);
        total = vec_add(total, x[j]);
        vec_store(scores + j * LANES, x[j]);
    }
    vec_store(sums, total);
    return shrink;
}

/* A tile of keys and its values. */
typedef struct {
    int64_t first, from, stop;                  /* its first key; the keys that some row sees, counted from there */
    int64_t chunk;                              /* of its first key */
    const element *values;                      /* of its first key */
    const element *next_keys, *next_values;     /* those of the next tile, prefetched meanwhile */
} Tile;

/* Adds a tile's values, weighted by the scores, to 2 * `pairs` vectors of columns of each row. With `fetch` it prefetches
 * the same columns of the next tile, which the first rows of a tile do. */
INLINE void add_columns(
    const int rows, const int pairs, const int fetch, const Attention *call, const Tile *tile, int64_t i, const float *scores,
    const float *shrink, float *out)
{
    const int64_t stride = row_stride(call->head_dim), k_row = call->k_row, v_row = call->v_row;
    const element *values = tile->values + 2 * LANES * i;
    const element *next_keys = tile->next_keys + 2 * LANES * i, *next_values = tile->next_values + 2 * LANES * i;
    const int to_second = prefetching()->to_second;
    vec sums[AT_A_TIME][STEP];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * pairs; j++)
            sums[r][j] = vec_mul(vec_load(out + r * stride + (2 * i + j) * LANES), vec_all(shrink[r]));
    for (int64_t key = tile->from; key < tile->stop; key++) {
        vec columns[STEP];
        if (fetch)
            for (int at = 0; at < pairs * 2 * LANES; at += 64 / (int)sizeof(element)) {
                prefetch_line(next_keys + key * k_row + at, to_second);
                prefetch_line(next_values + key * v_row + at, to_second);
            }
#pragma GCC unroll 8
        for (int j = 0; j < pairs; j++)
            load_columns(values + key * v_row, j, columns + 2 * j, columns + 2 * j + 1);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const vec weight = vec_all(scores[r * TILE + key]);
#pragma GCC unroll 8
            for (int j = 0; j < 2 * pairs; j++)
                sums[r][j] = vec_fma(weight, columns[j], sums[r][j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * pairs; j++)
            vec_store(out + r * stride + (2 * i + j) * LANES, sums[r][j]);
}

INLINE void add_values(
    const int rows, const int fetch, const Attention *call, const Tile *tile, const float *scores, const float *shrink, float *out)
{
    const int64_t pairs = call->head_dim / (2 * LANES);
    int64_t i = 0;
    for (; i + STEP / 2 <= pairs; i += STEP / 2)
        add_columns(rows, STEP / 2, fetch, call, tile, i, scores, shrink, out);
    for (; i < pairs; i++)
        add_columns(rows, 1, fetch, call, tile, i, scores, shrink, out);
}

/* Attention of `rows` rows of a block, from `r0` on, to one tile. */
INLINE void attend_tile(
    const int rows, const Attention *call, const Tile *tile, int64_t r0, const Work *work, float *part)
{
    const int64_t dim = call->head_dim, stride = row_stride(dim);
    const float scale = (float)(call->scale * 1.4426950408889634);
    float shrink[AT_A_TIME];
    score(rows, work->q + r0 * dim, work->keys, dim, work->scores);
    for (int r = 0; r < rows; r++) {
        const Row *row = work->rows + r0 + r;
        float *scores = work->scores + r * TILE, *out = part + (r0 + r) * stride;
        const int64_t start = larger(row->start - tile->first, 0), stop = larger(smaller(row->stop - tile->first, TILE), 0);
        shrink[r] = exponentiate(scores, scale, (int)start, (int)stop, out + dim, work->sums + (r0 + r) * 16);
        if (row->mass) {
            sum_chunks(call->chunk_size, smaller(TILE, call->m - tile->first), scores, row->mass + tile->chunk);
            row->peaks[tile->first / TILE] = out[dim];
        }
    }
    if (r0 == 0)
        add_values(rows, 1, call, tile, work->scores, shrink, part);
    else
        add_values(rows, 0, call, tile, work->scores, shrink, part + r0 * stride);
}

static void part(const Attention *call, int64_t kv_head, int64_t rows, int64_t split, const Work *work, float *part)
{
    const int64_t dim = call->head_dim, stride = row_stride(dim);
    for (int64_t r = 0; r < rows; r++) {
        memset(part + r * stride, 0, stride * sizeof(float));
        part[r * stride + dim] = EMPTY;
    }
    const int64_t start = larger(work->rows[0].start, split * SPLIT), stop = smaller(work->rows[rows - 1].stop, (split + 1) * SPLIT);
    if (start >= stop)
        return;
    memset(work->sums, 0, rows * 16 * sizeof(float));
    const element *k = (const element *)call->k + kv_head * call->k_head, *v = (const element *)call->v + kv_head * call->v_head;
    for (int64_t first = start / TILE * TILE; first < stop; first += TILE) {
        Tile tile = {.first = first, .from = larger(start - first, 0), .stop = smaller(stop - first, TILE)};
        const int64_t next = first + TILE < work->rows[rows - 1].stop ? first + TILE : first; /* of the next split too */
        tile.values = v + place_of(call, first, call->v_block, call->v_row);
        tile.next_keys = k + place_of(call, next, call->k_block, call->k_row);
        tile.next_values = v + place_of(call, next, call->v_block, call->v_row);
        tile.chunk = first / call->chunk_size;
        transpose_keys(k + place_of(call, first, call->k_block, call->k_row), call->k_row, tile.stop, dim, work->keys);
        const int64_t blocks = (rows + AT_A_TIME - 1) / AT_A_TIME;
        for (int64_t b = 0, r0 = 0, size; b < blocks; b++, r0 += size) {
            size = (rows - r0) / (blocks - b);
            if (work->rows[r0 + size - 1].stop <= first)
                continue;
            FOR_ROWS(attend_tile, size, call, &tile, r0, work, part)
        }
    }
    for (int64_t r = 0; r < rows; r++)
        part[r * stride + dim + 1] = part[r * stride + dim + 2] = vec_sum(vec_load(work->sums + r * 16));
}

#define KERNELS                                                                      \
    {                                                                                \
        .row_block = 96, .sizes = {.keys = TILE, .scores = AT_A_TIME * TILE},        \
        .prepare = prepare, .part = part, .merge = merge, .finish = finish,          \
    }
