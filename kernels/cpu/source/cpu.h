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

/* Must be raised whenever the arguments of a function or the arithmetic of a level change. So Python refuses a library built
 * from other sources. */
#define TRIFORCE_ABI 22
EXPORT int triforce_abi(void);

/* Bytes of `Attention` (attention.h), which Python compares with its own declaration of it. */
EXPORT int64_t triforce_attention_size(void);

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && (__GNUC__ >= 11 || defined(__clang__))
#define HAS_AMX
#endif

/* Instruction sets. Each includes all before it. Attention is compiled for all except the first, products (layers.c) for the
 * last two, packing for the first three, sampling for the second. */
enum { LEVEL_NONE, LEVEL_AVX2, LEVEL_AVX512, LEVEL_AVX512BF16, LEVEL_AMX };

/* The highest level of this processor, detected at the first call. */
EXPORT int triforce_cpu_level(void);

/* The number of threads of a call that asks for `asked`; 0 is the number that OpenMP would use. */
int triforce_threads(int64_t asked);

typedef struct Attention Attention;

/* Computes attention for `count` calls (attention.h) that do not write the same memory. Returns 0; 1 if there is no memory for
 * temporaries; 2 if this processor does not have the level of a call. If there are several calls, the threads of the first are
 * used, and `diagonal_at` must be 0. */
EXPORT int triforce_attend(const Attention *calls, int64_t count);

/* Rows of a step, and their place in a cache: the index of one of a layer's addresses (`cache`), and the offset from it (`into`).
 * Strides, offsets and sizes are in bytes. */
typedef struct {
    int64_t from, from_head, from_row;
    int64_t cache, into, into_head, into_row;
    int64_t heads, n, bytes;
} StepCopy;

/* The place of the keys and values of a call: the indices of two of a layer's addresses, and the offsets from them in bytes. */
typedef struct {
    int64_t k, k_at, v, v_at;
} StepPlace;

/* Computes a step in a layer whose caches have these `addresses`. It copies rows into the caches, clears the `running_rows`
 * running results of the calls, if there are any, and makes the calls: `groups[0]` calls with one `triforce_attend`, then
 * `groups[1]`, and so on. The keys and values of each call are at its place. Returns the result of `triforce_attend`. */
EXPORT int triforce_take_step(const int64_t *addresses, const StepCopy *copies, int64_t num_copies, Attention *calls,
                              const StepPlace *places, const int64_t *groups, int64_t num_groups, float *running,
                              int64_t running_rows);

/* Applies rotary embedding to `x` `[heads, n, dim]`: row r by `cosines[r]` and `sines[r]` (rows of `dim`, `table_stride` apart;
 * the sines include the sign of the rotation). If these are NULL, copies `x`. If `slots` is not NULL, row r of `x` goes to row
 * `slots[r]` of `out`. */
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

/* Pack bfloat16 values, and unpack blocks. Return 0; 2 if this processor does not have the level. Below LEVEL_AVX2, they are
 * compiled for every processor. */
EXPORT int triforce_pack(const Packing *call);
EXPORT int triforce_unpack(const Packing *call);

/* Unpacks single tokens of packed blocks: `heads` heads of the slots' `num_kv_heads`, from `first_head` on. Each head has its
 * own `count` tokens, `tokens` [heads][count], counted over all blocks, which are consecutive. Here `blocks` is
 * [heads][count][head_dim], without strides. Tokens that do not exist become zeros. */
EXPORT int triforce_gather(const Packing *call, const int64_t *tokens, int64_t first_head, int64_t heads,
                           int64_t count);

/* How the numbers of a quantised matrix are stored: two in a byte, the first in the lower bits; one in a byte, in three formats,
 * the last of them e4m3; or BLOCKS plus one of ggml's block formats, which kernels/quantised.py lists. */
enum { VALUES_NIBBLES, VALUES_UINT8, VALUES_INT8, VALUES_FLOAT8, BLOCKS = 16 };
enum { BLOCKS_Q4_1, BLOCKS_Q5_0, BLOCKS_Q5_1, BLOCKS_Q4_K, BLOCKS_Q5_K, BLOCKS_Q6_K };

/* The types of scales and zero points. */
enum { NUMBERS_FLOAT32, NUMBERS_FLOAT16, NUMBERS_BFLOAT16, NUMBERS_UINT8, NUMBERS_INT8, NUMBERS_INT16 };

