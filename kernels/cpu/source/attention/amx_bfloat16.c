/* Attention with AMX on bfloat16: products of 16 rows, 16 keys and 32 dimensions at a time. See shares.h for the arithmetic. */

#include "../cpu.h"

#ifdef HAS_AMX
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2,avx512bf16,amx-tile,amx-bf16")

#include "../amx.h"
#include "shares.h"

#define TOGETHER (2 * SIDE) /* rows that are computed together, which halves what is loaded */
#define AHEAD (2 * TILE)    /* keys from those that are used to those that are brought to the second cache */

/* Brings `count` rows of keys or values to the second cache: those AHEAD of `rows`. */
INLINE void fetch(const uint16_t *rows, int64_t row, int64_t count, int64_t words)
{
    for (int64_t i = AHEAD; i < AHEAD + count; i++)
        for (int64_t word = 0; word < words; word += SIDE)
            __builtin_prefetch(rows + i * row + 2 * word, 0, 2);
}

/* Lays PAIRED rows of values out as tiles: [words / 16][even, odd columns][16 pairs of keys][16 columns][2 keys]. Those
 * before `start` and from `stop` on are zeros. */
INLINE void lay_values(const uint16_t *values, int64_t row, int64_t start, int64_t stop, int64_t words, float *tiles)
{
    const __m512i zeros = _mm512_setzero_si512();
    for (int64_t word = 0; word < words; word += SIDE, tiles += 2 * TILE_WORDS, values += PAIRED) {
        if (start <= 0 && stop >= PAIRED)
#pragma GCC unroll 16
            for (int i = 0; i < SIDE; i++)
                pair(_mm512_loadu_si512(values + 2 * i * row), _mm512_loadu_si512(values + (2 * i + 1) * row), tiles + i * SIDE,
                     tiles + TILE_WORDS + i * SIDE);
        else
            for (int64_t i = 0; i < PAIRED; i += 2)
                pair(start <= i && i < stop ? _mm512_loadu_si512(values + i * row) : zeros,
                     start <= i + 1 && i + 1 < stop ? _mm512_loadu_si512(values + (i + 1) * row) : zeros, tiles + i / 2 * SIDE,
                     tiles + TILE_WORDS + i / 2 * SIDE);
    }
}

/* Writes the products of 32 rows `a`, or with one half of 16, and 32 columns `b`, as sums of `steps` products of tiles.
 * `a_stride` and `out_stride` are floats between rows; the columns' tiles are `second` floats apart, and `step` from one
 * product to the next. */
INLINE void multiply(
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
INLINE void score(const SplitRows *this, const int halves)
{
    const int64_t words = this->call->head_dim / 2;
    AMX_WRITTEN;
    for (int64_t key = this->from; key < this->to; key += PAIRED)
        multiply(halves, this->q, words, this->work->keys + key * words, words * SIDE, TILE_WORDS, words / SIDE,
                 this->work->scores + key, SCORES_STRIDE);
}

/* Scores of up to 16 rows from `TILE` keys as they lie, `first` keys behind the split's first. Those from `count` on are
 * left out. The products are the same, in the same order. */
INLINE void score_few(const SplitRows *this, const uint16_t *keys, int64_t first, int64_t count, const float *turned)
{
    const int64_t words = this->call->head_dim / 2;
    float products[TILE / SIDE][TILE_WORDS] __attribute__((aligned(64)));
    uint16_t rest[SIDE * MAX_DIM];
    const int64_t tiles = (smaller(TILE, count) + SIDE - 1) / SIDE;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const uint16_t *here = keys + tile * SIDE * this->call->k_row;
        int64_t row = 2 * this->call->k_row, some = count - tile * SIDE;
        fetch(here, this->call->k_row, SIDE, words);
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
        vec_transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++)
            _mm512_store_ps(scores + i * SCORES_STRIDE, r[i]);
    }
}

/* Writes the values, weighted by the shares. */
INLINE void weigh(const SplitRows *this, const int halves)
{
    const int64_t dim = this->call->head_dim, words = dim / 2, from = this->from;
    AMX_WRITTEN;
    for (int64_t column = 0; column < dim; column += PAIRED)
        multiply(halves, this->work->scores + from / 2, SCORES_STRIDE, this->work->values + from * words + column * SIDE,
                 TILE_WORDS, PAIRED * words, (this->to - from) / PAIRED, this->out + column, row_stride(dim));
}

static void part(const Attention *call, int64_t kv_head, int64_t rows, int64_t split, const Work *work, float *out)
{
    const int64_t dim = call->head_dim, words = dim / 2, base = split * SPLIT;
    const int64_t start = larger(work->rows[0].start - base, 0) / TILE * TILE;
    const int64_t stop = smaller(work->rows[rows - 1].stop - base, SPLIT);
    SplitRows these = {call, work, work->rows, rows, base, start, (stop + TILE - 1) / TILE * TILE, work->q, out};
    float turned[SIDE * MAX_DIM / 2] __attribute__((aligned(64)));
    if (rows <= SIDE)
        amx_turn((const uint16_t *)work->q, dim, rows, words, SIDE, turned);
    for (int64_t first = start; first < stop; first += TILE) {
        const int64_t hidden = work->rows[0].start - base - first, count = stop - first; /* keys before and behind no row sees */
        const uint16_t *k = (const uint16_t *)call->k + kv_head * call->k_head + place_of(call, base + first, call->k_block, call->k_row);
        const uint16_t *v = (const uint16_t *)call->v + kv_head * call->v_head + place_of(call, base + first, call->v_block, call->v_row);
        if (rows <= SIDE)
            score_few(&these, k, first, count, turned);
        else
            for (int64_t key = 0; key < TILE; key += SIDE) {
                fetch(k + key * call->k_row, call->k_row, SIDE, words);
                float *keys = work->keys + (first + key) * words;
                if (count - key >= SIDE)
                    amx_turn(k + key * call->k_row, call->k_row, SIDE, words, SIDE, keys);
                else
                    amx_turn(k + key * call->k_row, call->k_row, count - key, words, SIDE, keys);
            }
        for (int64_t key = 0; key < TILE; key += PAIRED) {
            fetch(v + key * call->v_row, call->v_row, PAIRED, words);
            lay_values(v + key * call->v_row, call->v_row, hidden - key, count - key, words, work->values + (first + key) * words);
        }
    }
    for (int64_t r0 = 0; r0 < rows; r0 += TOGETHER) {
        these.rows = work->rows + r0;
        these.some = smaller(TOGETHER, rows - r0);
        these.from = larger(these.rows[0].start - base, 0) / TILE * TILE;
        these.to = (smaller(these.rows[these.some - 1].stop - base, SPLIT) + TILE - 1) / TILE * TILE;
        these.q = work->q + r0 * words;
        these.out = out + r0 * row_stride(dim);
        if (these.from >= these.to) {
            for (int64_t r = 0; r < these.some; r++)
                these.out[r * row_stride(dim) + dim + 1] = 0.0f;
            continue;
        }
        if (these.some > SIDE)
            score(&these, 2);
        else if (rows > SIDE)
            score(&these, 1);
        find_shares(&these);
        these.some > SIDE ? weigh(&these, 2) : weigh(&these, 1);
    }
}

AMX void begin(void) { amx_begin(SIDE); }

const AttentionKernels attention_amx_bfloat16 = {
    .row_block = 256, .sizes = {.keys = SPLIT / 2, .values = SPLIT / 2, .scores = TOGETHER * SCORES_STRIDE},
    .begin = begin, .end = amx_end, .prepare = prepare, .part = part, .merge = merge, .finish = finish,
};

#endif
