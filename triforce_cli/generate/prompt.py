"""The prompt: reading its text, adding a question, and dropping a part where it does not fit."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...tp.errors import CapacityError, TriforceError, UsageError
from ..logbook import LogBook

if TYPE_CHECKING:
    from ...offload.contexts.manifest import Frame
    from ...tp.model.config import ModelConfig
    from ...tp.weights.tokenizer import Tokenizer

BUILT_IN_TOKENS = 12_000
"""Length of the built-in prompt: long enough to show the effect, read in seconds on two cores."""

BUILT_IN_WORDS = 105_000
"""Of the log that it begins; `bench` and `compare` take more of it. More than 131,072 tokens of the embedded pair."""

LOG_SEEDS = 1_000_000
"""Logs that the embedded pair never saw in training have smaller seeds."""


@dataclass(frozen=True)
class Source:
    """A text, and its origin in words. The built-in text is cut to length once its tokens are known."""

    text: str
    name: str
    log_seed: int | None = None
    """Of the built-in text, a harbour's log."""
    context: str | None = None
    """The saved context that is the text, in place of `text`."""


def read_source(
    prompt_file: Path | None,
    prompt: str | None,
    tell: Callable[[str], None],
    context: str | None = None,
    log_seed: int | None = 0,
) -> Source:
    """The context that the options ask for; `tell` takes notes for stderr. Where they ask for none, it is the log of
    `log_seed`, or of a seed drawn here.

    Raises:
        UsageError: two of the options.
        TriforceError: nothing readable there, or no text.
    """
    if context is not None:
        for option, given in (("--prompt-file", prompt_file), ("--prompt", prompt)):
            if given is not None:
                raise UsageError(f"--context and {option} are both given, but the saved context is the text; give one")
        return Source("", f"the context {context}", context=context)
    if prompt_file is not None and prompt is not None:
        raise UsageError("--prompt-file and --prompt are both given; give one of them")
    if prompt is not None:
        return Source(checked(read_option("--prompt", prompt, tell), "--prompt"), "")
    if prompt_file is None:
        seed = secrets.randbelow(LOG_SEEDS) if log_seed is None else log_seed % LOG_SEEDS
        return Source(LogBook(seed).write(BUILT_IN_WORDS), f"the built-in log book {seed}", log_seed=seed)
    return read_file(prompt_file, "--prompt-file", tell)


def read_file(path: Path, option: str, tell: Callable[[str], None]) -> Source:
    """The text of a file, or of standard input for `-`; `option` is what gave its name.

    Raises:
        TriforceError: nothing readable there, or no text.
    """
    if str(path) == "-":
        if sys.stdin is None or sys.stdin.closed:
            raise TriforceError(f"{option} is -, but there is no standard input")
        if sys.stdin.isatty():
            tell("reading the prompt from this terminal; end it with Ctrl-D on a line of its own")
        return Source(checked(decoded(sys.stdin.buffer.read(), "standard input", tell), "standard input"), "stdin")
    return Source(checked(decoded(read_bytes(path, option), str(path), tell), str(path)), path.name)


def read_option(option: str, value: str, tell: Callable[[str], None]) -> str:
    """The text given with `option`.

    Raises:
        TriforceError: its bytes are not UTF-8 (Python hands them over as lone surrogates).
    """
    return decoded(value.encode("utf-8", "surrogateescape"), option, tell)


def read_ask(ask: str | None, tell: Callable[[str], None]) -> str | None:
    """The question given with `--ask`, if any.

    Raises:
        UsageError: it is empty.
        TriforceError: as for `read_option`.
    """
    if ask is None:
        return None
    if not ask.strip():
        raise UsageError("--ask is empty; give a question or an instruction")
    return read_option("--ask", ask, tell)


def read_bytes(path: Path, option: str) -> bytes:
    """The bytes of a file; `option` is what gave its name.

    Raises:
        TriforceError: they cannot be read.
    """
    try:
        return path.expanduser().read_bytes()
    except FileNotFoundError as error:
        raise TriforceError(f"{option} {path} does not exist; give a text file, or - for stdin") from error
    except IsADirectoryError as error:
        raise TriforceError(f"{option} {path} is a directory; give a text file in it") from error
    except OSError as error:
        raise TriforceError(f"{option} {path} cannot be read: {error.strerror or error}") from error


def decoded(raw: bytes, name: str, tell: Callable[[str], None]) -> str:
    """`raw` as text, without a byte-order mark and with line ends as `\\n`, as text files are read everywhere."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = error.start + (3 if raw.startswith(b"\xef\xbb\xbf") else 0)
        raise TriforceError(
            f"{name} is not UTF-8: byte {raw[at]:#04x} at offset {at:,}; convert it (iconv -f latin1 -t utf-8) "
            "or give another file"
        ) from error
    if "\r\n" in text:
        tell(f"{name}: line ends CR LF are read as LF")
        text = text.replace("\r\n", "\n")
    return text


def checked(text: str, name: str) -> str:
    """`text`, if it is one.

    Raises:
        TriforceError: it is empty, or not text.
    """
    if "\0" in text:
        raise TriforceError(
            f"{name} is not text: it has a NUL byte at offset {len(text[: text.index(chr(0))].encode()):,}; "
            "give a plain text file"
        )
    if not text.strip():
        raise TriforceError(f"{name} is empty{' but for white space' if text else ''}; give a text to go on from")
    return text


@dataclass(frozen=True)
class Prompt:
    """Token ids ready for the engine; `dropped` counts the context's tokens that were left out."""

    token_ids: list[int]
    dropped: int = 0
    text_tokens: int | None = None
    """How many leading ids are the text without the question; `None` where both were encoded together."""


