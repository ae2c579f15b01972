"""One run of `triforce generate`: from checked options to answers, live display, statistics and JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ...offload import Engine
from ...offload.contexts.manifest import ContextError, Frame
from ...offload.contexts.model import ContextRequest
from ...offload.speculation.grammar import Grammar
from ...tp.errors import TriforceError
from ...tp.model.config import ModelConfig
from ...tp.weights.tokenizer import Tokenizer
from ..session.open import load_engine, open_pair, stderr_console
from ..session.prompt import Prompt, build_prompts
from ..session.report import (
    AS_PLAIN_TEXT,
    NO_TEMPLATE,
    StartProgress,
    report_choices,
    report_context,
    report_several,
    report_statistics,
    start_progress,
    with_text,
)
from ..session.session import Failed, Finished, Session, Task, Written
from ..session.source import Source, cut_log
from ..terminal.live import LiveDisplay
from ..terminal.live_picture import AnswerRow
from ..terminal.output import JsonFile, TextOutput, same_terminal
from ..terminal.stopping import Signals, Stop
from ..terminal.streams import print_note
from .options import GenerateOptions
from .question_list import WantedAnswer, log_questions

SHOWN_CHARACTERS = 400
"""Maximum number of characters of the end of an answer in a line of the live display."""

COMPARED = 16
"""The number of tokens that are compared to find out whether two prompts begin with the same text."""

ROOM_OF_QUESTION = 128
"""The number of tokens kept free besides the built-in text, for a question and the text that a chat template adds."""


@dataclass(eq=False)
class Answer:
    """A wanted answer, and its state."""

    wanted: WantedAnswer
    task: Task | None
    """`None` if there is no prompt for it."""
    error: BaseException | None = None
    """The error with which it has failed, while other answers continued."""
    complete: bool = False
    shown: bool = field(default=False, init=False)
    """Whether it has been written to stdout."""

    @property
    def ended(self) -> bool:
        return self.complete or self.error is not None

    @property
    def text(self) -> str:
        """The text so far."""
        return self.task.text.text if self.task and self.task.begun else ""

    def row(self, max_new_tokens: int) -> AnswerRow:
        """Its line of the live display."""
        name, text = self.wanted.name, self.text[-SHOWN_CHARACTERS:]
        if self.task is None or self.task.sequence is None:
            return AnswerRow(name, "failed" if self.error else "waiting", max_new_tokens, note=str(self.error or ""))
        return AnswerRow.of(name, self.task.sequence, max_new_tokens, ended=self.complete, text=text)


def run(
    options: GenerateOptions,
    wanted: Sequence[WantedAnswer] | None,
    source: Source,
    directories: tuple[Path, Path | None],
    json_file: JsonFile,
    signals: Signals,
    grammar: Grammar | None = None,
) -> None:
    """Writes all answers. A single answer is written as it grows. Of several answers, each is written when it and those
    before it are complete.

    Args:
        wanted: the answers; `None` for those that belong to the built-in text.
        directories: those of the target and the draft.
        grammar: the required form of the answers.

    Raises:
        TriforceError: the run is not possible; nothing was written.
        Stop: the run was interrupted; its text, its statistics and its JSON are written.
        typer.Exit: one of several answers failed.
    """
    console = stderr_console()
    config, tokenizer = open_pair(directories, options.template_args, options.settings.rope_scaling)
    with signals.interruptible():
        if wanted is None:
            answers = _log_answers(options, source, tokenizer, config)
        else:
            answers = _answers(options, wanted, source, tokenizer, config)
        for answer in answers:
            if answer.task:
                answer.task.grammar = grammar
        prompts = [answer.task.prompt for answer in answers if answer.task]
        longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
        engine = load_engine(options, len(longest.token_ids) + options.max_new_tokens)
        report_choices(console, engine, options.model, source.name, longest, options.max_new_tokens, len(prompts))
    if any(prompt.stops for prompt in prompts):
        print_note(f"the question is asked without a chat template: {AS_PLAIN_TEXT}")
    if options.template_args and not any(prompt.answers and not prompt.stops for prompt in prompts):
        print_note(NO_TEMPLATE)
    if options.sampling.greedy and options.answers > 1:
        print_note("the temperature is 0: all answers to a question will be the same")
    kind = _OneAnswer if wanted and len(wanted) == 1 else _SeveralAnswers
    kind(options, engine, tokenizer, console, signals, answers, json_file).write(len(longest.token_ids))
    engine.finish()
    engine.close()
    if any(answer.error for answer in answers):
        raise typer.Exit(1)


def _answers(
    options: GenerateOptions,
    wanted: Sequence[WantedAnswer],
    source: Source,
    tokenizer: Tokenizer,
    config: ModelConfig,
) -> list[Answer]:
    """The answers with their prompts, or the errors of those without a prompt. The first answer looks for a saved
    context, and saves the context, for all.

    Raises:
        TriforceError: no answer has a prompt.
    """
    asks = [one.question for one in wanted]
    prompts = build_prompts(source, asks, tokenizer, config, options.max_new_tokens, options.truncate)
    found = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
    if not found:
        raise next(prompt for prompt in prompts if isinstance(prompt, TriforceError))
    contexts = ContextRequest(
        name=options.context,
        find=not options.no_context,
        save=options.save_context,
        save_tokens=found[0].text_tokens,
        frame=Frame(chat=found[0].answers and tokenizer.render is not None),
    )
    answers = []
    for one, prompt in zip(wanted, prompts, strict=True):
        if isinstance(prompt, TriforceError):
            answers.append(Answer(one, None, prompt))
            continue
        limits = options.max_new_tokens, options.ignore_eos
        task = Task(prompt, contexts, options.sampling, *limits, draw=one.number)
        answers.append(Answer(one, task))
        contexts = ContextRequest()
    return answers


def _log_answers(options: GenerateOptions, source: Source, tokenizer: Tokenizer, config: ModelConfig) -> list[Answer]:
    """The answers that belong to the built-in text: to questions about it, and its continuation. The continuation is
    left out if a chat template puts something before the text, because the text would then have two prefills.
    """
    assert source.log_seed is not None
    room = config.max_position_embeddings - options.max_new_tokens - ROOM_OF_QUESTION
    whole = replace(cut_log(source, tokenizer, room), log_seed=None)
    answers = _answers(options, log_questions(whole.text, source.log_seed), whole, tokenizer, config)
    first, last = answers[0].task, answers[-1].task
    begins_alike = first and last and first.prompt.token_ids[:COMPARED] == last.prompt.token_ids[:COMPARED]
    return answers if begins_alike else answers[:-1]


class _Answers:
    """Has answers written by the engine, and writes them to the screen and to files."""

    others_go_on = True
    """Whether other answers continue if one fails."""

    def __init__(
        self,
        options: GenerateOptions,
        engine: Engine,
        tokenizer: Tokenizer,
        console: Console,
        signals: Signals,
        answers: Sequence[Answer],
        json_file: JsonFile,
    ) -> None:
        self.options, self.engine, self.console, self.signals = options, engine, console, signals
        self.answers, self.json_file = answers, json_file
        self.live = options.live and LiveDisplay.possible(console)
        self.on_one_terminal = self.live and same_terminal(sys.stdout, sys.stderr)
        self.answer_of = {answer.task: answer for answer in answers if answer.task}
        self.first = next(iter(self.answer_of))
        self.session = Session(engine, tokenizer, in_slices=False, interrupted=signals.pending)
        self._read_begun = False

    def write(self, tokens: int) -> None:
        """Runs until all answers are complete, or the run is interrupted or fails. In any case, the results so far are
        written.

        Args:
            tokens: the number of tokens of the longest prompt.

        Raises:
            TriforceError, Stop: see `run`.
        """
        waiting, ended = list(self.answer_of), None
        steps = self.session.events(lambda waits: waiting.pop(0) if waiting else None)
        events = filter(None, steps)
        try:
            with start_progress(self.console, tokens) as progress:
                self.session.on_memory = progress.memory
                self.session.on_read = lambda task, share: self._read(task, share, progress)
                event, failed = next(events, None), []
                while isinstance(event, Failed):
                    failed.append(event)
                    event = next(events, None)
            with self._display() if self.live and event else nullcontext() as display:
                for one in failed:
                    self._take(one, display)
                while event is not None:
                    self._take(event, display)
                    event = next(events, None)
            self.signals.raise_pending()
        except (Stop, Exception) as error:
            steps.close()
            if not (self.first.sequence and isinstance(error, Stop)) and not any(task.begun for task in self.answer_of):
                raise
            ended = error
        if (ended := self.finish(ended)) is not None:
            raise ended

    def output(self, event: Written | Finished | Failed) -> None:
        """Writes the new text to stdout."""
        raise NotImplementedError

    def finish(self, ended: BaseException | None) -> BaseException | None:
        """Writes the remaining text, the JSON and statistics, even if one of them fails. Returns the first error or
        interrupt."""
        raise NotImplementedError

    def _display(self) -> LiveDisplay:
        """The display that shows the answers while they are written."""
        options, target, single = self.options, self.engine.target, len(self.answers) == 1
        what = f"{len(self.first.prompt.token_ids):,} tokens read" if single else f"{len(self.answers)} answers"
        where = f"{target.device.type} {str(target.dtype).removeprefix('torch.')}"
        return LiveDisplay(
            self.console,
            f"triforce · {Path(options.model).name} · {what} · {where}",
            lambda: [answer.row(options.max_new_tokens) for answer in self.answers],
            lambda: self.session.lengths,
            single=single,
            device=target.device,
        )

    def _read(self, task: Task, share: float, progress: StartProgress) -> None:
        if task is not self.first:
            return
        if not self._read_begun and task.sequence:
            report_context(task.sequence)
        self._read_begun = True
        progress.prefill(share)

    def _take(self, event: Written | Finished | Failed, display: LiveDisplay | None) -> None:
        answer = self.answer_of[event.task]
        if isinstance(event, Failed):
            if not self.others_go_on or isinstance(event.error, ContextError):  # which all start from
                raise event.error
            answer.error = event.error
        answer.complete |= isinstance(event, Finished)
        self.output(event)
        if display and isinstance(event, Written):
            display.note(event.piece, event.round)
        elif display:
            display.draw_if_due()


class _OneAnswer(_Answers):
    """One answer, whose text is written as it grows."""

    others_go_on = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._output = None if self.json_file.on_stdout else TextOutput(deferred=self.on_one_terminal)

    def output(self, event: Written | Finished | Failed) -> None:
        if isinstance(event, Written) and self._output:
            self._output.write(event.piece)

    def finish(self, ended: BaseException | None) -> BaseException | None:
        task, session = self.first, self.session
        try:
            if self._output:
                self._output.write(task.finish_text())
                self._output.close()
        except Stop as stop:
            ended = ended or stop
        assert task.sequence
        stats = task.sequence.document(session.lengths, [])
        stats.pop("error", None)  # it is raised
        stats |= {"finish_reason": task.finish_reason, "warnings": session.warnings(task)}
        try:
            self.json_file.write(with_text(stats, task.text.text))
        except (TriforceError, Stop) as error:
            ended = ended or error
        report_statistics(self.console, stats)
        return ended


class _SeveralAnswers(_Answers):
    """Several answers, which are written in the order of the questions, each when it is complete."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._output = None if self.json_file.on_stdout else TextOutput(deferred=False)

    def output(self, event: Written | Finished | Failed) -> None:
        if not self.on_one_terminal:
            self._write_complete(headings=not self.live)

    def finish(self, ended: BaseException | None) -> BaseException | None:
        for task in self.answer_of:
            task.finish_text()
        try:
            self._write_complete(whole=False)
        except Stop as stop:
            ended = ended or stop
        sequences = [task.sequence for task in self.answer_of if task.sequence]
        assert self.session.run
        stats = with_text(self.session.run.document(sequences), "")
        document = stats | {"sequences": [self._document(answer) for answer in self.answers]}
        try:
            self.json_file.write(document)
        except (TriforceError, Stop) as error:
            ended = ended or error
        if self._output is None or (self.live and not self.on_one_terminal):  # no headings stood between the texts
            for answer in self.answers:
                if answer.wanted.entry:
                    print_note(f"--- {answer.wanted.name}")
                    _print_entry(answer.wanted)
        report_several(self.console, document, [answer.wanted.name for answer in self.answers])
        return ended

    def _document(self, answer: Answer) -> dict[str, Any]:
        """The part of the JSON for an answer."""
        wanted, task = answer.wanted, answer.task
        asked: dict[str, Any] = {"ask": wanted.question, "number": wanted.number}
        if wanted.entry:
            asked |= {"entry": wanted.entry, "depth": wanted.depth}
        if answer.error is not None:
            return asked | {"error": str(answer.error)}
        if task is None or task.sequence is None:
            return asked | {"finish_reason": "interrupted", "new_tokens": 0, "token_ids": [], "text": ""}
        found = task.sequence.document(self.session.lengths, [])
        found = {name: value for name, value in found.items() if name != "error"}
        found |= {"finish_reason": task.finish_reason}
        return {**asked, "finish_reason": task.finish_reason, **with_text(found, task.text.text)}

    def _write_complete(self, *, headings: bool = True, whole: bool = True) -> None:
        """Writes the next answers in the order of the questions: only complete ones, or also incomplete ones if not
        `whole`. Without headings, the messages of failed answers wait.

        Raises:
            Stop: nobody reads stdout any more, or it cannot be written.
        """
        for answer in self.answers:
            if answer.shown:
                continue
            if whole and not answer.ended:
                return
            if answer.error is not None and not headings:
                continue
            answer.shown, text = True, answer.text
            shown = answer.error is not None or (self._output and (text or answer.ended))
            if shown and headings:
                print_note(f"--- {answer.wanted.name}")
            if answer.error is not None:
                print_note(f"error: {answer.error}")
            elif shown and self._output:
                self._output.write(text if text.endswith("\n") else text + "\n")
                if headings:
                    _print_entry(answer.wanted)


def _print_entry(wanted: WantedAnswer) -> None:
    """Prints the entry of the text that answers a question, if it is known."""
    if wanted.entry:
        print_note(f"    the log, {wanted.depth:.0%} in, {wanted.entry}")
