"""Stands for CUDA graphs on a CPU, and for a device that a host may have to wait for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from tiny import random_tokens
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triforce.offload import Engine

PROMPT = random_tokens(300, seed=3)
LENGTHS: dict[str, Any] = {"draft_length": 3, "block_length": 7}
FAMILIES = ["llama", "mistral-window", "qwen3-bias"]
"""What passes are captured of."""

_WAITING_CALLS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
_WAITING_OPS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "multinomial", "unique_dim"}
"""Operations that copy a number to the host on CUDA, if only to check their input or to know a size."""

_HOST_DATA = {"lift_fresh", "lift"}
"""What makes a tensor of Python numbers: it copies from memory that a graph would read again, and on CUDA waits."""


class NoWaiting(TorchFunctionMode):
    """Within, what waits for the device raises `RuntimeError`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _WAITING_CALLS:
            raise RuntimeError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self._operations = _NoWaitingOperations()
        self._operations.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._operations.__exit__(*error)


class _NoWaitingOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        _refuse(func, _WAITING_OPS)
        return func(*args, **(kwargs or {}))


def _refuse(func: Any, names: set[str]) -> None:
    if func.overloadpacket.__name__ in names:
        raise RuntimeError(f"{func} waits for the device")


class Tape(TorchDispatchMode):
    """Records operations with the tensors they took; `replay` does the same to the same memory."""

    current: Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable, tuple, dict, list[tuple[int, Tensor]]]] = []
        self.is_piece = False

    def __enter__(self):
        Tape.current = self
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        Tape.current = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        _refuse(func, _WAITING_OPS | _HOST_DATA)
        return self.run(func, args, kwargs or {}, func._schema.is_mutable)

    def run(self, func: Callable, args: tuple, kwargs: dict, mutates: bool) -> Any:
        """Runs and records `func`, unless it only gives views."""
        given = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **kwargs)
        made = [(i, x) for i, x in enumerate(tree_leaves(result)) if isinstance(x, Tensor) and _address(x) not in given]
        if made or mutates:
            self.operations.append((func, args, kwargs, made))
        return result

    def spoil(self) -> None:
        """What was computed so far is not there before it is computed again, as nothing runs during a capture."""
        for *_, made in self.operations:
            for _, x in made:
                x.fill_(float("nan") if x.is_floating_point() else False if x.dtype == torch.bool else -(10**6))

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, made in self.operations:
            result = func(*args, **kwargs)
            if made:
                again = [result] if isinstance(result, Tensor) else tree_leaves(result)
                for i, x in made:
                    x.copy_(again[i])


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Recorder:
    """`graphs.Capture` for the CPU."""

    runs = False
    joins = True
    passes_before = 1
    most_tokens = 32
    pieces_rows = pieces_tokens = 32

    def __init__(self) -> None:
        self.warm_ups = self.captures = self.replays = 0
        self.pieces = 0
        """Of all captures: one, or several, each."""
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()

    @property
    def alive(self) -> int:
        """Captured functions that anybody still holds, or that were not cleared."""
        return sum(bool(tape.operations) for tape in self._tapes)

    @property
    def counts(self) -> dict[str, int]:
        return {"warm_ups": self.warm_ups, "captures": self.captures, "replays": self.replays}

    def held(self, results: set[int]) -> Iterator[tuple[str, Tensor]]:
        """What captured passes compute on the way, of those whose results somebody holds, and pieces: see
        `offload.held`.

        Args: `results` are storages, by `_cdata`.
        """
        for tape in self._tapes:
            made = [x for *_, made in tape.operations for _, x in made]
            if tape.is_piece or any(x.untyped_storage()._cdata in results for x in made):
                yield from (("captured", x) for x in made)

    def clear(self) -> None:
        for tape in self._tapes:
            tape.operations.clear()

    def takes(self, decoder) -> bool:
        return not decoder.waits_in_steps

    def pool(self) -> None:
        return None

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        self.warm_ups += 1
        with NoWaiting():
            return run()

    def capture(self, run: Callable[[Callable], Tensor], pool: None) -> tuple[list[Callable[[], None]], Tensor]:
        self.captures += 1
        tapes: list[Tape] = []
        with NoWaiting(), ExitStack() as recorded:

            def cut() -> None:
                recorded.close()
                tapes.append(recorded.enter_context(Tape()))

            cut()
            result = run(cut)
        self._tapes.update(tapes)
        self.pieces += len(tapes)
        for tape in tapes:
            tape.is_piece = len(tapes) > 1
        with torch.inference_mode():
            for tape in tapes:
                tape.spoil()

        def replay(tape: Tape) -> None:
            self.replays += tape is tapes[0]
            tape.replay()

        return [partial(replay, tape) for tape in tapes], result


def recorded_engine(pair: Any, **changes: Any) -> tuple[Engine, Recorder]:
    """An engine of a pair's directories whose passes a recorder captures."""
    settings: dict[str, Any] = {"budget": 64, **LENGTHS, **changes}
    engine = Engine.load(pair[0], pair[1], device="cpu", dtype="float32", **settings)
    engine._capture = recorder = Recorder()
    return engine, recorder


@contextmanager
def count_waits() -> Iterator[list[str]]:
    """A list that grows by the name of each call that waits for the device."""
    calls: list[str] = []

    class Counting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            name = getattr(func, "__name__", "")
            if name in _WAITING_CALLS | _WAITING_OPS:
                calls.append(name)
            return func(*args, **(kwargs or {}))

    with Counting():
        yield calls
