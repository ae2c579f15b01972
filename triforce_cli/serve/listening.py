"""The socket that a server listens on: a host and port, or a Unix socket, which is a file."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from ...tp.errors import TriforceError
from .options import ServeOptions


def listener(options: ServeOptions) -> socket.socket:
    """A socket at the host and port, which does not listen yet; or at --uds, which already listens.

    Raises:
        TriforceError: the socket cannot be made.
    """
    if options.uds is not None:
        return UnixListener(options.uds.expanduser().absolute())
    host, port = options.address
    where = f"--host {host} --port {port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise TriforceError(f"cannot listen at {where}: {error.strerror or error}") from error
    return found


class UnixListener(socket.socket):
    """A Unix socket that only its owner can open. Its file is removed when it is closed."""

    def __init__(self, path: Path) -> None:
        """Makes the socket and listens.

        Raises:
            TriforceError: the path is already used, or the socket cannot be made.
        """
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._file: os.stat_result | None = None
        self._path, self._pid = path, os.getpid()
        try:
            _remove_stale(path)
            self.bind(str(path))
            self._file = path.lstat()
            path.chmod(0o600)
            self.listen()  # now, as a file whose socket does not listen looks like that of a dead server
        except OSError as error:
            self.close()
            raise TriforceError(f"cannot listen at --uds {path}: {error.strerror or error}") from error
        except TriforceError:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        made, self._file = self._file, None
        if made is None or os.getpid() != self._pid:
            return
        try:
            if os.path.samestat(self._path.lstat(), made):
                self._path.unlink()
        except OSError:  # it is gone already
            pass


def _remove_stale(path: Path) -> None:
    """Removes a socket that nobody listens on.

    Raises:
        TriforceError: a process listens on it, or the path is something else.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise TriforceError(f"--uds {path} exists and is not a socket; give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        answer = probe.connect_ex(str(path))
    if answer in (0, errno.EAGAIN):
        raise TriforceError(f"--uds {path}: a server listens there already; give another path, or stop that one")
    if answer != errno.ECONNREFUSED:
        raise OSError(answer, os.strerror(answer))
    path.unlink()
