/* Attention with AVX2 and FMA on float32. */

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx2,fma")

#include "../avx2.h"

typedef float element;

#include "multiply_add.h"

const AttentionKernels attention_avx2_float32 = KERNELS;

#endif
