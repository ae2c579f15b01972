/* Expands quantised matrices to bfloat16, 32 numbers at a time, with AVX-512 BF16. If a value has four or five bits, the numbers
 * that it may encode are computed once for all inputs with the same scale, and then looked up. The numbers are those of
 * quantised.c and blocks.c, with two exceptions: numbers below 2^-126 become zeros, as products treat them on these processors;
 * and e4m3 with scales from 2^120 on. */

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

/* Has an array written, and read again: compilers would rather take numbers apart by permutations, of which there are too many
 * already. */
#define IN_MEMORY(array) __asm__ volatile("" : "+m"(array))

INLINE __m512 counting(void)
{
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

INLINE __m512i rounded_pair(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

INLINE __mmask16 first_of_16(uint32_t count) { return (__mmask16)((1u << count) - 1); }

INLINE __m512i words_of(const uint8_t *place) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)place)); }

INLINE __m256i bytes_at(const uint8_t *place) { return _mm256_loadu_si256((const __m256i *)place); }

/* ---- groups ---- */

/* Prefetches number `i` of `numbers`; `are` is one of NUMBERS_FLOAT32 to NUMBERS_INT16. */
INLINE void fetch_number(int64_t numbers, int64_t are, int64_t i)
{
    const int size = are == NUMBERS_FLOAT32 ? 4 : are == NUMBERS_UINT8 || are == NUMBERS_INT8 ? 1 : 2;
    __builtin_prefetch((const char *)numbers + i * size, 0, 2);
}

/* Numbers from `first` on, up to 16, in float32. */
INLINE __m512 numbers_at(int64_t numbers, int64_t are, int64_t first, __mmask16 some)
{
    const char *place = (const char *)numbers;
    const __m128i bytes = _mm_maskz_loadu_epi8(are == NUMBERS_UINT8 || are == NUMBERS_INT8 ? some : 0, place + first);
    switch (are) {
    case NUMBERS_FLOAT32: return _mm512_maskz_loadu_ps(some, place + first * 4);
    case NUMBERS_FLOAT16: return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, place + first * 2));
    case NUMBERS_BFLOAT16:
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, place + first * 2)), 16));
    case NUMBERS_UINT8: return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
    case NUMBERS_INT8: return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    default: return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(some, place + first * 2)));
    }
}

/* 32 values, two in a byte: the second half of the table's numbers is looked up for `upper`. */
INLINE void put_nibbles(const uint8_t *values, __m512i table, int upper, uint16_t *out)
{
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)values));
    const __m512i others = _mm512_slli_epi32(bytes, 12);
    const __m512i words = upper ? _mm512_ternarylogic_epi32(bytes, others, _mm512_set1_epi16(16), 0xfe)  /* a | b | c */
                                : _mm512_ternarylogic_epi32(bytes, others, _mm512_set1_epi16(15), 0xa8); /* (a | b) & c */
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

/* 32 numbers of a byte each, less `zero` where `has_zero`; a scale of e4m3 is 256 times as large, and a zero a 256th. */
INLINE void put_bytes(const uint8_t *values, int kind, float scale, int has_zero, float zero, uint16_t *out)
{
    __m512 low, high;
    if (kind == VALUES_FLOAT8) {
        const __m512i small = float16_of_float8(values);
        low = _mm512_cvtph_ps(_mm512_castsi512_si256(small)), high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(small, 1));
    } else
        low = floats_of(values, kind), high = floats_of(values + 16, kind);
    if (has_zero)
        low = _mm512_sub_ps(low, _mm512_set1_ps(zero)), high = _mm512_sub_ps(high, _mm512_set1_ps(zero));
    const __m512 factor = _mm512_set1_ps(scale);
    _mm512_storeu_si512(out, rounded_pair(_mm512_mul_ps(low, factor), _mm512_mul_ps(high, factor)));
}

/* The 16 numbers that four bits stand for. */
INLINE __m512 all_of(float scale, int has_zero, float zero)
{
    const __m512 values = has_zero ? _mm512_sub_ps(counting(), _mm512_set1_ps(zero)) : counting();
    return _mm512_mul_ps(values, _mm512_set1_ps(scale));
}

