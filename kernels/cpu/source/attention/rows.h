/* The operations of attention on single rows that all kernels share: the keys that a row sees, joining partial results, the
 * result, and the mass of chunks. A file includes it after avx2.h or avx512.h. */

#ifndef TRIFORCE_ATTENTION_ROWS_H
#define TRIFORCE_ATTENTION_ROWS_H

#include "attention.h"

#include <math.h>

#define AT_A_TIME 6 /* rows that are computed together at most: their sums stay in registers */

/* `step(rows, ...)` compiled for each number of `rows` up to AT_A_TIME. */
#define FOR_ROWS(step, rows, ...)            \
    switch (rows) {                          \
    case 1: step(1, __VA_ARGS__); break;     \
    case 2: step(2, __VA_ARGS__); break;     \
    case 3: step(3, __VA_ARGS__); break;     \
    case 4: step(4, __VA_ARGS__); break;     \
    case 5: step(5, __VA_ARGS__); break;     \
    default: step(6, __VA_ARGS__); break;    \
    }

/* Where key `key` of a head begins, or its value, in numbers: `block` and `row` are the strides of keys or of values. */
INLINE int64_t place_of(const Attention *call, int64_t key, int64_t block, int64_t row)
{
    return key / call->block_size * block + key % call->block_size * row;
}

/* Fills work->rows for a block of rows. */
static void see(const Attention *call, int64_t kv_head, int64_t first, int64_t rows, const Work *work)
{
    const int64_t group = call->num_heads / call->num_kv_heads;
    const int64_t chunks = call->mass ? call->m / call->chunk_size : 0, tiles = num_tiles(call);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t head = kv_head * group + (first + r) % group, i = (first + r) / group;
        const int64_t place = i - (call->n - call->mass_rows), at = head * call->mass_rows + place;
        Row *row = work->rows + r;
        visible(call, i, &row->start, &row->stop);
        row->mass = call->mass && place >= 0 ? (float *)call->mass + at * chunks : 0;
        row->peaks = row->mass ? work->peaks + at * tiles : 0;
    }
}

/* The query of row `r` of a KV head. */
static const void *query_row(const Attention *call, int64_t kv_head, int64_t r)
{
    const int64_t group = call->num_heads / call->num_kv_heads, head = kv_head * group + r % group;
    const int64_t place = head * call->q_head + r / group * call->q_row;
    return (const char *)call->q + place * (call->type == BFLOAT16 ? 2 : 4);
}

/* Sums a row's exponentials chunk by chunk over the `keys` keys of a tile. */
INLINE void sum_chunks(int64_t size, int64_t keys, const float *scores, float *sums)
{
    if (size == 8) {
        float all[TILE / 8];
        vec_sums_of_eight(scores, keys == TILE ? sums : all);
        if (keys < TILE)
            memcpy(sums, all, keys / 8 * sizeof(float));
        return;
    }
    for (int64_t from = 0; from + size <= keys; from += size) {
        float sum = 0.0f;
        for (int64_t i = 0; i < size; i++)
            sum += scores[from + i];
        *sums++ = sum;
    }
}

/* Joins the partial results `part` of a block of rows to those of all splits before, `whole`. */
static void merge(int64_t dim, int64_t rows, const float *part, float *whole)
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
        const vec peak = vec_max(vec_load(peaks[0]), vec_load(peaks[1]));
        const vec old = vec_exp2(vec_sub(vec_load(peaks[0]), peak)), new = vec_exp2(vec_sub(vec_load(peaks[1]), peak));
        vec_store(factors[0], old);
        vec_store(factors[1], new);
        vec_store(peaks[0], peak);
        vec_store(totals[0], vec_fma(vec_load(totals[1]), new, vec_mul(vec_load(totals[0]), old)));
        vec_store(divisors[0], vec_fma(vec_load(divisors[1]), new, vec_mul(vec_load(divisors[0]), old)));
        for (int64_t r = 0; r < some; r++) {
            const float *from = part + r * stride;
            float *to = whole + r * stride;
            if (totals[1][r] == 0.0f)
                continue;
            const vec kept = vec_all(factors[0][r]), added = vec_all(factors[1][r]);
            for (int64_t i = 0; i < dim; i += LANES)
                vec_store(to + i, vec_fma(vec_load(from + i), added, vec_mul(vec_load(to + i), kept)));
            to[dim] = peaks[0][r];
            to[dim + 1] = totals[0][r];
            to[dim + 2] = divisors[0][r];
        }
    }
}

/* Turns a row's sums by chunk into shares of its attention: each tile's sums are relative to the peak that was noted with
 * them. */
static void finish_mass(const Attention *call, const Row *row, float peak, float norm)
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
        vec_store(factors, vec_mul(vec_exp2(vec_sub(vec_load(factors), vec_all(peak))), vec_all(norm)));
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

/* Writes the results of a block of rows. Of bfloat16, two vectors of a row hold the even and the odd ones of 2 * LANES columns. */
static void finish(const Attention *call, int64_t kv_head, int64_t first, int64_t rows, const Work *work)
{
    const int64_t dim = call->head_dim, group = call->num_heads / call->num_kv_heads;
    const float *whole = work->whole;
    for (int64_t r = 0; r < rows; r++, whole += row_stride(dim)) {
        const int64_t head = kv_head * group + (first + r) % group, i = (first + r) / group;
        const float peak = whole[dim], total = whole[dim + 1], norm = total == 0.0f ? 0.0f : 1.0f / whole[dim + 2];
        const int64_t place = head * call->out_head + i * call->out_row;
        float result[MAX_DIM], *out = call->rounded ? result : (float *)call->out + place;
        if (call->type == BFLOAT16)
            for (int64_t at = 0; at < dim; at += 2 * LANES)
                for (int j = 0; j < LANES; j++) {
                    out[at + 2 * j] = whole[at + j] * norm;
                    out[at + 2 * j + 1] = whole[at + LANES + j] * norm;
                }
        else
            for (int64_t at = 0; at < dim; at++)
                out[at] = whole[at] * norm;
        if (call->rounded)
            round_to_bf16(result, (uint16_t *)call->out + place, dim);
        ((float *)call->lse)[head * call->n + i] =
            total == 0.0f ? -INFINITY : (peak + log2f(total)) * 0.6931471805599453f;
        if (work->rows[r].mass)
            finish_mass(call, work->rows + r, peak, total == 0.0f ? 0.0f : 1.0f / total);
    }
}

#endif
