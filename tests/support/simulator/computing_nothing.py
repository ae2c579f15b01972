"""Runs of models of true shapes that compute nothing: operations on much memory give results that nobody wrote, of
which the system provides no page, so that a run takes seconds and a counted simulator sees all memory it would take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from simulated_operations import _kind, _tensors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.runtime.interpreter import InterpretedFunction

SMALL = 2**14
"""Elements up to which a tensor's numbers are computed: token ids, positions, counts."""

_CLEARED = 2**22
"""Up to which it holds zeros, and not what was there before, which need not be numbers: logits of a step."""


class ComputingNothing(TorchDispatchMode):
    """Within, operations on larger tensors are not computed. It is entered before a simulator, which then counts what
    it gives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, kind = kwargs or {}, _kind(func)
        given = [*_tensors(args), *_tensors(kwargs.values())]
        if kind.only_views or kind.leaves_unwritten:
            return func(*args, **kwargs)
        if kind.writes:
            written = [
                x for i, name in kind.writes for x in _tensors([kwargs.get(name, args[i] if i < len(args) else None)])
            ]
            if all(x.numel() <= SMALL for x in given):
                return func(*args, **kwargs)
            return written[0] if len(written) == 1 else tuple(written)
        if given and all(x.numel() <= SMALL for x in given) and not kind.name.startswith("new_"):
            return func(*args, **kwargs)
        described = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        makes = any(argument.name == "device" for argument in func._schema.arguments)
        options = described[1] | ({"device": "meta"} if makes else {})
        return tree_map_only(Tensor, _unwritten, func(*described[0], **options))


def _unwritten(shape: Tensor) -> Tensor:
    """A tensor like one that has no memory; of zeros where it is small or of whole numbers."""
    made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
    return made.zero_() if made.numel() <= _CLEARED or not made.is_floating_point() else made


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Within, Triton's kernels, compiled or interpreted, are not launched; what they are to write to is taken."""
    kinds: list[Any] = [triton.JITFunction, InterpretedFunction]
    runs = [kind.run for kind in kinds]
    for kind in kinds:
        kind.run = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for kind, run in zip(kinds, runs, strict=True):
            kind.run = run


class UnwrittenWeights:
    """`Checkpoint` of weights that nobody wrote."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def read(
        self,
        name: str,
        *shape: int,
        rows: slice | None = None,
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        parts = (rows, columns, *[None] * len(shape))[: len(shape)]
        cut = [range(size)[part] if part else range(size) for size, part in zip(shape, parts, strict=True)]
        return torch.empty([len(one) for one in cut], dtype=dtype or self.dtype)

    def check_all_read(self) -> None:
        pass
