"""Host memory in pages: aligned, its own, and a clear error where the system gives none."""

import errno
import gc
import mmap
import os
import weakref

import pytest
import torch
from triforce.tp.errors import CapacityError
from triforce.tp.pages import HUGE_PAGE, _Pieces, aligned_memory, lasting_memory, weight_memory


@pytest.mark.parametrize("shape", [(0,), (3, 100), (5, 2**20 + 8), (2**21,)])
def test_memory_begins_with_a_page_and_lives_as_long_as_its_views(shape):
    memory = aligned_memory(shape, torch.uint8)
    assert memory.shape == shape and (not memory.numel() or memory.data_ptr() % mmap.PAGESIZE == 0)
    wide = aligned_memory((2, *shape), torch.bfloat16)
    assert wide.dtype == torch.bfloat16 and wide.shape == (2, *shape)
    memory.fill_(7)
    view = memory.view(-1)[-5:]
    del memory
    gc.collect()
    aligned_memory(shape, torch.uint8).fill_(9)
    assert (view == 7).all()


def test_memory_that_the_system_does_not_give_is_an_error_that_says_how_much(monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refused)
    with pytest.raises(CapacityError, match=r"refuses 3\.00 GiB of host memory \(Cannot allocate memory\)"):
        aligned_memory((3, 2**30), torch.uint8)


@pytest.mark.parametrize("shape", [(0,), (3, 100), (7, 2**16 + 3), (5, 2**20 + 8), (4, 2**21)])
def test_memory_that_lasts_begins_with_a_huge_page_and_has_nothing_besides(shape):
    memory = lasting_memory(shape, torch.float32, torch.device("cpu"))
    assert memory.shape == shape and memory.dtype == torch.float32 and memory.is_contiguous()
    assert memory.nbytes < HUGE_PAGE or memory.data_ptr() % HUGE_PAGE == 0
    assert memory.untyped_storage().nbytes() == memory.nbytes
    memory.fill_(7)
    view = memory.view(-1)[-5:]
    del memory
    gc.collect()
    lasting_memory(shape, torch.float32, torch.device("cpu")).fill_(9)
    assert (view == 7).all()


def test_weights_are_put_into_few_pieces_and_keep_their_numbers():
    sizes = [100, 2**16, 3 * 2**18 + 5, 2**20, 3 * 2**20, 2**25, *[7 * 2**17] * 40]
    weights = [weight_memory((size,), torch.uint8, torch.device("cpu")).fill_(i) for i, size in enumerate(sizes)]
    assert all((weight == i).all() and len(weight) == sizes[i] for i, weight in enumerate(weights))
    large = [weight for weight in weights if len(weight) >= 2**16]
    assert all(weight.data_ptr() % mmap.PAGESIZE == 0 for weight in large)
    assert len({weight.data_ptr() >> 25 for weight in large}) < 9 < len(large)
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in large)
    again = weights[-1]
    del weights, large
    gc.collect()
    [weight_memory((2**20,), torch.uint8, torch.device("cpu")).fill_(9) for _ in range(60)]
    assert (again == len(sizes) - 1).all()


def test_weights_come_where_those_were_that_they_were_put_together_from():
    pieces, held, parts, taken = _Pieces(), [], [], set()

    def weight(size, number):
        found = pieces.take(size).fill_(number)
        first = found.data_ptr() // mmap.PAGESIZE
        taken.update(range(first, first - (-size // mmap.PAGESIZE)))
        return found

    for layer in range(64):
        sizes = (2**19, 2**20 + layer, 2**19)  # that are not quite alike
        parts = [weight(size, number) for number, size in enumerate(sizes, 100)]
        held.append(weight(2**21 + 5, layer))
        assert all((part == number).all() for number, part in enumerate(parts, 100))
    assert all((one == layer).all() for layer, one in enumerate(held))
    size = sum(len(one) for one in held)
    assert size < len(taken) * mmap.PAGESIZE < 1.2 * size
    kept = [weakref.ref(room.pages()) for room in pieces._rooms if room.pages()]
    assert kept
    del held, parts
    gc.collect()
    assert not any(piece() for piece in kept)


def test_of_thousands_of_pieces_few_rooms_are_kept():
    pieces = _Pieces()
    held = [pieces.take(2**24 + 5) for _ in range(200)]  # nothing is written
    assert len(pieces._rooms) <= 64 and len({one.data_ptr() for one in held}) == 200
