"""A drafting tier's passes, captured once and replayed where that can be done.

A pass over a few tokens is some hundred small kernels, and a host takes longer to start them one by one than a GPU to
run them; captured as a CUDA graph they start as one. A graph repeats the same kernels on the same addresses, so there
is one for each number of tokens, and what changes from pass to pass (the tokens, their rotation, their slots) is copied
into tensors of fixed places first. Where passes cannot be captured they run as they come, with the same result.

What captures is behind a protocol: CUDA's own is in `cuda_graphs`; here nothing knows of CUDA.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...kernels.selection import padded_rows
from ...tp.errors import PeerError
from ...tp.model.decoder import Cache, Decoder
from ...tp.model.rope import Rows
from ...tp.parallel.ranks import ALONE, Ranks
from ..caches.together import together
from ..caches.token_slots import TokenSlots

MOST_CAPTURED = 32
"""Tokens of a pass that is captured at most: longer ones are rare, and starting their kernels takes a smaller share."""


class Capture(Protocol):
    """Turns a function that starts kernels into one that starts them again, at once."""

    def pool(self) -> Any:
        """New room that captured functions share for what they compute on the way."""
        ...

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        """Runs a function as it will be captured, which compiles and loads what it needs; its result."""
        ...

    def capture(self, run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor]:
        """Captures a function without relying on what it computes meanwhile.

        Returns:
            What replays it, and the tensor that holds its result after each replay, until the next one of this pool.

        Raises:
            RuntimeError: it does something that cannot be captured, such as waiting for the device.
        """
        ...

    def clear(self) -> None:
        """Frees what all captures so far have left on the device, whoever holds what replays them; none is replayed any
        more."""
        ...


@runtime_checkable
class Replayable(Cache, Protocol):
    """A cache in which passes over as many tokens are alike, but for where these stand."""

    at: TokenSlots | None
    """Where the tokens of the pass under way stand, if that is to be read on the device."""

    @property
    def memory(self) -> object:
        """The same object as long as passes use the same memory."""
        ...

    def token_slots(self, n: int) -> TokenSlots | None:
        """Where the next `n` tokens will stand, in numbers; `None` where a pass over them is not like others. Comes
        after `prepare`."""
        ...

    def advance(self, length: int) -> None:
        """Says that a pass over the tokens up to `length` was replayed, or that one beyond it did not take place."""
        ...


def capture_for(device: torch.device) -> Capture | None:
    """What captures passes on `device`; `None` where they run as they come."""
    if device.type != "cuda":
        return None
    from .cuda import CudaCapture  # only where it is used: a CPU has no streams to capture

    return CudaCapture(device)


class Graphs:
    """Whether a run captures passes, and if not, why."""

    def __init__(self, capture: Capture | None = None, ranks: Ranks = ALONE) -> None:
        """Args:
        capture: `None` runs all passes as they come.
        ranks: all of them replay a pass, or none does: a collective in a graph must be in every rank's.
        """
        self._capture, self._ranks = capture, ranks
        self._passes: weakref.WeakSet[Passes] = weakref.WeakSet()
        if capture is not None and ranks.size > 1:
            ranks.before_leaving(self.clear)
        self.failure: str | None = None
        """Why capturing was given up, in a line."""

    @property
    def capture(self) -> Capture | None:
        """What captures passes, as long as that works."""
        return None if self.failure else self._capture

    def register(self, passes: Passes) -> None:
        """Says that `passes` will hold captured ones."""
        self._passes.add(passes)

    def clear(self) -> None:
        """Frees all captured passes, whoever holds the run they belong to; from here on passes run as they come.

        It must come before the ranks part: NCCL's communicator ends when all graphs with its collectives are gone.
        """
        if self._capture:
            self._capture.clear()  # waits for a replay that is under way
        self._capture = None
        for passes in self._passes:
            passes.clear()

    def agree(self, failure: str | None) -> bool:
        """Whether every rank has captured a pass; each says why it has not. If not, no other will be."""
        failed = torch.tensor([0.0 if failure is None else 1.0])
        if self._ranks.sum(failed, "all_reduce_graphs").item() == 0:
            return True
        self.failure = failure or "another rank could not capture it"
        return False


class Passes:
    """The forwards of one tier."""

    def __init__(self, decoder: Decoder, cache: Cache, graphs: Graphs | None = None, *, padded: bool = False) -> None:
        """Args:
        graphs: captures passes over few tokens, if `cache` lets them be replayed.
        padded: whether rows are padded, see `kernels.selection.padded_rows`.
        """
        self.padded = padded
        self.decoder, self.cache = decoder, cache
        self._replayable = cache if isinstance(cache, Replayable) else None
        self._graphs = graphs or Graphs()
        self._graphs.register(self)
        self._memory: object = None
        self._pool: Any = None
        self._captured: dict[int, _CapturedPass] = {}  # by number of tokens
        self.prepared = 0
        """Passes so far that did more than a pass: a GPU's first, which compiles kernels, and those that captured."""

    def clear(self) -> None:
        """Drops what was captured."""
        for captured in self._captured.values():
            captured.clear()
        self._captured.clear()
        self._memory = self._pool = None

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, num_logits: int = 1) -> Tensor:
        """`Decoder.forward` with the tier's cache.

        Returns:
            Logits `[num_logits, vocab_size]`, float32; they hold until the next call.
        """
        with padded_rows(self.padded):
            return self._forward(token_ids, num_logits)

    def _forward(self, token_ids: Tensor, num_logits: int) -> Tensor:
        cache, capture, n = self._replayable, self._graphs.capture, token_ids.shape[0]
        if cache is not None and capture is not None and num_logits <= n <= MOST_CAPTURED:
            cache.prepare(n)
            slots = cache.token_slots(n)
            if slots is not None:
                if self._memory is not cache.memory:
                    self._memory, self._pool, self._captured = cache.memory, capture.pool(), {}
                logits = self._replay(cache, capture, token_ids, slots)
                if logits is not None:
                    return logits[-num_logits:]
        if not self.prepared and self.decoder.device.type != "cpu":
            self.prepared = 1
        return self.decoder.forward(token_ids, self.cache, num_logits=num_logits)

    def _replay(self, cache: Replayable, capture: Capture, token_ids: Tensor, slots: TokenSlots) -> Tensor | None:
        """The logits of all tokens; `None` where the pass could not be captured, and did not take place."""
        start, n = cache.length, token_ids.shape[0]
        captured = self._captured.get(n)
        if captured is None or captured.replay is None:
            self.prepared += 1
        if captured is None:
            captured = self._captured[n] = _CapturedPass(self.decoder, cache, n)
            captured.place(token_ids, slots)
            return capture.warm_up(captured.run)
        captured.place(token_ids, slots)
        if captured.replay is None:
            failure = captured.capture(capture, self._pool)
            cache.advance(start)
            if not self._graphs.agree(failure):
                self._captured.clear()
                return None
        assert captured.replay is not None and captured.logits is not None
        captured.replay()
        cache.advance(start + n)
        return captured.logits


