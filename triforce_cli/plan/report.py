"""The tables and sentences of `triforce plan`, which fit 80 columns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

from ...offload.planning.cards import DEFAULT_CARD
from ...offload.planning.cost_model import PassTimes
from ...tp.units import gib
from ..terminal.tables import make_table

if TYPE_CHECKING:
    from rich.table import Table

    from ...offload.planning.measured import Calibration
    from .planning import Plan


def show(plan: Plan) -> None:
    """Prints `plan` to stdout."""
    console = Console(file=sys.stdout, highlight=False, markup=False)
    request, card = plan.run.request, plan.card
    small = "" if plan.draft is None else " and its draft" if plan.draft == plan.model else f" with {plan.draft}"
    several = f", {request.sequences} sequences over one text" if request.sequences > 1 else ""
    kind = str(request.dtype).removeprefix("torch.")
    console.print(f"{plan.model}{small}: {kind}, {request.context:,} tokens{several}")
    console.print(
        f"{request.gpus} × {card.name}: {card.memory_gib:.2f} GiB at {card.memory_gb_per_s:,.0f} GB/s, "
        f"link {card.link_gb_per_s:.3g} GB/s\n"
    )
    if plan.calibration:
        for line in _measured(plan.calibration):
            console.print(line)
        console.print()
    console.print(_memory_table(plan))
    console.print(f"\n{_verification(plan)}\n")
    if any(plan.estimates.values()):
        console.print(_speed_table(plan))
        if plan.calibration:
            console.print(f"\nTimes are modelled, from the measured passes above and this: {_assumptions(plan)}.")
        else:
            console.print(f"\nTimes are modelled, not measured. Assumed: {_assumptions(plan)}.")
    if plan.shortfalls:
        if any(plan.estimates.values()):
            console.print()
        console.print("does not fit: " + "; ".join(plan.shortfalls))
        for remedy in plan.remedies:
            console.print(f"  would fit: {remedy.text} (--{remedy.option} {remedy.value})", soft_wrap=True)
        if not plan.remedies:
            console.print("  no single change makes it fit; choose a smaller model")


_RESERVED = {
    "workspaces": "cuBLAS",
    "nccl": "NCCL",
    "fragmentation": "fragmentation, estimated",
    "graphs": "captured passes",
}


PROCESS = {
    "python": "Python, PyTorch",
    "program": "this program, transformers, the tokenizer",
    "kept": "kept by kernels and allocators",
    "cuda": "CUDA's libraries",
}
"""The words for the parts of `RunRequest.process_parts`."""


def _memory_table(plan: Plan) -> Table:
    request, run = plan.run.request, plan.run
    placement = run.placement
    plural = "s" if placement.num_blocks > 1 else ""
    packed = ", packed" if placement.packed else ""
    blocks = f"{placement.num_blocks} block{plural} of {placement.block_size:,} tokens{packed}"
    draft = ", draft included" if request.small else ""
    larger = max(run.decoding, run.reading)  # only this one counts: they are never in memory together
    retrieval = f", with a retrieval cache of {run.budget:,} tokens" if run.budget else ""
    others = {f"decoding{retrieval}": run.decoding, "prefill": run.reading}
    streaming = {"ring": run.ring, "open stretches": run.open_stretches}
    host = "(not given)" if request.host_bytes is None else gib(request.host_bytes)
    rows = [
        ("weights" + draft, _size(run.weights), "-"),
        *([("input embedding", "-", _size(run.embedding * request.gpus))] if run.embedding else []),
        (f"KV cache, {blocks}", _size(run.resident_kv), _size(run.streamed_kv * request.gpus)),
        *([("room for blocks that leave the GPU", "-", _size(run.spare * request.gpus))] if run.spare else []),
        *([("last tokens of layers with windows", _size(run.windows), "-")] if run.windows else []),
        *([("states of layers with linear attention", _size(run.states), "-")] if run.states else []),
        *((name, gib(size), "-") for name, size in others.items() if size == larger > 0),
        *(
            (f"{name} (not at the same time)", f"({gib(size)})", "-")
            for name, size in others.items()
            if 0 < size < larger
        ),
        *([("KV cache of the draft", _size(run.draft_kv), "-")] if run.draft_kv else []),
        ("RoPE table", _size(run.rope), "-"),
        *([("attention in PyTorch's operations", _size(run.scratch), "-")] if run.scratch else []),
        *((name, _size(size), "-") for name, size in streaming.items() if placement.streams),
        *([("staging, for blocks on the disk", "-", _size(run.staging * request.gpus))] if run.staging else []),
        *([("copies of earlier states", "-", _size(run.kept_states * request.gpus))] if run.kept_states else []),
        *([("index of the text", "-", _size(run.index * request.gpus))] if run.index else []),
        *(
            (f"process: {PROCESS[part]}", "-", _size(size * request.gpus))
            for part, size in request.process_parts.items()
        ),
        *([("process: CUDA context", _size(run.cuda_context), "-")] if run.cuda_context else []),
        *((f"left free for {_RESERVED[part]}", _size(size), "-") for part, size in run.reserve_parts.items() if size),
        ("total", _size(run.device_total), _size(run.host_total * request.gpus)),
        ("available", gib(request.gpu_bytes or 0), host),
        *([("part of the KV cache on a disk", "-", f"({gib(run.disk_kv * request.gpus)})")] if run.disk_kv else []),
    ]
    return make_table(("memory", "each GPU" if request.gpus > 1 else "GPU", "host"), rows, left=("memory",))


def _size(num_bytes: int) -> str:
    return gib(num_bytes) if num_bytes else "-"


def _verification(plan: Plan) -> str:
    run = plan.run
    if not run.streamed_per_pass:
        return "A verification moves nothing over the link: the whole KV cache is resident."
    each = " over each link" if plan.run.request.gpus > 1 else " over the link"
    floor = PassTimes(run, plan.hardware).floor * 1e3
    moved = f"A verification moves {gib(run.streamed_per_pass)}{each}"
    if run.disk_per_pass:
        speed = f"{plan.hardware.disk_bandwidth / 1e9:.3g} GB/s, {plan.disk_speed_is}"
        moved += f"; {gib(run.disk_per_pass)} of these bytes are read from a disk ({speed})"
    return f"{moved}. It takes at least {floor:,.0f} ms (the floor)."


def _assumptions(plan: Plan) -> str:
    """The acceptance with which times are computed and, if passes were measured, whether it was measured too."""
    _, *measured = plan.calibration.accepted if plan.calibration else (0, None, None)

    def source(value: float, known: float | None) -> str:
        return f" ({'measured' if value == known else 'assumed'})" if plan.calibration else ""

    large, small = plan.assumed.acceptance, plan.assumed.draft_acceptance
    words = f"acceptance rate {large:.3g}{source(large, measured[0])} of tokens drafted on the retrieval cache"
    if plan.draft is None:
        return words
    small_model = plan.run.request.small
    drafts = "the small model" if small_model else "lookup"
    if small_model and small_model.is_head:
        drafts = "the model's multi-token-prediction head"
    return f"{words}, {small:.2g}{source(small, measured[1])} of tokens drafted by {drafts}"


def _measured(calibration: Calibration) -> list[str]:
    """The figures that are measured, and their source."""
    terms, source = calibration.terms(), calibration.source
    fitted, accepted, bandwidth = terms["pass_fit"], terms["measured_acceptance"], terms["bandwidth"]
    rates = [f"{fitted['overhead_ms']:.3g} ms"]
    rates += [f"bytes ÷ {fitted['gb_per_s']:,.0f} GB/s"] if fitted["gb_per_s"] else []
    rates += [f"operations ÷ {fitted['gflops']:,.0f} GFLOPS"] if fitted["gflops"] else []
    shares = {"retrieval cache": accepted["retrieval"], "small model": accepted["draft"]}
    known = [f"{share:.2f} ({name})" for name, share in shares.items() if share is not None]
    link = bandwidth["link_gb_per_s"]
    lines = [
        f"Measured on {terms['date']} with {terms['measured_model']} ({source.path.name}):",
        f"  memory {bandwidth['memory_gb_per_s']:.1f} GB/s; link "
        + (f"{link:.1f} GB/s" if link else f"not measured: that of {DEFAULT_CARD} or --link-gbps is used"),
        f"  time of a pass: {' + '.join(rates)},",
        f"    fitted to {fitted['passes']} measured kinds of passes, off by at most {fitted['worst']:.0%}",
        f"  a round, besides its passes: {terms['round_ms']:.2g} ms"
        + (f"; a draft step: {terms['draft_step_ms']:.2g} ms" if terms["draft_step_ms"] is not None else ""),
    ]
    if known:
        lines.append(f"  acceptance at {accepted['context']:,} tokens: {', '.join(known)}")
    return lines


def _speed_table(plan: Plan) -> Table:
    rows: list[list[str]] = []
    batch = plan.run.request.sequences > 1
    for tiers, one in plan.estimates.items():
        if one is None:
            rows.append([str(tiers), "does not fit", *[""] * (6 if batch else 5)])
            continue
        lengths = {1: "-", 2: str(one.block_length), 3: f"{one.block_length},{one.draft_length}"}[tiers]
        times = map(_ms, (one.tbt_s, one.verify_s, one.retrieval_s, one.draft_s))
        rows.append([str(tiers), *times, lengths, f"{one.tokens_per_round:.1f}"])
        if batch:
            rows[-1].append(f"{one.tokens_per_second:,.1f}")
    titles = ("tiers", "TBT", "verification", "retrieval", "draft", "γ2,γ1", "tokens/round")
    return make_table((*titles, "tokens/s") if batch else titles, rows)


def _ms(seconds: float) -> str:
    if not seconds:
        return "-"
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
