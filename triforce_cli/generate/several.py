"""Several answers over one reading of a text, written together: `--ask` repeated, `--asks FILE`, `-n N`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, cast

import typer
from rich.console import Console

from ...offload import Batch, Engine, Request, Sampling
from ...offload.contexts.manifest import Frame
from ...offload.contexts.model import ContextRequest
from ...offload.speculation.vocabulary import check_pair
from ...tp.errors import TriforceError
from ...tp.model.config import ModelConfig
from ...tp.weights.tokenizer import TextStream, Tokenizer
from ..terminal.batch_frame import SequenceRow
from ..terminal.batch_live import BatchDisplay, row_of
from ..terminal.output import JsonFile, TextOutput
from ..terminal.stopping import Signals, Stop
from ..terminal.streams import Unfailing, tell
from .opening import opening
from .prompt import Prompt, Source, build_prompts, cut_log
from .questions import WantedAnswer
from .report import report_choices, report_context, start_progress
from .request import GenerateRequest
from .run import load_engine, same_terminal, step, with_text
from .several_report import report_several

SHOWN_CHARACTERS = 400
"""Of the end of an answer, at most, in the live display."""

COMPARED = 16
"""Tokens of two prompts by which one sees whether they begin with the same text."""

ROOM_OF_QUESTION = 128
"""Tokens kept free beside the built-in text, for a question and what a chat template puts around it."""


@dataclass
class Answer:
    """An answer, from its prompt to its text."""

    wanted: WantedAnswer
    prompt: Prompt | None
    text: TextStream
    error: str | None = None
    """Why it has failed, while others go on."""
    index: int = -1
    """Of its sequence in the batch."""
    ended: bool = False
    waits: bool = field(default=True, init=False)
    """Whether it has not been written yet."""

    def update(self, batch: Batch) -> None:
        """Takes over what the engine has done of it."""
        if self.prompt is None or self.ended:
            return
        sequence = batch.sequences[self.index]
        new = sequence.statistics.token_ids[self.text.num_tokens :]
        if new:
            self.text.push(new)
        self.error = sequence.error
        self.ended = sequence.state == "ended" or sequence.statistics.finish_reason != "interrupted"
        if self.ended:
            self.text.flush()

    def row(self, batch: Batch, max_new_tokens: int) -> SequenceRow:
        """Its line of the live display."""
        if self.prompt is None:
            return SequenceRow(self.wanted.name, "failed", note=self.error or "")
        sequence = batch.sequences[self.index]
        row = row_of(self.wanted.name, sequence, max_new_tokens, ended=self.ended)
        return replace(row, text=self.text.text[-SHOWN_CHARACTERS:])

    def document(self, stats: dict[str, Any]) -> dict[str, Any]:
        """Its part of the JSON. `stats` is the batch's."""
        asked: dict[str, Any] = {"ask": self.wanted.question, "number": self.wanted.number}
        if self.wanted.entry:
            asked |= {"entry": self.wanted.entry, "depth": self.wanted.depth}
        if self.error is not None:
            return asked | {"error": self.error}
        found = {name: value for name, value in stats["sequences"][self.index].items() if name != "error"}
        return {**asked, "finish_reason": "interrupted", **with_text(found, self.text.text)}


