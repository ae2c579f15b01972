"""Packing in Triton: the same bytes and the same values as plain PyTorch.

Without a GPU it runs under Triton's interpreter (see `conftest.py`); with one, the same tests run compiled.
"""

import pytest
import torch
from hypothesis import given, strategies
from oracles import EVERY_VALUE, KV_KINDS, damaged_slots, kv_block
from profiles import examples
from triforce.kernels.packing import is_packed, pack_plain, unpack_plain
from triforce.kernels.slots import GROUP, Layout
from triton_runs import both

from triforce.kernels.triton.packing import pack_triton, unpack_triton  # isort: skip (Triton may be missing until here)


def check(blocks, device):
    """That they are packed into the reference's bytes and come back from where they fit; returns which do."""
    layout = Layout(*blocks.shape[1:])
    wanted = torch.empty(len(blocks), layout.slot_bytes, dtype=torch.uint8)
    pack_plain(blocks, wanted, layout)
    slots = torch.full_like(wanted, 0xAA, device=device)
    pack_triton(blocks.to(device), slots, layout)
    assert torch.equal(slots.cpu(), wanted), f"differs at {(slots.cpu() != wanted).nonzero()[0].tolist()}"
    fits = is_packed(wanted, layout)
    got = torch.full_like(blocks, 7.0, device=device)
    unpack_triton(slots, got, layout)
    back = torch.where(fits.view(-1, 1, 1, 1), blocks.view(torch.int16), torch.full_like(blocks, 7.0).view(torch.int16))
    assert torch.equal(got.cpu().view(torch.int16), back)
    return fits


SHAPES = [(2, 2, 64, 64), (1, 3, 64, 80), (2, 1, 64, 128), (1, 1, 192, 17)]


@both
@pytest.mark.parametrize("kind", KV_KINDS)
def test_the_bytes_and_the_values_are_those_of_the_reference(device, kind):
    check(kv_block(kind, SHAPES[KV_KINDS.index(kind) % len(SHAPES)], 1), device)


@both
@given(
    kind=strategies.sampled_from(KV_KINDS),
    shape=strategies.sampled_from([(2, 1, 64, 64), (2, 1, 64, 80), (2, 1, 64, 128), (2, 2, 64, 1), (2, 1, 128, 33)]),
    seed=strategies.integers(0, 2**32 - 1),
)
@examples(100)
@pytest.mark.slow
def test_random_blocks_have_the_bytes_and_the_values_of_the_reference(device, kind, shape, seed):
    check(kv_block(kind, shape, seed), device)


@both
@pytest.mark.parametrize("part", [pytest.param(slice(0, 64), marks=pytest.mark.slow), slice(31, 33)], ids=str)
def test_every_value_comes_back_from_every_position_of_a_group(device, part):
    """`part`: of the tiles with 1,024 values each at every position; the fast ones have NaNs, infinities and zeros."""
    values = EVERY_VALUE[torch.arange(2**16) ^ torch.arange(GROUP).unsqueeze(1)]
    tiles = values.unflatten(1, (64, 1024)).transpose(0, 1)[part]
    assert check(tiles.unsqueeze(0).contiguous(), device).all()


@both
def test_exceptions_are_in_the_order_of_the_block(device):
    """Also where there are more than fit, and more in a tile than are read at once."""
    for count, fits in ((256, True), (257, False)):
        block = torch.ones(1, 4, 256, 128, dtype=torch.bfloat16)
        places = torch.randperm(block.numel() - 2**13, generator=torch.Generator().manual_seed(2))[: count - 150]
        block.view(-1)[2**13 + places] = 2.0**-40
        block.view(-1)[1 : 2**13 : 53][:150] = 2.0**-50  # in the first tile
        assert check(block, device).tolist() == [fits]


@both
def test_strides_are_the_callers(device):
    blocks = kv_block("some zeros", (2, 2, 128, 64), 3)
    layout = Layout(*blocks.shape[1:])
    wanted = torch.empty(2, layout.slot_bytes, dtype=torch.uint8)
    pack_plain(blocks, wanted, layout)
    room = torch.zeros(2, 128 + 5, 2, 64, dtype=torch.bfloat16, device=device)  # token by token
    inside = room[:, 2:-3].transpose(1, 2)
    inside.copy_(blocks)
    slots = torch.zeros(2, layout.slot_bytes + 64, dtype=torch.uint8, device=device)
    pack_triton(inside, slots[:, :-64], layout)
    assert torch.equal(slots[:, :-64].cpu(), wanted)
    assert not slots[:, -64:].any()
    room.zero_()
    unpack_triton(slots[:, :-64], inside, layout)
    back = blocks.clone()
    unpack_plain(wanted, back, layout)
    fits = is_packed(wanted, layout)
    assert torch.equal(inside.cpu()[fits], back[fits])
    assert not room[:, :2].any()
    assert not room[:, -3:].any()


@both
def test_damaged_slots_write_nothing_beside_their_blocks(device):
    blocks = kv_block("far below", (4, 2, 64, 16), 5)
    slots, layout = damaged_slots(blocks, 24, 6)
    room = torch.full((len(slots), 4, *blocks.shape[2:]), 7.0, dtype=torch.bfloat16, device=device)
    unpack_triton(slots.to(device), room[:, 1:3], layout)
    assert (room[:, ::3] == 7.0).all()
