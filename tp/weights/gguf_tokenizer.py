"""Converts the tokenizer of a GGUF file to the files of a Hugging Face tokenizer.

It uses the keys that llama.cpp reads, and supports two kinds of tokenizer. Byte-level BPE with its merges (`gpt2`) is
supported for families that split texts by a regex listed here. SentencePiece's BPE with scores is `llama`. This module
does not read or write files, and does not encode texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import numpy as np

from ..errors import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type` (`TokenType` of github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py);
0 is undefined."""

_MAX_LENGTH = 256
"""Maximum number of characters of a token that is split in two at every place, or found in texts as a whole. Work grows
with the square of this number."""
_MERGES_PER_TOKEN = 16
"""Maximum number of merges for each token that may follow from a vocabulary with scores."""

GEMMA_TURNS = ("<start_of_turn>", "<end_of_turn>")
"""Control tokens of Gemma 3 that are ordinary tokens in some files (github.com/unslothai/unsloth/issues/5070)."""


@dataclass(frozen=True)
class _Split:
    """How a family splits texts before byte-level BPE, and its defaults for keys that a file does not have."""

    regex: str
    ignore_merges: bool
    """Whether a piece that is a token stays one token, even if no merges lead to it."""
    adds_bos: bool
    """Whether BOS is put before a text by default."""
    normalizer: Mapping[str, str] | None = None


