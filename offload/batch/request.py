"""What a sequence of a batch is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ...tp.errors import TriforceError, UsageError
from ...tp.model.config import ModelConfig
from ..checks import checked_prompt
from ..contexts.model import ContextPlan, ContextRequest, ModelContexts
from ..speculation.grammar import Grammar
from ..speculation.sampling import Sampling
from .kept import reusable


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
    top_logprobs: int | None = None
    """Whether the target's own probabilities are wanted of each token, before temperature and filters, and of how many
    of the likeliest ones besides; `None` for none."""
    grammar: Grammar | None = None
    """The form that the answer is to have."""
    contexts: ContextRequest | None = None
    """What to do with saved contexts; `None`: in a run what the engine was loaded for, in a batch nothing. The first
    request of a batch that is not refused has the batch's. A `save` needs all of the prompt to be read for it alone."""
    stops: Callable[[list[int]], bool] | None = None
    """Called on rank 0 with the new tokens of each round; whether the answer ends with them."""
    tag: Any = None
    """Whatever the caller tells its sequence by."""


@dataclass(frozen=True)
class Order:
    """A request that was checked; all ranks follow rank 0's."""

    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    ignore_eos: bool
    number: int
    top_logprobs: int | None = None
    grammar: Grammar | None = None
    contexts: ContextPlan = field(default_factory=ContextPlan)
    error: TriforceError | None = None
    """Why it cannot be answered."""

    @classmethod
    def of(cls, request: Request, config: ModelConfig) -> Order:
        """Raises:
        UsageError: no token, one outside the vocabulary, an impossible length; a grammar that cannot be followed.
        CapacityError: more tokens than the model's positions.
        """
        top = request.top_logprobs
        if top is not None and not 0 <= top <= config.vocab_size:
            raise UsageError(f"top_logprobs is {top}; it must be from 0 to the {config.vocab_size:,} of the vocabulary")
        prompt = checked_prompt(request.prompt_ids, config, request.max_new_tokens)
        sampling = request.sampling or Sampling()
        if request.grammar:
            if request.ignore_eos:
                raise UsageError(
                    "an answer with a grammar ends where that does, so ignore_eos cannot be given beside it"
                )
            request.grammar.check()
        options = request.ignore_eos, request.number, request.top_logprobs, request.grammar
        return cls(prompt, sampling, request.max_new_tokens, *options)

    @classmethod
    def or_error(cls, request: Request, config: ModelConfig, saved: ModelContexts | None = None) -> Order:
        """The same, with the error in it, and what it does with contexts that are `saved`."""
        try:
            order, wanted = cls.of(request, config), request.contexts
            if wanted and saved:
                return replace(order, contexts=saved.plan(order.prompt, wanted, reusable(order.prompt)))
            return order
        except TriforceError as error:
            return cls.refused(request.number, error)

    @classmethod
    def refused(cls, number: int, error: TriforceError) -> Order:
        """One that cannot be answered."""
        return cls([], Sampling(0.0), 1, False, number, error=error)


@dataclass(frozen=True)
class RunOrder:
    """What a run is asked for; all ranks do rank 0's."""

    orders: list[Order]
    """Those that are known at the start."""
    alone: bool
    """Whether it is a run of one sequence that no others may join."""
    fresh_seed: int
    """Starts the generator of sequences without a seed."""
    tiers: int
    reuse: int | None
    most: int
    """Sequences that are decoded together at most."""
    expected: int = 1
    """Sequences that memory is planned for at the start at least."""
    in_slices: bool = False
    """Whether rounds of others come between the slices of a prompt that is read."""
