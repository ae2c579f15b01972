/* Attention with AVX2 and FMA. */

#if defined(__x86_64__) && defined(__GNUC__)

#include "attention.h"
#include "../avx2.h"

#define SET avx2
#define TARGET AVX2_TARGET
#define LANES 8
#define STEP 2
#define NAME attention_avx2_bfloat16
#define IS_BF16 1
#define HAS_DOT 0
#include "attention_body.h"

#define SET avx2
#define TARGET AVX2_TARGET
#define LANES 8
#define STEP 2
#define NAME attention_avx2_float32
#define IS_BF16 0
#define HAS_DOT 0
#include "attention_body.h"

#endif
