"""What of a model each rank holds: heads, MLP columns and rows of the output head (Megatron-LM, arXiv 1909.08053).

Query heads are split evenly; so are key/value heads, or, where there are fewer than ranks, each is held by several.
The embedding stays whole on every rank: looking up a row of it is no work, and a split one would cost a sum.
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
    vocabulary: slice
    vocabulary_room: int
    """Rows of the largest rank's part of the output head; the last ranks' may be shorter."""

    @classmethod
    def of(cls, config: ModelConfig, ranks: Ranks) -> Split:
        """The part of `ranks.rank`.

        Raises:
            UsageError: the heads cannot be split over so many ranks.
        """
        check_split(config, ranks.size)
        kv_head = ranks.rank * config.num_kv_heads // ranks.size  # the first one, or the one shared with others
        room = -(-config.vocab_size // ranks.size)
        first_row = min(ranks.rank * room, config.vocab_size)
        return cls(
            heads=_part(config.num_heads, ranks),
            kv_heads=slice(kv_head, kv_head + max(1, config.num_kv_heads // ranks.size)),
            mlp=_part(config.intermediate_size, ranks),
            vocabulary=slice(first_row, min(first_row + room, config.vocab_size)),
            vocabulary_room=room,
        )

    def config(self, whole: ModelConfig) -> ModelConfig:
        """`whole` with the heads and the MLP width of this part: what caches and sizes on one rank go by."""
        return replace(
            whole, num_heads=_len(self.heads), num_kv_heads=_len(self.kv_heads), intermediate_size=_len(self.mlp)
        )


def check_split(config: ModelConfig, size: int) -> None:
    """Raises:
    UsageError: `size` ranks cannot share the model's heads; the message gives the counts that can.
    """
    if _divides(config, size):
        return
    works = [n for n in range(1, config.num_heads + 1) if _divides(config, n)]
    raise UsageError(
        f"{config.name} has {config.num_heads} heads and {config.num_kv_heads} key/value heads, which {size} ranks "
        f"cannot share evenly; --gpus may be {', '.join(map(str, works))}"
    )


def _divides(config: ModelConfig, size: int) -> bool:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _part(total: int, ranks: Ranks) -> slice:
    return slice(total * ranks.rank // ranks.size, total * (ranks.rank + 1) // ranks.size)


def _len(part: slice) -> int:
    return part.stop - part.start
