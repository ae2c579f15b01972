"""Attention by the compiled CPU kernels (`source/attention`), which `attend` and `attend_blocks` call.

The result of a row is the same, bit by bit, however many other rows and however many threads there are. It is also the
same whether the keys are in one tensor or in blocks of whole splits (256 keys, `SPLIT` of attention.h).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..partials import new_running
from .calls import call as call_kernel
from .calls import threads
from .library import AttentionCall, Level, cpu_level, loaded

_TYPES = {torch.float32: 0, torch.bfloat16: 1}

_NO_WINDOW = 1 << 60
"""A window that hides no key."""

TILE = 64
"""Keys that are processed together. The size of a block of keys must be a multiple. `TILE` of attention.h."""


@functools.cache
def compiled_attention(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there are kernels for this processor, and they support this dtype and head size."""
    return dtype in _TYPES and head_dim % 32 == 0 and head_dim <= 256 and cpu_level() > Level.NONE


def has_plain_rows(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the tensors have one dtype and contiguous rows, as the kernels require."""
    return k.dtype == v.dtype == q.dtype and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1


def attend_compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    diagonal: int | Tensor | None = None,
    window: int | None = None,
    mass: Tensor | None = None,
    running: Tensor | None = None,
    rounded: bool = False,
    m: int | None = None,
    level: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` with the compiled kernels. Keys and values may also be blocks, `[num_blocks, num_kv_heads, block_size,
    head_dim]` with `block_size` a multiple of `TILE`.

    Args:
        diagonal: see `attend`; a tensor has one int64.
        mass: contiguous float32; see `sums_mass`.
        m: how many keys are used, from the first; default: all.
        level: the level to use, at most `cpu_level()`, which is the default.

    Raises:
        MemoryError: no memory for the temporaries.
    """
    num_heads, n, head_dim = q.shape
    dtype = q.dtype if rounded else torch.float32
    out = torch.empty(n, num_heads, head_dim, dtype=dtype, device=q.device).transpose(0, 1)
    lse = torch.empty(num_heads, n, dtype=torch.float32, device=q.device)
    call = _call_for(q, k, v, out, lse, scale)
    keys = call.m if m is None else m
    call.m, call.threads = keys, threads()
    if isinstance(diagonal, Tensor):
        call.diagonal_at = diagonal.data_ptr()
    else:
        call.diagonal = keys if diagonal is None else diagonal
    if window is not None and diagonal is not None:
        call.window = window
    if mass is not None:
        call.mass, call.mass_rows, call.chunk_size = mass.data_ptr(), mass.shape[1], keys // mass.shape[2]
    if running is not None:
        call.running, call.running_head = running.data_ptr(), running.stride(0)
    if level is not None:
        call.level = level
    if call_kernel(_attend(), call, 1):
        raise MemoryError(_NO_MEMORY.format(n, keys))
    return out, lse


_NO_MEMORY = "no memory for the temporaries of attention of {} rows to {} keys"


def _call_for(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> AttentionCall:
    """The arguments of a call with these tensors, in which all rows see all keys."""
    num_heads, n, head_dim = q.shape
    call = AttentionCall()
    if k.dim() == 4:
        num_blocks, num_kv_heads, block_size, _ = k.shape
        call.k_block, call.k_head, call.k_row, _ = k.stride()
        call.v_block, call.v_head, call.v_row, _ = v.stride()
        keys = num_blocks * block_size
    else:
        num_kv_heads, block_size, _ = k.shape
        call.k_head, call.k_row, _ = k.stride()
        call.v_head, call.v_row, _ = v.stride()
        keys = block_size
    call.q, call.k, call.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    call.out, call.lse = out.data_ptr(), lse.data_ptr()
    call.q_head, call.q_row, _ = q.stride()
    call.out_head, call.out_row, _ = out.stride()
    call.rounded = out.dtype == torch.bfloat16
    call.num_heads, call.num_kv_heads, call.head_dim = num_heads, num_kv_heads, head_dim
    call.n, call.m, call.block_size = n, keys, block_size
    call.diagonal, call.window, call.chunk_size = keys, _NO_WINDOW, 1
    call.type, call.level, call.scale = _TYPES[q.dtype], cpu_level(), scale
    return call


@dataclass(frozen=True, slots=True)
class StepRows:
    """The memory for the rows of a step, which every layer uses: inputs and outputs of attention."""

    q: Tensor
    """Rotated queries `[num_heads, n, head_dim]`."""
    k: Tensor
    """Rotated keys `[num_kv_heads, n, head_dim]`."""
    v: Tensor
    """Values, as `k`."""
    out: Tensor
    """Outputs, as `q`."""
    lse: Tensor
    """Memory for their log-sum-exps, `[num_heads * n]` float32."""

    @classmethod
    def like(cls, q: Tensor, k: Tensor, before: StepRows | None = None) -> StepRows:
        """Memory for rows with these shapes and dtype: that of `before` if it has them, or new memory."""
        if before and (before.q.shape, before.k.shape, before.q.dtype) == (q.shape, k.shape, q.dtype):
            return before

        def rows(like: Tensor) -> Tensor:
            heads, n, head_dim = like.shape
            return torch.empty(n, heads, head_dim, dtype=like.dtype, device=like.device).transpose(0, 1)

        lse = torch.empty(q.shape[0] * q.shape[1], dtype=torch.float32, device=q.device)
        return cls(rows(q), rows(k), rows(k), rows(q), lse)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.out, self.lse


@dataclass(slots=True)
class Piece:
    """Some rows of a pass, and the keys that they attend to."""

    rows: slice
    blocks: Tensor
    """`[num_blocks, 2, num_kv_heads, block_size, head_dim]`, keys and values of a cache."""
    first: int
    """The first key, counted from the first key of the cache. It is the first key of a block, unless all keys are in
    one block."""
    m: int
    """The number of keys."""
    diagonal: int
    """See `attend`, counted from `first`."""
    window: int | None = None
    """See `attend`."""
    mass: Tensor | None = None
    """See `attend`, for all these rows; contiguous float32, see `sums_mass`."""


@dataclass(slots=True)
class StepPiece:
    """Some rows of a step, and the keys of a cache that they attend to."""

    rows: slice
    cache: int
    """The number of the cache among those of the step."""
    first: int
    """See `Piece`."""
    m: int
    """The number of keys."""
    diagonal: int
    """See `attend`, counted from `first`."""


class PreparedStep:
    """Writes the keys and values of a step's rows into the caches of one or several sequences, and attends to pieces of
    these caches, for one layer after another.

    Only the addresses of the caches differ between layers. The arguments of the kernels are prepared once. From step to
    step, only the positions of tokens are changed (`aim`). Preparing the arguments in Python takes longer than most
    pieces take in the kernels.
    """

    def __init__(
        self,
        rows: StepRows,
        caches: Sequence[tuple[Tensor, Tensor]],
        calls: Sequence[Sequence[StepPiece]],
        written: Sequence[tuple[int, int, slice]],
        scale: float,
        window: int | None,
        made_for: object,
    ) -> None:
        """Args:
        rows: the memory for the rows of each layer.
        caches: keys and values of any layer, both `[num_kv_heads, room, head_dim]`, or in blocks
            `[num_blocks, num_kv_heads, block_size, head_dim]`.
        calls: pieces of these caches. Each item has the pieces of one call of the kernel; no two of these share a row.
            Later calls continue from the results of earlier calls.
        written: for some rows that all go into one block: the number of the cache, the position in it, and these rows.
        scale, window: see `attend`; for all pieces.
        made_for: compared with that of a later step, to decide whether this object can be used again.
        """
        self.made_for = made_for
        kernels = loaded()
        assert kernels is not None
        (num_heads, n, head_dim), size = rows.q.shape, rows.q.element_size()
        self.rows, self._caches = rows, [(_Layout.of(k), _Layout.of(v)) for k, v in caches]
        self._running = new_running(rows.q) if len(calls) > 1 else None
        copies: list[tuple[int, ...]] = []  # the fields of `StepCopy` of cpu.h, and below of `StepPlace`
        for number, _, own in written:
            for i, (x, cache) in enumerate(zip((rows.k, rows.v), caches[number], strict=True)):
                head, row = x.stride(0) * size, x.stride(1) * size
                into = 2 * number + i, 0, cache.stride(-3) * size, cache.stride(-2) * size
                shape = len(x), own.stop - own.start, head_dim * size
                copies.append((x.data_ptr() + own.start * row, head, row, *into, *shape))
        pieces = [piece for some in calls for piece in some]
        places = [(2 * piece.cache, 0, 2 * piece.cache + 1, 0) for piece in pieces]
        made = (AttentionCall * len(pieces))(*self._calls(pieces, caches, scale, window))
        tables = [np.array(numbers, dtype=np.int64) for numbers in (copies, places, [len(some) for some in calls])]
        self._copies, self._places, self._groups = tables  # the kernel is given their addresses
        # The 64-bit integers of a call; the scale is a float and is not accessed through this view.
        self._numbers = np.frombuffer(memoryview(made), dtype=np.int64).reshape(len(pieces), -1)
        at = [table.ctypes.data for table in tables]
        asked = (at[0], len(copies), made, at[1], at[2], len(calls))
        running = (None, 0) if self._running is None else (self._running.data_ptr(), num_heads * n)
        self._addresses = (ctypes.c_int64 * (2 * len(caches)))()
        self._take = functools.partial(kernels.triforce_take_step, self._addresses, *asked, *running)
        self.aim(calls, written)

    def _calls(
        self, pieces: Sequence[StepPiece], caches: Sequence[tuple[Tensor, Tensor]], scale: float, window: int | None
    ) -> Iterator[AttentionCall]:
        for piece in pieces:
            k, v = caches[piece.cache]
            call = _call_for(self.rows.q[:, piece.rows], k, v, self.rows.out[:, piece.rows], self.rows.lse, scale)
            call.lse += 4 * call.num_heads * piece.rows.start
            call.window = _NO_WINDOW if window is None else window
            if self._running is not None:
                call.running = self._running[:, piece.rows].data_ptr()
                call.running_head = self._running.stride(0)
            yield call

    def aim(self, calls: Sequence[Sequence[StepPiece]], written: Sequence[tuple[int, int, slice]]) -> None:
        """Sets the positions of the next step, whose rows and caches are the same except for positions.

        Args:
            calls, written: as in `__init__`.
        """
        pieces = [piece for some in calls for piece in some]
        self._copies[:, _INTO] = [
            layout.offset(start) for number, start, _ in written for layout in self._caches[number]
        ]
        firsts = [[layout.offset(piece.first) for layout in self._caches[piece.cache]] for piece in pieces]
        self._places[:, 1::2] = firsts
        number = threads()
        self._numbers[:, _AIMED] = [(piece.m, piece.diagonal, number) for piece in pieces]

    def __call__(self, addresses: Sequence[int]) -> None:
        """Writes the keys and values of the rows into a layer's caches, and attends to these caches.

        Args:
            addresses: those of the layer's caches: keys and values of the first cache, of the second cache, and so on.

        Raises:
            MemoryError: no memory for the temporaries.
        """
        self._addresses[:] = addresses
        if self._take():
            raise MemoryError(_NO_MEMORY.format(self.rows.q.shape[1], self._numbers[:, _AIMED[0]].max()))

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that this object keeps."""
        return *self.rows.tensors(), *(() if self._running is None else (self._running,))


_INTO = 4
"""The index of the field of `StepCopy` with the offset in the cache to which rows are copied."""

_AIMED = [[named[0] for named in AttentionCall._fields_].index(name) for name in ("m", "diagonal", "threads")]
"""The indices of the fields of a call that differ from step to step."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the tokens are in the keys or the values of a cache of `PreparedStep`. Strides are in bytes."""

    block: int
    token: int
    block_size: int

    @classmethod
    def of(cls, cache: Tensor) -> _Layout:
        size = cache.element_size()
        return cls(cache.stride(0) * size if cache.dim() == 4 else 0, cache.stride(-2) * size, cache.shape[-2])

    def offset(self, token: int) -> int:
        """The offset of a token from the beginning of a layer's keys or values, in bytes."""
        block, token = divmod(token, self.block_size)
        return block * self.block + token * self.token


def attend_compiled_pieces(
    q: Tensor, pieces: Sequence[Piece], *, scale: float, running: Tensor, out: Tensor
) -> list[Tensor]:
    """`attend_compiled` for several pieces in one call. A single thread computes each piece, unless a piece is more
    than a thread's share of the work.

    Args:
        q: `[num_heads, n, head_dim]`, the rows of all pieces.
        pieces: no two of them share a row.
        running: that of the rows of `q`, see `attend`; the rows of these pieces are updated.
        out: shape of `q`, its dtype or float32; the rows of these pieces are written.

    Returns:
        The log-sum-exp of the rows of each piece over all keys so far, `[num_heads, rows]`.

    Raises:
        MemoryError: no memory for the temporaries.
    """
    num_heads, _, head_dim = q.shape
    (q_head, q_row, _), (out_head, out_row, _) = q.stride(), out.stride()
    running_head, running_row = running.stride(0), running.shape[2]  # its rows follow one another
    q_at, out_at, running_at = q.data_ptr(), out.data_ptr(), running.data_ptr()
    size, out_size, kind = q.element_size(), out.element_size(), _TYPES[q.dtype]
    wanted, level = threads(), cpu_level()
    calls: list[AttentionCall] = []
    lses: list[Tensor] = []
    for piece in pieces:
        row, n = piece.rows.start, piece.rows.stop - piece.rows.start
        _, _, num_kv_heads, block_size, _ = piece.blocks.shape
        block, values, head, token, _ = piece.blocks.stride()
        k = piece.blocks.data_ptr() + (piece.first // block_size * block + piece.first % block_size * token) * size
        lse, mass = torch.empty(num_heads, n, dtype=torch.float32, device=q.device), piece.mass
        call = AttentionCall(
            *(q_at + row * q_row * size, k, k + values * size, out_at + row * out_row * out_size, lse.data_ptr()),
            *(0 if mass is None else mass.data_ptr(), running_at + row * running_row * 4, running_head),
            *(q_head, q_row, out_head, out_row, out_size == 2),
            *(block, head, token, block, head, token),
            *(num_heads, num_kv_heads, n, piece.m, head_dim, block_size),
            *(piece.diagonal, _NO_WINDOW if piece.window is None else piece.window, 0),
            *((0, 1) if mass is None else (n, piece.m // mass.shape[2])),
            *(kind, wanted, level, scale),
        )
        calls.append(call)
        lses.append(lse)
    if call_kernel(_attend(), (AttentionCall * len(calls))(*calls), len(calls)):
        raise MemoryError(_NO_MEMORY.format(q.shape[1], max(piece.m for piece in pieces)))
    return lses


def sums_mass(mass: Tensor, m: int) -> bool:
    """Whether `attend_compiled` can write `mass` for `m` keys: it must be contiguous float32, and the chunk size must
    divide `TILE`."""
    return (
        mass.dtype == torch.float32 and mass.is_contiguous() and mass.shape[2] > 0 and TILE % (m // mass.shape[2]) == 0
    )


@functools.cache
def _attend() -> Callable[[Any, int], Any]:
    kernels = loaded()
    assert kernels is not None
    return kernels.triforce_attend
