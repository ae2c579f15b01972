"""Runs a conversation: reads questions, has the engine answer them, and executes the commands between them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ...offload import Engine
from ...offload.batch.sequence import BatchSequence
from ...offload.contexts.home import user_store
from ...offload.contexts.model import ContextRequest
from ...tp.errors import CapacityError, PeerError, TriforceError, UsageError
from ..contexts import describe_all, show_list
from ..session.prompt import Prompt
from ..session.report import (
    NO_PROGRESS,
    StartProgress,
    report_context,
    report_statistics,
    start_progress,
    with_text,
)
from ..session.session import Session, Task, Written
from ..terminal.output import in_one_line
from ..terminal.stopping import Signals, Stop
from ..terminal.streams import print_note
from .answer_output import AnswerOutput
from .conversation import Conversation, NextTurn
from .options import ChatOptions
from .slash import COMMANDS, KEYS, parse

if TYPE_CHECKING:
    from rich.console import Console

_LONG = 512
"""From this number of new tokens of a prompt on, a bar shows the progress of the prefill."""


class Questions(Protocol):
    """A source of questions."""

    @property
    def interactive(self) -> bool:
        """Whether a user types them."""
        ...

    def next(self, status: str) -> str | None: ...


class Lines:
    """The lines of standard input."""

    interactive = False

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._number = 0

    def next(self, status: str) -> str | None:
        """The next line; `None` at the end.

        Raises:
            TriforceError: the line is not UTF-8.
            Stop: a signal came.
        """
        with self._signals.interruptible():
            line = sys.stdin.buffer.readline()
        self._number += 1
        try:
            return line.decode("utf-8-sig" if self._number == 1 else "utf-8") if line else None
        except UnicodeDecodeError as error:
            raise TriforceError(f"line {self._number:,} of standard input is not UTF-8, so it is left out") from error


class Talk:
    """Answers questions and executes commands, one after the other, on rank 0."""

    def __init__(
        self,
        engine: Engine,
        conversation: Conversation,
        options: ChatOptions,
        signals: Signals,
        console: Console,
        questions: Questions,
        *,
        silent: bool,
    ) -> None:
        """Args:
        console: on stderr.
        silent: whether stdout is not for answers.
        """
        self._engine, self._conversation = engine, conversation
        self._options, self._signals, self._console = options, signals, console
        self._questions, self._silent = questions, silent
        self._warned: set[str] = set()
        self._session: Session | None = None  # of what the engine did last
        self.failed = False
        """Whether a question could not be answered, or a command could not be executed."""

    def until_the_end(self) -> None:
        """Runs until there are no more questions.

        Raises:
            TriforceError: ranks were lost, or may still be in a prefill or a round that failed on this rank.
            Stop: a signal ends the conversation, or nobody reads the answers any more.
        """
        if self._questions.interactive:
            print_note("/help lists commands and keys; Ctrl-D leaves")
        while True:
            self._forget_interrupt()
            try:
                line = self._questions.next(self._status())
                if line is None or not self._obey(line.strip()):
                    return
            except PeerError:
                raise
            except TriforceError as error:
                if self._leaves_others_behind:
                    raise
                print_note(f"error: {error}")
                self.failed = True

    def _obey(self, line: str) -> bool:
        """Answers the question, or executes the command, in a line. Returns whether to continue."""
        command = parse(line)
        if command is None:
            if line:
                self._answer(lambda drop: self._conversation.ask(line, drop))
            return True
        name, argument = command
        if name == "quit":
            return False
        if name not in COMMANDS:
            raise UsageError(f"there is no command /{name}; there are: {', '.join(f'/{one}' for one in COMMANDS)}")
        takes_name = COMMANDS[name].argument
        if takes_name and not argument:
            raise UsageError(f"/{name} needs a name: /{name} NAME")
        if argument and not takes_name:
            raise UsageError(f"/{name} takes no argument, but {argument!r} is given")
        getattr(self, f"command_{name}")(*([argument] if takes_name else []))
        return True

    def command_help(self) -> None:
        for name, one in COMMANDS.items():
            print_note(f"/{name:<9} {one.what}")
        print_note(KEYS)

    def command_undo(self) -> None:
        print_note(f"took back: {in_one_line(self._conversation.undo().question)}")

    def command_retry(self) -> None:
        if self._options.sampling.greedy:
            print_note("the temperature is 0: the answer will be the same")
        self._answer(self._conversation.retry)

    def command_stats(self) -> None:
        turns = self._conversation.turns
        if not turns:
            raise UsageError("there is no answer yet")
        report_statistics(self._console, turns[-1].stats)

    def command_contexts(self) -> None:
        store = user_store()
        show_list(describe_all(store), store, self._console)

    def command_save(self, name: str) -> None:
        token_ids = self._conversation.token_ids
        if not self._conversation.turns:
            raise UsageError("there is nothing to save yet")
        contexts = ContextRequest(save=name, frame=self._conversation.frame, required=True)
        task = Task(Prompt(token_ids), contexts, writes=False)
        stop = self._do(task, len(token_ids))
        if not stop:
            print_note(f"saved {len(token_ids):,} tokens; go on with them: triforce chat --context '{name}'")
            return
        if not task.begun:
            print_note(f"the context {name} is saved only in part")
        self._raise_unless_ctrl_c(stop)

    def _answer(self, make: Callable[[int], NextTurn]) -> None:
        """Answers a question. If memory is short and turns may be dropped, the oldest are dropped.

        Args:
            make: `make(drop)` returns the question, without at least `drop` of the oldest turns.

        Raises:
            CapacityError: there is not enough room for the question.
            Stop: see `until_the_end`.
        """
        conversation, options = self._conversation, self._options
        asked, first = make(0), not conversation.turns
        while True:
            contexts = ContextRequest(name=options.context, find=first)
            sampling = replace(options.sampling, seed=asked.seed)
            task = Task(conversation.prompt(asked), contexts, sampling, conversation.max_new_tokens)
            output = None if self._silent else self._output(task, asked)
            try:
                stop = self._do(task, asked.new_tokens, asked, output)
                break
            except Exception as error:
                dropped, turns = len(asked.dropped), len(conversation.turns) - bool(asked.attempt)
                fits_less = isinstance(error, CapacityError) and not task.begun and conversation.trim
                if not fits_less or dropped >= turns or self._leaves_others_behind:
                    self._write_rest(task, output)
                    raise
                asked = make(dropped + 1)
        stop = self._write_rest(task, output) or stop
        self._keep(asked, task)
        if stop:
            self._raise_unless_ctrl_c(stop)

    def _do(
        self, task: Task, new_tokens: int, asked: NextTurn | None = None, output: AnswerOutput | None = None
    ) -> Stop | None:
        """Lets the engine do a task. Returns the `Stop` that interrupted it, if there was one.

        Args:
            new_tokens: how many tokens of its prompt are new.

        Raises:
            TriforceError: the task cannot be done.
            Stop: another signal interrupted it inside a round, in which other ranks still are.
        """
        session = self._session = Session(
            self._engine, self._conversation.tokenizer, in_slices=False, interrupted=self._signals.pending
        )
        events = session.do(task)

        def begin(_: Task, share: float) -> None:
            if asked and task.sequence:
                self._report(asked, task.sequence)
            session.on_read = lambda _, share: progress.prefill(share)
            progress.prefill(share)

        try:
            with self._with_progress(new_tokens) as progress:
                session.on_memory, session.on_read = progress.memory, begin
                event = next(events, None)
            with self._with_progress(0):
                while event is not None:
                    if isinstance(event, Written) and output:
                        output.write(event.piece)
                    event = next(events, None)
            self._signals.raise_pending()
        except Stop as stop:
            if self._leaves_others_behind:
                raise
            return stop
        finally:
            events.close()
            self._warn(session.warnings(task))
        return None

    @property
    def _leaves_others_behind(self) -> bool:
        """Whether the last prefill or round broke off, and there are other ranks. They may still be in it. Then they
        cannot take part in anything else."""
        return self._session is not None and self._session.broken and self._engine.target.ranks.size > 1

    def _output(self, task: Task, asked: NextTurn) -> AnswerOutput:
        conversation, eos_ids = self._conversation, self._engine.target.config.eos_token_ids
        return AnswerOutput(task, conversation.syntax(asked), conversation.tokenizer, eos_ids)

    def _report(self, asked: NextTurn, sequence: BatchSequence) -> None:
        """Reports what may surprise a user about a run."""
        if not self._conversation.turns:
            report_context(sequence)
        for turn in asked.dropped:
            print_note(f"dropped, to make room: {in_one_line(turn.question)}")
        if asked.rewritten:
            why = "turns were dropped" if asked.dropped else "the chat template changes earlier turns"
            print_note(f"{why}: {asked.new_tokens:,} tokens are prefilled again")

    def _write_rest(self, task: Task, output: AnswerOutput | None) -> Stop | None:
        """Writes the text of an answer that was held back. Returns the `Stop` that interrupted this, if there was
        one."""
        rest = task.finish_text()
        if output is None:
            return None
        try:
            output.finish(rest, "" if self._questions.interactive or not task.begun else "\n")
        except Stop as stop:
            return stop
        return None

    def _keep(self, asked: NextTurn, task: Task) -> None:
        """Adds the answer to the conversation, unless it is empty."""
        if not task.begun or task.sequence is None or self._session is None:
            print_note("no answer was written; the conversation is unchanged")
            return
        stats = task.sequence.document(self._session.lengths, [])
        stats |= {"finish_reason": task.finish_reason, "warnings": self._session.warnings(task)}
        self._conversation.add(asked, task.text, with_text(stats, task.text.text))

    def _warn(self, warnings: Sequence[str]) -> None:
        """Prints each warning once."""
        for warning in warnings:
            if warning not in self._warned:
                print_note(f"warning: {warning}")
            self._warned.add(warning)

    @contextmanager
    def _with_progress(self, new_tokens: int) -> Iterator[StartProgress]:
        """Hides typed letters in this context. If the prefill of the new tokens takes long, shows its progress."""
        progress = start_progress(self._console, new_tokens) if new_tokens >= _LONG else nullcontext(NO_PROGRESS)
        keys: Any = nullcontext()
        if self._questions.interactive:
            from .screen import while_answering

            keys = while_answering(self._signals)
        with keys, progress as shown:
            yield shown

    def _raise_unless_ctrl_c(self, stop: Stop) -> None:
        """Raises a `Stop` that ends the conversation. Ctrl-C at a terminal only ends an answer, and is forgotten."""
        if not self._questions.interactive or stop.exit_code != 128 + signal.SIGINT:
            raise stop
        self._signals.forget_stop()

    def _forget_interrupt(self) -> None:
        """Forgets a Ctrl-C between answers at a terminal. Any other signal ends the conversation."""
        stop = self._signals.forget_stop()
        if stop:
            self._raise_unless_ctrl_c(stop)

    def _status(self) -> str:
        """The last answer in one line."""
        conversation = self._conversation
        used = f"{len(conversation.token_ids):,} of {conversation.positions:,} tokens"
        if not conversation.turns:
            return used
        stats = conversation.turns[-1].stats
        share = stats["acceptance"]["retrieval_per_token"]
        accepted = f" · accepted {share:.0%}" if share is not None else ""
        return f"TBT {stats['tbt_ms']['mean']:.1f} ms{accepted} · {used}"
