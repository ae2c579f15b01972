/* Attention on a CPU: divides the work among threads and chooses the kernels. See attention.h. */

#include "attention.h"

#include <stdlib.h>
#include <string.h>
#ifndef _WIN32
#include <pthread.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#include <xmmintrin.h>
#endif

/* Floats of partial results at most where threads share the splits of a block of rows: where there are fewer blocks than threads,
 * and where it only divides the work more evenly. More than KEPT_ROOM the system may map, and clear, at each call. */
#define SHARED_PARTS ((int64_t)64 << 20)
#define EVEN_PARTS ((int64_t)6 << 20)
#define SMALL_WORK ((int64_t)1 << 17)    /* multiplications below which starting other threads takes longer than it saves */

#define KEPT_ROOM ((int64_t)8 << 20)     /* floats of temporaries that a thread keeps for its next call at most */

/* The memory for temporaries that a thread keeps as long as it lives. Where an allocator gives freed memory back to the system,
 * each call would wait for as many pages to be cleared as it writes. */
#ifdef _MSC_VER
#define OF_THREAD __declspec(thread)
#else
#define OF_THREAD _Thread_local
#endif
static OF_THREAD float *kept_room;
static OF_THREAD int64_t kept_floats;
#ifndef _WIN32
static pthread_key_t room_key;
static pthread_once_t room_once = PTHREAD_ONCE_INIT;
static void make_room_key(void) { pthread_key_create(&room_key, free); }
#endif

static float *take_room(int64_t floats)
{
    if (floats > KEPT_ROOM)
        return malloc(floats * sizeof(float));
    if (floats > kept_floats) {
        free(kept_room);
        kept_room = malloc(floats * sizeof(float));
        kept_floats = kept_room ? floats : 0;
#ifndef _WIN32
        pthread_once(&room_once, make_room_key);
        pthread_setspecific(room_key, kept_room); /* freed where the thread ends */
#endif
    }
    return kept_room;
}

static void give_room_back(float *room, int64_t floats)
{
    if (floats > KEPT_ROOM)
        free(room);
}

static const AttentionKernels *kernels_for(int64_t level, int64_t type)
{
    if (level > triforce_cpu_level())
        return 0;
#if defined(__x86_64__) && defined(__GNUC__)
    switch (level) {
    case LEVEL_AVX2: return type == BFLOAT16 ? &attention_avx2_bfloat16 : &attention_avx2_float32;
    case LEVEL_AVX512: return type == BFLOAT16 ? &attention_avx512_bfloat16 : &attention_avx512_float32;
#ifdef HAS_AMX
    case LEVEL_AMX: return type == BFLOAT16 ? &attention_amx_bfloat16 : &attention_avx512_float32;
#endif
    case LEVEL_AVX512BF16: return type == BFLOAT16 ? &attention_avx512bf16_bfloat16 : &attention_avx512_float32;
    }
#endif
    (void)type;
    return 0;
}

/* Lets this thread take numbers below 2^-126 for zero, and returns what `restore_small` is to be called with. Shares of
 * keys whose scores are more than 87 below the highest are such numbers: they add nothing to a result, and a processor
 * takes a hundred times as long for each. */
static unsigned flush_small(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040); /* flush to zero, and denormals are zeros */
    return before;
#else
    return 0;
#endif
}

static void restore_small(unsigned before)
{
#if defined(__x86_64__) && defined(__GNUC__)
    _mm_setcsr(before);
#endif
    (void)before;
}

#define LINE 16 /* floats of a line of memory */

static int64_t whole_lines(int64_t floats) { return (floats + LINE - 1) / LINE * LINE; }

/* Points `work` to a thread's temporaries in `room`; returns the floats they take, also where `room` is 0. */
static int64_t carve(const AttentionKernels *kernels, Work *work, float *room, int64_t dim, int64_t rows)
{
    float **parts[] = {&work->q, &work->keys, &work->values, &work->scores, &work->sums, &work->part, &work->whole};
    const int64_t sizes[] = {rows * dim, dim * kernels->sizes.keys, dim * kernels->sizes.values, kernels->sizes.scores,
                             rows * 16, rows * row_stride(dim), rows * row_stride(dim)};
    int64_t taken = 0;
    for (int i = 0; i < 7; i++) {
        *parts[i] = room ? room + taken : 0;
        taken += whole_lines(sizes[i]);
    }
    work->rows = room ? (Row *)(room + taken) : 0;
    return taken + whole_lines(rows * (int64_t)(sizeof(Row) / sizeof(float)));
}

