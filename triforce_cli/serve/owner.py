"""Finds the account of the other end of a TCP connection, if that end is on this machine (Linux)."""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Address = tuple[str, int]
"""IP address and port."""

Ends = tuple[Address, Address]
"""Both ends of a connection: that of the server and that of the client, as the server sees them."""

_TABLES = ("tcp", "tcp6")

_OWNED = ("01", "04", "05", "08")
"""States of a socket that belongs to a process: ESTABLISHED, FIN_WAIT1, FIN_WAIT2 and CLOSE_WAIT."""

_READINGS = 2
"""How often the tables are read. One reading may miss a row while other rows come and go."""


class Owners:
    """Looks up owners in a thread, because this takes milliseconds. One reading of the tables serves all waiting
    look-ups, however many connections a client has opened."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "owners")
        self._waiting: list[tuple[Ends, asyncio.Future[int | None]]] = []
        self._reading: asyncio.Task[None] | None = None

    async def owner_of(self, connection: Ends) -> int | None:
        """The user id of the other end of a connection.

        Returns:
            `None` if it is not known: the other end is on another machine or in another network namespace, or closed;
            the account has no number in this user namespace; or the system does not have these tables.
        """
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
    held = row[2] in _OWNED and row[8] != "0"  # a socket without a process has uid 0 and inode 0
    return int(row[6]) if held else None


def _word(address: Address, table: str) -> str | None:
    """An address in the format of a table; `None` if the table cannot contain it. The table of IPv6 contains IPv4
    addresses as mapped addresses."""
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    raw = ip.packed
    if table == "tcp6" and len(raw) == 4:
        raw = bytes(10) + b"\xff\xff" + raw
    if len(raw) != (4 if table == "tcp" else 16):
        return None
    words = (int.from_bytes(raw[i : i + 4], sys.byteorder) for i in range(0, len(raw), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"


def _stands_for_others(uid: int) -> bool:
    """Whether this user namespace may use this number for accounts that have no number in it."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        whole = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
    except (OSError, ValueError):
        return True
    return uid == overflow and not whole
