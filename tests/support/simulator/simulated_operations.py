"""What reaches a simulator of CUDA: PyTorch's operations, each on the current stream or on the host, and host reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from cuda_simulator import HOST, Race, Simulator
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

_SORTING = 32
"""Bytes for each float32 number that CUDA takes beside the result to sort several rows together: pairs of row and
place, twice, and of sorted pairs the keys and buffers (aten/src/ATen/native/cuda/SortStable.cu of PyTorch)."""


class HostReads:
    """Tells the simulator which numbers the host reads: some methods of tensors bring them there without an operation
    that could be seen, or before one. Here these methods are replaced, in all threads: simulators that are open at the
    same time must be nested. A `TorchFunctionMode` would see every call, to find these."""

    NAMES = ("cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")
    """Methods that, on CUDA, wait for the current stream before."""

    def __init__(self, simulator: Simulator, operations: Operations) -> None:
        """Args: `operations` is the mode of the same simulator, which is entered next."""
        self._simulator, self._operations = simulator, operations
        self._replaced = [patch.object(Tensor, name, self._reading(getattr(Tensor, name))) for name in self.NAMES]
        self._replaced.append(patch.object(Tensor, "to", self._converting(Tensor.to)))

    def __enter__(self) -> HostReads:
        for one in self._replaced:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in reversed(self._replaced):
            one.stop()

    def _is_seen(self) -> bool:
        """Whether operations of this thread are simulated here: not within one, nor where the simulation is off."""
        return any(mode is self._operations for mode in _get_current_dispatch_mode_stack())

    def _reading(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._is_seen():
                return method(tensor, *args, **kwargs)
            simulator, name = self._simulator, method.__name__
            simulator.check_freed()
            if simulator.memory(tensor).host:
                simulator.access(tensor, HOST, simulator.tick_host(), False, name)
                return method(tensor, *args, **kwargs)
            stream = simulator.current
            simulator.access(tensor, stream.number, simulator.tick(stream), False, name)
            stream.synchronize()
            if name != "cpu":
                return method(tensor, *args, **kwargs)
            with simulator_off():
                copy = tensor.clone()
            simulator.put(simulator.memory(copy), True)
            return copy

        return read

    def _converting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Numbers of the host in another format: in inference mode a copy, which would be taken for one to a device."""

        @functools.wraps(method)
        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            simulator = self._simulator
            is_dtype = bool(args) and isinstance(args[0], torch.dtype)
            if not is_dtype or not self._is_seen() or not simulator.memory(tensor).host:
                return method(tensor, *args, **kwargs)
            simulator.access(tensor, HOST, simulator.tick_host(), False, "to")
            with simulator_off():
                result = method(tensor, args[0])
            simulator.put(simulator.memory(result), True)
            return result

        return to


@contextmanager
def simulator_off() -> Iterator[None]:
    """Operations within are not simulated."""
    with _disable_current_modes():
        yield


