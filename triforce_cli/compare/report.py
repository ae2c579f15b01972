"""A comparison for people (a table, and what exactly ran) and for scripts (JSON)."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...tp.units import gib
from ..machine import machine, provenance, sampling_words
from .comparison import Comparison, Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


KIND = "triforce compare"
"""The document's `kind`."""


def as_document(comparison: Comparison, device_name: str, command: str) -> dict[str, Any]:
    """The JSON: every run as measured, and what the table makes of it. Seconds but for `tbt_ms`, bytes, tokens."""
    job = comparison.job
    return {
        **provenance(KIND, command),
        "machine": machine(job.device, device_name, 1, job.threads),
        "model": job.asked_model,
        "draft": job.draft,
        "device": job.device,
        "device_name": device_name,
        "dtype": job.dtype,
        "threads": job.threads,
        "prompt_tokens": len(job.prompt_ids),
        "new_tokens": job.max_new_tokens,
        "sampling": {"temperature": job.temperature, "top_p": job.top_p, "top_k": job.top_k},
        "seed": job.seed,
        "repeats": comparison.repeats,
        "interrupted": comparison.interrupted is not None,
        "systems": [_system(row, comparison) for row in comparison.rows],
    }


def _system(row: Row, comparison: Comparison) -> dict[str, Any]:
    document: dict[str, Any] = {"name": row.entry.name, "failure": row.failure}
    if not row.runs:
        return document
    return document | {
        "ran": row.runs[0].ran,
        "ttft_s": row.ttft_s,
        "tbt_ms": row.tbt_s * 1e3,
        "tokens_per_s": 1 / row.tbt_s if row.tbt_s else None,
        "total_s": row.total_s,
        "memory": {"host_peak_bytes": row.host_peak_bytes, "device_peak_bytes": row.device_peak_bytes},
        "speedup_of_triforce": {
            "tbt": _speedup(row.tbt_s, comparison.triforce, "tbt_s"),
            "total": _speedup(row.total_s, comparison.triforce, "total_s"),
        },
        "answers_agree": row.answers_agree,
        "first_difference": asdict(row.difference) if row.difference else None,
        "runs": [asdict(run) | {"tbt_ms": run.tbt_s * 1e3} for run in row.runs],
    }


def _speedup(seconds: float, triforce: Row, of: str) -> float | None:
    """How many times as long a system takes as triforce."""
    ours = getattr(triforce, of) if triforce.runs else 0.0
    return seconds / ours if ours else None


def report(console: Console, comparison: Comparison, device_name: str) -> None:
    """The table and the lines under it."""
    job = comparison.job
    runs = f"medians of {comparison.repeats} runs" if comparison.repeats > 1 else "one run"
    console.print(
        f"{job.asked_model}, {job.dtype} on {device_name}; {len(job.prompt_ids):,} tokens of prompt, "
        f"{job.max_new_tokens:,} new ones, {sampling_words(vars(job))}; {runs}",
        soft_wrap=True,
        markup=False,
    )
    console.print(_table(comparison))
    console.print(
        "\nspeed-up: TBT ÷ triforce's. TTFT includes the prefill; TBT is decoding ÷ the tokens after the first. "
        "memory: the most that the process held, libraries and loading included"
        + ("; on the GPU, PyTorch's tensors." if job.device == "cuda" else "."),
        soft_wrap=True,
    )
    for row in comparison.rows:
        if row.runs:
            console.print(f"{row.entry.name}: {row.runs[0].ran}", soft_wrap=True, markup=False)
    for note in _notes(comparison):
        console.print(note, soft_wrap=True, markup=False)


def _table(comparison: Comparison) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("system", box=None, pad_edge=False)
    for title in ("TTFT", "TBT", "tokens/s", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    if comparison.job.device == "cuda":
        table.add_column("on the GPU", justify="right", no_wrap=True)
    table.add_column("speed-up", justify="right", no_wrap=True)
    table.add_column("text")
    for row in comparison.rows:
        table.add_row(row.entry.name, *_figures(row, comparison), Text(_text(row, comparison)))
    return table


def _figures(row: Row, comparison: Comparison) -> list[str]:
    on_cuda = comparison.job.device == "cuda"
    if not row.runs:
        return ["-"] * (6 if on_cuda else 5)
    tbt, speedup = row.tbt_s, _speedup(row.tbt_s, comparison.triforce, "tbt_s")
    return [
        f"{row.ttft_s:.2f} s",
        f"{tbt * 1e3:.1f} ms" if tbt else "-",
        f"{1 / tbt:.1f}" if tbt else "-",
        gib(row.host_peak_bytes),
        *([gib(row.device_peak_bytes) if row.device_peak_bytes else "-"] if on_cuda else []),
        f"{speedup:.2f}" if speedup and row is not comparison.triforce else "-",
    ]


def _text(row: Row, comparison: Comparison) -> str:
    """What became of a system: how its text compares, or why there is none."""
    if not row.runs:
        return row.failure or "not measured: interrupted"
    words: list[str] = []
    if row is not comparison.triforce and comparison.job.greedy and comparison.triforce.runs:
        words.append(_difference(row, comparison))
    if not row.answers_agree and comparison.job.greedy:
        words.append("its own runs differ")
    if row.failure:
        words.append(f"run {len(row.runs) + 1} failed: {row.failure}")
    return "; ".join(words)


def _difference(row: Row, comparison: Comparison) -> str:
    found = row.difference
    if found is None:
        # After an interrupt nobody has looked yet.
        same = row.runs[0].token_ids == comparison.triforce.runs[0].token_ids
        return "the same tokens" if same else "other tokens"
    if found.logit is None or found.triforce_logit is None:
        return f"differs from token {found.index} on: {found.token}, triforce {found.triforce_token}"
    return (
        f"differs from token {found.index} on: {found.token} (logit {found.logit:.4f}), "
        f"triforce {found.triforce_token} (logit {found.triforce_logit:.4f})"
    )


def _notes(comparison: Comparison) -> list[str]:
    """What a reader should know before making something of differences."""
    parted = [row.entry.name for row in comparison.rows if row.difference]
    if not parted:
        return []
    if comparison.job.dtype == "float32":
        return [f"In float32 greedy texts are the same; {', '.join(parted)} computed something else."]
    return [
        f"Logits are the target's, with its full cache, in one pass in {comparison.job.dtype}: 16-bit formats round "
        "differently from one way of computing to another, and where two tokens all but tie, either may come out. "
        "--dtype float32 shows whether it is that."
    ]
