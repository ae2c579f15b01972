"""Capturing passes on a CPU: the list of a pass's operations, repeated on the same memory. See `capture.Capture`.

A pass of a small model over a few tokens is some hundred short operations, and Python takes about as long to find out
what they are, and where their results go, as the processor takes to compute them. A captured pass knows.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...kernels.cpu.calls import noting
from ...kernels.cpu.library import Level, cpu_level
from ...kernels.selection import selected

_READS_NUMBERS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero"}
"""Operations whose result depends on numbers that another pass would have others of."""

_COPIES = {"clone", "contiguous", "reshape", "to", "_to_copy"}
"""Operations that give their first argument's numbers in the same order, in another shape or dtype."""
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_NOTHING = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
"""Operations that only give memory."""


def replays_on_cpu() -> bool:
    """Whether passes on this processor consist of compiled kernels, so that what they are made of hardly takes time."""
    return cpu_level() >= Level.AVX512_BF16


class CpuCapture:
    """Captures what PyTorch and the compiled kernels are asked for. Capturing runs the pass, too."""

    runs = True
    pads = False
    passes_before = 4
    most_tokens = 16

    def __init__(self) -> None:
        self._tapes: weakref.WeakSet[_Tape] = weakref.WeakSet()

    def conditions(self) -> object:
        return torch.get_num_threads(), selected()

    def pool(self) -> Any:
        return None

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        return run()

    def capture(self, run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor]:
        tape = _Tape()
        with tape, noting(tape.calls.append):
            result = run()
        self._tapes.add(tape)
        return tape.replay, result

    def clear(self) -> None:
        for tape in self._tapes:
            tape.clear()


class _Tape(TorchDispatchMode):
    """Notes operations while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self._kept: list[Any] = []  # memory that compiled kernels are given the addresses of

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or else the first operation would import PyTorch's compiler, which takes more than a second

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _READS_NUMBERS:
            raise RuntimeError(f"{name} reads what a captured pass cannot know")
        result = func(*args, **kwargs)
        self._kept.append(result)
        if func._schema.is_mutable:
            self.calls.append(functools.partial(func, *args, **kwargs))
        elif isinstance(result, Tensor) and name not in _NOTHING and not _is_view(result, args):
            self.calls.append(_again(func, name, args, kwargs, result))
        elif not isinstance(result, Tensor) and not all(_is_view(part, args) for part in result):
            raise RuntimeError(f"{name} has several results")
        return result

    def replay(self) -> None:
        """Runs all operations again. Needs inference mode."""
        for call in self.calls:
            failed = call()
            if failed.__class__ is int and failed:
                raise MemoryError("no memory for the temporaries of a captured pass")

    def clear(self) -> None:
        self.calls.clear()
        self._kept.clear()


def _is_view(result: Tensor, args: tuple) -> bool:
    """Whether `result` lies in the memory of an argument."""
    address = result.untyped_storage().data_ptr()
    return any(isinstance(x, Tensor) and x.untyped_storage().data_ptr() == address for x in args)


def _again(func: Any, name: str, args: tuple, kwargs: dict, result: Tensor) -> Callable[[], Any]:
    """What computes `result` anew, in its place."""
    if name in _ZEROS:
        return result.zero_
    if name in _COPIES:
        return functools.partial(result.view(args[0].shape).copy_, args[0])
    into = _into(func)
    if into is not None:
        return functools.partial(into, *args, **kwargs, out=result)
    return lambda: result.copy_(func(*args, **kwargs))


@functools.cache
def _into(func: Any) -> Any | None:
    """The variant of an operation that is given the tensor for its result."""
    taken = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, overload)
        arguments = other._schema.arguments
        if taken == [(a.name, str(a.type)) for a in arguments if not a.is_out] and len(arguments) == len(taken) + 1:
            return other
    return None
