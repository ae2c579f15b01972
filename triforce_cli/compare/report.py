"""The results of a comparison: the JSON, and the table that is made from it, with notes on what ran and differs."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ...tp.devices import device_name
from ...tp.units import gib
from ..measurement import machine, provenance, sampling_in_words
from ..terminal.tables import Column, print_lines, print_table
from .baselines.protocol import Measurement
from .comparison import Comparison, Row

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

KIND = "triforce compare"
"""The document's `kind`."""


def as_document(comparison: Comparison, command: str, interrupted: bool) -> dict[str, Any]:
    """The JSON: every run as measured, and the figures of the table. Times are in seconds, except `tbt_ms`; other
    numbers are bytes and tokens.

    Args:
        command: the command as it was typed.
    """
    job = comparison.job
    device = device_name(torch.device(job.device))
    return {
        **provenance(KIND, command),
        "machine": machine(job.device, device, 1, job.threads),
        "model": job.given_model,
        "draft": job.draft,
        "device": job.device,
        "device_name": device,
        "dtype": job.dtype,
        "threads": job.threads,
        "batch": None if job.questions is None else job.sequences,
        "prompt_tokens": job.prompt_tokens,
        "new_tokens": job.max_new_tokens,
        "sampling": job.sampling.filters,
        "seed": job.sampling.seed,
        "repeats": comparison.repeats,
        "interrupted": interrupted,
        "audit": asdict(comparison.audit) if comparison.audit else None,
        "systems": [_system(row, comparison.triforce) for row in comparison.rows],
    }


def _system(row: Row, triforce: Row) -> dict[str, Any]:
    document: dict[str, Any] = {"name": row.entry.name, "failure": row.failure}
    if not row.runs:
        return document
    times, ours = _medians(row.runs), _medians(triforce.runs)
    return document | {
        "ran": row.runs[0].ran,
        "ttft_s": times["ttft"],
        "tbt_ms": times["tbt"] * 1e3,
        "tokens_per_s": row.runs[0].sequences / times["tbt"] if times["tbt"] else None,
        "total_s": times["total"],
        "memory": {
            "host_peak_bytes": max(run.host_peak_bytes for run in row.runs),
            "device_peak_bytes": max(run.device_peak_bytes for run in row.runs),
        },
        "speedup_of_triforce": {
            name: times[name] / ours[name] if ours.get(name) else None for name in ("tbt", "total")
        },
        "answers_agree": row.answers_agree,
        "first_difference": asdict(row.differences[0]) if row.differences else None,
        "differences": [asdict(found) for found in row.differences],
        "runs": [asdict(run) | {"tbt_ms": run.tbt_s * 1e3} for run in row.runs],
    }


def _medians(runs: list[Measurement]) -> dict[str, float]:
    """Medians of runs, in seconds; empty without a run."""
    times = [{"ttft": run.ttft_s, "tbt": run.tbt_s, "total": run.ttft_s + run.decode_s} for run in runs]
    return {name: median(one[name] for one in times) for name in times[0]} if times else {}


def report(console: Console, document: dict[str, Any]) -> None:
    """Prints the table of a document, and the lines around it."""
    repeats, cuda = document["repeats"], document["device"] == "cuda"
    runs = f"medians of {repeats} runs" if repeats > 1 else "one run"
    batch = document["batch"]
    sequences = f"{batch} sequence{'s' if batch > 1 else ''} together, each with " if batch else ""
    head = (
        f"{document['model']}, {document['dtype']} on {document['device_name']}; {sequences}"
        f"{document['prompt_tokens']:,} tokens of prompt, {document['new_tokens']:,} new ones, "
        f"{sampling_in_words(document['sampling'])}; {runs}"
    )
    print_lines(console, [head])
    columns = (
        Column("system", lambda one: one["name"], left=True),
        *(_COLUMNS if cuda else (column for column in _COLUMNS if column is not _GPU_MEMORY)),
        Column("text", partial(_text, document=document), left=True),
    )
    print_table(console, columns, document["systems"])
    lines = [
        "",
        f"{_OF_BATCHES if batch else _OF_ONE} memory: the maximum that the process held, libraries and loading included"
        + ("; on the GPU, PyTorch's tensors." if cuda else "."),
        *(f"{one['name']}: {one['ran']}" for one in document["systems"] if "ran" in one),
    ]
    print_lines(console, lines + _notes(document))


_OF_ONE = (
    "speed-up: TBT ÷ TBT of triforce. TTFT includes the prefill; TBT is decoding time ÷ the tokens after the first."
)

