"""Who is answered without a key: the user who serves, who can open a Unix socket, or anybody where that was said."""

import http.client
import os
import signal
import socket
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command import TEXT, check_refusal, run_here
from forks import Fork
from served import as_account

NOBODY, SOMEBODY = 65534, 65533
"""Numbers of accounts; the second one has no name."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can have processes of two other accounts")


def said_to(account, ask, folder):
    """What a user is told: `ask` says it, in a process of that account."""
    with tempfile.TemporaryFile() as said, open(os.devnull, "rb") as nothing:
        call = lambda: print(ask(), flush=True)  # noqa: E731
        streams = nothing.fileno(), said.fileno(), said.fileno()
        fork = Fork(as_account(account, call), streams, os.environ, folder=folder)
        fork.wait(60)
        said.seek(0)
        return said.read().decode()


def statuses(server):
    """Of requests for models, contexts, an answer, and of what needs no key."""
    return [
        server.ask("GET", "/v1/models").status,
        server.ask("GET", "/v1/contexts").status,
        server.complete(max_tokens=1).status,
        server.ask("DELETE", "/v1/contexts/nothing").status,
        server.ask("GET", "/metrics").status,
        server.ask("GET", "/health").status,
        server.ask("GET", "/").status,
    ]


ALL, NONE = [200, 200, 200, 404, 200, 200, 200], [401, 401, 401, 401, 401, 200, 200]


@needs_root
def test_another_user_is_not_answered_without_a_key(server, tmp_path_factory):
    assert statuses(server) == ALL
    assert said_to(NOBODY, lambda: statuses(server), "/").strip() == str(NONE)
    told = said_to(NOBODY, lambda: server.ask("GET", "/v1/contexts").body.decode(), "/")
    assert all(word in told for word in ("another user", "--api-key", "--uds", "--no-auth", "authentication_error"))
    log = server.log.splitlines()
    assert any('"status": 401' in line for line in log)


@needs_root
def test_the_user_who_serves_is_answered_and_root_with_him(serving, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    os.chown(tmp_path / "home", SOMEBODY, SOMEBODY)
    with serving(account=SOMEBODY) as server:
        assert said_to(SOMEBODY, lambda: statuses(server), "/").strip() == str(ALL)
        assert said_to(NOBODY, lambda: statuses(server), "/").strip() == str(NONE)
        assert statuses(server) == ALL, "root"


@needs_root
def test_connections_that_are_looked_up_together_keep_their_owners(server):
    def ask_at_once() -> list[int]:
        return sorted({reply.status for reply in server.at_once(*[lambda: server.ask("GET", "/v1/models")] * 40)})

    with ThreadPoolExecutor() as pool:
        other = pool.submit(said_to, NOBODY, ask_at_once, "/")
        while not other.done():
            assert ask_at_once() == [200]
        assert other.result().strip() == "[401]"


@needs_root
def test_a_connection_keeps_its_owner(server):
    def ask_several() -> list[int]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        found = []
        for path in ("/health", "/v1/models", "/v1/contexts", "/health"):
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            found.append(response.status)
        return found

    assert ask_several() == [200] * 4
    assert said_to(NOBODY, ask_several, "/").strip() == str([200, 401, 401, 200])


@needs_root
def test_a_connection_that_nobody_holds_any_more_is_nobodys(server):
    """The system tells of such a one that it is root's, as which the server runs."""
    assert server.upload("book", TEXT).status == 201

    def ask_and_leave() -> None:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(b"DELETE /v1/contexts/book HTTP/1.1\r\nHost: localhost\r\n\r\n")

    server.signal(signal.SIGSTOP)
    try:
        assert said_to(NOBODY, ask_and_leave, "/").strip() == "None"
    finally:
        server.signal(signal.SIGCONT)
    asked = '"method": "DELETE", "route": "/v1/contexts/{name}"'
    server.wait_for(
        lambda: [asked in line and '"status": 401' in line for line in server.log.splitlines()].count(True) >= 3
    )
    assert [one["name"] for one in server.ask("GET", "/v1/contexts").json["data"]] == ["book"]


