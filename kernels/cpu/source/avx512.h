/* Sixteen float32 lanes (AVX-512), under the same names as eight (avx2.h): a file includes one of the two. */

#ifndef TRIFORCE_VEC
#define TRIFORCE_VEC

#include <immintrin.h>
#include <stdint.h>

#define AVX512_TARGET "avx512f,avx512bw,avx512vl,avx512dq,fma,avx2"
#define VEC static inline __attribute__((always_inline, target(AVX512_TARGET)))

typedef __m512 vec;
enum { LANES = 16 };

VEC __m512 vec_zero(void) { return _mm512_setzero_ps(); }
VEC __m512 vec_load(const float *p) { return _mm512_loadu_ps(p); }
VEC void vec_store(float *p, __m512 x) { _mm512_storeu_ps(p, x); }
VEC __m512 vec_all(float x) { return _mm512_set1_ps(x); }
VEC __m512 vec_add(__m512 x, __m512 y) { return _mm512_add_ps(x, y); }
VEC __m512 vec_sub(__m512 x, __m512 y) { return _mm512_sub_ps(x, y); }
VEC __m512 vec_mul(__m512 x, __m512 y) { return _mm512_mul_ps(x, y); }
/* `y` where one of them is NaN. */
VEC __m512 vec_max(__m512 x, __m512 y) { return _mm512_max_ps(x, y); }
VEC __m512 vec_fma(__m512 x, __m512 y, __m512 z) { return _mm512_fmadd_ps(x, y, z); }
VEC float vec_sum(__m512 x) { return _mm512_reduce_add_ps(x); }
VEC float vec_largest(__m512 x) { return _mm512_reduce_max_ps(x); }

/* Pairs of bfloat16 by 32-bit word: the first of each, the second of each. */
VEC __m512 vec_first(__m512 words)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(words), 16));
}
VEC __m512 vec_second(__m512 words)
{
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(words), _mm512_set1_epi32((int)0xffff0000)));
}

/* `x` in lanes `start` to before `stop`, `other` elsewhere. */
VEC __m512 vec_within(__m512 x, float other, int start, int stop)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 inside =
        _mm512_cmp_epi32_mask(lane, _mm512_set1_epi32(start), _MM_CMPINT_NLT) & _mm512_cmp_epi32_mask(lane, _mm512_set1_epi32(stop), _MM_CMPINT_LT);
    return _mm512_mask_blend_ps(inside, _mm512_set1_ps(other), x);
}

/* 2^x for x up to 127, with a relative error of 2e-7; 0 far below, NaN for NaN. The polynomial is the minimax one of 2^f on
 * [-1/2, 1/2] that is exactly 1 at 0. */
VEC __m512 vec_exp2(__m512 x)
{
    x = _mm512_max_ps(_mm512_set1_ps(-300.0f), x); /* the second of the two if one is NaN */
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, n);
    __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(0.001326472731307149f), _mm512_set1_ps(0.009671512991189957f));
    y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(0.05550733581185341f));
    y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(0.24022242426872253f));
    y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(0.6931470036506653f));
    y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

/* Sixteen rows of sixteen 32-bit words, transposed in place. */
VEC void vec_transpose(__m512 r[16])
{
    __m512 t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
        const __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
        r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* The sums of eight runs of eight floats. */
VEC void vec_sums_of_eight(const float *p, float *sums)
{
    const __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16);
    const __m512 c = _mm512_loadu_ps(p + 32), d = _mm512_loadu_ps(p + 48);
    const __m512 ac = _mm512_add_ps(_mm512_unpacklo_ps(a, c), _mm512_unpackhi_ps(a, c));
    const __m512 bd = _mm512_add_ps(_mm512_unpacklo_ps(b, d), _mm512_unpackhi_ps(b, d));
    const __m512 all = _mm512_add_ps(_mm512_unpacklo_ps(ac, bd), _mm512_unpackhi_ps(ac, bd));
    /* Each 128-bit lane now has the sums of four of a, b, c and d. */
    const __m512 paired = _mm512_add_ps(all, _mm512_shuffle_f32x4(all, all, 0xb1));
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm256_storeu_ps(sums, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, paired)));
}

#endif