/* A matrix `[outputs, inputs]` in few bits; `QuantisedCall` of kernels/cpu/library.py declares the same fields in the same
 * order. Number i of row r is `(values[r][i] - zeros[r][g]) * scales[r][g]`. Its group g is `group_of[i]` or, if `group_of` is 0,
 * that of input i when the inputs are divided into `groups` groups of neighbours. In BLOCKS, the block gives the number. */
typedef struct {
    int64_t values;    /* address of rows `row_bytes` apart */
    int64_t kind, row_bytes, outputs, inputs;
    int64_t groups, group_size; /* of a row, and inputs of one where they are neighbours; all else is of groups too */
    int64_t group_of;           /* address of int64, or 0 */
    int64_t scales, scales_are;
    int64_t zeros, zeros_are; /* whole numbers, or 0: all are `zero` */
    int64_t zero;
} Quantised;

/* Computes `out[r] = w · norm(x[r]) + bias`: `x` has `n` rows of `inputs`, `stride` apart, `w` is `[outputs, inputs]`; `norm`
 * (the weight of an RMS norm) and `bias` may be NULL. With `adds`, the result is added to `out`, which must not overlap `x`. In
 * bfloat16, `held` may contain the matrix in few bits, in one or several parts whose outputs follow one another; otherwise it is
 * NULL. Returns 1 if memory ran out, else 0. */
EXPORT int triforce_linear(const void *x, int64_t stride, const void *norm, float eps, const void *w, const void *bias,
                           const Quantised *held, int64_t matrices, void *out, int adds, int64_t n, int64_t inputs,
                           int64_t outputs, int is_bf16, int level, int threads);

/* Computes `out[r] = down · (silu(gate · y) * (up · y))` for `y = norm(x[r])`: `gate_up` is `[2 * width, hidden]`, `down`
 * `[hidden, width]`. In bfloat16, `held` may contain the three matrices in few bits; otherwise it is NULL. With `adds`, the
 * result is added to `out`, which may be `x`. Returns 1 if memory ran out, else 0. */
EXPORT int triforce_gated_mlp(const void *x, int64_t stride, const void *norm, float eps, const void *gate_up,
                              const void *down, const Quantised *held, void *out, int adds, int64_t n, int64_t hidden,
                              int64_t width, int is_bf16, int level, int threads);

/* Computes `out[h][r]`: the RMS norm of `x[h][r]`, times `norm`. Rows have `width` numbers. Rows of `x` are `row_stride` apart,
 * and its heads `head_stride`. In bfloat16, `norm` may be float32. */
EXPORT void triforce_rms_norm(const void *x, int64_t head_stride, int64_t row_stride, const void *norm, int norm_is_bf16, float eps,
                              void *out, int64_t heads, int64_t n, int64_t width, int is_bf16, int threads);

/* Computes `out[r][h]`: the RMS norm of `x[r][h]`, rounded, times `weight`, rounded, times the SiLU of `gate[r][h]`. Rows have
 * `heads` heads of `width` numbers; rows of `gate` are `gate_stride` apart. */
EXPORT void triforce_gated_norm(const void *x, const void *gate, int64_t gate_stride, const void *weight, float eps, void *out,
                                int64_t n, int64_t heads, int64_t width, int is_bf16, int threads);

/* Computes `out[r] = x[r] * sigmoid(gate[r])`, in which the sigmoid is rounded. Rows have `width` numbers; rows of `gate` have
 * `gates`: the same number, or 1 for all. */
EXPORT void triforce_by_sigmoid(const void *x, const void *gate, int64_t gates, void *out, int64_t n, int64_t width, int is_bf16);

/* Chooses the experts of each row of `x` [n][hidden]. Writes to `ids` [n][used] the `used` of `count` experts with the highest
 * probabilities, the highest first, and of equal ones the first. Probabilities are the softmax of `router · x[r]` in float32.
 * Writes them to `shares` [n][used]; with `normalised`, divided by their sum. A row with NaN gets any experts, and NaN. Returns 1
 * if memory ran out, else 0. */
EXPORT int triforce_choose_experts(const void *x, int64_t n, int64_t hidden, int is_bf16, const float *router, int64_t count,
                                   int64_t used, int normalised, int64_t *ids, float *shares, int level, int threads);

