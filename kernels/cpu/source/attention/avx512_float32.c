/* Attention with AVX-512 on float32. */

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2")

#include "../avx512.h"

typedef float element;

#include "multiply_add.h"

const AttentionKernels attention_avx512_float32 = KERNELS;

#endif
