"""Attention by PyTorch's own function in float64, which every implementation is compared with, random inputs, those of
packing included, and inputs behind which nothing can be read."""

from __future__ import annotations

import ctypes
import mmap

import torch
import torch.nn.functional as F
from torch import Tensor
from triforce.kernels import Layout, pack


def random_qkv(
    shape: tuple[int, int, int], n: int, m: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """`n` queries, and keys and values of `m` tokens. `shape` is the number of heads, of KV heads, and `head_dim`."""
    num_heads, num_kv_heads, head_dim = shape
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(num_heads, n, head_dim, generator=g).to(dtype)
    k = torch.randn(num_kv_heads, m, head_dim, generator=g).to(dtype)
    v = torch.randn(num_kv_heads, m, head_dim, generator=g).to(dtype)
    return q, k, v


def oracle(
    q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: int | None, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """What `attend` should return: SDPA in float64, and the log-sum-exp of its scores."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    n, m = q.shape[1], k.shape[1]
    mask = torch.ones(n, m, dtype=torch.bool)
    if diagonal is not None:
        distance = torch.arange(n).unsqueeze(1) + diagonal - torch.arange(m)
        mask = (distance >= 0) & (distance < (window or m + n + abs(diagonal)))
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~mask, float("-inf"))
    return out.nan_to_num(0.0), scores.logsumexp(-1)


def error_of(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> float:
    """The largest difference of outputs and of log-sum-exps; rows that see no key must agree exactly."""
    (out, lse), (want_out, want_lse) = got, want
    seen = want_lse > float("-inf")
    assert torch.equal(seen, lse > float("-inf"))
    assert (out[~seen] == 0).all()
    return max(
        (out - want_out).abs().max().item(), (lse[seen] - want_lse[seen]).abs().amax().item() if seen.any() else 0.0
    )


EVERY_VALUE = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
"""Every bit pattern of bfloat16."""

KV_KINDS = ["normal", "any bits", "some zeros", "far below", "subnormal", "few any bits"]


def kv_block(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Keys or values of one of `KV_KINDS`, by the spread of their exponents and by what they are."""
    g = torch.Generator().manual_seed(seed)
    any_bits = torch.randint(-(2**15), 2**15, shape, generator=g, dtype=torch.int32).to(torch.int16)
    scales = torch.rand(shape[-1], generator=g).mul(40).sub(20).exp2()  # channels differ much
    normal = (torch.randn(shape, generator=g) * scales).bfloat16()
    rare = torch.rand(shape, generator=g) < 2.0 ** -float(torch.rand((), generator=g) * 8 + 6)
    if kind == "any bits":
        return any_bits.view(torch.bfloat16)
    if kind == "some zeros":
        return normal.masked_fill(rare, 0.0)
    if kind == "far below":
        return torch.where(rare, normal * 2.0**-60, normal)
    if kind == "subnormal":  # exponents 0 to 7
        return (any_bits & -32641 | (any_bits >> 3 & 7) << 7).view(torch.bfloat16)
    if kind == "few any bits":
        return torch.where(rare, any_bits.view(torch.bfloat16), normal)
    return normal


def damaged_slots(blocks: Tensor, count: int, seed: int) -> tuple[Tensor, Layout]:
    """Slots of packed blocks in which something is different: anything, starts, exceptions, or a few bits."""
    layout = Layout(*blocks.shape[1:])
    slots = pack(blocks)[0]
    g = torch.Generator().manual_seed(seed)
    slots = slots[torch.randint(len(slots), (count,), generator=g)].clone()
    noise = torch.randint(256, slots.shape, generator=g).to(torch.uint8)
    parts = [(0, layout.slot_bytes), (layout.starts, layout.exceptions), (layout.exceptions, layout.largest)]
    for index, slot in enumerate(slots):
        first, stop = parts[index % 3]
        where = torch.rand(layout.slot_bytes, generator=g) < (1.0, 0.3, 0.01)[index // 3 % 3]
        where[:first] = where[stop:] = False
        slot[where] = noise[index][where]
        if index % 4:  # so that it says that its block is there
            total = torch.randint(layout.capacity + 1, (1,), generator=g, dtype=torch.int32)
            slot[layout.exceptions - 4 : layout.exceptions] = total.view(torch.uint8)
    return slots, layout


def at_the_end(tensor: Tensor) -> Tensor:
    """A copy in memory that ends with it: what reads on ends the process. Linux only."""
    size = tensor.numel() * tensor.itemsize
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, pages + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages), mmap.PAGESIZE, 0) == 0
    end = torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel(), offset=pages - size)
    return end.view(tensor.shape).copy_(tensor)
