/* Distributions of tokens, and draws from them, for contiguous rows of `vocab` float32 logits or weights. For processors with
 * AVX2. On others it is compiled, but there is no level at which it is called. */

#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include "avx2.h"
#endif

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define STEP 0x9E3779B97F4A7C15ull /* of SplitMix64, see offload/speculation/noise.py */
#define SUMMED 512                 /* powers that are summed in float32 */

typedef struct {
    float probability;
    int64_t token;
} Candidate;

#if defined(__x86_64__) && defined(__GNUC__)
#define WIDE __attribute__((target(AVX2_TARGET)))

/* Eight numbers of a row, or as many as it has left and nothing below them. */
WIDE static inline __m256 eight(const float *x, int64_t left)
{
    const __m256 none = vec_all(-INFINITY);
    if (left >= 8)
        return vec_load(x);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i some = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)left), lane);
    return _mm256_blendv_ps(none, _mm256_maskload_ps(x, some), _mm256_castsi256_ps(some));
}

/* The largest of a row, or NaN where one is. */
WIDE static float largest(const float *x, int64_t n)
{
    __m256 most = vec_all(-INFINITY), unordered = vec_zero();
    for (int64_t i = 0; i < n; i += 8) {
        const __m256 here = eight(x + i, n - i);
        most = vec_max(here, most);
        unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(here, here, _CMP_UNORD_Q));
    }
    return _mm256_movemask_ps(unordered) ? NAN : vec_largest(most);
}

/* Writes 2^((x - peak) * factor), and returns the sum. Equal numbers have equal powers, wherever they stand. */
WIDE static double powers(const float *x, int64_t n, float peak, float factor, float *out)
{
    double sum = 0.0;
    for (int64_t first = 0; first < n; first += SUMMED) {
        __m256 here = vec_zero();
        for (int64_t i = first; i < n && i < first + SUMMED; i += 8) {
            const __m256 power = vec_exp2(vec_mul(vec_sub(eight(x + i, n - i), vec_all(peak)), vec_all(factor)));
            float some[8];
            vec_store(n - i < 8 ? some : out + i, power);
            if (n - i < 8)
                memcpy(out + i, some, (size_t)(n - i) * sizeof(float));
            here = vec_add(here, power);
        }
        sum += vec_sum(here);
    }
    return sum;
}
#else
static float largest(const float *x, int64_t n)
{
    float peak = -INFINITY;
    for (int64_t i = 0; i < n; i++)
        peak = x[i] > peak || x[i] != x[i] ? x[i] : peak; /* nothing is larger than NaN */
    return peak;
}

static double powers(const float *x, int64_t n, float peak, float factor, float *out)
{
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++)
        sum += out[i] = exp2f((x[i] - peak) * factor);
    return sum;
}
#endif

/* The first of the largest of a row, or -1 where one is NaN. */
static int64_t likeliest(const float *x, int64_t n)
{
    const float peak = largest(x, n);
    int64_t i = peak == peak ? 0 : -1;
    while (i >= 0 && x[i] != peak)
        i++;
    return i;
}

/* The `k`-th largest of `n` numbers, which change places. */
static float at_rank(float *x, int64_t n, int64_t k)
{
    int64_t low = 0, high = n - 1;
    while (low < high) {
        const float middle = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > middle)
                i++;
            while (x[j] < middle)
                j--;
            if (i <= j) {
                const float kept = x[i];
                x[i++] = x[j];
                x[j--] = kept;
            }
        }
        if (k - 1 <= j)
            high = j;
        else if (k - 1 >= i)
            low = i;
        else
            break;
    }
    return x[k - 1];
}

static int by_probability(const void *a, const void *b)
{
    const Candidate *x = a, *y = b;
    if (x->probability != y->probability)
        return x->probability > y->probability ? -1 : 1;
    return x->token < y->token ? -1 : 1;
}

/* Leaves only the likeliest tokens of a row, as many as reach `top_p` together; they sum to 1. Tokens are taken by bands of
 * probability, of which only the last has to be sorted. */
static void keep_nucleus(float *row, int64_t vocab, double top_p, Candidate *candidates)
{
    int64_t count = 0, kept = 0;
    double reached = 0.0;
    for (float above = INFINITY, least = 0x1p-9f;; above = least, least = least > 0x1p-120f ? least / 8 : 0.0f) {
        double here = 0.0;
        for (int64_t i = 0; i < vocab; i++)
            if (row[i] < above && row[i] >= least && row[i] > 0.0f) {
                candidates[count++] = (Candidate){row[i], i};
                here += row[i];
            }
        if (least == 0.0f || reached + here >= top_p)
            break;
        reached += here;
        kept = count;
    }
    qsort(candidates + kept, (size_t)(count - kept), sizeof(Candidate), by_probability);
    while (kept < count && reached < top_p)
        reached += candidates[kept++].probability;
    memset(row, 0, (size_t)vocab * sizeof(float));
    for (int64_t i = 0; i < kept; i++)
        row[candidates[i].token] = (float)(candidates[i].probability / reached);
}

