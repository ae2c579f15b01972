/* Shared by attention and products with AMX: matrix tiles of 16 rows of 16 32-bit words, each two bfloat16 numbers. */

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

/* Takes eight tiles of 16 rows for this thread: 4 and 5 of 16 words each, the others of `width`, at most so many. */
AMX void amx_begin(int width)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } layout = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        layout.row_bytes[tile] = (uint16_t)(tile == 4 || tile == 5 ? 64 : width * 4);
        layout.rows[tile] = SIDE;
    }
    __asm__ volatile("" : : "r"(&layout) : "memory"); /* the compiler does not know that all of it is read */
    _tile_loadconfig(&layout);
}

AMX void amx_end(void) { _tile_release(); }

/* Lays the first `width` of SIDE rows, `stride` numbers apart, out as tiles: [words / 16][16 words][width]. Rows from `count` on,
 * and words from `words` on, are zeros. */
AMX_INLINE void amx_turn(const uint16_t *rows, int64_t stride, int64_t count, int64_t words, int width, float *tiles)
{
    const __mmask16 wanted = (__mmask16)((1u << width) - 1);
    for (int64_t word = 0; word < words; word += SIDE, tiles += SIDE * width) {
        const __mmask16 some = words - word < SIDE ? (__mmask16)((1u << (words - word)) - 1) : (__mmask16)0xffff;
        __m512 r[SIDE];
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++)
            r[i] = i < count ? _mm512_maskz_loadu_ps(some, (const float *)(const void *)(rows + i * stride) + word) : _mm512_setzero_ps();
        vec_transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++)
            _mm512_mask_storeu_ps(tiles + i * width, wanted, r[i]);
    }
}

#endif
