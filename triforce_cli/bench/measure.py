"""Measures one engine at several context lengths and numbers of tiers. It knows no screen and no file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...offload import Engine, Generation, Round, Sampling
from ...offload.contexts.model import ContextRequest


@dataclass(frozen=True)
class Step:
    """One answer to be written."""

    context: int
    """Tokens, prompt and answer."""
    tiers: int
    repeat: int
    """From 1; 0 is the run that reads the prompt, and warms up."""


def steps(contexts: Sequence[int], tiers: Sequence[int], repeats: int) -> list[Step]:
    """The runs in their order: for each context the prompt is read once, then every repeat has each number of tiers, in
    an order that rotates from one repeat to the next."""
    order: list[Step] = []
    for context in contexts:
        order.append(Step(context, max(tiers), 0))
        for index in range(repeats):
            first = index % len(tiers)
            order += [Step(context, count, index + 1) for count in (*tiers[first:], *tiers[:first])]
    return order


@dataclass(frozen=True)
class Run:
    """One answer."""

    tiers: int
    repeat: int
    token_ids: list[int]
    stats: dict[str, Any]
    """The JSON of `triforce generate`."""
    passes: dict[str, int]
    """Passes of each tier while decoding."""
    proposed: dict[str, int]
    """Tokens that each drafter proposed."""

    @property
    def tbt_ms(self) -> float:
        return self.stats["tbt_ms"]["mean"]


@dataclass
class AtContext:
    """What was measured at one length of context."""

    context: int
    prompt_tokens: int
    prefill_s: float
    """Of the whole prompt, read once for all runs."""
    resident_bytes: int
    warm_up: Run
    runs: list[Run] = field(default_factory=list)

    def of(self, tiers: int) -> list[Run]:
        return [run for run in self.runs if run.tiers == tiers]


class Watch(Protocol):
    """Is told how far the measuring is."""

    def begin(self, step: Step) -> None: ...

    def prefill(self, share: float) -> None: ...

    def round(self, tokens: int) -> None: ...

    def end(self, step: Step, run: Run, prefill_s: float) -> None: ...


def measure(
    engine: Engine,
    token_ids: Sequence[int],
    order: Sequence[Step],
    sampling: Sampling,
    new_tokens: int,
    *,
    found: list[AtContext],
    watch: Watch,
    advance: Callable[[Generation], Round | None],
    saved: str | None = None,
) -> None:
    """Runs `order` and appends to `found` as it goes, so that `found` has what was measured by an interrupt.

    Args:
        token_ids: each prompt is the beginning of these.
        advance: makes one step of a run; `None` at its end.
        saved: the saved context that prompts are restored from, as far as they begin like it.
    """
    for step in order:
        prompt = token_ids[: step.context - new_tokens]
        reuse = None if step.repeat else 0
        watch.begin(step)
        generation = engine.stream(
            prompt,
            sampling,
            new_tokens,
            ignore_eos=True,
            tiers=step.tiers,
            reuse=reuse,
            on_prefill=watch.prefill,
            contexts=ContextRequest(saved),
        )
        while advance(generation) is not None:
            watch.round(len(generation.statistics.token_ids))
        run = _run(step, generation)
        if step.repeat:
            found[-1].runs.append(run)
        else:
            stats = run.stats
            resident = stats["settings"]["resident_bytes"]
            found.append(AtContext(step.context, len(prompt), stats["prefill_s"], resident, run))
        watch.end(step, run, generation.statistics.prefill_s)
        del generation  # it holds the cache, whose memory the next context needs


def _run(step: Step, generation: Generation) -> Run:
    s = generation.statistics
    passes = {"verify": s.rounds, "retrieval": s.retrieval_proposed - s.draft_accepted, "draft": s.draft_proposed}
    proposed = {"retrieval": s.retrieval_proposed, "draft": s.draft_proposed}
    return Run(step.tiers, step.repeat, s.token_ids, generation.stats(), passes, proposed)
