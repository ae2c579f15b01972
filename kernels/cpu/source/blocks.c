/* Expands matrices in ggml's block formats; kernels/quantised.py documents the formula. Products and differences are rounded one
 * by one, never fused. */

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include "cpu.h"
#include "quantised.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2
#include "avx2.h"
#endif

#define INPUTS 256 /* the most a block has */
#define RUN 16     /* the fewest with one scale */

/* What one block or several hold: number i is `scales[i / run] * (values[i] - zero) - least[i / run]`; not all forms have
 * `least`. */
typedef struct {
    uint8_t values[INPUTS];
    float scales[INPUTS / RUN], least[INPUTS / RUN];
} Values;

INLINE int run_of(int form) { return form == BLOCKS_Q6_K ? 16 : 32; }

INLINE int value_of_zero(int form) { return form == BLOCKS_Q6_K ? 32 : form == BLOCKS_Q5_0 ? 16 : 0; }

INLINE int has_least(int form) { return form != BLOCKS_Q5_0 && form != BLOCKS_Q6_K; }

#define OF_EACH UINT64_C(0x0101010101010101) /* times a byte: that byte eight times */

INLINE uint64_t eight_at(const uint8_t *place)
{
    uint64_t eight;
    memcpy(&eight, place, 8);
    return eight;
}

INLINE void put_eight(uint8_t *place, uint64_t eight) { memcpy(place, &eight, 8); }

/* Reads the lower four bits of values: of each `run` bytes those of the lower ones first. */
INLINE void read_low(const uint8_t *held, int run, int inputs, uint8_t *values)
{
    for (int first = 0; first < inputs; first += 2 * run, held += run)
        for (int i = 0; i < run; i += 8) {
            put_eight(values + first + i, eight_at(held + i) & 15 * OF_EACH);
            put_eight(values + first + run + i, eight_at(held + i) >> 4 & 15 * OF_EACH);
        }
}

/* Adds to values what is above, `bits` of each: of each 32 bytes the lowest first. */
INLINE void read_high(const uint8_t *held, int bits, uint8_t *values)
{
    const uint64_t field = ((1 << bits) - 1) * OF_EACH;
    for (int first = 0; first < INPUTS; first += 32 * 8 / bits, held += 32)
        for (int part = 0; part < 8 / bits; part++)
            for (int i = 0; i < 32; i += 8) {
                uint8_t *place = values + first + part * 32 + i;
                put_eight(place, eight_at(place) | (eight_at(held + i) >> part * bits & field) << 4);
            }
}

/* Adds to 32 values their fifth bits, which are one after another: those of a byte to eight values at once. */
INLINE void read_bits(const uint8_t *held, uint8_t *values)
{
    for (int byte = 0; byte < 4; byte++) {
        const uint64_t bits = held[byte] * OF_EACH & UINT64_C(0x8040201008040201); /* a bit of each */
        const uint64_t fifth = ((bits + 127 * OF_EACH) & 128 * OF_EACH) >> 3;
        put_eight(values + byte * 8, eight_at(values + byte * 8) | fifth);
    }
}

/* The scales and least numbers of Q4_K and Q5_K, six bits of each times one for the block. */
INLINE void read_scales(const uint8_t *held, float *scales, float *least)
{
    const float of_all = float16_at(held), least_of_all = float16_at(held + 2);
    const uint8_t *of_scales = held + 4, *of_least = held + 8, *both = held + 12;
    for (int i = 0; i < 4; i++) {
        scales[i] = of_all * (float)(of_scales[i] & 63);
        least[i] = least_of_all * (float)(of_least[i] & 63);
        scales[4 + i] = of_all * (float)((both[i] & 15) | (of_scales[i] >> 2 & 48));
        least[4 + i] = least_of_all * (float)(both[i] >> 4 | (of_least[i] >> 2 & 48));
    }
}

