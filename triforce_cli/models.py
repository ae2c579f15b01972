"""`triforce models`: the presets, what each needs, and whether it runs here."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer

from ..tp.errors import ModelError
from ..tp.registry import PRESETS, Preset
from ..tp.units import gib


@dataclass(frozen=True)
class ModelRow:
    """A preset and what it takes. Bytes and tokens; `None` where its files are not there to tell."""

    name: str
    summary: str
    target: str
    draft: str
    context: int | None = None
    weight_bytes: int | None = None
    kv_bytes: int | None = None
    """Of the full cache, with the whole context in it."""
    fits: bool | None = None
    """Whether weights and full context fit in the memory that is available now."""
    missing: str | None = None
    """What stands in the way of using it."""


def models(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks of errors.")] = False,
) -> None:
    """Lists the models that have a name, what each needs, and whether this machine has it.

    Any other model of the Llama family is given as a directory: [cyan]triforce generate --model DIR[/].
    """
    rows = [describe(preset) for preset in PRESETS.values()]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "context", "weights", "KV cache, full", "fits here", "what it is", box=None, pad_edge=False)
    for row in rows:
        sizes = [gib(size) if size is not None else "-" for size in (row.weight_bytes, row.kv_bytes)]
        context = f"{row.context:,}" if row.context else "-"
        fits = "incomplete" if row.missing else "yes" if row.fits else "not with its full context"
        table.add_row(row.name, context, *sizes, fits, row.summary)
    console = Console(file=sys.stdout)
    console.print(table)
    for row in rows:
        notes = [f"target {row.target}", f"draft {row.draft}", *([f"incomplete: {row.missing}"] if row.missing else [])]
        console.print(f"\n{row.name}", *notes, sep="\n  ", soft_wrap=True, highlight=False)


def describe(preset: Preset) -> ModelRow:
    """What `preset` needs, from its configuration files."""
    import psutil

    from ..offload.memory import plan_memory
    from ..offload.retrieval_cache import planned_budget
    from ..tp.config import ModelConfig
    from ..tp.weight_files import weight_files

    row = ModelRow(preset.name, preset.summary, str(preset.target), str(preset.draft))
    try:
        target, draft = ModelConfig.load(preset.target), ModelConfig.load(preset.draft)
        size = sum(path.stat().st_size for path in (*weight_files(preset.target), *weight_files(preset.draft)))
    except ModelError as error:
        return replace(row, missing=str(error))
    context, chunk = target.max_position_embeddings, 8
    plan = plan_memory(
        target, draft, dtype=target.dtype, context=context, budget=planned_budget(context, chunk), chunk_size=chunk
    )
    fits = plan.total <= psutil.virtual_memory().available
    return replace(row, context=context, weight_bytes=size, kv_bytes=plan.kv, fits=fits)
