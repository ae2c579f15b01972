"""The manifest of a saved context: a JSON file that lists the segments and their files, with a checksum of itself.

Every file that a manifest names is completely on the disk: files are written and synced before the manifest is
replaced. A manifest is checked when it is read. A damaged or edited manifest is refused, with an error that names the
context.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import stat
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn

import xxhash

from ...tp.errors import TriforceError
from .disk import Disk
from .segments.contents import DTYPES, PACKABLE, SEGMENT, Contents, Shape, StatesShape
from .segments.file import SegmentFile

FILE_NAME = "manifest.json"
VERSION = 4
"""The newest format, for manifests with states. A manifest has the lowest format that is sufficient, so that older
versions can read it: 3 if only the last tokens of some layers are saved, 2 with packed segments, else 1."""

MOST_BYTES = 2**24
"""Maximum size of a manifest: enough for tens of thousands of segments."""

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
"""Who had a context saved: the user who runs triforce on this machine (`operator`), or a client of `triforce serve`
(`client`: a text that was uploaded, or a prompt that `--save-prompts` saves)."""


class ContextError(TriforceError):
    """A saved context cannot be used or saved: it is missing, damaged or in use, or belongs to another model."""


@dataclass(frozen=True)
class Part:
    """A file of a segment. It holds some of the model's heads."""

    file: str
    """The name of the file, in the context's directory."""
    kv_heads: tuple[int, int]
    """The first KV head in the file, and the last plus 1. In a file with states: key heads."""
    checksum: str
    """A checksum of the checksums in the file."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a context that were saved together."""

    first: int
    """Position of the first token."""
    tokens: int
    chain: str
    """A hash of all token ids from the start of the context to the segment's end; see `segments.contents.chained`."""
    parts: tuple[Part, ...]
    """The files with keys and values."""
    packed: bool = False
    """Whether keys and values are packed in its files."""
    arithmetic: tuple[int | None, ...] = (None,)
    """Which arithmetic computed its keys and values: the numbers that `kernels.arithmetic` gave on rank 0, in the order
    of first use. `None` is an unknown number: that of a GPU, or of an earlier version. There can be several numbers if
    text was added: a last segment that is not full is written again together with the new tokens, and these may be
    computed with another arithmetic."""
    states: tuple[Part, ...] = ()
    """The files with the states after the last token, if the model has linear attention."""

    @property
    def files(self) -> tuple[Part, ...]:
        """All files of the segment."""
        return *self.parts, *self.states

    @property
    def stop(self) -> int:
        """Position of the last token plus 1."""
        return self.first + self.tokens


@dataclass(frozen=True)
class Frame:
    """What surrounds the text of a context in the chat template. A question after the text needs the same frame."""

    chat: bool = False
    """Whether the text is the beginning of a user's message, in the format of the model's chat template."""
    system: str | None = None
    """The system message before the text."""
    answered: bool = False
    """Whether it is a conversation that ends with an answer, in the format of the model's chat template."""


NO_FRAME = Frame()


