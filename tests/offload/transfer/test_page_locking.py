"""Page-locked memory: whole blocks a piece, one owner a page, an error that is not left to others, and progress."""

import gc
import math
import mmap
import os
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triforce.offload.limits import MOST_TOGETHER
from triforce.offload.transfer.page_locking import lockable, locked_memory, pieces
from triforce.tp.errors import CapacityError


class Runtime:
    """Notes what it is asked for, and refuses more than `most` bytes."""

    def __init__(self, most=math.inf):
        self.most, self.locked, self.errors = most, {}, 0

    def lock_pages(self, address, size):
        if sum(self.locked.values()) + size > self.most:
            self.errors += 1
            return 2
        self.locked[address] = size
        return 0

    def unlock_pages(self, address):
        del self.locked[address]

    def clear_error(self):
        self.errors = 0


SMALL = 10 * mmap.PAGESIZE
"""Bytes of a piece."""


@given(block=st.integers(1, 5 * 4096).map(lambda n: 2 * n), blocks=st.integers(1, 60))
def test_neither_a_block_nor_a_page_is_in_two_pieces(block, blocks):
    size = blocks * block
    found = pieces(size, block, SMALL)
    assert [first for first, _ in found[1:]] == [stop for _, stop in found[:-1]]
    assert (found[0][0], found[-1][1]) == (0, size)
    for first, _ in found:
        assert first % block == 0
        assert first % mmap.PAGESIZE == 0
    largest = max(stop - first for first, stop in found)
    assert largest <= max(SMALL, math.lcm(block, mmap.PAGESIZE))


@pytest.mark.parametrize("shape", [(40, 2, 3, 64, 16), (7, 100), (1, 5), (300_000,)])
@pytest.mark.slow(keep=2)
def test_every_byte_is_locked_once_and_freed_with_the_tensor(shape):
    runtime = Runtime()
    memory = locked_memory(shape, torch.float16, runtime, largest_piece=SMALL)
    assert memory.shape == shape and memory.dtype == torch.float16
    assert not memory.any()
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    stretches = sorted((start, start + size) for start, size in runtime.locked.items())
    assert stretches[0][0] == memory.data_ptr()
    assert stretches[-1][1] == memory.data_ptr() + memory.numel() * 2
    assert all(one[1] == two[0] for one, two in pairwise(stretches))
    view = memory[0]
    del memory
    gc.collect()
    assert runtime.locked, "a view keeps it"
    del view
    gc.collect()
    assert not runtime.locked


def test_blocks_that_are_copied_together_are_in_one_piece_however_large():
    runtime = Runtime()
    memory = locked_memory((2 * MOST_TOGETHER + 1, 3 * mmap.PAGESIZE), torch.uint8, runtime, largest_piece=4096)
    assert set(runtime.locked) == {block.data_ptr() for block in memory[::MOST_TOGETHER]}


def test_a_refusal_says_how_much_there_is_and_leaves_neither_locks_nor_an_error():
    runtime = Runtime(most=25 * mmap.PAGESIZE)
    with pytest.raises(CapacityError, match="ulimit -l"):
        locked_memory((40, mmap.PAGESIZE), torch.uint8, runtime, largest_piece=SMALL)
    gc.collect()
    assert not runtime.locked
    assert runtime.errors == 0


@pytest.mark.parametrize(("most", "found"), [(math.inf, 64), (40, 32), (16, 16), (3, 0)])
def test_what_can_be_locked_is_found_and_unlocked_again(most, found):
    runtime = Runtime(most * mmap.PAGESIZE)
    size, seconds = lockable(runtime, 64 * mmap.PAGESIZE, least=4 * mmap.PAGESIZE)
    assert size == found * mmap.PAGESIZE and (seconds > 0) == (found > 0)
    gc.collect()
    assert not runtime.locked


def test_no_blocks_are_no_memory():
    runtime = Runtime()
    assert locked_memory((0, 2, 64), torch.float32, runtime).shape == (0, 2, 64)
    assert not runtime.locked


@pytest.mark.parametrize("mode", [True, False])
def test_memory_is_made_by_several_threads_in_any_mode(monkeypatch, mode):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    with torch.inference_mode(mode):
        memory = locked_memory((30, mmap.PAGESIZE), torch.uint8, Runtime(), pages_a_thread=2)
        assert not memory.any()