#define PART 256    /* inputs of a row that are made at a time */
#define TOGETHER 16 /* parts whose scales are made first: what is written and read again at once makes the processor wait */

/* The same part of rows, or parts of a row, one behind another. */
typedef struct {
    const Quantised *matrix;
    int64_t r, first, inputs, count; /* the first one's row, its first input and how many it has; how many parts there are */
    int64_t rows_apart, inputs_apart;
    uint16_t *out;
    int64_t out_apart;
    int64_t ahead; /* bytes from a part to what is prefetched while it is made; 0: nothing is */
} Parts;

INLINE const uint8_t *row_of_part(const Parts *parts, int64_t i)
{
    return row_of(parts->matrix, parts->r + i * parts->rows_apart);
}

/* Prefetches what lies ahead of a part of so many bytes. */
INLINE void fetch_ahead(const Parts *parts, const uint8_t *part, int64_t bytes)
{
    for (int64_t i = 0; parts->ahead && i < bytes; i += 64)
        __builtin_prefetch(part + parts->ahead + i, 0, 2);
}

/* `run` numbers with the same scale, a multiple of 32. */
INLINE void put_run(const uint8_t *values, int kind, int run, __m512i table, int upper, float scale, int has_zero, float zero,
                    uint16_t *out)
{
#pragma GCC unroll 4
    for (int i = 0; i < run; i += AT_ONCE)
        if (kind == VALUES_NIBBLES)
            put_nibbles(values + i / 2, table, upper, out + i);
        else
            put_bytes(values + i, kind, scale, has_zero, zero, out + i);
}

/* Numbers of parts whose groups have multiples of `run` inputs, and begin at the same places of each part. */
INLINE void put_groups(const Parts *parts, int kind, int run, int has_zero)
{
    float scales[TOGETHER][16] __attribute__((aligned(64))), zeros[TOGETHER][16] __attribute__((aligned(64)));
    int32_t group_of_run[16] __attribute__((aligned(64))) = {0};
    const Quantised *matrix = parts->matrix;
    const uint32_t size = (uint32_t)matrix->group_size;
    const int64_t bytes = kind == VALUES_NIBBLES ? run / 2 : run;
    uint32_t groups = 1, left = size - (uint32_t)parts->first % size;
    for (int64_t i = 0; i < parts->inputs; i += run, left -= run) {
        if (left == 0) {
            left = size;
            groups++;
        }
        group_of_run[i / run] = (int32_t)groups - 1;
    }
    const __mmask16 some = first_of_16(groups);
    const __m512i which = _mm512_load_si512(group_of_run);
    /* In groups; where they are long, a line of scales lasts. */
    const int64_t ahead = run == AT_ONCE && parts->ahead ? parts->ahead * matrix->groups / matrix->row_bytes : 0;
    for (int64_t o = 0; o < parts->count; o++) {
        const int64_t first = (uint32_t)(parts->first + o * parts->inputs_apart) / size;
        const int64_t group = (parts->r + o * parts->rows_apart) * matrix->groups + first;
        const __m512 scale = _mm512_permutexvar_ps(which, numbers_at(matrix->scales, matrix->scales_are, group, some));
        _mm512_store_ps(scales[o], kind == VALUES_FLOAT8 ? _mm512_mul_ps(scale, _mm512_set1_ps(256.0f)) : scale);
        if (ahead)
            fetch_number(matrix->scales, matrix->scales_are, group + ahead);
        if (ahead && matrix->zeros)
            fetch_number(matrix->zeros, matrix->zeros_are, group + ahead);
        if (has_zero) {
            const __m512 one = _mm512_set1_ps((float)matrix->zero);
            const __m512 zero = matrix->zeros ? numbers_at(matrix->zeros, matrix->zeros_are, group, some) : one;
            const __m512 unit = _mm512_set1_ps(kind == VALUES_FLOAT8 ? 0x1p-8f : 1.0f);
            _mm512_store_ps(zeros[o], _mm512_mul_ps(_mm512_permutexvar_ps(which, zero), unit));
        }
    }
    IN_MEMORY(scales);
    if (has_zero)
        IN_MEMORY(zeros);
    for (int64_t o = 0; o < parts->count; o++) {
        const uint8_t *values = row_of_part(parts, o) + (parts->first + o * parts->inputs_apart) / run * bytes;
        fetch_ahead(parts, values, parts->inputs / run * bytes);
        const float *scale = scales[o], *zero = has_zero ? zeros[o] : scales[o];
        uint16_t *out = parts->out + o * parts->out_apart;
        for (int64_t i = 0; i < parts->inputs; i += 2 * run, values += 2 * bytes, scale += 2, zero += 2) {
            __m512i table = _mm512_setzero_si512();
            if (kind == VALUES_NIBBLES)
                table = rounded_pair(all_of(scale[0], has_zero, zero[0]), all_of(scale[1], has_zero, zero[1]));
            put_run(values, kind, run, table, 0, scale[0], has_zero, zero[0], out + i);
            if (i + run < parts->inputs)
                put_run(values + bytes, kind, run, table, 1, scale[1], has_zero, zero[1], out + i + run);
        }
    }
}

