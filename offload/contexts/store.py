"""The saved contexts of a user: a directory for each, found by name, or by the token ids that they begin with."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from ...tp.errors import UsageError
from ...tp.home import disk_usage
from ...tp.units import gib
from .disk import Disk
from .manifest import FILE_NAME, LATEST, ContextError, Manifest, Origin, Segment
from .segments.contents import SEGMENT, DamagedError, Shape, chained

_LOCKS = ".locks"
"""The directory of the locks: not in the contexts' own, which may be removed."""

_LONGEST_NAME = 240
"""Bytes in UTF-8: file systems take up to 255, and its lock's name is longer."""

_DIFFERENT_END = 16
"""Last tokens of a context that may differ from those of its text grown longer: words are cut into tokens together."""

_NAME = re.compile(r"\w[\w .+@=-]{0,99}")

_MARKER = ".triforce-context"
"""An empty file in directories that the store has made: nothing of others is removed as a whole."""

_WRITTEN = re.compile(
    r"\d+-\d+\.[hs]\d+-\d+\.\w+\.safetensors|\..+\.safetensors\.new|\.manifest\.json\.new|\.\w+\.probe"
)
"""Files that the store writes into a context's directory, beside the manifest and the marker."""

_LEAST_RESERVE, _MOST_RESERVE = 2**30, 10 * 2**30
"""Bytes; see `ContextStore.reserve_bytes`."""


class DamagedContextError(ContextError):
    """A segment of a saved context is damaged."""


