"""All implementations of packing write the same bytes and read the same values."""

import functools
import os
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies
from oracles import EVERY_VALUE, KV_KINDS, damaged_slots, kv_block
from profiles import examples
from triforce.kernels.cpu.library import PackingCall, cpu_level, loaded
from triforce.kernels.cpu.packing import pack_compiled, unpack_compiled
from triforce.kernels.packing import gather_packed, gather_plain, is_packed, pack, pack_plain, unpack_plain
from triforce.kernels.slots import GROUP, Layout

ROOT = Path(__file__).parents[2]
LEVELS = ["plain C", "AVX2", "AVX-512"]


def implementations():
    """Those that run on this machine's CPU, without Triton's interpreter, by name."""
    found = {"PyTorch": (pack_plain, unpack_plain)}
    for level, name in enumerate(LEVELS):
        if loaded() is not None and level <= cpu_level():
            found[name] = (
                functools.partial(pack_compiled, level=level),
                functools.partial(unpack_compiled, level=level),
            )
    return found


def bits(values):
    return values.view(torch.int16)


def check(blocks):
    """That blocks `[num_blocks, num_kv_heads, tokens, head_dim]` come back where they fit, from the same bytes.

    Returns which of them do.
    """
    layout = Layout(*blocks.shape[1:])
    wanted = None
    for name, (pack_with, unpack_with) in implementations().items():
        slots = torch.full((len(blocks), layout.slot_bytes), 0xAA, dtype=torch.uint8)
        pack_with(blocks, slots, layout)
        wanted = slots if wanted is None else wanted
        assert torch.equal(slots, wanted), f"{name} packs otherwise at {(slots != wanted).nonzero()[0].tolist()}"
        fits = is_packed(slots, layout)
        got = torch.full_like(blocks, 7.0)
        unpack_with(slots, got, layout)
        back = torch.where(fits.view(-1, 1, 1, 1), bits(blocks), bits(torch.full_like(blocks, 7.0)))
        assert torch.equal(bits(got), back), f"{name} gives other values back"
    assert wanted is not None
    return is_packed(wanted, layout)


def test_every_value_comes_back_from_every_position_of_a_group():
    """In groups of values that differ in the last bits of their mantissas."""
    values = EVERY_VALUE[torch.arange(2**16) ^ torch.arange(GROUP).unsqueeze(1)]  # all of them in each row
    assert check(values.unflatten(1, (8, 64, 128)).permute(1, 2, 0, 3).contiguous()).all()


@given(
    kind=strategies.sampled_from(KV_KINDS),
    blocks=strategies.integers(1, 3),
    num_kv_heads=strategies.integers(1, 3),
    groups=strategies.integers(1, 3),
    head_dim=strategies.sampled_from([1, 3, 16, 33, 64, 80, 128, 257]),
    seed=strategies.integers(0, 2**32 - 1),
)
@examples(200)
def test_random_blocks_are_the_same_bytes(kind, blocks, num_kv_heads, groups, head_dim, seed):
    values = kv_block(kind, (blocks, num_kv_heads, groups * GROUP, head_dim), seed)
    check(values)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads):
    blocks = kv_block("normal", (2, 4, 512, 64), 4)  # enough for several threads
    blocks[torch.rand(blocks.shape, generator=torch.Generator().manual_seed(5)) < 0.001] *= 2.0**-60
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert check(blocks).all()
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(loaded() is None, reason="the compiled kernels were not built")
def test_a_level_that_the_processor_has_not_is_refused():
    block = torch.zeros(1, 2, 64, 8, dtype=torch.bfloat16)
    slots, _ = pack(block)
    with pytest.raises(ValueError, match="level 99"):
        pack_compiled(block, slots, Layout(2, 64, 8), level=99)


def test_damaged_slots_give_some_values_and_no_error():
    blocks = kv_block("few any bits", (4, 2, 128, 16), 5)
    slots, layout = damaged_slots(blocks, 60, 6)
    for _, unpack_with in implementations().values():
        unpack_with(slots, torch.zeros(len(slots), *blocks.shape[1:], dtype=torch.bfloat16), layout)


