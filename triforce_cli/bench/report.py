"""What a bench measured: for scripts (JSON), and for people (a table, and what its figures mean)."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from ..measurement import first_difference, on, sampling_words, spread
from ..terminal.tables import make_table, print_lines
from .measure import AtContext, Run

if TYPE_CHECKING:
    from rich.console import Console


def floor_of(at: AtContext, head: dict[str, Any]) -> dict[str, Any] | None:
    """From the bytes that the first run's passes read: one row or twenty, a pass reads the same."""
    run = next((run for run in (*at.runs, at.warm_up) if run.passes["verify"]), None)
    if run is None:
        return None
    passes = run.passes["verify"]
    read = head["weight_bytes"] + head["machine"]["world_size"] * run.stats["kv_read"]["bytes"] // passes
    of_disk = run.stats["disk"]["bytes_read"] // passes
    return derived_floor(read, run.stats["link"]["bytes_streamed"] // passes, of_disk, head)


def derived_floor(read_bytes: int, streamed_bytes: int, disk_bytes: int, head: dict[str, Any]) -> dict[str, Any] | None:
    """The least time of one pass over the full cache. On a CPU all ranks share one memory; each GPU has its own. All
    share a disk; where its bandwidth was not measured and something is read from it, there is no floor.

    Args:
        read_bytes: weights, keys and values, of all ranks.
        streamed_bytes: of them, what crosses one rank's link.
        disk_bytes: of them, what one rank reads from a disk.
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


def as_document(head: dict[str, Any], found: list[AtContext], interrupted: bool) -> dict[str, Any]:
    """The JSON; docs/bench.md says what its keys mean. Times are in the unit that a key ends with, the rest in bytes
    and tokens.

    Args:
        head: what was measured, where, and with which bandwidth: everything but the measurements.
    """
    return head | {"interrupted": interrupted, "shape": None, "contexts": [_context(at, head) for at in found]}


def _context(at: AtContext, head: dict[str, Any]) -> dict[str, Any]:
    greedy = head["sampling"]["temperature"] == 0
    return {
        "context": at.context,
        "prompt_tokens": at.prompt_tokens,
        "prefill_s": at.prefill_s,
        "restored_tokens": at.warm_up.stats["reused_tokens"],
        "resident_bytes": at.resident_bytes,
        "floor": floor_of(at, head),
        "tiers": [_tiers(at.of(tiers, count), at.of(1, count), greedy) for count, tiers in at.kinds],
    }


def _tiers(runs: list[Run], plain: list[Run], greedy: bool) -> dict[str, Any]:
    """Runs of one number of tiers, beside those of plain decoding."""
    times = [run.tbt_ms for run in runs]
    accepted = [run.stats["acceptance"] for run in runs]
    shares = {name: [one[name] for one in accepted if one[name] is not None] for name in accepted[0]}
    return {
        "tiers": runs[0].tiers,
        "sequences": runs[0].sequences or 1,
        "tokens_per_s": spread([run.tokens_per_s for run in runs]),
        "modelled": False,
        "tbt_ms": spread(times),
        "speedup": median(run.tbt_ms for run in plain) / median(times) if plain else None,
        "acceptance": {name: median(known) if known else None for name, known in shares.items()},
        "first_difference": first_difference(runs, plain[0]) if greedy and plain else None,
        "runs": [
            {"repeat": run.repeat, **{name: run.stats[name] for name in _OF_A_RUN}}
            | {"passes": run.passes, "proposed": run.proposed}
            for run in runs
        ],
    }


_OF_A_RUN = (
    *("new_tokens", "seed", "tbt_ms", "tokens_per_s", "rounds", "acceptance", "settings", "time_s", "link", "kv_read"),
    *("memory", "warnings"),
)
"""What is kept of the JSON of `triforce generate`."""


def report(console: Console, document: dict[str, Any]) -> None:
    """The table of a document, and the lines around it."""
    head = f"{document['model']}, {document['dtype']} on {on(document['machine'])}; {conditions(document)}"
    print_lines(console, [head])
    titles = ("context", "tiers", "TBT, ms", "", "speed-up", "accepted", "a round", "floor", "prefill")
    rows = [_cells(at, row, row is at["tiers"][0]) for at in document["contexts"] for row in at["tiers"]]
    if document.get("batches"):
        titles = (titles[0], "sequences", "tokens/s", "gain", *titles[1:])
        rows = [
            [cells[0], *_batch_cells(at, row), *cells[1:]]
            for cells, (at, row) in zip(rows, of_contexts(document), strict=True)
        ]
    console.print(make_table(titles, rows, left=("context", "")))
    print_lines(console, ["", *notes(document)])


def of_contexts(document: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What was measured, with the context it was measured at."""
    return [(at, row) for at in document["contexts"] for row in at["tiers"]]


def _batch_cells(at: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """The number of sequences, their tokens per second, and what that is of one sequence's, with as many tiers."""
    one = next((other for other in at["tiers"] if (other["sequences"], other["tiers"]) == (1, row["tiers"])), None)
    speed = row["tokens_per_s"]["median"]
    gain = f"{speed / one['tokens_per_s']['median']:.2f}" if one and one is not row else "-"
    return [str(row["sequences"]), f"{speed:.1f}", gain]


def conditions(document: dict[str, Any]) -> str:
    """The conditions of the measurement, in words."""
    if document["shape"]:
        return "random weights, synthetic keys and values; medians of steps"
    runs = document["repeats"]
    return f"{document['new_tokens']:,} new tokens, {sampling_words(document['sampling'])}; " + (
        f"medians of {runs} interleaved runs (least to most)" if runs > 1 else "one run each"
    )


def modelled(row: dict[str, Any]) -> bool:
    """Whether the times of so many tiers were derived from an assumed acceptance, not measured."""
    return row["modelled"]


def _cells(at: dict[str, Any], row: dict[str, Any], first: bool) -> list[str]:
    """A line of the table; the first of a context has what its lines share."""
    tbt, accepted, speculates = row["tbt_ms"], row["acceptance"], row["tiers"] > 1
    shares = [accepted[name] for name in ("draft_per_token", "retrieval_per_token") if accepted[name] is not None]
    return [
        f"{at['context']:,}" if first else "",
        str(row["tiers"]),
        f"{tbt['median']:.1f}",
        "modelled" if modelled(row) else f"({tbt['min']:.1f} to {tbt['max']:.1f})",
        f"{row['speedup']:.2f}" if row["speedup"] and speculates else "-",
        " ".join(f"{share:.2f}" for share in shares) or "-",
        f"{accepted['tokens_per_round']:.1f}" if speculates else "-",
        f"{at['floor']['ms']:.1f}" if first and at["floor"] else "",
        f"{at['prefill_s']:.1f} s{' restored' if at['restored_tokens'] else ''}" if first and at["prefill_s"] else "",
    ]


def bandwidths(document: dict[str, Any], digits: int) -> str:
    """Those that were measured."""
    found = ((name, document["measured_bandwidth"].get(f"{name}_gb_per_s")) for name in ("memory", "link", "disk"))
    return ", ".join(f"{name} {speed:.{digits}f} GB/s" for name, speed in found if speed)


def notes(document: dict[str, Any]) -> list[str]:
    """What the figures mean, and what to know about these."""
    measured = bandwidths(document, 1)
    lines = [
        "TBT: decoding time ÷ the tokens after the first. accepted: accepted ÷ tested draft tokens, of the small model "
        "and of the retrieval cache. a round: tokens for each pass over the full cache.",
        f"floor, ms: derived, the bytes of one pass ÷ the bandwidth measured before the runs ({measured}); speculation "
        "goes below it, as a pass gives several tokens.",
    ]
    if document.get("batches"):
        lines.append(
            "tokens/s: of all sequences together, after the first token of each; gain: of one sequence's with as many "
            "tiers. Each sequence has the same text and a question of its own; the text is read, and crosses the link, "
            "once for all."
        )
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
        lines.append("Interrupted: this was measured by then.")
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
    """Which times of a shape are measured, and what the others are derived from."""
    assumed = document["shape"]["assumed_acceptance"]
    small = f", {assumed['draft']:.3g} of the small model's" if document["draft"] else ""
    lines = [
        "Steps are measured, with random weights and zeros for keys and values; one tier's TBT is such a step, without "
        f"sampling. More tiers' TBT is modelled from steps: assumed, {assumed['retrieval']:.3g} of the tested tokens "
        f"that the retrieval cache drafts are accepted{small} (--assume-acceptance)."
    ]
    failed = document["shape"].get("graphs_failed")
    lines += [f"warning: steps that draft go without captured passes, and slower: {failed}"] if failed else []
    for at in document["contexts"]:
        steps, lengths = at["steps_ms"], at["lengths"]
        drafted = f", a draft step {steps['draft']['median']:.2f} ms" if steps["draft"] else ""
        lines.append(
            f"{at['context']:,} tokens: a verification of {lengths['block_length'] + 1} rows "
            f"{steps['verify']['median']:.1f} ms, a step on {lengths['budget']:,} tokens with "
            f"{lengths['draft_length'] + 1} rows {steps['retrieval']['median']:.2f} ms{drafted}, a new choice of these "
            f"tokens {steps['refresh']['median']:.2f} ms."
        )
    return lines
