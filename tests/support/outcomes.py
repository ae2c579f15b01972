"""Runs what draws random numbers once for every outcome, with the probability of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

DRAWS = (
    "triforce.offload.generation.draw",
    "triforce.offload.speculation.acceptance.draw",
    "triforce.offload.speculation.tiers.draw",
)
"""Every name by which the engine draws a token from a distribution."""

Result = TypeVar("Result")


class Outcomes:
    """Takes the place of the engine's random numbers, and goes through all that may come of them, depth first.

    A draw from weights gives each token in turn, with its share of them. A uniform number `u` (what `torch.rand` gives)
    is known by what the acceptance rule asks of it, `u * offered < wanted`: true with the probability
    min(1, wanted / offered).
    """

    def __init__(self, least: float = 0.0) -> None:
        """Args:
        least: where a possibility makes the outcome less probable than this, only the likeliest of its choice is run.
        """
        self.least = least
        self.left_out = 0.0
        """The probability of all that was not run."""
        self._path: list[_Choice] = []
        self._at = 0
        self._probability = 1.0

    def of(self, run: Callable[[], Result]) -> Iterator[tuple[Result, float]]:
        """What `run` returns for each outcome of its choices, and the probability of that outcome."""
        while True:
            self._at, self._probability = 0, 1.0
            with ExitStack() as patches:
                for name in DRAWS:
                    patches.enter_context(patch(name, self._draw))
                patches.enter_context(patch("torch.rand", lambda count, **_: _Uniform(count, self)))
                result = run()
            yield result, self._probability
            while self._path and not self._advance(self._path[-1]):
                self._path.pop()
            if not self._path:
                return

    def choose(self, probabilities: list[float]) -> int:
        """One of so many possibilities: the one that this run takes."""
        if self._at == len(self._path):
            self._path.append(_Choice(probabilities, self._probability))
        choice = self._path[self._at]
        self._at += 1
        taken = choice.order[choice.current]
        self._probability = choice.before * choice.probabilities[taken]
        return taken

    def _advance(self, choice: _Choice) -> bool:
        """Goes on to the next possibility, if one is left that is probable enough."""
        choice.current += 1
        left = [choice.before * choice.probabilities[i] for i in choice.order[choice.current :]]
        if left and left[0] > self.least:
            return True
        self.left_out += sum(left)
        return False

    def _draw(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        rows = weights.double() / weights.double().sum(-1, keepdim=True)
        return torch.tensor([self.choose(row) for row in rows.tolist()])


class _Choice:
    def __init__(self, probabilities: list[float], before: float) -> None:
        """Args: `before`: the probability of all choices before this one."""
        self.probabilities, self.before = probabilities, before
        self.order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
        self.current = 0
        """The place in `order` of the possibility that is taken."""


class _Uniform:
    """`count` uniform numbers."""

    def __init__(self, count: int, outcomes: Outcomes) -> None:
        self.count, self.outcomes = count, outcomes

    def __mul__(self, offered: Tensor) -> _Scaled:
        assert offered.shape == (self.count,)
        return _Scaled(offered, self.outcomes)


class _Scaled:
    """Uniform numbers times `offered`."""

    def __init__(self, offered: Tensor, outcomes: Outcomes) -> None:
        self.offered, self.outcomes = offered, outcomes

    def __lt__(self, wanted: Tensor) -> Tensor:
        """Where they are less; after the first that is not, nobody looks, and nothing is chosen."""
        below: list[bool] = []
        for chance in (wanted.double() / self.offered.double()).clamp(max=1.0).tolist():
            below.append(all(below) and self.outcomes.choose([chance, 1.0 - chance]) == 0)
        return torch.tensor(below)
