/* Attention with AVX2 and FMA on bfloat16, which is converted because there are no products of bfloat16. */

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx2,fma")

#include "../avx2.h"

typedef uint16_t element;

#include "multiply_add.h"

const AttentionKernels attention_avx2_bfloat16 = KERNELS;

#endif
