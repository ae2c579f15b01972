"""Finds the account of the other end of a TCP connection, if that end is on this machine (Linux).

The system is asked for the one connection (`sock_diag(7)`), which takes 20 µs. Where it does not answer such questions,
the tables of all connections are read, which takes milliseconds.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path

Address = tuple[str, int]
"""IP address and port."""

Ends = tuple[Address, Address]
"""Both ends of a connection: that of the server and that of the client, as the server sees them."""

_TABLES = ("tcp", "tcp6")

_OWNED = (1, 4, 5, 8)
"""States of a socket that belongs to a process: ESTABLISHED, FIN_WAIT1, FIN_WAIT2 and CLOSE_WAIT."""

_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ANY_STATE = 4, 20, 1, 2**32 - 1
"""Of linux/netlink.h and linux/sock_diag.h: a protocol, the type of a message, a flag; and a set of states."""

_HEADER, _QUESTION, _SOCKET = struct.Struct("=IHHII"), struct.Struct("=BBBxI"), struct.Struct(">HH16s16s12s")
"""The structures `nlmsghdr`, `inet_diag_req_v2` up to its last field, and this field, `inet_diag_sockid`."""

_STATE, _OWNER = struct.Struct("=xB"), struct.Struct("=12xII")
"""The fields of `inet_diag_msg` before and after its `inet_diag_sockid` that are of interest: the state of the socket,
its user id and its inode."""

_READINGS = 2
"""How often the tables are read. One reading may miss a row while other rows come and go."""


def owner_told(connection: Ends) -> int | None:
    """The owner of the other end, as the system tells it for this connection; `None` if the system does not tell, or
    if the other end does not belong to a process on this machine."""
    ours, theirs = connection
    try:
        local, remote = _address(theirs[0]), _address(ours[0])
        family = socket.AF_INET if local.version == 4 else socket.AF_INET6
        question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, _ANY_STATE)
        question += _SOCKET.pack(theirs[1], ours[1], local.packed, remote.packed, b"\0\0\0\0" + b"\xff" * 8)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as system:
            system.send(_HEADER.pack(_HEADER.size + len(question), _BY_FAMILY, _REQUEST, 0, 0) + question)
            reply, sender = system.recvfrom(4096, socket.MSG_DONTWAIT)  # it is there when `send` returns
        at = _HEADER.size + _STATE.size + 2  # of the structure `inet_diag_sockid`, which begins with both ports
        ports = struct.unpack_from(">HH", reply, at)
        if sender[0] != 0 or _HEADER.unpack_from(reply)[1] != _BY_FAMILY or ports != (theirs[1], ours[1]):
            return None  # 0: the system itself
        (state,) = _STATE.unpack_from(reply, _HEADER.size)
        return _owner(state, *_OWNER.unpack_from(reply, at + _SOCKET.size))
    except (AttributeError, OSError, ValueError, struct.error):  # AttributeError: another system than Linux
        return None


class Owners:
    """Looks up owners. Tables are read in a thread; one reading serves all waiting look-ups, however many connections a
    client has opened."""

    def __init__(self, told: Callable[[Ends], int | None] = owner_told) -> None:
        """Args: `told`: see `owner_told`."""
        self._told = told
        self._tells: bool | None = None  # whether the system answers `told`, once that is known
        self._thread = ThreadPoolExecutor(1, "owners")
        self._waiting: list[tuple[Ends, asyncio.Future[int | None]]] = []
        self._reading: asyncio.Task[None] | None = None

    async def owner_of(self, connection: Ends) -> int | None:
        """The user id of the other end of a connection.

        Returns:
            `None` if it is not known: the other end is on another machine or in another network namespace, or closed;
            the account has no number in this user namespace; or the system does not have these tables.
        """
        owner = None if self._tells is False else self._told(connection)
        if owner is not None:
            self._tells = True
            return None if _stands_for_others(owner) else owner
        loop = asyncio.get_running_loop()
        found: asyncio.Future[int | None] = loop.create_future()
        self._waiting.append((connection, found))
        if self._reading is None:
            self._reading = loop.create_task(self._read())
        return await found

    def close(self) -> None:
        """Ends the thread without waiting for it."""
        self._thread.shutdown(wait=False)

    async def _read(self) -> None:
        try:
            while self._waiting:
                now, self._waiting = self._waiting, []
                looking = asyncio.get_running_loop().run_in_executor(self._thread, _owners, [ends for ends, _ in now])
                try:
                    owners = await looking
                except Exception:  # it cannot be told, and nobody waits for ever
                    owners = [None] * len(now)
                for (_, found), owner in zip(now, owners, strict=True):
                    if owner is not None and self._tells is None:
                        self._tells = False  # only the tables tell; to ask may make the system look for a module
                    if not found.done():  # its request may have been cancelled
                        found.set_result(owner)
        finally:
            self._reading = None


def _owners(connections: Sequence[Ends]) -> list[int | None]:
    """For each connection, the account that `Owners.owner_of` returns."""
    found: dict[Ends, int | None] = {}
    for _ in range(_READINGS):
        for table in _TABLES:
            left = [one for one in connections if one not in found]
            rows = _rows(table) if left else ""  # reading a table takes milliseconds, and most are in the first
            for one in left:
                if (owner := _owner_in(table, rows, one)) is not None:
                    found[one] = None if _stands_for_others(owner) else owner
    return [found.get(one) for one in connections]


def _rows(table: str) -> str:
    """The content of /proc/net/`table`; empty if it does not exist."""
    try:
        return Path("/proc/net", table).read_text("ascii")
    except (OSError, ValueError):
        return ""


def _owner_in(table: str, rows: str, connection: Ends) -> int | None:
    """The owner of the other end, according to the rows of a table."""
    ours, theirs = connection
    local, remote = _word(theirs, table), _word(ours, table)
    return None if local is None or remote is None else _owner_of_row(rows, f" {local} {remote} ")


def _owner_of_row(rows: str, ends: str) -> int | None:
    """The owner of the socket with these ends."""
    at = rows.find(ends)
    if at < 0:
        return None
    # From here on: local, remote, state, queues, timer, retransmits, uid, timeout, inode, ...
    row = rows[at : rows.find("\n", at)].split()
    return _owner(int(row[2], 16), int(row[6]), int(row[8]))


def _owner(state: int, uid: int, inode: int) -> int | None:
    """The owner of a socket; `None` if it does not belong to a process. It then has uid 0 and inode 0."""
    return uid if state in _OWNED and inode else None


@lru_cache(maxsize=1024)
def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address. That of IPv4 in IPv6's form becomes that of IPv4."""
    found = ipaddress.ip_address(host.partition("%")[0])
    return (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found


def _word(address: Address, table: str) -> str | None:
    """An address in the format of a table; `None` if the table cannot contain it. The table of IPv6 contains IPv4
    addresses as mapped addresses."""
    raw = _address(address[0]).packed
    if table == "tcp6" and len(raw) == 4:
        raw = bytes(10) + b"\xff\xff" + raw
    if len(raw) != (4 if table == "tcp" else 16):
        return None
    words = (int.from_bytes(raw[i : i + 4], sys.byteorder) for i in range(0, len(raw), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"


def _stands_for_others(uid: int) -> bool:
    """Whether this user namespace may use this number for accounts that have no number in it."""
    try:
        return uid == _overflow_uid()
    except (OSError, ValueError):
        return True


@cache
def _overflow_uid() -> int | None:
    """The number of all accounts that have none in this user namespace; `None` if all accounts have one.

    Raises:
        OSError, ValueError: the system does not tell it now.
    """
    overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    whole = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
    return None if whole else overflow