INLINE void read_block(const uint8_t *held, int form, uint8_t *values, float *scales, float *least)
{
    switch (form) {
    case BLOCKS_Q4_1:
        read_low(held + 4, 16, 32, values);
        scales[0] = float16_at(held);
        least[0] = -float16_at(held + 2);
        break;
    case BLOCKS_Q5_0:
        read_low(held + 6, 16, 32, values);
        read_bits(held + 2, values);
        scales[0] = float16_at(held);
        break;
    case BLOCKS_Q5_1:
        read_low(held + 8, 16, 32, values);
        read_bits(held + 4, values);
        scales[0] = float16_at(held);
        least[0] = -float16_at(held + 2);
        break;
    case BLOCKS_Q4_K:
        read_low(held + 16, 32, 256, values);
        read_scales(held, scales, least);
        break;
    case BLOCKS_Q5_K:
        read_low(held + 48, 32, 256, values);
        read_high(held + 16, 1, values);
        read_scales(held, scales, least);
        break;
    default:
        read_low(held, 64, 256, values);
        read_high(held + 128, 2, values);
        for (int i = 0; i < 16; i++)
            scales[i] = float16_at(held + 208) * (float)(int8_t)held[192 + i];
    }
}

/* Expands as much as `Values` holds at a time. Each loop goes over all of it: a load that spans several fresh stores would
 * wait for them. */
INLINE void expand_form(const uint8_t *row, int form, int is_bf16, void *out, int64_t inputs)
{
    Values some;
    float unrounded[INPUTS];
    const int of_block = inputs_of_block(form), run = run_of(form);
    for (int64_t first = 0; first < inputs; first += INPUTS) {
        const int count = inputs - first < INPUTS ? (int)(inputs - first) : INPUTS;
        float *numbers = is_bf16 ? unrounded : (float *)out + first;
        for (int i = 0; i < count; i += of_block, row += bytes_of_block(form))
            read_block(row, form, some.values + i, some.scales + i / run, some.least + i / run);
        for (int part = 0; part < count / run; part++)
            for (int i = part * run; i < (part + 1) * run; i++) {
                const float number = some.scales[part] * (float)(some.values[i] - value_of_zero(form));
                numbers[i] = has_least(form) ? number - some.least[part] : number;
            }
        if (is_bf16)
            for (int i = 0; i < count; i++)
                ((uint16_t *)out)[first + i] = bfloat16_of(numbers[i]);
    }
}

INLINE void expand_any(const uint8_t *row, int form, int is_bf16, void *out, int64_t inputs)
{
    switch (form) {
    case BLOCKS_Q4_1: expand_form(row, BLOCKS_Q4_1, is_bf16, out, inputs); break;
    case BLOCKS_Q5_0: expand_form(row, BLOCKS_Q5_0, is_bf16, out, inputs); break;
    case BLOCKS_Q5_1: expand_form(row, BLOCKS_Q5_1, is_bf16, out, inputs); break;
    case BLOCKS_Q4_K: expand_form(row, BLOCKS_Q4_K, is_bf16, out, inputs); break;
    case BLOCKS_Q5_K: expand_form(row, BLOCKS_Q5_K, is_bf16, out, inputs); break;
    default: expand_form(row, BLOCKS_Q6_K, is_bf16, out, inputs);
    }
}

INLINE void expand_row(const uint8_t *row, int form, int is_bf16, void *out, int64_t inputs)
{
    if (is_bf16)
        expand_any(row, form, 1, out, inputs);
    else
        expand_any(row, form, 0, out, inputs);
}

static void expand_plain(const uint8_t *row, int form, int is_bf16, void *out, int64_t inputs)
{
    expand_row(row, form, is_bf16, out, inputs);
}

#ifdef HAS_AVX2
__attribute__((target("avx2"))) static void expand_avx2(const uint8_t *row, int form, int is_bf16, void *out, int64_t inputs)
{
    expand_row(row, form, is_bf16, out, inputs);
}
#endif

void triforce_expand_blocks(const Quantised *matrix, int64_t r, int64_t first, int64_t count, void *out, int is_bf16, int level)
{
    const int form = (int)matrix->kind - BLOCKS;
    const uint8_t *held = row_of(matrix, r) + first / inputs_of_block(form) * bytes_of_block(form);
#ifdef HAS_AVX2
    if (level >= LEVEL_AVX2) {
        expand_avx2(held, form, is_bf16, out, count);
        return;
    }
#endif
    (void)level;
    expand_plain(held, form, is_bf16, out, count);
}

