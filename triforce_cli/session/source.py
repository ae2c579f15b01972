"""The texts for a command: from a file, a pipe, an option or a saved context, or the built-in text."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...tp.errors import TriforceError, UsageError
from ..logbook import LogBook

if TYPE_CHECKING:
    from ...tp.weights.tokenizer import Tokenizer

BUILT_IN_TOKENS = 12_000
"""The length of the built-in prompt. It is long enough to show the effect, and its prefill takes seconds on two
cores."""

BUILT_IN_WORDS = 105_000
"""The length in words of the log from which the built-in prompt is taken; `bench` and `compare` use more of it. These
are more than 131,072 tokens of the embedded pair."""

LOG_SEEDS = 1_000_000
"""Logs with smaller seeds were not in the training data of the embedded pair."""


@dataclass(frozen=True)
class Source:
    """A text, and a description of its origin. The built-in text is cut to its length when its tokens are known."""

    text: str
    name: str
    log_seed: int | None = None
    """The seed of the built-in text, a harbour's log."""
    context: str | None = None
    """The name of the saved context that is used in place of `text`."""


def read_source(
    prompt_file: Path | None,
    prompt: str | None,
    note: Callable[[str], None],
    context: str | None = None,
    log_seed: int | None = 0,
) -> Source:
    """The text that the options ask for. Without options, it is the log of `log_seed`, or of a random seed.

    Args:
        note: prints a note on stderr.

    Raises:
        UsageError: two of the options are given.
        TriforceError: the text cannot be read, or is empty or not text.
    """
    if context is not None:
        for option, given in (("--prompt-file", prompt_file), ("--prompt", prompt)):
            if given is not None:
                raise UsageError(f"--context and {option} are both given, but the saved context is the text; give one")
        return Source("", f"the context {context}", context=context)
    if prompt_file is not None and prompt is not None:
        raise UsageError("--prompt-file and --prompt are both given; give one of them")
    if prompt is not None:
        return Source(checked(read_option("--prompt", prompt, note), "--prompt"), "")
    if prompt_file is None:
        seed = secrets.randbelow(LOG_SEEDS) if log_seed is None else log_seed % LOG_SEEDS
        return Source(LogBook(seed).write(BUILT_IN_WORDS), f"the built-in log book {seed}", log_seed=seed)
    return read_file(prompt_file, "--prompt-file", note)


def read_file(path: Path, option: str, note: Callable[[str], None]) -> Source:
    """The text of a file, or of standard input for `-`. `option` is the option that gave its name.

    Raises:
        TriforceError: the file cannot be read, or is empty or not text.
    """
    if str(path) == "-":
        if sys.stdin is None or sys.stdin.closed:
            raise TriforceError(f"{option} is -, but there is no standard input")
        if sys.stdin.isatty():
            note(f"reading {option} from this terminal; end it with Ctrl-D on a line of its own")
        return Source(checked(decoded(sys.stdin.buffer.read(), "standard input", note), "standard input"), "stdin")
    return Source(checked(decoded(read_bytes(path, option), str(path), note), str(path)), path.name)


def read_option(option: str, value: str, note: Callable[[str], None]) -> str:
    """The text given with `option`.

    Raises:
        TriforceError: its bytes are not UTF-8 (Python passes them on as lone surrogates).
    """
    return decoded(value.encode("utf-8", "surrogateescape"), option, note)


def read_ask(ask: str | None, note: Callable[[str], None]) -> str | None:
    """The question given with `--ask`, if there is one.

    Raises:
        UsageError: the question is empty.
        TriforceError: as for `read_option`.
    """
    if ask is None:
        return None
    if not ask.strip():
        raise UsageError("--ask is empty; give a question or an instruction")
    return read_option("--ask", ask, note)


def read_bytes(path: Path, option: str) -> bytes:
    """The bytes of a file. `option` is the option that gave its name.

    Raises:
        TriforceError: the file cannot be read.
    """
    try:
        return path.expanduser().read_bytes()
    except FileNotFoundError as error:
        raise TriforceError(f"{option} {path} does not exist; give a text file, or - for stdin") from error
    except IsADirectoryError as error:
        raise TriforceError(f"{option} {path} is a directory; give a text file in it") from error
    except OSError as error:
        raise TriforceError(f"{option} {path} cannot be read: {error.strerror or error}") from error


def decoded(raw: bytes, name: str, note: Callable[[str], None]) -> str:
    """Decodes `raw` like a text file: without a byte-order mark, and with `\\n` as line ends."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = error.start + (3 if raw.startswith(b"\xef\xbb\xbf") else 0)
        raise TriforceError(
            f"{name} is not UTF-8: byte {raw[at]:#04x} at offset {at:,}; convert it (iconv -f latin1 -t utf-8) "
            "or give another file"
        ) from error
    if "\r\n" in text:
        note(f"{name}: line ends CR LF are read as LF")
        text = text.replace("\r\n", "\n")
    return text


def checked(text: str, name: str) -> str:
    """Returns `text` if it is valid.

    Raises:
        TriforceError: it is empty, or not text.
    """
    if "\0" in text:
        raise TriforceError(
            f"{name} is not text: it has a NUL byte at offset {len(text[: text.index(chr(0))].encode()):,}; "
            "give a plain text file"
        )
    if not text.strip():
        raise TriforceError(f"{name} is empty{' but for white space' if text else ''}; give a text")
    return text


def cut_log(source: Source, tokenizer: Tokenizer, limit: int) -> Source:
    """The days of the built-in log that fit within its length, and within `limit` tokens."""
    most = max(1, min(BUILT_IN_TOKENS, limit))
    fitting = tokenizer.decode(tokenizer.encode(source.text[: 8 * most], False)[:most])
    text = source.text[: len(fitting)]
    days, end, _ = text.rpartition("\n\n")
    return replace(source, text=days + end or text)
