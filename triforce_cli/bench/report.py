"""The results of a bench: the JSON, and the table that is made from it, with notes on what its figures mean."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ...offload.planning.measured import BENCH
from ...tp.decoder import Decoder
from ...tp.devices import device_name
from ...tp.matrices import num_parameters
from ..measurement import (
    first_difference,
    machine,
    machine_in_words,
    provenance,
    sampling_in_words,
    spread,
)
from ..options import RunOptions
from ..terminal.tables import Column, print_lines, print_table
from .measure import ContextRuns, Run

if TYPE_CHECKING:
    from rich.console import Console


def floor_of(at: ContextRuns, head: dict[str, Any]) -> dict[str, Any] | None:
    """See `derived_floor`. The bytes are those that passes of the first run read; for mixtures of experts, those that a
    single row reads. `None` without this run.
    """
    run = next((run for run in (*at.runs, at.warm_up) if run.passes["verify"]), None)
    if run is None:
        return None
    passes = run.passes["verify"]
    read = head["weight_bytes"] + head["machine"]["world_size"] * run.stats["kv_read"]["bytes"] // passes
    of_disk = run.stats["disk"]["bytes_read"] // passes
    return derived_floor(read, run.stats["link"]["bytes_streamed"] // passes, of_disk, head)


def derived_floor(read_bytes: int, streamed_bytes: int, disk_bytes: int, head: dict[str, Any]) -> dict[str, Any] | None:
    """The floor: a lower bound for the time of one pass over the full cache. On a CPU, all ranks share one memory; each
    GPU has its own. All ranks share a disk. There is no floor if something is read from a disk whose bandwidth was not
    measured.

    Args:
        read_bytes: weights, keys and values, of all ranks.
        streamed_bytes: the part of them that crosses the link of one rank.
        disk_bytes: the part of them that one rank reads from a disk.
        head: see `as_document`.
    """
    machine, measured = head["machine"], head["measured_bandwidth"]
    memories = machine["world_size"] if machine["device"] == "cuda" else 1
    moved = {"memory": read_bytes / memories, "link": streamed_bytes, "disk": machine["world_size"] * disk_bytes}
    speeds = {name: measured[f"{name}_gb_per_s"] for name in moved}
    if disk_bytes and not speeds["disk"]:
        return None
    seconds, bound_by = max((moved[name] / (1e9 * speed), name) for name, speed in speeds.items() if speed)
    return {
        "read_bytes": read_bytes,
        "streamed_bytes": streamed_bytes,
        "disk_bytes": disk_bytes,
        "bound_by": bound_by,
        "ms": 1e3 * seconds,
        "derived_from": f"counted bytes and measured {bound_by} bandwidth",
    }


def head_of_document(
    options: RunOptions, command: str, target: Decoder, drafts: bool, bandwidth: dict[str, float | None]
) -> dict[str, Any]:
    """The part of the JSON that is known before the measurement: the model, the machine and its bandwidths.

    Args:
        command: the command as it was typed.
        drafts: whether there is a draft.
        bandwidth: see `machine_bandwidth`.
    """
    size, device = target.ranks.size, target.device
    return {
        **provenance(BENCH, command),
        "machine": machine(device.type, device_name(device), size, torch.get_num_threads()),
        "model": options.model,
        "draft": (options.draft or options.model) if drafts else None,
        "parameters": num_parameters(target.config),
        "weight_bytes": size * target.matrices.bytes_of_a_pass(target.dtype),
        "dtype": str(target.dtype).removeprefix("torch."),
        "sampling": None,
        "new_tokens": 0,
        "repeats": 0,
        "prompt": None,
        "measured_bandwidth": bandwidth,
    }


def as_document(head: dict[str, Any], results: list[ContextRuns], interrupted: bool) -> dict[str, Any]:
    """The JSON; docs/bench.md documents its keys. Times are in the unit with which the key ends; other numbers are
    bytes and tokens.

    Args:
        head: everything except the measurements.
    """
    return head | {"interrupted": interrupted, "shape": None, "contexts": [_context(at, head) for at in results]}


def _context(at: ContextRuns, head: dict[str, Any]) -> dict[str, Any]:
    greedy, stats = head["sampling"]["temperature"] == 0, at.warm_up.stats
    return {
        "context": at.context,
        "prompt_tokens": stats["prompt_tokens"],
        "prefill_s": stats["prefill_s"],
        "restored_tokens": stats["reused_tokens"],
        "resident_bytes": stats["settings"]["resident_bytes"],
        "floor": floor_of(at, head),
        "tiers": [_kind(at.of(tiers, count), at.of(1, count), greedy) for count, tiers in at.kinds],
    }


def _kind(runs: list[Run], plain: list[Run], greedy: bool) -> dict[str, Any]:
    """The JSON for the runs with one number of sequences and tiers.

    Args:
        plain: the runs with the same number of sequences and one tier, for comparison.
    """
    times = [run.tbt_ms for run in runs]
    accepted = [run.stats["acceptance"] for run in runs]
    shares = {name: [one[name] for one in accepted if one[name] is not None] for name in accepted[0]}
    differences = [first_difference(run.token_ids, plain[0].token_ids) for run in runs] if greedy and plain else []
    return {
        "tiers": runs[0].step.tiers,
        "sequences": runs[0].step.sequences or 1,
        "tokens_per_s": spread([run.tokens_per_s for run in runs]),
        "modelled": False,
        "tbt_ms": spread(times),
        "speedup": median(run.tbt_ms for run in plain) / median(times) if plain else None,
        "acceptance": {name: median(known) if known else None for name, known in shares.items()},
        "first_difference": min((index for index in differences if index is not None), default=None),
        "runs": [
            {"repeat": run.step.repeat, **{name: run.stats[name] for name in _OF_A_RUN}}
            | {"passes": run.passes, "proposed": run.proposed}
            for run in runs
        ],
    }


_OF_A_RUN = (
    *("new_tokens", "seed", "tbt_ms", "tokens_per_s", "rounds", "acceptance", "settings", "time_s", "link", "kv_read"),
    *("memory", "warnings"),
)
"""The keys that are kept from the JSON of `triforce generate`."""


def report(console: Console, document: dict[str, Any]) -> None:
    """Prints the table of a document, and the lines around it."""
    where = machine_in_words(document["machine"])
    print_lines(console, [f"{document['model']}, {document['dtype']} on {where}; {conditions(document)}"])
    columns = (*_CONTEXT, *(_BATCH if document.get("batches") else ()), *_TIERS)
    print_table(console, columns, _rows(document))
    print_lines(console, ["", *notes(document)])


def _rows(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The `tiers` of a document, each with its context (`at`), and whether it is the first of the context (`first`),
    which shows the data that all of them share."""
    for at in document["contexts"]:
        for row in at["tiers"]:
            yield {**row, "at": at, "first": row is at["tiers"][0]}


