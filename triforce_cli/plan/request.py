"""The options of `triforce plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ...offload.planning.cards import CARDS, DEFAULT_CARD, DISK_BANDWIDTH
from ...offload.settings import Settings
from ...tp.weights.registry import EMBEDDED
from ..options import ASSUMED, HARDWARE, MACHINE, ModelRequest, option, some_settings
from ..parameters import AUTO_OR_GIB, AUTO_OR_POSITIVE, AUTO_OR_TOKENS, CHANCES, FILE, MODEL, Kind, Numbers, whole


@dataclass(frozen=True, kw_only=True)
class PlanRequest(ModelRequest):
    """What `triforce plan` is asked for; `None` is `auto`, or not given."""

    model: Annotated[
        str,
        option(
            MACHINE,
            MODEL,
            "A preset ([bold]triforce models[/] lists them), a directory with config.json, or a model of the hub "
            "that is on this machine. No weights are read.",
        ),
    ] = EMBEDDED
    shape: Annotated[str | None, typer.Option(hidden=True, rich_help_panel=MACHINE)] = None
    """The name that `--model` had for presets."""
    context: Annotated[
        int | None,
        option(
            MACHINE,
            AUTO_OR_TOKENS,
            "Context length in tokens, prompt and answer together; auto is all positions of the model.",
        ),
    ] = None
    batch: Annotated[
        int,
        option(
            MACHINE,
            whole(1),
            "Sequences that are decoded together, each with a question and an answer of its own about one text.",
        ),
    ] = 1
    gpus: Annotated[int, option(HARDWARE, whole(1), "GPUs that share the model (tensor parallelism).")] = 1
    gpu: Annotated[
        str | None, option(HARDWARE, Kind("CARD"), f"{', '.join(CARDS)}. Default: {DEFAULT_CARD}.")
    ] = None  # fmt: skip
    gpu_memory: Annotated[
        float | None, option(HARDWARE, AUTO_OR_POSITIVE, "Memory of each GPU, in GiB; auto is the card's.")
    ] = None
    memory_gbps: Annotated[
        float | None,
        option(
            HARDWARE, AUTO_OR_POSITIVE, "Memory bandwidth of each GPU by its data sheet, in GB/s; auto is the card's.",
        ),
    ] = None  # fmt: skip
    link_gbps: Annotated[
        float | None,
        option(
            HARDWARE,
            AUTO_OR_POSITIVE,
            "Bandwidth from host memory to each GPU while all of them read, in GB/s and in practice; auto is a PCIe "
            "x16 link of the card's generation for each GPU.",
        ),
    ] = None
    settings: Annotated[
        Settings,
        some_settings("pack", "budget", "chunk_size", "draft_length", "block_length", "resident", "tiers")
        | {
            "host_memory": option(
                HARDWARE,
                AUTO_OR_GIB,
                "Free memory of the host, in GiB; auto does not check it. What exceeds it of the KV cache is read from "
                "a disk in every pass.",
            )
        },
    ] = Settings()  # noqa: RUF009 - frozen
    disk_gbps: Annotated[
        float | None,
        option(
            HARDWARE,
            AUTO_OR_POSITIVE,
            "Bandwidth of large reads from the disk of what exceeds host memory, in GB/s; auto assumes an NVMe disk "
            f"with {DISK_BANDWIDTH / 1e9:g}.",
        ),
    ] = None
    measured: Annotated[
        Path | None,
        option(
            HARDWARE,
            FILE,
            "Instead of a card: what [bold]triforce bench --json[/] measured with this model. Bandwidths, the time of "
            "passes and acceptance are then as measured.",
        ),
    ] = None
    assume_acceptance: Annotated[
        Numbers | None,
        option(
            ASSUMED,
            CHANCES,
            "Assumed acceptance, accepted ÷ tested, of tokens drafted on the retrieval cache, and of those drafted by "
            "the small model. Default: as measured, else 0.9,0.67.",
        ),
    ] = None
    draft_acceptance: Annotated[
        Numbers | None, typer.Option(hidden=True, rich_help_panel=ASSUMED, parser=CHANCES.parse)
    ] = None
    """The older option for the second of `--assume-acceptance`."""

    @property
    def acceptance(self) -> tuple[float | None, float | None]:
        """The assumed acceptance on the retrieval cache, and of the small model."""
        large, small = (*(self.assume_acceptance or ()), None, None)[:2]
        return large, self.draft_acceptance[0] if self.draft_acceptance else small
