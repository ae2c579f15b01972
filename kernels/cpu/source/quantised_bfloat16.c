/* Numbers of quantised matrices in bfloat16, 32 at a time, with AVX-512 BF16: where a value has four or five bits, the numbers
 * it may stand for are made once for all inputs with the same scale, and looked up. They are those of quantised.c and blocks.c,
 * but for numbers below 2^-126, which become zeros, as these processors' products take them for such, and for e4m3 with scales
 * from 2^120 on. */

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c")
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "cpu.h"
#include "quantised.h"

#include <immintrin.h>
#include <stddef.h>

#define AT_ONCE 32

INLINE __m512 counting(void)
{
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

INLINE __m512i rounded_pair(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

INLINE __m512i words_of(const uint8_t *place) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)place)); }

INLINE __m256i bytes_at(const uint8_t *place) { return _mm256_loadu_si256((const __m256i *)place); }

/* ---- groups ---- */

/* 32 values, two in a byte. A word's lowest five bits are what is looked up: as `table` has its 16 numbers twice, the fifth one,
 * which is another value's, does not matter. */
INLINE void put_nibbles(const uint8_t *values, __m512i table, uint16_t *out)
{
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)values));
    const __m512i words = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(words, table));
}

INLINE __m512 floats_of(const uint8_t *values, int kind)
{
    const __m128i bytes = _mm_loadu_si128((const __m128i *)values);
    return _mm512_cvtepi32_ps(kind == VALUES_INT8 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}

/* 32 numbers in e4m3, each times 2^-8, in float16, where they have the same bits of exponent and mantissa. */
INLINE __m512i float16_of_float8(const uint8_t *values)
{
    const __m512i bytes = words_of(values), magnitude = _mm512_set1_epi16(0x7f);
    const __m512i sign = _mm512_slli_epi16(_mm512_andnot_si512(magnitude, bytes), 8);
    const __m512i below = _mm512_and_si512(bytes, magnitude);
    const __mmask32 none = _mm512_cmpeq_epi16_mask(below, magnitude);
    return _mm512_mask_mov_epi16(_mm512_or_si512(sign, _mm512_slli_epi16(below, 7)), none, _mm512_set1_epi16(0x7e00));
}

/* Numbers of neighbours of a group; `zero` may be NULL. */
INLINE void put_group(const uint8_t *values, int kind, __m512 scale, const __m512 *zero, int count, uint16_t *out)
{
    if (kind == VALUES_NIBBLES) {
        const __m512 all = _mm512_mul_ps(zero ? _mm512_sub_ps(counting(), *zero) : counting(), scale);
        const __m512i table = rounded_pair(all, all);
#pragma GCC unroll 4
        for (int i = 0; i < count; i += AT_ONCE)
            put_nibbles(values + i / 2, table, out + i);
        return;
    }
    const __m512 scale_times_256 = _mm512_mul_ps(scale, _mm512_set1_ps(256.0f));
#pragma GCC unroll 4
    for (int i = 0; i < count; i += AT_ONCE) {
        __m512 low, high;
        if (kind == VALUES_FLOAT8) {
            const __m512i small = float16_of_float8(values + i);
            low = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(small)), scale_times_256);
            high = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(small, 1)), scale_times_256);
        } else {
            low = floats_of(values + i, kind), high = floats_of(values + i + 16, kind);
            low = _mm512_mul_ps(zero ? _mm512_sub_ps(low, *zero) : low, scale);
            high = _mm512_mul_ps(zero ? _mm512_sub_ps(high, *zero) : high, scale);
        }
        _mm512_storeu_si512(out + i, rounded_pair(low, high));
    }
}

/* Number `i` of `numbers`, in all lanes; `are` is one of NUMBERS_FLOAT32 to NUMBERS_INT16. */
INLINE __m512 number_at(int64_t numbers, int are, int64_t i)
{
    const void *place = (const void *)numbers;
    switch (are) {
    case NUMBERS_FLOAT32: return _mm512_set1_ps(((const float *)place)[i]);
    case NUMBERS_FLOAT16: return _mm512_cvtph_ps(_mm256_set1_epi16(((const int16_t *)place)[i]));
    case NUMBERS_BFLOAT16: return _mm512_castsi512_ps(_mm512_set1_epi32((int)((uint32_t)((const uint16_t *)place)[i] << 16)));
    case NUMBERS_UINT8: return _mm512_cvtepi32_ps(_mm512_set1_epi32(((const uint8_t *)place)[i]));
    case NUMBERS_INT8: return _mm512_cvtepi32_ps(_mm512_set1_epi32(((const int8_t *)place)[i]));
    default: return _mm512_cvtepi32_ps(_mm512_set1_epi32(((const int16_t *)place)[i]));
    }
}

