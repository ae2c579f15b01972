/* Attention with AVX-512, with and without bfloat16 dot products, and with AMX. */

#if defined(__x86_64__) && defined(__GNUC__)

#include "attention.h"
#include "../avx512.h"

#define SET avx512
#define TARGET AVX512BF16_TARGET
#define LANES 16
#define STEP 4
#define NAME attention_avx512bf16_bfloat16
#define IS_BF16 1
#define HAS_DOT 1
#include "attention_body.h"

#ifdef HAS_AMX
#include "attention_amx.h"
#endif

#define SET avx512
#define TARGET AVX512_TARGET
#define LANES 16
#define STEP 4
#define NAME attention_avx512_bfloat16
#define IS_BF16 1
#define HAS_DOT 0
#include "attention_body.h"

#define SET avx512
#define TARGET AVX512_TARGET
#define LANES 16
#define STEP 4
#define NAME attention_avx512_float32
#define IS_BF16 0
#define HAS_DOT 0
#include "attention_body.h"

#endif
