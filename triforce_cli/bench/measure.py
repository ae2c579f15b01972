"""Measures one engine at several context lengths and numbers of tiers. It knows no screen and no file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ...offload import Batch, Engine, Generation, Request, Sampling
from ...offload.contexts.model import ContextRequest
from ...offload.statistics import Statistics
from ...tp.errors import CapacityError
from .request import QUESTION_TOKENS


@dataclass(frozen=True)
class Step:
    """One answer to be written."""

    context: int
    """Tokens, prompt and answer."""
    tiers: int
    repeat: int
    """From 1; 0 is the run that reads the prompt, and warms up."""
    sequences: int | None = None
    """That are decoded together; `None` for a run alone."""


def steps(
    contexts: Sequence[int], tiers: Sequence[int], repeats: int, batches: Sequence[int | None] = (None,)
) -> list[Step]:
    """The runs in their order: for each context the prompt is read once, then every repeat has each number of sequences
    and tiers, in an order that rotates from one repeat to the next."""
    order: list[Step] = []
    kinds = [(sequences, count) for sequences in batches for count in tiers]
    for context in contexts:
        order.append(Step(context, max(tiers), 0, batches[0] and 1))
        for index in range(repeats):
            first = index % len(kinds)
            turn = (*kinds[first:], *kinds[:first])
            order += [Step(context, count, index + 1, sequences) for sequences, count in turn]
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
    sequences: int | None = None
    """That were decoded together; the figures above are of the first of them, but for `tokens_per_s`."""
    tokens_per_s: float = 0.0
    """Of all sequences together, after the first token of each."""

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

    def of(self, tiers: int, sequences: int | None = None) -> list[Run]:
        return [run for run in self.runs if (run.tiers, run.sequences) == (tiers, sequences)]

    @property
    def kinds(self) -> list[tuple[int | None, int]]:
        """The numbers of sequences and tiers that were measured."""
        return sorted({(run.sequences, run.tiers) for run in self.runs}, key=lambda kind: (kind[0] or 0, kind[1]))


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
    advance: Callable[[Iterator[Any]], Any],
    saved: str | None = None,
) -> None:
    """Runs `order` and appends to `found` as it goes, so that `found` has what was measured by an interrupt.

    Args:
        token_ids: each prompt is the beginning of these.
        advance: makes one step of a run or a batch; `None` at its end.
        saved: the saved context that prompts are restored from, as far as they begin like it.
    """
    for step in order:
        prompt = token_ids[: step.context - new_tokens]
        reuse = None if step.repeat else 0
        watch.begin(step)
        if step.sequences is not None:
            _measure_batch(engine, token_ids, step, sampling, new_tokens, found, watch, advance, saved)
            continue
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


def questions_about(text: Sequence[int], count: int) -> list[list[int]]:
    """A question for each of `count` sequences about one text: `QUESTION_TOKENS` tokens from another place of it.

    Args: `text` has more tokens than a question.
    """
    places = [i * (len(text) - QUESTION_TOKENS) // count for i in range(count)]
    return [list(text[place : place + QUESTION_TOKENS]) for place in places]


def _measure_batch(
    engine: Engine,
    token_ids: Sequence[int],
    step: Step,
    sampling: Sampling,
    new_tokens: int,
    found: list[AtContext],
    watch: Watch,
    advance: Callable[[Iterator[Any]], Any],
    saved: str | None,
) -> None:
    """A step of several sequences: the same text, and for each another place of it as its question."""
    text = token_ids[: step.context - new_tokens - QUESTION_TOKENS]
    count = step.sequences or 1
    prompts = [[*text, *question] for question in questions_about(text, count)]
    requests = [Request(prompt, sampling, new_tokens, ignore_eos=True, number=i) for i, prompt in enumerate(prompts)]
    reuse = None if step.repeat else 0
    batch = engine.batch(
        requests,
        tiers=step.tiers,
        reuse=reuse,
        on_prefill=lambda index, share: watch.prefill((index + share) / count),
        contexts=ContextRequest(saved),
    )
    while advance(batch) is not None:
        watch.round(sum(len(one.statistics.token_ids) for one in batch.sequences) // count)
    failed = next((one.error for one in batch.sequences if one.error), None)
    if failed:
        raise CapacityError(f"--batch {count}: {failed}")
    run = _run_of_batch(step, batch)
    first = batch.sequences[0].statistics
    if step.repeat:
        found[-1].runs.append(run)
    else:
        resident = run.stats["settings"]["resident_bytes"]
        found.append(AtContext(step.context, len(prompts[0]), first.prefill_s, resident, run))
    watch.end(step, run, first.prefill_s)


def _run_of_batch(step: Step, batch: Batch) -> Run:
    one = _counted(step, batch.sequences[0].statistics, batch.document(0))
    return replace(one, sequences=step.sequences, tokens_per_s=batch.stats()["tokens_per_s"])


def _run(step: Step, generation: Generation) -> Run:
    return _counted(step, generation.statistics, generation.stats())


def _counted(step: Step, s: Statistics, stats: dict[str, Any]) -> Run:
    passes = {"verify": s.rounds, "retrieval": s.retrieval_proposed - s.draft_accepted, "draft": s.draft_proposed}
    proposed = {"retrieval": s.retrieval_proposed, "draft": s.draft_proposed}
    return Run(step.tiers, step.repeat, s.token_ids, stats, passes, proposed, tokens_per_s=s.tokens_per_s)
