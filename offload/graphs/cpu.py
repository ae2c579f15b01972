"""Capturing passes on a CPU: the list of a pass's operations, repeated on the same memory. See `capture.Capture`.

A pass of a small model over a few tokens is some hundred short operations, and Python takes about as long to find out
what they are, and where their results go, as the processor takes to compute them. A captured pass knows.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...kernels.cpu.calls import noting
from ...kernels.layers import steps_are_compiled, steps_make_numbers
from ...tp.decoder import Decoder
from ..held import Held

_READS_NUMBERS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"}
"""Operations whose result, or its size, the host reads from numbers that another pass would have others of."""

_COPIES = {"clone", "contiguous", "reshape", "to", "_to_copy"}
"""Operations that give their first argument's numbers in the same order, in another shape or dtype."""
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_NOTHING = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
"""Operations that only give memory."""


class CpuCapture:
    """Captures what PyTorch and the compiled kernels are asked for. Capturing runs the pass, too.

    Several sequences' passes over what is not a full cache take longer than Python takes to call their operations, and
    there are too many combinations of them.
    """

    runs = True
    joins = False
    passes_before = 2
    most_tokens = 10
    pieces_rows = 8  # of more the host's share is small
    pieces_tokens = 1  # with several, as verifications are, a pass takes as long as it comes

    def __init__(self) -> None:
        self._tapes: weakref.WeakSet[_Tape] = weakref.WeakSet()

    def takes(self, decoder: Decoder) -> bool:
        # Others' passes take hardly less time when they are replayed, and need memory that grows with the cache; or, of
        # quantised weights in float32, memory for all their numbers.
        compiled = steps_are_compiled(decoder.device, decoder.dtype, decoder.config.head_dim)
        expands = decoder.config.quantisation is not None and not steps_make_numbers(decoder.device, decoder.dtype)
        return compiled and not expands and not decoder.waits_in_steps

    def pool(self) -> Any:
        return None

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        return run()

    def capture(
        self, run: Callable[[Callable[[], None]], Tensor], pool: Any
    ) -> tuple[list[Callable[[], None]], Tensor]:
        tapes: list[_Tape] = []
        room = _Room()
        with ExitStack() as noted:

            def cut() -> None:
                noted.close()
                tapes.append(_Tape(room))
                noted.enter_context(tapes[-1])
                noted.enter_context(noting(tapes[-1].note))

            cut()
            result = run(cut)
        room.result = result.untyped_storage().data_ptr()
        self._tapes.update(tapes)
        return [tape.replay for tape in tapes], result

    def clear(self) -> None:
        for tape in self._tapes:
            tape.clear()

    def held(self) -> Held:
        """See `offload.held`: what captured passes compute in, but for results, which whoever replays them has."""
        for room in {tape.room for tape in self._tapes}:
            yield from room.held() if room else ()


class _Room:
    """Memory that a captured pass computes in. A pass is repeated in the order it was captured in, so what a result
    had is the next one's as soon as nobody has the result any more: layer after layer uses the same."""

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}  # by address
        self.result: int | None = None
        """The address of what the pass brings."""
        self._spare: set[int] = set()  # addresses of those that nobody has

    def __contains__(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._blocks

    def like(self, made: Tensor) -> Tensor:
        """Memory for a result like this one, as long as somebody has it."""
        size = -(-made.untyped_storage().nbytes() // 64) * 64
        if not size:
            return made
        # A much larger block would be held up by a small result that lasts.
        fitting = (at for at in self._spare if size <= self._blocks[at].nbytes <= 2 * size)
        at = min(fitting, key=lambda at: self._blocks[at].nbytes, default=None)
        if at is None:
            block = torch.empty(size, dtype=torch.uint8)
            at = block.data_ptr()
            self._blocks[at] = block
        self._spare.discard(at)
        taken = self._blocks[at].numpy()  # an array of its own, which the tensor keeps
        weakref.finalize(taken, self._spare.add, at).atexit = False
        return _as(made, taken)

    def noted(self, x: Any) -> Any:
        """An argument as an operation that is repeated keeps it: without counting as somebody who has its memory."""
        if isinstance(x, (list, tuple)):
            return type(x)(map(self.noted, x))
        if not (isinstance(x, Tensor) and x in self):
            return x
        return _as(x, self._blocks[x.untyped_storage().data_ptr()].numpy())

    def held(self) -> Held:
        """See `CpuCapture`."""
        yield from (("captured", block) for at, block in self._blocks.items() if at != self.result)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks.values())


def _as(x: Tensor, memory: NDArray[np.uint8]) -> Tensor:
    """A tensor in this memory as `x` is in its own."""
    return torch.from_numpy(memory).view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())


class _Tape(TorchDispatchMode):
    """Notes operations while it is entered."""

    def __init__(self, room: _Room) -> None:
        super().__init__()
        self.room: _Room | None = room
        """What it computes in, until it is cleared."""
        self._calls: list[Callable[[], Any]] = []
        self._kept: list[Any] = []  # memory of others that compiled kernels are given the addresses of
        self._in_use = threading.Lock()
        self.note = self._calls.append

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or else the first operation would import PyTorch's compiler, which takes more than a second

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, room = kwargs or {}, self.room
        assert room is not None
        name = func.overloadpacket.__name__
        if name in _READS_NUMBERS or (name == "index" and any(_is_mask(x) for x in args[1])):
            raise RuntimeError(f"{name} reads what a captured pass cannot know")
        result = func(*args, **kwargs)
        noted, named = room.noted(args), {key: room.noted(x) for key, x in kwargs.items()}
        parts = result if isinstance(result, (list, tuple)) else [result]
        if func._schema.is_mutable:
            self.note(functools.partial(func, *noted, **named))
        elif not all(_is_view(part, args) for part in parts):
            if not isinstance(result, Tensor):
                raise RuntimeError(f"{name} has a result that cannot be computed in its place")
            if name in _NOTHING:
                return room.like(result)
            own = room.like(result).copy_(result)
            self.note(_again(func, name, noted, named, room.noted(own)))
            return own
        self._kept += [x for x in parts if isinstance(x, Tensor) and x not in room]
        return result

    def replay(self) -> None:
        """Runs all operations again. Needs inference mode."""
        torch.get_num_threads()  # sets OpenMP's number, in a thread that has not computed anything yet
        with self._in_use:
            if self.room is None:
                raise RuntimeError("a captured pass was dropped")
            for call in self._calls:
                failed = call()
                if failed.__class__ is int and failed:
                    raise MemoryError("no memory for the temporaries of a captured pass")

    def clear(self) -> None:
        with self._in_use:
            self._calls.clear()
            self._kept.clear()
            self.room = None


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _is_view(result: Any, args: tuple) -> bool:
    """Whether `result` is a tensor in the memory of an argument."""
    if not isinstance(result, Tensor):
        return False
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
