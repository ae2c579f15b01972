"""A context's manifest: what is saved, in which files, as JSON that checks itself.

What a manifest names is on the disk whole: files are written and synced before it is replaced. It is not trusted: a
damaged or edited one is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from ...tp.errors import TriforceError
from .disk import Disk
from .segments.contents import DTYPES, PACKABLE, SEGMENT, Contents, Shape
from .segments.file import SegmentFile

FILE_NAME = "manifest.json"
VERSION = 2
"""The newest format. A manifest without packed segments says 1, which older versions read too."""


class ContextError(TriforceError):
    """A saved context that is not there, damaged, in use, or another model's."""


@dataclass(frozen=True)
class Part:
    """A file with some KV heads of a segment."""

    file: str
    kv_heads: tuple[int, int]
    """The first, and the one behind the last."""
    checksum: str
    """Of the checksums within."""


@dataclass(frozen=True)
class Segment:
    """Tokens of a context that were saved together."""

    first: int
    tokens: int
    chain: str
    """Of all token ids up to the last of these; see `segments.contents.chained`."""
    parts: tuple[Part, ...]
    packed: bool = False
    """Whether keys and values are packed in its files."""
    arithmetic: tuple[int | None, ...] = (None,)
    """The numbers of the arithmetic that computed its keys and values (`kernels.arithmetic`, rank 0's), in the order
    of first use; `None` is one that is not known: a GPU's, or an earlier version's. There are several where a text
    grew: a last segment that is not full is written again with what follows it, which may be computed elsewhere."""

    @property
    def stop(self) -> int:
        return self.first + self.tokens


@dataclass(frozen=True)
class Frame:
    """What surrounds the text of a context, so that a question can be put behind it."""

    chat: bool = False
    """Whether the text stands in a user's message, as the model's chat template begins one."""
    system: str | None = None
    answered: bool = False
    """Whether it is a conversation that ends in an answer, as the model's chat template puts it."""


NO_FRAME = Frame()


@dataclass(frozen=True)
class Manifest:
    """A saved context. `tokens` are those it is to have, of which `segments` are there."""

    model: str
    """As it was named; what counts is the fingerprint."""
    fingerprint: str
    shape: Shape
    tokens: int
    created: float
    """Seconds since 1970."""
    frame: Frame = NO_FRAME
    segment_tokens: int = SEGMENT
    """Of every segment but the last, which may have fewer."""
    segments: tuple[Segment, ...] = ()

    @property
    def saved(self) -> int:
        """Tokens whose keys and values are there."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def complete(self) -> bool:
        return self.saved == self.tokens

    @property
    def kv_bytes(self) -> int:
        return self.saved * self.shape.token_bytes

    @property
    def packed_segments(self) -> int:
        return sum(segment.packed for segment in self.segments)

    @property
    def arithmetic(self) -> int | None:
        """The number of the arithmetic that computed all keys and values; `None` where that is not known, or several
        did."""
        numbers = {number for segment in self.segments for number in segment.arithmetic}
        return numbers.pop() if len(numbers) == 1 else None

    def bytes_to_write(self, tokens: int, saved: int, packed: bool) -> int:
        """What of so many tokens is still to be written, where `saved` of them are there: a last segment that is not
        full is written again with what follows it."""
        return self.shape.saved_bytes(tokens - saved // self.segment_tokens * self.segment_tokens, packed)

    def chain_before(self, index: int) -> str:
        """The chain that segment `index` goes on from."""
        return self.segments[index - 1].chain if index else self.fingerprint

    def contents(self, segment: Segment, part: Part) -> Contents:
        """What a file must hold."""
        of = segment.first, segment.tokens, segment.chain, part.kv_heads, segment.packed
        return Contents(self.shape, self.fingerprint, *of)

    def open(self, directory: Path, segment: Segment, part: Part) -> SegmentFile:
        """Raises:
        DamagedError: it is not there, or holds something else.
        """
        return SegmentFile(directory / part.file, self.contents(segment, part), part.checksum)

    def write(self, disk: Disk, directory: Path) -> None:
        """Puts it in place of the one in `directory`, durably."""
        described = {"format": VERSION if self.packed_segments else 1, **asdict(self)}
        content = json.dumps(described | {"checksum": _checksum(described)}, ensure_ascii=False, indent=1)
        disk.write_whole(directory / FILE_NAME, content.encode())

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Raises:
        ContextError: there is none, it is damaged, or a newer version wrote it.
        """
        path = directory / FILE_NAME
        try:
            raw = json.loads(path.read_bytes())
            checksum = raw.pop("checksum")
        except FileNotFoundError as error:
            raise ContextError(
                f"the context {directory.name!r} holds nothing: {path} does not exist; read the text again under this "
                "name"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(directory, str(error)) from error
        version = raw.get("format")
        if isinstance(version, int) and version > VERSION:
            raise ContextError(
                f"the context {directory.name!r} was saved by a newer triforce (format {version}; this one knows "
                f"{VERSION}); update triforce, or save it anew under another name"
            )
        if checksum != _checksum(raw) or version not in range(1, VERSION + 1):
            raise _damaged(directory, "its checksum is not that of its contents")
        try:
            return cls._from_raw(raw)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(directory, f"{type(error).__name__}: {error}") from error

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> Manifest:
        segments = tuple(
            Segment(
                *(one["first"], one["tokens"], one["chain"], tuple(map(_part, one["parts"]))),
                packed=one.get("packed", False),
                arithmetic=tuple(one.get("arithmetic", (None,))),
            )
            for one in raw["segments"]
        )
        known = {name: raw[name] for name in ("model", "fingerprint", "tokens", "created", "segment_tokens")}
        found = cls(**known, shape=Shape(**raw["shape"]), frame=Frame(**raw["frame"]), segments=segments)
        at, most, shape = 0, found.segment_tokens, found.shape
        counts = found.tokens, most, shape.num_layers, shape.num_kv_heads, shape.head_dim
        if shape.dtype not in DTYPES or not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(f"impossible numbers: {counts} in {shape.dtype}")
        float(found.created)
        for one in segments:
            whole = one.tokens == most or one is segments[-1]
            if one.first != at or not 0 < one.tokens <= most or not whole or one.stop > found.tokens:
                raise ValueError(f"its segment at {one.first} does not go on from {at}")
            if _heads(one.parts) != list(range(found.shape.num_kv_heads)):
                raise ValueError(f"its segment at {one.first} lacks KV heads")
            if one.packed not in (False, found.shape.dtype == PACKABLE):
                raise ValueError(f"its segment at {one.first} cannot be packed")
            if not all(number is None or type(number) is int for number in one.arithmetic):
                raise ValueError(f"its segment at {one.first} has no number of its arithmetic: {one.arithmetic}")
            at = one.stop
        return found


def _part(raw: dict[str, Any]) -> Part:
    name = raw["file"]
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise ValueError(f"it names the file {name!r}")
    first, stop = raw["kv_heads"]
    return Part(name, (int(first), int(stop)), raw["checksum"])


def _heads(parts: Sequence[Part]) -> list[int]:
    return [head for part in parts for head in range(*part.kv_heads)]


def _checksum(described: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())


def _damaged(directory: Path, reason: str) -> ContextError:
    name = directory.name
    return ContextError(
        f"the manifest of the context {name!r} is damaged ({reason}); remove it with: triforce contexts rm {name}"
    )
