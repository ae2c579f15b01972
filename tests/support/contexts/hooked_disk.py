"""A disk that tells what is done to it, so that a test can record it, slow it down or let it fail; and what a power cut
may leave of what was recorded."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from triforce.offload.contexts.disk import Disk

Event = tuple[Any, ...]
"""What is done, then to what: `create path number`, `write number bytes`, `seek number offset`, `sync number`,
`rename old new`, `link old new`, `remove path`, `make_directory path`, `sync_directory path`. Numbers are files in the
order of creation."""


class HookedDisk(Disk):
    """Calls `hook` before it does anything; where that raises, nothing is done."""

    def __init__(self, hook: Callable[..., object]) -> None:
        self._hook, self._files = hook, 0

    def make_directory(self, path: Path) -> None:
        if not path.is_dir():
            self.make_directory(path.parent)
            self._hook("make_directory", path)
        super().make_directory(path)

    def create(self, path: Path) -> BinaryIO:
        self._hook("create", path, self._files)
        self._files += 1
        return cast(BinaryIO, _HookedFile(super().create(path), self._files - 1, self._hook))

    def sync(self, file: BinaryIO) -> None:
        self._hook("sync", cast(_HookedFile, file).number)
        super().sync(file)

    def sync_directory(self, path: Path) -> None:
        self._hook("sync_directory", path)
        super().sync_directory(path)

    def rename(self, old: Path, new: Path) -> None:
        self._hook("rename", old, new)
        super().rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        self._hook("link", old, new)
        super().link(old, new)

    def remove(self, path: Path) -> None:
        self._hook("remove", path)
        super().remove(path)


class _HookedFile:
    def __init__(self, file: BinaryIO, number: int, hook: Callable[..., object]) -> None:
        self._file, self.number, self._hook = file, number, hook

    def write(self, content: memoryview) -> int:
        self._hook("write", self.number, bytes(content))
        return self._file.write(content)

    def seek(self, offset: int) -> int:
        self._hook("seek", self.number, offset)
        return self._file.seek(offset)

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def recording() -> tuple[HookedDisk, list[Event]]:
    """A disk, and what is done to it from now on."""
    events: list[Event] = []
    return HookedDisk(lambda *event: events.append(event)), events


def full_after(room: int) -> HookedDisk:
    """A disk that takes so many bytes more."""
    left = room

    def hook(kind: str, *of: object) -> None:
        nonlocal left
        if kind == "write":
            left -= len(cast(bytes, of[1]))
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return HookedDisk(hook)


def read_only(number: int = errno.EROFS) -> HookedDisk:
    """A disk that refuses every change with this error."""

    def hook(kind: str, *of: object) -> None:
        raise OSError(number, os.strerror(number))

    return HookedDisk(hook)


class PowerCut:
    """What a disk may hold after a power cut at the end of some events, of a store that was empty before.

    What was synced is there. Of everything else - contents, and names in each directory - anything may be.
    """

    def __init__(self, root: Path, events: Sequence[Event]) -> None:
        self._root = root
        self._names: dict[Path, int | None] = {}  # as processes see them; None: a directory
        self._synced_names: dict[Path, int | None] = {}
        self._pending: list[tuple[Path, list[tuple[Path, int | bool | None]]]] = []  # changes by directory
        self._written: dict[int, bytes] = {}
        self._place: dict[int, int] = {}  # where the next bytes go
        self._synced: dict[int, int] = {}  # bytes of each file
        for kind, *of in events:
            getattr(self, f"_{kind}")(*of)

    def _change(self, directory: Path, *changes: tuple[Path, int | bool | None]) -> None:
        _apply(self._names, changes)
        self._pending.append((directory, list(changes)))

    def _make_directory(self, path: Path) -> None:
        self._change(path.parent, (path, None))

    def _create(self, path: Path, number: int) -> None:
        self._written[number], self._synced[number], self._place[number] = b"", 0, 0
        self._change(path.parent, (path, number))

    def _write(self, number: int, content: bytes) -> None:
        at, whole = self._place[number], self._written[number]
        self._written[number] = whole[:at].ljust(at, b"\0") + content + whole[at + len(content) :]
        self._synced[number] = min(self._synced[number], at)
        self._place[number] = at + len(content)

    def _seek(self, number: int, offset: int) -> None:
        self._place[number] = offset

    def _sync(self, number: int) -> None:
        self._synced[number] = len(self._written[number])

    def _rename(self, old: Path, new: Path) -> None:
        self._change(new.parent, (old, False), (new, self._names[old]))

    def _link(self, old: Path, new: Path) -> None:
        self._change(new.parent, (new, self._names[old]))

    def _remove(self, path: Path) -> None:
        if path in self._names:
            self._change(path.parent, (path, False))

    def _sync_directory(self, path: Path) -> None:
        for directory, changes in self._pending:
            if directory == path:
                _apply(self._synced_names, changes)
        self._pending = [(directory, changes) for directory, changes in self._pending if directory != path]

    def leave(self, place: Path, how: str, rng: random.Random) -> None:
        """Writes what is left to `place`.

        Args: `how`: `lost` (nothing that was not synced), `names` (all names, no contents), `zeros` (all names, and
            zeros where contents were not synced), `kept` (everything), or `mixed` (each by chance).
        """
        names = dict(self._synced_names)
        for _, changes in self._pending:
            if how in ("names", "zeros", "kept") or (how == "mixed" and rng.random() < 0.5):
                _apply(names, changes)
        place.mkdir(parents=True)
        for path, number in sorted(names.items(), key=lambda one: len(one[0].parts)):
            there = place / path.relative_to(self._root) if path.is_relative_to(self._root) else None
            if there is None or not there.parent.is_dir():
                continue  # its directory is lost
            if number is None:
                there.mkdir(exist_ok=True)
                continue
            whole, synced = self._written[number], self._synced[number]
            kind = rng.choice(["lost", "zeros", "kept", "part"]) if how == "mixed" else how
            rest = whole[synced:]
            if kind == "zeros":
                rest = bytes(len(rest))
            elif kind == "part":
                rest = rest[: rng.randrange(len(rest) + 1)]
            elif kind != "kept":
                rest = b""
            there.write_bytes(whole[:synced] + rest)


HOWS = ("lost", "names", "zeros", "kept", "mixed", "mixed")
"""Ways in which a power cut is tried."""


def _apply(names: dict[Path, int | None], changes: Sequence[tuple[Path, int | bool | None]]) -> None:
    for path, number in changes:
        if number is False:
            names.pop(path, None)
        else:
            names[path] = cast("int | None", number)
