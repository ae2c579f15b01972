"""Whose the other end of a connection is: asked of the system for one connection, or read in its tables."""

import asyncio
import os
import shutil
import socket
import subprocess
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
def test_a_connection_of_ipv6_is_its_users(told):
    try:
        ours, theirs = connected("::1", socket.AF_INET6)
    except OSError:
        pytest.skip("there is no IPv6 here")
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


@pytest.mark.parametrize("own_family", [None, socket.AF_INET6])
def test_the_system_tells_it_without_its_tables(own_family):
    if owner_told_here() is None:
        pytest.skip("the system does not answer for one connection")
    ours, theirs = connected("127.0.0.1", own_family=own_family)
    ends = ours.getsockname()[:2], ours.getpeername()[:2]
    with ours, theirs:
        assert owner_told(ends) == os.getuid()
        assert owner_told((ends[0], ("127.0.0.1", theirs.getsockname()[1] ^ 1))) is None, "another port"
    assert owner_told(ends) is None


def owner_told_here():
    ours, theirs = connected("127.0.0.1")
    with ours, theirs:
        return owner_told((ours.getsockname(), ours.getpeername()))


def test_a_port_that_somebody_listens_at_is_no_connection():
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as other:
        assert owner_told((listening.getsockname(), other.getsockname())) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have processes of another account")
@pytest.mark.parametrize("told", [owner_told, nobody_tells])
def test_the_other_end_counts_and_not_the_servers(told):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        # No fork of this process: it has threads, whose locks the child would find taken.
        command = [sys.executable, "-SE", "-c", _CONNECTS, *map(str, listening.getsockname())]
        with subprocess.Popen(command) as child:
            ours, _ = listening.accept()
            with ours:
                assert owner_of((ours.getsockname(), ours.getpeername()), told) == 65533
                assert owner_of((ours.getpeername(), ours.getsockname()), told) == 0
            assert child.wait(60) == 0


_CONNECTS = """
import os, socket, sys
os.setuid(65533)  # from here on, no module can be imported that only root may read
with socket.socket() as connection:
    connection.connect((sys.argv[1], int(sys.argv[2])))
    connection.recv(1)
"""


@pytest.mark.parametrize("told", ["owner_told", "lambda ends: None"])
def test_a_number_that_stands_for_all_accounts_without_one_is_nobodys(told):
    """In a user namespace without accounts, everybody has this number, the server too."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode:
        pytest.skip("no user namespace can be made here")
    command = ["unshare", "--user", sys.executable, "-c", _UNMAPPED.replace("TOLD", told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "None"], done.stderr


_UNMAPPED = """
import asyncio, os, socket
from triforce.cli.serve.owner import Owners, owner_told
with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as client:
    ours, _ = listening.accept()
    async def ask():
        return await Owners(TOLD).owner_of((ours.getsockname(), ours.getpeername()))
    print(os.geteuid() == int(open("/proc/sys/kernel/overflowuid").read()), asyncio.run(ask()))
"""


def test_the_system_is_asked_no_more_if_only_its_tables_tell():
    asked = []

    async def ask_twice():
        owners = Owners(lambda ends: asked.append(ends))
        found = [await owners.owner_of(ends) for _ in range(3)]
        owners.close()
        return found

    ours, theirs = connected("127.0.0.1")
    ends = ours.getsockname(), ours.getpeername()
    with ours, theirs:
        assert asyncio.run(ask_twice()) == [os.getuid()] * 3
    assert len(asked) == 1
