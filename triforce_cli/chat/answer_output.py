"""Shows an answer on stdout while it is written: its text or, on a terminal, its parts.

The conversation and the JSON do not depend on how an answer is shown.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ...tp.weights.tokenizer import Tokenizer
from ..session.answer_parts import PLAIN, AnswerParts, AnswerSyntax, Part
from ..session.session import Task
from ..session.text import AnswerText
from ..terminal.output import TextOutput


class AnswerOutput:
    """Shows one answer.

    A file or a pipe gets the text as the model wrote it. On a terminal, reasoning is dimmed, without the marks around
    it, and each call is a separate line.
    """

    def __init__(self, task: Task, syntax: AnswerSyntax, tokenizer: Tokenizer, eos_ids: Collection[int]) -> None:
        """Args:
        task: the engine's task that writes the answer.
        syntax: how the parts of the answer are found.
        eos_ids: the tokens that end the answer.
        """
        self._output = TextOutput(deferred=False)
        self._task, self._last = task, Part("content", "")
        self._in_parts = self._output.on_terminal and syntax != PLAIN
        self._text = AnswerText(tokenizer, replace(task.prompt, syntax=syntax), eos_ids)  # with marks that are tokens
        self._parts = AnswerParts(syntax)

    def write(self, piece: str) -> None:
        """Shows the text that a round has added.

        Raises:
            Stop: nobody reads stdout any more, or it cannot be written.
        """
        if not self._in_parts:
            self._output.write(piece)
        elif self._task.sequence:
            self._show(self._parts.add(self._text.update(self._task.sequence.statistics.token_ids)))

    def finish(self, piece: str, end: str) -> None:
        """Shows the rest, and `end` after it. Raises `Stop` as `write` does."""
        self.write(piece)
        if self._in_parts:
            self._show([*self._parts.add(self._text.finish()), *self._parts.finish()])
        self._output.write(end)
        self._output.close()

    def _show(self, parts: Sequence[Part]) -> None:
        for part in parts:
            last, self._last = self._last, part
            if part.call and part.call != last.call:
                self._output.end_line()
                self._output.write(f"call: {part.call.name} ")
            elif part.kind != last.kind:
                self._output.end_line()
                self._output.write("\n" if last.kind == "reasoning" else "")
            if part.kind == "reasoning":
                self._output.write_dim(part.text)
            else:
                self._output.write(part.text.replace("\n", " ") if part.call else part.text)
