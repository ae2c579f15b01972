/* Eight float32 lanes (AVX2 and FMA), under the same names as sixteen (avx512.h): a file includes one of the two. */

#ifndef TRIFORCE_VEC
#define TRIFORCE_VEC

#include <immintrin.h>
#include <stdint.h>

#define AVX2_TARGET "avx2,fma"
#define VEC static inline __attribute__((always_inline, target(AVX2_TARGET)))

typedef __m256 vec;
enum { LANES = 8 };

VEC __m256 vec_zero(void) { return _mm256_setzero_ps(); }
VEC __m256 vec_load(const float *p) { return _mm256_loadu_ps(p); }
VEC void vec_store(float *p, __m256 x) { _mm256_storeu_ps(p, x); }
VEC __m256 vec_all(float x) { return _mm256_set1_ps(x); }
VEC __m256 vec_add(__m256 x, __m256 y) { return _mm256_add_ps(x, y); }
VEC __m256 vec_sub(__m256 x, __m256 y) { return _mm256_sub_ps(x, y); }
VEC __m256 vec_mul(__m256 x, __m256 y) { return _mm256_mul_ps(x, y); }
VEC __m256 vec_max(__m256 x, __m256 y) { return _mm256_max_ps(x, y); }
VEC __m256 vec_fma(__m256 x, __m256 y, __m256 z) { return _mm256_fmadd_ps(x, y, z); }

VEC float vec_sum(__m256 x)
{
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

VEC float vec_largest(__m256 x)
{
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

/* The nearest bfloat16, ties to even; what is no number stays none. */
VEC __m256 vec_rounded(__m256 x)
{
    const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256 rounded = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32((int)0xffff0000)));
    return _mm256_blendv_ps(rounded, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

VEC __m256 vec_first(__m256 words)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(words), 16));
}

VEC __m256 vec_second(__m256 words)
{
    return _mm256_and_ps(words, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000)));
}

VEC __m256 vec_within(__m256 x, float other, int start, int stop)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(start), lane);
    const __m256i ahead = _mm256_cmpgt_epi32(_mm256_set1_epi32(stop), lane);
    return _mm256_blendv_ps(_mm256_set1_ps(other), x, _mm256_castsi256_ps(_mm256_andnot_si256(before, ahead)));
}

VEC __m256 vec_exp2(__m256 x)
{
    const __m256 least = _mm256_set1_ps(-126.0f), normal = _mm256_cmp_ps(x, least, _CMP_NLT_UQ);
    x = _mm256_max_ps(least, x);
    const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 f = _mm256_sub_ps(x, n);
    __m256 y = _mm256_fmadd_ps(f, _mm256_set1_ps(0.001326472731307149f), _mm256_set1_ps(0.009671512991189957f));
    y = _mm256_fmadd_ps(f, y, _mm256_set1_ps(0.05550733581185341f));
    y = _mm256_fmadd_ps(f, y, _mm256_set1_ps(0.24022242426872253f));
    y = _mm256_fmadd_ps(f, y, _mm256_set1_ps(0.6931470036506653f));
    y = _mm256_fmadd_ps(f, y, _mm256_set1_ps(1.0f));
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_and_ps(normal, _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent)));
}

/* Eight rows of eight 32-bit words, transposed in place. */
VEC void vec_transpose(__m256 r[8])
{
    __m256 t[8];
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        const __m256 low = r[i], high = r[i + 4];
        r[i] = _mm256_permute2f128_ps(low, high, 0x20);
        r[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
}

/* The sums of eight runs of eight floats. */
VEC void vec_sums_of_eight(const float *p, float *sums)
{
    for (int run = 0; run < 8; run++) {
        sums[run] = 0.0f;
        for (int i = 0; i < 8; i++)
            sums[run] += p[8 * run + i];
    }
}

#endif
