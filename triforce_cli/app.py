"""The `triforce` command: the one place where errors become messages and exit codes.

It imports little at the top, so that Ctrl-C is answered properly from the first moment on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..tp.errors import TriforceError
from .stopping import Stop, stop_on_signals


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0 done, 1 failed, 2 wrong usage, 130 interrupted (143 by SIGTERM)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # A closed stream is None, and writing to it would fail, or go to the other one.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    with stop_on_signals():
        code = _run(arguments)
    sys.exit(_flushed(code))


def _run(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    try:
        from .commands import app

        result = app(args=arguments, prog_name="triforce", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except Stop as stop:
        if stop.message:
            _complain(stop.message)
        return stop.exit_code
    except TriforceError as error:
        if debug:
            _print_traceback()
        _complain(f"error: {error}")
        return error.exit_code
    except Exception as error:
        if type(error).__name__ == "Abort":  # what the parser makes of an interrupted question
            _complain("interrupted")
            return 130
        usage = _usage_message(error)
        if usage is not None:
            if usage:
                _complain(usage)
            return 2
        if debug:
            _print_traceback()
        _complain(f"error: {type(error).__name__}: {_one_line(error)}")
        if not debug:
            _complain("this is not an error that triforce expects; run again with --debug for the traceback")
        return 1


def _print_traceback() -> None:
    import traceback

    traceback.print_exc()


def _usage_message(error: Exception) -> str | None:
    """The message of an error of the option parser, `None` for any other."""
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""  # making this error has printed the help
    context = getattr(error, "ctx", None)
    message = format_message().replace("Value error, ", "")  # the parser's own words, of no use to anyone
    return f"error: {message}\nsee {context.command_path if context else 'triforce'} --help"


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "(no message)"


def _complain(message: str) -> None:
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:
        return  # stderr is gone; the exit code still tells


def _flushed(code: int) -> int:
    """Flushes stdout; a reader that went away is no error here, and the interpreter must not complain about it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as error:
        _complain(f"error: standard output cannot be written: {error}")
        return code or 1
    return code


if __name__ == "__main__":
    main()
