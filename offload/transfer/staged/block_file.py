"""A file on a disk for blocks for which host memory has no room.

The file has no name, so nothing is left of it however the process ends, and nobody can shorten it. All its space is
taken at the start, so a disk that is too full is an error before anything is computed. If the file system allows it,
the file is read and written without the system's page cache: each block is read once in a pass, so the cached pages
would only take memory.
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
"""Slots, and the memory into which they are read, are aligned to this number of bytes, as direct reads require."""


SLOW = 1e9
"""Bytes/s. There is a warning if a disk is read more slowly: solid-state disks on PCIe are several times faster."""

KNOWN_AFTER = 2**28
"""Bytes that must be read before a disk's speed counts as known."""


class DiskError(LinkError):
    """Reading or writing blocks on a disk failed."""


class DiskSpace:
    """The folder for blocks for which host memory has no room, and the traffic of its disk so far."""

    def __init__(self, folder: Path, host: Host = HOST, *, slow: float = SLOW, known_after: int = KNOWN_AFTER) -> None:
        """Args:
        folder: the folder. It need not exist yet.
        host: makes the threads for reads and writes.
        slow: see `SLOW`.
        known_after: see `KNOWN_AFTER`.
        """
        self.folder, self.host = folder, host
        self._slow, self._known_after = slow, known_after
        self.pool = host.make_pool()
        """The executor for reads and writes."""
        self._lock = threading.Lock()
        self._bytes_in = self._bytes_out = 0
        self._reading, self._reading_since, self._busy_s, self._waited_s = 0, 0.0, 0.0, 0.0

    def start_threads(self) -> None:
        """Starts all threads of the pool. Otherwise they start one by one when there is work for them."""
        start_pool(self.pool)

    def new_file(self, num_slots: int, slot_bytes: int) -> BlockFile:
        """Makes a file of `num_slots` slots; see `BlockFile`."""
        return BlockFile(self, num_slots, slot_bytes)

    def free_bytes(self) -> int:
        """Free disk space in bytes."""
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
        """A warning if the disk is slow, as soon as its speed is known."""
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
        """Counts a write of `num_bytes`."""
        with self._lock:
            self._bytes_out += num_bytes

    @contextmanager
    def reading(self, num_bytes: int) -> Iterator[None]:
        """Counts a read of `num_bytes`, and the time in which at least one read is in progress."""
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
    """A file of slots of equal size. Several threads may read and write different slots at the same time."""

    def __init__(self, space: DiskSpace, num_slots: int, slot_bytes: int) -> None:
        """Args: `slot_bytes` is the size of a slot. It is rounded up to a multiple of `ALIGNMENT`.

        Raises:
            CapacityError: the disk has no room for the file, or the folder cannot be written to.
        """
        self.space = space
        self.slot_bytes = aligned_size(slot_bytes)
        size = num_slots * self.slot_bytes
        try:
            space.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Only the owner can read it. It exists as long as the cache.
            self._file = tempfile.TemporaryFile(dir=space.folder, buffering=0)  # noqa: SIM115
            _take_space(self._descriptor, size)
        except OSError as error:
            if hasattr(self, "_file"):
                self._file.close()  # otherwise the free space in the message would lack what the file has taken
            raise CapacityError(
                f"{gib(size)} of the KV cache exceed host memory, and {space.folder} has no room for them "
                f"({error.strerror}; {gib(space.free_bytes())} free): make room on this disk, set TRIFORCE_HOME "
                "to a directory on another disk, free memory, or shorten the prompt (triforce generate: --truncate)"
            ) from error
        self.num_bytes = size
        self.direct = _pass_page_cache(self._descriptor, True)
        """Whether the file is read without the page cache. If not, data are dropped from the page cache after they are
        read. Some file systems accept the setting, but refuse the first read; then this becomes false."""

    @property
    def _descriptor(self) -> int:
        return self._file.fileno()

    def read(self, slot: int, memory: Tensor) -> None:
        """Reads a slot into `memory`, `[slot_bytes]` uint8, which begins at a multiple of `ALIGNMENT`.

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
        """Returns when all written data are on the disk, and none of them is in the page cache.

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
            "disk, set TRIFORCE_HOME to a directory on another disk, or raise --host-memory so that less is on the disk"
        )

    def _forget(self, start: int, size: int) -> None:
        if not self.direct and hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, start, size, os.POSIX_FADV_DONTNEED)


def aligned_size(num_bytes: int) -> int:
    """`num_bytes`, rounded up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _take_space(descriptor: int, size: int) -> None:
    """Sets the size of a file, and takes all its space if the file system supports that."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
            return
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    os.ftruncate(descriptor, size)


def _pass_page_cache(descriptor: int, wanted: bool) -> bool:
    """Sets whether a file is read and written without the page cache. Returns whether it is."""
    if not hasattr(os, "O_DIRECT"):
        return False
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return wanted
