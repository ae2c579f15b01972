/* What attention and products with AMX share: matrix tiles of 16 rows of 16 32-bit words, each two bfloat16 numbers. */

#ifndef TRIFORCE_AMX_H
#define TRIFORCE_AMX_H

#include "avx512.h"

#define AMX_TARGET AVX512_TARGET ",avx512bf16,amx-tile,amx-bf16"
#define AMX __attribute__((target(AMX_TARGET))) static
#define AMX_INLINE __attribute__((target(AMX_TARGET))) static inline __attribute__((always_inline))

#define SIDE 16                  /* rows, or words of a row */
#define TILE_WORDS (SIDE * SIDE) /* 1 KiB */
#define PAIRED 32                /* numbers of a row */

/* Has the compiler write to memory what tiles are loaded from: it does not know that they are. */
#define AMX_WRITTEN __asm__ volatile("" ::: "memory")

/* Takes eight whole tiles for this thread. */
AMX void amx_begin(void)
{
    static const struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } layout = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};
    _tile_loadconfig(&layout);
}

AMX void amx_end(void) { _tile_release(); }

/* Lays SIDE rows, `stride` numbers apart, out as tiles: [words / 16][16 words][16 rows]. Rows from `count` on, and words from
 * `words` on, are zeros. */
AMX_INLINE void amx_turn(const uint16_t *rows, int64_t stride, int64_t count, int64_t words, float *tiles)
{
    for (int64_t word = 0; word < words; word += SIDE, tiles += TILE_WORDS) {
        const __mmask16 some = words - word < SIDE ? (__mmask16)((1u << (words - word)) - 1) : (__mmask16)0xffff;
        __m512 r[SIDE];
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++)
            r[i] = i < count ? _mm512_maskz_loadu_ps(some, (const float *)(const void *)(rows + i * stride) + word) : _mm512_setzero_ps();
        vec_transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++)
            _mm512_store_ps(tiles + i * SIDE, r[i]);
    }
}

#endif
