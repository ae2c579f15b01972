"""A file of blocks that host memory has no room for: on a disk, without a name, and with all its space from the start.

Nothing is left of it whatever happens to the process, nobody can shorten it, and a disk that is too full is an error
before anything is computed. It is read and written past the system's page cache where the file system allows that:
each block is read once in a pass, so pages that stay behind would take memory for nothing.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from ....tp.errors import CapacityError
from ....tp.home import disk_usage
from ....tp.units import gib
from ..host import HOST, Host
from ..link import LinkError, Traffic
from ..staging import start_pool

ALIGNMENT = 4096
"""Bytes that slots, and the memory they are read into, are multiples of: what direct reads ask for."""


SLOW = 1e9
"""Bytes a second. A disk that is read more slowly is mentioned: solid-state disks on PCIe are several times faster."""

KNOWN_AFTER = 2**28
"""Bytes after which a disk's speed is known."""


class DiskError(LinkError):
    """Reading or writing blocks on a disk failed."""


class DiskSpace:
    """The folder in which caches keep blocks that exceed host memory, and what was read and written there so far."""

    def __init__(self, folder: Path, host: Host = HOST, *, slow: float = SLOW, known_after: int = KNOWN_AFTER) -> None:
        """Args:
        slow: bytes a second below which it is mentioned how fast the disk is read.
        known_after: bytes after which that is known.
        """
        self.folder, self.host = folder, host
        self._slow, self._known_after = slow, known_after
        self.pool = host.make_pool()
        """Runs reads and writes."""
        self._lock = threading.Lock()
        self._bytes_in = self._bytes_out = 0
        self._reading, self._reading_since, self._busy_s, self._waited_s = 0, 0.0, 0.0, 0.0

    def start_threads(self) -> None:
        """Starts all threads of the pool, which else begin one by one as there is work for them."""
        start_pool(self.pool)

    def new_file(self, num_slots: int, slot_bytes: int) -> BlockFile:
        """A file of so many slots; see `BlockFile`."""
        return BlockFile(self, num_slots, slot_bytes)

    def free_bytes(self) -> int:
        """What the disk has room for."""
        return disk_usage(self.folder).free

    def traffic(self) -> Traffic:
        """What was read and written so far."""
        with self._lock:
            return Traffic(
                disk_bytes_in=self._bytes_in,
                disk_bytes_out=self._bytes_out,
                disk_busy_s=self._busy_s + (time.perf_counter() - self._reading_since if self._reading else 0.0),
                disk_waited_s=self._waited_s,
            )

    @property
    def warnings(self) -> list[str]:
        """That the disk is slow, once it is known."""
        read = self.traffic()
        if read.disk_bytes_in < self._known_after or read.disk_bytes_in >= self._slow * read.disk_busy_s:
            return []
        speed = read.disk_bytes_in / read.disk_busy_s
        return [
            f"the disk at {self.folder} is read at {speed / 1e6:,.0f} MB/s: {2**30 / speed:.1f} s in every pass for "
            f"each GiB of the KV cache there; computation waited {read.disk_waited_s:.1f} s for it"
        ]

    def note_wait(self, seconds: float) -> None:
        """Adds to the time that computation waited for reads."""
        with self._lock:
            self._waited_s += seconds

    def note_written(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes_out += num_bytes

    @contextmanager
    def reading(self, num_bytes: int) -> Iterator[None]:
        """Counts a read of `num_bytes`, and the time in which at least one is under way."""
        with self._lock:
            if not self._reading:
                self._reading_since = time.perf_counter()
            self._reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._reading -= 1
                self._bytes_in += num_bytes
                if not self._reading:
                    self._busy_s += time.perf_counter() - self._reading_since


class BlockFile:
    """So many slots of as many bytes each, in a folder. Threads may read and write different slots at a time."""

    def __init__(self, space: DiskSpace, num_slots: int, slot_bytes: int) -> None:
        """Args: `slot_bytes` is rounded up to a multiple of `ALIGNMENT`.

        Raises:
            CapacityError: the disk has no room for them, or the folder cannot be written to.
        """
        self.space = space
        self.slot_bytes = aligned_size(slot_bytes)
        size = num_slots * self.slot_bytes
        try:
            space.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Readable by its owner only; as long as the cache lives.
            self._file = tempfile.TemporaryFile(dir=space.folder, buffering=0)  # noqa: SIM115
            _take_space(self._descriptor, size)
        except OSError as error:
            if hasattr(self, "_file"):
                self._file.close()  # or what it has taken would be missed from what is free
            raise CapacityError(
                f"{gib(size)} of the KV cache exceed host memory, and {space.folder} has no room for them "
                f"({error.strerror}; {gib(space.free_bytes())} free): free some, set TRIFORCE_HOME to a directory on "
                "another disk, free memory, or shorten the prompt (--truncate)"
            ) from error
        self.num_bytes = size
        self.direct = _pass_page_cache(self._descriptor, True)
        """Whether it is read past the page cache; else what was read is dropped from there. Some file systems agree to
        that and refuse the first read."""

    @property
    def _descriptor(self) -> int:
        return self._file.fileno()

    def read(self, slot: int, memory: Tensor) -> None:
        """Fills `memory`, `[slot_bytes]` uint8 that begins at a multiple of `ALIGNMENT`, from a slot.

        Raises:
            DiskError: the system could not read it.
        """
        start = slot * self.slot_bytes
        with self.space.reading(len(memory)):
            self._whole(os.preadv, memory, start, "reading")
        self._forget(start, len(memory))

    def write(self, slot: int, memory: Tensor) -> None:
        """Writes a slot from `memory`; see `read`.

        Raises:
            DiskError: the system could not write it.
        """
        start = slot * self.slot_bytes
        self._whole(os.pwritev, memory, start, "writing")
        self.space.note_written(len(memory))
        self._forget(start, len(memory))

    def flush(self) -> None:
        """Returns when what was written is on the disk, and nothing of it is in the page cache.

        Raises:
            DiskError: the system could not write it.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._failed("writing", f"{error.strerror} (error {error.errno})") from error
        self._forget(0, self.num_bytes)

    def _whole(self, move: Callable[..., int], memory: Tensor, start: int, what: str) -> None:
        rest = memory.numpy().data
        while len(rest):
            direct = self.direct
            try:
                moved = move(self._descriptor, [rest], start)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:
                    self.direct = _pass_page_cache(self._descriptor, False)
                    continue
                raise self._failed(what, f"{error.strerror} (error {error.errno})") from error
            if not moved:
                raise self._failed(what, "the file ends too early")
            rest, start = rest[moved:], start + moved

    def _failed(self, what: str, why: str) -> DiskError:
        return DiskError(
            f"{what} a block of the KV cache in {self.space.folder} failed: {why}; see the system's log about this "
            "disk, set TRIFORCE_HOME to a directory on another one, or give --host-memory more, so that less is there"
        )

    def _forget(self, start: int, size: int) -> None:
        if not self.direct and hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, start, size, os.POSIX_FADV_DONTNEED)


def aligned_size(num_bytes: int) -> int:
    """`num_bytes`, rounded up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _take_space(descriptor: int, size: int) -> None:
    """Gives a file its size, and all of its space where the file system does that."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
            return
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    os.ftruncate(descriptor, size)


def _pass_page_cache(descriptor: int, wanted: bool) -> bool:
    """Has a file read and written past the page cache, or through it; whether it is past."""
    if not hasattr(os, "O_DIRECT"):
        return False
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return wanted
