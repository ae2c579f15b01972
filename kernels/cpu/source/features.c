/* Detects, once, the instructions that this processor and operating system support. */

#if defined(__linux__)
#define _GNU_SOURCE /* for syscall */
#endif

#include "attention/attention.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define AMX_BF16 (1u << 22)       /* in EDX of CPUID leaf 7, subleaf 0 */
#define AMX_TILE (1u << 24)       /* in the same register */
#define XCR0_TILES (3u << 17)     /* in XCR0: the system saves tile configuration and tile data between threads */
#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM of arch_prctl */
#define TILE_DATA 18              /* the processor state that permission is requested for */

/* Whether AMX's bfloat16 products may be used. Linux (5.16 and later) grants a process its tile registers on request, and
 * stops it at the first tile instruction otherwise; on other systems AMX is not used. */
static int has_amx(void)
{
#if defined(HAS_AMX) && defined(SYS_arch_prctl)
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (AMX_BF16 | AMX_TILE)) != (AMX_BF16 | AMX_TILE))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0)); /* not trapped: AVX-512 is enabled */
    return (low & XCR0_TILES) == XCR0_TILES && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
}

/* The family of an AMD processor, 0 of another's. */
static unsigned amd_family(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx || !__get_cpuid(1, &a, &b, &c, &d))
        return 0;
    return (a >> 8 & 0xf) + (a >> 20 & 0xff);
}

static int detect(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return LEVEL_NONE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq"))
        return LEVEL_AVX2;
    if (!__builtin_cpu_supports("avx512bf16"))
        return LEVEL_AVX512;
    return has_amx() ? LEVEL_AMX : LEVEL_AVX512BF16;
}

int triforce_cpu_level(void)
{
    static int level = -1; /* not detected yet; threads that detect at the same time find the same */
    int known = __atomic_load_n(&level, __ATOMIC_RELAXED);
    if (known < 0) {
        known = detect();
        __atomic_store_n(&level, known, __ATOMIC_RELAXED);
    }
    return known;
}

/* By the family of an AMD processor. Measured with 32,768 keys of 24 heads of 64 on two cores, medians, ms:
 *
 *   family 25 (Zen 4)   spread, into the first cache:   one row 8.3, 5 rows 8.5, 13 rows 10.2; into the second 6.5, 7.4, 11.0; without
 *                       9.0, 11.4, 17.8. The second is better up to 8 rows, the first from 12 on. Of the distances from 128 to 384 keys
 *                       256 was best by a few percent, and by 4 to 8 % with heads of 128.
 *                       A second time, 8 KiB less far ahead: 0.93 to 0.97 of the time for 1 to 8 rows, 1.02 for 13 and 16; with
 *                       heads of 128 0.90 to 0.93 for one and two rows, from 1 to 8 query heads a KV head; with heads of 64 in
 *                       caches of less than some 12 MiB, which the processor's hold, 1.03 to 1.12.
 *                       Kernels in float32: with the second 0.54 (AVX2, 2 rows) to 0.9 (AVX-512, 16 rows) of the time with the first.
 *   family 26 (Zen 5)   192 keys ahead, first cache:    one row 5.2, 13 rows 6.0; without 6.7, 11.2. Distances of 160 to 384 keys
 *                       are within 3 %; 64 takes 10 to 20 % longer for 13 rows, the second cache as the aim 25 %.
 *                       A second time, 6 KiB less far ahead: 0.96 to 0.98 of the time for 1 to 8 rows, 0.92 to 1.03 for 13 and 16;
 *                       with heads of 128 0.95 and 0.96 for one row with 4 and 8 query heads a KV head; with 2,048 keys 0.98 for one
 *                       row, 1.03 for 5. 1 to 12 KiB less far, from 128 to 256 keys ahead: within 3 % of that. Far ahead into the
 *                       second cache, then into the first: not better.
 *
 * Others, Zen 3 (family 25) among them, are not measured: they take what their family does, or prefetch once, as far ahead as
 * Zen 5. */
static const struct {
    unsigned family;
    Prefetching suits;
} PREFETCHING[] = {{25, {256, 8, 8, 8192, 1}}, {26, {192, 0, 8, 6144, 0}}, {0, {192, 0, 0, 0, 0}}};

const Prefetching *prefetching(void)
{
    static const Prefetching *known; /* not asked yet; threads that ask at the same time find the same */
    const Prefetching *suits = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!suits) {
        const unsigned family = amd_family();
        int i = 0;
        while (PREFETCHING[i].family != family && PREFETCHING[i].family)
            i++;
        suits = &PREFETCHING[i].suits;
        __atomic_store_n(&known, suits, __ATOMIC_RELAXED);
    }
    return suits;
}
#else
int triforce_cpu_level(void) { return LEVEL_NONE; }
#endif

int triforce_threads(int64_t asked)
{
#ifdef _OPENMP
    return asked ? (int)asked : omp_get_max_threads();
#else
    return asked ? (int)asked : 1;
#endif
}

int triforce_abi(void) { return TRIFORCE_ABI; }

int64_t triforce_attention_size(void) { return sizeof(Attention); }
