"""The account that the other end of a TCP connection belongs to, where that end is on this machine (Linux)."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path

Address = tuple[str, int]
"""IP address and port."""

_OWNED = ("01", "04", "05", "08")
"""States of a socket that a process can hold: ESTABLISHED, FIN_WAIT1, FIN_WAIT2 and CLOSE_WAIT."""

_READINGS = 2
"""How often the tables are read: a row can be passed over while others come and go."""


def owner_of(ours: Address, theirs: Address) -> int | None:
    """The user id that holds the other end of a connection.

    Args: the connection's two ends, as this end sees them.

    Returns:
        `None` where it cannot be told: the other end is on another machine or in another network namespace, nobody
        holds it any more, the account has no number in this user namespace, or the system has no such tables.
    """
    for _ in range(_READINGS):
        for table in ("tcp", "tcp6"):
            uid = _owner_in(table, _word(theirs, table), _word(ours, table))
            if uid is not None:
                return None if _stands_for_others(uid) else uid
    return None


def _owner_in(table: str, local: str | None, remote: str | None) -> int | None:
    """The owner of a socket with these ends, by /proc/net/`table`."""
    if local is None or remote is None:
        return None
    try:
        found = Path("/proc/net", table).read_text("ascii")
    except (OSError, ValueError):
        return None
    at = found.find(f" {local} {remote} ")
    if at < 0:
        return None
    # From here on: local, remote, state, queues, timer, retransmits, uid, timeout, inode, ...
    row = found[at : found.find("\n", at)].split()
    held = row[2] in _OWNED and row[8] != "0"  # a socket without a process has uid 0 and inode 0
    return int(row[6]) if held else None


def _word(address: Address, table: str) -> str | None:
    """An address as a table has it; `None` where the table cannot have it. Of an IPv4 address the table of IPv6 has
    the mapped one."""
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
    """Whether this user namespace may show accounts by this number that it has no number for."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        whole = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
    except (OSError, ValueError):
        return True
    return uid == overflow and not whole
