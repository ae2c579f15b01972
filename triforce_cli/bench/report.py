"""What a bench found: for scripts (JSON), and for people (a table, and what its figures are)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ..machine import machine, on, provenance, sampling_words
from .measure import AtContext, Run, first_difference

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

KIND = "triforce bench"
"""The document's `kind`."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second, measured before the runs; the link's is `None` where nothing streams."""

    memory: float
    link: float | None = None


@dataclass(frozen=True)
class Subject:
    """What is measured, and where."""

    command: str
    model: str
    draft: str | None
    device: str
    device_name: str
    world_size: int
    dtype: str
    parameters: int
    weight_bytes: int
    """That a pass reads, on all ranks together."""
    sampling: dict[str, Any] | None = None
    """temperature, top_p, top_k, and the seed, if one was given; `None` where nothing was sampled."""
    new_tokens: int = 0
    repeats: int = 0
    prompt: dict[str, Any] | None = None
    """Its `name`, `text_tokens`, and whether it is `repeated`."""


def floor_of(at: AtContext, subject: Subject, bandwidth: Bandwidth) -> dict[str, Any] | None:
    """From the bytes that the first run's passes read: one row or twenty, a pass reads the same."""
    run = next((run for run in (*at.runs, at.warm_up) if run.passes["verify"]), None)
    if run is None:
        return None
    passes = run.passes["verify"]
    read = subject.weight_bytes + subject.world_size * run.stats["kv_read"]["bytes"] // passes
    return derived_floor(read, run.stats["link"]["bytes_streamed"] // passes, subject, bandwidth)


def derived_floor(read_bytes: int, streamed_bytes: int, subject: Subject, bandwidth: Bandwidth) -> dict[str, Any]:
    """What one pass over the full cache takes at least. On a CPU all ranks share one memory; each GPU has its own.

    Args:
        read_bytes: weights, keys and values, of all ranks.
        streamed_bytes: of them, what crosses one rank's link.
    """
    memory_s = read_bytes / bandwidth.memory / (subject.world_size if subject.device == "cuda" else 1)
    link_s = streamed_bytes / bandwidth.link if bandwidth.link else 0.0
    bound_by = "link" if link_s > memory_s else "memory"
    return {
        "read_bytes": read_bytes,
        "streamed_bytes": streamed_bytes,
        "bound_by": bound_by,
        "ms": 1e3 * max(memory_s, link_s),
        "derived_from": f"counted bytes and measured {bound_by} bandwidth",
    }


def as_document(subject: Subject, bandwidth: Bandwidth, found: list[AtContext], interrupted: bool) -> dict[str, Any]:
    """The JSON; docs/bench.md says what its keys mean. Times are in the unit that a key ends with, the rest in bytes
    and tokens."""
    return {
        **provenance(KIND, subject.command),
        "machine": machine(subject.device, subject.device_name, subject.world_size, torch.get_num_threads()),
        "model": subject.model,
        "draft": subject.draft,
        "parameters": subject.parameters,
        "dtype": subject.dtype,
        "sampling": subject.sampling,
        "new_tokens": subject.new_tokens,
        "repeats": subject.repeats,
        "prompt": subject.prompt,
        "interrupted": interrupted,
        "shape": None,
        "measured_bandwidth": {
            "memory_gb_per_s": bandwidth.memory / 1e9,
            "link_gb_per_s": bandwidth.link / 1e9 if bandwidth.link else None,
        },
        "contexts": [_context(at, subject, bandwidth) for at in found],
    }


def _context(at: AtContext, subject: Subject, bandwidth: Bandwidth) -> dict[str, Any]:
    plain = at.of(1)
    counts = sorted({run.tiers for run in at.runs})
    return {
        "context": at.context,
        "prompt_tokens": at.prompt_tokens,
        "prefill_s": at.prefill_s,
        "resident_bytes": at.resident_bytes,
        "floor": floor_of(at, subject, bandwidth),
        "tiers": [_tiers(at.of(count), plain, subject) for count in counts],
    }


def _tiers(runs: list[Run], plain: list[Run], subject: Subject) -> dict[str, Any]:
    greedy = subject.sampling is not None and subject.sampling["temperature"] == 0
    return {
        "tiers": runs[0].tiers,
        "modelled": False,
        "tbt_ms": spread([run.tbt_ms for run in runs]),
        "speedup": median(run.tbt_ms for run in plain) / median(run.tbt_ms for run in runs) if plain else None,
        "acceptance": {
            name: _median([run.stats["acceptance"][name] for run in runs])
            for name in ("draft", "retrieval", "draft_per_token", "retrieval_per_token", "tokens_per_round")
        },
        "first_difference": first_difference(runs, plain[0]) if greedy and plain else None,
        "runs": [_run(run) for run in runs],
    }


def _run(run: Run) -> dict[str, Any]:
    kept = (
        "new_tokens", "seed", "tbt_ms", "tokens_per_s", "rounds", "acceptance", "settings", "time_s", "link", "kv_read",
        "memory", "warnings",
    )  # fmt: skip
    return (
        {"repeat": run.repeat}
        | {name: run.stats[name] for name in kept}
        | {
            "passes": run.passes,
            "proposed": run.proposed,
        }
    )


def spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def _median(values: list[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return median(there) if there else None


def report(console: Console, document: dict[str, Any]) -> None:
    """The table of a document, and the lines around it."""
    head = f"{document['model']}, {document['dtype']} on {on(document['machine'])}; {conditions(document)}"
    console.print(head, soft_wrap=True, markup=False)
    console.print(_table(document))
    console.print()
    for note in notes(document):
        console.print(note, soft_wrap=True, markup=False)


def conditions(document: dict[str, Any]) -> str:
    """How it was measured, in words."""
    if document["shape"]:
        return "random weights, synthetic keys and values; medians of steps"
    runs = document["repeats"]
    return f"{document['new_tokens']:,} new tokens, {sampling_words(document['sampling'])}; " + (
        f"medians of {runs} interleaved runs (least to most)" if runs > 1 else "one run each"
    )


def modelled(row: dict[str, Any]) -> bool:
    """Whether the times of so many tiers were derived from an assumed acceptance, not measured."""
    return row["modelled"]


def _table(document: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table("context", box=None, pad_edge=False, padding=(0, 1, 0, 0))  # fits a terminal of 80 columns
    for title in ("tiers", "TBT, ms", "", "speed-up", "accepted", "a round", "floor", "prefill"):
        table.add_column(title, justify="left" if not title else "right", no_wrap=True)
    for at in document["contexts"]:
        for index, row in enumerate(at["tiers"]):
            tbt, accepted = row["tbt_ms"], row["acceptance"]
            first = index == 0
            table.add_row(
                f"{at['context']:,}" if first else "",
                str(row["tiers"]),
                f"{tbt['median']:.1f}",
                "modelled" if modelled(row) else f"({tbt['min']:.1f} to {tbt['max']:.1f})",
                f"{row['speedup']:.2f}" if row["speedup"] and row["tiers"] > 1 else "-",
                _shares(accepted),
                f"{accepted['tokens_per_round']:.1f}" if row["tiers"] > 1 else "-",
                f"{at['floor']['ms']:.1f}" if first and at["floor"] else "",
                f"{at['prefill_s']:.1f} s" if first and at["prefill_s"] else "",
            )
    return table


def _shares(accepted: dict[str, float | None]) -> str:
    shares = [accepted["draft_per_token"], accepted["retrieval_per_token"]]
    return " ".join(f"{share:.2f}" for share in shares if share is not None) or "-"


def notes(document: dict[str, Any]) -> list[str]:
    """What the figures are, and what is to be known of these."""
    carried = document["measured_bandwidth"]
    link = carried["link_gb_per_s"]
    measured = f"memory {carried['memory_gb_per_s']:.1f} GB/s" + (f", link {link:.1f} GB/s" if link else "")
    lines = [
        "TBT: decoding ÷ the tokens after the first. accepted: of the tokens tested, the small model's and the "
        "retrieval cache's. a round: tokens for each pass over the full cache.",
        f"floor, ms: derived, the bytes of one pass over what was measured before the runs ({measured}); speculation "
        "goes below it, by writing several tokens a pass.",
    ]
    if document["shape"]:
        lines += _shape_notes(document)
    else:
        lines += _prompt_notes(document["prompt"])
    parted = [
        f"{at['context']:,} (from token {row['first_difference']} on, {row['tiers']} tiers)"
        for at in document["contexts"]
        for row in at["tiers"]
        if row["first_difference"] is not None
    ]
    if parted:
        why = "which must not be" if document["dtype"] == "float32" else "as near-ties in 16 bits may"
        lines.append(f"Greedy tokens differ from plain decoding, {why}, at {', '.join(parted)}.")
    warned = {
        warning
        for at in document["contexts"]
        for row in at["tiers"]
        for run in row["runs"]
        for warning in run.get("warnings", ())
    }
    lines += [f"warning: {warning}" for warning in sorted(warned)]
    if document["interrupted"]:
        lines.append("Interrupted: this is what was measured by then.")
    return lines


def _prompt_notes(prompt: dict[str, Any]) -> list[str]:
    lines = [f"prompt: {prompt['name']}, its first tokens; context is prompt and answer."]
    if prompt["repeated"]:
        lines.append(
            f"The text has {prompt['text_tokens']:,} tokens and is repeated for longer contexts; a text that was read "
            "before is easy to guess, so acceptance is higher than it would be: give a longer one (--prompt-file)."
        )
    return lines


def _shape_notes(document: dict[str, Any]) -> list[str]:
    """Which times of a shape are measured, and on what the others rest."""
    assumed = document["shape"]["assumed_acceptance"]
    small = f", {assumed['draft']:.3g} of the small model's" if document["draft"] else ""
    lines = [
        "Steps are measured, with random weights and zeros for keys and values; one tier's TBT is such a step, without "
        f"sampling. More tiers' TBT is modelled from steps: assumed, {assumed['retrieval']:.3g} of what the retrieval "
        f"cache drafts stands{small} (--assume-acceptance)."
    ]
    failed = document["shape"].get("graphs_failed")
    lines += [f"warning: steps that draft go without CUDA graphs, and slower: {failed}"] if failed else []
    for at in document["contexts"]:
        steps, lengths = at["steps_ms"], at["lengths"]
        drafted = f", a draft step {steps['draft']['median']:.2f} ms" if steps["draft"] else ""
        lines.append(
            f"{at['context']:,} tokens: a verification of {lengths['block_length'] + 1} rows "
            f"{steps['verify']['median']:.1f} ms, a step on {lengths['budget']:,} tokens with "
            f"{lengths['draft_length'] + 1} rows {steps['retrieval']['median']:.2f} ms{drafted}."
        )
    return lines