@dataclass(frozen=True)
class Manifest:
    """The description of a saved context."""

    model: str
    """The name of the model when the context was saved. Only the fingerprint decides whether a model may use it."""
    fingerprint: str
    shape: Shape
    tokens: int
    """Tokens of the complete context. Fewer may be saved, see `saved`."""
    created: float
    """Seconds since 1970."""
    frame: Frame = NO_FRAME
    segment_tokens: int = SEGMENT
    """Tokens of each segment, except the last one, which may have fewer."""
    segments: tuple[Segment, ...] = ()
    """The segments that are saved."""
    origin: Origin = "operator"

    @property
    def saved(self) -> int:
        """Number of tokens whose keys and values are saved."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def complete(self) -> bool:
        """Whether all tokens are saved."""
        return self.saved == self.tokens

    @property
    def kv_bytes(self) -> int:
        """Bytes of the saved keys, values and states, not packed."""
        return self.shape.kv_bytes(self.saved, self.segment_tokens)

    @property
    def packed_segments(self) -> int:
        """Number of the segments that are packed."""
        return sum(segment.packed for segment in self.segments)

    @property
    def arithmetic(self) -> int | None:
        """The number of the arithmetic that computed all keys and values; `None` if it is unknown, or if there are
        several."""
        numbers = {number for segment in self.segments for number in segment.arithmetic}
        return numbers.pop() if len(numbers) == 1 else None

    def bytes_to_write(self, tokens: int, saved: int, packed: bool) -> int:
        """About how many bytes must be written to save `tokens` tokens, if the first `saved` of them are saved already.
        A last segment that is not full is written again together with the tokens after it."""
        missing = tokens - saved // self.segment_tokens * self.segment_tokens
        return self.shape.saved_bytes(missing, self.segment_tokens, packed)

    def chain_before(self, index: int) -> str:
        """The chain before segment `index`: that of the segment before it, or the fingerprint for the first segment."""
        return self.segments[index - 1].chain if index else self.fingerprint

    def contents(self, segment: Segment, part: Part) -> Contents:
        """What the file of a segment must hold."""
        of = self.fingerprint, segment.first, segment.tokens, segment.chain, part.kv_heads
        states = self.shape.states
        if states and part in segment.states:
            return Contents(states.as_rows, *of, state_rows=states.rows)
        return Contents(self.shape, *of, segment.packed)

    def open(self, directory: Path, segment: Segment, part: Part) -> SegmentFile:
        """Opens a file of a segment.

        Raises:
            DamagedError: the file is missing, or holds something else.
        """
        return SegmentFile(directory / part.file, self.contents(segment, part), part.checksum)

    def write(self, disk: Disk, directory: Path) -> None:
        """Replaces the manifest in `directory` durably.

        Raises:
            OSError: the manifest cannot be written.
        """
        shape = self.shape
        version = VERSION if shape.states else 3 if shape.last_tokens else 2 if self.packed_segments else 1
        described = {"format": version, **asdict(self)}
        if self.origin == "operator":
            del described["origin"]  # earlier versions, which know only this origin, have no such entry
        if not shape.last_tokens:
            del described["shape"]["last_tokens"]  # earlier versions have no such entry either
        if not shape.states:
            for one in (described["shape"], *described["segments"]):
                del one["states"]
        content = json.dumps(described | {"checksum": _checksum(described)}, ensure_ascii=False, indent=1)
        disk.write_whole(directory / FILE_NAME, content.encode())

    @staticmethod
    def load(directory: Path) -> Manifest:
        """Reads the manifest in `directory` and checks it.

        Raises:
            ContextError: there is no manifest, it is damaged, or a newer version wrote it.
        """
        try:
            version, found = _parsed(_content(directory / FILE_NAME))
            if found:
                return found
        except FileNotFoundError as error:
            raise ContextError(
                f"the context {directory.name!r} holds nothing: {directory / FILE_NAME} does not exist; read the text "
                "again under this name"
            ) from error
        except Exception as error:  # a damaged manifest can cause any exception
            reason = getattr(error, "strerror", None) or str(error)
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            raise _damaged(directory, kind + reason) from error
        raise ContextError(
            f"the context {directory.name!r} was saved by a newer triforce (format {version}; this one knows "
            f"{VERSION}); update triforce, or save it anew under another name"
        )

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> Manifest:
        """The manifest that this JSON describes.

        Raises:
            Exception: the JSON is not what `write` writes.
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


@lru_cache(maxsize=4)
def _parsed(content: bytes) -> tuple[int, Manifest | None]:
    """The version of a manifest's format and the manifest, if this version is known. Cached, because each question
    about a context reads its manifest twice.

    Raises:
        Exception: the content is not what `Manifest.write` writes.
    """
    raw = json.loads(content, parse_constant=_refuse_constant)
    checksum = raw.pop("checksum")
    version = _whole(raw["format"], "format", _MOST_TOKENS)
    if version > VERSION:
        return version, None
    if checksum != _checksum(raw):
        _refuse("its checksum is not that of its contents")
    return version, Manifest._from_raw(raw)


def _content(path: Path) -> bytes:
    """The bytes of a manifest, at most `MOST_BYTES`. Only a regular file is read: a pipe or a device might never end.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a regular file, or it is too large.
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
    """The files of a segment. Together they must have each of `num_heads` heads once, in order.

    Raises:
        Exception: they do not, or the JSON is not what `write` writes.
    """
    parts, at = tuple(map(_part, raw)), 0
    for part in parts:
        if part.kv_heads[0] != at or part.kv_heads[1] <= at:
            _refuse(f"{of} has heads {part.kv_heads} where head {at} must come next")
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
    """The value, if it is a whole number from `least` to `most`.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not int or not least <= value <= most:
        _refuse(f"impossible numbers: {name} is {reprlib.repr(value)}")
    return value


def _text(value: object, name: str, most: int = 4096) -> str:
    """The value, if it is a text of at most `most` characters that UTF-8 can encode.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not str or len(value) > most or any("\ud800" <= letter <= "\udfff" for letter in value):
        _refuse_value(name, value)
    return value


def _name(value: object) -> str:
    """The name of a model. It must not contain control characters, because it is printed on a terminal."""
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