static void clear(float *whole, int64_t dim, int64_t rows)
{
    for (int64_t r = 0; r < rows; r++, whole += row_stride(dim)) {
        for (int64_t i = 0; i < row_stride(dim); i++)
            whole[i] = 0.0f;
        whole[dim] = EMPTY;
    }
}

/* Copies the running results of a block of rows to `whole`, or back. */
static void carry(const Attention *call, int64_t kv_head, int64_t first, int64_t rows, float *whole, int back)
{
    const int64_t group = call->num_heads / call->num_kv_heads, stride = row_stride(call->head_dim);
    for (int64_t r = 0; r < rows; r++, whole += stride) {
        const int64_t head = kv_head * group + (first + r) % group, i = (first + r) / group;
        float *running = (float *)call->running + head * call->running_head + i * stride;
        memcpy(back ? running : whole, back ? whole : running, stride * sizeof(float));
    }
}

/* The multiplications of a call, as if every row saw all keys that one of them sees. */
static int64_t work_of(const Attention *call)
{
    int64_t start, stop, ignored;
    visible(call, 0, &start, &ignored);
    visible(call, call->n - 1, &ignored, &stop);
    return call->num_heads * call->n * call->head_dim * (stop - start);
}

/* Query rows of a KV head that are computed together. One thread owns them: it computes with one split after another, from the
 * first on, and joins the results as it goes. A thread that finds no block without an owner helps with the last splits of one that
 * has memory for that; those blocks come last. Whoever is done last joins the results of those splits and writes the rows. What
 * threads write is on lines of its own: others would wait for it. */
typedef struct {
    int64_t kv_head, first, rows, splits;
    int64_t taken;  /* splits that threads have taken; counted on when there are none any more */
    int64_t helped; /* those of them that helpers have, the last ones */
    int64_t done;   /* splits, and one more once the owner takes none any more */
    int64_t joined; /* splits, by the owner */
    float *parts;   /* of helpers, as in Work, one for each split; 0: none may help */
    float *whole;   /* of the owner; 0: it is in its own memory */
    char line[48];
} Block;

/* Adds to a number that threads share; returns what it was. */
static int64_t add(int64_t *number, int64_t some)
{
#ifdef __GNUC__
    return __atomic_fetch_add(number, some, __ATOMIC_ACQ_REL);
#else
    return (*number += some) - some; /* without kernels there is nothing to share */
#endif
}

static int64_t load(const int64_t *number)
{
#ifdef __GNUC__
    return __atomic_load_n(number, __ATOMIC_RELAXED);
#else
    return *number;
#endif
}

/* What threads share of a call. */
typedef struct {
    const Attention *call;
    const AttentionKernels *kernels;
    Block *blocks;
    int64_t num_blocks, num_shared; /* the last `num_shared` ones have memory for helpers' results */
    int64_t first_split, part_size;
    int64_t *taken; /* those that have an owner; counted on when all have */
} Blocks;

/* Says that `some` more of a block's `done` are; writes its rows if they are the last. */
static void count_done(const Blocks *all, Block *block, int64_t some, Work *work)
{
    const Attention *call = all->call;
    if (add(&block->done, some) + some <= block->splits)
        return;
    if (block->whole)
        work->whole = block->whole;
    for (int64_t split = block->joined; split < block->splits; split++)
        all->kernels->merge(call->head_dim, block->rows, block->parts + split * all->part_size, work->whole);
    if (call->running)
        carry(call, block->kv_head, block->first, block->rows, work->whole, 1);
    all->kernels->finish(call, block->kv_head, block->first, block->rows, work);
}

/* Computes a block as its owner. */
static void compute(const Blocks *all, Block *block, Work *work)
{
    const Attention *call = all->call;
    all->kernels->prepare(call, block->kv_head, block->first, block->rows, work);
    if (block->whole)
        work->whole = block->whole;
    if (call->running)
        carry(call, block->kv_head, block->first, block->rows, work->whole, 0);
    else
        clear(work->whole, call->head_dim, block->rows);
    for (; add(&block->taken, 1) < block->splits; block->joined++) {
        all->kernels->part(call, block->kv_head, block->rows, all->first_split + block->joined, work, work->part);
        all->kernels->merge(call->head_dim, block->rows, work->part, work->whole);
    }
    count_done(all, block, block->joined + 1, work);
}