/* Computes `out[r]`, bfloat16: the sum over the experts of row r of `x` [n][hidden], bfloat16. The result of each expert's MLP is
 * rounded to bfloat16 and multiplied by its share. The sum is float32, in the order of the experts' numbers. `ids` and `shares`
 * are [n][used]. `held` has gate, up and down of each of `count` experts, as for `triforce_gated_mlp`. An id without an expert
 * adds nothing. With `adds`, the result is added to `out`. Returns 1 if memory ran out, else 0. */
EXPORT int triforce_expert_mlps(const void *x, int64_t n, int64_t hidden, int64_t width, const Quantised *held, int64_t count,
                                const int64_t *ids, const float *shares, int64_t used, void *out, int adds, int level, int threads);

/* Writes the numbers of a matrix, in float32 or, with `is_bf16`, rounded to bfloat16. Returns 0; 2 if this processor does not have
 * the level. From LEVEL_AVX512BF16 on, bfloat16 numbers below 2^-126 may be zeros, as products treat them on that level. */
EXPORT int triforce_expand(const Quantised *matrix, void *out, int is_bf16, int level, int threads);

/* Computes `out[r] = w · x[r]` in float32, from LEVEL_AVX2 on. `x` has `n` rows; `w` has a multiple of 8 inputs. With `is_bf16`,
 * the numbers of `w` are rounded to bfloat16. Returns 0; 1 if memory ran out; 2 if this processor does not have the level. */
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

/* Computes the gated delta rule. Returns 0; 1 if memory ran out; 2 if this processor does not have LEVEL_AVX2, or if the widths
 * are not supported. */
EXPORT int triforce_delta_steps(const Delta *call);

/* The shares of attention that rows gave to some consecutive chunks of keys; `MassPartCall` of kernels/cpu/library.py declares
 * the same fields in the same order. */
typedef struct {
    int64_t shares, head, row;       /* address of [heads][rows][chunks] float32, and strides: chunks follow one another */
    int64_t first, chunks;           /* the first chunk, and how many */
    int64_t lse, lse_head, lse_row;  /* address of [heads][rows] float32, log-sum-exps of what the shares are of, and strides */
} MassPart;

/* Adds the attention that rows gave to chunks, times `weight`, to `mean` [num_kv_heads][max_chunks]: the mean over rows and over
 * the `group` query heads of a KV head. The earlier values of the first `kept` chunks count with 1 - `weight`, the others not at
 * all. NaN counts as 0, infinities as the largest number. `lse` has the log-sum-exp of each row over all keys; if there are
 * several parts, shares become relative to it. There is at least one row. Returns 0; 2 if this processor does not have
 * LEVEL_AVX2. */
EXPORT int triforce_add_mass(float *mean, int64_t max_chunks, int64_t num_kv_heads, int64_t group, int64_t rows,
                             const MassPart *parts, int64_t count, const float *lse, int64_t lse_head, int64_t lse_row,
                             int64_t kept, double weight);

/* Sampling (sampling.c), from LEVEL_AVX2 on, for `n` contiguous rows of `vocab` logits or weights. offload/speculation documents
 * what the functions compute. This one writes to `out` the probabilities that the filters make from logits. A temperature of 0 is
 * greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. Returns 1 if memory ran out, else 0. */
EXPORT int triforce_distribution(const float *logits, int64_t n, int64_t vocab, double temperature, int64_t top_k, double top_p,
                                 double min_p, float *out, int threads);

/* Computes how certain the logits are of `tokens` [n], in millionths. */
EXPORT void triforce_certainties(const float *logits, int64_t n, int64_t vocab, const int64_t *tokens, int64_t *millionths);

/* Choose a token of each row, or -1 if a weight is NaN: the token with the largest weight; the token at a share of the sum of
 * weights; the token given by the noise of a key. */
EXPORT void triforce_likeliest(const float *weights, int64_t n, int64_t vocab, int64_t *tokens);
EXPORT void triforce_pick(const float *weights, int64_t n, int64_t vocab, const double *shares, int64_t *tokens);
EXPORT void triforce_race(const float *weights, int64_t n, int64_t vocab, const int64_t *keys, int64_t *tokens);

#endif
