/* The gated delta rule, row by row, with the short convolution before it; kernels/delta_rule.py documents what it computes. The
 * bits of a row do not depend on other rows: every number is the sum of the same numbers in the same order. */

#include "cpu.h"

#include <math.h>
#include <stdlib.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include "avx2.h"

#define DELTA __attribute__((target(AVX2_TARGET))) static

VEC __m256 load_some(const void *p, int64_t at, int is_bf16)
{
    if (!is_bf16)
        return vec_load((const float *)p + at);
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)((const uint16_t *)p + at)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

INLINE float load_one(const void *p, int64_t at, int is_bf16)
{
    return is_bf16 ? float_of_bits((uint32_t)((const uint16_t *)p)[at] << 16) : ((const float *)p)[at];
}

INLINE float rounded_one(float x, int is_bf16)
{
    if (!is_bf16)
        return x;
    const uint16_t half = bfloat16_of(x);
    return load_one(&half, 0, 1);
}

VEC __m256 silu(__m256 x)
{
    /* vec_exp2 is not for what 2 to the power of overflows; what is so far below 0 becomes 0 as well by less. */
    const __m256 e = vec_exp2(_mm256_min_ps(vec_all(126.0f), vec_mul(x, vec_all(-1.44269504f))));
    return _mm256_div_ps(x, vec_add(vec_all(1.0f), e));
}

/* Eight channels of a row behind the convolution and the activation. */
VEC __m256 mixed(const Delta *d, int64_t row, int64_t channel)
{
    const void *inputs = (const void *)d->inputs;
    const float *taps = (const float *)d->conv; /* [kernel][channels] */
    __m256 sum = vec_zero();
    for (int64_t tap = 0; tap < d->kernel; tap++)
        sum = vec_fma(load_some(inputs, (row + tap) * d->channels + channel, (int)d->is_bf16),
                      vec_load(taps + tap * d->channels + channel), sum);
    if (!d->is_bf16)
        return silu(sum);
    return vec_rounded(silu(vec_rounded(sum)));
}

/* A query, or a key, of one head by its length. */
DELTA void to_unit(float *x, int64_t size, float scale)
{
    __m256 squares = vec_zero();
    for (int64_t i = 0; i < size; i += LANES)
        squares = vec_fma(vec_load(x + i), vec_load(x + i), squares);
    const __m256 by = vec_all(scale / sqrtf(vec_sum(squares) + 1e-6f));
    for (int64_t i = 0; i < size; i += LANES)
        vec_store(x + i, vec_mul(vec_load(x + i), by));
}

/* Some columns of a head's state in one row, `count` vectors of them (a constant): the columns fade by `fade`, and take
 * `beta (v - S'k)` at the key; `out` is S'q. Several vectors at once, so that sums do not wait for one another. */
VEC void some_columns(float *state, int64_t stride, const float *q, const float *k, const float *v, float fade, float beta,
                      int64_t key_dim, float *out, int count)
{
    const __m256 fades = vec_all(fade), betas = vec_all(beta);
    __m256 change[4], sum[4];
    for (int c = 0; c < count; c++)
        sum[c] = vec_zero();
    for (int64_t i = 0; i < key_dim; i++)
        for (int c = 0; c < count; c++)
            sum[c] = vec_fma(vec_all(k[i]), vec_load(state + i * stride + c * LANES), sum[c]);
    for (int c = 0; c < count; c++) {
        change[c] = vec_mul(betas, vec_sub(vec_load(v + c * LANES), vec_mul(fades, sum[c])));
        sum[c] = vec_zero();
    }
    for (int64_t i = 0; i < key_dim; i++) {
        const __m256 key = vec_all(k[i]), query = vec_all(q[i]);
        for (int c = 0; c < count; c++) {
            float *at = state + i * stride + c * LANES;
            const __m256 now = vec_fma(key, change[c], vec_mul(fades, vec_load(at)));
            vec_store(at, now);
            sum[c] = vec_fma(query, now, sum[c]);
        }
    }
    for (int c = 0; c < count; c++)
        vec_store(out + c * LANES, sum[c]);
}

