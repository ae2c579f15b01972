"""Requests, and the orders that are made of them when they are checked."""

from __future__ import annotations

from array import array
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
    """The maximum number of tokens to generate, at least 1."""
    ignore_eos: bool = False
    """Whether to go on after an end-of-sequence token."""
    number: int = 0
    """The number of this sequence among sequences with the same seed. Different numbers give different texts."""
    top_logprobs: int | None = None
    """Asks for log probabilities of each token, and of this many of the likeliest tokens at its position. They are the
    target's own, before temperature and filters. `None`: no log probabilities."""
    grammar: Grammar | None = None
    """The required form of the answer."""
    contexts: ContextRequest | None = None
    """What to do with saved contexts. `None`: with `Engine.run`, start from the context that the engine was loaded
    with; in a batch, nothing. The first request of a batch that is not refused uses the argument `contexts` of
    `Engine.batch` instead. With `save`,
    the sequence shares no keys and values with other sequences: its prompt is read for it alone."""
    stops: Callable[[list[int]], bool] | None = None
    """Called on rank 0 with the new tokens of each round. `True` ends the answer with these tokens."""
    tag: Any = None
    """Any value by which the caller recognises the sequence."""


@dataclass(frozen=True)
class Order:
    """A checked request. All ranks follow rank 0's orders."""

    prompt: array[int]
    sampling: Sampling
    max_new_tokens: int
    ignore_eos: bool
    number: int
    top_logprobs: int | None = None
    grammar: Grammar | None = None
    contexts: ContextPlan = field(default_factory=ContextPlan)
    error: TriforceError | None = None
    """Why the request cannot be answered; `None` if it can."""

    @classmethod
    def of(cls, request: Request, config: ModelConfig) -> Order:
        """Checks a request.

        Raises:
            UsageError: the prompt is empty or has a token outside the vocabulary; `max_new_tokens` is below 1;
                `top_logprobs` is out of range; the grammar cannot be followed, or `ignore_eos` is set beside it.
            CapacityError: prompt and answer have more tokens than the model has positions.
        """
        top = request.top_logprobs
        if top is not None and not 0 <= top <= config.vocab_size:
            raise UsageError(f"top_logprobs is {top}; it must be from 0 to {config.vocab_size:,}, the vocabulary size")
        prompt = checked_prompt(request.prompt_ids, config, request.max_new_tokens)
        sampling = request.sampling or Sampling()
        if request.grammar:
            if request.ignore_eos:
                raise UsageError(
                    "ignore_eos cannot be used with a grammar: the answer ends where the grammar ends; leave one out"
                )
            request.grammar.check()
        options = request.ignore_eos, request.number, request.top_logprobs, request.grammar
        return cls(prompt, sampling, request.max_new_tokens, *options)

    @classmethod
    def or_error(cls, request: Request, config: ModelConfig, saved: ModelContexts | None = None) -> Order:
        """Like `of`, but an error becomes the order's `error`. Plans the use of the contexts in `saved`, if the request
        has `contexts`."""
        try:
            order, wanted = cls.of(request, config), request.contexts
            if wanted and saved:
                return replace(order, contexts=saved.plan(order.prompt, wanted, reusable(order.prompt)))
            return order
        except TriforceError as error:
            return cls.refused(request.number, error)

    @classmethod
    def refused(cls, number: int, error: TriforceError) -> Order:
        """The order of a request that cannot be answered."""
        return cls(array("i"), Sampling(0.0), 1, False, number, error=error)


@dataclass(frozen=True)
class RunOrder:
    """The order for a run. All ranks follow rank 0's."""

    orders: list[Order]
    """The orders that are known at the start."""
    alone: bool
    """Whether the run has one sequence, which no others may join."""
    fresh_seed: int
    """The seed of the generator for sequences without a seed of their own."""
    tiers: int
    reuse: int | None
    """The maximum number of leading tokens that the first sequence takes over; see `Engine.stream`."""
    most: int
    """The maximum number of sequences that are decoded together."""
    expected: int = 1
    """The minimum number of sequences for which memory is planned at the start."""
    in_slices: bool = False
    """Whether a prompt is read in slices, with rounds of other sequences between them."""