/* Leaves only the tokens of a row that are at least `min_p` times as likely as the likeliest; they sum to 1. */
static void keep_likely(float *row, int64_t vocab, double min_p)
{
    const float least = (float)min_p * largest(row, vocab);
    double sum = 0.0;
    for (int64_t i = 0; i < vocab; i++)
        sum += row[i] = row[i] < least ? 0.0f : row[i];
    const float share = (float)(1.0 / sum);
    for (int64_t i = 0; i < vocab; i++)
        row[i] *= share;
}

/* Writes a row's distribution. `room` is for `vocab` candidates, or numbers. */
static void distribute(const float *logits, int64_t vocab, double temperature, int64_t top_k, double top_p, double min_p,
                       float *row, void *room)
{
    const int64_t first = likeliest(logits, vocab);
    if (first < 0 || !isfinite(logits[first])) {
        for (int64_t i = 0; i < vocab; i++)
            row[i] = NAN;
        return;
    }
    if (temperature == 0.0) {
        memset(row, 0, (size_t)vocab * sizeof(float));
        row[first] = 1.0f;
        return;
    }
    const float peak = logits[first], factor = (float)(1.4426950408889634 / temperature);
    double sum = powers(logits, vocab, peak, factor, row);
    if (0 < top_k && top_k < vocab) {
        memcpy(room, logits, (size_t)vocab * sizeof(float));
        const float least = at_rank(room, vocab, top_k);
        sum = 0.0;
        for (int64_t i = 0; i < vocab; i++)
            sum += row[i] = logits[i] < least ? 0.0f : row[i];
    }
    const float share = (float)(1.0 / sum);
    for (int64_t i = 0; i < vocab; i++)
        row[i] *= share;
    if (top_p < 1.0)
        keep_nucleus(row, vocab, top_p, room);
    if (min_p > 0.0)
        keep_likely(row, vocab, min_p);
}

int triforce_distribution(const float *logits, int64_t n, int64_t vocab, double temperature, int64_t top_k, double top_p,
                          double min_p, float *out, int threads)
{
    Candidate *room = temperature == 0.0 ? 0 : malloc((size_t)(threads * vocab) * sizeof(Candidate));
    if (temperature != 0.0 && !room)
        return 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static, 1)
    for (int part = 0; part < threads; part++)
        for (int64_t r = part; r < n; r += threads)
            distribute(logits + r * vocab, vocab, temperature, top_k, top_p, min_p, out + r * vocab,
                       room ? room + part * vocab : 0);
    free(room);
    return 0;
}

void triforce_certainties(const float *logits, int64_t n, int64_t vocab, const int64_t *tokens, int64_t *millionths)
{
    for (int64_t r = 0; r < n; r++, logits += vocab) {
        const int64_t token = tokens[r];
        if (token < 0 || token >= vocab) {
            millionths[r] = 0;
            continue;
        }
        const float before = largest(logits, token), behind = largest(logits + token + 1, vocab - token - 1);
        const float rival = before > behind || before != before ? before : behind;
        const float sure = 1.0f / (1.0f + expf(rival - logits[token]));
        millionths[r] = sure == sure ? (int64_t)(sure * 1e6f) : 0;
    }
}

void triforce_likeliest(const float *weights, int64_t n, int64_t vocab, int64_t *tokens)
{
    for (int64_t r = 0; r < n; r++)
        tokens[r] = likeliest(weights + r * vocab, vocab);
}

void triforce_pick(const float *weights, int64_t n, int64_t vocab, const double *shares, int64_t *tokens)
{
    for (int64_t r = 0; r < n; r++, weights += vocab) {
        double total = 0.0, reach = 0.0;
        for (int64_t i = 0; i < vocab; i++)
            total += weights[i];
        const double point = shares[r] * total;
        tokens[r] = -1;
        for (int64_t i = 0; i < vocab && tokens[r] < 0 && total == total; i++) {
            reach += weights[i];
            if (reach > point)
                tokens[r] = i;
        }
    }
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

void triforce_race(const float *weights, int64_t n, int64_t vocab, const int64_t *keys, int64_t *tokens)
{
    for (int64_t r = 0; r < n; r++, weights += vocab) {
        double least = INFINITY;
        tokens[r] = 0;
        for (int64_t i = 0; i < vocab; i++) {
            if (weights[i] == 0.0f)
                continue;
            if (weights[i] != weights[i]) {
                tokens[r] = -1;
                break;
            }
            const uint64_t bits = mix((uint64_t)keys[r] + (uint64_t)i * STEP);
            const double waited = -log((double)((bits >> 11) + 1) * 0x1p-53);
            const double time = (waited < 0x1p-54 ? 0x1p-54 : waited) / weights[i];
            if (time < least) {
                least = time;
                tokens[r] = i;
            }
        }
    }
}
