/* Expands matrices in few bits; kernels/quantised.py documents the formula. */

#include "cpu.h"
#include "quantised.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_AVX2
#endif

#define SMALL_WORK ((int64_t)1 << 16) /* numbers below which starting other threads takes longer than it saves */

/* Some numbers of a row of a matrix, and where the first of them goes. */
typedef struct {
    const Quantised *matrix;
    int64_t r, first, stop;
    const uint8_t *values; /* of the row */
    void *out;
} Part;

/* What a byte stands for in e4m3, which has no infinities. */
INLINE float float8_of(uint8_t byte)
{
    const uint32_t magnitude = byte & 127;
    const float small = (float)magnitude * 0x1p-9f; /* subnormal */
    uint32_t bits;
    memcpy(&bits, &small, 4);
    if (magnitude >= 8)
        bits = (magnitude << 20) + 0x3c000000;
    if (magnitude == 127)
        bits = 0x7fc00000;
    return float_of_bits(bits | (uint32_t)(byte & 128) << 24);
}

INLINE float value_of(const uint8_t *values, int kind, int64_t i)
{
    switch (kind) {
    case VALUES_NIBBLES: return (float)(values[i / 2] >> i % 2 * 4 & 15);
    case VALUES_UINT8: return (float)values[i];
    case VALUES_INT8: return (float)(int8_t)values[i];
    default: return float8_of(values[i]);
    }
}

INLINE void put(const Part *part, int is_bf16, int64_t i, float number)
{
    if (is_bf16)
        ((uint16_t *)part->out)[i - part->first] = bfloat16_of(number);
    else
        ((float *)part->out)[i - part->first] = number;
}

INLINE void expand_group(const Part *part, int kind, int is_bf16, int64_t first, int64_t stop, float scale, float zero)
{
    for (int64_t i = first; i < stop; i++)
        put(part, is_bf16, i, (value_of(part->values, kind, i) - zero) * scale);
}

INLINE void expand_groups(const Part *part, int kind, int is_bf16)
{
    const Quantised *matrix = part->matrix;
    const int64_t r = part->r, *group_of = (const int64_t *)matrix->group_of;
    if (group_of) {
        for (int64_t i = part->first; i < part->stop; i++) {
            const float scale = scale_of(matrix, r, group_of[i]), zero = zero_of(matrix, r, group_of[i]);
            put(part, is_bf16, i, (value_of(part->values, kind, i) - zero) * scale);
        }
        return;
    }
    const int64_t size = matrix->group_size;
    for (int64_t first = part->first, stop; first < part->stop; first = stop) {
        const int64_t group = first / size, end = (group + 1) * size;
        stop = end < part->stop ? end : part->stop;
        expand_group(part, kind, is_bf16, first, stop, scale_of(matrix, r, group), zero_of(matrix, r, group));
    }
}

INLINE void expand_any(const Part *part, int is_bf16)
{
    switch (part->matrix->kind) {
    case VALUES_NIBBLES: expand_groups(part, VALUES_NIBBLES, is_bf16); break;
    case VALUES_UINT8: expand_groups(part, VALUES_UINT8, is_bf16); break;
    case VALUES_INT8: expand_groups(part, VALUES_INT8, is_bf16); break;
    default: expand_groups(part, VALUES_FLOAT8, is_bf16);
    }
}

INLINE void expand_either(const Part *part, int is_bf16)
{
    if (is_bf16)
        expand_any(part, 1);
    else
        expand_any(part, 0);
}

static void expand_plain(const Part *part, int is_bf16) { expand_either(part, is_bf16); }

#ifdef HAS_AVX2
/* Four bits stand for one of sixteen numbers of a group, whose two bytes are looked up. */
__attribute__((target("avx2"))) static void expand_nibbles(const Part *part)
{
    const Quantised *matrix = part->matrix;
    const int64_t size = matrix->group_size;
    const __m128i nibble = _mm_set1_epi8(15);
    for (int64_t first = part->first, stop; first < part->stop; first = stop) {
        const int64_t group = first / size, end = (group + 1) * size;
        const float scale = scale_of(matrix, part->r, group), zero = zero_of(matrix, part->r, group);
        uint8_t low[16], high[16];
        stop = end < part->stop ? end : part->stop;
        for (int q = 0; q < 16; q++) {
            const uint16_t number = bfloat16_of(((float)q - zero) * scale);
            low[q] = (uint8_t)number;
            high[q] = (uint8_t)(number >> 8);
        }
        const __m128i lows = _mm_loadu_si128((const __m128i *)low), highs = _mm_loadu_si128((const __m128i *)high);
        uint16_t *out = (uint16_t *)part->out - part->first;
        for (int64_t i = first; i < stop; i += 32) {
            const __m128i both = _mm_loadu_si128((const __m128i *)(part->values + i / 2));
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

__attribute__((target("avx2"))) static void expand_avx2(const Part *part, int is_bf16)
{
    const Quantised *matrix = part->matrix;
    if (matrix->kind == VALUES_NIBBLES && is_bf16 && !matrix->group_of && matrix->group_size % 32 == 0)
        expand_nibbles(part);
    else
        expand_either(part, is_bf16);
}
#endif

void triforce_expand_part(const Quantised *matrix, int64_t r, int64_t first, int64_t count, void *out, int is_bf16, int level)
{
    const Part part = {matrix, r, first, first + count, row_of(matrix, r), out};
#ifdef HAS_AVX2
    if (is_bf16 && level >= LEVEL_AVX512BF16 && triforce_expand_bfloat16(matrix, r, 1, first, count, out, 0, 0))
        return;
#endif
    if (matrix->kind >= BLOCKS) {
        triforce_expand_blocks(matrix, r, first, count, out, is_bf16, level);
        return;
    }
#ifdef HAS_AVX2
    if (level >= LEVEL_AVX2) {
        expand_avx2(&part, is_bf16);
        return;
    }
#endif
    expand_plain(&part, is_bf16);
}

int triforce_expand(const Quantised *matrix, void *out, int is_bf16, int level, int threads)
{
    if (level > triforce_cpu_level())
        return 2;
    const int64_t inputs = matrix->inputs;
    const int parts = matrix->outputs * inputs < SMALL_WORK ? 1 : triforce_threads(threads);
    (void)parts;
#pragma omp parallel for num_threads(parts)
    for (int64_t r = 0; r < matrix->outputs; r++)
        triforce_expand_part(matrix, r, 0, inputs, (char *)out + r * inputs * (is_bf16 ? 2 : 4), is_bf16, level);
    return 0;
}
