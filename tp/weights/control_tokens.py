"""Control tokens that a text spells stay text: only a chat template makes them.

Control tokens are a tokenizer's special added tokens, such as `<|eot_id|>`. Content (of a user, a file, a client, the
model) that spells one holds a mark in its place, from `as_content` until `encode` puts the characters back. So rendered
text travels as one `str`, and what a template spelled is told from what its content spelled.

Marks are private-use characters around random digits of this process: nobody outside can spell one, and no template
takes one for white space, a word or a line end.
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
"""Marks hold the bytes of what is spelled as private-use characters from here on."""
_MARK = re.compile(f"\ue000{_NONCE}([{chr(_BYTE)}-{chr(_BYTE + 255)}]+)\ue001")


def _mark(text: str) -> str:
    held = "".join(chr(_BYTE + byte) for byte in text.encode("utf-8", "surrogatepass"))
    return f"\ue000{_NONCE}{held}\ue001"


def has_marks(text: str) -> bool:
    """Whether content in `text` spells a control token."""
    return _NONCE in text


def without_marks(text: str) -> str:
    """`text` as its author wrote it."""

    def written(mark: re.Match[str]) -> str:
        return bytes(ord(char) - _BYTE for char in mark[1]).decode("utf-8", "surrogatepass")

    return _MARK.sub(written, text) if has_marks(text) else text


class _Found(NamedTuple):
    """Where a control token stands in a text."""

    token: int
    start: int
    """With the white space before it that it takes."""
    first: int
    """Of its own letters."""
    last: int
    """Behind its own letters."""
    end: int
    """With the white space behind it that it takes."""


class ControlTokens:
    """The control tokens of a vocabulary: finds them in texts."""

    def __init__(self, added: Mapping[int, Any], normalizer: Any = None, special: Collection[str] = ()) -> None:
        """Args:
        added: the tokenizer's added tokens (`tokenizers.AddedToken`), by their ids; the special ones are meant.
        normalizer: the tokenizer's, if it has one.
        special: contents of further ones that are meant.
        """
        self._added, self._normalizer = added, normalizer
        self.contents: dict[int, str] = {
            token: given.content
            for token, given in added.items()
            if given.content and (given.special or given.content in special)
        }
        """How each is spelled, by its id."""
        self._is_normalized = normalizer is not None and any(added[token].normalized for token in self.contents)
        self._beginnings = {text[:size] for text in self.contents.values() for size in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    def as_content(self, text: str) -> str:
        """`text` with a mark in place of each control token that it spells, and of one that it begins at its end: what
        stands behind it may spell the rest. Most texts come back as they are.
        """
        if self._is_normalized or any(content in text for content in self.contents.values()):
            before = None
            while before != text:  # where letters became a mark, what is beside them may be a whole word now
                before = text
                text = "".join(piece if token is None else _mark(piece) for piece, token in self._pieces(text))
        end = len(text.rstrip())
        for size in range(min(self._longest, end), 0, -1):
            if text[end - size : end] in self._beginnings:
                return text[: end - size] + _mark(text[end - size : end]) + text[end:]
        return text

    def replaced(self, text: str, names: Mapping[int, str]) -> str:
        """A text with marks as it was written, but for the control tokens outside of marks, which get other names."""
        return "".join(without_marks(piece) if token is None else names[token] for piece, token in self._pieces(text))

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """What stands between the control tokens outside of marks, as it was written, and these (text and id), in
        order."""
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
        # In a batch of one: it lets other threads run meanwhile.
        encoding = self._finder.encode_batch([text], add_special_tokens=False)[0]
        for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._by_number[number]
            if token in self.contents:
                taken, content = text[start:end], self.contents[token]
                if content not in taken:  # what the normalizer makes of it is the token
                    content = taken.strip()
                first = start + taken.index(content)
                yield _Found(token, start, first, first + len(content), end)

    @cached_property
    def _finder(self) -> Any:
        """A tokenizer that knows nothing but the added tokens, and so finds them as the real one does: with their white
        space, whole words only, or as normalized."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import models

        finder = Backend(models.BPE())
        if self._normalizer is not None:
            finder.normalizer = self._normalizer
        finder.add_tokens([token for _, token in sorted(self._added.items())])
        return finder

    @cached_property
    def _by_number(self) -> dict[int, int]:
        """Ids by those of the finder."""
        return {self._finder.token_to_id(token.content): number for number, token in self._added.items()}


def backend_encode(backend: Any, tokens: ControlTokens) -> Callable[[str, bool], list[int]]:
    """What encodes texts with marks by a tokenizer of the library `tokenizers`.

    A second one, made when it is first needed, has other names for the control tokens, which nobody can spell. What the
    template spelled gets these names, so one text is encoded as a whole, with each word beside its neighbours.
    """
    names = {token: f"\ue002{_NONCE}{token}\ue003" for token in tokens.contents}
    made: list[tuple[Any, dict[int, int]]] = []

    def encode(text: str, special: bool) -> list[int]:
        if not made:
            made.append(_renamed(backend, {tokens.contents[token]: name for token, name in names.items()}))
        renamed, ids = made[0]
        # In one batch: it lets other threads run meanwhile.
        found: list[int] = renamed.encode_batch_fast([tokens.replaced(text, names)], add_special_tokens=special)[0].ids
        return [ids.get(token, token) for token in found]

    return encode


def _renamed(backend: Any, names: Mapping[str, str]) -> tuple[Any, dict[int, int]]:
    """A copy whose control tokens have other names, in its model's vocabulary too; ids of ours by those of the copy,
    where they differ."""
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
            if "merges" in model:  # one that makes a control token of ordinary ones
                pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
                model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    copy: Any = Backend.from_str(json.dumps(content))
    added = {token.content: number for number, token in backend.get_added_tokens_decoder().items()}
    ids = {copy.token_to_id(names.get(text, text)): number for text, number in added.items()}
    return copy, {ours: number for ours, number in ids.items() if ours != number}
