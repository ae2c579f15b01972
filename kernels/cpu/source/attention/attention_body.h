/* The attention kernels for one instruction set and input type. Included by a file that defines
 *   SET         the vector functions to use: avx512 or avx2 (SET_vec, SET_load, ...)
 *   TARGET      the compiler's target for the functions here
 *   LANES       float32 lanes of a vector
 *   STEP        vectors of scores, or of output columns, that fit into registers with ROWS_AT_A_TIME rows
 *   NAME        the name of the AttentionKernels that this defines
 *   IS_BF16     whether inputs are bfloat16, else float32
 *   HAS_DOT     whether there are bfloat16 dot products; without them bfloat16 is converted to float32 first
 * and which are undefined again at the end. Query rows are processed ROWS_AT_A_TIME at a time, so that keys and values are
 * loaded into registers once for all of them. */

#include <math.h>
#include <string.h>

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define V(name) JOIN(SET, name)
#define F(name) JOIN(NAME, name)
#define FN __attribute__((target(TARGET))) static
#define INLINE __attribute__((target(TARGET))) static inline __attribute__((always_inline))
#define ROWS_AT_A_TIME 6

typedef V(vec) F(vec);
#define vec F(vec)
#if IS_BF16
typedef uint16_t F(element);
#else
typedef float F(element);
#endif
#define element F(element)

#if IS_BF16 && HAS_DOT
#define DOT JOIN(SET, dot_bf16)
#define WORDS(dim) ((dim) / 2) /* 32-bit words of a key, one for each step of a dot product */
#else
#define DOT V(fma)
#define WORDS(dim) (dim)
#endif

/* Columns from 2 * LANES * i on of a row: in order for float32; for bfloat16 the even ones in `x`, the odd ones in `y`. */
INLINE void F(load_columns)(const element *row, int64_t i, vec *x, vec *y)
{
#if IS_BF16
    const vec words = V(load)((const float *)(const void *)(row + 2 * LANES * i));
    *x = V(first)(words);
    *y = V(second)(words);
#else
    *x = V(load)(row + 2 * LANES * i);
    *y = V(load)(row + 2 * LANES * i + LANES);
#endif
}

#include "attention_scores.h"

/* A tile of keys and its values. */
typedef struct {
    int64_t first, from, stop;                  /* its first key; the keys that some row sees, counted from there */
    int64_t chunk;                              /* of its first key */
    const element *values;                      /* of its first key */
    const element *next_keys, *next_values;     /* those of the next tile, prefetched meanwhile */
} F(tile);

/* Adds a tile's values, weighted by the scores, to 2 * `pairs` vectors of columns of each row. With `fetch` it prefetches
 * the same columns of the next tile, which the first rows of a tile do. */