/* Helps with the block of which the most is left: with a share of it, less and less towards its end; returns 0 if nothing is left. */
static int help(const Blocks *all, int64_t threads, Work *work)
{
    Block *block = 0;
    int64_t most = 0;
    for (int64_t i = all->num_blocks - all->num_shared; i < all->num_blocks; i++) {
        const int64_t left = all->blocks[i].splits - load(&all->blocks[i].taken);
        if (left > most) {
            most = left;
            block = all->blocks + i;
        }
    }
    if (!block)
        return 0;
    const int64_t some = larger(1, most / (2 * threads)), got = smaller(some, block->splits - add(&block->taken, some));
    if (got <= 0)
        return 1; /* others were faster */
    const int64_t stop = block->splits - add(&block->helped, got);
    all->kernels->prepare(all->call, block->kv_head, block->first, block->rows, work);
    for (int64_t split = stop - got; split < stop; split++)
        all->kernels->part(
            all->call, block->kv_head, block->rows, all->first_split + split, work, block->parts + split * all->part_size);
    count_done(all, block, got, work);
    return 1;
}

/* The keys of a KV head from the first one on that position `i` of the query sees. */
static HeadKeys keys_of(const Attention *call, int64_t kv_head, int64_t i)
{
    int64_t start, ignored;
    visible(call, i, &start, &ignored);
    return (HeadKeys){call, kv_head, start / TILE * TILE};
}

/* What thread `me` of `threads` is likely to compute after block `i` of these: one in the same order; or of the `num_next` calls that
 * come next the one with its number, of a single one the KV head with its number. */
static HeadKeys likely_next(const Blocks *all, int64_t i, int me, int threads, const Attention *next, int64_t num_next)
{
    const Attention *call = all->call;
    if (i + threads < all->num_blocks) {
        const Block *block = all->blocks + i + threads;
        return keys_of(call, block->kv_head, block->first * call->num_kv_heads / call->num_heads);
    }
    if (num_next == 1)
        return me < next->num_kv_heads ? keys_of(next, me, 0) : (HeadKeys){0};
    return me < num_next ? keys_of(next + me, 0, 0) : (HeadKeys){0};
}

/* One of the calls of `triforce_attend`, by up to `most` threads; see `likely_next`. */
static int attend(const Attention *given, int most, const Attention *next, int64_t num_next)
{
    Attention copy = *given;
    if (copy.diagonal_at)
        copy.diagonal = *(const int64_t *)copy.diagonal_at;
    const Attention *call = &copy;
    const AttentionKernels *kernels = kernels_for(call->level, call->type);
    if (!kernels)
        return 2;
    const int64_t dim = call->head_dim, heads = call->num_kv_heads, all_rows = call->num_heads / heads * call->n;
    const int64_t row_block = kernels->row_block, blocks = (all_rows + row_block - 1) / row_block;
    const int64_t block_rows = (smaller(all_rows, row_block) + ROWS - 1) / ROWS * ROWS;
    int64_t start, stop, ignored;
    visible(call, 0, &start, &ignored);
    visible(call, call->n - 1, &ignored, &stop);
    const int64_t first_split = start / SPLIT, splits = start < stop ? (stop + SPLIT - 1) / SPLIT - first_split : 0;
    const int threads = work_of(call) < SMALL_WORK ? 1 : most;
    const int64_t part_size = block_rows * row_stride(dim), num_blocks = heads * blocks;
    const int64_t of_block = (1 + splits) * part_size, most_parts = num_blocks < threads ? SHARED_PARTS : EVEN_PARTS;
    const int64_t num_shared = threads > 1 && splits > 1 ? smaller(num_blocks, most_parts / of_block) : 0;

    Work sizes;
    const int64_t own_floats = carve(kernels, &sizes, 0, dim, block_rows);
    const int64_t num_peaks = call->mass ? whole_lines(call->num_heads * call->mass_rows * num_tiles(call)) : 0;
    const int64_t list = whole_lines(num_blocks * (int64_t)(sizeof(Block) / sizeof(float)));
    const int64_t floats = own_floats * threads + num_peaks + num_shared * of_block + list + 2 * LINE;
    float *room = take_room(floats);
    if (!room)
        return 1;
    float *aligned = (float *)(((uintptr_t)room + 63) / 64 * 64);
    float *peaks = aligned + own_floats * threads, *parts = peaks + num_peaks;
    int64_t *taken = (int64_t *)(parts + num_shared * of_block + list);
    *taken = 0;
    Blocks all = {call, kernels, (Block *)(parts + num_shared * of_block), num_blocks, num_shared, first_split, part_size, taken};
    for (int64_t i = 0; i < num_blocks; i++) { /* the last rows see the most keys, so they are computed first */
        const int64_t first = (blocks - 1 - i / heads) * row_block, rows = smaller(row_block, all_rows - first);
        visible(call, (first + rows - 1) * heads / call->num_heads, &ignored, &stop);
        all.blocks[i] = (Block){.kv_head = i % heads, .first = first, .rows = rows};
        all.blocks[i].splits = larger(0, smaller(splits, (stop + SPLIT - 1) / SPLIT - first_split));
        if (i >= num_blocks - num_shared) {
            all.blocks[i].whole = parts + (i - num_blocks + num_shared) * of_block;
            all.blocks[i].parts = all.blocks[i].whole + part_size;
        }
    }

#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Work work;
#ifdef _OPENMP
        const int me = omp_get_thread_num();
#else
        const int me = 0;
#endif
        const unsigned before = flush_small();
        if (kernels->begin)
            kernels->begin();
        carve(kernels, &work, aligned + own_floats * me, dim, block_rows);
        work.peaks = peaks;
        work.next = (HeadKeys){0};
        for (int64_t i; (i = add(all.taken, 1)) < num_blocks;) {
            work.next = likely_next(&all, i, me, threads, next, num_next);
            compute(&all, all.blocks + i, &work);
        }
        while (num_shared && help(&all, threads, &work))
            ;
        if (kernels->end)
            kernels->end();
        restore_small(before);
    }
    give_room_back(room, floats);
    return 0;
}

