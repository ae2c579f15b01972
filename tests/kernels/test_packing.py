"""Packed keys and values come back bit by bit, from bytes that are those of the description."""

import pytest
import torch
from hypothesis import given, strategies
from oracles import EVERY_VALUE, KV_KINDS, damaged_slots, kv_block
from profiles import examples
from triforce.kernels import Layout, gather_packed, is_packed, pack, unpack

GROUP = 64
"""Tokens whose exponents are counted from their largest (docs/packed-kv.md)."""


def bits(values):
    return values.view(torch.int16)


def check(blocks):
    """That blocks `[num_blocks, num_kv_heads, tokens, head_dim]` come back where they fit; returns which of them do."""
    slots, fits = pack(blocks, torch.full((len(blocks), Layout(*blocks.shape[1:]).slot_bytes), 0xAA, dtype=torch.uint8))
    assert torch.equal(fits, is_packed(slots, Layout(*blocks.shape[1:])))
    got = torch.full_like(blocks, 7.0)
    unpack(slots, got)
    back = torch.where(fits.view(-1, 1, 1, 1), bits(blocks), bits(torch.full_like(blocks, 7.0)))
    assert torch.equal(bits(got), back), "other values come back"
    return fits


def exceptions_of(blocks):
    """What makes them fit or not, counted as the format's description has it."""
    exponents = bits(blocks).to(torch.int32) >> 7 & 0xFF
    groups = exponents.unflatten(2, (-1, GROUP))
    return (groups.amax(3, keepdim=True) - groups > 15).flatten(1).sum(1)


def test_every_value_comes_back_from_every_position_of_a_group():
    """In groups of values that differ in the last bits of their mantissas."""
    values = EVERY_VALUE[torch.arange(2**16) ^ torch.arange(GROUP).unsqueeze(1)]  # all of them in each row
    assert check(values.unflatten(1, (8, 64, 128)).permute(1, 2, 0, 3).contiguous()).all()


@pytest.mark.parametrize("others", [1.0, float("inf"), 2.0**-100])
@pytest.mark.slow(keep=("1.0",))
def test_every_value_comes_back_from_among_very_different_ones(others):
    """One value in eight groups, in all positions by turns: an exception, or what makes exceptions of all others, which
    then do not fit."""
    channels = 2**12
    for part in EVERY_VALUE.view(-1, channels):
        block = torch.full((1, 1, 8 * GROUP, channels), others, dtype=torch.bfloat16)
        block[0, 0, torch.arange(channels) * 37 % (8 * GROUP), torch.arange(channels)] = part
        assert torch.equal(check(block), exceptions_of(block) <= Layout(1, 8 * GROUP, channels).capacity)


def test_values_of_all_sizes_in_one_group_do_not_fit():
    mixed = EVERY_VALUE[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))].view(1, 4, 128, 128)
    assert not check(mixed).any()


@given(
    kind=strategies.sampled_from(KV_KINDS),
    blocks=strategies.integers(1, 3),
    num_kv_heads=strategies.integers(1, 3),
    groups=strategies.integers(1, 3),
    head_dim=strategies.sampled_from([1, 3, 16, 33, 64, 80, 128, 257]),
    seed=strategies.integers(0, 2**32 - 1),
)
@examples(200)
def test_random_blocks_come_back(kind, blocks, num_kv_heads, groups, head_dim, seed):
    values = kv_block(kind, (blocks, num_kv_heads, groups * GROUP, head_dim), seed)
    fits = check(values)
    assert torch.equal(fits, exceptions_of(values) <= Layout(*values.shape[1:]).capacity)
    if kind == "subnormal":
        assert fits.all()


def test_a_block_fits_as_long_as_its_exceptions_do():
    layout = Layout(2, 128, 64)
    for count in (0, 1, layout.capacity - 1, layout.capacity, layout.capacity + 1, 4 * layout.capacity):
        blocks = torch.ones(1, 2, 128, 64, dtype=torch.bfloat16)
        blocks.view(-1)[torch.randperm(blocks.numel(), generator=torch.Generator().manual_seed(2))[:count]] = 2.0**-40
        assert check(blocks).tolist() == [count <= layout.capacity]


def test_the_bytes_of_a_slot_are_those_of_the_description():
    """One tile, written down by hand: position of bytes, nibbles, starts, exceptions and the largest exponents."""
    block = torch.ones(1, GROUP, 8, dtype=torch.bfloat16)
    block[0, 1, 0] = -0.375  # exponent 125, mantissa 1.5
    block[0, 3, 2] = 2.0**-40  # exponent 87: an exception
    slots, fits = pack(block)
    assert bool(fits)
    assert slots.shape == (832,)  # 512 + 256 + 8 + 4 + 8, in whole lines of 64
    expected = torch.zeros(832, dtype=torch.uint8)
    expected[8] = 0x80 | 0x40
    expected[512] = 2 << 4
    expected[512 + 8 + 2] = 15 << 4
    expected[772] = 1
    expected[776:780] = torch.tensor([87, 3 * 8 + 2, 0, 0])
    expected[780:788] = 127
    assert torch.equal(slots, expected)


