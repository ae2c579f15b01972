"""Who is answered: keys, hosts and origins."""

import os

import pytest
from triforce.cli.serve.access import Access
from triforce.cli.serve.options import ServeOptions
from triforce.tp.errors import UsageError

CHAT = "/v1/chat/completions"


def access(**options):
    return Access.of(ServeOptions(**options))


def refused(found, **headers):
    error = found.refusal(CHAT, {name.replace("_", "-"): value for name, value in headers.items()}, os.geteuid())
    return error and error.status


def test_only_this_machine_is_answered_unless_a_key_or_no_auth_says_more():
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1"):
        assert access(host=host).keys == ()
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(UsageError, match="--api-key"):
            access(host=host)
        assert access(host=host, no_auth=True).keys == ()
        assert access(host=host, api_key="k").keys == (b"k",)
    with pytest.raises(UsageError, match="both given"):
        access(api_key="k", no_auth=True)
    for key in ("", "  ", "two words", "n\0", "ü"):
        with pytest.raises(UsageError, match="--api-key"):
            access(api_key=key)


def test_a_key_comes_from_a_file_without_its_line_end(tmp_path):
    (tmp_path / "key").write_text("secret\n")
    found = access(api_key=f"@{tmp_path / 'key'}")
    assert found.keys == (b"secret",)
    assert refused(found, host="localhost", authorization="Bearer secret") is None
    for wrong in ("Bearer secre", "Bearer secrett", "Bearer", "Basic secret", "secret", "Bearer ü"):
        assert refused(found, host="localhost", authorization=wrong) == 401
    assert refused(found, host="localhost") == 401
    assert refused(found, host="localhost", x_api_key="secret") is None
    assert refused(found, host="localhost", x_api_key="secret", authorization="Bearer other") is None
    for wrong in ("", "secre", "Bearer secret", "ü"):
        assert refused(found, host="localhost", x_api_key=wrong) == 401
    assert found.refusal("/health", {"host": "localhost"}, None) is None


def test_without_a_key_an_unknown_user_is_told_so():
    error = access().refusal(CHAT, {"host": "localhost"}, None)
    assert error is not None and error.status == 401
    assert "it is not known which user" in str(error) and "--api-key" in str(error)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1", "", "localhost@evil", "["])
def test_a_foreign_host_is_refused(host):
    assert refused(access(), host=host) == 403
    assert refused(access(), host=f"{host}:8000") == 403


def test_own_names_are_known_with_any_port():
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:80", "[::1]:9", "localhost."):
        assert refused(access(), host=host) is None, host
    wide = access(host="0.0.0.0", no_auth=True, allow_host=["chat.example.org"])
    assert refused(wide, host="10.0.0.1:8000") is refused(wide, host="chat.example.org") is None
    assert refused(wide, host="evil.example") == 403


def test_a_page_of_another_origin_is_refused():
    for origin in ("http://localhost:3000", "https://evil.example", "null", "http://localhost:8000.evil.example", ""):
        assert refused(access(), host="localhost:8000", origin=origin) == 403, origin
    assert refused(access(), host="localhost:8000", origin="http://localhost:8000") is None


def test_a_client_is_an_address_and_of_ipv6_a_network():
    def client(address):
        return access().client({}, (address, 1))

    assert len({client(address) for address in ("10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8:0:1::1")}) == 4
    assert client("2001:db8::1") == client("2001:db8::ffff:ffff:ffff:ffff") == client("2001:db8::7%eth0")
    assert client("::ffff:10.0.0.1") == client("10.0.0.1")
    assert access().client({}, None) == ""
