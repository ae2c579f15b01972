/* What the compiled kernels for CPUs share. They are plain C, called through ctypes, and know nothing of Python or
 * PyTorch: pointers, counts and strides in elements come in. Each is compiled for several instruction sets in one
 * library, and Python asks `triforce_cpu_level` once before it calls any. */

#ifndef TRIFORCE_CPU_H
#define TRIFORCE_CPU_H

#include <stdint.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* The most that this machine can run: 0 none of the kernels, 1 AVX-512 with bfloat16 dot products. */
EXPORT int triforce_cpu_level(void);

#endif
