"""Who may ask: which names are this server's own, the keys that requests must bring, and without one the account that
they must come from."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ...tp.errors import UsageError
from ..session.source import read_bytes
from ..session.wire import BodyError
from .options import ServeOptions

_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_SCRIPTS = ("page", "answer", "elements", "kept", "markdown", "parts", "plot", "server")

WITHOUT_KEY = ("/health", "/", "/page.css", *(f"/{name}.js" for name in _SCRIPTS))
"""Paths that need no key: what they say is nobody's secret. The page asks for the key."""


@dataclass(frozen=True)
class Access:
    """What is checked of every request before anything else."""

    keys: tuple[bytes, ...]
    """One of which a request must bring; none: see `own_user`."""
    hosts: frozenset[str] | None
    """Names and addresses of this server, in lower case; `None`: any, as a Unix socket has no name."""
    any_address: bool
    """Whether every address is taken for its own: it listens at more than the loopback one. A page elsewhere that has
    its own name lead here still brings that name."""
    own_user: bool
    """Whether the account that serves is the only one that is answered, besides root."""
    anybody: bool
    """Whether whoever can reach it is answered, as --no-auth says."""

    @classmethod
    def of(cls, options: ServeOptions) -> Access:
        """Raises:
        UsageError: anybody on the network could ask, and it was not said that they may; a key that is none; or two
            places to listen at.
        TriforceError: the file of the keys cannot be read.
        """
        if options.api_key is not None and options.no_auth:
            raise UsageError("--api-key and --no-auth are both given; give one of them")
        if options.uds is not None:
            if options.host is not None or options.port is not None:
                raise UsageError("--uds and --host or --port are both given; give a Unix socket or an address")
            return cls(_keys(options.api_key), None, False, False, options.no_auth)
        host = options.address[0]
        loopback = is_loopback(host)
        if not loopback and options.api_key is None and not options.no_auth:
            raise UsageError(
                f"--host {host} can be reached by others: give --api-key @FILE, so that requests need this key, or "
                "--no-auth to answer everyone"
            )
        own = [] if loopback else [socket.gethostname(), socket.getfqdn()]
        hosts = {name.lower().strip("[]") for name in (host, *_LOOPBACK, *own, *(options.allow_host or []))}
        keys = _keys(options.api_key)
        return cls(keys, frozenset(hosts), not loopback, not keys and not options.no_auth, options.no_auth)

    def asks_owner(self, path: str) -> bool:
        """Whether it depends on the owner of the connection if a request for this path is answered."""
        return self.own_user and path not in WITHOUT_KEY

    def refusal(self, path: str, headers: Mapping[str, str], owner: int | None) -> BodyError | None:
        """Why a request is not answered, if it is not.

        Args:
        headers: by their names in lower case.
        owner: the user id that holds the other end of the connection, `None` where that cannot be told; matters where
            `asks_owner` says so.
        """
        host = headers.get("host", "").lower()
        if not self._is_ours(_hostname(host)):
            return BodyError(
                "the request is for a host that is not this server; triforce serve --allow-host adds a name",
                code="foreign_host", status=403,
            )  # fmt: skip
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host:
            return BodyError(
                "requests from a web page of another origin are refused", code="foreign_origin", status=403
            )
        if path in WITHOUT_KEY:
            return None
        if self.own_user:
            return _refusal_of(owner)
        if not self.keys or self._key_number(headers) is not None:
            return None
        return BodyError(
            "the key of this server is missing or wrong; send it as Authorization: Bearer KEY, or as x-api-key",
            code="invalid_api_key", status=401,
        )  # fmt: skip

    def client(self, headers: Mapping[str, str], address: tuple[str, int] | None) -> str:
        """Whose request it is, for the queue: where there are several keys, that of the key, else of the address."""
        return f"key {self._key_number(headers)}" if len(self.keys) > 1 else client_at(address)

    def _key_number(self, headers: Mapping[str, str]) -> int | None:
        """Which of the keys a request brings, if it brings one; compared with each, in the same time for all."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer] if scheme.lower() == "bearer" else []
        given += [headers["x-api-key"]] if "x-api-key" in headers else []
        same = [sum(hmac.compare_digest(one.strip().encode(), key) for one in given) > 0 for key in self.keys]
        return same.index(True) if any(same) else None

    def _is_ours(self, name: str) -> bool:
        return self.hosts is None or name in self.hosts or (self.any_address and _is_address(name))


def client_at(address: tuple[str, int] | None) -> str:
    """Whose an address and port is: of IPv6 addresses one has as many as a network of 64 bits holds."""
    if address is None:  # a Unix socket
        return ""
    host = address[0].partition("%")[0]
    if not _is_address(host):
        return host
    found = ipaddress.ip_address(host)
    if isinstance(found, ipaddress.IPv4Address):
        return host
    return str(found.ipv4_mapped or ipaddress.IPv6Network((found, 64), strict=False))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it there."""
    name = host.lower().strip("[]")
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _refusal_of(owner: int | None) -> BodyError | None:
    """Why the requests of a connection are not answered without a key, if they are not. Root may read all that the
    account that serves may, and is answered."""
    if owner is not None and owner in (os.geteuid(), 0):
        return None
    what = "it is not known which user sent this request" if owner is None else "another user sent this request"
    return BodyError(
        f"{what}, and a server without a key answers only the user who started it, and root: start triforce serve with "
        "--api-key @FILE, with --uds PATH (a Unix socket), or with --no-auth to answer everyone",
        code="other_user", status=401,
    )  # fmt: skip


def _keys(option: str | None) -> tuple[bytes, ...]:
    """The keys of --api-key, each once."""
    if option is None:
        return ()
    if option.startswith("@"):
        lines = read_bytes(Path(option[1:]), "--api-key").splitlines()
        found = [line.strip() for line in lines if line.strip()]
    else:
        found = [option.strip().encode("utf-8", "surrogateescape")]
    if not found or not all(key and all(32 < byte <= 126 for byte in key) for key in found):
        raise UsageError(
            "--api-key must be letters, digits and signs without spaces; a file may have several keys, one per line"
        )
    return tuple(dict.fromkeys(found))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _hostname(host: str) -> str:
    """The name in a `Host` header, without port and brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""