def from_family(family, address, port):
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(60)
        connection.connect((address, port))
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return int(connection.recv(100).split()[1])


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")
def test_addresses_of_both_families_have_owners(server, serving):
    mapped = lambda port: from_family(socket.AF_INET6, "::ffff:127.0.0.1", port)  # noqa: E731
    assert mapped(server.port) == from_family(socket.AF_INET, "127.0.0.1", server.port) == 200
    with serving(host="::1") as six:
        assert from_family(socket.AF_INET6, "::1", six.port) == 200
        if os.geteuid() == 0:
            assert said_to(NOBODY, lambda: from_family(socket.AF_INET6, "::1", six.port), "/").strip() == "401"
            assert said_to(NOBODY, lambda: mapped(server.port), "/").strip() == "401"


@needs_root
def test_a_key_or_no_auth_answers_other_users(serving):
    with serving(api_key="secret") as server:
        ask = lambda: server.ask("GET", "/v1/models", Authorization="Bearer secret").status  # noqa: E731
        assert said_to(NOBODY, ask, "/").strip() == "200"
        assert "--no-auth" not in server.log
    with serving(no_auth=True) as server:
        assert said_to(NOBODY, lambda: statuses(server), "/").strip() == str(ALL)
        assert "--no-auth: everyone who can reach this server is answered" in server.log


@pytest.fixture
def place():
    """For sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_unix_socket_answers_whoever_can_open_it(serving, place):
    place.chmod(0o755)
    path = place / "socket"
    with serving(uds=path) as server:
        assert server.unix == path and f"listening at unix:{path}" in server.log
        mode = path.lstat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
        assert statuses(server) == ALL
        assert server.ask("GET", "/v1/models", Host="whatever.example").status == 200
        assert server.ask("GET", "/v1/models", Host="a", Origin="http://b").status == 403
        stream = server.complete(stream=True)
        assert stream.status == 200 and stream.events[-1] == "[DONE]"
        if os.geteuid() == 0:
            assert "PermissionError" in said_to(NOBODY, lambda: statuses(server), "/")
            path.chmod(0o666)
            assert said_to(NOBODY, lambda: statuses(server), "/").strip() == str(ALL), "the mode of the file decides"


def test_a_unix_socket_with_a_key_wants_the_key(serving, place):
    with serving(uds=place / "socket", api_key="secret") as server:
        assert server.ask("GET", "/v1/models").status == 401
        assert server.ask("GET", "/v1/models", Authorization="Bearer secret").status == 200


def test_a_unix_socket_goes_with_its_server_and_what_a_dead_one_left_is_replaced(serving, place, capfd, pair):
    path = place / "socket"
    with serving(uds=path) as first:
        refused = run_here(capfd, "serve", "--uds", path, "--model", pair[0])
        check_refusal(refused, 1, f"--uds {path}", "a server listens there already")
        assert first.complete().status == 200, "it was let alone"
        first.signal(signal.SIGKILL)
        first.fork.wait(60)
    assert path.exists()
    with serving(uds=path) as second:
        assert second.complete().status == 200
        second.signal(signal.SIGTERM)
        assert second.fork.wait(60) == 143
    assert not path.exists()


def test_places_that_a_unix_socket_cannot_have_are_refused(capfd, place, pair):
    (place / "file").write_text("mine")
    (place / "link").symlink_to(place / "file")
    for name, words in (
        ("file", "is not a socket"),
        ("link", "is not a socket"),
        ("", "is not a socket"),
        ("missing/socket", "No such file"),
        ("x" * 120, "too long"),
    ):
        outcome = run_here(capfd, "serve", "--uds", place / name, "--model", pair[0])
        check_refusal(outcome, 1, "--uds", words)
    assert (place / "file").read_text() == "mine" and sorted(one.name for one in place.iterdir()) == ["file", "link"]
    for more in (("--port", 8000), ("--host", "127.0.0.1")):
        check_refusal(run_here(capfd, "serve", "--uds", place / "socket", *more), 2, "--uds", "--host or --port")
