"""Converts text to token ids and back, with the tokenizer of a model's directory. Streams text without broken
characters."""

from __future__ import annotations

import filecmp
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ModelError, UsageError
from .chat_template import Messages, compile_template, message, template_arguments, template_error
from .control_tokens import ControlTokens, backend_encode, has_marks, without_marks

_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_PLAIN_KEYS = {
    "backend",
    "bos_token",
    "chat_template",
    "clean_up_tokenization_spaces",
    "eos_token",
    "is_local",
    "model_max_length",
    "pad_token",
    "tokenizer_class",
    "unk_token",
}
_SPECIAL = "bos_token", "eos_token", "unk_token", "pad_token"
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer and its chat template."""

    encode: Callable[[str, bool], list[int]]
    """`encode(text, special)` returns token ids. With `special`, they begin with the tokens that open a text (BOS). The
    name of a control token in `text` becomes that control token. In text that went through `as_content`, it remains
    ordinary text."""
    decode: Callable[[Sequence[int]], str]
    """`decode(ids)` returns text, without special tokens."""
    chat: Callable[[str, str | None], str] | None = None
    """`chat(content, system)` renders one user message, after a system message if `system` is given. The result is for
    `encode`. `None` if the model has no chat template. Raises a `ModelError` if the template fails."""
    render: Callable[..., str] | None = None
    """`render(messages)` renders messages (see `Messages`) and the beginning of the answer to the last message, with
    the chat template. It uses `as_content` on the texts of messages. With `tools=`, it also describes these tools. The
    result is for `encode`. `None` if the model has no chat template. Raises a `ModelError` if the template fails, or
    refuses the messages."""
    template_arguments: frozenset[str] = frozenset()
    """The variables that can be given to the chat template."""
    tool_template: str | None = None
    """The source of the template that describes tools, if there is one."""
    as_content: Callable[[str], str] = str
    """`as_content(text)` marks the names of control tokens in `text`, so that `encode` keeps them as ordinary text. A
    text without these names is returned unchanged."""

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Loads the tokenizer of a model's directory.

        Raises:
            ModelError: there is no tokenizer, or it cannot be read.
        """
        if not any((directory / name).is_file() for name in _FILES):
            raise ModelError(f"{directory} has no tokenizer; one of {', '.join(_FILES)} must be there")
        try:
            return _load_plain(directory) or _load_with_transformers(directory)
        except Exception as error:  # tokenizers raises Exception itself, transformers nearly anything
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ModelError(f"the tokenizer in {directory} cannot be loaded: {reason[0]}") from error

    def with_arguments(
        self, arguments: Mapping[str, Any] | Iterable[tuple[str, Any]] | None, name: str = "--template-arg"
    ) -> Tokenizer:
        """A copy of this tokenizer whose chat template gets these variables.

        Args:
            arguments: the variables and their values.
            name: the option or field that the user gave them with, for error messages.

        Raises:
            UsageError: there is no template, or the template does not use one of these variables.
        """
        given: dict[str, Any] = dict(arguments or ())
        if not given:
            return self
        if self.render is None:
            raise UsageError(f"{name} is given, but this model has no chat template; leave it out")
        unknown = sorted(given.keys() - self.template_arguments)
        if unknown:
            known = ", ".join(sorted(self.template_arguments)) or "nothing"
            raise UsageError(f"{name} has {unknown[0]}, but the model's chat template asks for {known}")
        render = partial(self.render, **given)
        return replace(self, render=render, chat=_chat(render))


def _load_plain(directory: Path) -> Tokenizer | None:
    """Loads the tokenizer without transformers, whose import takes seconds; `None` if `tokenizer.json` is not
    sufficient."""
    path, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if not path.is_file() or not settings.is_file() or any(directory.glob("*chat_template*")):
        return None
    config: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") not in _PLAIN_CLASSES or not config.keys() <= _PLAIN_KEYS:
        return None

    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(path))
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    special_tokens = {name: config[name] for name in _SPECIAL if config.get(name) is not None}
    if not all(isinstance(token, str) and token in known for token in special_tokens.values()):
        return None
    source = config.get("chat_template")
    render = compile_template(source, special_tokens, str(directory)) if isinstance(source, str) else None
    if source is not None and render is None:
        return None
    backend.no_truncation()
    backend.no_padding()
    tokens = ControlTokens(backend.get_added_tokens_decoder(), backend.normalizer)
    return _with_content(
        # The batch function lets other threads run meanwhile.
        lambda text, special: backend.encode_batch_fast([text], add_special_tokens=special)[0].ids,
        backend_encode(backend, tokens),
        lambda ids: backend.decode(list(ids), skip_special_tokens=True),
        tokens,
        render,
    )