/* ---- blocks ---- */

/* The scales (lanes 0 to 7) and least numbers of a block of Q4_K or Q5_K. The first four of each have six bits in a byte; of the
 * others the lower four bits are in half a byte, the upper two above those of one of the first. */
INLINE __m512 scales_and_least(const uint8_t *held)
{
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)held));
    const __m512i which = _mm512_setr_epi32(0x0404, 0x0505, 0x0606, 0x0707, 0x040c, 0x050d, 0x060e, 0x070f, 0x0808, 0x0909, 0x0a0a,
                                            0x0b0b, 0x080c, 0x090d, 0x0a0e, 0x0b0f);
    const __m512i both = _mm512_shuffle_epi8(bytes, which), upper = _mm512_srli_epi32(both, 10);
    const __m512i half = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4);
    const __m512i of_lower = _mm512_setr_epi32(63, 63, 63, 63, 15, 15, 15, 15, 63, 63, 63, 63, 15, 15, 15, 15);
    const __m512i of_upper = _mm512_setr_epi32(0, 0, 0, 0, 48, 48, 48, 48, 0, 0, 0, 0, 48, 48, 48, 48);
    const __m512i lower = _mm512_and_si512(_mm512_srlv_epi32(both, half), of_lower);
    const __m512 whole = _mm512_cvtepi32_ps(_mm512_ternarylogic_epi32(lower, upper, of_upper, 0xf8)); /* a | b & c */
    const __m128 of_all = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)held));
    const __m512i each = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return _mm512_mul_ps(whole, _mm512_permutexvar_ps(each, _mm512_castps128_ps512(of_all)));
}

/* `numbers * scale - least`: the product is exact, as numbers have five bits and scales 17, so it is rounded once as it is in
 * two steps. */
INLINE __m512 above_least(__m512 numbers, __m512 scale, __m512 least) { return _mm512_fmsub_ps(numbers, scale, least); }

INLINE void put_q4_k(const uint8_t *held, const float *both, uint16_t *out)
{
    const __m512 values = counting();
    const __m512i upper = _mm512_set1_epi16(16);
#pragma GCC unroll 4
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

INLINE void put_q5_k(const uint8_t *held, const float *both, uint16_t *out)
{
    const __m512i fifth = _mm512_slli_epi16(words_of(held + 16), 4), nibble = _mm512_set1_epi16(15), bit = _mm512_set1_epi16(16);
    for (int part = 0; part < 8; part++) {
        __m512i words = words_of(held + 48 + part / 2 * 32);
        words = part % 2 ? _mm512_srli_epi16(words, 4) : _mm512_and_si512(words, nibble);
        words = _mm512_or_si512(words, _mm512_and_si512(_mm512_srl_epi16(fifth, _mm_cvtsi32_si128(part)), bit));
        const __m512 least = _mm512_set1_ps(both[8 + part]);
        put_fives(words, _mm512_set1_ps(both[part]), 0, &least, out + part * 32);
    }
}

INLINE __m512 scales_of_q6_k(const uint8_t *held)
{
    uint16_t bits;
    memcpy(&bits, held + 208, 2);
    const __m512 whole = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(held + 192))));
    return _mm512_mul_ps(whole, _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))));
}

