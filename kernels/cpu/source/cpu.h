/* The functions of the compiled kernels for CPUs. They are plain C, called through ctypes (kernels/cpu/library.py), and
 * know nothing of Python or PyTorch: their arguments are pointers, counts, and strides in elements. */

#ifndef TRIFORCE_CPU_H
#define TRIFORCE_CPU_H

#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* The nearest bfloat16, ties to even, as PyTorch rounds. */
INLINE uint16_t bfloat16_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float float_of_bits(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Raised whenever the arguments of a function or the arithmetic of a level change, so that Python refuses a library built
 * from other sources. */
#define TRIFORCE_ABI 22
EXPORT int triforce_abi(void);

/* Bytes of `Attention` (attention.h), which Python compares with its own declaration of it. */
EXPORT int64_t triforce_attention_size(void);

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && (__GNUC__ >= 11 || defined(__clang__))
#define HAS_AMX
#endif

/* Instruction sets, each with all before it. Attention is compiled for all but the first, products (layers.c) for the last
 * two, packing for the first three, sampling for the second. */
enum { LEVEL_NONE, LEVEL_AVX2, LEVEL_AVX512, LEVEL_AVX512BF16, LEVEL_AMX };

/* The highest level of this processor, detected at the first call. */
EXPORT int triforce_cpu_level(void);

/* The threads of a call that asks for so many; 0 is as many as OpenMP would take now. */
int triforce_threads(int64_t asked);

typedef struct Attention Attention;

/* Attention as `calls` describe it (attention.h), `count` calls that do not write the same memory: 0; 1 without memory for
 * temporaries; 2 if this processor has not the level that was asked for. Of several calls the first one's threads count, and
 * `diagonal_at` is 0. */
EXPORT int triforce_attend(const Attention *calls, int64_t count);

/* Rows of a step, and where a cache has them: which of a layer's addresses, and how far behind it. All in bytes. */
typedef struct {
    int64_t from, from_head, from_row;
    int64_t cache, into, into_head, into_row;
    int64_t heads, n, bytes;
} StepCopy;

/* Where keys and values of a call are: which of a layer's addresses, and how many bytes behind it. */
typedef struct {
    int64_t k, k_at, v, v_at;
} StepPlace;

/* A step in a layer whose caches have these `addresses`: copies rows into the caches, clears the `running_rows` running results
 * of the calls, if there are any, and makes the calls: `groups[0]` of them with one `triforce_attend`, then `groups[1]`, and so
 * on. Each call's keys and values are at its place. Returns what `triforce_attend` returns. */
EXPORT int triforce_take_step(const int64_t *addresses, const StepCopy *copies, int64_t num_copies, Attention *calls,
                              const StepPlace *places, const int64_t *groups, int64_t num_groups, float *running,
                              int64_t running_rows);

/* Rotary embedding of `x` `[heads, n, dim]`: row r by `cosines[r]` and `sines[r]` (rows of `dim`, `table_stride` apart,
 * the sign of the rotation in the sines), or a copy where these are NULL. Row r of `out` is the one at `slots[r]`, if
 * `slots` is not NULL. */
EXPORT void triforce_rotate(const void *x, int64_t head_stride, int64_t row_stride, const float *cosines,
                            const float *sines, int64_t table_stride, void *out, int64_t out_head_stride,
                            int64_t out_row_stride, const int64_t *slots, int64_t heads, int64_t n, int64_t dim,
                            int is_bf16);

/* The arguments of packing; `PackingCall` of kernels/cpu/library.py declares the same fields in the same order. Strides
 * of blocks are in values, that of slots and the offsets within a slot (kernels/packing.py) in bytes. */
typedef struct {
    int64_t blocks, slots; /* addresses: [num_blocks][num_kv_heads][tokens][head_dim] and [num_blocks][slot_bytes] */
    int64_t block_stride, head_stride, token_stride, slot_stride;
    int64_t num_blocks, num_kv_heads, tokens, head_dim; /* tokens a multiple of 64 */
    int64_t below, starts, exceptions, largest, slot_bytes;
    int64_t capacity; /* exceptions that a slot has room for */
    int64_t threads, level;
} Packing;

/* Packs bfloat16 values, or writes those of packed blocks: 0; 2 if this processor has not the level. Below LEVEL_AVX2
 * they are compiled for every processor. */
EXPORT int triforce_pack(const Packing *call);
EXPORT int triforce_unpack(const Packing *call);

/* Writes single tokens of packed blocks: `heads` heads of the slots' `num_kv_heads` from `first_head` on, of each its
 * own `count` tokens, `tokens` [heads][count], counted over all blocks, which are consecutive. Here `blocks` is
 * [heads][count][head_dim], without strides. Tokens that are not there are zeros. */
EXPORT int triforce_gather(const Packing *call, const int64_t *tokens, int64_t first_head, int64_t heads,
                           int64_t count);

/* How the numbers of a quantised matrix are held: two in a byte, the first one lower; in a byte each, one of them e4m3; or
 * BLOCKS and one of ggml's formats of blocks that kernels/quantised.py lists. */
enum { VALUES_NIBBLES, VALUES_UINT8, VALUES_INT8, VALUES_FLOAT8, BLOCKS = 16 };
enum { BLOCKS_Q4_1, BLOCKS_Q5_0, BLOCKS_Q5_1, BLOCKS_Q4_K, BLOCKS_Q5_K, BLOCKS_Q6_K };

/* What scales and zeros are. */
enum { NUMBERS_FLOAT32, NUMBERS_FLOAT16, NUMBERS_BFLOAT16, NUMBERS_UINT8, NUMBERS_INT8, NUMBERS_INT16 };

/* A matrix `[outputs, inputs]` in few bits; `QuantisedCall` of kernels/cpu/library.py declares the same fields in the same
 * order. Number i of row r is `(values[r][i] - zeros[r][g]) * scales[r][g]` of the group g that is `group_of[i]` or, where that
 * is 0, i's among `groups` of neighbours; or what its block says. */
typedef struct {
    int64_t values;    /* address of rows `row_bytes` apart */
    int64_t kind, row_bytes, outputs, inputs;
    int64_t groups, group_size; /* of a row, and inputs of one where they are neighbours; all else is of groups too */
    int64_t group_of;           /* address of int64, or 0 */
    int64_t scales, scales_are;
    int64_t zeros, zeros_are; /* whole numbers, or 0: all are `zero` */
    int64_t zero;
} Quantised;

/* `out[r] = w · norm(x[r]) + bias`: `x` has `n` rows of `inputs`, `stride` apart, `w` is `[outputs, inputs]`; `norm` (an
 * RMS norm's weight) and `bias` may be NULL. With `adds` that is added to what `out` holds, which `x` is no part of. In bfloat16
 * `held` may be what holds the matrix, in one or several parts whose outputs follow one another, or else NULL. 1 if memory ran
 * out, else 0. */
EXPORT int triforce_linear(const void *x, int64_t stride, const void *norm, float eps, const void *w, const void *bias,
                           const Quantised *held, int64_t matrices, void *out, int adds, int64_t n, int64_t inputs,
                           int64_t outputs, int is_bf16, int level, int threads);

/* `out[r] = down · (silu(gate · y) * (up · y))` of `y = norm(x[r])`: `gate_up` is `[2 * width, hidden]`, `down`
 * `[hidden, width]`; in bfloat16 `held` may be what holds the three of them, or else NULL. With `adds` that is added to what
 * `out` holds, which may be `x`. 1 if memory ran out, else 0. */
EXPORT int triforce_gated_mlp(const void *x, int64_t stride, const void *norm, float eps, const void *gate_up,
                              const void *down, const Quantised *held, void *out, int adds, int64_t n, int64_t hidden,
                              int64_t width, int is_bf16, int level, int threads);

/* `out[h][r]` is the RMS norm of `x[h][r]`, times `norm`: rows of `width`, those of `x` `row_stride` and its heads `head_stride`
 * apart. In bfloat16 `norm` may be float32. */
EXPORT void triforce_rms_norm(const void *x, int64_t head_stride, int64_t row_stride, const void *norm, int norm_is_bf16, float eps,
                              void *out, int64_t heads, int64_t n, int64_t width, int is_bf16, int threads);

/* `out[r][h]` is the RMS norm of `x[r][h]`, rounded, times `weight`, rounded, times the SiLU of `gate[r][h]`: rows of `heads` of
 * `width`, those of `gate` `gate_stride` apart. */
EXPORT void triforce_gated_norm(const void *x, const void *gate, int64_t gate_stride, const void *weight, float eps, void *out,
                                int64_t n, int64_t heads, int64_t width, int is_bf16, int threads);

/* `out[r] = x[r] * sigmoid(gate[r])`, the latter rounded: rows of `width`, those of `gate` of `gates`, as many or 1 for all. */
EXPORT void triforce_by_sigmoid(const void *x, const void *gate, int64_t gates, void *out, int64_t n, int64_t width, int is_bf16);

/* The experts of each row of `x` [n][hidden]: to `ids` and `shares` [n][used] the `used` likeliest of `count` by the softmax of
 * `router · x[r]` in float32, the likeliest first and of equal ones the first, and their probabilities; where `normalised`, over
 * the sum of these. A row with NaN gets some experts, and NaN. 1 if memory ran out, else 0. */
EXPORT int triforce_choose_experts(const void *x, int64_t n, int64_t hidden, int is_bf16, const float *router, int64_t count,
                                   int64_t used, int normalised, int64_t *ids, float *shares, int level, int threads);

/* `out[r]`, bfloat16, is the sum in float32 of the MLPs of the experts of row r of `x` [n][hidden], bfloat16, each rounded to
 * bfloat16 and times its share, in the order of their numbers: `ids` and `shares` are [n][used], and `held` is gate, up and down
 * of each of `count` experts, as of `triforce_gated_mlp`; an id that is no expert's gives nothing. With `adds` that is added to
 * what `out` holds. 1 if memory ran out, else 0. */
EXPORT int triforce_expert_mlps(const void *x, int64_t n, int64_t hidden, int64_t width, const Quantised *held, int64_t count,
                                const int64_t *ids, const float *shares, int64_t used, void *out, int adds, int level, int threads);

/* Writes the numbers of a matrix, in float32 and rounded to bfloat16 if asked for: 0; 2 if this processor has not the level.
 * From LEVEL_AVX512BF16 on bfloat16 numbers below 2^-126 may be zeros, as they are for the products there. */
EXPORT int triforce_expand(const Quantised *matrix, void *out, int is_bf16, int level, int threads);

/* `out[r] = w · x[r]` in float32, from LEVEL_AVX2 on: `x` has `n` rows of as many inputs as `w`, a multiple of 8, whose numbers
 * are rounded to bfloat16 if asked for. 0; 1 if memory ran out; 2 if this processor has not the level. */
EXPORT int triforce_product(const Quantised *w, const float *x, int64_t n, float *out, int is_bf16, int threads);

/* The arguments of the gated delta rule; `DeltaCall` of kernels/cpu/library.py declares the same fields in the same order. */
typedef struct {
    int64_t inputs, gates;    /* addresses: [kernel - 1 + n][channels], [n][2][value_heads], in float32 or bfloat16 */
    int64_t conv;             /* [kernel][channels] float32 */
    int64_t decay, bias;      /* [value_heads] float32 */
    int64_t state;            /* [value_heads][key_dim][value_dim] float32 */
    int64_t out;              /* of the last `wanted` rows [wanted][value_heads][value_dim], as the inputs are */
    int64_t saved[2];         /* where the state is written to behind `saved_behind` rows, it may be `state`; or 0 */
    int64_t saved_behind[2];
    int64_t n, wanted, channels, kernel, key_heads, value_heads, key_dim, value_dim; /* widths multiples of 8 */
    int64_t tiled; /* 1: value head i has the key head i % key_heads; 0: neighbouring value heads have one together */
    int64_t is_bf16, threads;
} Delta;

/* 0; 1 if memory ran out; 2 if this processor has not the level, LEVEL_AVX2, or the widths are others. */
EXPORT int triforce_delta_steps(const Delta *call);

/* The shares of their attention that rows gave to some consecutive chunks of keys; `MassPartCall` of kernels/cpu/library.py
 * declares the same fields in the same order. */
typedef struct {
    int64_t shares, head, row;       /* address of [heads][rows][chunks] float32, and strides: chunks follow one another */
    int64_t first, chunks;           /* the first chunk, and how many */
    int64_t lse, lse_head, lse_row;  /* address of [heads][rows] float32, log-sum-exps of what the shares are of, and strides */
} MassPart;

/* Adds what rows gave to chunks, in the mean over rows and the `group` query heads of a KV head, to `mean` [num_kv_heads]
 * [max_chunks], of which the first `kept` count with 1 - `weight` and others not at all; what is not finite counts as 0 or as
 * the largest number. `lse` is that of each row over all keys, which shares become relative to where there are several parts.
 * There is a row at least. 0; 2 if this processor has not the level, LEVEL_AVX2. */
EXPORT int triforce_add_mass(float *mean, int64_t max_chunks, int64_t num_kv_heads, int64_t group, int64_t rows,
                             const MassPart *parts, int64_t count, const float *lse, int64_t lse_head, int64_t lse_row,
                             int64_t kept, double weight);

/* Sampling (sampling.c), from LEVEL_AVX2 on: `n` rows of `vocab` logits or weights, one after another. What each computes is
 * said in offload/speculation. `out` is the rows of probabilities that the filters make of logits; a temperature of 0 is
 * greedy, `top_k` 0, `top_p` 1 and `min_p` 0 are off. 1 if memory ran out, else 0. */
EXPORT int triforce_distribution(const float *logits, int64_t n, int64_t vocab, double temperature, int64_t top_k, double top_p,
                                 double min_p, float *out, int threads);

/* How sure logits are of `tokens` [n], in millionths. */
EXPORT void triforce_certainties(const float *logits, int64_t n, int64_t vocab, const int64_t *tokens, int64_t *millionths);

/* A token of each row, -1 where none can be drawn as a weight is NaN: the likeliest; by the share of the sum of weights that
 * comes before it; by the noise of a key. */
EXPORT void triforce_likeliest(const float *weights, int64_t n, int64_t vocab, int64_t *tokens);
EXPORT void triforce_pick(const float *weights, int64_t n, int64_t vocab, const double *shares, int64_t *tokens);
EXPORT void triforce_race(const float *weights, int64_t n, int64_t vocab, const int64_t *keys, int64_t *tokens);

#endif
