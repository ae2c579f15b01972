"""Threads that make prompts from bodies: bodies are checked, put into the chat template, and encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ....tp.weights.tokenizer import Tokenizer
from ...session.wire import BodyError
from ..http_limits import ServerLimits
from .lane import Lane
from .time_limit import TimeLimit, TimeUp

T = TypeVar("T")


class Preparing:
    """Two threads, one for long texts and one for all others. So short texts do not wait for long texts."""

    def __init__(self, load: Callable[[], Tokenizer], most: int, limits: ServerLimits) -> None:
        """Args:
        load: makes a tokenizer. Each thread has its own, because some tokenizers cannot be used by two threads.
        most: maximum number of texts that wait for each thread.
        """
        self._load, self._limits = load, limits
        self._short, self._long = Lane("prompts", most), Lane("long prompts", most)
        self._rendering = TimeLimit(limits.render_s)
        self._tokenizers: dict[Lane, Tokenizer] = {}

    async def run(self, client: str, num_bytes: int, work: Callable[[Tokenizer], T]) -> T:
        """Runs `work` in a thread. If this call is cancelled before the work has begun, the work is not done.

        Args:
            num_bytes: size of the text.

        Raises:
            BodyError: too many texts wait, the server stops, or the chat template takes too long.
        """
        lane = self._long if num_bytes > self._limits.long_bytes else self._short
        return await lane.run(client, lambda: work(self._tokenizer_of(lane)))

    def close(self, why: BodyError) -> None:
        """Ends the threads, each after its present work. All calls that wait, even for this work, get the error
        `why`."""
        self._short.close(why)
        self._long.close(why)
        self._rendering.close()

    def _tokenizer_of(self, lane: Lane) -> Tokenizer:
        """The tokenizer of a thread. Only called in that thread."""
        if lane not in self._tokenizers:
            found = self._load()
            self._tokenizers[lane] = replace(found, render=self._limited(found.render) if found.render else None)
        return self._tokenizers[lane]

    def _limited(self, render: Callable[..., str]) -> Callable[..., str]:
        """Limits the time of a chat template for a text."""

        def limited(*messages: Any, **arguments: Any) -> str:
            try:
                return self._rendering.run(lambda: render(*messages, **arguments))
            except TimeUp:
                raise BodyError(
                    f"the model's chat template takes more than {self._limits.render_s:g} s for these messages; send "
                    "fewer or shorter ones",
                    "messages",
                    code="template_too_slow",
                ) from None

        return limited
