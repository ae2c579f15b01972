/* Packing of keys and values in bfloat16; kernels/packing.py documents the format.
 *
 * A tile is 64 tokens of all channels of a head. Its loops run over channels, which are contiguous in all memory that they
 * read and write. They are compiled once for each instruction set, and compilers turn them into vector instructions. */

#include "cpu.h"

#include <string.h>

#define GROUP 64    /* tokens that share the largest exponent of a channel */
#define FARTHEST 15 /* below it, without being an exception */
#define SMALL_WORK ((int64_t)1 << 17) /* values below which starting other threads takes longer than it saves */

typedef struct {
    const Packing *call;
    uint16_t *values; /* the tile's first value; tokens are `call->token_stride` apart */
    uint8_t *slot;    /* of the tile's block */
    int64_t index;    /* of the tile in its block */
} Tile;

/* `pack` returns the number of exceptions in the tile. */
typedef struct {
    int64_t (*pack)(const Tile *tile);
    void (*unpack)(const Tile *tile);
} PackingKernels;

INLINE uint8_t exponent_of(uint16_t value) { return (uint8_t)(value >> 7); } /* which cuts off the sign */
INLINE uint8_t byte_of(uint16_t value) { return (uint8_t)((value >> 8 & 0x80) | (value & 0x7f)); }
INLINE uint8_t clipped(uint8_t distance) { return distance < FARTHEST ? distance : FARTHEST; }

INLINE uint16_t value_of(uint8_t byte, uint16_t exponent) /* the exponent in its place, other bits ignored */
{
    return (uint16_t)(((uint16_t)(int8_t)byte & 0x807f) | (exponent & 0x7f80));
}

INLINE uint32_t word_at(const uint8_t *place)
{
    uint32_t word;
    memcpy(&word, place, 4);
    return word;
}

INLINE void find_largest(const uint16_t *__restrict values, int64_t stride, int64_t dim, uint8_t *__restrict largest)
{
    memset(largest, 0, dim);
    for (int64_t token = 0; token < GROUP; token++)
        for (int64_t i = 0; i < dim; i++) {
            const uint8_t exponent = exponent_of(values[token * stride + i]);
            largest[i] = exponent > largest[i] ? exponent : largest[i];
        }
}

/* Packs two tokens; returns the greatest distance below `largest`. */
INLINE uint8_t pack_pair(const uint16_t *__restrict even, const uint16_t *__restrict odd, int64_t dim,
                         const uint8_t *__restrict largest, uint8_t *__restrict bytes, uint8_t *__restrict below)
{
    uint8_t farthest = 0;
    for (int64_t i = 0; i < dim; i++) {
        const uint8_t a = (uint8_t)(largest[i] - exponent_of(even[i])), b = (uint8_t)(largest[i] - exponent_of(odd[i]));
        const uint8_t farther = a > b ? a : b;
        farthest = farther > farthest ? farther : farthest;
        bytes[i] = byte_of(even[i]);
        bytes[dim + i] = byte_of(odd[i]);
        below[i] = (uint8_t)(clipped(a) | clipped(b) << 4);
    }
    return farthest;
}

INLINE int64_t count_exceptions(const uint16_t *__restrict values, int64_t stride, int64_t dim,
                                const uint8_t *__restrict largest)
{
    int64_t count = 0;
    for (int64_t token = 0; token < GROUP; token++)
        for (int64_t i = 0; i < dim; i++)
            count += largest[i] - exponent_of(values[token * stride + i]) > FARTHEST;
    return count;
}

INLINE int64_t pack_tile(const Tile *tile)
{
    const Packing *call = tile->call;
    const int64_t dim = call->head_dim, stride = call->token_stride, first = tile->index * GROUP * dim;
    uint8_t *largest = tile->slot + call->largest + tile->index * dim;
    uint8_t *bytes = tile->slot + first, *below = tile->slot + call->below + first / 2;
    uint8_t farthest = 0;
    find_largest(tile->values, stride, dim, largest);
    for (int64_t token = 0; token < GROUP; token += 2) {
        const uint16_t *even = tile->values + token * stride;
        const uint8_t here = pack_pair(even, even + stride, dim, largest, bytes + token * dim, below + token / 2 * dim);
        farthest = here > farthest ? here : farthest;
    }
    return farthest > FARTHEST ? count_exceptions(tile->values, stride, dim, largest) : 0;
}