def read_text(text: str, system: str | None, raw: bool, tokenizer: Tokenizer) -> tuple[list[int], Frame]:
    """The ids of a text that questions will follow, and what surrounds it: the beginning of a user's message by the
    model's chat template, unless `raw` or it has none.

    Raises:
        UsageError: `system` where there is no such message; a text without tokens.
    """
    from ...offload.contexts.manifest import Frame

    frame = Frame(chat=tokenizer.chat is not None and not raw, system=system)
    if system and not frame.chat:
        reason = "--raw leaves it out" if raw else "this model has no chat template that it could stand in"
        raise UsageError(f"--system is given, but {reason}; put it into the text")
    before, _, special = _surroundings(text, "", tokenizer, frame) if frame.chat else ("", "", True)
    token_ids = tokenizer.encode(before + text, special)
    if not token_ids:
        raise UsageError("the text gives no token; give a longer one")
    return token_ids, frame


def saved_text(name: str, config: ModelConfig) -> tuple[list[int], Frame]:
    """The ids of a saved context, and what surrounds its text.

    Raises:
        ContextError: there is no such context; it is another model's, damaged, or not complete.
    """
    from ...offload.contexts.home import user_store
    from ...offload.contexts.manifest import ContextError

    store = user_store()
    manifest = store.load(name)
    if not manifest.complete:
        raise ContextError(
            f"the context {name!r} is not complete: {manifest.saved:,} of {manifest.tokens:,} tokens are saved; "
            "triforce read goes on with it"
        )
    token_ids, shape = store.token_ids(name), manifest.shape
    ours = config.num_layers, config.num_kv_heads, config.head_dim
    if (shape.num_layers, shape.num_kv_heads, shape.head_dim) != ours or max(token_ids) >= config.vocab_size:
        raise ContextError(
            f"the context {name!r} was read by another model than {config.name}: give --model {manifest.model}"
        )
    return token_ids, manifest.frame


def _continue_context(name: str, ask: str | None, tokenizer: Tokenizer, config: ModelConfig) -> Prompt:
    """A saved context's ids and the question after them, with the rest of the frame.

    Raises:
        ContextError: see `saved_text`.
        UsageError: no question, where the text stands in a user's message.
    """
    token_ids, frame = saved_text(name, config)
    if frame.chat and ask is None:
        raise UsageError("the context holds the beginning of a user's message; give the question with --ask")
    _, after, _ = _surroundings(tokenizer.decode(token_ids[-16:]), ask, tokenizer, frame)
    return Prompt([*token_ids, *encode_after(after, tokenizer)])