_OF_BATCHES = (
    "All sequences have the same text; each has its own question. tokens/s: of all sequences together. speed-up: "
    "tokens/s of triforce ÷ tokens/s of the system. TTFT: until every sequence has its first token. TBT: of each "
    "sequence, the number of sequences ÷ tokens/s."
)


def _ttft(one: dict[str, Any]) -> str:
    return f"{one['ttft_s']:.2f} s{' restored' if one['runs'][0]['details'].get('reused_tokens') else ''}"


def _speedup(one: dict[str, Any]) -> str | None:
    speedup = one["speedup_of_triforce"]["tbt"]
    return f"{speedup:.2f}" if speedup and one["name"] != "triforce" else None


def _figure(title: str, cell: Callable[[dict[str, Any]], str | None]) -> Column:
    """A column of a measured figure; `-` if a system did not run or has no such figure."""
    return Column(title, lambda one: (cell(one) if "runs" in one else None) or "-")


_GPU_MEMORY = _figure("on the GPU", lambda one: gib(size) if (size := one["memory"]["device_peak_bytes"]) else None)
_COLUMNS = (
    _figure("TTFT", _ttft),
    _figure("TBT", lambda one: f"{one['tbt_ms']:.1f} ms" if one["tbt_ms"] else None),
    _figure("tokens/s", lambda one: f"{one['tokens_per_s']:.1f}" if one["tbt_ms"] else None),
    _figure("memory", lambda one: gib(one["memory"]["host_peak_bytes"])),
    _GPU_MEMORY,
    _figure("speed-up", _speedup),
)


def _text(one: dict[str, Any], document: dict[str, Any]) -> str:
    """How a system's text compares with triforce's, or why there is none."""
    if "runs" not in one:
        return one["failure"] or "not measured: interrupted"
    words: list[str] = []
    greedy, triforce = document["sampling"]["temperature"] == 0, document["systems"][0]
    own = one["name"] in ("triforce", "autoregressive") and document["seed"] is not None
    if one is not triforce and (greedy or own) and "runs" in triforce:
        words.append(_difference(one, triforce, document["batch"]))
    if not one["answers_agree"] and (greedy or own):
        words.append("its own runs differ")
    if one["failure"]:
        words.append(f"run {len(one['runs']) + 1} failed: {one['failure']}")
    return "; ".join(words)


def _difference(one: dict[str, Any], triforce: dict[str, Any], batch: int | None) -> str:
    """Where a system's tokens differ from triforce's, in words."""
    found = one["first_difference"]
    if found is None:
        # After an interrupt differences have not been looked for.
        same = one["runs"][0]["token_ids"] == triforce["runs"][0]["token_ids"]
        return "the same tokens" if same else "other tokens"
    theirs, ours = (
        "" if found[name] is None else f" (logit {found[name]:.4f})" for name in ("logit", "triforce_logit")
    )
    where = f"differs from token {found['index']} on"
    if batch:
        different = len(one["differences"])
        verb = "differs" if different == 1 else "differ"
        where = f"{different} of {batch} {verb}, sequence {found['sequence']} from token {found['index']} on"
    return f"{where}: {found['token']}{theirs}, triforce {found['triforce_token']}{ours}"


def _notes(document: dict[str, Any]) -> list[str]:
    """Notes on the result of the audit, and on the reasons for differences between texts, if there are any."""
    audit = document["audit"]
    if audit is None:
        return _differences(document)
    if audit["failure"]:
        return [f"audit: failed: {audit['failure']}", *_differences(document)]
    words = f"audit: {audit['agree']:,} of {audit['tokens']:,} tokens are the same as in decoding token by token"
    first = audit["first_difference"]
    return [words if first is None else f"{words}; the first difference is at token {first}", *_differences(document)]


def _differences(document: dict[str, Any]) -> list[str]:
    """The reasons for differences between texts, if there are any."""
    different = [one["name"] for one in document["systems"] if one.get("first_difference")]
    if not different:
        return []
    if document["sampling"]["temperature"] > 0:
        return [
            "With a seed, the text depends on rounding if two tokens are nearly equal in log-probability plus noise (a "
            "near-tie). With --exact on it must be the same if the chunk size divides 256."
        ]
    if document["dtype"] == "float32":
        return [f"In float32 these texts must be the same; {', '.join(different)} computed something else."]
    return [
        f"Logits are those of the target with its full cache, from one pass in {document['dtype']}. In 16-bit formats, "
        "different ways of computing round differently. If two tokens have nearly equal logits (a near-tie), the text "
        "may have either. --dtype float32 shows whether this is the reason."
    ]
