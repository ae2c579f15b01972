/* The shares of a split's keys in bfloat16, for kernels that weigh values by products of bfloat16: matrix tiles
 * (amx_bfloat16.c) and dot products (avx512bf16_bfloat16.c).
 *
 * The arithmetic of a row: the scores of a split, times log2 e; the integer above the highest of them; the shares relative to
 * 2 to that power, and their sum; the products of the shares, rounded to bfloat16, with the values, and the sum of rounded
 * shares, by which the result is divided. Shares are relative to a power of two, so their rounding does not depend on which
 * keys make up a split. With finite inputs, nothing depends on other rows. Nothing depends on keys that no row sees, whatever
 * they contain: their shares and values are 0. Pairs of numbers are `words` of 32 bits. */

#ifndef TRIFORCE_ATTENTION_SHARES_H
#define TRIFORCE_ATTENTION_SHARES_H

#include "../avx512.h"
#include "rows.h"

#define SCORES_STRIDE (SPLIT + LANES) /* floats between rows of scores; not a power of two, which would put all rows in the same cache sets */
#define FEW 4                         /* rows up to which each one's lanes are added by itself; those of more are transposed first */

/* Two vectors of values of 32 columns, of keys that follow one another, as pairs of both: the even columns, the odd ones. */
INLINE void pair(__m512i x, __m512i y, float *even, float *odd)
{
    _mm512_store_si512(even, _mm512_mask_mov_epi16(x, 0xaaaaaaaa, _mm512_slli_epi32(y, 16)));
    _mm512_store_si512(odd, _mm512_mask_mov_epi16(_mm512_srli_epi32(x, 16), 0xaaaaaaaa, y));
}

/* Fills work->rows and work->q for a block of rows. */
static void prepare(const Attention *call, int64_t kv_head, int64_t first, int64_t rows, const Work *work)
{
    const int64_t dim = call->head_dim;
    see(call, kv_head, first, rows, work);
    for (int64_t r = 0; r < rows; r++)
        memcpy(work->q + r * dim / 2, query_row(call, kv_head, first + r), dim * sizeof(uint16_t));
}

/* Rows of a block that are computed together, over one split. */
typedef struct {
    const Attention *call;
    const Work *work;
    const Row *rows;
    int64_t some, base; /* how many rows; the split's first key */
    int64_t from, to;   /* whole tiles with all keys that one of the rows sees, counted from `base` */
    float *q, *out;
} SplitRows;

/* 2^(x - peak) for an integer `peak`, with a relative error of 3e-6: less than a hundredth of what rounding to bfloat16 adds; 0
 * far below, NaN for NaN. Its fraction does not depend on `peak`. */
INLINE __m512 share(__m512 x, __m512 peak)
{
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* x less the integer below */
    __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(0.013534167f), _mm512_set1_ps(0.052011464f));
    y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(0.24144275f));
    y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(0.69300383f));
    y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(1.0000026f));
    return _mm512_scalef_ps(y, _mm512_sub_ps(_mm512_sub_ps(x, f), peak));
}

/* The highest of a row's scores of keys `from` to before `to`, of which it sees those from `start` to before `stop`, in
 * sixteen parts; NaN is ignored: its share is NaN, which then reaches the result. */
INLINE __m512 highest_of(const float *scores, int from, int to, int start, int stop, const int partly)
{
    const __m512 empty = _mm512_set1_ps(EMPTY);
    __m512 most[2] = {empty, empty};
#pragma GCC unroll 8
    for (int key = from; key < to; key += 2 * LANES)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const int at = key + j * LANES;
            const __m512 x = _mm512_load_ps(scores + at);
            most[j] = _mm512_max_ps(partly ? vec_within(x, EMPTY, start - at, stop - at) : x, most[j]);
        }
    return _mm512_max_ps(most[0], most[1]);
}

/* The shares of these keys, relative to 2^`peak`; `shares` may be the place of `scores`. The sums, each in sixteen parts, are
 * those of the shares before they are rounded, and after; where there is `kept`, the former are written there. */
INLINE void exponentiate(
    float *scores, uint16_t *shares, float scale, float peak, int from, int to, int start, int stop, const int partly, float *kept,
    __m512 *exact, __m512 *rounded)
{
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    const __m512 factor = _mm512_set1_ps(scale), highest = _mm512_set1_ps(peak);
    __m512 totals[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, total = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int key = from; key < to; key += 2 * LANES) {
        __m512 x[2];
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const int at = key + j * LANES;
            x[j] = share(_mm512_mul_ps(_mm512_load_ps(scores + at), factor), highest);
            if (partly)
                x[j] = vec_within(x[j], 0.0f, start - at, stop - at);
            if (kept)
                _mm512_store_ps(kept + at, x[j]);
        }
        const __m512bh both = _mm512_cvtne2ps_pbh(x[1], x[0]);
        _mm512_store_si512(shares + key, (__m512i)both);
        total = _mm512_dpbf16_ps(total, both, ones);
        totals[0] = _mm512_add_ps(totals[0], x[0]);
        totals[1] = _mm512_add_ps(totals[1], x[1]);
    }
    *exact = _mm512_add_ps(totals[0], totals[1]);
    *rounded = total;
}