INLINE void F(add_columns)(
    const int rows, const int pairs, const int fetch, const Attention *call, const F(tile) *tile, int64_t i, const float *scores,
    const float *shrink, float *out)
{
    const int64_t stride = row_stride(call->head_dim), k_row = call->k_row, v_row = call->v_row;
    const element *values = tile->values + 2 * LANES * i;
    const element *next_keys = tile->next_keys + 2 * LANES * i, *next_values = tile->next_values + 2 * LANES * i;
    vec sums[ROWS_AT_A_TIME][STEP];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * pairs; j++)
            sums[r][j] = V(mul)(V(load)(out + r * stride + (2 * i + j) * LANES), V(all)(shrink[r]));
    for (int64_t key = tile->from; key < tile->stop; key++) {
        vec columns[STEP];
        if (fetch)
            for (int at = 0; at < pairs * 2 * LANES; at += 64 / (int)sizeof(element)) {
                __builtin_prefetch(next_keys + key * k_row + at);
                __builtin_prefetch(next_values + key * v_row + at);
            }
#pragma GCC unroll 8
        for (int j = 0; j < pairs; j++)
            F(load_columns)(values + key * v_row, j, columns + 2 * j, columns + 2 * j + 1);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const vec weight = V(all)(scores[r * TILE + key]);
#pragma GCC unroll 8
            for (int j = 0; j < 2 * pairs; j++)
                sums[r][j] = V(fma)(weight, columns[j], sums[r][j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * pairs; j++)
            V(store)(out + r * stride + (2 * i + j) * LANES, sums[r][j]);
}

INLINE void F(add_values)(
    const int rows, const int fetch, const Attention *call, const F(tile) *tile, const float *scores, const float *shrink, float *out)
{
    const int64_t pairs = call->head_dim / (2 * LANES);
    int64_t i = 0;
    for (; i + STEP / 2 <= pairs; i += STEP / 2)
        F(add_columns)(rows, STEP / 2, fetch, call, tile, i, scores, shrink, out);
    for (; i < pairs; i++)
        F(add_columns)(rows, 1, fetch, call, tile, i, scores, shrink, out);
}

/* Sums a row's exponentials chunk by chunk over the `keys` keys of a tile. */
INLINE void F(sum_chunks)(int64_t size, int64_t keys, const float *scores, float *sums)
{
#if LANES == 16
    if (size == 8) {
        float all[TILE / 8];
        V(sums_of_eight)(scores, keys == TILE ? sums : all);
        if (keys < TILE)
            memcpy(sums, all, keys / 8 * sizeof(float));
        return;
    }
#endif
    for (int64_t from = 0; from + size <= keys; from += size) {
        float sum = 0.0f;
        for (int64_t i = 0; i < size; i++)
            sum += scores[from + i];
        *sums++ = sum;
    }
}

/* Attention of `rows` rows of a block, from `r0` on, to one tile. */
INLINE void F(attend_tile)(
    const int rows, const Attention *call, const F(tile) *tile, int64_t r0, const Work *work, float *part)
{
    const int64_t dim = call->head_dim, words = WORDS(dim), stride = row_stride(dim);
    const float scale = (float)(call->scale * 1.4426950408889634);
    float shrink[ROWS_AT_A_TIME];
    F(score)(rows, work->q + r0 * words, work->keys, words, work->scores);
    for (int r = 0; r < rows; r++) {
        const Row *row = work->rows + r0 + r;
        float *scores = work->scores + r * TILE, *out = part + (r0 + r) * stride;
        const int64_t start = larger(row->start - tile->first, 0), stop = larger(smaller(row->stop - tile->first, TILE), 0);
        shrink[r] = F(exponentiate)(scores, scale, (int)start, (int)stop, out + dim, work->sums + (r0 + r) * 16);
        if (row->mass) {
            F(sum_chunks)(call->chunk_size, smaller(TILE, call->m - tile->first), scores, row->mass + tile->chunk);
            row->peaks[tile->first / TILE] = out[dim];
        }
    }
    if (r0 == 0)
        F(add_values)(rows, 1, call, tile, work->scores, shrink, part);
    else
        F(add_values)(rows, 0, call, tile, work->scores, shrink, part + r0 * stride);
}

/* Fills work->rows and work->q for a block of rows. */
FN void F(prepare_rows)(const Attention *call, int64_t kv_head, int64_t first, int64_t rows, const Work *work)
{
    const int64_t dim = call->head_dim, group = call->num_heads / call->num_kv_heads;
    const int64_t chunks = call->mass ? call->m / call->chunk_size : 0, tiles = num_tiles(call);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t head = kv_head * group + (first + r) % group, i = (first + r) / group;
        const int64_t place = i - (call->n - call->mass_rows), at = head * call->mass_rows + place;
        Row *row = work->rows + r;
        visible(call, i, &row->start, &row->stop);
        row->mass = call->mass && place >= 0 ? (float *)call->mass + at * chunks : 0;
        row->peaks = row->mass ? work->peaks + at * tiles : 0;
        F(copy_query)((const element *)call->q + head * call->q_head + i * call->q_row, dim, work->q + r * WORDS(dim));
    }
}

