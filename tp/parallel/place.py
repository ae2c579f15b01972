"""The rank of this process among those that were started together. Does not import PyTorch, so it is quick to use."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import UsageError


@dataclass(frozen=True)
class Place:
    """The rank of a process among those that were started together, from torchrun's environment variables."""

    rank: int
    size: int
    """The number of processes."""
    local_rank: int
    """The rank among the processes of this machine."""
    local_size: int
    """The number of processes on this machine."""

    @classmethod
    def from_environment(cls) -> Place | None:
        """The place of this process; `None` if it was started alone.

        Raises:
            UsageError: the variables have impossible values.
        """
        names = ("RANK", "WORLD_SIZE")
        if not all(name in os.environ for name in names):
            return None
        try:
            rank, size = (int(os.environ[name]) for name in names)
            place = cls(
                rank, size, int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
            )
        except ValueError as error:
            raise UsageError(
                f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be whole numbers ({error}); start the ranks "
                "with torchrun"
            ) from error
        if not 0 <= place.rank < place.size:
            raise UsageError(
                f"RANK is {place.rank} and WORLD_SIZE {place.size}; RANK must be from 0 to WORLD_SIZE - 1: start the "
                "ranks with torchrun"
            )
        return place

    @classmethod
    def among(cls, gpus: int) -> Place | None:
        """The place of this process among `gpus` ranks; `None` if it is alone. With `gpus` 1, torchrun may have started
        any number of ranks.

        Raises:
            UsageError: `gpus` is below 1; or it is above 1, and this process was started alone or among another number
                of ranks; or see `from_environment`.
        """
        place = cls.from_environment()
        if gpus < 1:
            raise UsageError(f"gpus is {gpus}; it must be 1 or more")
        if place is None and gpus > 1:
            raise UsageError(
                f"gpus is {gpus}, but this process was started alone; start the script with "
                f"torchrun --nproc-per-node {gpus} (triforce generate --gpus does so by itself)"
            )
        if place and gpus not in (1, place.size):
            raise UsageError(
                f"gpus is {gpus}, but torchrun started {place.size} ranks; leave it out or make them agree"
            )
        return place
