/* What the compiled kernels for CPUs share. They are plain C, called through ctypes, and know nothing of Python or
 * PyTorch: pointers, counts and strides in elements come in. Those of layers.c need what `triforce_cpu_level` asks for;
 * attention is compiled for several instruction sets (attention.h), of which `triforce_attention_level` is the best. */

#ifndef TRIFORCE_CPU_H
#define TRIFORCE_CPU_H

#include <stdint.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Raised whenever what a kernel takes changes, so that Python never calls a library of another time. */
#define TRIFORCE_ABI 1
EXPORT int triforce_abi(void);

/* The most that this machine can run: 0 none of the kernels, 1 AVX-512 with bfloat16 dot products. */
EXPORT int triforce_cpu_level(void);

/* `out[r] = w · norm(x[r]) + bias`: `x` has `n` rows of `inputs`, `stride` apart, `w` is `[outputs, inputs]`; `norm` (an
 * RMS norm's weight) and `bias` may be NULL. 1 if memory ran out, else 0. */
EXPORT int triforce_linear(const void *x, int64_t stride, const void *norm, float eps, const void *w, const void *bias,
                           void *out, int64_t n, int64_t inputs, int64_t outputs, int is_bf16, int threads);

/* `out[r] = down · (silu(gate · y) * (up · y))` of `y = norm(x[r])`: `gate_up` is `[2 * width, hidden]`, `down`
 * `[hidden, width]`. 1 if memory ran out, else 0. */
EXPORT int triforce_gated_mlp(const void *x, int64_t stride, const void *norm, float eps, const void *gate_up,
                              const void *down, void *out, int64_t n, int64_t hidden, int64_t width, int is_bf16,
                              int threads);

/* Rotary embedding of `x` `[heads, n, dim]`: row r by `cosines[r]` and `sines[r]` (rows of `dim`, `table_stride` apart,
 * the sign of the rotation in the sines). `out` may be a slice of a cache. */
EXPORT void triforce_rotate(const void *x, int64_t head_stride, int64_t row_stride, const float *cosines,
                            const float *sines, int64_t table_stride, void *out, int64_t out_head_stride,
                            int64_t out_row_stride, int64_t heads, int64_t n, int64_t dim, int is_bf16);

#endif
