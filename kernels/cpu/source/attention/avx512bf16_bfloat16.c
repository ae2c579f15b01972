/* Attention with AVX-512's dot products of pairs of bfloat16. See shares.h for the arithmetic.
 *
 * A score is a sum over the words of a key, one after another. A tile adds to a result the sum over its pairs of keys, one after
 * another. Both have the same order for any number of rows. Keys are transposed, and values paired, once for all rows of a
 * block. */

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2,avx512bf16")

#include "shares.h"

#define TOGETHER 24 /* rows that tiles are read for together: as many as have room for their scores in the first cache */
#define VECTORS 4   /* vectors of sums of a row: of 64 keys, or of 64 columns */
#define COLUMNS 32  /* columns of a vector of values */

/* A tile of a split, and what is prefetched while it is computed with. */
typedef struct {
    int64_t first;             /* its first key, counted from the split's */
    float *laid;               /* its keys transposed, [words][TILE], or its values paired, see pair_values */
    const char *keys, *values; /* to be prefetched */
    int every;                 /* a line of both is prefetched at every first or second step of a loop; 0: none is */
    int to_second;             /* whether to the second cache, not the first */
    int64_t again;             /* bytes before each line of one that is prefetched too, a second time; 0: none is */
} Tile;

INLINE void prefetch(const Tile *tile, int64_t step)
{
    if (tile->every == 1 || (tile->every == 2 && step % 2 == 0)) {
        const int64_t at = (tile->every == 1 ? 64 : 32) * step; /* a line is 64 bytes */
        prefetch_line(tile->keys + at, tile->to_second);
        prefetch_line(tile->values + at, tile->to_second);
        if (tile->again) {
            prefetch_line(tile->keys + at - tile->again, tile->to_second);
            prefetch_line(tile->values + at - tile->again, tile->to_second);
        }
    }
}

/* Goes on to the lines behind those that a loop of head_dim / 2 steps has prefetched. */
INLINE void advance(Tile *tile, int64_t dim)
{
    if (tile->every) {
        tile->keys += 32 * dim / tile->every;
        tile->values += 32 * dim / tile->every;
    }
}

/* Writes a tile of keys transposed. */
static void transpose_keys(const Tile *tile, const uint16_t *keys, int64_t row, int64_t words)
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
                    prefetch(tile, step++);
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
        for (int64_t column = 0; column < dim; column += COLUMNS) {
            float *even = tile->laid + column * TILE / 2 + key * LANES;
            if (column % (2 * COLUMNS) == 0)
                prefetch(tile, (column + key) / 2);
            pair(_mm512_loadu_si512(values + column), _mm512_loadu_si512(values + row + column), even, even + LANES);
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
        prefetch(tile, word);
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
        prefetch(tile, column / 2 + pair);
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
    for (; column + 2 * COLUMNS <= this->call->head_dim; column += 2 * COLUMNS)
        weigh_columns(rows, 4, this, r0, column, tile);
    if (column < this->call->head_dim)
        weigh_columns(rows, 2, this, r0, column, tile);
}

/* Scores or weighs all of these rows, in groups of about the same number. What is prefetched meanwhile is divided among laying the
 * tile out and the groups: with one group 1/2, 1/2; with two 1/4, 1/4, 1/2; with more 1/4, 1/4, 1/4, 1/4. */
INLINE void take_rows(const int weighs, const SplitRows *this, Tile *tile)
{
    const int64_t groups = (this->some + AT_A_TIME - 1) / AT_A_TIME;
    for (int64_t group = 0, r = 0, some; group < groups; group++, r += some) {
        some = (this->some - r) / (groups - group);
        advance(tile, this->call->head_dim);
        if (group == 3)
            tile->every = 0;
        else if (group == 1 && groups == 2 && tile->every)
            tile->every = 1;
        if (weighs)
            FOR_ROWS(weigh, some, this, r, tile)
        else
            FOR_ROWS(score, some, this, r, tile)
    }
}

/* Has half a tile of keys and of values prefetched, those as far ahead of `key` as the processor takes it: behind the last key
 * before `stop` come those of what the thread goes on with. The pass over the keys of a split prefetches half of what lies ahead of
 * them, the pass over the values the other half: so memory is read at an even pace. Rows that do not lie one behind another are left
 * to the processor's own prefetching. */
static void prefetch_later(Tile *tile, const SplitRows *this, int64_t kv_head, int64_t stop, int64_t key)
{
    const Prefetching *suits = prefetching();
    HeadKeys from = {this->call, kv_head, key + suits->keys_ahead};
    if (from.first >= stop) {
        const int64_t beyond = from.first - stop;
        from = this->work->next;
        from.first += beyond;
    }
    const Attention *call = from.call;
    if (!suits->keys_ahead || !call || from.first >= call->m || call->k_row != call->head_dim || call->v_row != call->head_dim)
        return;
    const int64_t keys = from.kv_head * call->k_head + place_of(call, from.first, call->k_block, call->k_row);
    const int64_t values = from.kv_head * call->v_head + place_of(call, from.first, call->v_block, call->v_row);
    tile->keys = (const char *)call->k + 2 * keys;
    tile->values = (const char *)call->v + 2 * values;
    tile->every = this->some <= AT_A_TIME ? 1 : 2;
    tile->to_second = this->some <= suits->few_rows;
    const int twice = this->some <= suits->again_rows && 2 * call->head_dim * from.first >= suits->again; /* not before the first key */
    tile->again = twice ? suits->again : 0;
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
    const int64_t end = (base + stop + TILE - 1) / TILE * TILE;
    const uint16_t *k = (const uint16_t *)call->k + kv_head * call->k_head, *v = (const uint16_t *)call->v + kv_head * call->v_head;
    const int64_t apart = rows > TOGETHER ? words : 0; /* floats from one key's place to the next; 0: all tiles take the same place */
    int64_t transposed = 0, paired = 0; /* up to which keys of the split are laid out; later rows see none before those of earlier ones */
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
            if (first >= transposed) {
                const uint16_t *keys = k + place_of(call, base + first, call->k_block, call->k_row);
                prefetch_later(&tile, &these, kv_head, end, base + (these.from + first) / 2);
                if (stop - first < TILE)
                    transpose_keys(&tile, copy_tile(keys, call->k_row, 0, stop - first, dim, copy), dim, words);
                else
                    transpose_keys(&tile, keys, call->k_row, words);
                transposed = first + TILE;
            }
            take_rows(0, &these, &tile);
        }
        find_shares(&these);
        for (int64_t first = these.from; first < these.to; first += TILE) {
            Tile tile = {.first = first, .laid = work->values + first * apart};
            if (first >= paired) {
                const uint16_t *values = v + place_of(call, base + first, call->v_block, call->v_row);
                prefetch_later(&tile, &these, kv_head, end, base + (these.to + first) / 2);
                if (start > first || stop - first < TILE)
                    pair_values(&tile, copy_tile(values, call->v_row, start - first, stop - first, dim, copy), dim, dim);
                else
                    pair_values(&tile, values, call->v_row, dim);
                paired = first + TILE;
            }
            take_rows(1, &these, &tile);
        }
    }
}

const AttentionKernels attention_avx512bf16_bfloat16 = {
    .row_block = 192, .sizes = {.keys = SPLIT / 2, .values = SPLIT / 2, .scores = TOGETHER * SCORES_STRIDE},
    .prepare = prepare, .part = part, .merge = merge, .finish = finish,
};

#endif