FN void F(part)(const Attention *call, int64_t kv_head, int64_t rows, int64_t split, const Work *work, float *part)
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
        F(tile) tile = {.first = first, .from = larger(start - first, 0), .stop = smaller(stop - first, TILE)};
        int64_t block = first / call->block_size, offset = first % call->block_size;
        const element *keys = k + block * call->k_block + offset * call->k_row;
        tile.values = v + block * call->v_block + offset * call->v_row;
        if (first + TILE < stop)
            block = (first + TILE) / call->block_size, offset = (first + TILE) % call->block_size;
        tile.next_keys = k + block * call->k_block + offset * call->k_row;
        tile.next_values = v + block * call->v_block + offset * call->v_row;
        tile.chunk = first / call->chunk_size;
        F(transpose_keys)(keys, call->k_row, tile.stop, dim, work->keys);
        const int64_t blocks = (rows + ROWS_AT_A_TIME - 1) / ROWS_AT_A_TIME;
        for (int64_t b = 0, r0 = 0, size; b < blocks; b++, r0 += size) {
            size = (rows - r0) / (blocks - b);
            if (work->rows[r0 + size - 1].stop <= first)
                continue;
            switch (size) {
            case 1: F(attend_tile)(1, call, &tile, r0, work, part); break;
            case 2: F(attend_tile)(2, call, &tile, r0, work, part); break;
            case 3: F(attend_tile)(3, call, &tile, r0, work, part); break;
            case 4: F(attend_tile)(4, call, &tile, r0, work, part); break;
            case 5: F(attend_tile)(5, call, &tile, r0, work, part); break;
            default: F(attend_tile)(6, call, &tile, r0, work, part); break;
            }
        }
    }
    for (int64_t r = 0; r < rows; r++)
        part[r * stride + dim + 1] = part[r * stride + dim + 2] = V(sum)(V(load)(work->sums + r * 16));
}

FN void F(merge)(int64_t dim, int64_t rows, const float *part, float *whole)
{
    const int64_t stride = row_stride(dim);
    for (int64_t first = 0; first < rows; first += LANES, part += LANES * stride, whole += LANES * stride) {
        const int64_t some = smaller(LANES, rows - first);
        float peaks[2][LANES], totals[2][LANES], divisors[2][LANES], factors[2][LANES];
        for (int64_t r = 0; r < LANES; r++) {
            const int64_t row = smaller(r, some - 1) * stride + dim;
            peaks[0][r] = whole[row], peaks[1][r] = part[row];
            totals[0][r] = whole[row + 1], totals[1][r] = part[row + 1];
            divisors[0][r] = whole[row + 2], divisors[1][r] = part[row + 2];
        }
        const vec peak = V(max)(V(load)(peaks[0]), V(load)(peaks[1]));
        const vec old = V(exp2)(V(sub)(V(load)(peaks[0]), peak)), new = V(exp2)(V(sub)(V(load)(peaks[1]), peak));
        V(store)(factors[0], old);
        V(store)(factors[1], new);
        V(store)(peaks[0], peak);
        V(store)(totals[0], V(fma)(V(load)(totals[1]), new, V(mul)(V(load)(totals[0]), old)));
        V(store)(divisors[0], V(fma)(V(load)(divisors[1]), new, V(mul)(V(load)(divisors[0]), old)));
        for (int64_t r = 0; r < some; r++) {
            const float *from = part + r * stride;
            float *to = whole + r * stride;
            if (totals[1][r] == 0.0f)
                continue;
            const vec kept = V(all)(factors[0][r]), added = V(all)(factors[1][r]);
            for (int64_t i = 0; i < dim; i += LANES)
                V(store)(to + i, V(fma)(V(load)(from + i), added, V(mul)(V(load)(to + i), kept)));
            to[dim] = peaks[0][r];
            to[dim + 1] = totals[0][r];
            to[dim + 2] = divisors[0][r];
        }
    }
}

