"""The gated delta rule on NVIDIA GPUs in Triton, row by row. See `delta_rule`.

A program keeps some columns of a value head's state in registers, and applies all rows to it. Each program computes the
convolution, the lengths of queries and keys, and the gates itself. So a layer's step is one launch, and the bits of a
row do not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .attention import ceil_div, power_of_two
from .launch import launch

TILE_VALUES = 32
"""The number of columns of a state that a program computes."""

NUM_WARPS = 4


def delta_steps_triton(
    inputs: Tensor,
    gates: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    heads: tuple[int, int],
    state: Tensor,
    out: Tensor,
    saved: Sequence[tuple[int, Tensor]],
    *,
    tiled: bool,
) -> None:
    """`delta_rule.delta_steps`, with the results written to `out` `[wanted, value_heads, value_dim]`.

    Args:
        weights: the convolution `[kernel, channels]`, the decay and its bias `[value_heads]`, all float32.
        heads: the numbers of key heads and of value heads.
        saved: as in `delta_steps`, at most two.
        tiled: see `DeltaWeights`.
    """
    value_heads, key_dim, value_dim = state.shape
    (first, after_first), (second, after_second) = [*saved, (-1, state), (-1, state)][:2]
    launch(
        _steps_kernel,
        (value_heads, ceil_div(value_dim, TILE_VALUES)),
        inputs.contiguous(),
        gates.contiguous(),
        *weights,
        state,
        out,
        after_first,
        after_second,
        gates.shape[0],
        gates.shape[0] - out.shape[0],
        first,
        second,
        inputs.shape[1],
        KERNEL=weights[0].shape[0],
        KEY_HEADS=heads[0],
        VALUE_HEADS=heads[1],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        TILED=tiled,
        TILE_KEYS=power_of_two(key_dim),
        TILE_VALUES=TILE_VALUES,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _log1p(x):
    """The logarithm of 1 + x, which is also exact for small x: the rounding error of 1 + x cancels out."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))


@triton.jit
def _mixed(inputs, conv, row, channel, there, channels, KERNEL: tl.constexpr):
    """The channels of a row after the convolution and the activation, float32."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(KERNEL):
        x = tl.load(inputs + (row + tap) * channels + channel, mask=there, other=0.0).to(tl.float32)
        total += x * tl.load(conv + tap * channels + channel, mask=there, other=0.0)
    total = total.to(inputs.dtype.element_ty).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(inputs.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["n", "first_wanted", "first_saved", "second_saved"])
def _steps_kernel(
    inputs,
    gates,
    conv,
    decay,
    decay_bias,
    state,
    out,
    after_first,
    after_second,
    n,
    first_wanted,
    first_saved,
    second_saved,
    channels,
    KERNEL: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_VALUES: tl.constexpr,
):
    head = tl.program_id(0)
    keys = tl.arange(0, TILE_KEYS)
    values = tl.program_id(1) * TILE_VALUES + tl.arange(0, TILE_VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    is_there = is_key[:, None] & is_value[None, :]
    place = head * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + values[None, :]
    s = tl.load(state + place, mask=is_there, other=0.0)
    key_head = head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)
    of_query = key_head * KEY_DIM + keys
    of_value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values
    by, bias = tl.load(decay + head), tl.load(decay_bias + head)
    if first_saved == 0:
        tl.store(after_first + place, s, mask=is_there)
    if second_saved == 0:
        tl.store(after_second + place, s, mask=is_there)
    for row in range(n):
        q = _mixed(inputs, conv, row, of_query, is_key, channels, KERNEL)
        k = _mixed(inputs, conv, row, of_query + KEY_HEADS * KEY_DIM, is_key, channels, KERNEL)
        v = _mixed(inputs, conv, row, of_value, is_value, channels, KERNEL)
        q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6) / tl.sqrt(KEY_DIM * 1.0)
        k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
        gate = gates + row * 2 * VALUE_HEADS + head
        beta = 1.0 / (1.0 + tl.exp(-tl.load(gate).to(tl.float32)))
        beta = beta.to(inputs.dtype.element_ty).to(tl.float32)
        a = tl.load(gate + VALUE_HEADS).to(tl.float32) + bias
        s *= tl.exp(by * tl.where(a > 20.0, a, _log1p(tl.exp(tl.minimum(a, 20.0)))))
        there = tl.sum(s * k[:, None], 0)
        s += k[:, None] * (beta * (v - there))[None, :]
        if row >= first_wanted:
            read = tl.sum(s * q[:, None], 0).to(out.dtype.element_ty)
            wanted = ((row - first_wanted) * VALUE_HEADS + head) * VALUE_DIM + values
            tl.store(out + wanted, read, mask=is_value)
        if first_saved == row + 1:
            tl.store(after_first + place, s, mask=is_there)
        if second_saved == row + 1:
            tl.store(after_second + place, s, mask=is_there)
