"""The options of `triforce read` and of `triforce contexts`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ...offload.settings import Settings
from ...tp.weights.registry import EMBEDDED
from ..options import (
    DEVICE,
    DTYPE,
    GPUS,
    OUTPUT,
    PROMPT,
    TARGET,
    TEMPLATE_ARG,
    ReportRequest,
    argument,
    flag,
    option,
    some_settings,
)
from ..parameters import NAME, SIZE, TEXT


@dataclass(frozen=True, kw_only=True)
class ReadRequest(ReportRequest):
    """What `triforce read` is asked for."""

    files: Annotated[
        list[Path],
        argument("FILE...", "Text files, read as one text in this order; [bold]-[/] is stdin."),
    ]
    name: Annotated[
        str | None,
        option(PROMPT, NAME, "The name of the context. Default: the first file's name without its ending.", "--as"),
    ] = None
    system: Annotated[
        str | None, option(PROMPT, TEXT, "A system message before the text, which becomes part of the context.")
    ] = None
    raw: Annotated[
        bool,
        flag("--raw", PROMPT, "Save the text alone: not as the beginning of a user's message by the chat template."),
    ] = False
    template_args: Annotated[list[Any] | None, TEMPLATE_ARG] = None
    model: Annotated[str, TARGET] = EMBEDDED
    dtype: Annotated[str, DTYPE] = "auto"
    device: Annotated[str, DEVICE] = "auto"
    gpus: Annotated[int, GPUS] = 1
    settings: Annotated[Settings, some_settings("threads", "pack", "host_memory", "resident")] = Settings(tiers=1)  # noqa: RUF009 - frozen

    @property
    def draft(self) -> str | None:
        """None is needed to read."""
        return "none"

    @property
    def wanted_draft(self) -> str | None:
        return self.draft


_CONTEXT = argument("NAME", "The name of a saved context.")


@dataclass(frozen=True, kw_only=True)
class NameRequest(ReportRequest):
    """One saved context."""

    name: Annotated[str, _CONTEXT]


@dataclass(frozen=True, kw_only=True)
class PruneRequest(ReportRequest):
    """What may stay."""

    keep: Annotated[int, option(OUTPUT, SIZE, "What the contexts may take on the disk together.")]
