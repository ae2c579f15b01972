/* Attention with AVX-512 on bfloat16, which is converted because there are no products of bfloat16. */

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2")

#include "../avx512.h"

typedef uint16_t element;

#include "multiply_add.h"

const AttentionKernels attention_avx512_bfloat16 = KERNELS;

#endif
