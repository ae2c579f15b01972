"""`triforce models`: the presets, the memory that each needs, whether it fits this machine, and is downloaded."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace

from ..tp.errors import ModelError
from ..tp.units import gib
from ..tp.weights.registry import PRESETS, Preset, published_cache
from .call import Call, import_pytorch
from .options import ReportOptions
from .terminal.output import JsonFile
from .terminal.tables import make_table, print_lines


@dataclass(frozen=True)
class ModelRow:
    """A preset and the memory that it needs. Bytes and tokens; `None` if unknown."""

    name: str
    summary: str
    target: str
    draft: str
    """The name of the draft on the hub, or its directory; `target` likewise."""
    downloaded: dict[str, bool]
    """For `target` and `draft`, whether all files of the model are on this machine."""
    context: int | None = None
    weight_bytes: int | None = None
    """Bytes of the weights of target and draft, in the target's own dtype."""
    weights: str | None = None
    """How the target's weights are stored, if they are in few bits."""
    kv_bytes: int | None = None
    """Bytes of a full cache with the whole context."""
    fits: bool | None = None
    """Whether a run over the whole context fits in the memory available now, on the device that it would use."""
    fitting_tokens: int | None = None
    """The approximate number of tokens of context that would fit; 0 if the weights alone do not fit."""
    missing: str | None = None
    """The reason why the preset cannot be used on this machine, apart from not being downloaded."""


def models(options: ReportOptions, call: Call) -> None:
    """Lists presets (models with a short name), the memory each needs, and whether each fits here and is downloaded.

    Downloads nothing.
    Any other model is given as a directory or by its name on the hub: [cyan]triforce generate --model OWNER/NAME[/].
    """
    with JsonFile.prepare(options.json) as json_file:
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
        lines += [f"  weights {row.weights}"] if row.weights else []
        lines += [f"  cannot be used: {row.missing}"] if row.missing else []
    console = Console(file=sys.stdout, highlight=False)
    console.print(table)
    print_lines(console, lines)


def _cells(row: ModelRow) -> list[str]:
    """The cells of a row of the table."""
    sizes = [gib(size) if size is not None else "-" for size in (row.weight_bytes, row.kv_bytes)]
    return [row.name, f"{row.context:,}" if row.context else "-", *sizes, _fits(row), _downloaded(row)]


def _fits(row: ModelRow) -> str:
    if row.fitting_tokens is None:
        return "-"
    return "yes" if row.fits else f"{row.fitting_tokens:,}" if row.fitting_tokens else "no"


def _downloaded(row: ModelRow) -> str:
    parts = [part for part, downloaded in row.downloaded.items() if downloaded]
    return "yes" if len(parts) == len(row.downloaded) else f"{parts[0]} only" if parts else "no"


def describe(preset: Preset) -> ModelRow:
    """The memory that `preset` needs, planned from its shape, and which of its models are on this machine."""
    import_pytorch()
    from ..offload.planning.memory import plan_here
    from ..offload.planning.request import RunRequest
    from ..offload.planning.run_plan import largest_context
    from ..offload.settings import Settings
    from ..tp.devices import resolve_device
    from ..tp.weights.weight_files import weight_files

    target_directory, draft_directory = preset.directories()
    downloaded = {"target": target_directory is not None, "draft": draft_directory is not None}
    row = ModelRow(preset.name, preset.summary, preset.target, preset.draft, downloaded)
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
        weight_bytes=plan.weights + plan.embedding,
        weights=target.quantisation.name if target.quantisation else None,
        kv_bytes=plan.kv,
        fits=plan.fits,
        fitting_tokens=context if plan.fits else largest_context(plan.request),
    )
