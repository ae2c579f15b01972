"""Measures systems one after another, in rotating order, each run in a new process, and finds where texts differ.

One system is in memory at a time, so that none takes memory or processor time from another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..measurement import first_difference, in_turns
from .baselines.catalogue import TRIFORCE, Entry
from .baselines.process import WorkerError, run_worker
from .baselines.protocol import Job, Measurement


@dataclass(frozen=True)
class Difference:
    """The first token at which a system's answer differs from triforce's. The logits are those of the target with its
    full cache, after the equal tokens before; `None` if they could not be computed."""

    index: int
    """The index of the token in the answer, from 0."""
    token: int
    triforce_token: int
    logit: float | None = None
    triforce_logit: float | None = None
    sequence: int = 0
    """The number of the sequence among those that were decoded together, from 0."""


@dataclass(frozen=True)
class Audit:
    """Triforce's answer compared with the tokens that its target draws one by one, in passes of one row, after the same
    tokens."""

    tokens: int
    """The number of tokens of the answer."""
    agree: int = 0
    """The number of equal tokens."""
    first_difference: int | None = None
    """The index of the first different token in the answer, from 0."""
    failure: str | None = None
    """The reason why no tokens were drawn again."""


@dataclass
class Row:
    """The results of one system."""

    entry: Entry
    runs: list[Measurement] = field(default_factory=list)
    failure: str | None = None
    """The reason why there is no run, or no further run."""
    log: str = ""
    """The end of what the failed worker printed."""
    differences: list[Difference] = field(default_factory=list)
    """A difference for each sequence that differs from triforce's, in the order of sequences."""

    @property
    def answers_agree(self) -> bool:
        """Whether all runs had the same tokens, which is required of exact runs that are greedy or have a seed."""
        return all(run.token_ids == self.runs[0].token_ids for run in self.runs)


@dataclass
class Comparison:
    """All rows, triforce's first."""

    job: Job
    repeats: int
    rows: list[Row]
    audit: Audit | None = None

    @property
    def triforce(self) -> Row:
        return self.rows[0]

    @property
    def own_rows(self) -> list[Row]:
        """The rows of this engine, which draws the tokens of a seed with the same noise."""
        return [row for row in self.rows if row.entry.module == TRIFORCE.module]

    @property
    def error(self) -> str | None:
        """The error in the results, if there is one: a failed audit, or tokens that differ from those of plain decoding
        and that rounding does not explain."""
        if self.audit and self.audit.failure:
            return f"the audit failed: {self.audit.failure}"
        if not self.triforce.runs or not self.triforce.runs[0].details["settings"]["exact"]:
            return None
        for row in self.own_rows if self.job.one_text else []:
            if not row.answers_agree:
                return f"two runs of {row.entry.name} differ; all tokens must be the same"
            if row.differences:
                first = row.differences[0]
                sequence = "" if self.job.questions is None else f" of sequence {first.sequence}"
                where = f"from token {first.index}{sequence} on"
                return f"triforce and {row.entry.name} differ {where}; all tokens must be the same"
        if self.audit and self.audit.agree < self.audit.tokens:
            return f"the audit disagrees from token {self.audit.first_difference} on; all tokens must be the same"
        return None


def compare(
    comparison: Comparison,
    *,
    limit_s: float,
    settings: dict[str, Any],
    audits: bool = False,
    on_start: Callable[[int, int, str], None],
    on_end: Callable[[Row], None],
) -> None:
    """Runs all systems and fills the rows. The row of a system that fails has the reason. After an interrupt (`Stop`),
    the rows have the measurements before it.

    Args:
        limit_s: seconds that one worker may take, loading and warm-up included.
        settings: those of triforce, with the names of `Engine.load`.
        audits: whether triforce's answer is computed again one row at a time.
        on_start: called before each worker with its number, the count of all, and the system's name.
        on_end: called with the row after each.
    """
    job, rows = comparison.job, comparison.rows
    for row in rows:
        row.failure = row.entry.missing() or _unsuitable(row.entry, job)
        if row.failure is None and row.entry.prepares:
            _run(row, "prepare", job, limit_s)
        if row.failure:
            on_end(row)
    count = comparison.repeats * len(rows)
    for number, (_, row) in enumerate(in_turns(rows, comparison.repeats), 1):
        if row.failure is None:
            on_start(number, count, row.entry.name)
            _measure(row, job, settings, limit_s)
            on_end(row)
    if job.one_text:
        find_differences(comparison, limit_s)
    if audits and comparison.triforce.runs:
        _audit(comparison, settings, limit_s)


