"""The `triforce` command: the one place where errors become messages and exit codes.

It imports little at the top, so that Ctrl-C is answered properly from the first moment on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from ..tp.errors import PeerError, TriforceError
from ..tp.parallel.launch import must_not_finalize, record
from ..tp.parallel.place import Place
from .call import Call
from .terminal.stopping import Signals, Stop
from .terminal.streams import abandon, print_note


def main() -> None:
    """The entry point of the process: runs its arguments, and exits with the code of `run`."""
    # A closed stream is None, and writing to it would fail, or go to the other one.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    signals = Signals()
    try:
        signals.install()
        code = run(sys.argv[1:], signals)
        signals.ignore()
    except Stop as stop:  # at the end, or while a message or the last of the output waits for its reader
        signals.ignore()
        abandon(sys.stdout)
        abandon(sys.stderr)
        code = stop.exit_code
    if must_not_finalize():
        # The interpreter would take apart what threads still use, or a group while other ranks are in it.
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str], signals: Signals | None = None) -> int:
    """Runs a command and returns its exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted (143 by SIGTERM, 129
    by SIGHUP).

    Args:
        signals: those of the process. Without them, the command handles signals itself, and restores the handlers
            afterwards.

    Raises:
        Stop: a signal came after everything was written.
    """
    if signals is None:
        with Signals() as signals:
            return run(arguments, signals)
    return _flushed(_run(list(arguments), signals))


def _run(arguments: list[str], signals: Signals) -> int:
    debug = "--debug" in arguments
    try:
        from .commands import app

        result = app(args=arguments, prog_name="triforce", standalone_mode=False, obj=Call(arguments, signals))
        return result if isinstance(result, int) else 0
    except SystemExit as exit_:  # how the parser ends the completion of a word in a shell
        return exit_.code if isinstance(exit_.code, int) else 0
    except Stop as stop:
        if stop.message:
            print_note(stop.message)
        return stop.exit_code
    except TriforceError as error:
        if debug:
            _print_traceback()
        if not _left_to_launcher(error):
            print_note(f"error: {error}")
        return error.exit_code
    except Exception as error:
        if type(error).__name__ == "Abort":  # how the parser reports that a question was interrupted
            print_note("interrupted")
            return 130
        usage = _usage_message(error)
        if usage is not None:
            if usage:
                print_note(usage)
            return 2
        if debug:
            _print_traceback()
        if _left_to_launcher(error):
            return 1
        print_note(f"error: {type(error).__name__}: {_one_line(error)}")
        if not debug:
            print_note("this is not an error that triforce expects; run again with --debug for the traceback")
        return 1


def _left_to_launcher(error: Exception) -> bool:
    """Whether the launcher reports `error`. The launcher knows the first error of all ranks, and only rank 0 prints."""
    try:
        place = Place.from_environment()
    except TriforceError:
        return False
    return place is not None and (place.rank > 0 or isinstance(error, PeerError)) and record(error)


def _print_traceback() -> None:
    import traceback

    traceback.print_exc()


def _usage_message(error: Exception) -> str | None:
    """The message of an error of the option parser; `None` for any other error."""
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""  # making this error has printed the help
    context = getattr(error, "ctx", None)
    message = format_message()
    return f"error: {message}\nsee {context.command_path if context else 'triforce'} --help"


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "(no message)"


def _flushed(code: int) -> int:
    """Flushes stdout. It is not an error if the reader has ended, and the interpreter must not report it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        abandon(sys.stdout)
    except (OSError, ValueError) as error:
        abandon(sys.stdout)
        print_note(f"error: standard output cannot be written: {error}")
        return code or 1
    return code


if __name__ == "__main__":
    main()