#ifdef HAS_AVX2
/* The products of an output with `n` rows of `x`, `inputs` apart. */
VEC void multiply_form(const uint8_t *row, int form, int is_bf16, const float *x, int n, int64_t inputs, float *out,
                       int64_t out_stride)
{
    Values some;
    const int of_block = inputs_of_block(form), run = run_of(form);
    const __m256i zero = _mm256_set1_epi32(value_of_zero(form));
    __m256 sums[MOST_ROWS_OF_BLOCKS];
    for (int r = 0; r < n; r++)
        sums[r] = vec_zero();
    for (int64_t first = 0; first < inputs; first += INPUTS) {
        const int count = inputs - first < INPUTS ? (int)(inputs - first) : INPUTS;
        for (int i = 0; i < count; i += of_block, row += bytes_of_block(form))
            read_block(row, form, some.values + i, some.scales + i / run, some.least + i / run);
        for (int part = 0; part < count / run; part++) {
            const __m256 scale = vec_all(some.scales[part]), least = vec_all(has_least(form) ? some.least[part] : 0.0f);
            for (int i = part * run; i < (part + 1) * run; i += LANES) {
                __m256i values = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(some.values + i)));
                if (value_of_zero(form))
                    values = _mm256_sub_epi32(values, zero);
                __m256 numbers = vec_mul(scale, _mm256_cvtepi32_ps(values));
                if (has_least(form))
                    numbers = vec_sub(numbers, least);
                if (is_bf16)
                    numbers = vec_rounded(numbers);
                for (int r = 0; r < n; r++)
                    sums[r] = vec_fma(numbers, vec_load(x + r * inputs + first + i), sums[r]);
            }
        }
    }
    for (int r = 0; r < n; r++)
        out[r * out_stride] = vec_sum(sums[r]);
}

VEC void multiply_rows(const uint8_t *row, int form, int is_bf16, const float *x, int64_t n, int64_t inputs, float *out,
                       int64_t out_stride)
{
    switch (n) {
    case 1: multiply_form(row, form, is_bf16, x, 1, inputs, out, out_stride); break;
    case 2: multiply_form(row, form, is_bf16, x, 2, inputs, out, out_stride); break;
    case 3: multiply_form(row, form, is_bf16, x, 3, inputs, out, out_stride); break;
    default: multiply_form(row, form, is_bf16, x, 4, inputs, out, out_stride);
    }
}

#define FOR_FORM(NAME)                                                                                                     \
    __attribute__((target(AVX2_TARGET))) static void multiply_##NAME(                                                      \
        const uint8_t *row, int is_bf16, const float *x, int64_t n, int64_t inputs, float *out, int64_t out_stride)        \
    {                                                                                                                      \
        if (is_bf16)                                                                                                       \
            multiply_rows(row, BLOCKS_##NAME, 1, x, n, inputs, out, out_stride);                                           \
        else                                                                                                               \
            multiply_rows(row, BLOCKS_##NAME, 0, x, n, inputs, out, out_stride);                                           \
    }
FOR_FORM(Q4_1)
FOR_FORM(Q5_0)
FOR_FORM(Q5_1)
FOR_FORM(Q4_K)
FOR_FORM(Q5_K)
FOR_FORM(Q6_K)
#undef FOR_FORM

void triforce_multiply_blocks(const uint8_t *row, int form, const float *x, int64_t n, int64_t inputs, int is_bf16, float *out,
                              int64_t out_stride)
{
    switch (form) {
    case BLOCKS_Q4_1: multiply_Q4_1(row, is_bf16, x, n, inputs, out, out_stride); break;
    case BLOCKS_Q5_0: multiply_Q5_0(row, is_bf16, x, n, inputs, out, out_stride); break;
    case BLOCKS_Q5_1: multiply_Q5_1(row, is_bf16, x, n, inputs, out, out_stride); break;
    case BLOCKS_Q4_K: multiply_Q4_K(row, is_bf16, x, n, inputs, out, out_stride); break;
    case BLOCKS_Q5_K: multiply_Q5_K(row, is_bf16, x, n, inputs, out, out_stride); break;
    default: multiply_Q6_K(row, is_bf16, x, n, inputs, out, out_stride);
    }
}
#endif