def _unsuitable(entry: Entry, job: Job) -> str | None:
    """The reason why a system cannot do this job; `None` if it can."""
    if entry.needs_draft and job.draft is None:
        return "needs a draft: give --draft D"
    return entry.single_sequence_reason if job.sequences > 1 else None


def _audit(comparison: Comparison, settings: dict[str, Any], limit_s: float) -> None:
    """Draws the tokens of the first answer again."""
    answer = comparison.triforce.runs[0].token_ids
    job = replace(comparison.job, system=TRIFORCE.name, options={"answer": answer, "settings": settings})
    try:
        drawn: list[int] = run_worker(TRIFORCE.module, "audit", job, limit_s)
    except WorkerError as error:
        comparison.audit = Audit(len(answer), failure=str(error))
        return
    agree = sum(a == b for a, b in zip(answer, drawn, strict=True))
    comparison.audit = Audit(len(answer), agree, first_difference(answer, drawn))


def _measure(row: Row, job: Job, settings: dict[str, Any], limit_s: float) -> None:
    ours = row.entry.module == TRIFORCE.module
    measured = _run(row, "measure", replace(job, options=settings if ours else {}), limit_s)
    if measured is not None:
        row.runs.append(Measurement(**measured))


def _run(row: Row, action: str, job: Job, limit_s: float) -> Any:
    """The result of a worker; `None` if it fails, and the row then has the reason."""
    try:
        return run_worker(row.entry.module, action, replace(job, system=row.entry.name), limit_s)
    except WorkerError as error:
        row.failure, row.log = str(error), error.log
        return None


def find_differences(comparison: Comparison, limit_s: float) -> None:
    """Notes where the answers of each system's first run differ from triforce's, with the target's logits there."""
    job = comparison.job
    if not comparison.triforce.runs:
        return
    answer = comparison.triforce.runs[0].token_ids
    rows = comparison.rows[1:] if job.sampling.greedy else comparison.own_rows[1:]
    for row in rows:
        if row.runs:
            row.differences = _differences(row.runs[0].token_ids, answer, job.max_new_tokens)
    candidates = [
        [found.sequence, found.index, found.triforce_token, found.token] for row in rows for found in row.differences
    ]
    if not candidates or not job.sampling.greedy:  # with noise, logits do not explain a draw
        return
    job = replace(job, system=TRIFORCE.name, options={"answer": answer, "candidates": candidates})
    try:
        logits = iter(run_worker(TRIFORCE.module, "logits", job, limit_s))
    except WorkerError:
        return  # they are missing then
    for row in rows:
        for place, found in enumerate(row.differences):
            ours, theirs = next(logits)
            row.differences[place] = replace(found, triforce_logit=ours, logit=theirs)


def _differences(token_ids: Sequence[int], answer: Sequence[int], length: int) -> list[Difference]:
    """Where answers of `length` tokens each differ from triforce's; both are one answer after another."""
    found: list[Difference] = []
    for sequence, start in enumerate(range(0, len(answer), length)):
        theirs, ours = token_ids[start : start + length], answer[start : start + length]
        index = first_difference(theirs, ours)
        if index is not None:
            found.append(Difference(index, theirs[index], ours[index], sequence=sequence))
    return found
