/* Attention with AVX-512's dot products of pairs of bfloat16. See shares.h for the arithmetic.
 *
 * A score is the sum of the products of a key's pairs of numbers, one pair after another, and what a tile adds to the result
 * that of pairs of keys, one after another: the same for any number of rows. Keys are turned and values paired tile by tile,
 * once for all rows of a block. */

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2,avx512bf16")

#include "shares.h"

#define TOGETHER 24 /* rows whose scores stay in the first cache, and that tiles are read for together */
#define AT_A_TIME 6 /* rows whose sums stay in registers, each of */
#define VECTORS 4   /* vectors: 64 keys, or columns */
#define PAIRED 32   /* columns of which two vectors hold the pairs of two keys */

/* A tile of a split, and what these rows fetch meanwhile. */
typedef struct {
    int64_t first;             /* its first key, counted from the split's */
    float *laid;               /* its keys turned: [words][TILE]; or its values paired, see pair_values */
    const char *keys, *values; /* what is needed soon; both are fetched all the time, so that memory never waits */
    int every;                 /* steps, of head_dim / 2 there are, from one line to the next; 0: nothing is fetched */
} Tile;

INLINE void fetch(const Tile *tile, int64_t step)
{
    if (tile->every == 1) {
        __builtin_prefetch(tile->keys + 64 * step);
        __builtin_prefetch(tile->values + 64 * step);
    } else if (tile->every == 2 && step % 2 == 0) {
        __builtin_prefetch(tile->keys + 32 * step);
        __builtin_prefetch(tile->values + 32 * step);
    }
}

/* Goes on to the lines behind those that head_dim / 2 steps have fetched. */
INLINE void advance(Tile *tile, int64_t dim)
{
    if (tile->every) {
        tile->keys += 32 * dim / tile->every;
        tile->values += 32 * dim / tile->every;
    }
}

/* Writes a tile of keys turned. */
static void turn_keys(const Tile *tile, const uint16_t *keys, int64_t row, int64_t words)
{
    int64_t step = 0;
    for (int64_t key = 0; key < TILE; key += LANES)
        for (int64_t word = 0; word < words; word += LANES) {
            const uint16_t *from = keys + key * row + 2 * word;
            vec r[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++, from += row) {
                __asm__("" : "+r"(from)); /* or sixteen addresses are computed ahead of the loop, and do not fit into registers */
                if (i % 4 == 0)
                    fetch(tile, step++);
                r[i] = vec_load((const float *)(const void *)from);
            }
            vec_transpose(r);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                vec_store(tile->laid + (word + i) * TILE + key, r[i]);
        }
}

/* Writes a tile of values by pairs of keys: [dim / 32][TILE / 2][even, odd columns][16 columns][2 keys]. */
static void pair_values(const Tile *tile, const uint16_t *values, int64_t row, int64_t dim)
{
    for (int64_t key = 0; key < TILE; key += 2, values += 2 * row)
        for (int64_t column = 0; column < dim; column += PAIRED) {
            if (column % (2 * PAIRED) == 0)
                fetch(tile, (column + key) / 2);
            const __m512i x = _mm512_loadu_si512(values + column), y = _mm512_loadu_si512(values + row + column);
            float *pair = tile->laid + column * TILE / 2 + key * LANES;
            _mm512_store_si512(pair, _mm512_mask_mov_epi16(x, 0xaaaaaaaa, _mm512_slli_epi32(y, 16)));
            _mm512_store_si512(pair + LANES, _mm512_mask_mov_epi16(_mm512_srli_epi32(x, 16), 0xaaaaaaaa, y));
        }
}