def _gain(row: dict[str, Any]) -> str:
    """Tokens per second ÷ those of one sequence with the same number of tiers."""
    kind = 1, row["tiers"]
    one = next((other for other in row["at"]["tiers"] if (other["sequences"], other["tiers"]) == kind), None)
    if one is None or row["sequences"] == 1:
        return "-"
    return f"{row['tokens_per_s']['median'] / one['tokens_per_s']['median']:.2f}"


def _range(row: dict[str, Any]) -> str:
    return "modelled" if row["modelled"] else f"({row['tbt_ms']['min']:.1f} to {row['tbt_ms']['max']:.1f})"


def _accepted(row: dict[str, Any]) -> str:
    """The acceptance of the small model's tokens, and of the retrieval cache's."""
    shares = (row["acceptance"][name] for name in ("draft_per_token", "retrieval_per_token"))
    return " ".join(f"{share:.2f}" for share in shares if share is not None) or "-"


def _prefill(row: dict[str, Any]) -> str:
    seconds, restored = row["at"]["prefill_s"], row["at"]["restored_tokens"]
    return f"{seconds:.1f} s{' restored' if restored else ''}" if row["first"] and seconds else ""


_CONTEXT = (Column("context", lambda row: f"{row['at']['context']:,}" if row["first"] else "", left=True),)
_BATCH = (
    Column("sequences", lambda row: str(row["sequences"])),
    Column("tokens/s", lambda row: f"{row['tokens_per_s']['median']:.1f}"),
    Column("gain", _gain),
)
"""Additional columns if several sequences are decoded together."""
_TIERS = (
    Column("tiers", lambda row: str(row["tiers"])),
    Column("TBT, ms", lambda row: f"{row['tbt_ms']['median']:.1f}"),
    Column("", _range, left=True),
    Column("speed-up", lambda row: f"{row['speedup']:.2f}" if row["speedup"] and row["tiers"] > 1 else "-"),
    Column("accepted", _accepted),
    Column("tokens/round", lambda row: f"{row['acceptance']['tokens_per_round']:.1f}" if row["tiers"] > 1 else "-"),
    Column("floor", lambda row: f"{row['at']['floor']['ms']:.1f}" if row["first"] and row["at"]["floor"] else ""),
    Column("prefill", _prefill),
)


