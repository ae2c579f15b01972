/* Sums the attention that chunks of keys received, by which a retrieval cache chooses (offload/caches/full.py). */

#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include "avx2.h"

#include <float.h>
#include <math.h>

#define SOME 512 /* chunks whose sums are held at a time */

/* NaN is 0, and infinities are the largest numbers. */
INLINE float finite_of(float x) { return x != x ? 0.0f : x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x; }

/* `sums[c] += factor * shares[c]`, or with `begins` what is added alone. */
__attribute__((target(AVX2_TARGET))) static void add(const float *shares, float factor, int begins, int64_t count, float *sums)
{
    if (begins)
        for (int64_t c = 0; c < count; c++)
            sums[c] = factor * shares[c];
    else
        for (int64_t c = 0; c < count; c++)
            sums[c] += factor * shares[c];
}

__attribute__((target(AVX2_TARGET))) static void scale(float *mean, float factor, int64_t count)
{
    for (int64_t c = 0; c < count; c++)
        mean[c] *= factor;
}

__attribute__((target(AVX2_TARGET))) static void put(const float *sums, float share, float weight, int64_t count, float *mean)
{
    for (int64_t c = 0; c < count; c++)
        mean[c] += weight * finite_of(sums[c] * share);
}

int triforce_add_mass(
    float *mean, int64_t max_chunks, int64_t num_kv_heads, int64_t group, int64_t rows, const MassPart *parts, int64_t count,
    const float *lse, int64_t lse_head, int64_t lse_row, int64_t kept, double weight)
{
    if (triforce_cpu_level() < LEVEL_AVX2)
        return 2;
    kept = smaller(kept, max_chunks);
    const float share = 1.0f / (float)(group * rows);
    float sums[SOME];
    for (int64_t head = 0; head < num_kv_heads; head++, mean += max_chunks) {
        if (kept > 0)
            scale(mean, (float)(1.0 - weight), kept);
        memset(mean + kept, 0, (size_t)(max_chunks - kept) * sizeof(float));
        for (int64_t i = 0; i < count; i++) {
            const MassPart *part = parts + i;
            const int64_t chunks = smaller(part->chunks, max_chunks - part->first);
            for (int64_t from = 0; from < chunks; from += SOME) {
                const int64_t some = smaller(SOME, chunks - from);
                for (int64_t g = 0; g < group; g++)
                    for (int64_t r = 0; r < rows; r++) {
                        const int64_t at = head * group + g;
                        const float *shares = (const float *)part->shares + at * part->head + r * part->row + from;
                        float factor = 1.0f;
                        if (count > 1) /* shares of a part are of the keys so far */
                            factor = expf(((const float *)part->lse)[at * part->lse_head + r * part->lse_row] -
                                          lse[at * lse_head + r * lse_row]);
                        add(shares, factor, g == 0 && r == 0, some, sums);
                    }
                put(sums, share, (float)weight, some, mean + part->first + from);
            }
        }
    }
    return 0;
}

#else

int triforce_add_mass(
    float *mean, int64_t max_chunks, int64_t num_kv_heads, int64_t group, int64_t rows, const MassPart *parts, int64_t count,
    const float *lse, int64_t lse_head, int64_t lse_row, int64_t kept, double weight)
{
    (void)mean, (void)max_chunks, (void)num_kv_heads, (void)group, (void)rows, (void)parts, (void)count, (void)lse;
    (void)lse_head, (void)lse_row, (void)kept, (void)weight;
    return 2;
}
#endif