#define NO_ZEROS -1 /* in the place of a kind of numbers: nothing is subtracted, or */
#define ONE_ZERO -2 /* the same everywhere */

/* Numbers of row `r`, `run` at a time, of which groups have multiples. */
INLINE void put_groups(const Quantised *matrix, int64_t r, int kind, int run, int scales_are, int zeros_are, int64_t first,
                       int64_t stop, uint16_t *out)
{
    const int64_t scales = matrix->scales, zeros = matrix->zeros;
    const uint32_t runs = (uint32_t)matrix->group_size / run, done = (uint32_t)first / run;
    int64_t group = r * matrix->groups + done / runs;
    uint32_t left = runs - done % runs;
    const uint8_t *values = row_of(matrix, r) + (kind == VALUES_NIBBLES ? first / 2 : first);
    __m512 zero = _mm512_set1_ps((float)matrix->zero);
    for (int64_t i = first; i < stop; i += run, out += run, values += kind == VALUES_NIBBLES ? run / 2 : run) {
        if (zeros_are >= 0)
            zero = number_at(zeros, zeros_are, group);
        put_group(values, kind, number_at(scales, scales_are, group), zeros_are == NO_ZEROS ? NULL : &zero, run, out);
        if (--left == 0) {
            left = runs;
            group++;
        }
    }
}

/* The same, compiled apart for what is usual: to ask for each group of what kind its scale is took a seventh of the time. */
INLINE void put_usual(const Quantised *matrix, int64_t r, int kind, int run, int64_t first, int64_t stop, uint16_t *out)
{
    const int scales = (int)matrix->scales_are, one = matrix->zero ? ONE_ZERO : NO_ZEROS;
    const int zeros = matrix->zeros ? (int)matrix->zeros_are : one;
    if (scales == NUMBERS_FLOAT16 && zeros == NUMBERS_UINT8 && kind <= VALUES_UINT8)
        put_groups(matrix, r, kind, run, NUMBERS_FLOAT16, NUMBERS_UINT8, first, stop, out);
    else if (scales == NUMBERS_FLOAT16 && zeros == ONE_ZERO && kind == VALUES_NIBBLES)
        put_groups(matrix, r, kind, run, NUMBERS_FLOAT16, ONE_ZERO, first, stop, out);
    else if (scales == NUMBERS_FLOAT16 && zeros == NO_ZEROS && kind == VALUES_INT8)
        put_groups(matrix, r, kind, run, NUMBERS_FLOAT16, NO_ZEROS, first, stop, out);
    else if (scales == NUMBERS_FLOAT32 && zeros == NO_ZEROS && kind == VALUES_FLOAT8)
        put_groups(matrix, r, kind, run, NUMBERS_FLOAT32, NO_ZEROS, first, stop, out);
    else
        put_groups(matrix, r, kind, run, scales, zeros, first, stop, out);
}

/* ---- blocks ---- */

/* The scales (lanes 0 to 7) and least numbers of a block of Q4_K or Q5_K. */
INLINE __m512 scales_and_least(const uint8_t *held)
{
    uint64_t low;
    uint32_t high;
    memcpy(&low, held + 4, 8);   /* of scales, of least numbers, the lower six bits of four each */
    memcpy(&high, held + 12, 4); /* the lower four bits of the other four of each */
    const uint64_t of_scales = (low & 0x3f3f3f3f) | (uint64_t)((high & 0x0f0f0f0f) | (low >> 2 & 0x30303030)) << 32;
    const uint64_t above = low >> 32;
    const uint64_t of_least = (above & 0x3f3f3f3f) | (uint64_t)((high >> 4 & 0x0f0f0f0f) | (above >> 2 & 0x30303030)) << 32;
    const __m512 whole = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_set_epi64x((int64_t)of_least, (int64_t)of_scales)));
    uint32_t both;
    memcpy(&both, held, 4);
    const __m128 of_all = _mm_cvtph_ps(_mm_cvtsi32_si128((int)both));
    const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return _mm512_mul_ps(whole, _mm512_permutexvar_ps(which, _mm512_castps128_ps512(of_all)));
}

