"""A context's manifest: what is saved, in which files, as JSON that checks itself.

What a manifest names is on the disk whole: files are written and synced before it is replaced. It is not trusted: a
damaged or edited one is refused by name.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import xxhash

from ...tp.errors import TriforceError
from .disk import Disk
from .segments.contents import DTYPES, PACKABLE, SEGMENT, Contents, Shape, StatesShape
from .segments.file import SegmentFile

FILE_NAME = "manifest.json"
VERSION = 4
"""The newest format, of manifests with states. One says the least that it needs, so that older versions read it: 3 with
layers of which the last tokens are saved, 2 with packed segments, else 1."""

MOST_BYTES = 2**24
"""Of a manifest that is read: tens of thousands of segments."""

_MOST_TOKENS = 2**31 - 1
_MOST_LAYERS = 4096
_MOST_HEADS = 4096
_MOST_HEAD_DIM = 2**16
_MOST_NUMBERS = 2**28
_MOST_ARITHMETICS = 1024
LATEST = 253_402_300_800.0
"""The end of the year 9999, in seconds since 1970."""

_HASH = re.compile("[0-9a-f]{32}")

Origin = Literal["operator", "client"]
"""Who had a context saved: whoever runs triforce on this machine, or a client of `triforce serve` (a text that was
uploaded, a prompt that `--save-prompts` saves)."""


class ContextError(TriforceError):
    """A saved context that is not there, damaged, in use, or another model's."""


@dataclass(frozen=True)
class Part:
    """A file with some heads of a segment."""

    file: str
    kv_heads: tuple[int, int]
    """The first, and the one behind the last; of states, key heads."""
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
    states: tuple[Part, ...] = ()
    """Files with the states behind the last token, of a model with linear attention."""

    @property
    def files(self) -> tuple[Part, ...]:
        return *self.parts, *self.states

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
    origin: Origin = "operator"

    @property
    def saved(self) -> int:
        """Tokens whose keys and values are there."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def complete(self) -> bool:
        return self.saved == self.tokens

    @property
    def kv_bytes(self) -> int:
        return self.shape.kv_bytes(self.saved, self.segment_tokens)

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
        missing = tokens - saved // self.segment_tokens * self.segment_tokens
        return self.shape.saved_bytes(missing, self.segment_tokens, packed)

    def chain_before(self, index: int) -> str:
        """The chain that segment `index` goes on from."""
        return self.segments[index - 1].chain if index else self.fingerprint

    def contents(self, segment: Segment, part: Part) -> Contents:
        """What a file must hold."""
        of = self.fingerprint, segment.first, segment.tokens, segment.chain, part.kv_heads
        states = self.shape.states
        if states and part in segment.states:
            return Contents(states.as_rows, *of, state_rows=states.rows)
        return Contents(self.shape, *of, segment.packed)

    def open(self, directory: Path, segment: Segment, part: Part) -> SegmentFile:
        """Raises:
        DamagedError: it is not there, or holds something else.
        """
        return SegmentFile(directory / part.file, self.contents(segment, part), part.checksum)

    def write(self, disk: Disk, directory: Path) -> None:
        """Puts it in place of the one in `directory`, durably."""
        shape = self.shape
        version = VERSION if shape.states else 3 if shape.last_tokens else 2 if self.packed_segments else 1
        described = {"format": version, **asdict(self)}
        if self.origin == "operator":
            del described["origin"]  # as in manifests of versions that know no other
        if not shape.last_tokens:
            del described["shape"]["last_tokens"]  # the same
        if not shape.states:
            for one in (described["shape"], *described["segments"]):
                del one["states"]
        content = json.dumps(described | {"checksum": _checksum(described)}, ensure_ascii=False, indent=1)
        disk.write_whole(directory / FILE_NAME, content.encode())

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Raises:
        ContextError: there is none, it is damaged, or a newer version wrote it.
        """
        try:
            raw = json.loads(_content(directory / FILE_NAME), parse_constant=_refuse_constant)
            checksum = raw.pop("checksum")
            version = _whole(raw["format"], "format", _MOST_TOKENS)
            if version <= VERSION:
                if checksum != _checksum(raw):
                    _refuse("its checksum is not that of its contents")
                return cls._from_raw(raw)
        except FileNotFoundError as error:
            raise ContextError(
                f"the context {directory.name!r} holds nothing: {directory / FILE_NAME} does not exist; read the text "
                "again under this name"
            ) from error
        except Exception as error:  # it may hold anything
            reason = getattr(error, "strerror", None) or str(error)
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            raise _damaged(directory, kind + reason) from error
        raise ContextError(
            f"the context {directory.name!r} was saved by a newer triforce (format {version}; this one knows "
            f"{VERSION}); update triforce, or save it anew under another name"
        )

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> Manifest:
        """Raises:
        Exception: it is not what `write` writes.
        """
        shape = _shape(raw["shape"])
        tokens = _whole(raw["tokens"], "tokens", _MOST_TOKENS)
        most = _whole(raw["segment_tokens"], "segment_tokens", _MOST_TOKENS)
        described = raw["segments"]
        segments: list[Segment] = []
        at = 0
        for index, one in enumerate(described):
            segment = _segment(one, shape)
            is_last = index == len(described) - 1
            whole = segment.tokens == most or is_last
            if segment.first != at or segment.tokens > most or not whole or segment.stop > tokens:
                _refuse(f"its segment at {segment.first} does not go on from {at}")
            segments.append(segment)
            at = segment.stop
        files = [part.file for segment in segments for part in segment.files]
        if len(set(files)) < len(files):
            _refuse("it names a file twice")
        frame = raw["frame"]
        system = frame["system"]
        return cls(
            _name(raw["model"]),
            _hash(raw["fingerprint"], "fingerprint"),
            shape,
            tokens,
            _date(raw["created"]),
            Frame(
                _truth(frame["chat"], "chat"),
                None if system is None else _text(system, "system", MOST_BYTES),
                _truth(frame["answered"], "answered"),
            ),
            most,
            tuple(segments),
            _origin(raw.get("origin", "operator")),
        )