INLINE void unpack_pair(const uint8_t *__restrict bytes, const uint8_t *__restrict below, int64_t dim,
                        const uint8_t *__restrict largest, uint16_t *__restrict even, uint16_t *__restrict odd)
{
    for (int64_t i = 0; i < dim; i++) {
        const uint16_t both = below[i], most = (uint16_t)(largest[i] << 7);
        even[i] = value_of(bytes[i], (uint16_t)(most - ((both & 0xf) << 7)));
        odd[i] = value_of(bytes[dim + i], (uint16_t)(most - ((both & 0xf0) << 3)));
    }
}

INLINE void unpack_tile(const Tile *tile)
{
    const Packing *call = tile->call;
    const int64_t dim = call->head_dim, stride = call->token_stride, first = tile->index * GROUP * dim;
    const uint8_t *largest = tile->slot + call->largest + tile->index * dim;
    const uint8_t *bytes = tile->slot + first, *below = tile->slot + call->below + first / 2;
    for (int64_t token = 0; token < GROUP; token += 2) {
        uint16_t *even = tile->values + token * stride;
        unpack_pair(bytes + token * dim, below + token / 2 * dim, dim, largest, even, even + stride);
    }
}

#define COMPILED_FOR(SET, TARGET)                                                       \
    TARGET static int64_t SET##_pack(const Tile *tile) { return pack_tile(tile); }      \
    TARGET static void SET##_unpack(const Tile *tile) { unpack_tile(tile); }            \
    static const PackingKernels SET = {SET##_pack, SET##_unpack};

COMPILED_FOR(plain, )
#if defined(__x86_64__) && defined(__GNUC__)
COMPILED_FOR(avx2, __attribute__((target("avx2,fma"))))
COMPILED_FOR(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2"))))
#endif

static const PackingKernels *kernels_for(int64_t level)
{
    if (level > triforce_cpu_level())
        return 0;
#if defined(__x86_64__) && defined(__GNUC__)
    if (level >= LEVEL_AVX512)
        return &avx512;
    if (level == LEVEL_AVX2)
        return &avx2;
#endif
    return &plain;
}

static int64_t tiles_of(const Packing *call) { return call->num_kv_heads * (call->tokens / GROUP); }

static int threads_for(const Packing *call)
{
    const int64_t values = call->num_blocks * call->num_kv_heads * call->tokens * call->head_dim;
    return values < SMALL_WORK ? 1 : (int)call->threads;
}

/* The tile `index` of all blocks'. */
static Tile tile_at(const Packing *call, int64_t index)
{
    const int64_t tiles = tiles_of(call), per_head = call->tokens / GROUP, block = index / tiles;
    Tile tile = {call, (uint16_t *)call->blocks, (uint8_t *)call->slots + block * call->slot_stride, index % tiles};
    tile.values += block * call->block_stride + tile.index / per_head * call->head_stride;
    tile.values += tile.index % per_head * GROUP * call->token_stride;
    return tile;
}

/* Makes counts (each behind its tile's place) into `starts`, and clears what is behind the last exception. */
static void finish(const Packing *call, uint8_t *slot)
{
    const int64_t tiles = tiles_of(call), groups = tiles * call->head_dim;
    uint32_t total = 0;
    memset(slot + call->starts, 0, 4);
    for (int64_t i = 1; i <= tiles; i++) {
        total += word_at(slot + call->starts + 4 * i);
        memcpy(slot + call->starts + 4 * i, &total, 4);
    }
    const int64_t used = total < call->capacity ? total : call->capacity;
    memset(slot + call->exceptions + 4 * used, 0, 4 * (call->capacity - used));
    memset(slot + call->largest + groups, 0, call->slot_bytes - call->largest - groups);
}

static void write_exceptions(const Tile *tile)
{
    const Packing *call = tile->call;
    const uint8_t *starts = tile->slot + call->starts + 4 * tile->index;
    const uint8_t *largest = tile->slot + call->largest + tile->index * call->head_dim;
    int64_t place = word_at(starts), stop = word_at(starts + 4);
    stop = stop < call->capacity ? stop : call->capacity;
    for (int64_t token = 0; token < GROUP && place < stop; token++)
        for (int64_t i = 0; i < call->head_dim && place < stop; i++) {
            const uint8_t exponent = exponent_of(tile->values[token * call->token_stride + i]);
            if (largest[i] - exponent > FARTHEST) {
                const uint32_t entry = (uint32_t)(token * call->head_dim + i) << 8 | exponent;
                memcpy(tile->slot + call->exceptions + 4 * place++, &entry, 4);
            }
        }
}

/* Reads no more than the slot, whatever is in it. */
static void read_exceptions(const Tile *tile)
{
    const Packing *call = tile->call;
    const uint8_t *starts = tile->slot + call->starts + 4 * tile->index;
    const uint8_t *bytes = tile->slot + tile->index * GROUP * call->head_dim;
    int64_t stop = word_at(starts + 4);
    stop = stop < call->capacity ? stop : call->capacity;
    for (int64_t i = word_at(starts); i < stop; i++) {
        const uint32_t entry = word_at(tile->slot + call->exceptions + 4 * i);
        const int64_t position = entry >> 8;
        if (position < GROUP * call->head_dim)
            tile->values[position / call->head_dim * call->token_stride + position % call->head_dim] =
                value_of(bytes[position], (uint16_t)((entry & 0xff) << 7));
    }
}

int triforce_pack(const Packing *call)
{
    const PackingKernels *kernels = kernels_for(call->level);
    if (!kernels)
        return 2;
    const int64_t tiles = tiles_of(call) * call->num_blocks;
    const int threads = threads_for(call);
    (void)threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int64_t i = 0; i < tiles; i++) {
            const Tile tile = tile_at(call, i);
            const uint32_t count = (uint32_t)kernels->pack(&tile);
            memcpy(tile.slot + call->starts + 4 * (tile.index + 1), &count, 4);
        }
#pragma omp for
        for (int64_t block = 0; block < call->num_blocks; block++)
            finish(call, (uint8_t *)call->slots + block * call->slot_stride);
#pragma omp for
        for (int64_t i = 0; i < tiles; i++) {
            const Tile tile = tile_at(call, i);
            write_exceptions(&tile);
        }
    }
    return 0;
}