def _of_transformers(directory: Path) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def _load_with_transformers(directory: Path) -> Tokenizer:
    tokenizer = _of_transformers(directory)

    def decode(ids: Sequence[int]) -> str:
        # Cleaning up spaces would change characters that were shown already.
        return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def render(messages: Messages, **arguments: Any) -> str:
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
        except Exception as error:  # a template is a program, and may fail in any way
            raise template_error(str(directory), error) from error

    def encode(text: str, special: bool) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])

    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = None if backend is None else backend.normalizer
    tokens = ControlTokens(tokenizer.added_tokens_decoder, normalizer, tokenizer.all_special_tokens)

    def encode_marked(text: str, special: bool) -> list[int]:
        """Encodes text with marks, for tokenizers in Python: each piece between control tokens by itself."""
        ids: list[int] = []
        for piece, token in tokens.split(text):
            if token is not None:
                ids.append(token)
            elif piece:
                ids += tokenizer.convert_tokens_to_ids(tokenizer.tokenize(piece, split_special_tokens=True))
        return list(tokenizer.build_inputs_with_special_tokens(ids)) if special else ids

    marked = encode_marked if backend is None else backend_encode(backend, tokens)
    if not tokenizer.chat_template:
        return _with_content(encode, marked, decode, tokens)
    taken = (*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map)
    arguments = template_arguments(tokenizer.chat_template, taken)
    with_tools = None
    with suppress(ValueError):  # several templates, and none for tools
        with_tools = tokenizer.get_chat_template(tools=[{}])
    with_tools = with_tools if "tools" in template_arguments(with_tools, ()) else None
    return _with_content(encode, marked, decode, tokens, render, arguments, with_tools)


def _with_content(
    encode: Callable[[str, bool], list[int]],
    encode_marked: Callable[[str, bool], list[int]],
    decode: Callable[[Sequence[int]], str],
    tokens: ControlTokens,
    render: Callable[..., str] | None = None,
    arguments: frozenset[str] = frozenset(),
    tool_template: str | None = None,
) -> Tokenizer:
    """A tokenizer that distinguishes control tokens of the template from names of control tokens in its content.

    Args:
        encode: for texts without marks.
        encode_marked: for texts with marks.
    """

    def content(value: Any) -> Any:
        """A value for a template, with `as_content` applied to all texts in it."""
        if isinstance(value, str):
            return tokens.as_content(value)
        if isinstance(value, Mapping):
            return {content(key): content(one) for key, one in value.items()}
        return [content(one) for one in value] if isinstance(value, list | tuple) else value

    def render_content(messages: Messages, **given: Any) -> str:
        assert render is not None
        try:
            return render(content(messages), **content(given))
        except ModelError as error:  # a template may quote the content in its refusal
            raise ModelError(without_marks(str(error))) from error

    return Tokenizer(
        lambda text, special: (encode_marked if has_marks(text) else encode)(text, special),
        decode,
        _chat(render_content) if render else None,
        render_content if render else None,
        arguments,
        tool_template,
        tokens.as_content,
    )


def _chat(render: Callable[[Messages], str]) -> Callable[[str, str | None], str]:
    return lambda content, system: render([*([message("system", system)] if system else []), message("user", content)])


def check_same_vocabulary(target: Path, draft: Path) -> None:
    """Compares `tokenizer.json` of target and draft, if both exist. One may have more tokens, with higher ids.

    Raises:
        ModelError: a token has different ids in the two files.
    """
    paths = (target / "tokenizer.json", draft / "tokenizer.json")
    if not all(path.is_file() for path in paths) or filecmp.cmp(*paths, shallow=False):
        return
    ours, theirs = (_vocabulary(path) for path in paths)
    last = min(max(vocabulary.values(), default=-1) for vocabulary in (ours, theirs))
    differing = sorted({token for token, number in ours.items() ^ theirs.items() if number <= last})
    if differing:
        raise ModelError(
            f"the tokenizers of {target} and {draft} differ in {len(differing):,} tokens, such as {differing[0]!r}; "
            "a draft must share its target's vocabulary (or use --draft none)"
        )


def backend_json(directory: Path) -> tuple[str, int]:
    """A model's tokenizer as the content of a `tokenizer.json`, and its number of tokens.

    Raises:
        Exception: the tokenizer cannot be read, or is of a kind that has no `tokenizer.json`.
    """
    from tokenizers import Tokenizer as Backend

    path = directory / "tokenizer.json"
    backend = Backend.from_file(str(path)) if path.is_file() else _of_transformers(directory).backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    return backend.to_str(), backend.get_vocab_size(with_added_tokens=True)


def _vocabulary(path: Path) -> dict[str, int]:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(path)).get_vocab()
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from error


class TextStream:
    """Decodes token ids as they arrive, piece by piece. All pieces together are `decode` of all ids.

    A token may end inside a character, and its text may depend on the token before it. So a piece is the difference
    between two decodings that begin at the piece before. It is held back while it ends in an unfinished character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = self._shown = 0
        self._before = ""
        self._pieces: list[str] = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens received so far."""
        return len(self._ids)

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._pieces)

    def push(self, ids: Sequence[int]) -> str:
        """Adds ids, and returns the text that they complete."""
        self._ids += ids
        window = self._decode(self._ids[self._start :])
        return "" if window.endswith("�") else self._advance(window)

    def flush(self) -> str:
        """Returns the text that was held back, after the last ids."""
        return self._advance(self._decode(self._ids[self._start :]))

    def _advance(self, window: str) -> str:
        piece = window[len(self._before) :]
        if piece:
            self._start, self._shown = self._shown, len(self._ids)
            self._before = self._decode(self._ids[self._start : self._shown])
            self._pieces.append(piece)
        return piece
