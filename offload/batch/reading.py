"""The prefill of a sequence: what is saved of its prompt is restored, the rest computed, in slices between which the
rounds of other sequences may go on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ...tp.decoder import Decoder, forward_work
from ...tp.devices import to_device
from ...tp.errors import PeerError
from ..caches.full import FullCache
from ..planning.memory import shortage_explained
from ..speculation.distribution import check_finite
from ..speculation.sampler import distributions, draw
from ..speculation.sequence import forbid
from ..system import THIS_MACHINE, System
from .sequence import ActiveSequence, BatchSequence

T = TypeVar("T")

_CHECKS_S = 0.5
"""Seconds between two checks whether a prompt is still wanted, while nobody else runs."""


class ReadingError(Exception):
    """A prompt cannot be read to its end, on any rank; `failure` says why."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure


def on_all_ranks(target: Decoder, system: System, act: Callable[[], T]) -> T:
    """What `act` gives, if it gives something on every rank. Every rank calls it.

    Raises:
        ReadingError: it failed on one.
    """
    try:
        with shortage_explained(target.device, system.device_memory):
            found = act()
    except PeerError:
        raise
    except Exception as error:
        raise ReadingError(target.ranks.failure(error) or error) from None
    failure = target.ranks.failure(None)
    if failure:
        raise ReadingError(failure)
    return found


class Reading:
    """A prompt that is being read."""

    def __init__(
        self,
        sequence: BatchSequence,
        slices: Generator[bool, None, Tensor],
        system: System = THIS_MACHINE,
    ) -> None:
        """Args: `slices` are those of the prompt; see `slices_of`."""
        self.sequence, self._system = sequence, system
        self.began = system.clock()
        self.seconds = 0.0
        """What it has taken so far; rounds between its slices are not counted."""
        self._slices = slices
        self._logits = torch.empty(0)  # [1, vocab_size], once the prompt is read
        self._slice_s: float | None = None  # mean of the last slices that were timed
        self._last = 0  # how many these were
        self._granted_s = 0.0

    def grant(self, seconds: float) -> None:
        """Lets it take that much time: as much as the round before took, so that TBT at most doubles."""
        self._granted_s += seconds

    @property
    def due(self) -> int:
        """The slices that are expected to fit into the time granted so far; one, before any was timed."""
        return 1 if self._slice_s is None else max(0, int(self._granted_s / self._slice_s))

    @property
    def due_alone(self) -> int:
        """The slices until it is checked whether the prompt is still wanted, while nobody else runs: at most twice as
        many as last time, as they may take much longer than those."""
        return 1 if self._slice_s is None else max(1, min(int(_CHECKS_S / self._slice_s), 2 * self._last))

    def close(self, *, keeps: bool) -> None:
        """Ends it where it is.

        Args: `keeps` is whether the tokens that every layer holds by now stay in the full cache: nothing has failed.
        """
        self._slices.close()
        if keeps:
            self.sequence.active.full.break_off()

    def go_on(self, count: int) -> bool:
        """Computes `count` further slices, or fewer where others of another kind follow; whether the prompt is read."""
        began, done, whole, changes = self._system.clock(), 0, False, False
        try:
            while done != count and not changes:
                changes = next(self._slices)
                done += 1
        except StopIteration as end:
            self._logits, whole = end.value, True
        if not whole:
            blocks = self.sequence.active.full.blocks
            blocks.drain()  # or the next round would wait for what these slices have started, and be timed with it
            self._system.synchronize(blocks.device)
        spent = self._system.clock() - began
        self.seconds += spent
        self._granted_s -= spent
        if done:
            self._slice_s, self._last = spent / done, done
        if changes:
            self._slice_s, self._granted_s = None, max(self._granted_s, 0.0)
        return whole

    def first_token(self) -> int:
        """Draws the token that follows the prompt.

        Raises:
            NotFiniteError: the logits are not finite.
            GrammarFailed: see `forbid`.
        """
        opened = self.sequence.active
        samplers, logits = [opened.sampler], self._logits
        if opened.matcher:
            logits = logits.clone()  # without what the grammar forbids
            forbid(logits, [opened], [()], "verify", logits.shape[1])
        weights = distributions(logits, samplers, [1])
        (token,) = draw(weights, samplers, [1], [len(opened.context)]).tolist()
        check_finite([opened], [[token]])
        opened.keep_logprobs([token], self._logits)
        return token


