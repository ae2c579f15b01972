/* Attention with AMX: products of 16 rows, 16 keys and 32 dimensions at a time. Included by attention_avx512.c, behind the
 * kernels for bfloat16 dot products, of which it takes what is not computed in matrix tiles.
 *
 * The arithmetic of a row: the scores of a split, times log2 e; the integer above the highest of them; the shares relative to
 * 2 to that power, and their sum; the products of the shares, rounded to bfloat16, with the values, and the sum of rounded
 * shares, by which the result is divided. As shares are relative to
 * a power of two, how they are rounded does not depend on which keys make up a split. Nothing depends on the other rows of a
 * tile, nor on keys that none of them sees, whose shares and values are 0. */

#include "../amx.h"

#define BF16(name) attention_avx512bf16_bfloat16_##name

#define TOGETHER (2 * SIDE)          /* rows that are computed together, which halves what is loaded */
#define SCORES_STRIDE (SPLIT + SIDE) /* floats between rows of scores: no multiple of a page's fraction */
#define AHEAD (2 * TILE)             /* keys from those that are used to those that are brought to the second cache */
#define FEW 4                        /* rows that are picked from among keys faster than all are turned */

/* Brings `count` rows of keys or values to the second cache: those AHEAD of `rows`. */
AMX_INLINE void amx_fetch(const uint16_t *rows, int64_t row, int64_t count, int64_t words)
{
    for (int64_t i = AHEAD; i < AHEAD + count; i++)
        for (int64_t word = 0; word < words; word += SIDE)
            __builtin_prefetch(rows + i * row + 2 * word, 0, 2);
}

/* Lays two rows of values out: [words / 16][even, odd columns][16 columns][2 keys], tiles apart. */
AMX_INLINE void amx_pair(__m512i x, __m512i y, float *tile)
{
    _mm512_store_si512(tile, _mm512_mask_mov_epi16(x, 0xaaaaaaaa, _mm512_slli_epi32(y, 16)));
    _mm512_store_si512(tile + TILE_WORDS, _mm512_mask_mov_epi16(_mm512_srli_epi32(x, 16), 0xaaaaaaaa, y));
}

/* Lays PAIRED rows of values out as tiles: [words / 16][even, odd columns][16 pairs of keys][16 columns][2 keys]. Those
 * before `start` and from `stop` on are zeros. */
AMX_INLINE void amx_lay_values(const uint16_t *values, int64_t row, int64_t start, int64_t stop, int64_t words, float *tiles)
{
    const __m512i zeros = _mm512_setzero_si512();
    for (int64_t word = 0; word < words; word += SIDE, tiles += 2 * TILE_WORDS, values += PAIRED) {
        if (start <= 0 && stop >= PAIRED)
#pragma GCC unroll 16
            for (int i = 0; i < SIDE; i++)
                amx_pair(_mm512_loadu_si512(values + 2 * i * row), _mm512_loadu_si512(values + (2 * i + 1) * row), tiles + i * SIDE);
        else
            for (int64_t i = 0; i < PAIRED; i += 2)
                amx_pair(start <= i && i < stop ? _mm512_loadu_si512(values + i * row) : zeros,
                         start <= i + 1 && i + 1 < stop ? _mm512_loadu_si512(values + (i + 1) * row) : zeros, tiles + i / 2 * SIDE);
    }
}

/* 2^(x - peak) for an integer `peak`, with a relative error of 3e-6: less than a hundredth of what rounding to bfloat16 adds; 0
 * far below, NaN for NaN. Its fraction does not depend on `peak`. */
AMX_INLINE __m512 amx_share(__m512 x, __m512 peak)
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
AMX_INLINE __m512 amx_most(const float *scores, int from, int to, int start, int stop, const int partly)
{
    const __m512 empty = _mm512_set1_ps(EMPTY);
    __m512 most[2] = {empty, empty};
#pragma GCC unroll 8
    for (int key = from; key < to; key += PAIRED)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const int at = key + j * SIDE;
            const __m512 x = _mm512_load_ps(scores + at);
            most[j] = _mm512_max_ps(partly ? avx512_within(x, EMPTY, start - at, stop - at) : x, most[j]);
        }
    return _mm512_max_ps(most[0], most[1]);
}

/* The shares of these keys, relative to 2^`peak`; `shares` may be the place of `scores`. The sums, each in sixteen parts, are
 * those of the shares before they are rounded, and after; where there is `kept`, the former are written there. */