/* Writes the scores of `rows` rows, from `r0` on, for a tile of keys. */
INLINE void score(const int rows, const SplitRows *this, int64_t r0, const Tile *tile)
{
    const int64_t words = this->call->head_dim / 2;
    const float *q = this->q + r0 * words;
    float *scores = this->work->scores + r0 * SCORES_STRIDE + tile->first;
    __m512 sums[AT_A_TIME][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++)
            sums[r][j] = vec_zero();
    for (int64_t word = 0; word < words; word++) {
        __m512bh keys[VECTORS];
        fetch(tile, word);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++)
            keys[j] = (__m512bh)vec_load(tile->laid + word * TILE + j * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const __m512bh query = (__m512bh)vec_all(q[r * words + word]);
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++)
                sums[r][j] = _mm512_dpbf16_ps(sums[r][j], query, keys[j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++)
            vec_store(scores + r * SCORES_STRIDE + j * LANES, sums[r][j]);
}

/* Adds a tile's values, weighted by shares, to `vectors` vectors of columns of `rows` rows, from `column` and `r0` on. */
INLINE void weigh_columns(const int rows, const int vectors, const SplitRows *this, int64_t r0, int64_t column, const Tile *tile)
{
    const int64_t stride = row_stride(this->call->head_dim);
    const float *shares = this->work->scores + r0 * SCORES_STRIDE + tile->first / 2, *paired = tile->laid + column * TILE / 2;
    float *out = this->out + r0 * stride + column;
    __m512 sums[AT_A_TIME][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            sums[r][j] = vec_zero();
    for (int64_t pair = 0; pair < TILE / 2; pair++) {
        __m512bh values[VECTORS];
        fetch(tile, column / 2 + pair);
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            values[j] = (__m512bh)vec_load(paired + j / 2 * TILE * LANES + (2 * pair + j % 2) * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const __m512bh share = (__m512bh)vec_all(shares[r * SCORES_STRIDE + pair]);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++)
                sums[r][j] = _mm512_dpbf16_ps(sums[r][j], share, values[j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            float *place = out + r * stride + j * LANES;
            vec_store(place, vec_add(vec_load(place), sums[r][j]));
        }
}

/* Adds a tile's values, weighted by shares, to the results of `rows` rows, from `r0` on. */
INLINE void weigh(const int rows, const SplitRows *this, int64_t r0, const Tile *tile)
{
    int64_t column = 0;
    for (; column + 2 * PAIRED <= this->call->head_dim; column += 2 * PAIRED)
        weigh_columns(rows, 4, this, r0, column, tile);
    if (column < this->call->head_dim)
        weigh_columns(rows, 2, this, r0, column, tile);
}

typedef void Step(const SplitRows *this, int64_t r0, const Tile *tile);

/* `step` compiled for each number of rows: `step`_of[rows]. */
#define FOR_EACH_NUMBER_OF_ROWS(step)                                                                      \
    static void step##_1(const SplitRows *this, int64_t r0, const Tile *tile) { step(1, this, r0, tile); } \
    static void step##_2(const SplitRows *this, int64_t r0, const Tile *tile) { step(2, this, r0, tile); } \
    static void step##_3(const SplitRows *this, int64_t r0, const Tile *tile) { step(3, this, r0, tile); } \
    static void step##_4(const SplitRows *this, int64_t r0, const Tile *tile) { step(4, this, r0, tile); } \
    static void step##_5(const SplitRows *this, int64_t r0, const Tile *tile) { step(5, this, r0, tile); } \
    static void step##_6(const SplitRows *this, int64_t r0, const Tile *tile) { step(6, this, r0, tile); } \
    static Step *const step##_of[] = {0, step##_1, step##_2, step##_3, step##_4, step##_5, step##_6};
FOR_EACH_NUMBER_OF_ROWS(score)
FOR_EACH_NUMBER_OF_ROWS(weigh)

/* Takes all of these rows through a tile, in groups of about the same number. Laying the tile out has fetched the first half of
 * what is to be fetched, or with `every` 2 a fourth. */
static void take_rows(Step *const *step_of, const SplitRows *this, Tile *tile)
{
    const int64_t groups = (this->some + AT_A_TIME - 1) / AT_A_TIME;
    for (int64_t group = 0, r = 0, some; group < groups; group++, r += some) {
        some = (this->some - r) / (groups - group);
        advance(tile, this->call->head_dim);
        if (group + 1 == 2 * tile->every)
            tile->every = 0;
        step_of[some](this, r, tile);
    }
}

/* Where key `key` is, or its value, whose `block` and `row` are given. */
static int64_t place(const Attention *call, int64_t key, int64_t block, int64_t row)
{
    return key / call->block_size * block + key % call->block_size * row;
}

/* Names what is fetched while a tile is laid out and taken through: half a tile of keys and of values, from `key` on. */
static void fetch_later(Tile *tile, const SplitRows *this, const uint16_t *k, const uint16_t *v, int64_t key)
{
    const Attention *call = this->call;
    const int64_t ahead = keys_fetched_ahead();
    if (!ahead || key + ahead >= call->m || call->k_row != call->head_dim || call->v_row != call->head_dim)
        return;
    tile->keys = (const char *)(k + place(call, key + ahead, call->k_block, call->k_row));
    tile->values = (const char *)(v + place(call, key + ahead, call->v_block, call->v_row));
    tile->every = this->some <= 2 * AT_A_TIME ? 1 : 2;
}

/* A copy of a tile of which the keys or values from `start` to before `stop` alone may be read, with zeros for the others. */
static const uint16_t *copy_tile(const uint16_t *rows, int64_t row, int64_t start, int64_t stop, int64_t dim, uint16_t *copy)
{
    memset(copy, 0, TILE * dim * sizeof(uint16_t));
    for (int64_t i = larger(start, 0); i < smaller(stop, TILE); i++)
        memcpy(copy + i * dim, rows + i * row, dim * sizeof(uint16_t));
    return copy;
}

static void part(const Attention *call, int64_t kv_head, int64_t rows, int64_t split, const Work *work, float *out)
{
    const int64_t dim = call->head_dim, words = dim / 2, base = split * SPLIT, stride = row_stride(dim);
    const int64_t start = work->rows[0].start - base, stop = work->rows[rows - 1].stop - base; /* of keys that some row sees */
    const uint16_t *k = (const uint16_t *)call->k + kv_head * call->k_head, *v = (const uint16_t *)call->v + kv_head * call->v_head;
    const int64_t apart = rows > TOGETHER ? words : 0; /* tiles stay for the rows behind the first ones, or take the same place */
    int64_t turned = 0, paired = 0; /* keys of the split so far; a later row sees none before those of an earlier one */
    uint16_t copy[TILE * MAX_DIM];
    for (int64_t r0 = 0; r0 < rows; r0 += TOGETHER) {
        SplitRows these = {.call = call, .work = work, .rows = work->rows + r0, .some = smaller(TOGETHER, rows - r0), .base = base};
        these.from = larger(these.rows[0].start - base, 0) / TILE * TILE;
        these.to = (smaller(these.rows[these.some - 1].stop - base, SPLIT) + TILE - 1) / TILE * TILE;
        these.q = work->q + r0 * words;
        these.out = out + r0 * stride;
        memset(these.out, 0, these.some * stride * sizeof(float));
        if (these.from >= these.to)
            continue;
        for (int64_t first = these.from; first < these.to; first += TILE) {
            Tile tile = {.first = first, .laid = work->keys + first * apart};
            if (first >= turned) {
                const uint16_t *keys = k + place(call, base + first, call->k_block, call->k_row);
                fetch_later(&tile, &these, k, v, base + first / 2);
                if (stop - first < TILE)
                    turn_keys(&tile, copy_tile(keys, call->k_row, 0, stop - first, dim, copy), dim, words);
                else
                    turn_keys(&tile, keys, call->k_row, words);
                turned = first + TILE;
            }
            take_rows(score_of, &these, &tile);
        }
        find_shares(&these);
        for (int64_t first = these.from; first < these.to; first += TILE) {
            Tile tile = {.first = first, .laid = work->values + first * apart};
            if (first >= paired) {
                const uint16_t *values = v + place(call, base + first, call->v_block, call->v_row);
                fetch_later(&tile, &these, k, v, base + (SPLIT + first) / 2);
                if (start > first || stop - first < TILE)
                    pair_values(&tile, copy_tile(values, call->v_row, start - first, stop - first, dim, copy), dim, dim);
                else
                    pair_values(&tile, values, call->v_row, dim);
                paired = first + TILE;
            }
            take_rows(weigh_of, &these, &tile);
        }
    }
}

const AttentionKernels attention_avx512bf16_bfloat16 = {
    .row_block = 192, .sizes = {.keys = SPLIT / 2, .values = SPLIT / 2, .scores = TOGETHER * SCORES_STRIDE},
    .prepare = prepare, .part = part, .merge = merge, .finish = finish,
};

#endif