@pytest.mark.parametrize("num_kv_heads", [4, 8, 32])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_a_slot_has_at_most_12_point_2_bits_a_value(num_kv_heads, head_dim):
    layout = Layout(num_kv_heads, 2048, head_dim)
    assert 8 * layout.slot_bytes / layout.values < 12.2


@pytest.mark.parametrize("shape", [(2, 64, 64), (3, 2, 64, 32), (2, 2, 1, 128, 16)])
def test_leading_dimensions_and_strides_are_the_callers(shape):
    blocks = kv_block("few any bits", shape, 3)
    wide = torch.stack((blocks, blocks), dim=-3).transpose(-3, -4) if len(shape) < 4 else blocks
    slots, fits = pack(wide)
    assert fits.shape == wide.shape[:-3]
    room = torch.zeros(*wide.shape[:-2], wide.shape[-2] + 5, wide.shape[-1], dtype=torch.bfloat16)
    got = room[..., 2:-3, :]
    unpack(slots, got)
    assert torch.equal(bits(got)[fits], bits(wide)[fits])
    assert not room[..., :2, :].any() and not room[..., -3:, :].any()
    again = torch.zeros(*slots.shape[:-1], slots.shape[-1] + 64, dtype=torch.uint8)
    assert torch.equal(pack(wide, again[..., :-64])[0], slots)
    assert not again[..., -64:].any()


def test_no_blocks_and_no_tokens_are_packed_too():
    for shape in [(0, 2, 64, 8), (2, 1, 0, 8)]:
        blocks = torch.empty(shape, dtype=torch.bfloat16)
        slots, fits = pack(blocks)
        unpack(slots, blocks)
        assert fits.tolist() == [True] * shape[0]


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


def test_what_cannot_be_packed_is_said():
    good = torch.zeros(2, 64, 8, dtype=torch.bfloat16)
    slots, _ = pack(good)
    with pytest.raises(ValueError, match="bfloat16"):
        pack(good.half())
    with pytest.raises(ValueError, match="bfloat16"):
        pack(good[0])
    with pytest.raises(ValueError, match="of 63 tokens"):
        pack(good[:, 1:])
    with pytest.raises(ValueError, match="2\\^31"):
        Layout(2, 2**23, 128)
    with pytest.raises(ValueError, match="uint8"):
        unpack(slots[:-1], good)
    with pytest.raises(ValueError, match="multiples of 4"):
        unpack(torch.zeros(len(slots) + 1, dtype=torch.uint8)[1:], good)
    with pytest.raises(ValueError, match="channels"):
        unpack(slots, torch.zeros(2, 64, 16, dtype=torch.bfloat16)[..., ::2])
    with pytest.raises(ValueError, match="in one go"):
        unpack(
            torch.stack([slots] * 6).view(2, 3, -1), torch.zeros(3, 2, *good.shape, dtype=good.dtype).transpose(0, 1)
        )


def test_damaged_slots_give_some_values_and_no_error():
    blocks = kv_block("few any bits", (4, 2, 128, 16), 5)
    slots, layout = damaged_slots(blocks, 60, 6)
    unpack(slots, torch.zeros(len(slots), *blocks.shape[1:], dtype=torch.bfloat16))
    tokens = torch.randint(60 * layout.tokens, (2, 60), generator=torch.Generator().manual_seed(1))
    gather_packed(slots, layout, 0, tokens)  # an index error otherwise


@given(
    kind=strategies.sampled_from(KV_KINDS),
    blocks=strategies.integers(1, 3),
    heads=strategies.integers(1, 3),
    groups=strategies.integers(1, 3),
    head_dim=strategies.sampled_from([1, 3, 16, 64]),
    seed=strategies.integers(0, 2**32 - 1),
)
@examples(100)
def test_some_tokens_are_gathered_without_unpacking_the_others(kind, blocks, heads, groups, head_dim, seed):
    values = kv_block(kind, (blocks, 2 * heads, groups * GROUP, head_dim), seed)
    layout = Layout(2 * heads, groups * GROUP, head_dim)
    slots, fits = pack(values)
    tokens = torch.randint(blocks * layout.tokens, (heads, 40), generator=torch.Generator().manual_seed(seed))
    for first in (0, heads):
        got = gather_packed(slots, layout, first, tokens)
        rows = values[:, first : first + heads].transpose(0, 1).flatten(1, 2)  # [heads, tokens, head_dim]
        want = rows.gather(1, tokens.unsqueeze(2).expand(-1, -1, head_dim))
        there = fits[tokens // layout.tokens]
        assert torch.equal(bits(got)[there], bits(want)[there])
