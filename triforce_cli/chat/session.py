"""A conversation under way: questions are answered and commands obeyed, one after the other."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ...offload import Engine, Generation, Sampling
from ...offload.contexts.home import user_store
from ...offload.contexts.model import ContextRequest
from ...tp.errors import CapacityError, PeerError, TriforceError, UsageError
from ..contexts import describe_all, show_list
from ..generate.report import NO_PROGRESS, StartProgress, report_context, report_statistics, start_progress
from ..generate.run import step, with_text
from ..terminal.output import TextOutput, in_one_line
from ..terminal.stopping import Signals, Stop
from ..terminal.streams import tell
from .conversation import Conversation, NextTurn
from .reply import Reply
from .request import ChatRequest
from .slash import COMMANDS, KEYS, parse

if TYPE_CHECKING:
    from rich.console import Console

_LONG = 512
"""New tokens of a prompt from which on a bar shows how they are read."""


class Questions(Protocol):
    """Where questions are from."""

    @property
    def interactive(self) -> bool:
        """Whether somebody types them."""
        ...

    def next(self, status: str) -> str | None: ...


class Session:
    """Talks: rank 0 does, where there are several."""

    def __init__(
        self,
        engine: Engine,
        conversation: Conversation,
        request: ChatRequest,
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
        self._request, self._signals, self._console = request, signals, console
        self._questions, self._silent = questions, silent
        self._warned: set[str] = set()
        self.failed = False
        """Whether a question could not be answered, or a command not be obeyed."""

    def talk(self) -> None:
        """Until the questions end.

        Raises:
            TriforceError: ranks were lost.
            Stop: a signal ends it, or nobody reads the answers any more.
        """
        if self._questions.interactive:
            tell("/help lists commands and keys; Ctrl-D leaves")
        while True:
            self._forget_interrupt()
            try:
                line = self._questions.next(self._status())
                if line is None or not self._obey(line.strip()):
                    return
            except PeerError:
                raise
            except TriforceError as error:
                tell(f"error: {error}")
                self.failed = True

    def _obey(self, line: str) -> bool:
        """Answers or does what a line says; returns whether to go on."""
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
        if argument and name != "save":
            raise UsageError(f"/{name} takes nothing after it, but {argument!r} is there")
        getattr(self, f"_{name}")(*([argument] if name == "save" else []))
        return True

    def _help(self) -> None:
        for name, what in COMMANDS.items():
            tell(f"/{name:<9} {what}")
        tell(KEYS)

    def _undo(self) -> None:
        tell(f"took back: {in_one_line(self._conversation.undo().question)}")

    def _retry(self) -> None:
        if self._request.sampling.greedy:
            tell("the temperature is 0: the answer will be the same")
        self._answer(self._conversation.retry)

    def _stats(self) -> None:
        turns = self._conversation.turns
        if not turns:
            raise UsageError("there is no answer yet")
        report_statistics(self._console, turns[-1].stats)

    def _contexts(self) -> None:
        store = user_store()
        show_list(describe_all(store), store, self._console)

    def _save(self, name: str) -> None:
        if not name:
            raise UsageError("/save needs a name: /save NAME")
        token_ids = self._conversation.token_ids
        if not self._conversation.turns:
            raise UsageError("there is nothing to save yet")
        saved = ContextRequest(save=name, frame=self._conversation.frame, required=True)
        with self._interruptible(len(token_ids)) as progress:
            generation = self._engine.stream(
                token_ids, Sampling(0.0), 1, tiers=1, on_memory=progress.memory, on_prefill=progress.prefill,
                interrupted=self._signals.came, contexts=saved,
            )  # fmt: skip
            try:
                while step(generation, self._signals) is not None:
                    pass
            except Stop as stop:
                self._end(generation, stop)
                if not generation.statistics.token_ids:
                    tell(f"the context {name} is not saved whole")
                self._pass_on(stop)
                return
        self._warn(generation)
        tell(f"saved {len(token_ids):,} tokens; go on with them: triforce chat --context '{name}'")

    def _answer(self, make: Callable[[int], NextTurn]) -> None:
        """Answers a question; `make(drop)` gives it, without at least so many of the oldest turns.

        Raises:
            CapacityError: there is not enough room for it.
            Stop: see `talk`.
        """
        asked = make(0)
        with self._interruptible(asked.new_tokens) as progress:
            asked, generation = self._start(asked, make, progress)
            reply = self._conversation.reply(asked, self._engine.target.config.eos_token_ids)
            output = None if self._silent else TextOutput(deferred=False)
            stop: Stop | None = None
            try:
                event = step(generation, self._signals)
            except Stop as raised:
                stop, event = raised, None
        with self._interruptible(0):
            try:
                while event is not None:
                    piece = reply.update(generation.statistics.token_ids)
                    if output:
                        output.write(piece)
                    if reply.stopped:
                        break
                    event = step(generation, self._signals)
            except Stop as raised:
                stop = raised
            self._end(generation, stop)
        stop = self._write_rest(reply, output, bool(generation.statistics.token_ids)) or stop
        self._keep(asked, reply, generation)
        if stop:
            self._pass_on(stop)

    def _start(
        self, asked: NextTurn, make: Callable[[int], NextTurn], progress: StartProgress
    ) -> tuple[NextTurn, Generation]:
        """A question and its run. Where memory is short and turns may be dropped, the oldest are.

        Raises:
            CapacityError: there is not enough.
        """
        conversation, request = self._conversation, self._request
        first = not conversation.turns
        while True:
            try:
                generation = self._engine.stream(
                    asked.token_ids,
                    replace(request.sampling, seed=asked.seed),
                    conversation.max_new_tokens,
                    on_memory=progress.memory,
                    on_prefill=progress.prefill,
                    interrupted=self._signals.came,
                    contexts=ContextRequest(name=request.context, find=first),
                )
            except CapacityError:
                dropped = len(asked.dropped)
                if not conversation.trim or dropped >= len(conversation.turns) - bool(asked.attempt):
                    raise
                asked = make(dropped + 1)
                continue
            self._report(asked, generation)
            return asked, generation

    def _report(self, asked: NextTurn, generation: Generation) -> None:
        """What a run does that may surprise."""
        if not self._conversation.turns:
            report_context(generation)
        for turn in asked.dropped:
            tell(f"dropped, to make room: {in_one_line(turn.question)}")
        if asked.rewritten:
            why = "turns were dropped" if asked.dropped else "the chat template changes what was said before"
            tell(f"{why}: {asked.new_tokens:,} tokens are read again")

    def _write_rest(self, reply: Reply, output: TextOutput | None, any_text: bool) -> Stop | None:
        """Writes what was held back of an answer; what stopped that, if anything."""
        rest = reply.finish()
        if output is None:
            return None
        try:
            output.write(rest if self._questions.interactive or not any_text else rest + "\n")
            output.close()
        except Stop as stop:
            return stop
        return None

    def _keep(self, asked: NextTurn, reply: Reply, generation: Generation) -> None:
        """Takes the answer into the conversation, if there is any of it."""
        stats = generation.stats()
        self._warn(generation)
        if not stats["token_ids"]:
            tell("nothing was written; the conversation is as it was before")
            return
        if reply.stopped:
            stats["finish_reason"] = "stop"
        self._conversation.add(asked, reply, with_text(stats, reply.answer))

    def _warn(self, generation: Generation) -> None:
        """Says each warning once."""
        for warning in generation.warnings:
            if warning not in self._warned:
                tell(f"warning: {warning}")
            self._warned.add(warning)

    @contextmanager
    def _interruptible(self, new_tokens: int) -> Iterator[StartProgress]:
        """A block with steps of a run, of which the first reads so many tokens."""
        progress = start_progress(self._console, new_tokens) if new_tokens >= _LONG else nullcontext(NO_PROGRESS)
        keys: Any = nullcontext()
        if self._questions.interactive:
            from .screen import while_answering

            keys = while_answering()
        with keys, progress as shown:
            yield shown

    def _end(self, generation: Generation, stop: Stop | None) -> None:
        """Ends a run on all ranks.

        Raises:
            Stop: another signal broke it off within a round, where other ranks still are.
        """
        if stop and generation.batch.run.broken and self._engine.target.ranks.size > 1:
            raise stop
        generation.end()
        if self._engine.target.ranks.size > 1:
            for _ in generation:
                pass

    def _pass_on(self, stop: Stop) -> None:
        """Raises what ends more than an answer."""
        if not self._questions.interactive or stop.exit_code != 128 + signal.SIGINT:
            raise stop
        self._signals.take()

    def _forget_interrupt(self) -> None:
        """Ctrl-C between answers means nothing at a terminal; any other signal ends the conversation."""
        stop = self._signals.take()
        if stop:
            self._pass_on(stop)

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