# As in the `tokenizer.json` of Meta-Llama-3-8B, Qwen2-7B, Qwen3.5 and Mistral-Nemo-Base-2407. The defaults are from
# `llama_vocab::impl::load` of github.com/ggml-org/llama.cpp, src/llama-vocab.cpp.
_LLAMA_3 = _Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
    adds_bos=True,
)
_QWEN_2 = _Split(_LLAMA_3.regex.replace("{1,3}", ""), False, False, {"type": "NFC"})
_QWEN_35 = replace(
    _QWEN_2,
    regex=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_TEKKEN = _Split(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
    adds_bos=True,
)
_SPLITS = {
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "qwen2": _QWEN_2,
    "qwen35": _QWEN_35,
    "tekken": _TEKKEN,
}
"""The way to split texts, by the value of `tokenizer.ggml.pre`."""


def tokenizer_files(metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The contents of `tokenizer.json` and `tokenizer_config.json` for the tokenizer of a GGUF file, by name, as JSON
    objects.

    Args:
        metadata: the file's keys and values; arrays are lists (of `str`) or numpy arrays (of numbers).
        path: the file that messages name.

    Raises:
        ModelError: the file has no tokenizer, or its tokenizer is of an unknown kind or impossible.
    """
    given = _Metadata(metadata, path)
    kind = given.text("tokenizer.ggml.model")
    if kind is None:
        raise ModelError(f"{path} has no tokenizer: tokenizer.ggml.model is missing")
    if kind not in ("gpt2", "llama"):
        raise given.error("tokenizer.ggml.model", f"is {_shown(kind)}; supported: 'gpt2' and 'llama'")
    vocabulary = _read_vocabulary(given, is_sentencepiece=kind == "llama")
    parts = _sentencepiece(given, vocabulary) if kind == "llama" else _byte_level(given, vocabulary)
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": vocabulary.added_tokens()}
    return {"tokenizer.json": tokenizer | parts, "tokenizer_config.json": _config(given, vocabulary)}


@dataclass(frozen=True)
class _Metadata:
    """Keys and values of a file, which may be of any type. Each method returns a value of its type, or `None` if the
    key is missing."""

    values: Mapping[str, Any]
    path: Path

    def error(self, key: str, problem: str) -> ModelError:
        """The error to raise if a value is not valid."""
        return ModelError(f"{self.path}: {key} {problem}")

    def text(self, key: str) -> str | None:
        """A text.

        Raises:
            ModelError: the value is something else, or not Unicode.
        """
        value = self.values.get(key)
        if value is not None and not (isinstance(value, str) and _is_unicode(value)):
            raise self.error(key, "is not a text")
        return value

    def flag(self, key: str) -> bool | None:
        """A boolean.

        Raises:
            ModelError: the value is something else.
        """
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool | np.bool_):
            raise self.error(key, f"is {_shown(value)}, not true or false")
        return None if value is None else bool(value)

    def number(self, key: str) -> int | None:
        """A whole number.

        Raises:
            ModelError: the value is something else.
        """
        value = self.values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
            raise self.error(key, f"is {_shown(value)}, not a whole number")
        return None if value is None else int(value)

    def texts(self, key: str) -> list[str]:
        """A list of texts.

        Raises:
            ModelError: the key is missing, or the value is something else, or not Unicode.
        """
        value = self.values.get(key)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(key, "is not a list of texts")
        if not _is_unicode("".join(value)):
            raise self.error(key, "has a text that is not Unicode")
        return value

    def numbers(self, key: str, kinds: str, count: int) -> list[Any] | None:
        """A list of `count` numbers.

        Args:
            kinds: the allowed kinds of numpy's dtypes, one letter each.

        Raises:
            ModelError: the value is something else, or has another length.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in kinds:
            raise self.error(key, "is not a list of numbers" if "f" in kinds else "is not a list of whole numbers")
        if len(value) != count:
            raise self.error(key, f"has {len(value)} values for {count} tokens")
        return value.tolist()


def _shown(value: object) -> str:
    """A value for a message of one line. It is shortened, because values in a file may be long."""
    return shortened(value) if isinstance(value, str | bytes | int | float) else f"a {type(value).__name__}"


def _is_unicode(text: str) -> bool:
    """Whether a text has no halves of surrogate pairs, which JSON's readers refuse."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens in the order of their ids, their types, and the tokens with a role."""

    tokens: Sequence[str]
    types: Sequence[int]
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None

    def special(self) -> set[int]:
        """The ids of the tokens that decoding leaves out: control tokens, unknown tokens, and those with a role."""
        roles = (self.bos, self.eos, self.unknown, self.padding)
        return {
            number
            for number, type in enumerate(self.types)
            if (type in (_CONTROL, _UNKNOWN) or number in roles) and self.tokens[number]
        }

    def ids(self) -> dict[str, int]:
        """The ids by token, without tokens such as `[PAD7]` that only fill a matrix up to its size. The files of models
        leave these out (see for example `_set_vocab_gpt2` of github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py)."""
        roles = (self.bos, self.eos, self.unknown, self.padding)
        return {
            token: number
            for number, (token, type) in enumerate(zip(self.tokens, self.types, strict=True))
            if type != _UNUSED or number in roles or not re.fullmatch(r"\[PAD\d+\]", token)
        }

    def added_tokens(self) -> list[dict[str, Any]]:
        """The tokens that are found in a text as a whole."""
        special = self.special()
        fixed: dict[str, Any] = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": number, "content": token, **fixed, "special": number in special}
            for number, (token, type) in enumerate(zip(self.tokens, self.types, strict=True))
            if number in special or (type == _USER_DEFINED and token)
        ]


def _read_vocabulary(given: _Metadata, *, is_sentencepiece: bool) -> _Vocabulary:
    tokens = given.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise given.error("tokenizer.ggml.tokens", "is empty")
    is_gemma = is_sentencepiece and given.text("general.architecture") == "gemma3"
    if is_gemma:  # tokens of spaces alone are written with spaces (`_create_vocab_sentencepiece`, see `ids`)
        tokens = [token if token.strip(" ") else "▁" * len(token) for token in tokens]
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise given.error("tokenizer.ggml.tokens", f"has {_shown(twice)} twice")
    types = given.numbers("tokenizer.ggml.token_type", "iu", len(tokens))
    strange = next((type for type in types or () if not 0 <= type <= _BYTE), None)
    if strange is not None:
        raise given.error("tokenizer.ggml.token_type", f"has {strange}, which is no type")
    if is_gemma and types is not None:
        types = [_CONTROL if token in GEMMA_TURNS else type for token, type in zip(tokens, types, strict=True)]

    def is_marked(number: int) -> bool:
        return is_sentencepiece if types is None else types[number] in (_UNKNOWN, _CONTROL)

    def role(name: str, default: int) -> int | None:
        """The token with a role. If the file does not name it, SentencePiece has llama.cpp's default, provided that
        this token has the right type."""
        key = f"tokenizer.ggml.{name}_token_id"
        number = given.number(key)
        if number is None:
            return default if is_sentencepiece and default < len(tokens) and is_marked(default) else None
        if not 0 <= number < len(tokens):
            raise given.error(key, f"is {_shown(number)}, but there are {len(tokens)} tokens")
        if not tokens[number]:
            raise given.error(key, f"is {number}, an empty token")
        return number

    bos, eos, unknown = role("bos", 1), role("eos", 2), role("unknown", 0)
    padding = None if given.number("tokenizer.ggml.padding_token_id") is None else role("padding", 0)
    # Some files name ordinary tokens here. They are ignored: otherwise these tokens would disappear from texts.
    unknown, padding = (None if one is None or not is_marked(one) else one for one in (unknown, padding))
    vocabulary = _Vocabulary(tokens, types or [_NORMAL] * len(tokens), bos, eos, unknown, padding)
    for token in tokens if is_sentencepiece else (added["content"] for added in vocabulary.added_tokens()):
        if len(token) > _MAX_LENGTH:
            raise given.error("tokenizer.ggml.tokens", f"has a token of {len(token)} characters, above {_MAX_LENGTH}")
    return vocabulary


def _byte_level(given: _Metadata, vocabulary: _Vocabulary) -> dict[str, Any]:
    """The parts of `tokenizer.json` for byte-level BPE."""
    name = given.text("tokenizer.ggml.pre")
    if name not in _SPLITS:
        is_named = "is missing" if name is None else f"is {_shown(name)}"
        raise given.error("tokenizer.ggml.pre", f"{is_named}; supported: {', '.join(map(repr, _SPLITS))}")
    split, ids = _SPLITS[name], vocabulary.ids()
    missing = next((byte for byte, letter in enumerate(_byte_letters()) if letter not in ids), None)
    if missing is not None:
        raise given.error("tokenizer.ggml.tokens", f"has no token for the byte {missing}")
    cut = {"type": "Split", "pattern": {"Regex": split.regex}, "behavior": "Isolated", "invert": False}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    offsets = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    template = _template(given, vocabulary, split.adds_bos)
    return {
        "normalizer": split.normalizer and dict(split.normalizer),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, letters]},
        "post_processor": {"type": "Sequence", "processors": [offsets, template]} if template else offsets,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(ids, _read_merges(given, ids), ignore_merges=split.ignore_merges),
    }


