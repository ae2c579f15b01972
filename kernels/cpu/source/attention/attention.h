/* Attention on a CPU: declarations that the driver (attention.c) and the kernels share. kernels/attention.py documents what is
 * computed.
 *
 * There is a file with kernels for each instruction set and type of inputs, avx2_float32.c to amx_bfloat16.c. A file declares its
 * instruction set and includes shared code: all files rows.h, those that compute in float32 multiply_add.h, and those with
 * products of bfloat16 shares.h.
 *
 * The arithmetic of a row depends only on the keys it sees and on their positions: keys are processed in tiles of TILE,
 * tiles are grouped in splits of SPLIT counted from key 0, each split's partial result starts at zero, and partial
 * results are merged in ascending order. So the bits of a row's result do not depend on the number of rows, threads or
 * blocks of rows. With `running`, they do not depend on the number of calls either, if calls have multiples of SPLIT keys.
 * multiply_add.h and shares.h say which peak the shares are relative to. */

#ifndef TRIFORCE_ATTENTION_H
#define TRIFORCE_ATTENTION_H

#include "../cpu.h"

#include <string.h>

#define TILE 64        /* keys whose scores are computed together */
#define SPLIT 256      /* keys of a partial result */
#define ROWS 32        /* memory for rows is a multiple of so many */
#define MAX_DIM 256
#define EMPTY (-1e30f) /* the peak where there are no scores: finite, so that differences from it are finite */

enum { FLOAT32, BFLOAT16 };

/* The arguments of one call; `AttentionCall` of kernels/cpu/library.py declares the same fields in the same order.
 * Addresses, and strides in elements; `lse` and `mass` are contiguous. Keys and values are stored in blocks of
 * `block_size` keys, `block_size` a multiple of TILE or at least `m`. */
struct Attention {
    int64_t q, k, v, out, lse, mass; /* mass may be 0 */
    int64_t running; /* [num_heads][n][row_stride] the result over earlier keys, brought up to date; may be 0 */
    int64_t running_head; /* its stride; rows follow one another */
    int64_t q_head, q_row;
    int64_t out_head, out_row, rounded; /* `out` is float32, or with `rounded`, for bfloat16 inputs, bfloat16 */
    int64_t k_block, k_head, k_row;
    int64_t v_block, v_head, v_row;
    int64_t num_heads, num_kv_heads, n, m, head_dim, block_size;
    int64_t diagonal, window; /* row i sees keys diagonal + i - window < j <= diagonal + i */
    int64_t diagonal_at;      /* address of an int64 that takes the place of `diagonal`; may be 0 */
    int64_t mass_rows, chunk_size; /* the last rows, whose mass is wanted; keys of a chunk */
    int64_t type, threads, level;  /* of the enumerations here and in cpu.h */
    double scale;
};

/* The keys that a row sees, and where the attention it gives to each chunk is written (0: not wanted). */
typedef struct {
    int64_t start, stop; /* keys */
    float *mass;         /* [chunks] */
    float *peaks;        /* [tiles] */
} Row;

/* The keys of a KV head, from key `first` on. */
typedef struct {
    const Attention *call; /* 0: none */
    int64_t kv_head, first;
} HeadKeys;

/* A thread's temporaries, and the memory that threads share. */
typedef struct {
    float *q;      /* [rows][head_dim] query rows in the format that `part` reads */
    float *keys;   /* keys, transposed */
    float *values; /* values, in the order that they are multiplied in */
    float *scores; /* of some rows */
    float *sums;   /* [rows][16] sums of exponentials, one per vector lane */
    float *part;   /* [rows][row_stride] the result over one split */
    float *whole;  /* the same, over all splits so far; of a block that threads share, its own memory */
    Row *rows;     /* [rows] */
    HeadKeys next; /* what the thread is likely to go on with when its block of rows is done */
    float *peaks;  /* shared: [num_heads][mass_rows][tiles], the peak score that the mass of a tile is relative to */
} Work;

/* The kernels of one instruction set and input type. A block of rows is `rows` of the `group * n` query rows of one KV
 * head, from `first` on; row r is position r / group of query head r % group. A row of a partial result is
 * [output, not normalised | peak | total | total of the shares as they weigh values]. `prepare` must be called before the
 * others; `begin` and `end`, where they are, by each thread before and after. `part` may write up to whole ROWS of rows. */
typedef struct {
    int64_t row_block; /* rows at most of a block */
    struct {
        int64_t keys, values; /* floats for each dimension of a head */
        int64_t scores;       /* floats */
    } sizes;
    void (*begin)(void);
    void (*end)(void);
    void (*prepare)(const Attention *call, int64_t kv_head, int64_t first, int64_t rows, const Work *work);
    void (*part)(const Attention *call, int64_t kv_head, int64_t rows, int64_t split, const Work *work, float *part);
    void (*merge)(int64_t head_dim, int64_t rows, const float *part, float *whole);
    void (*finish)(const Attention *call, int64_t kv_head, int64_t first, int64_t rows, const Work *work); /* work->whole */
} AttentionKernels;

extern const AttentionKernels attention_avx2_float32, attention_avx2_bfloat16, attention_avx512_float32, attention_avx512_bfloat16,
    attention_avx512bf16_bfloat16, attention_amx_bfloat16;

/* How keys and values are best prefetched on a processor. */
typedef struct {
    int64_t keys_ahead; /* by the kernels for dot products of bfloat16: keys ahead of those in use, a multiple of TILE / 2; 0: not */
    int64_t few_rows;   /* by these for up to so many rows to the second cache, for more to the first */
    int64_t again_rows; /* by these for up to so many rows once more, as a processor drops prefetches while many are under way */
    int64_t again;      /* so many bytes less far ahead than the first time */
    int to_second;      /* whether the kernels in float32 prefetch to the second cache */
} Prefetching;

/* Of this processor (features.c). */
const Prefetching *prefetching(void);

/* Has a line of memory brought to the second cache, or to the first. */
static inline __attribute__((always_inline)) void prefetch_line(const void *line, int to_second)
{
    if (to_second)
        __builtin_prefetch(line, 0, 2);
    else
        __builtin_prefetch(line);
}

static inline int64_t row_stride(int64_t head_dim) { return head_dim + 16; }
static inline int64_t num_tiles(const Attention *call) { return (call->m + TILE - 1) / TILE; }

static inline void round_to_bf16(const float *from, uint16_t *to, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = bfloat16_of(from[i]);
}

/* The keys that position `i` of the query sees: from *start to before *stop. */
static inline void visible(const Attention *call, int64_t i, int64_t *start, int64_t *stop)
{
    *stop = larger(0, smaller(call->m, call->diagonal + i + 1));
    *start = larger(0, call->diagonal + i + 1 - call->window);
    if (*start > *stop)
        *start = *stop;
}

#endif
