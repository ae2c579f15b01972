"""`triforce models`: the presets, what each needs, whether it runs here, and whether it is here."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace

from ..tp.errors import ModelError
from ..tp.units import gib
from ..tp.weights.registry import PRESETS, Preset, published_cache
from .call import Call
from .options import ReportRequest
from .terminal.output import JsonFile
from .terminal.tables import make_table, print_lines


@dataclass(frozen=True)
class ModelRow:
    """A preset and what it takes. Bytes and tokens; `None` where that cannot be told."""

    name: str
    summary: str
    target: str
    draft: str
    """Both are names on the hub, or directories."""
    downloaded: dict[str, bool]
    """Whether target and draft are on this machine, with all their files."""
    context: int | None = None
    weight_bytes: int | None = None
    """Of target and draft, in the target's own number format."""
    kv_bytes: int | None = None
    """Of the full cache, with the whole context in it."""
    fits: bool | None = None
    """Whether a run over the whole context fits in the memory available now, on the device that it would use."""
    fitting_tokens: int | None = None
    """About how many tokens of context would fit; 0 if not even the weights do."""
    missing: str | None = None
    """Why it cannot be used here, apart from a download that it needs."""


def models(request: ReportRequest, call: Call) -> None:
    """Lists the models that have a short name, what each needs, and whether this machine has it. Nothing is downloaded.

    Any other model is given as a directory or by its name on the hub: [cyan]triforce generate --model OWNER/NAME[/].
    """
    with JsonFile.prepare(request.json) as json_file:
        rows = [describe(preset) for preset in PRESETS.values()]
        json_file.write([asdict(row) for row in rows])
    if not json_file.on_stdout:
        _show(rows)


def _show(rows: list[ModelRow]) -> None:
    from rich.console import Console

    titles = ("name", "context", "weights", "KV, full", "fits here", "downloaded")
    table = make_table(titles, map(_cells, rows), left=("name", "fits here", "downloaded"))
    lines = [
        "",
        "fits here: weights of target and draft, the KV cache of the whole context and working space, against the "
        "memory that is available now (with a GPU, the host's too); otherwise about how many tokens fit",
    ]
    for row in rows:
        lines += ["", row.name, f"  {row.summary}", f"  target {row.target}", f"  draft {row.draft}"]
        lines += [f"  cannot be used: {row.missing}"] if row.missing else []
    console = Console(file=sys.stdout, highlight=False)
    console.print(table)
    print_lines(console, lines)


def _cells(row: ModelRow) -> list[str]:
    """A line of the table."""
    sizes = [gib(size) if size is not None else "-" for size in (row.weight_bytes, row.kv_bytes)]
    return [row.name, f"{row.context:,}" if row.context else "-", *sizes, _fits(row), _downloaded(row)]


def _fits(row: ModelRow) -> str:
    if row.fitting_tokens is None:
        return "-"
    return "yes" if row.fits else f"{row.fitting_tokens:,}" if row.fitting_tokens else "no"


def _downloaded(row: ModelRow) -> str:
    there = [part for part, is_there in row.downloaded.items() if is_there]
    return "yes" if len(there) == len(row.downloaded) else f"{there[0]} only" if there else "no"


def describe(preset: Preset) -> ModelRow:
    """What `preset` needs, from what is known of its shape, and what of it is on this machine."""
    from ..offload.planning.memory import plan_here
    from ..offload.planning.request import RunRequest
    from ..offload.planning.run_plan import largest_context
    from ..offload.settings import Settings
    from ..tp.devices import resolve_device
    from ..tp.weights.weight_files import weight_files

    target_directory, draft_directory = preset.directories()
    there = {"target": target_directory is not None, "draft": draft_directory is not None}
    row = ModelRow(preset.name, preset.summary, preset.target, preset.draft, there)
    try:
        for directory in (target_directory, draft_directory):
            if directory is not None:
                weight_files(directory)
        target, draft = preset.configs()
    except ModelError as error:
        return replace(row, missing=str(error))
    settings = Settings().with_defaults(published_cache(preset.name, 1))
    context = target.max_position_embeddings
    request = RunRequest(target, draft, target.dtype, context, settings)
    plan = plan_here(request, resolve_device("auto"))
    return replace(
        row,
        context=context,
        weight_bytes=plan.weights,
        kv_bytes=plan.kv,
        fits=plan.fits,
        fitting_tokens=context if plan.fits else largest_context(plan.request),
    )