def encode_after(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text that stands after another one. Some tokenizers put a space before the first word they get."""
    anchor, both = tokenizer.encode("x", False), tokenizer.encode(f"x{text}", False)
    return both[len(anchor) :] if both[: len(anchor)] == anchor else tokenizer.encode(text, False)


def build_prompt(
    source: Source,
    ask: str | None,
    tokenizer: Tokenizer,
    config: ModelConfig,
    max_new_tokens: int,
    truncate: str,
    *,
    apart: bool = False,
    drop: int = 0,
) -> Prompt:
    """The ids of the context and the instruction after it, cut to the model's positions as `truncate` says.

    Only the context is ever cut: `truncate` is `head`, `tail` or `middle` (the part that goes), or `error`. With
    `apart` both are encoded for themselves, so that the context's ids do not depend on the instruction. At least
    `drop` tokens of the context are dropped (not of a saved one).

    Raises:
        CapacityError: too long, with `error`, or an instruction that leaves no room.
    """
    from ...offload.checks import check_context

    if source.context is not None:
        prompt = _continue_context(source.context, ask, tokenizer, config)
        check_context(config, len(prompt.token_ids), max_new_tokens)
        return prompt
    before, after, special = _surroundings(source.text, ask, tokenizer)
    limit = config.max_position_embeddings - max_new_tokens
    if source.log_seed is not None:
        source = cut_log(source, tokenizer, limit - len(tokenizer.encode(before + after, special)))
    text_tokens = None
    if apart:
        token_ids = tokenizer.encode(before + source.text, special)
        text_tokens = len(token_ids)
        token_ids += encode_after(after, tokenizer)
    else:
        token_ids = tokenizer.encode(before + source.text + after, special)
    if not token_ids:
        raise UsageError("the prompt gives no token; give a longer text")
    if not drop and (len(token_ids) <= limit or truncate == "error"):
        check_context(config, len(token_ids), max_new_tokens)
        return Prompt(token_ids, text_tokens=text_tokens)

    if truncate == "tail":  # the text before the question may now end inside a line
        before, after, special = _surroundings("", ask, tokenizer)
    # Encoded in three parts, so that the cut falls inside the context whatever the tokens at its borders are.
    context = tokenizer.encode(source.text, False)
    first = tokenizer.encode(before, special)
    last = tokenizer.encode(after, False) if after else []
    room = limit - len(first) - len(last)
    if room < 1:
        taken = f"--max-new-tokens takes {max_new_tokens:,}"
        if ask is not None:
            taken = f"--ask takes {len(first) + len(last):,} tokens and {taken}"
        raise CapacityError(
            f"{taken}, which leaves no room for the text in the {config.max_position_embeddings:,} positions of "
            f"{config.name}; {'lower it' if ask is None else 'shorten the one or lower the other'}"
        )
    kept = cut(context, max(1, min(room, len(context) - drop)), truncate)
    return Prompt([*first, *kept, *last], dropped=len(context) - len(kept), text_tokens=len(first) + len(kept))


def build_prompts(
    source: Source,
    asks: Sequence[str | None],
    tokenizer: Tokenizer,
    config: ModelConfig,
    max_new_tokens: int,
    truncate: str,
    *,
    apart: bool = False,
) -> list[Prompt | TriforceError]:
    """The prompts of several questions about one text, each as `build_prompt` makes it, or why it cannot be made. Where
    the text has to be cut, all get the same part of it, which is then read once.
    """

    def build(ask: str | None, drop: int) -> Prompt | TriforceError:
        try:
            return build_prompt(source, ask, tokenizer, config, max_new_tokens, truncate, apart=apart, drop=drop)
        except TriforceError as error:
            return error

    built = {ask: build(ask, 0) for ask in asks}
    most = max((prompt.dropped for prompt in built.values() if isinstance(prompt, Prompt)), default=0)
    for ask, prompt in built.items():
        if isinstance(prompt, Prompt) and prompt.dropped < most:
            built[ask] = build(ask, most)
    return [built[ask] for ask in asks]


@dataclass(frozen=True)
class LongPrompt:
    """Tokens to read contexts of several lengths from."""

    token_ids: list[int]
    name: str
    """Where they are from."""
    text_tokens: int
    """How many the text has; where there are more, it is repeated."""


def long_prompt(source: Source, tokenizer: Tokenizer, config: ModelConfig, tokens: int) -> LongPrompt:
    """The first `tokens` tokens of a text, which is repeated where it is too short; a built-in one is taken whole.

    Raises:
        UsageError: the text gives no token.
        ContextError: see `saved_text`.
    """
    if source.context is not None:
        token_ids = again = saved_text(source.context, config)[0]
    else:
        token_ids = tokenizer.encode(source.text, True)
        again = tokenizer.encode(source.text, False)
    if not again:
        raise UsageError("the prompt gives no token; give a longer text")
    found = len(token_ids)
    times = max(0, -(-(tokens - found) // len(again)))
    return LongPrompt((token_ids + again * times)[:tokens], source.name or "--prompt", found)


def cut(tokens: list[int], room: int, part: str) -> list[int]:
    """`tokens` without their `head`, `tail` or `middle`, so that `room` of them (1 or more) are left."""
    if len(tokens) <= room:
        return tokens
    if part == "head":
        return tokens[-room:]
    if part == "tail":
        return tokens[:room]
    end = room // 2
    return tokens[: room - end] + tokens[len(tokens) - end :]


def _surroundings(
    context: str, ask: str | None, tokenizer: Tokenizer, frame: Frame | None = None
) -> tuple[str, str, bool]:
    """The text before and after the context, and whether encoding adds the tokens that begin a text (BOS). Without a
    frame there is that of a user's message where there is a question and a chat template."""
    if ask is None:
        return "", "", True
    gap = "\n" * (2 - min(2, len(context) - len(context.rstrip("\n"))))
    if tokenizer.chat is None or (frame and not (frame.chat or frame.answered)):
        return "", gap + ask, True
    marker = f"context-{secrets.token_hex(8)}"
    system = frame.system if frame else None
    if frame and frame.answered and tokenizer.render:
        messages = [("system", system)] if system else []
        messages += [("user", "?"), ("assistant", marker), ("user", ask)]
        return "", tokenizer.render(messages).partition(marker)[2], False
    before, found, after = tokenizer.chat(f"{marker}{gap}{ask}", system).partition(marker)
    if not found:
        raise TriforceError("the model's chat template leaves the text out; give the question inside the prompt")
    return before, after, False


def cut_log(source: Source, tokenizer: Tokenizer, limit: int) -> Source:
    """The built-in log's days that fit within its length, and within `limit` tokens."""
    most = max(1, min(BUILT_IN_TOKENS, limit))
    fitting = tokenizer.decode(tokenizer.encode(source.text[: 8 * most], False)[:most])
    text = source.text[: len(fitting)]
    days, end, _ = text.rpartition("\n\n")
    return replace(source, text=days + end or text)
