/* Attention on a CPU: what the driver (attention.c) and the kernels (attention_body.h, once per instruction set and
 * input type) share. kernels/attention.py says what is computed.
 *
 * The arithmetic of a row depends on the keys it sees and their places alone: keys are taken in tiles of TILE and tiles
 * in splits of SPLIT from key 0 on, a split's partial result is summed from nothing, and partial results are merged in
 * ascending order. So a row comes out the same, bit by bit, however many rows, threads or blocks of rows there are. */

#ifndef TRIFORCE_ATTENTION_H
#define TRIFORCE_ATTENTION_H

#include <stdint.h>

#define TILE 64        /* keys whose scores are computed together */
#define SPLIT 1024     /* keys of a partial result */
#define ROW_BLOCK 96   /* rows at most that go over the keys together */
#define MAX_DIM 256
#define EMPTY (-1e30f) /* the peak of no scores at all: finite, so that differences with it are */

enum { FLOAT32, BFLOAT16 };
enum { LEVEL_NONE, LEVEL_AVX2, LEVEL_AVX512, LEVEL_AVX512BF16 };

/* One call; kernels/cpu_attention.py fills it in. Addresses, and strides in elements; `out`, `lse` and `mass` are
 * contiguous. Keys and values lie in blocks of `block_size` keys, `block_size` a multiple of TILE or at least `m`. */
typedef struct {
    int64_t q, k, v, out, lse, mass; /* mass may be 0 */
    int64_t q_head, q_row;
    int64_t k_block, k_head, k_row;
    int64_t v_block, v_head, v_row;
    int64_t num_heads, num_kv_heads, n, m, head_dim, block_size;
    int64_t diagonal, window; /* row i sees keys diagonal + i - window < j <= diagonal + i */
    int64_t mass_rows, chunk_size;
    int64_t type, threads, level;
    double scale;
} Attention;

/* What a row sees, and where what it gives to chunks goes (0: nowhere). */
typedef struct {
    int64_t start, stop; /* keys */
    float *mass;         /* [chunks] */
    float *peaks;        /* [tiles] */
} Row;

/* A thread's temporaries, and what the threads share. */
typedef struct {
    float *q;      /* [ROW_BLOCK][head_dim] query rows as the scores need them */
    float *keys;   /* [head_dim][TILE] a tile of keys, turned over */
    float *scores; /* [rows at a time][TILE] */
    float *sums;   /* [ROW_BLOCK][16] by lane */
    float *part;   /* [ROW_BLOCK][row_stride] */
    float *whole;  /* the same */
    Row *rows;     /* [ROW_BLOCK] */
    float *peaks;  /* shared: [num_heads][mass_rows][tiles], what the mass of a tile is relative to */
} Work;

/* The kernels of one instruction set and input type. A block of rows are `rows` of the `group * n` rows of one KV head,
 * from `first` on, counted query head by query head within each position. A row of a partial result is
 * [output, not normalised | peak | total]. `prepare` must come before the rest. */
typedef struct {
    void (*prepare)(const Attention *call, int64_t kv_head, int64_t first, int64_t rows, const Work *work);
    void (*part)(const Attention *call, int64_t kv_head, int64_t rows, int64_t split, const Work *work, float *part);
    void (*merge)(int64_t head_dim, int64_t rows, const float *part, float *whole);
    void (*finish)(const Attention *call, int64_t kv_head, int64_t first, int64_t rows, const Work *work); /* work->whole */
} AttentionKernels;

extern const AttentionKernels attention_avx512bf16_bfloat16, attention_avx512_bfloat16, attention_avx512_float32,
    attention_avx2_bfloat16, attention_avx2_float32;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static inline int64_t row_stride(int64_t head_dim) { return head_dim + 16; }
static inline int64_t num_tiles(const Attention *call) { return (call->m + TILE - 1) / TILE; }

/* The keys that position `i` of the query sees: from *start to before *stop. */
static inline void visible(const Attention *call, int64_t i, int64_t *start, int64_t *stop)
{
    *stop = larger(0, smaller(call->m, call->diagonal + i + 1));
    *start = larger(0, call->diagonal + i + 1 - call->window);
    if (*start > *stop)
        *start = *stop;
}

#endif