/* Turns a row's sums by chunk into shares of its attention: each tile's sums are relative to the peak that was noted with
 * them. */
FN void F(finish_mass)(const Attention *call, const Row *row, float peak, float norm)
{
    const int64_t chunks = call->m / call->chunk_size, each = TILE / call->chunk_size;
    const int64_t begin = row->start / TILE, end = row->start < row->stop ? (row->stop + TILE - 1) / TILE : begin;
    const int64_t unseen = smaller(begin * each, chunks), seen = smaller(end * each, chunks);
    memset(row->mass, 0, unseen * sizeof(float));
    memset(row->mass + seen, 0, (chunks - seen) * sizeof(float));
    for (int64_t tile = begin; tile < end; tile += LANES) {
        const int64_t some = smaller(LANES, end - tile);
        float factors[LANES];
        for (int64_t j = 0; j < LANES; j++)
            factors[j] = j < some ? row->peaks[tile + j] : EMPTY;
        V(store)(factors, V(mul)(V(exp2)(V(sub)(V(load)(factors), V(all)(peak))), V(all)(norm)));
        for (int64_t j = 0; j < some; j++) {
            float *mass = row->mass + (tile + j) * each;
            if (each == 8 && (tile + j + 1) * 8 <= chunks)
                for (int chunk = 0; chunk < 8; chunk++)
                    mass[chunk] *= factors[j];
            else
                for (int64_t chunk = 0; chunk < smaller(each, chunks - (tile + j) * each); chunk++)
                    mass[chunk] *= factors[j];
        }
    }
}

FN void F(finish)(const Attention *call, int64_t kv_head, int64_t first, int64_t rows, const Work *work)
{
    const int64_t dim = call->head_dim, group = call->num_heads / call->num_kv_heads;
    const float *whole = work->whole;
    for (int64_t r = 0; r < rows; r++, whole += row_stride(dim)) {
        const int64_t head = kv_head * group + (first + r) % group, i = (first + r) / group;
        const float peak = whole[dim], total = whole[dim + 1], norm = total == 0.0f ? 0.0f : 1.0f / whole[dim + 2];
        const int64_t place = head * call->out_head + i * call->out_row;
        float *out = (float *)call->out + place;
#if IS_BF16
        float result[MAX_DIM];
        if (call->rounded)
            out = result;
        for (int64_t at = 0; at < dim; at += 2 * LANES)
            for (int j = 0; j < LANES; j++) {
                out[at + 2 * j] = whole[at + j] * norm;
                out[at + 2 * j + 1] = whole[at + LANES + j] * norm;
            }
        if (call->rounded)
            round_to_bf16(result, (uint16_t *)call->out + place, dim);
#else
        for (int64_t at = 0; at < dim; at++)
            out[at] = whole[at] * norm;
#endif
        ((float *)call->lse)[head * call->n + i] =
            total == 0.0f ? -INFINITY : (peak + log2f(total)) * 0.6931471805599453f;
        if (work->rows[r].mass)
            F(finish_mass)(call, work->rows + r, peak, total == 0.0f ? 0.0f : 1.0f / total);
    }
}

const AttentionKernels NAME = {
    .row_block = 96, .sizes = {.keys = TILE, .values = 0, .scores = ROWS_AT_A_TIME * TILE},
    .prepare = F(prepare_rows), .part = F(part), .merge = F(merge), .finish = F(finish),
};

#undef JOIN_
#undef JOIN
#undef V
#undef F
#undef FN
#undef INLINE
#undef ROWS_AT_A_TIME
#undef vec
#undef element
#undef DOT
#undef WORDS
#undef SET
#undef TARGET
#undef LANES
#undef STEP
#undef NAME
#undef IS_BF16
#undef HAS_DOT