/* One row of a head, whose state is `[key_dim][value_dim]`. */
DELTA void one_row(float *state, const float *q, const float *k, const float *v, float fade, float beta, int64_t key_dim,
                   int64_t value_dim, float *out)
{
    int64_t j = 0;
    for (; j + 4 * LANES <= value_dim; j += 4 * LANES)
        some_columns(state + j, value_dim, q, k, v + j, fade, beta, key_dim, out + j, 4);
    for (; j < value_dim; j += LANES)
        some_columns(state + j, value_dim, q, k, v + j, fade, beta, key_dim, out + j, 1);
}

/* All rows of a value head. */
DELTA void one_head(const Delta *d, int64_t head, const float *rows, float *state, float *out)
{
    const int64_t size = d->key_dim * d->value_dim, keys = d->key_heads * d->key_dim;
    const int64_t key_head = d->tiled ? head % d->key_heads : head / (d->value_heads / d->key_heads);
    const int is_bf16 = (int)d->is_bf16;
    const float decay = ((const float *)d->decay)[head], bias = ((const float *)d->bias)[head];
    memcpy(state, (const float *)d->state + head * size, (size_t)size * sizeof *state);
    for (int64_t row = 0; row <= d->n; row++) {
        for (int i = 0; i < 2; i++)
            if (d->saved[i] && d->saved_behind[i] == row)
                memcpy((float *)d->saved[i] + head * size, state, (size_t)size * sizeof *state);
        if (row == d->n)
            break;
        const float *at = rows + row * d->channels;
        const int64_t gates = row * 2 * d->value_heads + head;
        const float b = load_one((const void *)d->gates, gates, is_bf16);
        const float a = load_one((const void *)d->gates, gates + d->value_heads, is_bf16) + bias;
        const float beta = rounded_one(1.0f / (1.0f + expf(-b)), is_bf16);
        const float softplus = a > 20.0f ? a : log1pf(expf(a));
        one_row(state, at + key_head * d->key_dim, at + keys + key_head * d->key_dim, at + 2 * keys + head * d->value_dim,
                expf(decay * softplus), beta, d->key_dim, d->value_dim, out);
        const int64_t wanted = row - (d->n - d->wanted);
        for (int64_t j = 0; wanted >= 0 && j < d->value_dim; j++) {
            const int64_t place = (wanted * d->value_heads + head) * d->value_dim + j;
            if (is_bf16)
                ((uint16_t *)d->out)[place] = bfloat16_of(out[j]);
            else
                ((float *)d->out)[place] = out[j];
        }
    }
}

DELTA int all_rows(const Delta *d, float *rows)
{
    const int64_t sets = d->channels / LANES, units = 2 * d->key_heads;
    const float scale = 1.0f / sqrtf((float)d->key_dim);
    int failed = 0;
#pragma omp parallel num_threads(triforce_threads(d->threads)) reduction(| : failed)
    {
        float *state = aligned_alloc(64, (size_t)((d->key_dim + 1) * d->value_dim + 15) / 16 * 64);
        failed = !state;
#pragma omp for schedule(static)
        for (int64_t set = 0; set < sets; set++)
            for (int64_t row = 0; row < d->n; row++)
                vec_store(rows + row * d->channels + set * LANES, mixed(d, row, set * LANES));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < d->n * units; i++) {
            const int64_t row = i / units, head = i % units; /* queries, then keys */
            to_unit(rows + row * d->channels + head * d->key_dim, d->key_dim, head < d->key_heads ? scale : 1.0f);
        }
#pragma omp for schedule(static)
        for (int64_t head = 0; head < d->value_heads; head++)
            if (!failed)
                one_head(d, head, rows, state, state + d->key_dim * d->value_dim);
        free(state);
    }
    return failed;
}

int triforce_delta_steps(const Delta *d)
{
    if (triforce_cpu_level() < LEVEL_AVX2 || d->key_dim % LANES || d->value_dim % LANES)
        return 2;
    float *rows = aligned_alloc(64, (size_t)(d->n * d->channels + 15) / 16 * 64 + 64);
    const int failed = !rows || all_rows(d, rows);
    free(rows);
    return failed;
}
#else
int triforce_delta_steps(const Delta *d)
{
    (void)d;
    return 2;
}
#endif