def run_several(
    request: GenerateRequest,
    wanted: Sequence[WantedAnswer] | None,
    source: Source,
    directories: tuple[Path, Path | None],
    json_file: JsonFile,
    signals: Signals,
) -> None:
    """Writes all answers, each when it and those before it are complete. `directories` are target and draft. Without
    `wanted`, they are those that belong to the built-in text.

    Raises:
        TriforceError: nothing could be answered; nothing was written.
        Stop: the run was interrupted, after its answers so far, its statistics and its JSON are out.
        typer.Exit: an answer failed alone.
    """
    console = Console(file=cast(IO[str], Unfailing(sys.stderr)), highlight=False)
    target, draft = directories
    config = check_pair(target, draft)
    tokenizer = Tokenizer.load(target).with_arguments(request.template_args or ())
    sampling = request.sampling
    with signals.allowed():
        if wanted is None:
            answers = _prepare_opening(request, source, tokenizer, config)
        else:
            answers = _prepare(request, wanted, source, tokenizer, target_config=config)
        asked = [answer for answer in answers if answer.prompt]
        longest = max((answer.prompt for answer in asked if answer.prompt), key=lambda prompt: len(prompt.token_ids))
        engine = load_engine(request, len(longest.token_ids) + request.max_new_tokens)
        report_choices(console, engine, request.model, source.name, longest, request.max_new_tokens, len(asked))
    if sampling.greedy and request.answers > 1:
        tell("the temperature is 0: all answers to a question will be the same")
    first = asked[0].prompt
    contexts = ContextRequest(
        name=request.context,
        find=not request.no_context,
        save=request.save_context,
        save_tokens=first.text_tokens if first else None,
        frame=Frame(chat=asked[0].wanted.question is not None and tokenizer.chat is not None),
    )
    run = _Several(request, engine, console, signals, answers, json_file)
    ended = run.write(sampling, contexts, len(longest.token_ids))
    if ended is not None:
        raise ended
    engine.finish()
    engine.close()
    if any(answer.error is not None for answer in answers):
        raise typer.Exit(1)


def _prepare(
    request: GenerateRequest,
    wanted: Sequence[WantedAnswer],
    source: Source,
    tokenizer: Tokenizer,
    *,
    target_config: ModelConfig,
) -> list[Answer]:
    """The answers with their prompts, or the reasons why they have none.

    Raises:
        TriforceError: none has one.
    """
    prompts = build_prompts(
        source,
        [one.question for one in wanted],
        tokenizer,
        target_config,
        request.max_new_tokens,
        request.truncate,
        apart=request.save_context is not None,
    )
    failures = [prompt for prompt in prompts if isinstance(prompt, TriforceError)]
    if len(failures) == len(prompts):
        raise failures[0]
    answers = []
    for one, prompt in zip(wanted, prompts, strict=True):
        text = TextStream(tokenizer.decode)
        if isinstance(prompt, Prompt):
            answers.append(Answer(one, prompt, text))
        else:
            answers.append(Answer(one, None, text, str(prompt), ended=True))
    return answers


def _prepare_opening(
    request: GenerateRequest, source: Source, tokenizer: Tokenizer, config: ModelConfig
) -> list[Answer]:
    """The answers that belong to the built-in text: to questions about it, and its continuation, unless a chat template
    puts something before the text, which would then be read twice.
    """
    assert source.log_seed is not None
    room = config.max_position_embeddings - request.max_new_tokens - ROOM_OF_QUESTION
    whole = replace(cut_log(source, tokenizer, room), log_seed=None)
    answers = _prepare(request, opening(whole.text, source.log_seed), whole, tokenizer, target_config=config)
    first, last = answers[0].prompt, answers[-1].prompt
    begins_alike = first and last and first.token_ids[:COMPARED] == last.token_ids[:COMPARED]
    return answers if begins_alike else answers[:-1]