def conditions(document: dict[str, Any]) -> str:
    """The conditions of the measurement, in words."""
    if document["shape"]:
        return "random weights, synthetic keys and values; medians of steps"
    runs = document["repeats"]
    return f"{document['new_tokens']:,} new tokens, {sampling_in_words(document['sampling'])}; " + (
        f"medians of {runs} interleaved runs (least to most)" if runs > 1 else "one run each"
    )


def bandwidths(document: dict[str, Any], digits: int) -> str:
    """The measured bandwidths, with `digits` digits after the point."""
    found = ((name, document["measured_bandwidth"].get(f"{name}_gb_per_s")) for name in ("memory", "link", "disk"))
    return ", ".join(f"{name} {speed:.{digits}f} GB/s" for name, speed in found if speed)


def notes(document: dict[str, Any]) -> list[str]:
    """Explanations of the figures, and remarks on the figures of this document."""
    measured = bandwidths(document, 1)
    lines = [
        "TBT: decoding time ÷ the tokens after the first. accepted: accepted ÷ tested draft tokens, of the small model "
        "and of the retrieval cache. tokens/round: tokens per pass over the full cache.",
        f"floor, ms: derived, the bytes of one pass ÷ the bandwidth measured before the runs ({measured}). With "
        "speculation, TBT can be below it, as a pass yields several tokens.",
    ]
    if document.get("batches"):
        lines.append(
            "tokens/s: of all sequences together, after the first token of each. gain: tokens/s ÷ those of one "
            "sequence with as many tiers. All sequences have the same text; each has its own question. The text is "
            "prefilled, and crosses the link, once for all sequences."
        )
    if document["shape"]:
        lines += _shape_notes(document)
    else:
        lines += _prompt_notes(document["prompt"])
    differing = [
        f"{row['at']['context']:,} (from token {row['first_difference']} on, {row['tiers']} tiers)"
        for row in _rows(document)
        if row["first_difference"] is not None
    ]
    if differing:
        why = "an error" if document["dtype"] == "float32" else "possible at near-ties in 16 bits"
        lines.append(f"Greedy tokens differ from plain decoding ({why}) at {', '.join(differing)}.")
    warnings = {warning for row in _rows(document) for run in row["runs"] for warning in run.get("warnings", ())}
    lines += [f"warning: {warning}" for warning in sorted(warnings)]
    if document["interrupted"]:
        lines.append("Interrupted: these are the measurements that were finished.")
    return lines


def _prompt_notes(prompt: dict[str, Any]) -> list[str]:
    lines = [f"prompt: the first tokens of {prompt['name']}. context: tokens of prompt and answer."]
    if prompt["repeated"]:
        lines.append(
            f"The text has {prompt['text_tokens']:,} tokens and is repeated for longer contexts. Repeated text is easy "
            "to predict, so acceptance is higher than with other text. Give a longer text (--prompt-file)."
        )
    return lines


def _shape_notes(document: dict[str, Any]) -> list[str]:
    """Notes on a shape: which times are measured, and from what the others are derived."""
    assumed = document["shape"]["assumed_acceptance"]
    small = f", and {assumed['draft']:.3g} for those of the small model" if document["draft"] else ""
    lines = [
        "Steps are measured, with random weights, and zeros for keys and values. TBT of one tier is the time of one "
        "step, without sampling. TBT of more tiers is modelled from steps and an assumed acceptance rate: "
        f"{assumed['retrieval']:.3g} for tokens drafted on the retrieval cache{small} (--assume-acceptance)."
    ]
    failed = document["shape"].get("graphs_failed")
    lines += [f"warning: drafting runs without captured passes, and is slower: {failed}"] if failed else []
    for at in document["contexts"]:
        steps, lengths = at["steps_ms"], at["lengths"]
        drafted = f", a draft step {steps['draft']['median']:.2f} ms" if steps["draft"] else ""
        lines.append(
            f"{at['context']:,} tokens: a verification of {lengths['block_length'] + 1} rows "
            f"{steps['verify']['median']:.1f} ms, a step on the retrieval cache of {lengths['budget']:,} tokens with "
            f"{lengths['draft_length'] + 1} rows {steps['retrieval']['median']:.2f} ms{drafted}, a refresh of this "
            f"cache {steps['refresh']['median']:.2f} ms."
        )
    return lines