FUZZED = """
#include "cpu.h"
#include <stdio.h>
#include <stdlib.h>

/* Unpacks the slots of a file, each from and to memory of exactly its size. Before them are the call's arguments. */
int main(int argc, char **argv)
{
    Packing call;
    FILE *file = argc == 2 ? fopen(argv[1], "rb") : 0;
    if (!file || fread(&call, sizeof call, 1, file) != 1)
        return 3;
    const int64_t values = call.num_kv_heads * call.tokens * call.head_dim, highest = call.level;
    for (int slots = 0;; slots++) {
        uint8_t *slot = malloc(call.slot_bytes);
        if (fread(slot, 1, call.slot_bytes, file) != (size_t)call.slot_bytes)
            return printf("%d slots", slots) < 0;
        for (call.level = 0; call.level <= highest; call.level++) {
            uint16_t *block = malloc(values * sizeof *block);
            call.slots = (intptr_t)slot;
            call.blocks = (intptr_t)block;
            if (triforce_unpack(&call))
                return 4;
            int64_t *tokens = malloc(call.tokens * sizeof *tokens);
            for (int64_t i = 0; i < call.tokens; i++)
                tokens[i] = call.tokens - 1 - i;
            for (int64_t head = 0; head < call.num_kv_heads; head++)
                if (triforce_gather(&call, tokens, head, 1, call.tokens))
                    return 5;
            free(tokens);
            free(block);
        }
        free(slot);
    }
}
"""


@pytest.mark.parametrize("shape", [(2, 128, 16), (1, 64, 33), (3, 64, 64), (1, 64, 1)], ids=str)
@pytest.mark.slow(keep=("(2, 128, 16)",))
def test_damaged_slots_read_and_write_nothing_beside_them(shape, tmp_path):
    """Under the compiler's address sanitizer, with the instructions of each level that the processor has."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, program = ROOT / "kernels" / "cpu" / "source", tmp_path / "fuzzed"
    (tmp_path / "fuzzed.c").write_text(FUZZED)
    sources = [tmp_path / "fuzzed.c", source / "packing.c", source / "features.c"]
    flags = ["-O2", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{source}", "-o", program]
    built = subprocess.run([compiler, *flags, *sources], capture_output=True, text=True, timeout=300)
    if built.returncode and any(missing in built.stderr for missing in ("-fsanitize", "asan", "ubsan")):
        pytest.skip("the C compiler has no address sanitizer")
    assert built.returncode == 0, built.stderr
    slots, layout = damaged_slots(kv_block("few any bits", (4, *shape), 7), 900, 8)
    call = PackingCall()
    call.num_blocks, call.num_kv_heads, call.tokens, call.head_dim = 1, *shape
    call.block_stride, call.head_stride, call.token_stride = layout.values, shape[1] * shape[2], shape[2]
    call.below, call.starts, call.exceptions = layout.below, layout.starts, layout.exceptions
    call.largest, call.slot_bytes, call.capacity = layout.largest, layout.slot_bytes, layout.capacity
    call.slot_stride, call.threads, call.level = layout.slot_bytes, 1, min(cpu_level(), len(LEVELS) - 1)
    (tmp_path / "slots").write_bytes(bytes(call) + slots.numpy().tobytes())
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}  # it cannot look for them in every container
    done = subprocess.run([program, tmp_path / "slots"], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "900 slots"), done.stderr


@given(
    kind=strategies.sampled_from(KV_KINDS),
    blocks=strategies.integers(1, 3),
    heads=strategies.integers(1, 3),
    groups=strategies.integers(1, 3),
    head_dim=strategies.sampled_from([1, 3, 16, 64]),
    seed=strategies.integers(0, 2**32 - 1),
)
@examples(100)
def test_gathered_tokens_are_the_same(kind, blocks, heads, groups, head_dim, seed):
    values = kv_block(kind, (blocks, 2 * heads, groups * GROUP, head_dim), seed)
    layout = Layout(2 * heads, groups * GROUP, head_dim)
    slots, fits = pack(values)
    tokens = torch.randint(blocks * layout.tokens, (heads, 40), generator=torch.Generator().manual_seed(seed))
    for first, gather in product((0, heads), (gather_packed, gather_plain)):
        got = gather(slots, layout, first, tokens)
        rows = values[:, first : first + heads].transpose(0, 1).flatten(1, 2)  # [heads, tokens, head_dim]
        want = rows.gather(1, tokens.unsqueeze(2).expand(-1, -1, head_dim))
        there = fits[tokens // layout.tokens]
        assert torch.equal(bits(got)[there], bits(want)[there])


@pytest.mark.parametrize("seed", range(3))
def test_gathering_from_damaged_slots_reads_nothing_else(seed):
    blocks = kv_block("far below", (8, 2, 2 * GROUP, 16), seed)
    slots, layout = damaged_slots(blocks, 24, seed)
    for gather in (gather_packed, gather_plain):
        gather(slots, layout, 0, torch.randint(24 * layout.tokens, (2, 60)))  # an index error otherwise
