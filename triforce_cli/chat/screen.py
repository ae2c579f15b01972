"""Reads questions from a terminal, with several lines, history, completion, and a status line below."""

from __future__ import annotations

import asyncio
import signal
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import has_focus, is_searching
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style

from ..terminal.stopping import Signals
from .slash import COMMANDS

_CHECK_S = 0.2
"""Seconds between checks for a signal while a user types."""


class Screen:
    """The prompt for questions. The history is only kept in memory."""

    interactive = True

    def __init__(self, signals: Signals, contexts: Callable[[], Iterable[str]]) -> None:
        """Args:
        contexts: returns the names of saved contexts.
        """
        self._signals = signals
        self._session: PromptSession[str] = PromptSession(
            [("class:prompt", "> ")],
            multiline=True,
            prompt_continuation="  ",
            history=InMemoryHistory(),
            completer=_Commands(contexts),
            complete_while_typing=True,
            key_bindings=_keys(),
            style=Style.from_dict({"prompt": "bold", "bottom-toolbar": "noreverse"}),
            enable_suspend=True,
        )

    def next(self, status: str) -> str | None:
        """Reads a question, with `status` shown below; `None` at Ctrl-D. Ctrl-C clears the line.

        Raises:
            Stop: a signal came.
        """
        wakeup = signal.set_wakeup_fd(-1)  # asyncio takes it over and leaves none
        try:
            while True:
                with suppress(KeyboardInterrupt):
                    return self._session.prompt(
                        bottom_toolbar=[("class:bottom-toolbar", status)],
                        pre_run=lambda: get_app().create_background_task(self._watch()) and None,
                        handle_sigint=False,
                    )
                stop = self._signals.forget_stop()
                if stop and stop.exit_code != 128 + signal.SIGINT:
                    raise stop
        except EOFError:
            return None
        finally:
            signal.set_wakeup_fd(wakeup)

    async def _watch(self) -> None:
        """Ends the prompt after a signal came, because the signal's handler must not interrupt the loop."""
        while not self._signals.pending():
            await asyncio.sleep(_CHECK_S)
        with suppress(Exception):  # it has ended by itself
            get_app().exit(exception=KeyboardInterrupt())


@contextmanager
def while_answering(signals: Signals) -> Iterator[None]:
    """Within this context, the terminal does not show typed letters, which would appear in the middle of an answer. And
    at Ctrl-C, the system does not drop the text that the terminal has not taken yet. What was typed before Ctrl-C is
    dropped as usual, but here instead of in the system."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    wanted = list(before)
    wanted[3] = wanted[3] & ~termios.ECHO | termios.NOFLSH
    termios.tcsetattr(descriptor, termios.TCSADRAIN, wanted)

    def drop_typed() -> None:
        with suppress(termios.error):  # the terminal has gone
            termios.tcflush(descriptor, termios.TCIFLUSH)

    signals.on_ctrl_c = drop_typed
    try:
        yield
    finally:
        signals.on_ctrl_c = None
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class _Commands(Completer):
    """Completes commands, and names of contexts after `/save`."""

    def __init__(self, contexts: Callable[[], Iterable[str]]) -> None:
        self._contexts = contexts

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text = document.text
        if not text.startswith("/") or "\n" in text:
            return
        command, space, argument = document.text_before_cursor.partition(" ")
        if not space:
            found = [(f"/{name}", len(command)) for name in COMMANDS]
            start = command
        else:
            named = command[1:] in COMMANDS and COMMANDS[command[1:]].argument
            found = [(name, len(argument)) for name in self._contexts()] if named else []
            start = argument
        for word, typed in found:
            if word.startswith(start):
                yield Completion(word, -typed)


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter, or a backslash before Enter, begins a new line."""
    keys = KeyBindings()
    typing = has_focus("DEFAULT_BUFFER") & ~is_searching

    @keys.add("enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
