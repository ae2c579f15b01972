"""What `triforce plan` shows to people: tables that are read at 80 columns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ...offload.planning.run_plan import RUNTIME_BYTES
from ...tp.units import gib

if TYPE_CHECKING:
    from .measured import Calibration
    from .planning import Plan


def show(plan: Plan) -> None:
    """Prints `plan` to stdout."""
    console = Console(file=sys.stdout, highlight=False, markup=False)
    request, card = plan.run.request, plan.card
    small = "" if plan.draft is None else " and its draft" if plan.draft == plan.model else f" with {plan.draft}"
    console.print(f"{plan.model}{small}: {str(request.dtype).removeprefix('torch.')}, {request.context:,} tokens")
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
            console.print(f"\nTimes are modelled, from passes as measured (above): {_assumptions(plan)}.")
        else:
            console.print(f"\nTimes are modelled, not measured; assumed: {_assumptions(plan)}.")
    if plan.shortfalls:
        if any(plan.estimates.values()):
            console.print()
        console.print("does not fit: " + "; ".join(plan.shortfalls))
        for remedy in plan.remedies:
            console.print(f"  would fit: {remedy.text} (--{remedy.option} {remedy.value})", soft_wrap=True)
        if not plan.remedies:
            console.print("  no single change makes it fit; choose a smaller model")


def _memory_table(plan: Plan) -> Table:
    request, run = plan.run.request, plan.run
    table = Table(box=None, pad_edge=False, show_footer=False)
    table.add_column("what")
    table.add_column("each GPU" if request.gpus > 1 else "GPU", justify="right")
    table.add_column("host", justify="right")

    def row(what: str, device: int = 0, host: int = 0) -> None:
        table.add_row(what, gib(device) if device else "-", gib(host) if host else "-")

    placement = run.placement
    plural = "s" if placement.num_blocks > 1 else ""
    blocks = f"{placement.num_blocks} block{plural} of {placement.block_size:,} tokens"
    row("weights" + (", draft included" if plan.draft else ""), run.weights)
    row(f"KV cache, {blocks}", run.resident_kv, run.streamed_kv * request.gpus)
    # The larger of these two counts: they are never there together.
    for what, size in ((f"retrieval cache, {run.budget:,} tokens", run.retrieval), ("prefill", run.prefill)):
        if size:
            counted = size == max(run.retrieval, run.prefill)
            table.add_row(what + ("" if counted else " (not at the same time)"), gib(size) if counted else
                          f"({gib(size)})", "-")  # fmt: skip
    if placement.streams:
        row("ring", run.ring)
        row("open stretches", run.open_stretches)
    row("process", run.cuda_context, RUNTIME_BYTES * request.gpus)
    row("left free", run.reserve)
    row("total", run.device_total, run.host_total * request.gpus)
    table.add_row(
        "there is",
        gib(request.gpu_bytes or 0),
        gib(request.host_bytes) if request.host_bytes is not None else "(not given)",
    )
    return table


def _verification(plan: Plan) -> str:
    run = plan.run
    if not run.streamed_per_pass:
        return "A verification moves nothing over the link: the whole KV cache is resident."
    each = " over each link" if plan.run.request.gpus > 1 else " over the link"
    floor = run.streamed_per_pass / plan.hardware.link_bandwidth * 1e3
    return f"A verification moves {gib(run.streamed_per_pass)}{each}: {floor:,.0f} ms at least (the floor)."


def _assumptions(plan: Plan) -> str:
    """What stands of what is drafted, and, beside measured passes, whether that was measured too."""
    _, *measured = plan.calibration.accepted if plan.calibration else (0, None, None)

    def source(value: float, known: float | None) -> str:
        return f" ({'measured' if value == known else 'assumed'})" if plan.calibration else ""

    large, small = plan.assumed.acceptance, plan.assumed.draft_acceptance
    words = f"{large:.3g}{source(large, measured[0])} of what the retrieval cache drafts stands"
    if plan.draft is None:
        return words
    return f"{words}, {small:.2g}{source(small, measured[1])} of what the small model drafts"


def _measured(calibration: Calibration) -> list[str]:
    """What is measured, and from where."""
    terms, source = calibration.terms(), calibration.source
    fitted, accepted, bandwidth = terms["pass_fit"], terms["measured_acceptance"], terms["bandwidth"]
    rates = [f"{fitted['overhead_ms']:.3g} ms"]
    rates += [f"a byte at {fitted['gb_per_s']:,.0f} GB/s"] if fitted["gb_per_s"] else []
    rates += [f"an operation at {fitted['gflops']:,.0f} GFLOPS"] if fitted["gflops"] else []
    shares = {"retrieval cache": accepted["retrieval"], "small model": accepted["draft"]}
    known = [f"{share:.2f} ({name})" for name, share in shares.items() if share is not None]
    link = bandwidth["link_gb_per_s"]
    lines = [
        f"Measured on {terms['date']} with {terms['measured_model']} ({source.path.name}):",
        f"  memory {bandwidth['memory_gb_per_s']:.1f} GB/s; link "
        + (f"{link:.1f} GB/s" if link else "not measured, so as of a card's"),
        f"  a pass: {' + '.join(rates)},",
        f"    fitted to {fitted['passes']} measured kinds of passes, off by at most {fitted['worst']:.0%}",
        f"  besides, a round: {terms['round_ms']:.2g} ms"
        + (f"; a draft step: {terms['draft_step_ms']:.2g} ms" if terms["draft_step_ms"] is not None else ""),
    ]
    if known:
        lines.append(f"  acceptance at {accepted['context']:,} tokens: {', '.join(known)}")
    return lines


def _speed_table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    titles = ("tiers", "TBT, modelled", "verification", "retrieval", "draft", "lengths", "tokens/round")
    for title in titles:
        table.add_column(title, justify="right")
    for tiers, estimate in plan.estimates.items():
        if estimate is None:
            table.add_row(str(tiers), "does not fit")
            continue
        lengths = {1: "-", 2: str(estimate.block_length), 3: f"{estimate.block_length}, {estimate.draft_length}"}
        table.add_row(
            str(tiers),
            _ms(estimate.tbt_s),
            _ms(estimate.verify_s),
            _ms(estimate.retrieval_s),
            _ms(estimate.draft_s),
            lengths[tiers],
            f"{estimate.tokens_per_round:.1f}",
        )
    return table


def _ms(seconds: float) -> str:
    if not seconds:
        return "-"
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
