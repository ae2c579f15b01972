"""Requests that are answered: each with its answers as they grow, and what they become when they are complete."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..requests.answer_text import AnswerText
from ..requests.prompts import RequestPrompt
from ..requests.response import FinishedAnswer, Timings
from ..session.wire import AnswerRequest
from ..terminal.batch_frame import SequenceRow
from ..terminal.batch_live import ShownSequence, row_of
from .lines import RequestLine


@dataclass(eq=False)
class Job:
    """A request that is to be answered."""

    line: RequestLine
    request: AnswerRequest
    prompt: RequestPrompt | None = None
    """Once it is its turn."""
    finished: dict[int, FinishedAnswer] = field(default_factory=dict)
    """Its complete answers, by their numbers."""
    failed: bool = False

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.request.answers


@dataclass(eq=False)
class Writing:
    """One of the answers to a request, while it is written."""

    job: Job
    number: int
    text: AnswerText

    @property
    def name(self) -> str:
        """In words."""
        count = self.job.request.answers
        return f"{self.job.line.custom_id}" + (f" (answer {self.number + 1} of {count})" if count > 1 else "")

    def take(self, tokens: list[int]) -> bool:
        """Takes the tokens of a round; whether the answer ends with them."""
        self.text.add(tokens)
        return self.text.stopped

    def update(self, sequence: ShownSequence) -> FinishedAnswer | None:
        """Takes over what the engine has done of it: the answer, if it is complete."""
        s = sequence.statistics
        self.text.update(s.token_ids)
        if s.finish_reason == "interrupted" and not self.text.stopped:
            return None
        return self.finish(sequence)

    def finish(self, sequence: ShownSequence) -> FinishedAnswer:
        """The answer as far as it came."""
        self.text.finish()
        reason = "stop" if self.text.stopped else sequence.statistics.finish_reason
        logprobs = None if self.job.request.top_logprobs is None else self.text.described(sequence.logprobs)
        timings = Timings.of(sequence.statistics)
        return FinishedAnswer(reason, self.text.num_tokens, timings, self.text.text, logprobs)

    def row(self, sequence: ShownSequence | None) -> SequenceRow:
        """Its line of the live display."""
        most = self.job.request.max_new_tokens
        if sequence is None:
            return SequenceRow(self.name, "waiting", max_new_tokens=most)
        return row_of(self.name, sequence, most, ended=False)
