/* The numbers of matrices that are held in four or eight bits; kernels/quantised.py documents the formula. */

#include "cpu.h"
#include "quantised.h"

#include <math.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_AVX2
#endif

#define SMALL_WORK ((int64_t)1 << 16) /* numbers below which starting other threads takes longer than it saves */

/* A row of a matrix, and where its numbers go. */
typedef struct {
    const uint8_t *values;
    const float *scales, *zeros; /* of its groups */
    const int64_t *group_of;
    const float *float8; /* what each byte stands for */
    void *out;
    int64_t inputs, groups;
} Row;

INLINE float value_of(const Row *row, int kind, int64_t i)
{
    switch (kind) {
    case VALUES_NIBBLES: return (float)(row->values[i / 2] >> i % 2 * 4 & 15);
    case VALUES_UINT8: return (float)row->values[i];
    case VALUES_INT8: return (float)(int8_t)row->values[i];
    default: return row->float8[row->values[i]];
    }
}

INLINE void put(const Row *row, int is_bf16, int64_t i, float number)
{
    if (is_bf16)
        ((uint16_t *)row->out)[i] = bfloat16_of(number);
    else
        ((float *)row->out)[i] = number;
}

INLINE void expand_group(const Row *row, int kind, int is_bf16, int64_t first, int64_t stop, float scale, float zero)
{
    for (int64_t i = first; i < stop; i++)
        put(row, is_bf16, i, (value_of(row, kind, i) - zero) * scale);
}

INLINE void expand_row(const Row *row, int kind, int is_bf16)
{
    if (row->group_of) {
        for (int64_t i = 0; i < row->inputs; i++) {
            const int64_t group = row->group_of[i];
            put(row, is_bf16, i, (value_of(row, kind, i) - row->zeros[group]) * row->scales[group]);
        }
        return;
    }
    const int64_t size = row->inputs / row->groups;
    for (int64_t group = 0; group < row->groups; group++)
        expand_group(row, kind, is_bf16, group * size, (group + 1) * size, row->scales[group], row->zeros[group]);
}

INLINE void expand_any(const Row *row, int kind, int is_bf16)
{
    if (is_bf16)
        switch (kind) {
        case VALUES_NIBBLES: expand_row(row, VALUES_NIBBLES, 1); break;
        case VALUES_UINT8: expand_row(row, VALUES_UINT8, 1); break;
        case VALUES_INT8: expand_row(row, VALUES_INT8, 1); break;
        default: expand_row(row, VALUES_FLOAT8, 1);
        }
    else
        switch (kind) {
        case VALUES_NIBBLES: expand_row(row, VALUES_NIBBLES, 0); break;
        case VALUES_UINT8: expand_row(row, VALUES_UINT8, 0); break;
        case VALUES_INT8: expand_row(row, VALUES_INT8, 0); break;
        default: expand_row(row, VALUES_FLOAT8, 0);
        }
}

static void expand_plain(const Row *row, int kind, int is_bf16) { expand_any(row, kind, is_bf16); }

#ifdef HAS_AVX2
/* Four bits stand for one of sixteen numbers of a group, whose two bytes are looked up. */
__attribute__((target("avx2"))) static void expand_nibbles(const Row *row)
{
    const int64_t size = row->inputs / row->groups;
    const __m128i nibble = _mm_set1_epi8(15);
    for (int64_t group = 0; group < row->groups; group++) {
        uint8_t low[16], high[16];
        for (int q = 0; q < 16; q++) {
            const uint16_t number = bfloat16_of(((float)q - row->zeros[group]) * row->scales[group]);
            low[q] = (uint8_t)number;
            high[q] = (uint8_t)(number >> 8);
        }
        const __m128i lows = _mm_loadu_si128((const __m128i *)low), highs = _mm_loadu_si128((const __m128i *)high);
        const uint8_t *values = row->values + group * size / 2;
        uint16_t *out = (uint16_t *)row->out + group * size;
        for (int64_t i = 0; i < size; i += 32) {
            const __m128i both = _mm_loadu_si128((const __m128i *)(values + i / 2));
            const __m128i even = _mm_and_si128(both, nibble), odd = _mm_and_si128(_mm_srli_epi16(both, 4), nibble);
            const __m128i in_order[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
            for (int half = 0; half < 2; half++) {
                const __m128i l = _mm_shuffle_epi8(lows, in_order[half]), h = _mm_shuffle_epi8(highs, in_order[half]);
                __m128i *place = (__m128i *)(out + i + half * 16);
                _mm_storeu_si128(place, _mm_unpacklo_epi8(l, h));
                _mm_storeu_si128(place + 1, _mm_unpackhi_epi8(l, h));
            }
        }
    }
}

__attribute__((target("avx2"))) static void expand_avx2(const Row *row, int kind, int is_bf16)
{
    if (kind == VALUES_NIBBLES && is_bf16 && !row->group_of && row->inputs / row->groups % 32 == 0)
        expand_nibbles(row);
    else
        expand_any(row, kind, is_bf16);
}
#endif

static float float8_of(int byte) /* e4m3, without infinities */
{
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float magnitude = exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    return (byte & 127) == 127 ? NAN : byte & 128 ? -magnitude : magnitude;
}

void triforce_float8(float *numbers)
{
    for (int byte = 0; byte < 256; byte++)
        numbers[byte] = float8_of(byte);
}

void triforce_expand_grouped(const Grouped *matrix, int64_t r, void *out, int is_bf16, int level)
{
    const int64_t groups = matrix->groups, inputs = matrix->inputs;
    const int64_t row_bytes = matrix->kind == VALUES_NIBBLES ? inputs / 2 : inputs;
    const Row row = {matrix->values + r * row_bytes, matrix->scales + r * groups, matrix->zeros + r * groups,
                     matrix->group_of, matrix->float8, out, inputs, groups};
#ifdef HAS_AVX2
    if (level >= LEVEL_AVX2) {
        expand_avx2(&row, matrix->kind, is_bf16);
        return;
    }
#endif
    (void)level;
    expand_plain(&row, matrix->kind, is_bf16);
}

int triforce_expand(const void *values, int kind, const float *scales, const float *zeros, const int64_t *group_of,
                    void *out, int64_t rows, int64_t inputs, int64_t groups, int is_bf16, int level, int threads)
{
    if (level > triforce_cpu_level())
        return 2;
    float float8[256];
    if (kind == VALUES_FLOAT8)
        triforce_float8(float8);
    const Grouped matrix = {values, kind, scales, zeros, group_of, float8, inputs, groups};
    const int parts = rows * inputs < SMALL_WORK ? 1 : triforce_threads(threads);
    (void)parts;
#pragma omp parallel for num_threads(parts)
    for (int64_t r = 0; r < rows; r++)
        triforce_expand_grouped(&matrix, r, (char *)out + r * inputs * (is_bf16 ? 2 : 4), is_bf16, level);
    return 0;
}
