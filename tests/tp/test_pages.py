"""Host memory in pages: aligned, its own, and a clear error where the system gives none."""

import errno
import gc
import mmap
import os
import random
import weakref

import pytest
import torch
from forks import resident
from triforce.tp.errors import CapacityError
from triforce.tp.pages import HUGE_PAGE, _Pieces, _Reserve, aligned_memory, lasting_memory, weight_memory


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


def taken(reserve, size, *alignment):
    found = reserve.take(size, *alignment)
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_reserve_gives_each_page_to_one_tensor_and_takes_it_back(seed):
    chance = random.Random(seed)
    size = 12 * HUGE_PAGE + 5 * mmap.PAGESIZE
    reserve, held, found = _Reserve(size), {}, None
    assert reserve.free_bytes == size
    for number in range(600):
        if held and chance.random() < 0.45:
            del held[chance.choice(list(held))]
        wanted, alignment = int(2 ** chance.uniform(10, 23)), chance.choice([mmap.PAGESIZE, HUGE_PAGE])
        found = None  # the one before, if it is not held
        free = reserve.free_bytes
        found = reserve.take(wanted, alignment)
        if found is None:
            assert reserve.free_bytes == free
            continue
        assert len(found) == wanted == found.untyped_storage().nbytes() and found.data_ptr() % alignment == 0
        assert reserve.has(found) and reserve.free_bytes == free - -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE
        held[number] = found.fill_(number % 251)
        assert all((one == of % 251).all() for of, one in held.items())
    assert held and not reserve.has(torch.empty(2**20))
    held.clear()
    del found
    assert reserve.free_bytes == size and reserve.take(size + 1) is None
    assert len(taken(reserve, size)) == size
    assert len(taken(reserve, 12 * HUGE_PAGE, HUGE_PAGE)) == 12 * HUGE_PAGE


def test_a_view_keeps_its_part_of_a_reserve():
    reserve = _Reserve(2**20)
    view = taken(reserve, 2**20).fill_(7).view(torch.int32).view(4, -1)[2:]
    assert reserve.take(1) is None and reserve.free_bytes == 0
    assert (view == 0x07070707).all()
    del view
    assert reserve.free_bytes == 2**20


def test_what_finds_no_room_in_one_range_is_exchanged_for_pages_of_several():
    """This process does not grow."""
    odd = 5 * mmap.PAGESIZE
    reserve = _Reserve(16 * (HUGE_PAGE + odd))
    parts = [taken(reserve, HUGE_PAGE + odd).fill_(number) for number in range(16)]
    kept = parts[::2]
    del parts
    free, size = reserve.free_bytes, 4 * HUGE_PAGE + 77
    assert free == 8 * (HUGE_PAGE + odd) and reserve.take(size) is None
    before = resident()
    for number in range(4):
        with torch.inference_mode(number % 2 == 0):
            found = reserve.exchange(size)
        assert found is not None and reserve.has(found) and len(found) == size == found.untyped_storage().nbytes()
        assert found.data_ptr() % HUGE_PAGE == 0 and abs(resident() - before) < HUGE_PAGE
        found.numpy()[:] = 100 + number
        assert reserve.free_bytes == free - 4 * HUGE_PAGE - mmap.PAGESIZE and abs(resident() - before) < HUGE_PAGE
        assert reserve.exchange(reserve.free_bytes + 1) is None
        view = found[3:].view(-1, 2)
        del found
        assert (view[::999] == 100 + number).all()  # all of it would take memory to compare
        with torch.inference_mode(number > 1):
            del view
        assert reserve.free_bytes == free and abs(resident() - before) < HUGE_PAGE and not reserve._exchanged
    others = [taken(reserve, HUGE_PAGE + odd).fill_(7) for _ in range(8)]
    assert abs(resident() - before) < HUGE_PAGE and reserve.free_bytes == 0
    assert all((part == 2 * number).all() for number, part in enumerate(kept))
    assert all((part == 7).all() for part in others) and reserve.exchange(1) is None
