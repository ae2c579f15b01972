"""The text of a conversation, as a model is given it: by its chat template, or as plain questions and answers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...offload.contexts.manifest import NO_FRAME, Frame
from ...tp.errors import TriforceError, UsageError
from ...tp.weights.tokenizer import Tokenizer

Exchange = tuple[str, str]
"""A question and its answer."""


class Form(Protocol):
    """How questions and answers become one text."""

    @property
    def mark(self) -> str:
        """What stands in the rendered text for the text that the conversation is about, if any."""
        ...

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that an answer ends before."""
        ...

    @property
    def begins_text(self) -> bool:
        """Whether the tokenizer has to add the tokens that begin a text (BOS): the form itself has none."""
        ...

    @property
    def frame(self) -> Frame:
        """Of a saved context that holds a conversation up to an answer's last token."""
        ...

    def render(self, exchanges: Sequence[Exchange], question: str) -> str:
        """All before the answer to `question`."""
        ...


@dataclass(frozen=True)
class Opening:
    """What a conversation begins with: the token ids of a text, and where they stand."""

    token_ids: list[int]
    frame: Frame
    gap: str
    """What parts the text from the first question."""
    name: str
    """In words, for people."""

    @classmethod
    def of(cls, token_ids: list[int], frame: Frame, tokenizer: Tokenizer, name: str) -> Opening:
        end = tokenizer.decode(token_ids[-16:])
        return cls(token_ids, frame, "\n" * (2 - min(2, len(end) - len(end.rstrip("\n")))), name)


@dataclass(frozen=True)
class TemplateForm:
    """Messages by the model's chat template. `mark` stands for the opening's text, in a message of the user or, where
    the opening is a conversation itself, in the last answer."""

    template: Callable[[Sequence[tuple[str, str]]], str]
    system: str | None = None
    mark: str = ""
    gap: str = ""
    answered: bool = False
    stops: tuple[str, ...] = ()
    begins_text: bool = False

    @property
    def frame(self) -> Frame:
        return Frame(system=self.system, answered=True)

    def render(self, exchanges: Sequence[Exchange], question: str) -> str:
        messages = [("system", self.system)] if self.system else []
        before = ""
        if self.answered:
            messages += [("user", "?"), ("assistant", self.mark)]
        elif self.mark:
            before = self.mark + self.gap
        for asked, answer in exchanges:
            messages += [("user", before + asked), ("assistant", answer)]
            before = ""
        return self.template([*messages, ("user", before + question)])


@dataclass(frozen=True)
class PlainForm:
    """Questions and answers as plain text, for a model without a chat template."""

    mark: str = ""
    gap: str = ""
    stops: tuple[str, ...] = ("\nQuestion:",)
    begins_text: bool = True
    frame: Frame = NO_FRAME

    def render(self, exchanges: Sequence[Exchange], question: str) -> str:
        before = self.mark + self.gap if self.mark else ""
        return before + "\n\n".join(
            [*(f"Question: {asked}\nAnswer:{answer}" for asked, answer in exchanges), f"Question: {question}\nAnswer:"]
        )


def form_of(tokenizer: Tokenizer, opening: Opening | None, system: str | None) -> Form:
    """The form for a model and what the conversation begins with. The chat template's, where there is one and the
    opening's text stands in it.

    Args: `system` is a message before the first question; that of an opening is its own.

    Raises:
        UsageError: a system message that has no place.
        TriforceError: the template leaves the text out.
    """
    mark = f"text-{secrets.token_hex(8)}" if opening else ""
    gap = opening.gap if opening else ""
    frame = opening.frame if opening else Frame(chat=True, system=system)
    if tokenizer.render is None or not (frame.chat or frame.answered):
        if system:
            raise UsageError("--system is given, but there is no chat template here; put it into the question")
        return PlainForm(mark, gap)
    form = TemplateForm(tokenizer.render, frame.system, mark, gap, frame.answered)
    if mark not in form.render([], "?"):
        raise TriforceError("the model's chat template leaves the text out; give the question inside the prompt")
    return form
