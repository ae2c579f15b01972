"""Whose the other end of a connection is: asked of the system for one connection, or read in its tables."""

import asyncio
import os
import socket
import sys

import pytest
from triforce.cli.serve.owner import Owners, owner_told

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose a connection is")


def nobody_tells(ends):
    return None


def owner_of(ends, told):
    async def ask():
        owners = Owners(told)
        try:
            return await owners.owner_of(ends)
        finally:
            owners.close()

    return asyncio.run(ask())


def connected(address, family=socket.AF_INET, own_family=None):
    """The server's end and the client's end of a connection."""
    with socket.create_server((address, 0), family=family) as listening:
        client = socket.socket(own_family or family)
        client.connect((f"::ffff:{address}" if own_family else address, listening.getsockname()[1]))
        return listening.accept()[0], client


@pytest.mark.parametrize("told", [owner_told, nobody_tells])
@pytest.mark.parametrize("own_family", [None, socket.AF_INET6])
def test_a_connection_of_this_process_is_its_users(told, own_family):
    ours, theirs = connected("127.0.0.1", own_family=own_family)
    with ours, theirs:
        assert owner_of((ours.getsockname()[:2], ours.getpeername()[:2]), told) == os.getuid()


@pytest.mark.parametrize("told", [owner_told, nobody_tells])
def test_an_end_that_is_closed_or_was_never_there_is_nobodys(told):
    ours, theirs = connected("127.0.0.1")
    ends = ours.getsockname(), ours.getpeername()
    theirs.close()
    with ours:
        assert owner_of(ends, told) is None
    assert owner_of((ends[0], ("127.0.0.1", 1)), told) is None
    assert owner_of((("::1%lo", 80), ("fe80::1%eth0", 3)), told) is None
    assert owner_of((("127.0.0.1", 80), ("::1", 3)), told) is None


def test_the_system_and_its_tables_tell_the_same():
    several = [connected("127.0.0.1") for _ in range(20)]
    ends = [(ours.getsockname(), ours.getpeername()) for ours, _ in several]
    assert {owner_of(one, told) for told in (nobody_tells, owner_told) for one in ends} == {os.getuid()}
    for one in several:
        for end in one:
            end.close()
