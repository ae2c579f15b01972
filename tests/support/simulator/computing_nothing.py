"""Runs of models of true shapes that compute nothing: operations on much memory give results that nobody wrote, of
which the system provides no page, so that a run takes seconds and a counted simulator sees all memory it would take."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from simulated_operations import _kind, _tensors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.interpreter import InterpretedFunction

SMALL = 2**14
"""Elements up to which a tensor's numbers are computed: token ids, positions, counts."""

_CLEARED = 2**22
"""Up to which it holds zeros, and not what was there before, which need not be numbers: logits of a step."""


class ComputingNothing(TorchDispatchMode):
    """Within, operations on larger tensors are not computed. It is entered before a simulator, which then counts what
    it gives."""

    def __init__(self) -> None:
        super().__init__()
        # What an operation gives, without memory, by all that this depends on: layers and rounds repeat operations.
        # `None` of views.
        self._results: dict[object, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `Operations`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, kind = kwargs or {}, _kind(func)
        given = [*_tensors(args), *_tensors(kwargs.values())]
        small = all(x.numel() <= SMALL for x in given)
        if kind.leaves_unwritten or (kind.only_views and small):
            return func(*args, **kwargs)
        if kind.writes:
            if small:
                return func(*args, **kwargs)
            written = [
                x for i, name in kind.writes for x in _tensors([kwargs.get(name, args[i] if i < len(args) else None)])
            ]
            return written[0] if len(written) == 1 else tuple(written)
        if given and small and not kind.name.startswith("new_"):
            return func(*args, **kwargs)
        alike = id(func), _alike(args), _alike(tuple(kwargs.items()))
        if alike not in self._results:
            described = tree_map_only(Tensor, _described, (args, kwargs))
            makes = any(argument.name == "device" for argument in func._schema.arguments)
            options = described[1] | ({"device": "meta"} if makes else {})
            result = func(*described[0], **options)
            known = {x.untyped_storage()._cdata for x in _tensors(tree_leaves(described))}
            only_views = all(x.untyped_storage()._cdata in known for x in _tensors([result]))
            self._results[alike] = None if only_views else result
        if (result := self._results[alike]) is None:
            return func(*args, **kwargs)
        return tree_map_only(Tensor, _unwritten, result)


def _alike(given: Any) -> object:
    """What arguments have in common whose results have one shape."""
    if isinstance(given, Tensor):
        return given.shape, given.stride(), given.dtype
    if isinstance(given, (list, tuple)):
        return tuple(map(_alike, given))
    return type(given), given


def _described(x: Tensor) -> Tensor:
    """A tensor like `x` without memory."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _unwritten(shape: Tensor) -> Tensor:
    """A tensor like one that has no memory; of zeros where it is small or of whole numbers."""
    cleared = shape.numel() <= _CLEARED or not shape.is_floating_point()
    if cleared and shape.numel() > SMALL:  # new memory of the system holds zeros, and takes no page until it is used
        extent = 1 + sum((n - 1) * step for n, step in zip(shape.shape, shape.stride(), strict=True))
        memory = mmap.mmap(-1, extent * shape.element_size())
        return torch.frombuffer(memory, dtype=shape.dtype).as_strided(shape.shape, shape.stride())
    made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
    return made.zero_() if cleared else made


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
