"""The settings of a run that can be set by hand, with their checks. Open settings are planned and adapted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..tp.errors import UsageError
from ..tp.model.rope_option import parse_rope_scaling

MOST_SEQUENCES = 64
"""The maximum number of sequences that are decoded together. A pass with more rows than a step (`STEP_ROWS`) is
computed with another arithmetic. With many more sequences, hardly one draft token of each would fit into a step."""

MOST_BLOCK_LENGTH = 256
"""The maximum number of draft tokens in a verification."""


@dataclass(frozen=True)
class Settings:
    """Settings that can be set by hand. `None` means planned, then adapted. Sizes and lengths are in tokens.

    Raises:
        UsageError: a value is out of range.
    """

    tiers: int = 3
    """The number of tiers, 1 to 3. 3: a small model drafts, the target on its retrieval cache checks, the target on its
    full cache verifies. 2: the same without the small model. 1: plain decoding on the full cache."""
    budget: int | None = None
    """The size of the retrieval cache, at least one chunk."""
    chunk_size: int | None = None
    """The size of a retrieval chunk, 1 to 512."""
    draft_length: int | None = None
    """The number of draft tokens for a pass over the retrieval cache (γ1), 1 to 64."""
    block_length: int | None = None
    """The number of draft tokens for a pass over the full cache (γ2), 1 to 256."""
    refresh: str | int = "auto"
    """When the retrieval cache's chunks are chosen again; see `refresh_mode`."""
    resident: float | None = None
    """GiB of the KV cache kept on each device; `None`: planned."""
    exact: str = "auto"
    """Whether the target's passes over the full cache are padded (`kernels.selection.padded_rows`). Then the tokens do
    not depend on draft lengths and tiers, not even in 16 bits; except with three or more ranks, or with a chunk size
    that does not divide 256. `on`, `off`, or `auto`: on for GPUs."""
    lookup: bool = False
    """Whether tokens are drafted by lookup, beside the draft model or without a draft model."""
    link_gbps: float | None = None
    """The maximum bandwidth of a link within host memory, in gigabytes a second, to imitate a slower link; `None`: no
    maximum."""
    early_end: str | float = "auto"
    """A probability. A draft ends early if the next token, with all before it, is less likely than this to be accepted.
    `auto`: the probability follows from measured costs, but no draft ends early if lengths are set by hand. `off`: no
    draft ends early."""
    pack: str = "auto"
    """Whether keys and values in bfloat16 are packed, without loss: in saved contexts, and where they stream from host
    memory or a disk. `on`, `off` or `auto`. `auto` packs saved contexts if compiled kernels pack. On a GPU, it packs
    blocks in host memory and on a disk if Triton kernels pack. On a CPU, it packs blocks on a disk if compiled kernels
    pack. A block is never packed if its number of tokens is not a multiple of 64, as with unusual
    chunk sizes."""

    host_memory: float | None = None
    """GiB of host memory that a run may take, on each host; `None`: the free memory. If the KV cache does not fit, the
    rest is on a disk."""

    threads: int | None = None
    """The number of CPU threads that decode; `None`: PyTorch's number, and fewer while other processes take the cores.
    """

    rope_scaling: str | None = None
    """A scaling of the target's RoPE beyond that of its checkpoint: `yarn:FACTOR` or `yarn:FACTOR:ORIGINAL`."""

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
        """These settings as arguments of `Engine.load`, where `lookup` is a part of `draft`."""
        return {name: value for name, value in vars(self).items() if name != "lookup"}

    def with_defaults(self, values: Mapping[str, int]) -> Settings:
        """These settings, with `values` (by name) for those that are left open."""
        return replace(self, **{name: value for name, value in values.items() if getattr(self, name) is None})

    @property
    def least_chance(self) -> float | None:
        """`early_end` as a probability; 0 if no draft ends early, `None` if it follows from costs."""
        if self.early_end == "auto":
            return None
        try:
            return 0.0 if self.early_end == "off" else float(self.early_end)
        except ValueError:
            return float("nan")  # it is in no range

    @property
    def planned_chunk_size(self) -> int:
        """The chunk size in tokens, 8 if it is left open."""
        return self.chunk_size or 8


def refresh_mode(refresh: str | int) -> str | int:
    """Checks a value of `Settings.refresh`, and returns it: `round` (the chunks are chosen again after every round),
    `never`, a number of rounds, which may be given as text, or `auto`: after every round while this takes hardly any
    time, otherwise when acceptance drops, or some rounds later.

    Raises:
        UsageError: the value is another one, or a number below 1.
    """
    mode = int(refresh) if isinstance(refresh, str) and refresh.isdecimal() else refresh
    if mode not in ("auto", "round", "never") and not (isinstance(mode, int) and mode >= 1):
        raise UsageError(f"refresh is {mode!r}; it is auto, round, never or a number of rounds from 1")
    return mode
