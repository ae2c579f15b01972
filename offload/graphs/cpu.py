"""Captures passes on a CPU, as a list of operations that are repeated on the same memory. See `capture.Capture`.

A pass of a small model over a few tokens has about a hundred short operations. Python takes about as long to determine
these operations, and the memory for their results, as the processor takes to compute them. A captured pass saves this
time.
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
"""Operations whose result, or the size of whose result, depends on values that the host reads. These values can differ
in another pass."""

_COPIES = {"clone", "contiguous", "reshape", "to", "_to_copy"}
"""Operations whose result has the values of the first argument in the same order, in another shape or dtype."""
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_NOTHING = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
"""Operations that only allocate memory."""


class CpuCapture:
    """Captures the calls of PyTorch's operations and of the compiled kernels. Capturing a pass also runs it.

    Joint passes of several sequences over caches other than full caches are not captured: they take longer than Python
    takes to call their operations, and there are too many combinations of sequences.
    """

    runs = True
    joins = False
    passes_before = 2
    most_tokens = 10
    pieces_rows = 8  # with more rows, Python's share of the time is small
    pieces_tokens = 1  # a pass with more tokens of a sequence, such as a verification, does not become faster

    def __init__(self) -> None:
        self._tapes: weakref.WeakSet[_Tape] = weakref.WeakSet()

    def takes(self, decoder: Decoder) -> bool:
        # Without compiled kernels, passes hardly become faster, and need memory that grows with the cache. Quantised
        # weights in float32 would need memory for all their values.
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
        """See `offload.held`: the memory in which captured passes compute, without their results. Those who replay the
        passes hold the results."""
        for room in {tape.room for tape in self._tapes}:
            yield from room.held() if room else ()


class _Room:
    """The memory in which a captured pass computes. A replay has the same order of operations as the capture. So the
    memory of a result can be used again as soon as nothing refers to the result: all layers use the same memory."""

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}  # by address
        self.result: int | None = None
        """The address of the pass's result."""
        self._spare: set[int] = set()  # addresses of blocks that are free

    def __contains__(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._blocks

    def like(self, made: Tensor) -> Tensor:
        """A tensor with the shape and dtype of `made`. Its memory becomes free when nothing refers to the tensor."""
        size = -(-made.untyped_storage().nbytes() // 64) * 64
        if not size:
            return made
        # A small result that lasts must not occupy a much larger block.
        fitting = (at for at in self._spare if size <= self._blocks[at].nbytes <= 2 * size)
        at = min(fitting, key=lambda at: self._blocks[at].nbytes, default=None)
        if at is None:
            block = torch.empty(size, dtype=torch.uint8)
            at = block.data_ptr()
            self._blocks[at] = block
        self._spare.discard(at)
        taken = self._blocks[at].numpy()  # a new array, which lives as long as the tensor
        weakref.finalize(taken, self._spare.add, at).atexit = False
        return _as(made, taken)

    def noted(self, x: Any) -> Any:
        """An argument in the form in which a recorded operation keeps it: it does not count as a reference to its
        memory.
        """
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
    """A tensor in `memory` with the dtype, shape, strides and offset of `x`."""
    return torch.from_numpy(memory).view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())


class _Tape(TorchDispatchMode):
    """Records operations while its context is active."""

    def __init__(self, room: _Room) -> None:
        super().__init__()
        self.room: _Room | None = room
        """The memory in which the recorded operations compute; `None` after `clear`."""
        self._calls: list[Callable[[], Any]] = []
        self._kept: list[Any] = []  # tensors in other memory whose addresses compiled kernels get
        self._in_use = threading.Lock()
        self.note = self._calls.append

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation would import PyTorch's compiler, which takes more than a second

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, room = kwargs or {}, self.room
        assert room is not None
        name = func.overloadpacket.__name__
        if name in _READS_NUMBERS or (name == "index" and any(_is_mask(x) for x in args[1])):
            raise RuntimeError(f"the operation {name} reads numbers, which are not known when a pass is captured")
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
        """Runs all operations again. Only in inference mode.

        Raises:
            RuntimeError: the captured pass was cleared.
            MemoryError: a compiled kernel has no memory for temporary results.
        """
        torch.get_num_threads()  # sets OpenMP's number of threads, if this thread has not computed anything yet
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
    """A function that computes `result` again, in the same memory."""
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
    """The variant of an operation that takes the tensor for its result as an argument; `None` if there is none."""
    taken = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, overload)
        arguments = other._schema.arguments
        if taken == [(a.name, str(a.type)) for a in arguments if not a.is_out] and len(arguments) == len(taken) + 1:
            return other
    return None
