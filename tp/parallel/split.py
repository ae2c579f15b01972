"""The part of a model that each rank holds, as in Megatron-LM (arXiv 1909.08053): heads, MLP columns, rows of the head.

Query heads are split evenly, and so are key/value heads. If there are fewer key/value heads than ranks, several ranks
hold the same head. Layers with linear attention are split by their key heads. Every rank holds the whole embedding:
reading rows of it is cheap, and a split embedding would cost a sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import UsageError
from ..model.config import ModelConfig
from .ranks import Ranks


@dataclass(frozen=True)
class Split:
    """One rank's part of a model, as slices of the whole model's dimensions."""

    heads: slice
    kv_heads: slice
    mlp: slice
    shared: slice
    """The part of the MLP of the expert that all rows use."""
    key_heads: slice
    """The key heads of linear attention, each with its value heads."""
    vocabulary: slice
    """The rows of the output head."""
    vocabulary_room: int
    """Rows of the largest part of the output head; the last ranks' parts may be smaller."""

    @classmethod
    def of(cls, config: ModelConfig, ranks: Ranks) -> Split:
        """The part that `ranks.rank` holds.

        Raises:
            UsageError: the heads cannot be split over this number of ranks.
        """
        check_split(config, ranks.size)
        kv_head = ranks.rank * config.num_kv_heads // ranks.size  # the first head, or the head shared with other ranks
        room = -(-config.vocab_size // ranks.size)
        first_row = min(ranks.rank * room, config.vocab_size)
        return cls(
            heads=_part(config.num_heads, ranks),
            kv_heads=slice(kv_head, kv_head + max(1, config.num_kv_heads // ranks.size)),
            mlp=_part(config.intermediate_size, ranks),
            shared=_part(config.experts.shared_width if config.experts else 0, ranks),
            key_heads=_part(config.linear.key_heads if config.linear else 0, ranks),
            vocabulary=slice(first_row, min(first_row + room, config.vocab_size)),
            vocabulary_room=room,
        )

    def config(self, whole: ModelConfig) -> ModelConfig:
        """`whole` with the heads and the MLP width of this part, for the caches and the byte counts of a rank."""
        experts, linear = whole.experts, whole.linear
        if linear:
            key_heads = _len(self.key_heads)
            value_heads = key_heads * linear.value_heads // linear.key_heads
            linear = replace(linear, key_heads=key_heads, value_heads=value_heads)
        return replace(
            whole,
            num_heads=_len(self.heads),
            num_kv_heads=_len(self.kv_heads),
            intermediate_size=_len(self.mlp),
            experts=replace(experts, shared_width=_len(self.shared)) if experts else None,
            linear=linear,
        )


def check_split(config: ModelConfig, size: int) -> None:
    """Checks that `size` ranks can share the model's heads.

    Raises:
        UsageError: they cannot; the message gives the numbers of ranks that can.
    """
    if _divides(config, size):
        return
    works = [n for n in range(1, config.num_heads + 1) if _divides(config, n)]
    of_states = f", {config.linear.key_heads} of linear attention" if config.linear else ""
    raise UsageError(
        f"{config.name} has {config.num_heads} heads and {config.num_kv_heads} key/value heads{of_states}, which "
        f"{size} ranks cannot share evenly; --gpus may be {', '.join(map(str, works))}"
    )


def _divides(config: ModelConfig, size: int) -> bool:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if config.linear and config.linear.key_heads % size:
        return False
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _part(total: int, ranks: Ranks) -> slice:
    return slice(total * ranks.rank // ranks.size, total * (ranks.rank + 1) // ranks.size)


def _len(part: slice) -> int:
    return part.stop - part.start
