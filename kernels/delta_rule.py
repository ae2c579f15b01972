"""The gated delta rule (arXiv 2412.06464) with a short convolution before it: attention with a state of fixed size.

After the convolution and an activation, each head has a query, a key and a value for each token. The state `S`
`[key_dim, value_dim]` of the head is first multiplied by the token's decay. Then the value replaces the content of the
state at the token's key:

    S = exp(g) S;  S = S + k (beta (v - S'k))';  out = S'q

Computed row by row, this is a recurrence (`delta_steps`). For many rows, `delta_chunks` computes 64 rows at a time with
matrix products. States, and everything behind the convolution, are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu.calls import threads
from .cpu.library import DeltaCall, Level, cpu_level, loaded
from .packages import usable_packages
from .selection import on_cpu, selected

CHUNK = 64
"""Tokens that `delta_chunks` computes together. Chunks begin at multiples of this number."""

TOGETHER = 512
"""Tokens whose chunks are computed at a time. Limits the memory that this takes."""

COMPILED_ROWS = 64
"""Tokens that the compiled kernel gets at a time in a prefill, so that they stay in the processor's cache."""

_LEAST_SQUARES = 1e-6
"""Added to the sum of squares by whose root queries and keys are divided."""


@dataclass(frozen=True)
class DeltaWeights:
    """The weights of a layer, or of a rank's part of it."""

    conv: Tensor
    """`[kernel, channels]`, float32 numbers that were rounded to the dtype of the run. Channels are those of queries,
    keys, values."""
    decay: Tensor
    """`[value_heads]` float32, below 0. For the input `a` of the decay (see `delta_steps`), the state is multiplied by
    `exp(decay * softplus(a + decay_bias))`."""
    decay_bias: Tensor
    """`[value_heads]` float32; see `decay`."""
    key_heads: int
    key_dim: int
    tiled: bool = False
    """Whether value head `i` has the key head `i % key_heads`. Otherwise, neighbouring value heads share a key head."""

    @property
    def value_heads(self) -> int:
        """The number of value heads of this rank. Each has a state of its own."""
        return self.decay.shape[0]

    @property
    def value_dim(self) -> int:
        """The size of a value head: a state is `[key_dim, value_dim]`."""
        return (self.conv.shape[1] - 2 * self.key_heads * self.key_dim) // self.value_heads

    @property
    def past(self) -> int:
        """The number of tokens before a token that the convolution sees."""
        return self.conv.shape[0] - 1

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All tensors."""
        return self.conv, self.decay, self.decay_bias


@dataclass(frozen=True)
class _Rows:
    """The inputs of the recurrence for `n` tokens, float32: q, k and v `[value_heads, n, key_dim or value_dim]`, g and
    beta `[value_heads, n]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def delta_steps(
    inputs: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    state: Tensor,
    *,
    wanted: int,
    saved: Sequence[tuple[int, Tensor]],
) -> Tensor:
    """Computes some tokens one after another. The bits of a row do not depend on the number of rows.

    Args:
        inputs: `[past + n, channels]`, the inputs of the convolution: those of the tokens before, then of these tokens.
        gates: `[n, 2 * value_heads]`: the inputs of beta for all heads, then the inputs of the decay for all heads.
        state: `[value_heads, key_dim, value_dim]` float32, before the first token. Not changed, unless it is in
            `saved`.
        wanted: for how many of the last tokens results are returned.
        saved: pairs of a number of tokens and a tensor, in ascending order. The state after this number of tokens is
            written to the tensor.

    Returns:
        `[wanted, value_heads, value_dim]` in the dtype of `inputs`.

    Raises:
        MemoryError: no memory for the temporaries of the compiled kernel.
    """
    n = gates.shape[0]
    out = inputs.new_empty(wanted, weights.value_heads, weights.value_dim)
    if len(saved) <= 2 and "triton" in usable_packages(inputs.device):
        from .triton.delta import delta_steps_triton  # only where there is a GPU

        heads = weights.key_heads, weights.value_heads
        delta_steps_triton(inputs, gates, weights.tensors(), heads, state, out, saved, tiled=weights.tiled)
        return out
    if _steps_compiled(inputs, gates, weights, state, out, saved):
        return out
    waiting = list(saved)
    current = state.clone()
    for i in range(n + 1):
        while waiting and waiting[0][0] == i:
            waiting.pop(0)[1].copy_(current)
        if i == n:
            break
        row = _rows(inputs[i : i + weights.past + 1], gates[i : i + 1], weights)
        current *= row.g.exp().unsqueeze(-1)
        k = row.k.transpose(1, 2)  # [value_heads, key_dim, 1]
        there = (current * k).sum(dim=1, keepdim=True)
        current += k * ((row.v - there) * row.beta.unsqueeze(-1))
        if i >= n - wanted:
            out[i - n + wanted] = (current * row.q.transpose(1, 2)).sum(dim=1)
    return out


def delta_chunks(inputs: Tensor, gates: Tensor, weights: DeltaWeights, state: Tensor, start: int) -> Tensor:
    """Computes many tokens from position `start` on. Whole chunks are computed with matrix products, and the tokens
    before and behind them row by row. If there is a compiled kernel, all tokens are computed row by row with it, which
    is faster than products of these small matrices.

    Args:
        inputs, gates: as for `delta_steps`.
        state: as for `delta_steps`; changed to the state after the last token.

    Returns:
        `[n, value_heads, value_dim]` in the dtype of `inputs`.

    Raises:
        MemoryError: as for `delta_steps`.
    """
    n, past = gates.shape[0], weights.past
    begin, parts, compiled = 0, [], compiled_delta(inputs, weights)
    while begin < n:
        stop, chunked = begin + COMPILED_ROWS, False
        if not compiled:
            stop, chunked = _next_piece(start + begin, start + n)
            stop -= start
        stop = min(stop, n)
        rows, of_gates = inputs[begin : stop + past], gates[begin:stop]
        if chunked:
            parts.append(_chunks(_rows(rows, of_gates, weights), state).transpose(0, 1).to(inputs.dtype))
        else:
            kind = {"wanted": stop - begin, "saved": [(stop - begin, state)]}
            parts.append(delta_steps(rows, of_gates, weights, state, **kind))
        begin = stop
    return torch.cat(parts)


def _next_piece(begin: int, stop: int) -> tuple[int, bool]:
    """The end of the piece to compute next, of the positions from `begin` to `stop`, and whether it is chunks."""
    if begin % CHUNK:
        return min(stop, begin + -begin % CHUNK), False
    whole = (min(stop, (begin // TOGETHER + 1) * TOGETHER) - begin) // CHUNK * CHUNK
    return (begin + whole, True) if whole else (stop, False)


def _steps_compiled(
    inputs: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    state: Tensor,
    out: Tensor,
    saved: Sequence[tuple[int, Tensor]],
) -> bool:
    """Computes `delta_steps` with the compiled kernel, into `out`. Returns whether that is possible."""
    if not compiled_delta(inputs, weights) or len(saved) > 2:
        return False
    inputs, gates = inputs.contiguous(), gates.contiguous()
    places = [*saved, (0, None), (0, None)][:2]
    arguments = DeltaCall(
        *(x.data_ptr() for x in (inputs, gates, *weights.tensors(), state, out)),
        *(place.data_ptr() if place is not None else 0 for _, place in places),
        *(behind for behind, _ in places),
        *(gates.shape[0], out.shape[0], inputs.shape[1], weights.past + 1),
        *(weights.key_heads, weights.value_heads, weights.key_dim, weights.value_dim),
        *(weights.tiled, inputs.dtype == torch.bfloat16, threads()),
    )
    kernels = loaded()
    assert kernels is not None
    failed = kernels.triforce_delta_steps(arguments)
    if failed == 1:
        raise MemoryError(f"no memory for the temporaries of {gates.shape[0]} rows")
    return not failed


def compiled_delta(inputs: Tensor, weights: DeltaWeights) -> bool:
    """Whether there is a compiled kernel for these inputs."""
    is_compiled = on_cpu(inputs.device) and selected().layers is None and cpu_level() >= Level.AVX2
    if weights.key_dim % 8 or weights.value_dim % 8:
        return False
    return is_compiled and inputs.dtype in (torch.float32, torch.bfloat16)


def _rows(inputs: Tensor, gates: Tensor, weights: DeltaWeights) -> _Rows:
    """Computes the convolution, the activation and the gates for `n` tokens.

    Args:
        inputs, gates: as for `delta_steps`.
    """
    n, heads = gates.shape[0], weights.value_heads
    summed = inputs[:n].float() * weights.conv[0]
    for tap in range(1, weights.past + 1):
        summed += inputs[tap : tap + n].float() * weights.conv[tap]
    mixed = F.silu(summed.to(inputs.dtype)).float()
    keys = weights.key_heads * weights.key_dim
    q, k, v = mixed.split((keys, keys, heads * weights.value_dim), dim=-1)
    q, k = (_unit(x.view(n, weights.key_heads, weights.key_dim)) for x in (q, k))
    together = heads // weights.key_heads
    q, k = (x.transpose(0, 1) for x in (q * weights.key_dim**-0.5, k))
    if weights.tiled:
        q, k = (x.repeat(together, 1, 1) for x in (q, k))
    else:
        q, k = (x.repeat_interleave(together, dim=0) for x in (q, k))
    beta, a = gates.chunk(2, dim=-1)
    g = weights.decay * F.softplus(a.float() + weights.decay_bias)
    return _Rows(q, k, v.view(n, heads, -1).transpose(0, 1), g.t(), beta.sigmoid().float().t())


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _LEAST_SQUARES)


def _chunks(rows: _Rows, state: Tensor) -> Tensor:
    """The results of whole chunks, `[value_heads, n, value_dim]`. `state` becomes the state after the last chunk.

    The value of each token in a chunk is first computed as if the chunk were the first (a triangular system). Then the
    content that the state before the chunk has at its key is subtracted.
    """
    q, k, v, beta = (x.unflatten(1, (-1, CHUNK)) for x in (rows.q, rows.k, rows.v, rows.beta.unsqueeze(-1)))
    g = rows.g.unflatten(1, (-1, CHUNK)).cumsum(dim=-1)  # [value_heads, chunks, CHUNK]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    fading = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    faded = g.exp().unsqueeze(-1)
    weighted = k * beta
    system = weighted @ k.transpose(-1, -2) * fading
    both = torch.cat((v * beta, weighted * faded), dim=-1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    added, read = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    within = q @ k.transpose(-1, -2) * fading
    q, k = q * faded, (k * (g[..., -1:] - g).exp().unsqueeze(-1)).transpose(-1, -2)
    whole = faded[..., -1:, :]
    out = torch.empty_like(v)
    for i in range(q.shape[1]):
        new = added[:, i] - read[:, i] @ state
        out[:, i] = q[:, i] @ state + within[:, i] @ new
        state.mul_(whole[:, i]).add_(k[:, i] @ new)
    return out.flatten(1, 2)
