"""The tensors that objects hold on the compute device, by the part of the run plan that counts them.

An object that keeps tensors from one round to the next has a method `held()`. It yields each tensor with its part: the
name of a field of `RunPlan`, or `captured` for tensors of captured passes. On a GPU, the plan's reserve covers
`captured`. `Engine.held` yields all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor

from ..kernels.plain_attention import Scratch

Held = Iterator[tuple[str, Tensor]]
"""Pairs of part and tensor. The same memory may come several times, as a view or from several owners."""


class Holder(Protocol):
    """An object that keeps tensors."""

    def held(self) -> Held: ...


def bytes_by_part(held: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Bytes of the memory behind these tensors, by part. Memory that several share counts once, for the first."""
    found: dict[str, int] = {}
    known: set[int] = set()
    for part, tensor in held:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            found[part] = found.get(part, 0) + storage.nbytes()
    return found


def held_bytes(held: Iterable[tuple[str, Tensor]], part: str | None = None) -> int:
    """Bytes of the memory behind these tensors, or behind those of one part."""
    found = bytes_by_part(held)
    return sum(found.values()) if part is None else found.get(part, 0)


def held_scratch(scratch: Scratch) -> Held:
    """The buffers that `attend` keeps between calls."""
    yield from (("scratch", buffer) for _, buffer in scratch.held())