/* `scale * numbers - least`, each step rounded. */
INLINE __m512 above_least(__m512 numbers, __m512 scale, __m512 least)
{
    return _mm512_sub_ps(_mm512_mul_ps(numbers, scale), least);
}

INLINE void put_q4_k(const uint8_t *held, uint16_t *out)
{
    float both[16] __attribute__((aligned(64)));
    _mm512_store_ps(both, scales_and_least(held));
    const __m512 values = counting();
    const __m512i upper = _mm512_set1_epi16(16);
    for (int part = 0; part < 8; part += 2) {
        const __m512 even = above_least(values, _mm512_set1_ps(both[part]), _mm512_set1_ps(both[8 + part]));
        const __m512 odd = above_least(values, _mm512_set1_ps(both[part + 1]), _mm512_set1_ps(both[9 + part]));
        const __m512i table = rounded_pair(odd, even), words = words_of(held + 16 + part * 16);
        _mm512_storeu_si512(out + part * 32, _mm512_permutexvar_epi16(_mm512_or_si512(words, upper), table));
        _mm512_storeu_si512(out + part * 32 + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table));
    }
}

/* 32 numbers of values that have five bits, in the lowest ones of words; `least` may be NULL. */
INLINE void put_fives(__m512i words, __m512 scale, int zero, const __m512 *least, uint16_t *out)
{
    const __m512 low = _mm512_sub_ps(counting(), _mm512_set1_ps((float)zero)), high = _mm512_add_ps(low, _mm512_set1_ps(16.0f));
    const __m512 a = least ? above_least(low, scale, *least) : _mm512_mul_ps(low, scale);
    const __m512 b = least ? above_least(high, scale, *least) : _mm512_mul_ps(high, scale);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(words, rounded_pair(a, b)));
}

INLINE void put_q5_k(const uint8_t *held, uint16_t *out)
{
    float both[16] __attribute__((aligned(64)));
    _mm512_store_ps(both, scales_and_least(held));
    const __m512i fifth = _mm512_slli_epi16(words_of(held + 16), 4), nibble = _mm512_set1_epi16(15), bit = _mm512_set1_epi16(16);
    for (int part = 0; part < 8; part++) {
        __m512i words = words_of(held + 48 + part / 2 * 32);
        words = part % 2 ? _mm512_srli_epi16(words, 4) : _mm512_and_si512(words, nibble);
        words = _mm512_or_si512(words, _mm512_and_si512(_mm512_srl_epi16(fifth, _mm_cvtsi32_si128(part)), bit));
        const __m512 least = _mm512_set1_ps(both[8 + part]);
        put_fives(words, _mm512_set1_ps(both[part]), 0, &least, out + part * 32);
    }
}

/* 32 numbers of values that have six bits, 16 with each scale. */
INLINE void put_sixes(__m256i values, const float *scales, uint16_t *out)
{
    const __m256i centred = _mm256_sub_epi8(values, _mm256_set1_epi8(32));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(centred)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(centred, 1)));
    const __m512 a = _mm512_mul_ps(low, _mm512_set1_ps(scales[0])), b = _mm512_mul_ps(high, _mm512_set1_ps(scales[1]));
    _mm512_storeu_si512(out, rounded_pair(a, b));
}

INLINE void put_q6_k(const uint8_t *held, uint16_t *out)
{
    float scales[16] __attribute__((aligned(64)));
    const __m512 whole = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(held + 192))));
    _mm512_store_ps(scales, _mm512_mul_ps(whole, _mm512_set1_ps(float16_at(held + 208))));
    const __m256i nibble = _mm256_set1_epi8(15), above = _mm256_set1_epi8(48);
    for (int half = 0; half < 2; half++, held += 64, out += 128) {
        const __m256i one = bytes_at(held), two = bytes_at(held + 32);
        const __m256i high = bytes_at(held - half * 32 + 128);
        const __m256i values[4] = {
            _mm256_or_si256(_mm256_and_si256(one, nibble), _mm256_and_si256(_mm256_slli_epi16(high, 4), above)),
            _mm256_or_si256(_mm256_and_si256(two, nibble), _mm256_and_si256(_mm256_slli_epi16(high, 2), above)),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(one, 4), nibble), _mm256_and_si256(high, above)),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(two, 4), nibble),
                            _mm256_and_si256(_mm256_srli_epi16(high, 2), above)),
        };
        for (int part = 0; part < 4; part++)
            put_sixes(values[part], scales + half * 8 + part * 2, out + part * 32);
    }
}