/* Values of a block of Q6_K, less 32, in a byte each: 128 bytes hold the lower four bits, 64 the upper two, in halves of 128
 * values each. */
INLINE void put_sixes(const uint8_t *held, uint8_t *values)
{
    const __m512i nibble = _mm512_set1_epi8(15), above = _mm512_set1_epi8(48), half_of_all = _mm512_set1_epi8(32);
    const __m512i left = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1);
    const __m512i right = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    for (int half = 0; half < 2; half++, held += 64, values += 128) {
        const __m512i both = _mm512_loadu_si512(held);
        const __m512i high = _mm512_broadcast_i64x4(bytes_at(held - half * 32 + 128));
        const __m512i low = _mm512_and_si512(both, nibble), later = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
        const __m512i one = _mm512_ternarylogic_epi32(low, _mm512_sllv_epi16(high, left), above, 0xf8); /* a | b & c */
        const __m512i two = _mm512_ternarylogic_epi32(later, _mm512_srlv_epi16(high, right), above, 0xf8);
        _mm512_store_si512(values, _mm512_sub_epi8(one, half_of_all));
        _mm512_store_si512(values + 64, _mm512_sub_epi8(two, half_of_all));
    }
}

/* `values` are those of put_sixes. */
INLINE void put_q6_k(const uint8_t *values, const float *scales, uint16_t *out)
{
#pragma GCC unroll 8
    for (int i = 0; i < 256; i += AT_ONCE) {
        const __m512 low = _mm512_mul_ps(floats_of(values + i, VALUES_INT8), _mm512_set1_ps(scales[i / 16]));
        const __m512 high = _mm512_mul_ps(floats_of(values + i + 16, VALUES_INT8), _mm512_set1_ps(scales[i / 16 + 1]));
        _mm512_storeu_si512(out + i, rounded_pair(low, high));
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

/* Numbers of parts, each of which is a block of Q4_K, Q5_K or Q6_K. */
INLINE void put_large_blocks(const Parts *parts, int form)
{
    float scales[TOGETHER][16] __attribute__((aligned(64)));
    uint8_t values[TOGETHER][PART] __attribute__((aligned(64)));
    const uint8_t *held[TOGETHER];
    for (int64_t o = 0; o < parts->count; o++) {
        held[o] = row_of_part(parts, o) + (parts->first + o * parts->inputs_apart) / PART * bytes_of_block(form);
        _mm512_store_ps(scales[o], form == BLOCKS_Q6_K ? scales_of_q6_k(held[o]) : scales_and_least(held[o]));
        if (form == BLOCKS_Q6_K)
            put_sixes(held[o], values[o]);
    }
    if (form == BLOCKS_Q6_K)
        IN_MEMORY(values);
    IN_MEMORY(scales);
    for (int64_t o = 0; o < parts->count; o++) {
        fetch_ahead(parts, held[o], bytes_of_block(form));
        switch (form) {
        case BLOCKS_Q4_K: put_q4_k(held[o], scales[o], parts->out + o * parts->out_apart); break;
        case BLOCKS_Q5_K: put_q5_k(held[o], scales[o], parts->out + o * parts->out_apart); break;
        default: put_q6_k(values[o], scales[o], parts->out + o * parts->out_apart);
        }
    }
}

/* Numbers of parts that consist of blocks of 32. */
INLINE void put_small_blocks(const Parts *parts, int form)
{
    for (int64_t o = 0; o < parts->count; o++) {
        const uint8_t *held = row_of_part(parts, o) + (parts->first + o * parts->inputs_apart) / 32 * bytes_of_block(form);
        fetch_ahead(parts, held, parts->inputs / 32 * bytes_of_block(form));
        for (int64_t i = 0; i < parts->inputs; i += 32, held += bytes_of_block(form))
            put_block_of_32(held, form, parts->out + o * parts->out_apart + i);
    }
}

INLINE void put_parts(const Parts *parts, int kind)
{
    const Quantised *matrix = parts->matrix;
    const int is_wide = matrix->group_size % 128 == 0 && parts->inputs % 128 == 0, has_zero = matrix->zeros || matrix->zero;
    if (kind >= BLOCKS && inputs_of_block(kind - BLOCKS) == PART)
        put_large_blocks(parts, kind - BLOCKS);
    else if (kind >= BLOCKS)
        put_small_blocks(parts, kind - BLOCKS);
    else if (is_wide && has_zero)
        put_groups(parts, kind, 128, 1);
    else if (is_wide)
        put_groups(parts, kind, 128, 0);
    else if (has_zero)
        put_groups(parts, kind, 32, 1);
    else
        put_groups(parts, kind, 32, 0);
}

INLINE void put_rows(const Quantised *matrix, int kind, int64_t r, int64_t rows, int64_t first, int64_t count, uint16_t *out,
                     int64_t stride, int64_t ahead)
{
    const int is_alike = kind >= BLOCKS || PART % matrix->group_size == 0 || matrix->group_size % PART == 0;
    if (rows == 1 && is_alike) /* whole parts of a row together */
        for (int64_t whole; (whole = smaller(count / PART, TOGETHER)) > 0; first += whole * PART, count -= whole * PART) {
            const Parts parts = {matrix, r, first, PART, whole, 0, PART, out, PART, ahead};
            put_parts(&parts, kind);
            out += whole * PART;
        }
    for (int64_t i = 0; i < count; i += PART)
        for (int64_t o = 0; o < rows; o += TOGETHER) {
            const int64_t inputs = smaller(count - i, PART), some = smaller(rows - o, TOGETHER);
            const Parts parts = {matrix, r + o, first + i, inputs, some, 1, 0, out + o * stride + i, stride, ahead};
            put_parts(&parts, kind);
        }
}

int triforce_expand_bfloat16(const Quantised *matrix, int64_t r, int64_t rows, int64_t first, int64_t count, uint16_t *out,
                             int64_t stride, int64_t ahead)
{
    if (matrix->kind < BLOCKS && (matrix->group_of || matrix->group_size % AT_ONCE))
        return 0;
    switch (matrix->kind) {
    case VALUES_NIBBLES: put_rows(matrix, VALUES_NIBBLES, r, rows, first, count, out, stride, ahead); break;
    case VALUES_UINT8: put_rows(matrix, VALUES_UINT8, r, rows, first, count, out, stride, ahead); break;
    case VALUES_INT8: put_rows(matrix, VALUES_INT8, r, rows, first, count, out, stride, ahead); break;
    case VALUES_FLOAT8: put_rows(matrix, VALUES_FLOAT8, r, rows, first, count, out, stride, ahead); break;
    case BLOCKS + BLOCKS_Q4_1: put_rows(matrix, BLOCKS + BLOCKS_Q4_1, r, rows, first, count, out, stride, ahead); break;
    case BLOCKS + BLOCKS_Q5_0: put_rows(matrix, BLOCKS + BLOCKS_Q5_0, r, rows, first, count, out, stride, ahead); break;
    case BLOCKS + BLOCKS_Q5_1: put_rows(matrix, BLOCKS + BLOCKS_Q5_1, r, rows, first, count, out, stride, ahead); break;
    case BLOCKS + BLOCKS_Q4_K: put_rows(matrix, BLOCKS + BLOCKS_Q4_K, r, rows, first, count, out, stride, ahead); break;
    case BLOCKS + BLOCKS_Q5_K: put_rows(matrix, BLOCKS + BLOCKS_Q5_K, r, rows, first, count, out, stride, ahead); break;
    default: put_rows(matrix, BLOCKS + BLOCKS_Q6_K, r, rows, first, count, out, stride, ahead);
    }
    return 1;
}
#endif