/* The keys that row `r` sees, counted from the split's first. */
INLINE void seen(const SplitRows *this, int64_t r, int *start, int *stop)
{
    *start = (int)larger(this->rows[r].start - this->base, 0);
    *stop = (int)larger(smaller(this->rows[r].stop - this->base, SPLIT), 0);
}

/* The integers above the highest scores of `some` rows, of up to 16, from `first` on. */
INLINE void find_peaks(const SplitRows *this, float scale, int64_t first, int64_t some, float *peaks)
{
    __m512 most[LANES], highest;
    for (int64_t i = 0; i < some; i++) {
        const float *scores = this->work->scores + (first + i) * SCORES_STRIDE;
        int start, stop;
        seen(this, first + i, &start, &stop);
        if (start == 0 && stop == SPLIT)
            most[i] = highest_of(scores, 0, SPLIT, 0, SPLIT, 0);
        else
            most[i] = highest_of(scores, (int)this->from, (int)this->to, start, stop, 1);
    }
    if (some <= FEW) {
        highest = _mm512_setzero_ps();
        for (int64_t i = 0; i < some; i++)
            highest = _mm512_mask_mov_ps(highest, (__mmask16)(1u << i), _mm512_set1_ps(_mm512_reduce_max_ps(most[i])));
    } else {
        for (int64_t i = some; i < LANES; i++)
            most[i] = most[0];
        vec_transpose(most);
        highest = most[0];
#pragma GCC unroll 16
        for (int i = 1; i < LANES; i++)
            highest = _mm512_max_ps(highest, most[i]);
    }
    const __m512 empty = _mm512_set1_ps(EMPTY), scaled = _mm512_mul_ps(highest, _mm512_set1_ps(scale));
    highest = _mm512_mask_mov_ps(empty, _mm512_cmp_ps_mask(highest, empty, _CMP_GT_OQ), _mm512_max_ps(scaled, empty));
    _mm512_storeu_ps(peaks, _mm512_roundscale_ps(highest, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
}

/* Puts a row's shares in the place of its scores. */
INLINE void exponentiate_row(const SplitRows *this, float scale, int64_t r, float peak, __m512 *exact, __m512 *rounded)
{
    const Attention *call = this->call;
    const Row *row = this->rows + r;
    float *scores = this->work->scores + r * SCORES_STRIDE;
    uint16_t *shares = (uint16_t *)scores;
    const int from = (int)this->from, to = (int)this->to;
    int start, stop;
    seen(this, r, &start, &stop);
    if (row->mass) {
        float kept[SPLIT] __attribute__((aligned(64)));
        if (start == 0 && stop == SPLIT)
            exponentiate(scores, shares, scale, peak, 0, SPLIT, 0, SPLIT, 0, kept, exact, rounded);
        else
            exponentiate(scores, shares, scale, peak, from, to, start, stop, 1, kept, exact, rounded);
        for (int64_t first = from; first < to; first += TILE) {
            const int64_t key = this->base + first;
            sum_chunks(call->chunk_size, smaller(TILE, call->m - key), kept + first, row->mass + key / call->chunk_size);
            row->peaks[key / TILE] = peak;
        }
    } else if (start == 0 && stop == SPLIT)
        exponentiate(scores, shares, scale, peak, 0, SPLIT, 0, SPLIT, 0, 0, exact, rounded);
    else
        exponentiate(scores, shares, scale, peak, from, to, start, stop, 1, 0, exact, rounded);
}

/* The sums of `some` rows, of up to sixteen, that each are in sixteen parts. */
INLINE void sum_lanes(__m512 *parts, int64_t some, float *sums)
{
    if (some <= FEW) {
        for (int64_t r = 0; r < some; r++) {
            float part[LANES];
            _mm512_storeu_ps(part, parts[r]);
            sums[r] = part[0];
            for (int i = 1; i < LANES; i++)
                sums[r] += part[i];
        }
        return;
    }
    for (int64_t r = some; r < LANES; r++)
        parts[r] = parts[0];
    vec_transpose(parts);
    for (int i = 1; i < LANES; i++)
        parts[0] = _mm512_add_ps(parts[0], parts[i]);
    _mm512_storeu_ps(sums, parts[0]);
}

/* Puts the shares of rows in the place of their scores, and writes the peaks and the sums of `out`. */
INLINE void find_shares(const SplitRows *this)
{
    const int64_t dim = this->call->head_dim, stride = row_stride(dim);
    const float scale = (float)(this->call->scale * 1.4426950408889634);
    for (int64_t first = 0; first < this->some; first += LANES) {
        const int64_t some = smaller(LANES, this->some - first);
        float peaks[LANES], sums[2][LANES];
        __m512 exact[LANES], rounded[LANES];
        find_peaks(this, scale, first, some, peaks);
        for (int64_t r = 0; r < some; r++)
            exponentiate_row(this, scale, first + r, peaks[r], exact + r, rounded + r);
        sum_lanes(exact, some, sums[0]);
        sum_lanes(rounded, some, sums[1]);
        for (int64_t r = 0; r < some; r++) {
            float *out = this->out + (first + r) * stride + dim;
            out[0] = peaks[r];
            out[1] = sums[0][r];
            out[2] = sums[1][r];
        }
    }
}

#endif