@dataclass(frozen=True)
class SavedPrefix:
    """The leading tokens of a prompt that are saved, and where."""

    directory: Path
    manifest: Manifest
    tokens: int

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Those that hold the tokens; of the last one perhaps a part."""
        return tuple(one for one in self.manifest.segments if one.first < self.tokens)


class ContextStore:
    """A directory of saved contexts. It holds no state: other processes may change it at any time."""

    def __init__(
        self, root: Path, most_bytes: int | None = None, *, segment_tokens: int = SEGMENT, disk: Disk | None = None
    ) -> None:
        """Args:
        most_bytes: what all contexts together may take on the disk.
        segment_tokens: of the segments of new contexts.
        """
        self.root, self.most_bytes, self.segment_tokens = root, most_bytes, segment_tokens
        self.disk = disk or Disk()

    def directory(self, name: str) -> Path:
        """Where the context of this name is, or would be.

        Raises:
            UsageError: a name that no context can have.
        """
        if not _is_name(name):
            raise UsageError(
                f"{name!r} cannot be the name of a context: a name has up to 100 letters, digits, spaces and any of "
                f"_.+@=- (at most {_LONGEST_NAME} bytes), and begins with a letter or a digit"
            )
        return self.root / name

    def names(self) -> list[str]:
        """The contexts that are there, complete or not."""
        try:
            return sorted(one.name for one in self.root.iterdir() if _is_name(one.name) and _exists(one / FILE_NAME))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ContextError(f"the contexts in {self.root} cannot be listed: {error.strerror or error}") from error

    def holds(self, name: str) -> bool:
        """Whether there is a context of this name, or what is left of one.

        Raises:
            UsageError: an impossible name.
        """
        directory = self.directory(name)
        return _exists(directory / FILE_NAME) or _exists(directory / _MARKER)

    def load(self, name: str) -> Manifest:
        """Raises:
        UsageError: an impossible name.
        ContextError: there is no such context, or its manifest is damaged or too new.
        """
        directory = self.directory(name)
        if not _is_directory(directory):
            known = ", ".join(self.names()) or "none"
            raise ContextError(f"there is no context {name!r} in {self.root}; there are: {known}")
        return Manifest.load(directory)

    def token_ids(self, name: str) -> list[int]:
        """The token ids of a context, as far as it is saved.

        Raises:
            ContextError: as `load`, or a segment is damaged.
        """
        manifest = self.load(name)
        return [token for index in range(len(manifest.segments)) for token in self._ids(name, manifest, index)]

    def _ids(self, name: str, manifest: Manifest, index: int) -> list[int]:
        segment = manifest.segments[index]
        try:
            with manifest.open(self.directory(name), segment, segment.parts[0]) as file:
                return file.token_ids(manifest.chain_before(index))
        except DamagedError as error:
            raise damaged(name, segment, segment.parts[0].file, error) from error

    def prefix_of(self, name: str, fingerprint: str, shape: Shape, token_ids: Sequence[int]) -> SavedPrefix | None:
        """What the context of this name shares with a prompt; `None` if that is nothing.

        Args: `fingerprint` and `shape` are those of the model's keys and values.

        Raises:
            ContextError: as `load`; it is another model's; or what it shares cannot be told as a segment is damaged.
        """
        manifest = self.load(name)
        if manifest.fingerprint != fingerprint:
            raise ContextError(
                f"the context {name!r} was read by another model than this one: {manifest.model} in "
                f"{manifest.shape.dtype} (fingerprint {manifest.fingerprint[:8]}, not {fingerprint[:8]}); give the "
                "--model and --dtype that it was read with, or read the text again under another name"
            )
        if manifest.shape != shape:
            raise ContextError(
                f"the manifest of the context {name!r} is damaged (its shape is not that of its model); remove it "
                f"with: triforce contexts rm {name}"
            )
        shared = 0
        for index, segment in enumerate(manifest.segments):
            wanted = token_ids[segment.first : segment.stop]
            if len(wanted) == segment.tokens and chained(manifest.chain_before(index), wanted) == segment.chain:
                shared = segment.stop
                continue
            saved = self._ids(name, manifest, index)
            pairs = enumerate(zip(saved, wanted, strict=False))
            shared += next((i for i, (have, want) in pairs if have != want), min(len(saved), len(wanted)))
            break
        return SavedPrefix(self.directory(name), manifest, shared) if shared else None

    def saved_of(
        self, name: str, fingerprint: str, shape: Shape, token_ids: Sequence[int]
    ) -> tuple[SavedPrefix | None, int]:
        """What is saved of a text under a name that it is to have: what the two share, and how many tokens that is.

        Args: `fingerprint` and `shape` are those of the model's keys and values.

        Raises:
            ContextError: as `prefix_of`; or another text has the name, or that cannot be told.
        """
        if not _exists(self.directory(name) / FILE_NAME):
            return None, 0
        try:
            prefix = self.prefix_of(name, fingerprint, shape, token_ids)
        except DamagedContextError as error:
            raise ContextError(
                f"whether the context {name!r} holds this text cannot be told, as its token ids are damaged; give "
                f"another name, or remove it with: triforce contexts rm {name}"
            ) from error
        shared = prefix.tokens if prefix else 0
        saved = prefix.manifest.saved if prefix else self.load(name).saved
        grown = len(token_ids) > saved and saved - shared <= min(_DIFFERENT_END, saved // 2)
        if shared < min(saved, len(token_ids)) and not grown:
            raise ContextError(
                f"the context {name!r} holds another text: it differs from this one at token {shared:,}; give another "
                f"name, or remove it with: triforce contexts rm {name}"
            )
        return prefix, shared

    def find(self, fingerprint: str, shape: Shape, token_ids: Sequence[int], least: int) -> SavedPrefix | None:
        """The context that shares the most leading tokens with a prompt, if it shares at least so many; of several the
        one used last. Damaged ones and other models' are passed over."""
        found: list[tuple[int, float, SavedPrefix]] = []
        for name in self.names():
            try:
                prefix = self.prefix_of(name, fingerprint, shape, token_ids)
            except (ContextError, OSError):
                continue
            if prefix and prefix.tokens >= least:
                found.append((prefix.tokens, self.used(name), prefix))
        return max(found, key=lambda one: one[:2])[2] if found else None

    def any_of_shape(self, shape: Shape) -> bool:
        """Whether some context has keys and values of this shape, so that a fingerprint is worth its time."""
        for name in self.names():
            try:
                if self.load(name).shape == shape:
                    return True
            except ContextError:
                continue
        return False

    def used(self, name: str) -> float:
        """When a context was last saved or restored, in seconds since 1970; 0 if that is not known."""
        try:
            when = (self.directory(name) / FILE_NAME).stat().st_mtime
        except OSError:
            return 0.0
        return when if 0 <= when < LATEST else 0.0

    def note_use(self, name: str) -> None:
        """Notes that a context is used now."""
        with suppress(OSError):  # a read-only store serves as well
            os.utime(self.directory(name) / FILE_NAME)

    def disk_bytes(self, names: Sequence[str] | None = None) -> int:
        """What contexts take on the disk, all of them by default; files that several share count once."""
        sizes: dict[tuple[int, int], int] = {}
        for name in self.names() if names is None else names:
            for path in self._files(name):
                try:
                    stat = path.stat()
                except OSError:
                    continue
                sizes[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
        return sum(sizes.values())

    def free_bytes(self) -> int:
        """What the disk has room for."""
        return disk_usage(self.root).free

    def reserve_bytes(self) -> int:
        """What clients of a server leave free of the disk: 2 % of it, but at least 1 GiB and at most 10 GiB, and never
        more than a tenth of it."""
        total = disk_usage(self.root).total
        return min(max(total // 50, _LEAST_RESERVE), _MOST_RESERVE, total // 10)

    def check_reserve(self, needed: int) -> None:
        """Raises:
        ContextError: with so many bytes more the disk would have less than the reserve free.
        """
        free, reserve = self.free_bytes(), self.reserve_bytes()
        if needed + reserve > free:
            raise ContextError(
                f"{gib(needed)} are needed in {self.root}, which has {gib(free)} free, and {gib(reserve)} must stay "
                "free beside what clients save; free some: triforce contexts prune --keep SIZE"
            )

    def _files(self, name: str) -> list[Path]:
        try:
            return list(self.directory(name).iterdir())
        except OSError:
            return []

    @contextmanager
    def locked(self, name: str) -> Iterator[Path]:
        """Keeps other processes from changing a context. Its directory, made if it is not there, and removed in the
        end if it holds no context; what is not the store's own stays.

        Raises:
            UsageError: an impossible name.
            ContextError: another process is saving it, or the place cannot be written.
        """
        directory = self.directory(name)
        try:
            self.disk.make_directory(self.root / _LOCKS)
            with FileLock(self.root / _LOCKS / f"{name}.lock", timeout=0, mode=0o600):
                made = self._make_marked(directory)
                try:
                    yield directory
                finally:
                    if not _exists(directory / FILE_NAME):  # nothing was saved, or all of it was removed
                        self._clear(directory, made)
        except Timeout as error:
            raise ContextError(
                f"the context {name!r} is being saved or removed by another process; wait for it, or take another name"
            ) from error
        except OSError as error:
            raise ContextError(f"{directory} cannot be written: {error.strerror or error}") from error

    def _make_marked(self, directory: Path) -> bool:
        """Makes a context's directory and marks it; whether it was not there. One that was gets the mark if it holds a
        context."""
        made = not _is_directory(directory)
        self.disk.make_directory(directory)
        if made or (_exists(directory / FILE_NAME) and not _exists(directory / _MARKER)):
            # a full disk must not keep a context from being removed
            with suppress(OSError):
                (directory / _MARKER).touch()
                (directory / _MARKER).chmod(0o600)  # whatever the umask
        return made

    def _clear(self, directory: Path, made: bool) -> None:
        """Removes what the store wrote into a directory that holds no context, and the directory if it was `made` or is
        marked and nothing else is in it. The mark goes last."""
        with suppress(OSError):
            for path in [path for path in directory.iterdir() if _WRITTEN.fullmatch(path.name)]:
                self.disk.remove(path)
            left = {path.name for path in directory.iterdir()}
            if left == {_MARKER} or (made and not left):
                self.disk.remove(directory / _MARKER)
                directory.rmdir()

    def remove(self, name: str) -> None:
        """Raises:
        UsageError, ContextError: there is no such context, or it is in use.
        """
        if not self.holds(name):
            self.load(name)
        with self.locked(name) as directory, open(self._use_file(name), "ab") as use:
            try:
                fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ContextError(f"the context {name!r} is being restored by another process; wait for it") from error
            # The manifest goes first, the rest as `locked` ends: whatever happens, no context lacks files.
            self.disk.remove(directory / FILE_NAME)
            self.disk.sync_directory(directory)

    @contextmanager
    def in_use(self, name: str) -> Iterator[None]:
        """Keeps a context from being removed while it is restored, by any number of processes; a read-only store needs
        no keeping."""
        with ExitStack() as stack:
            with suppress(OSError):
                self.disk.make_directory(self.root / _LOCKS)
                fcntl.flock(stack.enter_context(open(self._use_file(name), "ab")), fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield

    def _use_file(self, name: str) -> Path:
        return self.root / _LOCKS / f"{name}.use"

    def tidy(self, name: str, segments: Sequence[Segment], salt: str = "") -> None:
        """Removes the files of a context that are not of `segments`, those that its manifest has: superseded ones, and
        what runs that were killed left. Whoever calls it has locked the context.

        Args: `salt` is in the names of files that are being written, by this rank and by others that may be ahead.
        """
        named = {FILE_NAME, *(part.file for segment in segments for part in segment.files)}
        for path in self._files(name):
            if _WRITTEN.fullmatch(path.name) and path.name not in named and not (salt and f".{salt}." in path.name):
                with suppress(OSError):  # it takes room, no more
                    self.disk.remove(path)

    def prune(self, most_bytes: int, keep: Sequence[str] = ()) -> list[str]:
        """Removes contexts, the one used longest ago first, until the others take at most so many bytes; never `keep`,
        nor one that another process is saving. Their names."""
        removed: list[str] = []
        self._remove_remains()
        for name in sorted(self.names(), key=self.used):
            if self.disk_bytes() <= most_bytes:
                break
            if name in keep:
                continue
            try:
                self.remove(name)
            except ContextError:
                continue
            removed.append(name)
        return removed

    def of_operator(self) -> list[str]:
        """The contexts that no client of a server had saved, and those whose manifest is damaged."""
        return [name for name in self.names() if self.origin_of(name) != "client"]

    def origin_of(self, name: str) -> Origin | None:
        """Who had a context saved; `None` where there is none, or its manifest is damaged."""
        try:
            return self.load(name).origin
        except ContextError:
            return None

    def claim(self, name: str) -> None:
        """Makes a context that a client had saved the operator's. Whoever calls it has locked the context.

        Raises:
            ContextError: see `load`.
            OSError: it cannot be written.
        """
        manifest = self.load(name)
        if manifest.origin != "operator":
            replace(manifest, origin="operator").write(self.disk, self.directory(name))

    def _remove_remains(self) -> None:
        """Removes directories that were contexts: their manifest is gone, the rest was not removed any more. One that
        is copied here just now lacks its manifest, too: what has changed within the hour stays."""
        with suppress(OSError):
            for directory in self.root.iterdir():
                if _is_name(directory.name) and self._is_remains(directory):
                    with suppress(ContextError), self.locked(directory.name):
                        pass  # its end removes what the store has written

    def _is_remains(self, directory: Path) -> bool:
        try:
            old = time.time() - directory.lstat().st_mtime > 3600
        except OSError:
            return False
        return old and _exists(directory / _MARKER) and not _exists(directory / FILE_NAME)

    def verify(self, name: str) -> Iterator[tuple[Segment, str | None]]:
        """Checks every checksum of a context: of each segment, what is wrong with it, if anything.

        Raises:
            ContextError: see `load`.
        """
        manifest = self.load(name)
        for index, segment in enumerate(manifest.segments):
            wrong = None
            for part in segment.files:
                try:
                    with manifest.open(self.directory(name), segment, part) as file:
                        if part in segment.parts:
                            file.token_ids(manifest.chain_before(index))
                        for layer in range(file.contents.shape.num_layers):
                            for head in range(*part.kv_heads):
                                file.check(layer, head)
                except DamagedError as error:
                    wrong = f"{part.file}: {error}"
            yield segment, wrong


def _is_name(name: str) -> bool:
    """Whether a context can have this name."""
    return bool(_NAME.fullmatch(name)) and not name.endswith(" ") and len(name.encode()) <= _LONGEST_NAME


def _exists(path: Path) -> bool:
    """Whether there is a file; not, where that cannot be told."""
    try:
        return path.exists()
    except OSError:
        return False


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def damaged(name: str, segment: Segment, file: str, error: Exception) -> DamagedContextError:
    """The message about a segment that cannot be used."""
    return DamagedContextError(
        f"the context {name!r} is damaged in positions {segment.first:,} to {segment.stop:,} ({file}: {error}); read "
        "the text again under this name to mend it"
    )