/* `triforce_attend`, where `num_next` calls `next` come next. */
static int attend_all(const Attention *calls, int64_t count, const Attention *next, int64_t num_next)
{
    if (count == 1)
        return attend(calls, triforce_threads(calls->threads), next, num_next);
    int64_t whole = 0, longest = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t work = work_of(calls + i);
        whole += work;
        longest = larger(longest, work);
    }
    const int threads = whole < SMALL_WORK ? 1 : triforce_threads(calls->threads);
    int failed = 0;
    if (longest < SMALL_WORK || longest <= whole / threads) { /* each call is one thread's */
        const int some = (int)smaller(threads, count);
#pragma omp parallel for num_threads(some) if (some > 1) schedule(dynamic, 1) reduction(max : failed)
        for (int64_t i = 0; i < count; i++) {
            const int64_t later = i + some - count; /* of the next ones; below 0 of these */
            const Attention *then = later < 0 ? calls + i + some : later < num_next ? next + later : 0;
            const int here = attend(calls + i, 1, then, then != 0);
            failed = here > failed ? here : failed;
        }
    } else
        for (int64_t i = 0; i < count && !failed; i++)
            failed = attend(calls + i, threads, i + 1 < count ? calls + i + 1 : next, i + 1 < count ? 1 : num_next);
    return failed;
}

int triforce_attend(const Attention *calls, int64_t count)
{
    return attend_all(calls, count, 0, 0);
}

int triforce_take_step(const int64_t *addresses, const StepCopy *copies, int64_t num_copies, Attention *calls,
                       const StepPlace *places, const int64_t *groups, int64_t num_groups, float *running, int64_t running_rows)
{
    for (const StepCopy *copy = copies; copy < copies + num_copies; copy++)
        for (int64_t h = 0; h < copy->heads; h++)
            for (int64_t r = 0; r < copy->n; r++) {
                char *to = (char *)addresses[copy->cache] + copy->into + h * copy->into_head + r * copy->into_row;
                memcpy(to, (const char *)copy->from + h * copy->from_head + r * copy->from_row, copy->bytes);
            }
    if (running)
        clear(running, calls->head_dim, running_rows);
    Attention *call = calls;
    for (int64_t group = 0; group < num_groups; group++)
        for (int64_t i = 0; i < groups[group]; i++, call++, places++) {
            call->k = addresses[places->k] + places->k_at;
            call->v = addresses[places->v] + places->v_at;
        }
    int failed = 0;
    for (int64_t group = 0; group < num_groups && !failed; calls += groups[group], group++)
        failed = attend_all(calls, groups[group], calls + groups[group], group + 1 < num_groups ? groups[group + 1] : 0);
    return failed;
}
