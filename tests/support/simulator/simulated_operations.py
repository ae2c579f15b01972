"""What reaches a simulator of CUDA: PyTorch's operations, each on the current stream or on the host, and host reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from cuda_simulator import HOST, Race, Simulator
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_HOST_READS = {"cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"}
"""Calls that read numbers on the host and, on CUDA, wait for the current stream before."""


_SORTING = 32
"""Bytes for each float32 number that CUDA takes beside the result to sort several rows together: pairs of row and
place, twice, and of sorted pairs the keys and buffers (aten/src/ATen/native/cuda/SortStable.cu of PyTorch)."""


class Calls(TorchFunctionMode):
    """Calls that bring numbers to the host without an operation that could be seen."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()
        self._simulator = simulator

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "to" and isinstance(args[1], torch.dtype) and self._simulator.memory(args[0]).host:
            return self._converted(args[0], args[1])
        if name not in _HOST_READS:
            return func(*args, **kwargs)
        simulator, tensor = self._simulator, args[0]
        simulator.check_freed()
        if simulator.memory(tensor).host:
            simulator.access(tensor, HOST, simulator.tick_host(), False, name)
            return func(*args, **kwargs)
        stream = simulator.current
        simulator.access(tensor, stream.number, simulator.tick(stream), False, name)
        stream.synchronize()
        if name != "cpu":
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        with simulator_off(simulator):
            copy = tensor.clone()
        simulator.put(simulator.memory(copy), True)
        return copy

    def _converted(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Numbers of the host in another format: in inference mode a copy, which would be taken for one to a device."""
        simulator = self._simulator
        simulator.access(tensor, HOST, simulator.tick_host(), False, "to")
        with simulator_off(simulator):
            result = tensor.to(dtype)
        simulator.put(simulator.memory(result), True)
        return result


@contextmanager
def simulator_off(simulator: Simulator) -> Iterator[None]:
    """Operations within are none of the simulation."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
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
        result = func(*args, **kwargs) if kind.only_views else None
        given = [*_tensors(args), *_tensors(kwargs.values())]
        known = {x.untyped_storage()._cdata for x in given}
        if kind.only_views and all(x.untyped_storage()._cdata in known for x in _tensors([result])):
            return result  # else it is a copy: in inference mode `to` and others come here that give either
        simulator = self._simulator
        simulator.check_freed()
        simulator.wander()
        if kind.copies:
            return self._copy(func, args, kwargs)
        hosts = simulator.place(given)
        on_host = bool(hosts) and all(hosts)
        if any(hosts) and not on_host and not all(x.dim() == 0 for x, host in zip(given, hosts, strict=True) if host):
            raise Race(f"{func} mixes memory of host and device")
        written = {
            id(x) for i, name in kind.writes for x in _tensors([kwargs.get(name, args[i] if i < len(args) else None)])
        }
        stream = HOST if on_host else simulator.current.number
        clock = simulator.tick_host() if on_host else simulator.tick(simulator.current)
        for x in given:
            simulator.access(x, stream, clock, id(x) in written, kind.name)
        if not kind.only_views:
            result = func(*args, **kwargs)
        for x in _tensors([result]):
            if x.untyped_storage()._cdata not in known:
                made = simulator.memory(x)
                if not made.pinned and any(host is not None for host in hosts):
                    simulator.put(made, on_host)
                elif not made.pinned:
                    made.host = None
                if not kind.leaves_unwritten:
                    simulator.access(x, stream, clock, True, kind.name)
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
                with simulator_off(self._simulator), torch.inference_mode():
                    target.fill_(float("nan") if target.is_floating_point() else 255)  # which is no slot

        def copy() -> None:
            with simulator_off(self._simulator), torch.inference_mode():
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


@cache
def _kind(func: Any) -> _Kind:
    schema, name = func._schema, func._overloadpacket.__name__
    return _Kind(
        name,
        copies=name == "copy_",
        only_views=bool(schema.returns) and all(r.alias_info and not r.alias_info.is_write for r in schema.returns),
        leaves_unwritten=name in {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"},
        writes=tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write),
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
