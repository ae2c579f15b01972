"""The prefill of a sequence: restores saved tokens of its prompt and computes the others.

It works in slices. Between two slices, other sequences may have rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

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

Slices = Generator[bool | Future[Any], None, Tensor]
"""The slices of a prefill. It yields `False` after each but the last; `True` if slices of another kind follow, whose
time is not known yet; or what it waits for, if a thread must do something before the next slice. It returns the logits
`[1, vocab_size]` after the last token."""

_CHECKS_S = 0.1
"""Seconds between two checks whether a prompt is still wanted, and whether shorter ones wait, while no other sequence
runs."""

_ANY = 2**31
"""A number of slices that no prompt has."""


class ReadingError(Exception):
    """A prompt cannot be read to its end, on any rank; `failure` says why."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure


def on_all_ranks(target: Decoder, system: System, act: Callable[[], T]) -> T:
    """Calls `act` and returns its result, if it succeeds on every rank. Every rank calls it.

    Raises:
        ReadingError: `act` failed on a rank.
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
        slices: Slices,
        system: System = THIS_MACHINE,
        *,
        timed: bool = False,
    ) -> None:
        """Args:
        slices: those of the prompt; see `slices_of`.
        timed: whether the time decides how many are computed before the next round, and not a number that is known
            before. Slices must be computed when they are called, and on no other ranks.
        """
        self.sequence, self._system, self._timed = sequence, system, timed
        self.began = system.clock()
        self.seconds = 0.0
        """Seconds of the prefill so far, without rounds between its slices."""
        self.owed_s = 0.0
        """Seconds of prefill that this prompt gets before shorter ones are read in between again."""
        self._slices = slices
        self._logits = torch.empty(0)  # [1, vocab_size], once the prompt is read
        self._slice_s: float | None = None  # mean seconds of the slices of the last call
        self._last = 0  # the number of these slices
        self._pause: bool | Future[Any] = False  # what the last slice has yielded
        self._granted_s = 0.0

    def grant(self, seconds: float) -> None:
        """Allows the prefill to take `seconds`, the time of the last round. So TBT at most doubles."""
        self._granted_s += seconds

    @property
    def due(self) -> int:
        """The number of slices that are expected to fit into the granted time; 1 before any slice was timed. If the
        time decides, slices are computed until the granted time has passed. The next ones then get less."""
        if self._slice_s is None:
            return 1
        if self._timed:
            return _ANY if self._granted_s > 0 else 0
        return max(0, int(self._granted_s / self._slice_s))

    @property
    def due_alone(self) -> int:
        """The number of slices until the next check whether the prompt is still wanted, while no other sequence runs.
        At most twice the last number, as these slices may take much longer than the last ones."""
        if self._slice_s is None:
            return 1
        return _ANY if self._timed else max(1, min(int(_CHECKS_S / self._slice_s), 2 * self._last))

    @property
    def is_waiting(self) -> bool:
        """Whether a thread must still do something before the next slice, such as restoring saved tokens."""
        return isinstance(self._pause, Future) and not self._pause.done()

    def close(self, *, keeps: bool) -> None:
        """Ends the prefill at once.

        Args: `keeps` is whether the tokens that every layer holds stay in the full cache. It must be `False` if
        anything has failed.
        """
        self._slices.close()
        if keeps:
            self.sequence.active.full.break_off()

    def go_on(self, count: int, *, waits: bool = False) -> bool:
        """Computes `count` further slices, or fewer if slices of another kind follow, or if a thread must do something
        before the next one. Returns whether the prompt is read.

        Args: `waits` is whether no other sequence runs. Then it waits a moment for this thread.
        """
        began, done, whole, pause = self._system.clock(), 0, False, False
        ends = began + (_CHECKS_S if waits else self._granted_s)
        try:
            while done != count and not pause and not (self._timed and done and self._system.clock() >= ends):
                pause = next(self._slices)
                done += 1
                if waits and isinstance(pause, Future):
                    wait([pause], _CHECKS_S)
        except StopIteration as end:
            self._logits, whole = end.value, True
        if not whole:
            blocks = self.sequence.active.full.blocks
            blocks.drain()  # else the next round would wait for the copies of these slices, and be timed with them
            self._system.synchronize(blocks.device)
        spent = self._system.clock() - began
        self._pause = pause if done else self._pause
        self.seconds += spent
        self.owed_s = max(0.0, self.owed_s - spent)
        self._granted_s -= spent
        if done:
            self._slice_s, self._last = spent / done, done
        if pause:
            kept = 0.0 if isinstance(pause, Future) else self._granted_s  # time that passes while it waits is lost
            self._slice_s, self._granted_s = None, max(kept, 0.0)
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
            logits = logits.clone()  # forbidden tokens are masked in the copy
            forbid(logits, [opened], [()], "verify", logits.shape[1])
        weights = distributions(logits, samplers, [1])
        (token,) = draw(weights, samplers, [1], [len(opened.context)]).tolist()
        check_finite([opened], [[token]])
        opened.keep_logprobs([token], self._logits)
        return token


def forward_in_parts(target: Decoder, full: FullCache, token_ids: Sequence[int], num_logits: int) -> Tensor:
    """`Decoder.forward` of all tokens after those in `full`, in the same parts as a prefill. The last `num_logits`
    tokens are in one pass. Returns their logits `[num_logits, vocab_size]`."""
    for end in target.tiling.prefill_stops(full.length, len(token_ids)):
        if end <= len(token_ids) - num_logits:
            part = to_device(token_ids[full.length : end], target.device)
            target.forward(part, full, stop=len(token_ids))
    return target.forward(to_device(token_ids[full.length :], target.device), full, num_logits=num_logits)


def slices_of(
    target: Decoder,
    sequence: BatchSequence,
    report: Callable[[float], None] | None,
    system: System = THIS_MACHINE,
    *,
    short: bool = False,
) -> Slices:
    """Restores the saved tokens of a prompt and computes the others, in parts, so that each part can be saved.

    Args:
        report: called with the finished share of the prefill, 0 to 1.
        short: see `Decoder.slices`.

    Raises:
        ReadingError: the prompt cannot be computed.
        ContextError: saving is required and failed.
    """
    full, saved = sequence.active.full, sequence.active.saved
    if saved:
        yield from saved.begin(full)
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
        slices = target.slices(pending, full, on_progress=progress, stop=stop, short=short)
        go_on = partial(on_all_ranks, target, system, partial(_next, slices))
        logits = yield from _pausing(go_on, full, pending.shape[0])
        if saved:
            yield from saved.save(full)
            yield True
    return logits


def slices_together(
    read: Callable[[Sequence[ActiveSequence]], Tensor],
    target: Decoder,
    sequences: Sequence[BatchSequence],
    report: Callable[[BatchSequence, float], None],
    system: System = THIS_MACHINE,
) -> list[Slices]:
    """`slices_of` for each of the sequences whose prompts are computed in one pass. The slices of the first
    sequence must be taken first: they compute all prompts. If that fails, each prompt is computed by itself.

    Args:
        read: computes the pass; see `Tier.read`.
        report: called with each sequence and the finished share of its prefill, 0 to 1.

    Raises:
        ReadingError: see `slices_of`.
    """
    found: list[Tensor] = []

    def together() -> None:
        opened = [sequence.active for sequence in sequences]
        try:
            for one in opened:
                for work in one.saved.begin(one.full) if one.saved else ():
                    wait([work])
            found.extend(read(opened).clone().split(1))
        except Exception:  # reading the prompts one by one shows which sequence fails
            for one in opened:
                one.full.break_off()

    def of_one(number: int, sequence: BatchSequence) -> Slices:
        if number == 0:
            together()
        if not found:
            return (yield from slices_of(target, sequence, partial(report, sequence), system))
        report(sequence, 1.0)
        return found[number]

    return [of_one(number, sequence) for number, sequence in enumerate(sequences)]


def _pausing(go_on: Callable[[], Tensor | None], full: FullCache, tokens: int) -> Slices:
    """The slices of a pass over so many `tokens`. Between them, passes of other sequences may attend to the blocks that
    `full` shares with them.

    Args: `go_on` computes the next slice, and returns the logits with the last slice, else `None`.
    """
    pausable = full.pausable(tokens)
    go_on()  # it allocates memory, and takes hardly any time
    while (logits := go_on()) is None:
        if pausable:
            paused = full.pause()
            yield False
            full.resume(paused)
    return logits


def _next(slices: Generator[None, None, Tensor]) -> Tensor | None:
    """Computes the next slice. Returns the logits after the last slice, else `None`."""
    try:
        return next(slices)
    except StopIteration as end:
        return end.value


def _progress(
    target: Decoder, report: Callable[[float], None], positions: tuple[int, int, int, int]
) -> Callable[[float], None]:
    """A callback for the finished share of the tokens `first` to `end`. It reports the finished share of the whole
    prefill, from `start` to `stop`.

    Args: `positions` are `start`, `first`, `end` and `stop`.
    """
    start, first, end, stop = positions
    done, part = (forward_work(target.config, a, b - a) for a, b in ((start, first), (first, end)))
    whole = forward_work(target.config, start, stop - start)
    return lambda share: report((done + share * part) / whole)