class _Several:
    """The run itself: steps of the engine, and what they mean for screen and files."""

    def __init__(
        self,
        request: GenerateRequest,
        engine: Engine,
        console: Console,
        signals: Signals,
        answers: Sequence[Answer],
        json_file: JsonFile,
    ) -> None:
        self._request, self._engine, self._console, self._signals = request, engine, console, signals
        self._answers, self._json_file = answers, json_file
        self._asked = [answer for answer in answers if answer.prompt]
        for index, answer in enumerate(self._asked):
            answer.index = index
        self._live = request.live and BatchDisplay.possible(console)
        self._together = self._live and same_terminal(sys.stdout, sys.stderr)
        self._output = None if json_file.on_stdout else TextOutput(deferred=False)

    def write(self, sampling: Sampling, contexts: ContextRequest, longest: int) -> BaseException | None:
        """Runs to the end, or to what ends it, which is returned once all that there is has been written.

        Args: `longest` is the number of tokens of the longest prompt.
        """
        batch: Batch | None = None
        ended: BaseException | None = None
        try:
            with start_progress(self._console, longest) as progress:
                batch = self._engine.batch(
                    self._requests(sampling),
                    on_memory=progress.memory,
                    on_prefill=lambda index, share: progress.prefill(share) if index == 0 else None,
                    interrupted=self._signals.came,
                    contexts=contexts,
                )
                step(batch, self._signals)  # the first token is taken from the statistics, like all others
                report_context(batch.sequences[0])
            with self._display(batch) if self._live else nullcontext() as display:
                self._decode(batch, display)
        except (Stop, Exception) as error:
            if batch is None or not (any(s.statistics.token_ids for s in batch.sequences) or isinstance(error, Stop)):
                raise
            ended = error
        batch.close()
        return self._finish(batch, ended)

    def _requests(self, sampling: Sampling) -> list[Request]:
        request = self._request
        return [
            Request(answer.prompt.token_ids, sampling, request.max_new_tokens, request.ignore_eos, answer.wanted.number)
            for answer in self._asked
            if answer.prompt
        ]

    def _display(self, batch: Batch) -> BatchDisplay:
        device = self._engine.target.device.type
        title = f"triforce · {Path(self._request.model).name} · {len(self._answers)} answers · {device}"
        most = self._request.max_new_tokens
        return BatchDisplay(
            self._console, title, lambda: [answer.row(batch, most) for answer in self._answers], lambda: batch.lengths
        )

    def _decode(self, batch: Batch, display: BatchDisplay | None) -> None:
        for answer in self._asked:
            answer.update(batch)
        while True:
            if not self._together:
                self._write_complete(batch, headings=not self._live)
            if display:
                display.draw_if_due()
            event = step(batch, self._signals)
            if event is None:
                return
            self._asked[event[0]].update(batch)

    def _write_complete(self, batch: Batch, *, headings: bool = True, whole: bool = True) -> None:
        """Writes the answers whose turn it is, in the order asked: those that are whole, or as far as each came. Where
        there can be no headings, the messages of failed ones wait.

        Raises:
            Stop: nobody reads stdout any more, or it cannot be written.
        """
        for answer in self._answers:
            if not answer.waits:
                continue
            answer.update(batch)
            if whole and not answer.ended:
                return
            if answer.error is not None and not headings:
                continue
            answer.waits = False
            text = answer.text.text
            shown = answer.error is not None or (self._output and (text or answer.ended))
            if shown and headings:
                tell(f"--- {answer.wanted.name}")
            if answer.error is not None:
                tell(f"error: {answer.error}")
            elif shown and self._output:
                self._output.write(text if text.endswith("\n") else text + "\n")
                if headings:
                    _tell_entry(answer.wanted)

    def _finish(self, batch: Batch, ended: BaseException | None) -> BaseException | None:
        """Writes answers, JSON and statistics even if one of them fails; the first error or interrupt of the run."""
        for answer in self._asked:
            answer.update(batch)
            if not answer.ended:
                answer.text.flush()
        try:
            self._write_complete(batch, whole=False)
        except Stop as stop:
            ended = ended or stop
        stats = batch.stats()
        document = with_text(stats, "") | {"sequences": [answer.document(stats) for answer in self._answers]}
        try:
            self._json_file.write(document)
        except (TriforceError, Stop) as error:
            ended = ended or error
        if self._output is None or (self._live and not self._together):  # where no headings stood between the texts
            for answer in self._answers:
                if answer.wanted.entry:
                    tell(f"--- {answer.wanted.name}")
                    _tell_entry(answer.wanted)
        report_several(self._console, document, [answer.wanted.name for answer in self._answers])
        return ended


def _tell_entry(wanted: WantedAnswer) -> None:
    """Says what the text says about a question, where that is known."""
    if wanted.entry:
        tell(f"    the log, {wanted.depth:.0%} in, {wanted.entry}")