def forward_in_parts(target: Decoder, full: FullCache, token_ids: list[int], num_logits: int) -> Tensor:
    """`Decoder.forward` of all tokens behind those in `full`, in as many passes as a prompt is read in, but for the
    last `num_logits`, which are in one."""
    for end in target.tiling.prefill_stops(full.length, len(token_ids)):
        if end <= len(token_ids) - num_logits:
            part = to_device(token_ids[full.length : end], target.device)
            target.forward(part, full, stop=len(token_ids))
    return target.forward(to_device(token_ids[full.length :], target.device), full, num_logits=num_logits)


def slices_of(
    target: Decoder, sequence: BatchSequence, report: Callable[[float], None] | None, system: System = THIS_MACHINE
) -> Generator[bool, None, Tensor]:
    """Restores what is saved of the prompt and computes the rest, in parts, so that each can be saved; the logits
    `[1, vocab_size]` after its last token. Between slices, whether those to come are of another kind, of which it is
    not known yet how long they take.

    Args: `report` is called with the share of it that is done, 0 to 1.

    Raises:
        ReadingError: it cannot be computed.
        ContextError: it could not be saved, where that is required.
    """
    full, saved = sequence.active.full, sequence.active.saved
    if saved:
        for _ in saved.begin(full):
            yield False
        yield True
    start, stop = full.length, len(sequence.context)
    sequence.statistics = replace(sequence.statistics, reused_tokens=start)
    logits = torch.empty(0)
    full.keep_states_at(target.tiling.parting(stop), start)
    ends = set(target.tiling.prefill_stops(start, stop)) | set(saved.stops(start, stop) if saved else ())
    for end in sorted(ends):
        pending = to_device(sequence.context[full.length : end], target.device)
        progress = None
        if report is not None:
            progress = _progress(target, report, (start, full.length, end, stop))
        slices = target.slices(pending, full, on_progress=progress, stop=stop)
        go_on = partial(on_all_ranks, target, system, partial(_next, slices))
        logits = yield from _pausing(go_on, full, pending.shape[0])
        if saved:
            saved.save(full)
            yield True
    return logits


def slices_together(
    read: Callable[[Sequence[ActiveSequence]], Tensor],
    target: Decoder,
    sequences: Sequence[BatchSequence],
    report: Callable[[BatchSequence, float], None],
    system: System = THIS_MACHINE,
) -> list[Generator[bool, None, Tensor]]:
    """`slices_of` each of several sequences whose prompts are computed in one pass. The slices of the first one must
    come first: they compute those of all. Where that fails, each is computed by itself.

    Args:
        read: computes the pass; see `Tier.read`.
        report: called with each sequence and the share of its prompt that is computed.

    Raises:
        ReadingError: as `slices_of` does.
    """
    found: list[Tensor] = []

    def together() -> None:
        opened = [sequence.active for sequence in sequences]
        try:
            for one in opened:
                for _ in one.saved.begin(one.full) if one.saved else ():
                    pass
            found.extend(read(opened).clone().split(1))
        except Exception:  # of all: whose it was is found by reading them one by one
            for one in opened:
                one.full.break_off()

    def of_one(number: int, sequence: BatchSequence) -> Generator[bool, None, Tensor]:
        if number == 0:
            together()
        if not found:
            return (yield from slices_of(target, sequence, partial(report, sequence), system))
        report(sequence, 1.0)
        return found[number]

    return [of_one(number, sequence) for number, sequence in enumerate(sequences)]


def _pausing(go_on: Callable[[], Tensor | None], full: FullCache, tokens: int) -> Generator[bool, None, Tensor]:
    """The slices of a pass over so many `tokens`, between which other sequences' passes may attend to what `full`
    shares with them.

    Args: `go_on` computes the next one, and gives the logits of the last.
    """
    pausable = full.pausable(tokens)
    go_on()  # which takes memory, and hardly any time
    while (logits := go_on()) is None:
        if pausable:
            paused = full.pause()
            yield False
            full.resume(paused)
    return logits


def _next(slices: Generator[None, None, Tensor]) -> Tensor | None:
    """Computes the next slice; what the last one gives."""
    try:
        return next(slices)
    except StopIteration as end:
        return end.value


def _progress(
    target: Decoder, report: Callable[[float], None], positions: tuple[int, int, int, int]
) -> Callable[[float], None]:
    """What to call with the share done of the tokens `first` to `end`, where `start` to `stop` are to be read.

    Args: `positions` are `start`, `first`, `end` and `stop`.
    """
    start, first, end, stop = positions
    done, part = (forward_work(target.config, a, b - a) for a, b in ((start, first), (first, end)))
    whole = forward_work(target.config, start, stop - start)
    return lambda share: report((done + share * part) / whole)
