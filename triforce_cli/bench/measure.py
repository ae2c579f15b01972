"""Measures one engine at several context lengths and numbers of tiers, and the bandwidths of its machine. It does not
write to the screen or to files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...offload import Batch, Engine, Request, Sampling
from ...offload.contexts.home import contexts_root
from ...offload.contexts.model import ContextRequest
from ...offload.settings import Settings
from ...offload.transfer.bandwidth import disk_bandwidth, link_bandwidth, memory_bandwidth
from ...offload.transfer.link import make_link
from ...offload.transfer.staged.block_file import DiskError, DiskSpace
from ...tp.decoder import Decoder
from ...tp.errors import CapacityError
from ..measurement import QUESTION_TOKENS, in_turns, questions_about


@dataclass(frozen=True)
class Step:
    """One run: one answer, or several if sequences are decoded together."""

    context: int
    """The number of tokens of prompt and answer together."""
    tiers: int
    repeat: int
    """The number of the repeat, from 1; 0 is the run with the prefill, which warms up."""
    sequences: int | None = None
    """The number of sequences that are decoded together, each with its own question; `None` for one sequence without a
    question."""


def steps(
    contexts: Sequence[int], tiers: Sequence[int], repeats: int, batches: Sequence[int | None] = (None,)
) -> list[Step]:
    """The runs in their order: for each context the prompt is read once, then every repeat has each number of sequences
    and tiers, in an order that rotates from one repeat to the next."""
    order: list[Step] = []
    kinds = [(sequences, count) for sequences in batches for count in tiers]
    for context in contexts:
        order.append(Step(context, max(tiers), 0, batches[0] and 1))
        order += [
            Step(context, count, repeat + 1, sequences) for repeat, (sequences, count) in in_turns(kinds, repeats)
        ]
    return order


@dataclass(frozen=True)
class Run:
    """The result of a step. All fields except `tokens_per_s` are about the first sequence."""

    step: Step
    token_ids: list[int]
    stats: dict[str, Any]
    """The JSON of `triforce generate`."""
    passes: dict[str, int]
    """The number of passes of each tier while decoding."""
    proposed: dict[str, int]
    """The number of tokens that each drafter proposed."""
    tokens_per_s: float = 0.0
    """Tokens per second of all sequences together, after the first token of each."""

    @classmethod
    def of(cls, step: Step, batch: Batch) -> Run:
        """The result of a step.

        Args:
            batch: has ended.
        """
        s = batch.sequences[0].statistics
        passes = {"verify": s.rounds, "retrieval": s.retrieval_proposed - s.draft_accepted, "draft": s.draft_proposed}
        proposed = {"retrieval": s.retrieval_proposed, "draft": s.draft_proposed}
        return cls(step, s.token_ids, batch.document(0), passes, proposed, batch.stats()["tokens_per_s"])

    @property
    def tbt_ms(self) -> float:
        return self.stats["tbt_ms"]["mean"]


@dataclass
class ContextRuns:
    """The runs at one context length."""

    context: int
    """The number of tokens of prompt and answer together."""
    warm_up: Run
    """The run that read the prompt."""
    runs: list[Run] = field(default_factory=list)

    def of(self, tiers: int, sequences: int | None = None) -> list[Run]:
        return [run for run in self.runs if (run.step.tiers, run.step.sequences) == (tiers, sequences)]

    @property
    def kinds(self) -> list[tuple[int | None, int]]:
        """The numbers of sequences and tiers that were measured, in ascending order."""
        kinds = {(run.step.sequences, run.step.tiers) for run in self.runs}
        return sorted(kinds, key=lambda kind: (kind[0] or 0, kind[1]))


class Observer(Protocol):
    """Receives the progress of a measurement."""

    def begin(self, step: Step) -> None: ...

    def prefill(self, share: float) -> None:
        """Receives the finished share of the prefill, 0 to 1."""

    def round(self, tokens: int) -> None:
        """Receives how many tokens of each answer are written, on average."""

    def end(self, run: Run) -> None: ...


def measure(
    engine: Engine,
    token_ids: Sequence[int],
    order: Sequence[Step],
    sampling: Sampling,
    new_tokens: int,
    *,
    results: list[ContextRuns],
    observer: Observer,
    advance: Callable[[Iterator[Any]], Any],
    saved: str | None = None,
) -> None:
    """Runs the steps in `order`. Appends to `results` after each, so that results are kept after an interrupt.

    Args:
        token_ids: each prompt begins with the beginning of these tokens.
        advance: makes one step of a batch; returns `None` at its end.
        saved: the saved context that prompts are restored from, as far as they begin like it.

    Raises:
        CapacityError: a sequence cannot be answered, or not together with the others.
    """
    for step in order:
        observer.begin(step)
        run = _measure_step(engine, token_ids, step, sampling, new_tokens, observer, advance, saved)
        if step.repeat:
            results[-1].runs.append(run)
        else:
            results.append(ContextRuns(step.context, run))
        observer.end(run)


def _measure_step(
    engine: Engine,
    token_ids: Sequence[int],
    step: Step,
    sampling: Sampling,
    new_tokens: int,
    observer: Observer,
    advance: Callable[[Iterator[Any]], Any],
    saved: str | None,
) -> Run:
    prompts = _prompts(token_ids, step, new_tokens)
    count = len(prompts)
    batch = engine.batch(
        [Request(prompt, sampling, new_tokens, ignore_eos=True, number=i) for i, prompt in enumerate(prompts)],
        tiers=step.tiers,
        reuse=None if step.repeat else 0,
        on_prefill=lambda index, share: observer.prefill((index + share) / count),
        contexts=ContextRequest(saved),
    )
    while advance(batch) is not None:
        observer.round(sum(len(one.statistics.token_ids) for one in batch.sequences) // count)
    failed = next((one.error for one in batch.sequences if one.error), None)
    if failed:
        raise CapacityError(failed if step.sequences is None else f"--batch {count}: {failed}")
    return Run.of(step, batch)


def _prompts(token_ids: Sequence[int], step: Step, new_tokens: int) -> list[list[int]]:
    """The prompt of each sequence: the same text, with a question at its end where several are decoded together."""
    prompt_tokens = step.context - new_tokens
    if step.sequences is None:
        return [list(token_ids[:prompt_tokens])]
    text = token_ids[: prompt_tokens - QUESTION_TOKENS]
    return [[*text, *question] for question in questions_about(text, step.sequences)]


def machine_bandwidth(target: Decoder, settings: Settings) -> dict[str, float | None]:
    """The bandwidths of memory, link and disk in GB/s; `None` for those that no keys and values cross. The ranks of a
    CPU share its memory, so rank 0 reads it with the threads of all ranks.

    Args:
        target: a model on the device to measure.
        settings: say whether the KV cache may stream on a CPU, and whether a part of it may be on a disk.
    """
    device, threads = target.device, torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(threads * target.ranks.local_size)
    memory, link_in = memory_bandwidth(device), None
    torch.set_num_threads(threads)
    if device.type == "cuda" or settings.resident is not None:
        link = make_link(device)
        link_in = link_bandwidth(link, device)["in"] / 1e9
        link.close()
    disk = None
    if settings.host_memory is not None:
        with suppress(CapacityError, DiskError):  # a disk without room for the test
            disk = disk_bandwidth(DiskSpace(contexts_root())) / 1e9
    return {"memory_gb_per_s": memory / 1e9, "link_gb_per_s": link_in, "disk_gb_per_s": disk}