def _byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte. Printable bytes of Latin-1 stand for themselves; the others
    are numbered from 256 on (`bytes_to_unicode` of github.com/openai/gpt-2, src/encoder.py)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _read_merges(given: _Metadata, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    key, merges = "tokenizer.ggml.merges", []
    for text in given.texts(key):
        left, _, right = text.partition(" ")
        if not left or not right or left not in ids or right not in ids or left + right not in ids:
            raise given.error(key, f"has {_shown(text)}, which does not join two tokens into a token")
        merges.append((left, right))
    return merges


def _sentencepiece(given: _Metadata, vocabulary: _Vocabulary) -> dict[str, Any]:
    """The parts of `tokenizer.json` for SentencePiece's BPE, as in that of Llama 2. A space is put before a text, and
    removed again by decoding, unless the file says otherwise."""
    has_prefix = given.flag("tokenizer.ggml.add_space_prefix") is not False
    prefix = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    unknown = None if vocabulary.unknown is None else vocabulary.tokens[vocabulary.unknown]
    ids = vocabulary.ids()
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, replace]},
        "pre_tokenizer": None,
        "post_processor": _template(given, vocabulary, adds_bos=True)
        or {"type": "TemplateProcessing", "single": [_TEXT], "pair": [_TEXT, _SECOND_TEXT], "special_tokens": {}},
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _model(ids, _merges_of_scores(given, vocabulary, ids), unknown, is_sentencepiece=True),
    }


