"""What of a run can be fixed by hand, checked; what is left open is planned and adapted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..tp.errors import UsageError
from ..tp.model.rope_option import parse_rope_scaling

MOST_SEQUENCES = 64
"""Sequences that are decoded together at most: of many more, hardly a draft token each would fit into the rows of a
step (`STEP_ROWS`), beyond which a pass is computed with another arithmetic."""

MOST_BLOCK_LENGTH = 256
"""Tokens that a pass over the full cache may be asked to verify."""


@dataclass(frozen=True)
class Settings:
    """What can be fixed by hand; `None` is planned, then adapted. Tokens throughout, but for `tiers`.

    Raises:
        UsageError: a value out of range.
    """

    tiers: int = 3
    budget: int | None = None
    chunk_size: int | None = None
    draft_length: int | None = None
    block_length: int | None = None
    refresh: str | int = "auto"
    resident: float | None = None
    """GiB of the KV cache kept on each device."""
    exact: str = "auto"
    """Whether passes that decide about the text are padded (`kernels.selection.padded_rows`), so that in 16 bits too
    the tokens do not depend on lengths and tiers: `on`, `off`, or `auto`, which is on on GPUs."""
    lookup: bool = False
    """Whether what occurred before is proposed as a draft, beside the draft model or without one."""
    link_gbps: float | None = None
    """Gigabytes a second that a link within host memory may carry, to try what a slower one does; `None`: any."""
    early_end: str | float = "auto"
    """Where a draft ends before it has all its tokens: where the next token, and all before it, are less likely to be
    accepted than this; `auto` follows from measured costs, and not where lengths are set by hand; `off` is nowhere."""
    pack: str = "auto"
    """Whether keys and values in bfloat16 are packed, without loss: in saved contexts, and where they stream from host
    memory or a disk. `on`, `off`, or `auto`: in contexts and on a disk where compiled kernels pack, in host memory (and
    on a disk below it) where a GPU packs with Triton. Blocks are not packed whose tokens are no multiple of 64, as odd
    chunk sizes have them."""

    host_memory: float | None = None
    """GiB of host memory that a run may take, on each host; `None`: what is free. What of the KV cache exceeds it is on
    a disk."""

    threads: int | None = None
    """CPU threads that decode; `None`: PyTorch's number, and fewer while other processes take the cores."""

    rope_scaling: str | None = None
    """How the target's RoPE is scaled beyond what its checkpoint says: `yarn:FACTOR`, `yarn:FACTOR:ORIGINAL`."""

    def __post_init__(self) -> None:
        if self.rope_scaling is not None:
            parse_rope_scaling(self.rope_scaling, 1)
        if self.tiers not in (1, 2, 3):
            raise UsageError(f"tiers is {self.tiers}; it is 1, 2 or 3")
        for name, least, most in (
            ("budget", 1, None),
            ("chunk_size", 1, 512),
            ("draft_length", 1, 64),
            ("block_length", 1, MOST_BLOCK_LENGTH),
            ("threads", 1, None),
        ):
            value = getattr(self, name)
            if value is not None and (value < least or (most is not None and value > most)):
                upto = f"from {least} to {most}" if most else f"{least} or more"
                raise UsageError(f"{name.replace('_', '-')} is {value}; it must be {upto}")
        if self.budget is not None and self.budget < self.planned_chunk_size:
            raise UsageError(
                f"budget is {self.budget} tokens, less than one chunk of {self.planned_chunk_size}; "
                "raise it or lower chunk-size"
            )
        of_range = ("resident", self.resident), ("link-gbps", self.link_gbps), ("host-memory", self.host_memory)
        for name, value in of_range:
            if value is not None and not 0 <= value < float("inf"):
                raise UsageError(f"{name} is {value}; it must be 0 or more")
        if self.exact not in ("auto", "on", "off"):
            raise UsageError(f"exact is {self.exact!r}; it is auto, on or off")
        chance = self.least_chance
        if chance is not None and self.early_end != "off" and not 0.0 < chance < 1.0:
            raise UsageError(f"early-end is {self.early_end!r}; it is auto, off or a probability between 0 and 1")
        if self.pack not in ("auto", "on", "off"):
            raise UsageError(f"pack is {self.pack!r}; it is auto, on or off")
        refresh_mode(self.refresh)

    @property
    def given(self) -> dict[str, Any]:
        """These settings as `Engine.load` takes them: `lookup` comes with the draft's name there."""
        return {name: value for name, value in vars(self).items() if name != "lookup"}

    def with_defaults(self, values: Mapping[str, int]) -> Settings:
        """These settings, with `values` (by name) for what is left open."""
        return replace(self, **{name: value for name, value in values.items() if getattr(self, name) is None})

    @property
    def least_chance(self) -> float | None:
        """`early_end` as a probability, 0 for nowhere; `None` where it follows from costs."""
        if self.early_end == "auto":
            return None
        try:
            return 0.0 if self.early_end == "off" else float(self.early_end)
        except ValueError:
            return float("nan")  # which no range has

    @property
    def planned_chunk_size(self) -> int:
        return self.chunk_size or 8


def refresh_mode(refresh: str | int) -> str | int:
    """When chunks are chosen anew: `auto`, `round`, `never`, or after so many rounds, which may come as text.

    Raises:
        UsageError: anything else, or a number below 1.
    """
    mode = int(refresh) if isinstance(refresh, str) and refresh.isdecimal() else refresh
    if mode not in ("auto", "round", "never") and not (isinstance(mode, int) and mode >= 1):
        raise UsageError(f"refresh is {mode!r}; it is auto, round, never or a number of rounds from 1")
    return mode