AMX_INLINE void amx_exponentiate(
    float *scores, uint16_t *shares, float scale, float peak, int from, int to, int start, int stop, const int partly, float *kept,
    __m512 *exact, __m512 *rounded)
{
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    const __m512 factor = _mm512_set1_ps(scale), highest = _mm512_set1_ps(peak);
    __m512 totals[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, total = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int key = from; key < to; key += PAIRED) {
        __m512 x[2];
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const int at = key + j * SIDE;
            x[j] = amx_share(_mm512_mul_ps(_mm512_load_ps(scores + at), factor), highest);
            if (partly)
                x[j] = avx512_within(x[j], 0.0f, start - at, stop - at);
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

/* Up to 32 rows of a block, over one split. */
typedef struct {
    const Attention *call;
    const Work *work;
    const Row *rows;
    int64_t some, base, from, to; /* rows; the split's first key; the keys that some row sees, counted from there */
    float *q, *out;
} AmxRows;

/* Writes the products of 32 rows `a`, or with one half of 16, and 32 columns `b`, as sums of `steps` products of tiles.
 * `a_stride` and `out_stride` are floats between rows; the columns' tiles are `second` floats apart, and `step` from one
 * product to the next. */
AMX_INLINE void amx_multiply(
    const int halves, const float *a, int64_t a_stride, const float *b, int64_t second, int64_t step, int64_t steps, float *out,
    int64_t out_stride)
{
    _tile_zero(0);
    _tile_zero(1);
    if (halves == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (; steps > 0; steps--, a += SIDE, b += step) {
        _tile_loadd(4, a, a_stride * 4);
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + second, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (halves == 2) {
            _tile_loadd(5, a + SIDE * a_stride, a_stride * 4);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, out_stride * 4);
    _tile_stored(1, out + SIDE, out_stride * 4);
    if (halves == 2) {
        _tile_stored(2, out + SIDE * out_stride, out_stride * 4);
        _tile_stored(3, out + SIDE * out_stride + SIDE, out_stride * 4);
    }
}

/* Scores [32][SCORES_STRIDE] from keys that are laid out. */
AMX_INLINE void amx_score(const AmxRows *this, const int halves)
{
    const int64_t words = this->call->head_dim / 2;
    AMX_WRITTEN;
    for (int64_t key = this->from; key < this->to; key += PAIRED)
        amx_multiply(halves, this->q, words, this->work->keys + key * words, words * SIDE, TILE_WORDS, words / SIDE,
                     this->work->scores + key, SCORES_STRIDE);
}

/* Scores of up to 16 rows from `TILE` keys as they lie, `first` keys behind the split's first. Those from `count` on are
 * left out. The products are the same, in the same order. */
AMX_INLINE void amx_score_few(const AmxRows *this, const uint16_t *keys, int64_t first, int64_t count, const float *turned)
{
    const int64_t words = this->call->head_dim / 2;
    float products[TILE / SIDE][TILE_WORDS] __attribute__((aligned(64)));
    uint16_t rest[SIDE * MAX_DIM];
    const int64_t tiles = (smaller(TILE, count) + SIDE - 1) / SIDE;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const uint16_t *here = keys + tile * SIDE * this->call->k_row;
        int64_t row = 2 * this->call->k_row, some = count - tile * SIDE;
        amx_fetch(here, this->call->k_row, SIDE, words);
        if (some < SIDE) {
            for (int64_t i = 0; i < some; i++)
                memcpy(rest + i * 2 * words, here + i * this->call->k_row, words * 4);
            here = rest;
            row = 4 * words;
        }
        AMX_WRITTEN;
        _tile_zero(0);
        for (int64_t word = 0; word < words; word += SIDE) {
            _tile_loadd(4, here + 2 * word, row);
            _tile_loadd(5, turned + word * SIDE, 64);
            _tile_dpbf16ps(0, 4, 5);
        }
        _tile_stored(0, products[tile], 64);
    }
    for (int64_t tile = 0; tile < tiles; tile++) {
        float *product = products[tile], *scores = this->work->scores + first + tile * SIDE;
        if (this->some <= FEW) {
            const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            for (int64_t r = 0; r < this->some; r++)
                _mm512_store_ps(scores + r * SCORES_STRIDE, _mm512_i32gather_ps(_mm512_slli_epi32(lane, 4), product + r, 4));
            continue;
        }
        __m512 r[SIDE];
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++)
            r[i] = _mm512_load_ps(product + i * SIDE);
        avx512_transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++)
            _mm512_store_ps(scores + i * SCORES_STRIDE, r[i]);
    }
}

/* The keys that row `r` sees, counted from the split's first. */
AMX_INLINE void amx_seen(const AmxRows *this, int64_t r, int *start, int *stop)
{
    *start = (int)larger(this->rows[r].start - this->base, 0);
    *stop = (int)larger(smaller(this->rows[r].stop - this->base, SPLIT), 0);
}

/* The integers above the highest scores of `some` rows, of up to 16, from `first` on. */
AMX_INLINE void amx_peaks(const AmxRows *this, float scale, int64_t first, int64_t some, float *peaks)
{
    __m512 most[SIDE], highest;
    for (int64_t i = 0; i < some; i++) {
        const float *scores = this->work->scores + (first + i) * SCORES_STRIDE;
        int start, stop;
        amx_seen(this, first + i, &start, &stop);
        if (start == 0 && stop == SPLIT)
            most[i] = amx_most(scores, 0, SPLIT, 0, SPLIT, 0);
        else
            most[i] = amx_most(scores, (int)this->from, (int)this->to, start, stop, 1);
    }
    if (some <= FEW) {
        highest = _mm512_setzero_ps();
        for (int64_t i = 0; i < some; i++)
            highest = _mm512_mask_mov_ps(highest, (__mmask16)(1u << i), _mm512_set1_ps(_mm512_reduce_max_ps(most[i])));
    } else {
        for (int64_t i = some; i < SIDE; i++)
            most[i] = most[0];
        avx512_transpose(most);
        highest = most[0];
#pragma GCC unroll 16
        for (int i = 1; i < SIDE; i++)
            highest = _mm512_max_ps(highest, most[i]);
    }
    const __m512 empty = _mm512_set1_ps(EMPTY), scaled = _mm512_mul_ps(highest, _mm512_set1_ps(scale));
    highest = _mm512_mask_mov_ps(empty, _mm512_cmp_ps_mask(highest, empty, _CMP_GT_OQ), _mm512_max_ps(scaled, empty));
    _mm512_storeu_ps(peaks, _mm512_roundscale_ps(highest, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
}

/* Puts a row's shares in the place of its scores. */
AMX_INLINE void amx_shares(const AmxRows *this, float scale, int64_t r, float peak, __m512 *exact, __m512 *rounded)
{
    const Attention *call = this->call;
    const Row *row = this->rows + r;
    float *scores = this->work->scores + r * SCORES_STRIDE;
    uint16_t *shares = (uint16_t *)scores;
    const int from = (int)this->from, to = (int)this->to;
    int start, stop;
    amx_seen(this, r, &start, &stop);
    if (row->mass) {
        float kept[SPLIT] __attribute__((aligned(64)));
        if (start == 0 && stop == SPLIT)
            amx_exponentiate(scores, shares, scale, peak, 0, SPLIT, 0, SPLIT, 0, kept, exact, rounded);
        else
            amx_exponentiate(scores, shares, scale, peak, from, to, start, stop, 1, kept, exact, rounded);
        for (int64_t first = from; first < to; first += TILE) {
            const int64_t key = this->base + first;
            BF16(sum_chunks)(call->chunk_size, smaller(TILE, call->m - key), kept + first, row->mass + key / call->chunk_size);
            row->peaks[key / TILE] = peak;
        }
    } else if (start == 0 && stop == SPLIT)
        amx_exponentiate(scores, shares, scale, peak, 0, SPLIT, 0, SPLIT, 0, 0, exact, rounded);
    else
        amx_exponentiate(scores, shares, scale, peak, from, to, start, stop, 1, 0, exact, rounded);
}

/* Writes the values, weighted by the shares. */
AMX_INLINE void amx_weigh(const AmxRows *this, const int halves)
{
    const int64_t dim = this->call->head_dim, words = dim / 2, from = this->from;
    AMX_WRITTEN;
    for (int64_t column = 0; column < dim; column += PAIRED)
        amx_multiply(halves, this->work->scores + from / 2, SCORES_STRIDE, this->work->values + from * words + column * SIDE,
                     TILE_WORDS, PAIRED * words, (this->to - from) / PAIRED, this->out + column, row_stride(dim));
}

/* The sums of `some` rows, of up to sixteen, that each are in sixteen parts. */
AMX_INLINE void amx_sum(__m512 *parts, int64_t some, float *sums)
{
    if (some <= FEW) {
        for (int64_t r = 0; r < some; r++) {
            float part[SIDE];
            _mm512_storeu_ps(part, parts[r]);
            sums[r] = part[0];
            for (int i = 1; i < SIDE; i++)
                sums[r] += part[i];
        }
        return;
    }
    for (int64_t r = some; r < SIDE; r++)
        parts[r] = parts[0];
    avx512_transpose(parts);
    for (int i = 1; i < SIDE; i++)
        parts[0] = _mm512_add_ps(parts[0], parts[i]);
    _mm512_storeu_ps(sums, parts[0]);
}

/* What follows from scores: peaks, sums of shares, and weighted values. */
AMX_INLINE void amx_attend(const AmxRows *this)
{
    const int64_t dim = this->call->head_dim, stride = row_stride(dim);
    const float scale = (float)(this->call->scale * 1.4426950408889634);
    for (int64_t first = 0; first < this->some; first += SIDE) {
        const int64_t some = smaller(SIDE, this->some - first);
        float peaks[SIDE], sums[2][SIDE];
        __m512 exact[SIDE], rounded[SIDE];
        amx_peaks(this, scale, first, some, peaks);
        for (int64_t r = 0; r < some; r++)
            amx_shares(this, scale, first + r, peaks[r], exact + r, rounded + r);
        amx_sum(exact, some, sums[0]);
        amx_sum(rounded, some, sums[1]);
        for (int64_t r = 0; r < some; r++) {
            float *out = this->out + (first + r) * stride + dim;
            out[0] = peaks[r];
            out[1] = sums[0][r];
            out[2] = sums[1][r];
        }
    }
    this->some > SIDE ? amx_weigh(this, 2) : amx_weigh(this, 1);
}

AMX void amx_part(const Attention *call, int64_t kv_head, int64_t rows, int64_t split, const Work *work, float *part)
{
    const int64_t dim = call->head_dim, words = dim / 2, base = split * SPLIT;
    const int64_t start = larger(work->rows[0].start - base, 0) / TILE * TILE;
    const int64_t stop = smaller(work->rows[rows - 1].stop - base, SPLIT);
    AmxRows these = {call, work, work->rows, rows, base, start, (stop + TILE - 1) / TILE * TILE, work->q, part};
    float turned[SIDE * MAX_DIM / 2] __attribute__((aligned(64)));
    if (rows <= SIDE)
        amx_turn((const uint16_t *)work->q, dim, rows, words, turned);
    for (int64_t first = start; first < stop; first += TILE) {
        const int64_t block = (base + first) / call->block_size, offset = (base + first) % call->block_size;
        const int64_t hidden = work->rows[0].start - base - first, count = stop - first; /* keys before and behind no row sees */
        const uint16_t *k = (const uint16_t *)call->k + kv_head * call->k_head + block * call->k_block + offset * call->k_row;
        const uint16_t *v = (const uint16_t *)call->v + kv_head * call->v_head + block * call->v_block + offset * call->v_row;
        if (rows <= SIDE)
            amx_score_few(&these, k, first, count, turned);
        else
            for (int64_t key = 0; key < TILE; key += SIDE) {
                amx_fetch(k + key * call->k_row, call->k_row, SIDE, words);
                float *keys = work->keys + (first + key) * words;
                if (count - key >= SIDE)
                    amx_turn(k + key * call->k_row, call->k_row, SIDE, words, keys);
                else
                    amx_turn(k + key * call->k_row, call->k_row, count - key, words, keys);
            }
        for (int64_t key = 0; key < TILE; key += PAIRED) {
            amx_fetch(v + key * call->v_row, call->v_row, PAIRED, words);
            amx_lay_values(v + key * call->v_row, call->v_row, hidden - key, count - key, words, work->values + (first + key) * words);
        }
    }
    for (int64_t r0 = 0; r0 < rows; r0 += TOGETHER) {
        these.rows = work->rows + r0;
        these.some = smaller(TOGETHER, rows - r0);
        these.from = larger(these.rows[0].start - base, 0) / TILE * TILE;
        these.to = (smaller(these.rows[these.some - 1].stop - base, SPLIT) + TILE - 1) / TILE * TILE;
        these.q = work->q + r0 * words;
        these.out = part + r0 * row_stride(dim);
        if (these.from >= these.to) {
            for (int64_t r = 0; r < these.some; r++)
                these.out[r * row_stride(dim) + dim + 1] = 0.0f;
            continue;
        }
        if (these.some > SIDE)
            amx_score(&these, 2);
        else if (rows > SIDE)
            amx_score(&these, 1);
        amx_attend(&these);
    }
}

const AttentionKernels attention_amx_bfloat16 = {
    .row_block = 256, .sizes = {.keys = SPLIT / 2, .values = SPLIT / 2, .scores = TOGETHER * SCORES_STRIDE},
    .begin = amx_begin, .end = amx_end, .prepare = BF16(prepare_rows), .part = amx_part, .merge = BF16(merge), .finish = BF16(finish),
};
