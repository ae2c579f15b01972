/* Which kernels this machine can run. */

#include "cpu.h"

int triforce_abi(void) { return TRIFORCE_ABI; }

int triforce_cpu_level(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16"))
        return 1;
#endif
    return 0;
}