def _merges_of_scores(given: _Metadata, vocabulary: _Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """A merge for each way to join two tokens into a token.

    Merges with the highest score come first. Merges with equal scores are sorted by the length of the first half, the
    longest first, and then by the number of the token (`generate_merges` of github.com/huggingface/transformers,
    convert_slow_tokenizer.py). User-defined tokens have the score 0, as in models of SentencePiece; files give -1000
    for them. Special tokens have no merges, because they are found in texts before.
    """
    key = "tokenizer.ggml.scores"
    scores = given.numbers(key, "iuf", len(vocabulary.tokens))
    if scores is None:
        raise given.error(key, "is missing")
    if not np.isfinite(scores).all():
        raise given.error(key, "has a value that is not finite")
    special = vocabulary.special()
    plain = {token: number for token, number in ids.items() if number not in special}
    merges: list[tuple[float, int, str, str]] = []
    merged: set[float] = set()
    tokens = 0
    for token, number in plain.items():
        before, is_defined = len(merges), vocabulary.types[number] == _USER_DEFINED
        score = 0.0 if is_defined else scores[number]
        for size in range(1, len(token)):
            left, right = token[:size], token[size:]
            if left in plain and right in plain:
                merges.append((score, size, left, right))
        if len(merges) > before and not is_defined:
            tokens += 1
            merged.add(score)
        if len(merges) > _MERGES_PER_TOKEN * len(vocabulary.tokens):
            problem = f"has more than {_MERGES_PER_TOKEN} ways per token to join two tokens into a token"
            raise given.error("tokenizer.ggml.tokens", problem)
    if tokens > 1 and len(merged) == 1:
        raise given.error(key, "has one value for all tokens, so that their order is not known")
    merges.sort(key=lambda merge: (merge[0], merge[1], len(merge[3])), reverse=True)
    return [(left, right) for _, _, left, right in merges]


def _model(
    ids: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    unknown: str | None = None,
    *,
    ignore_merges: bool = False,
    is_sentencepiece: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": is_sentencepiece,
        "byte_fallback": is_sentencepiece,
        "ignore_merges": ignore_merges,
        "vocab": dict(ids),
        "merges": [list(merge) for merge in merges],
    }


_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
_SECOND_TEXT = {"Sequence": {"id": "B", "type_id": 1}}


def _template(given: _Metadata, vocabulary: _Vocabulary, adds_bos: bool) -> dict[str, Any] | None:
    """The post-processor that puts BOS before a text and EOS behind it, as transformers' `update_post_processor` does;
    `None` for neither.

    Args:
        adds_bos: whether BOS is added if the file has a BOS token, but does not say whether to add it.
    """
    ends: list[int | None] = []
    for name, token, default in (("bos", vocabulary.bos, adds_bos), ("eos", vocabulary.eos, False)):
        key = f"tokenizer.ggml.add_{name}_token"
        wanted = given.flag(key)
        if wanted and token is None:
            raise given.error(key, f"is true, but tokenizer.ggml.{name}_token_id is missing")
        ends.append(token if (default if wanted is None else wanted) else None)
    if ends == [None, None]:
        return None

    def ended(text: dict[str, Any], type_id: int) -> list[dict[str, Any]]:
        first, last = (
            [] if number is None else [{"SpecialToken": {"id": vocabulary.tokens[number], "type_id": type_id}}]
            for number in ends
        )
        return [*first, text, *last]

    named = {vocabulary.tokens[number]: number for number in ends if number is not None}
    return {
        "type": "TemplateProcessing",
        "single": ended(_TEXT, 0),
        "pair": [*ended(_TEXT, 0), *ended(_SECOND_TEXT, 1)],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in named.items()},
    }


def _config(given: _Metadata, vocabulary: _Vocabulary) -> dict[str, Any]:
    """The content of `tokenizer_config.json`."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    is_unknown_given = given.number("tokenizer.ggml.unknown_token_id") is not None
    roles = {
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.eos,
        "unk_token": vocabulary.unknown if is_unknown_given else None,
        "pad_token": vocabulary.padding,
    }
    config |= {name: vocabulary.tokens[number] for name, number in roles.items() if number is not None}
    template = given.text("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    key = f"{given.text('general.architecture') or ''}.context_length"
    length = given.number(key)
    if length is not None:
        if length < 1:
            raise given.error(key, f"is {_shown(length)}; at least one token must fit")
        config["model_max_length"] = length
    return config