class Operations(TorchDispatchMode):
    """Operations, each on the stream that is current or on the host."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()
        self._simulator = simulator

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch asks; nothing is compiled here, and saying so takes longer than most of the operations."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = _kind(func)
        given = _tensors(args)
        if kwargs:
            given += _tensors(kwargs.values())
        simulator = self._simulator
        result = None
        if kind.only_views:
            result = func(*args, **kwargs)
            if _is_view(result, given):
                return result  # else it is a copy: in inference mode `to` and others come here that give either
        simulator.check_freed()
        simulator.wander()
        if kind.copies:
            return self._copy(func, args, kwargs)
        memories = [simulator.memory(x) for x in given]
        hosts = simulator.place(memories)
        on_host = True in hosts and all(hosts)
        if (
            not on_host
            and True in hosts
            and not all(x.dim() == 0 for x, host in zip(given, hosts, strict=True) if host)
        ):
            raise Race(f"{func} mixes memory of host and device")
        written = [
            id(x) for i, name in kind.writes for x in _tensors((kwargs.get(name, args[i] if i < len(args) else None),))
        ]
        stream = HOST if on_host else simulator.current.number
        clock = simulator.tick_host() if on_host else simulator.tick(simulator.current)
        for x, memory in zip(given, memories, strict=True):
            simulator.access(x, stream, clock, id(x) in written, kind.name, memory)
        if not kind.only_views:
            result = func(*args, **kwargs)
        for x in _tensors((result,)):
            made = simulator.memory(x)
            if made not in memories:
                if not made.pinned and (True in hosts or False in hosts):
                    simulator.put(made, on_host)
                elif not made.pinned:
                    made.host = None
                if not kind.leaves_unwritten:
                    simulator.access(x, stream, clock, True, kind.name, made)
        if kind.name == "sort" and not on_host:
            simulator.borrow(_SORTING * given[0].numel())
        if kind.name == "_local_scalar_dense" and not on_host:
            simulator.current.synchronize()
        return result

    def _copy(self, func, args, kwargs):
        """Between host and device, on the stream that is current; the host waits unless it is told not to."""
        simulator = self._simulator
        target, source = args[0], args[1]
        to, source_memory = simulator.memory(target), simulator.memory(source)
        for memory in (to, source_memory):
            memory.host = bool(memory.host)  # what may be anywhere is on the device
        what = "copy_"
        if to.host and source_memory.host:
            clock = simulator.tick_host()
            simulator.access(source, HOST, clock, False, what)
            simulator.access(target, HOST, clock, True, what)
            return func(*args, **kwargs)
        stream = simulator.current
        clock = simulator.tick(stream)
        if source_memory.host and not source_memory.pinned:  # read before the call returns
            simulator.access(source, HOST, simulator.tick_host(), False, what)
        else:
            simulator.access(source, stream.number, clock, False, what)
        simulator.access(target, stream.number, clock, True, what)
        waits = to.host != source_memory.host and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if to.host and not to.pinned:
            waits = True
        if stream.number == 0 or simulator.random is None:
            func(*args, **kwargs)
        else:
            self._later(stream, func, args, kwargs, stays=bool(source_memory.host) and not source_memory.pinned)
        if waits:
            stream.synchronize()
        return target

    def _later(self, stream, func, args, kwargs, *, stays: bool) -> None:
        target, source = args[0], args[1]
        if stays:
            source = source.clone()

        def begin() -> None:
            if target.is_floating_point() or target.dtype == torch.uint8:
                with simulator_off(), torch.inference_mode():
                    target.fill_(float("nan") if target.is_floating_point() else 255)  # which is no slot

        def copy() -> None:
            with simulator_off(), torch.inference_mode():
                func(target, source)

        stream.ask(begin)
        stream.ask(copy)


@dataclass(frozen=True)
class _Kind:
    """What an operation does with its arguments."""

    name: str
    copies: bool
    only_views: bool
    leaves_unwritten: bool
    writes: tuple[tuple[int, str], ...]
    """Place and name of the arguments it writes to."""


_KINDS: dict[int, tuple[Any, _Kind]] = {}
"""Operations, and what they do, by their addresses: an operation's own hash takes longer than all the rest."""


def _kind(func: Any) -> _Kind:
    found = _KINDS.get(id(func))
    if found is None:
        schema, name = func._schema, func._overloadpacket.__name__
        kind = _Kind(
            name,
            copies=name == "copy_",
            only_views=bool(schema.returns) and all(r.alias_info and not r.alias_info.is_write for r in schema.returns),
            leaves_unwritten=name in {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"},
            writes=tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write),
        )
        found = _KINDS[id(func)] = func, kind
    return found[1]


def _is_view(result: Any, given: list[Tensor]) -> bool:
    """Whether it lies, or all of its tensors lie, in memory of those given."""
    if isinstance(result, Tensor) and len(given) == 1:  # nearly always
        return result.untyped_storage()._cdata == given[0].untyped_storage()._cdata
    known = {x.untyped_storage()._cdata for x in given}
    return all(x.untyped_storage()._cdata in known for x in _tensors((result,)))


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Those among them, and in lists among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