class JoinedPasses:
    """The forwards of one tier over several sequences at once."""

    def __init__(self, members: Sequence[Passes]) -> None:
        """Args: `members` are each sequence's own, of one decoder."""
        self.members = list(members)
        first = members[0]
        self._decoder, self._padded = first.decoder, first.padded
        self._cache = together([passes.cache for passes in members])

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, counts: Sequence[int], rows: Sequence[int]) -> Tensor:
        """One pass over the next `counts[i]` tokens of each sequence, whose ids follow one another.

        Returns:
            Logits `[sum(rows), vocab_size]`, float32: those of each sequence's last `rows[i]` tokens.
        """
        self._cache.counts = counts
        with padded_rows(self._padded):
            logits = self._decoder.forward(token_ids, self._cache, num_logits=token_ids.shape[0])
        if list(counts) == list(rows):
            return logits
        parts = zip(logits.split(list(counts)), rows, strict=True)
        return torch.cat([part[-wanted:] for part, wanted in parts])


class _CapturedPass:
    """A pass over `n` tokens that reads which ones they are, and where they stand, from memory."""

    def __init__(self, decoder: Decoder, cache: Replayable, n: int) -> None:
        self._decoder, self._cache = decoder, cache
        self._steps = torch.arange(n, device=decoder.device)
        self._token_ids, self._slots = torch.zeros_like(self._steps), torch.zeros_like(self._steps)
        cos, sin = decoder.rope.rows(0, n)
        self._rotation = torch.zeros_like(cos), torch.zeros_like(sin)
        self._table: Rows | None = None
        self.replay: Callable[[], None] | None = None
        self.logits: Tensor | None = None

    def place(self, token_ids: Tensor, slots: TokenSlots) -> None:
        """Sets what the next run or replay reads. Copies on the device: nothing is waited for."""
        assert isinstance(slots.rotation, int) and isinstance(slots.slot, int)
        self._token_ids.copy_(token_ids)
        torch.add(self._steps, slots.slot, out=self._slots)
        for ours, rows in zip(self._rotation, self._decoder.rope.rows(slots.rotation, len(token_ids)), strict=True):
            ours.copy_(rows)

    def run(self) -> Tensor:
        """The pass itself; logits of all its tokens."""
        self._cache.at = TokenSlots(self._rotation, self._slots)
        try:
            return self._decoder.forward(self._token_ids, self._cache, num_logits=len(self._token_ids))
        finally:
            self._cache.at = None

    def capture(self, capture: Capture, pool: Any) -> str | None:
        """Captures it; if that fails, why."""
        self._table = self._decoder.rope.rows(0, 1)  # a part keeps it whole, and a graph may have its address
        try:
            self.replay, self.logits = capture.capture(self.run, pool)
        except (RuntimeError, PeerError) as error:
            return _first_reason(error)
        return None

    def clear(self) -> None:
        """Drops the graph and its result."""
        self.replay = self.logits = None


def _first_reason(error: BaseException) -> str:
    """The first line of what went wrong first: a capture that is broken fails again when it ends."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