INLINE void put_block_of_32(const uint8_t *held, int form, uint16_t *out)
{
    const int start = form == BLOCKS_Q4_1 ? 4 : form == BLOCKS_Q5_0 ? 6 : 8;
    const __m256i both = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(held + start))); /* 16 apart */
    __m512i words = _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1);
    uint32_t pair, fifth;
    memcpy(&pair, held, 4);
    memcpy(&fifth, held + start - 4, 4);
    const __m128 both_of = _mm_cvtph_ps(_mm_cvtsi32_si128((int)pair));
    const __m512 scale = _mm512_broadcastss_ps(both_of), most = _mm512_broadcastss_ps(_mm_movehdup_ps(both_of));
    if (form == BLOCKS_Q4_1) { /* what is added is what others subtract */
        const __m512 all = _mm512_add_ps(_mm512_mul_ps(counting(), scale), most);
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(words, rounded_pair(all, all)));
        return;
    }
    words = _mm512_and_si512(words, _mm512_set1_epi16(15));
    words = _mm512_or_si512(words, _mm512_maskz_mov_epi16(fifth, _mm512_set1_epi16(16)));
    const __m512 least = _mm512_sub_ps(_mm512_set1_ps(-0.0f), most);
    put_fives(words, scale, form == BLOCKS_Q5_0 ? 16 : 0, form == BLOCKS_Q5_0 ? NULL : &least, out);
}

INLINE void put_blocks(const uint8_t *held, int form, int64_t count, uint16_t *out)
{
    const int inputs = inputs_of_block(form);
    for (int64_t i = 0; i < count; i += inputs, held += bytes_of_block(form), out += inputs)
        switch (form) {
        case BLOCKS_Q4_K: put_q4_k(held, out); break;
        case BLOCKS_Q5_K: put_q5_k(held, out); break;
        case BLOCKS_Q6_K: put_q6_k(held, out); break;
        default: put_block_of_32(held, form, out);
        }
}

INLINE void put_rows(const Quantised *matrix, int kind, int64_t r, int64_t rows, int64_t first, int64_t count, uint16_t *out,
                     int64_t stride)
{
    const int form = kind - BLOCKS, of_block = inputs_of_block(form);
    for (; rows > 0; rows--, r++, out += stride)
        if (kind >= BLOCKS)
            put_blocks(row_of(matrix, r) + first / of_block * bytes_of_block(form), form, count, out);
        else if (matrix->group_size % (4 * AT_ONCE) == 0 && count % (4 * AT_ONCE) == 0)
            put_usual(matrix, r, kind, 4 * AT_ONCE, first, first + count, out);
        else
            put_usual(matrix, r, kind, AT_ONCE, first, first + count, out);
}

int triforce_expand_bfloat16(const Quantised *matrix, int64_t r, int64_t rows, int64_t first, int64_t count, uint16_t *out,
                             int64_t stride)
{
    if (matrix->kind < BLOCKS && (matrix->group_of || matrix->group_size % AT_ONCE))
        return 0;
    switch (matrix->kind) {
    case VALUES_NIBBLES: put_rows(matrix, VALUES_NIBBLES, r, rows, first, count, out, stride); break;
    case VALUES_UINT8: put_rows(matrix, VALUES_UINT8, r, rows, first, count, out, stride); break;
    case VALUES_INT8: put_rows(matrix, VALUES_INT8, r, rows, first, count, out, stride); break;
    case VALUES_FLOAT8: put_rows(matrix, VALUES_FLOAT8, r, rows, first, count, out, stride); break;
    case BLOCKS + BLOCKS_Q4_1: put_rows(matrix, BLOCKS + BLOCKS_Q4_1, r, rows, first, count, out, stride); break;
    case BLOCKS + BLOCKS_Q5_0: put_rows(matrix, BLOCKS + BLOCKS_Q5_0, r, rows, first, count, out, stride); break;
    case BLOCKS + BLOCKS_Q5_1: put_rows(matrix, BLOCKS + BLOCKS_Q5_1, r, rows, first, count, out, stride); break;
    case BLOCKS + BLOCKS_Q4_K: put_rows(matrix, BLOCKS + BLOCKS_Q4_K, r, rows, first, count, out, stride); break;
    case BLOCKS + BLOCKS_Q5_K: put_rows(matrix, BLOCKS + BLOCKS_Q5_K, r, rows, first, count, out, stride); break;
    default: put_rows(matrix, BLOCKS + BLOCKS_Q6_K, r, rows, first, count, out, stride);
    }
    return 1;
}
#endif
