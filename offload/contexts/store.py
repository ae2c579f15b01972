"""The saved contexts of a user: one directory each. A context is found by its name or by its first token ids."""

from __future__ import annotations

import fcntl
import os
import re
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
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
"""The directory of the locks. It is beside the directories of the contexts, because these may be removed."""

_LONGEST_NAME = 240
"""Bytes in UTF-8. File systems allow 255, and the name of the lock file is longer than that of the context."""

_DIFFERENT_END = 16
"""Maximum number of last tokens of a context that may differ after text was added: the tokenizer may cut the old end
and the new text into other tokens."""

_NAME = re.compile(r"\w[\w .+@=-]{0,99}")

_MARKER = ".triforce-context"
"""An empty file that marks the directories of contexts. The store never removes other directories as a whole."""

_WRITTEN = re.compile(
    r"\d+-\d+\.[hs]\d+-\d+\.\w+\.safetensors|\..+\.safetensors\.new|\.manifest\.json\.new|\.\w+\.probe"
)
"""Names of the files that the store writes into a context's directory, except the manifest and the marker."""

_LEAST_RESERVE, _MOST_RESERVE = 2**30, 10 * 2**30
"""Bytes; see `ContextStore.reserve_bytes`."""


class DamagedContextError(ContextError):
    """A segment of a saved context is damaged."""


