"""What a sequence of a batch is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...tp.errors import TriforceError
from ...tp.model.config import ModelConfig
from ..checks import checked_prompt
from ..contexts.model import ContextPlan
from ..speculation.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """A prompt, and how to answer it."""

    prompt_ids: Sequence[int] | Tensor
    """Token ids, a list or a 1-D tensor, at least one."""
    sampling: Sampling | None = None
    """Default `Sampling()`."""
    max_new_tokens: int = 256
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    number: int = 0
    """Of sequences that are drawn with one seed: which one it is. Each has a text of its own."""


@dataclass(frozen=True)
class Order:
    """A request that was checked; all ranks follow rank 0's."""

    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    ignore_eos: bool
    number: int
    error: str | None = None
    """Why it cannot be answered."""

    @classmethod
    def of(cls, request: Request, config: ModelConfig) -> Order:
        """Raises:
        UsageError: no token, one outside the vocabulary, an impossible length.
        CapacityError: more tokens than the model's positions.
        """
        prompt = checked_prompt(request.prompt_ids, config, request.max_new_tokens)
        sampling = request.sampling or Sampling()
        return cls(prompt, sampling, request.max_new_tokens, request.ignore_eos, request.number)

    @classmethod
    def or_error(cls, request: Request, config: ModelConfig) -> Order:
        """The same, with the error in it."""
        try:
            return cls.of(request, config)
        except TriforceError as error:
            return cls([], Sampling(0.0), 1, False, request.number, str(error))


@dataclass(frozen=True)
class BatchOrder:
    """What a batch is asked for; all ranks do rank 0's."""

    orders: list[Order]
    alone: bool
    """Whether it is a run of one sequence, not a batch that others may join."""
    fresh_seed: int
    """Starts the generator of sequences without a seed."""
    tiers: int
    reuse: int | None
    contexts: ContextPlan
    most: int
    """Sequences that are decoded together at most."""
