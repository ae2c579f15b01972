"""Keeps the names of control tokens in content as text: only a chat template makes control tokens.

Control tokens are a tokenizer's special added tokens, such as `<|eot_id|>`. If content (from a user, a file, a client
or the model) contains the name of a control token, `as_content` replaces the name with a mark. `encode` puts the
characters back. So rendered text is one `str`, in which names from the template differ from names in the content.

Marks are private-use characters around random digits of this process. Nobody outside can write a mark, and no template
mistakes a mark for white space, a word or a line end.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

_NONCE = f"{secrets.randbelow(10**20):020}"
_BYTE = 0xE100
"""Marks contain the bytes of the name as private-use characters, from this code point on."""
_MARK = re.compile(f"\ue000{_NONCE}([{chr(_BYTE)}-{chr(_BYTE + 255)}]+)\ue001")


def _mark(text: str) -> str:
    held = "".join(chr(_BYTE + byte) for byte in text.encode("utf-8", "surrogatepass"))
    return f"\ue000{_NONCE}{held}\ue001"


def has_marks(text: str) -> bool:
    """Whether `text` contains marks: content with the name of a control token."""
    return _NONCE in text


def without_marks(text: str) -> str:
    """`text` with its marks replaced by the original characters."""

    def written(mark: re.Match[str]) -> str:
        return bytes(ord(char) - _BYTE for char in mark[1]).decode("utf-8", "surrogatepass")

    return _MARK.sub(written, text) if has_marks(text) else text


class _Found(NamedTuple):
    """The place of a control token in a text. Positions are in characters."""

    token: int
    """Its id."""
    start: int
    """The beginning, including the white space that the token takes before it."""
    first: int
    """The beginning of its own letters."""
    last: int
    """The end of its own letters."""
    end: int
    """The end, including the white space that the token takes behind it."""


class ControlTokens:
    """Finds the control tokens of a vocabulary in texts."""

    def __init__(self, added: Mapping[int, Any], normalizer: Any = None, special: Collection[str] = ()) -> None:
        """Selects the control tokens.

        Args:
            added: the tokenizer's added tokens (`tokenizers.AddedToken`), by their ids. Those that are special are
                control tokens.
            normalizer: that of the tokenizer, if it has one.
            special: contents of other added tokens that are control tokens, too.
        """
        self._added, self._normalizer = added, normalizer
        self.contents: dict[int, str] = {
            token: given.content
            for token, given in added.items()
            if given.content and (given.special or given.content in special)
        }
        """The name of each control token, by its id."""
        self._is_normalized = normalizer is not None and any(added[token].normalized for token in self.contents)
        self._beginnings = {text[:size] for text in self.contents.values() for size in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    def as_content(self, text: str) -> str:
        """`text` with a mark in place of the name of each control token. The beginning of a name at the end of the text
        is also replaced, because text behind it may complete the name. Most texts are returned unchanged.
        """
        if self._is_normalized or any(content in text for content in self.contents.values()):
            before = None
            while before != text:  # letters next to a new mark may have become a whole word
                before = text
                text = "".join(piece if token is None else _mark(piece) for piece, token in self._pieces(text))
        end = len(text.rstrip())
        for size in range(min(self._longest, end), 0, -1):
            if text[end - size : end] in self._beginnings:
                return text[: end - size] + _mark(text[end - size : end]) + text[end:]
        return text

    def replaced(self, text: str, names: Mapping[int, str]) -> str:
        """`text` without marks, in which control tokens outside of marks have other names.

        Args:
            text: a text with marks.
            names: the new name of each control token, by its id.
        """
        return "".join(without_marks(piece) if token is None else names[token] for piece, token in self._pieces(text))

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Splits a text with marks at the control tokens outside of marks.

        Yields the pieces in order: text between control tokens, without marks, and `None`; or the text of a control
        token, and its id.
        """
        at = 0
        for found in self._find(text):
            yield without_marks(text[at : found.start]), None
            yield text[found.start : found.end], found.token
            at = found.end
        yield without_marks(text[at:]), None

    def _pieces(self, text: str) -> Iterator[tuple[str, int | None]]:
        at = 0
        for found in self._find(text):
            yield text[at : found.first], None
            yield text[found.first : found.last], found.token
            at = found.last
        yield text[at:], None

    def _find(self, text: str) -> Iterator[_Found]:
        # The batch function lets other threads run meanwhile.
        encoding = self._finder.encode_batch([text], add_special_tokens=False)[0]
        for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._by_number[number]
            if token in self.contents:
                taken, content = text[start:end], self.contents[token]
                if content not in taken:  # the token matches the normalized text
                    content = taken.strip()
                first = start + taken.index(content)
                yield _Found(token, start, first, first + len(content), end)

    @cached_property
    def _finder(self) -> Any:
        """A tokenizer that has only the added tokens. It finds them as the real tokenizer does: with their white space,
        only as whole words, or in normalized text."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import models

        finder = Backend(models.BPE())
        if self._normalizer is not None:
            finder.normalizer = self._normalizer
        finder.add_tokens([token for _, token in sorted(self._added.items())])
        return finder

    @cached_property
    def _by_number(self) -> dict[int, int]:
        """The ids of the added tokens, by their ids in the finder."""
        return {self._finder.token_to_id(token.content): number for number, token in self._added.items()}


def backend_encode(backend: Any, tokens: ControlTokens) -> Callable[[str, bool], list[int]]:
    """Makes a function that encodes texts with marks with a tokenizer of the library `tokenizers`.

    It uses a second tokenizer, made when it is first needed, in which control tokens have other names that nobody can
    write. Control tokens of the template get these names. So the text is encoded as a whole, and each word is encoded
    beside its neighbours.
    """
    names = {token: f"\ue002{_NONCE}{token}\ue003" for token in tokens.contents}
    made: list[tuple[Any, dict[int, int]]] = []

    def encode(text: str, special: bool) -> list[int]:
        if not made:
            made.append(_renamed(backend, {tokens.contents[token]: name for token, name in names.items()}))
        renamed, ids = made[0]
        # The batch function lets other threads run meanwhile.
        found: list[int] = renamed.encode_batch_fast([tokens.replaced(text, names)], add_special_tokens=special)[0].ids
        return [ids.get(token, token) for token in found]

    return encode


def _renamed(backend: Any, names: Mapping[str, str]) -> tuple[Any, dict[int, int]]:
    """A copy of the tokenizer whose control tokens have other names, also in its model's vocabulary. Also returns the
    original ids by the ids of the copy, where they differ."""
    from tokenizers import Tokenizer as Backend

    content = json.loads(backend.to_str())
    content["truncation"] = content["padding"] = None
    for token in content["added_tokens"]:
        if token["content"] in names:
            token["content"], token["special"] = names[token["content"]], False
    model = content["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        if not names.keys().isdisjoint(vocabulary):
            model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
            model["unk_token"] = names.get(model.get("unk_token"), model.get("unk_token"))
            if "merges" in model:  # without merges that make a control token from ordinary tokens
                pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
                model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    copy: Any = Backend.from_str(json.dumps(content))
    added = {token.content: number for number, token in backend.get_added_tokens_decoder().items()}
    ids = {copy.token_to_id(names.get(text, text)): number for text, number in added.items()}
    return copy, {ours: number for ours, number in ids.items() if ours != number}