def _content(path: Path) -> bytes:
    """The bytes of a manifest, no more than one can have; of a file, and not of something that never ends.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            _refuse("it is not a file")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        _refuse(f"it has more than {MOST_BYTES:,} bytes")
    return content


def _segment(raw: dict[str, Any], shape: Shape) -> Segment:
    first = _whole(raw["first"], "first", _MOST_TOKENS, least=0)
    parts = _parts(raw["parts"], shape.num_kv_heads, f"its segment at {first}")
    key_heads = shape.states.key_heads if shape.states else 0
    states = _parts(raw.get("states", []), key_heads, f"the states of its segment at {first}")
    packed = _truth(raw.get("packed", False), "packed")
    if packed and shape.dtype != PACKABLE:
        _refuse(f"its segment at {first} cannot be packed")
    numbers = raw.get("arithmetic", [None])
    if type(numbers) is not list or not 0 < len(numbers) <= _MOST_ARITHMETICS:
        _refuse_value("arithmetic", numbers)
    arithmetic = tuple(one if one is None else _whole(one, "arithmetic", 2**63, least=0) for one in numbers)
    tokens = _whole(raw["tokens"], "tokens", _MOST_TOKENS)
    return Segment(first, tokens, _hash(raw["chain"], "chain"), parts, packed, arithmetic, states)


def _parts(raw: list[Any], num_heads: int, of: str) -> tuple[Part, ...]:
    """Files that have all of so many heads, each once."""
    parts, at = tuple(map(_part, raw)), 0
    for part in parts:
        if part.kv_heads[0] != at or part.kv_heads[1] <= at:
            _refuse(f"{of} has heads {part.kv_heads} behind {at}")
        at = part.kv_heads[1]
    if at != num_heads:
        _refuse(f"{of} has {at} heads instead of {num_heads}")
    return parts


def _part(raw: dict[str, Any]) -> Part:
    name = _text(raw["file"], "file", 255)
    if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
        _refuse_value("file", name)
    first, stop = raw["kv_heads"]
    heads = _whole(first, "kv_heads", _MOST_HEADS, least=0), _whole(stop, "kv_heads", _MOST_HEADS)
    return Part(name, heads, _hash(raw["checksum"], "checksum"))


def _shape(raw: dict[str, Any]) -> Shape:
    layers = _whole(raw["num_layers"], "num_layers", _MOST_LAYERS)
    heads = _whole(raw["num_kv_heads"], "num_kv_heads", _MOST_HEADS)
    head_dim = _whole(raw["head_dim"], "head_dim", _MOST_HEAD_DIM)
    dtype = _text(raw["dtype"], "dtype")
    if dtype not in DTYPES:
        _refuse(f"impossible numbers: {reprlib.repr(dtype)}")
    given = raw.get("last_tokens", [])
    if type(given) is not list or len(given) not in (0, layers):
        _refuse_value("last_tokens", given)
    last_tokens = tuple(_whole(one, "last_tokens", _MOST_TOKENS, least=0) for one in given)
    states = raw.get("states")
    return Shape(layers, heads, head_dim, dtype, last_tokens, None if states is None else _states(states))


def _states(raw: dict[str, Any]) -> StatesShape:
    return StatesShape(
        _whole(raw["num_layers"], "num_layers", _MOST_LAYERS),
        _whole(raw["key_heads"], "key_heads", _MOST_HEADS),
        _whole(raw["numbers"], "numbers", _MOST_NUMBERS),
    )


def _whole(value: object, name: str, most: int, least: int = 1) -> int:
    """Raises:
    ValueError: it is no whole number from `least` to `most`.
    """
    if type(value) is not int or not least <= value <= most:
        _refuse(f"impossible numbers: {name} is {reprlib.repr(value)}")
    return value


def _text(value: object, name: str, most: int = 4096) -> str:
    """Raises:
    ValueError: it is no text of at most so many letters that UTF-8 can hold.
    """
    if type(value) is not str or len(value) > most or any("\ud800" <= letter <= "\udfff" for letter in value):
        _refuse_value(name, value)
    return value


def _name(value: object) -> str:
    """The name of a model, which is printed: nothing that a terminal would act on."""
    name = _text(value, "model")
    if any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in name):
        _refuse_value("model", name)
    return name


def _origin(value: object) -> Origin:
    if value == "operator":
        return "operator"
    if value != "client":
        _refuse_value("origin", value)
    return "client"


def _hash(value: object, name: str) -> str:
    if type(value) is not str or not _HASH.fullmatch(value):
        _refuse_value(name, value)
    return value


def _truth(value: object, name: str) -> bool:
    if type(value) is not bool:
        _refuse_value(name, value)
    return value


def _date(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LATEST:
        _refuse_value("created", value)
    return value


def _refuse_constant(name: str) -> NoReturn:
    _refuse(f"it holds {name}")


def _refuse_value(name: str, value: object) -> NoReturn:
    _refuse(f"its {name} cannot be {reprlib.repr(value)}")


def _refuse(reason: str) -> NoReturn:
    raise ValueError(reason)


def _checksum(described: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())


def _damaged(directory: Path, reason: str) -> ContextError:
    name = directory.name
    return ContextError(
        f"the manifest of the context {name!r} is damaged ({reason}); remove it with: triforce contexts rm {name}"
    )