@dataclass(frozen=True)
class SavedPrefix:
    """The first tokens of a prompt that are saved, and the context that holds them."""

    directory: Path
    """The directory of the context."""
    manifest: Manifest
    tokens: int
    """How many first tokens of the prompt are saved."""

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments that hold these tokens. Only a part of the last segment may be needed."""
        return tuple(one for one in self.manifest.segments if one.first < self.tokens)


_BEGINNING = 1024
"""The maximum number of first token ids of a context that are kept in memory."""

_Stamp = tuple[int, int, int]
"""Inode, size and time of modification of a manifest. Another manifest in its place almost always differs in one of
them. If not, a search may miss the context. What a search finds is read anew."""


@dataclass(frozen=True)
class _Beginning:
    """What is kept in memory of a context, so that a search does not read the files of every context."""

    stamp: _Stamp
    fingerprint: str
    shape: Shape
    origin: Origin
    ends: list[tuple[int, str]]
    """Of each segment: the position behind it, and `Segment.chain`."""
    token_ids: array[int] | None
    """The first token ids of the first segment, at most `_BEGINNING`; `None` if they were not read, or are damaged."""

    def alike(self, prompt: Sequence[int], first_ids: array[int], chains: dict[tuple[str, int], str]) -> int:
        """The maximum number of leading tokens that a prompt may have in common with the context: the exact number if
        they differ within `token_ids`.

        Args:
            first_ids: the first `_BEGINNING` tokens of the prompt.
            chains: the hashes of the prompt so far, by the hash of the tokens before and by the last position. Those
                that are missing are added.
        """
        if self.token_ids is not None and first_ids[: len(self.token_ids)] != self.token_ids:
            pairs = enumerate(zip(first_ids, self.token_ids, strict=False))
            return next((i for i, (ours, saved) in pairs if ours != saved), len(prompt))
        first, chain = 0, self.fingerprint
        for stop, wanted in self.ends:
            if stop > len(prompt):
                return len(prompt)
            key = chain, stop
            if key not in chains:
                chains[key] = chained(chain, prompt[first:stop])
            if chains[key] != wanted:
                return stop
            first, chain = stop, wanted
        return first


class ContextStore:
    """A directory of saved contexts.

    Other processes may change the directory at any time. So the object keeps only the beginnings of contexts in memory,
    and checks each time whether their manifests have changed.
    """

    def __init__(
        self, root: Path, most_bytes: int | None = None, *, segment_tokens: int = SEGMENT, disk: Disk | None = None
    ) -> None:
        """Args:
        root: the directory that holds the directories of the contexts. It need not exist yet.
        most_bytes: the quota: maximum disk space of all contexts together, in bytes; `None`: no quota.
        segment_tokens: tokens of a segment in new contexts.
        disk: performs the changes of files; `None`: a new `Disk`.
        """
        self.root, self.most_bytes, self.segment_tokens = root, most_bytes, segment_tokens
        self.disk = disk or Disk()
        self._beginnings: dict[str, _Beginning] = {}

    def directory(self, name: str) -> Path:
        """The directory of the context with this name. It need not exist.

        Raises:
            UsageError: no context can have this name.
        """
        if not _is_name(name):
            raise UsageError(
                f"{name!r} cannot be the name of a context: a name has up to 100 letters, digits, spaces and any of "
                f"_.+@=- (at most {_LONGEST_NAME} bytes), and begins with a letter or a digit"
            )
        return self.root / name

    def names(self) -> list[str]:
        """The names of all contexts, complete or not, sorted.

        Raises:
            ContextError: the contexts cannot be listed.
        """
        return [name for name, _ in self._manifests()]

    def _manifests(self) -> list[tuple[str, os.stat_result]]:
        """The names of all contexts, sorted, each with the `stat` of its manifest.

        Raises:
            ContextError: see `names`.
        """
        found = []
        try:
            for name in sorted(filter(_is_name, os.listdir(self.root))):
                with suppress(OSError):
                    found.append((name, os.stat(f"{self.root}/{name}/{FILE_NAME}")))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ContextError(f"the contexts in {self.root} cannot be listed: {error.strerror or error}") from error
        return found

    def _contexts(self, shape: Shape | None = None) -> list[tuple[str, os.stat_result, _Beginning]]:
        """The names of all contexts whose manifests can be read, sorted, each with the `stat` of its manifest, and its
        beginning.

        Args: `shape` is that of the contexts whose token ids are needed; `None`: none are.

        Raises:
            ContextError: see `names`.
        """
        found = []
        for name, stat in self._manifests():
            known, stamp = self._beginnings.get(name), (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if known is None or known.stamp != stamp or (known.token_ids is None and known.shape == shape):
                with suppress(ContextError, OSError):
                    found.append((name, stat, self._read_beginning(name, stamp, shape)))
            else:
                found.append((name, stat, known))
        self._beginnings = {name: one for name, _, one in found}
        return found

    def _read_beginning(self, name: str, stamp: _Stamp, shape: Shape | None) -> _Beginning:
        """Args: `shape`: see `_contexts`."""
        manifest, first_ids = self.load(name), None
        if manifest.shape == shape:
            with suppress(ContextError, OSError):  # they are damaged, and read again in the next search
                first_ids = array("i", self._ids(name, manifest, 0)[:_BEGINNING] if manifest.segments else [])
        ends = [(segment.stop, segment.chain) for segment in manifest.segments]
        return _Beginning(stamp, manifest.fingerprint, manifest.shape, manifest.origin, ends, first_ids)

    def holds(self, name: str) -> bool:
        """Whether there is a context with this name, or the remains of one that was not removed completely.

        Raises:
            UsageError: no context can have this name.
        """
        directory = self.directory(name)
        return _exists(directory / FILE_NAME) or _exists(directory / _MARKER)

    def load(self, name: str) -> Manifest:
        """Reads the manifest of a context.

        Raises:
            UsageError: no context can have this name.
            ContextError: there is no context with this name, its manifest is damaged, or a newer version wrote it.
        """
        directory = self.directory(name)
        if not _is_directory(directory):
            known = ", ".join(self.names()) or "none"
            raise ContextError(f"there is no context {name!r} in {self.root}; there are: {known}")
        return Manifest.load(directory)

    def token_ids(self, name: str) -> list[int]:
        """The token ids of a context, up to the last saved token.

        Raises:
            UsageError: see `load`.
            ContextError: see `load`; or a segment is damaged.
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
        """The first tokens that a prompt has in common with the context of this name; `None` if there are none.

        Args: `fingerprint` and `shape` are those of the model's keys and values.

        Raises:
            UsageError: see `load`.
            ContextError: see `load`; or the context belongs to another model; or its shape is not that of the model; or
                a damaged segment prevents the comparison.
        """
        manifest = self.load(name)
        if manifest.fingerprint != fingerprint:
            raise ContextError(
                f"the context {name!r} was saved with a different model, number format or RoPE scaling: "
                f"{manifest.model} in {manifest.shape.dtype} (fingerprint {manifest.fingerprint[:8]}, not "
                f"{fingerprint[:8]}); give the --model, --dtype and --rope-scaling that it was saved with, or read the "
                "text again under another name"
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
        """What is already saved of a text that is to be saved under this name.

        Args: `fingerprint` and `shape` are those of the model's keys and values.

        Returns:
            The first tokens that the text has in common with the context of this name (`None` if there are none), and
            their number.

        Raises:
            UsageError: see `load`.
            ContextError: see `prefix_of`; or the context holds another text; or its token ids are damaged, so that they
                cannot be compared with the text.
        """
        if not _exists(self.directory(name) / FILE_NAME):
            return None, 0
        try:
            prefix = self.prefix_of(name, fingerprint, shape, token_ids)
        except DamagedContextError as error:
            raise ContextError(
                f"the token ids of the context {name!r} are damaged, so it cannot be told whether it holds this text; "
                f"give another name, or remove it with: triforce contexts rm {name}"
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
        """The context that has the most first tokens in common with a prompt; `None` if none has at least `least`.

        Among contexts with the same number of common tokens, the most recently used is taken. Damaged contexts and
        those of other models are skipped.

        Args: `fingerprint` and `shape` are those of the model's keys and values.

        Raises:
            ContextError: see `names`.
        """
        first_ids, chains = array("i", token_ids[:_BEGINNING]), dict[tuple[str, int], str]()
        candidates = [
            (one.alike(token_ids, first_ids, chains), _time(stat), name)
            for name, stat, one in self._contexts(shape)
            if one.fingerprint == fingerprint and one.shape == shape
        ]
        best, found = (least, -1.0), None
        for most, used, name in sorted(candidates, key=lambda one: (-one[0], -one[1], one[2])):
            if (most, used) <= best:
                break  # nor do those behind it have more tokens in common
            with suppress(ContextError, OSError):
                prefix = self.prefix_of(name, fingerprint, shape, token_ids)
                if prefix and (prefix.tokens, used) > best:
                    best, found = (prefix.tokens, used), prefix
        return found

    def any_of_shape(self, shape: Shape) -> bool:
        """Whether any context has keys and values of this shape. If not, the model's fingerprint need not be computed.

        Raises:
            ContextError: see `names`.
        """
        return any(one.shape == shape for _, _, one in self._contexts(shape))

    def used(self, name: str) -> float:
        """The time when a context was last saved or restored, in seconds since 1970; 0 if it is unknown."""
        try:
            return _time((self.directory(name) / FILE_NAME).stat())
        except OSError:
            return 0.0

    def note_use(self, name: str) -> None:
        """Records the current time as the time of last use. Does nothing if the manifest's time cannot be changed."""
        with suppress(OSError):  # contexts in a read-only store can be used, too
            os.utime(self.directory(name) / FILE_NAME)

    def disk_bytes(self, names: Sequence[str] | None = None) -> int:
        """Disk space of the named contexts in bytes; `None`: of all contexts. A file that several contexts share counts
        once.

        Raises:
            UsageError: no context can have one of these names.
            ContextError: see `names`.
        """
        return _total(map(self._sizes, self.names() if names is None else names))

    def _sizes(self, name: str) -> dict[tuple[int, int], int]:
        """The disk space of each file of a context, in bytes, by device and inode."""
        sizes = {}
        for path in self._files(name):
            with suppress(OSError):
                stat = path.stat()
                sizes[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
        return sizes

    def free_bytes(self) -> int:
        """Free disk space in bytes."""
        return disk_usage(self.root).free

    def reserve_bytes(self) -> int:
        """Disk space, in bytes, that contexts saved by clients of a server must leave free.

        It is 2 % of the disk, but at least 1 GiB, at most 10 GiB, and never more than a tenth of the disk.
        """
        total = disk_usage(self.root).total
        return min(max(total // 50, _LEAST_RESERVE), _MOST_RESERVE, total // 10)

    def check_reserve(self, needed: int) -> None:
        """Checks that the reserve (`reserve_bytes`) stays free after `needed` more bytes are written.

        Raises:
            ContextError: less than the reserve would stay free.
        """
        free, reserve = self.free_bytes(), self.reserve_bytes()
        if needed + reserve > free:
            raise ContextError(
                f"{gib(needed)} are needed in {self.root}, which has {gib(free)} free, and {gib(reserve)} must stay "
                "free when clients save contexts; make room on the disk: triforce contexts prune --keep SIZE"
            )

    def _files(self, name: str) -> list[Path]:
        try:
            return list(self.directory(name).iterdir())
        except OSError:
            return []

    @contextmanager
    def locked(self, name: str) -> Iterator[Path]:
        """Locks a context against changes by other processes, and yields its directory.

        The directory is made if it does not exist. If it holds no context at the end, the store's files in it are
        removed, and also the directory if nothing else is in it. Files of others stay.

        Raises:
            UsageError: no context can have this name.
            ContextError: another process is saving or removing the context, or the directory cannot be written.
        """
        directory = self.directory(name)
        try:
            self.disk.make_directory(self.root / _LOCKS)
            # Not bound to the thread: one may take the lock, another give it back.
            with FileLock(self.root / _LOCKS / f"{name}.lock", timeout=0, mode=0o600, thread_local=False):
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
        """Makes a context's directory with the marker; returns whether the directory is new. A directory that exists
        gets the marker only if it holds a context."""
        made = not _is_directory(directory)
        self.disk.make_directory(directory)
        if made or (_exists(directory / FILE_NAME) and not _exists(directory / _MARKER)):
            # A context must be removable even if the disk is full.
            with suppress(OSError):
                (directory / _MARKER).touch()
                (directory / _MARKER).chmod(0o600)  # whatever the umask
        return made

    def _clear(self, directory: Path, made: bool) -> None:
        """Removes the store's files from a directory that holds no context. Then removes the directory if nothing else
        is in it, and it was `made` or has the marker. The marker is removed last."""
        with suppress(OSError):
            for path in [path for path in directory.iterdir() if _WRITTEN.fullmatch(path.name)]:
                self.disk.remove(path)
            left = {path.name for path in directory.iterdir()}
            if left == {_MARKER} or (made and not left):
                self.disk.remove(directory / _MARKER)
                directory.rmdir()

    def remove(self, name: str) -> None:
        """Removes a context.

        Raises:
            UsageError: no context can have this name.
            ContextError: there is no context with this name, or another process is saving, removing or restoring it, or
                its directory cannot be written.
        """
        if not self.holds(name):
            self.load(name)
        with self.locked(name) as directory, open(self._use_file(name), "ab") as use:
            try:
                fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ContextError(f"the context {name!r} is being restored by another process; wait for it") from error
            # The manifest is removed first, the rest when `locked` ends. So no manifest ever names files that are gone.
            self.disk.remove(directory / FILE_NAME)
            self.disk.sync_directory(directory)

    @contextmanager
    def in_use(self, name: str) -> Iterator[None]:
        """Keeps a context from being removed while it is restored. Several processes may restore it at once.

        If the store is read-only, nothing is locked, because nothing can be removed.
        """
        with ExitStack() as stack:
            with suppress(OSError):
                self.disk.make_directory(self.root / _LOCKS)
                fcntl.flock(stack.enter_context(open(self._use_file(name), "ab")), fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield

    def _use_file(self, name: str) -> Path:
        return self.root / _LOCKS / f"{name}.use"

    def tidy(self, name: str, segments: Sequence[Segment], salt: str = "") -> None:
        """Removes the store's files that do not belong to `segments`: replaced files, and those that killed runs left.

        The caller holds the lock of the context.

        Args:
            segments: the segments in the context's manifest.
            salt: files with this text in their names stay. This rank, or other ranks, are writing them.
        """
        named = {FILE_NAME, *(part.file for segment in segments for part in segment.files)}
        for path in self._files(name):
            if _WRITTEN.fullmatch(path.name) and path.name not in named and not (salt and f".{salt}." in path.name):
                with suppress(OSError):  # a file that stays only takes disk space
                    self.disk.remove(path)

    def prune(self, most_bytes: int, keep: Sequence[str] = ()) -> list[str]:
        """Removes contexts until the others take at most `most_bytes` on the disk; returns the names of those removed.

        The least recently used contexts are removed first. Contexts in `keep` stay, and those that another process is
        saving or restoring.

        Raises:
            ContextError: see `names`.
        """
        removed: list[str] = []
        self._remove_remains()
        sizes = {name: self._sizes(name) for name in self.names()}
        for name in sorted(sizes, key=self.used):
            if _total(sizes.values()) <= most_bytes:
                break
            if name in keep:
                continue
            try:
                self.remove(name)
                removed.append(name)
            except ContextError:
                if _exists(self.directory(name) / FILE_NAME):
                    continue
            del sizes[name]
        return removed

    def of_operator(self) -> list[str]:
        """The names of the contexts that no client of a server saved, and of those with a damaged manifest.

        Raises:
            ContextError: see `names`.
        """
        of_clients = {name for name, _, one in self._contexts() if one.origin == "client"}
        return [name for name in self.names() if name not in of_clients]

    def origin_of(self, name: str) -> Origin | None:
        """Who had a context saved; `None` if there is no such context, or its manifest cannot be read."""
        try:
            return self.load(name).origin
        except ContextError:
            return None

    def claim(self, name: str) -> None:
        """Changes the origin of a context to `operator`. The caller holds the lock of the context.

        Raises:
            ContextError: see `load`.
            OSError: the manifest cannot be written.
        """
        manifest = self.load(name)
        if manifest.origin != "operator":
            replace(manifest, origin="operator").write(self.disk, self.directory(name))

    def _remove_remains(self) -> None:
        """Removes the remains of contexts: directories with the marker but without a manifest. A directory that was
        changed within the last hour stays: it may be a context that is still being copied to this place."""
        with suppress(OSError):
            for directory in self.root.iterdir():
                if _is_name(directory.name) and self._is_remains(directory):
                    with suppress(ContextError), self.locked(directory.name):
                        pass  # when `locked` ends, it removes the store's files

    def _is_remains(self, directory: Path) -> bool:
        try:
            old = time.time() - directory.lstat().st_mtime > 3600
        except OSError:
            return False
        return old and _exists(directory / _MARKER) and not _exists(directory / FILE_NAME)

    def verify(self, name: str) -> Iterator[tuple[Segment, str | None]]:
        """Checks every checksum of a context. Yields each segment with a description of its damage, or with `None`.

        Raises:
            UsageError, ContextError: see `load`.
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


def _total(sizes: Iterable[dict[tuple[int, int], int]]) -> int:
    """The sum of the sizes of files; a file that comes several times counts once."""
    return sum({file: size for some in sizes for file, size in some.items()}.values())


def _time(stat: os.stat_result) -> float:
    """The time of last change, in seconds since 1970; 0 if it cannot be true."""
    return stat.st_mtime if 0 <= stat.st_mtime < LATEST else 0.0


def _exists(path: Path) -> bool:
    """Whether there is a file; false if an error prevents the check."""
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
    """The error for a segment that cannot be used."""
    return DamagedContextError(
        f"the context {name!r} is damaged in positions {segment.first:,} to {segment.stop:,} ({file}: {error}); read "
        "the text again under this name to mend it"
    )