int triforce_unpack(const Packing *call)
{
    const PackingKernels *kernels = kernels_for(call->level);
    if (!kernels)
        return 2;
    const int64_t per_block = tiles_of(call), tiles = per_block * call->num_blocks;
    const int threads = threads_for(call);
    (void)threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < tiles; i++) {
        const Tile tile = tile_at(call, i);
        if (word_at(tile.slot + call->starts + 4 * per_block) > call->capacity)
            continue; /* the block is not in its slot */
        kernels->unpack(&tile);
        read_exceptions(&tile);
    }
    return 0;
}

/* A token of a head in its slot: reads no more than the slot, whatever is in it. */
static void gather_token(const Packing *call, const uint8_t *slot, int64_t head, int64_t at,
                         uint16_t *__restrict values)
{
    const int64_t dim = call->head_dim, row = head * call->tokens + at, tile = row / GROUP, within = row % GROUP;
    const uint8_t *bytes = slot + row * dim, *below = slot + call->below + row / 2 * dim;
    const uint8_t *largest = slot + call->largest + tile * dim, *starts = slot + call->starts + 4 * tile;
    const int shift = row % 2 * 4;
    for (int64_t i = 0; i < dim; i++)
        values[i] = value_of(bytes[i], (uint16_t)((largest[i] << 7) - ((below[i] >> shift & 0xf) << 7)));
    int64_t stop = word_at(starts + 4);
    stop = stop < call->capacity ? stop : call->capacity;
    for (int64_t i = word_at(starts); i < stop; i++) {
        const uint32_t entry = word_at(slot + call->exceptions + 4 * i);
        const int64_t position = entry >> 8;
        if (position / dim == within)
            values[position % dim] = value_of(bytes[position % dim], (uint16_t)((entry & 0xff) << 7));
    }
}

int triforce_gather(const Packing *call, const int64_t *tokens, int64_t first_head, int64_t heads, int64_t count)
{
    const int threads = heads * count * call->head_dim < SMALL_WORK ? 1 : (int)call->threads;
    (void)threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < heads * count; i++) {
        const int64_t block = tokens[i] / call->tokens;
        uint16_t *values = (uint16_t *)call->blocks + i * call->head_dim;
        if (tokens[i] < 0 || block >= call->num_blocks)
            memset(values, 0, 2 * call->head_dim);
        else
            gather_token(call, (const uint8_t *)call->slots + block * call->slot_stride, first_head + i / count,
                         tokens[i] % call->tokens, values);
    }
    return 0;
}
