"""Access control: the names of this server, the API keys that requests must have, and, without a key, the account that
requests must come from."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from ...tp.errors import UsageError
from ..session.source import read_bytes
from ..session.wire import BodyError
from .options import ServeOptions

_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_SCRIPTS = ("page", "answer", "elements", "kept", "markdown", "parts", "plot", "server")

WITHOUT_KEY = ("/health", "/", "/page.css", *(f"/{name}.js" for name in _SCRIPTS))
"""Paths that need no key, because their content is not secret. The page asks for the key."""


@dataclass(frozen=True)
class Access:
    """The checks of every request that come before all others."""

    keys: tuple[bytes, ...]
    """The API keys, one of which a request must have; empty: see `own_user`."""
    hosts: frozenset[str] | None
    """Names and addresses of this server, in lower case. `None`: any, because a Unix socket has no name."""
    any_address: bool
    """Whether every address counts as an address of this server, because it does not only listen on loopback. A web
    page elsewhere whose own name leads here still sends that name, which is refused."""
    own_user: bool
    """Whether only requests of the account that runs the server, and of root, are answered."""
    anybody: bool
    """Whether everybody who can reach the server is answered (--no-auth)."""

    @classmethod
    def of(cls, options: ServeOptions) -> Access:
        """Makes the access control that the options ask for.

        Raises:
            UsageError: anybody on the network could send requests, and no option allows it; a key is not valid; or
                there are two places to listen on.
            TriforceError: the file with the keys cannot be read.
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
        """Whether the owner of the connection decides if a request for this path is answered."""
        return self.own_user and path not in WITHOUT_KEY

    def refusal(self, path: str, headers: Mapping[str, str], owner: int | None) -> BodyError | None:
        """The reason why a request is refused; `None` if it is not.

        Args:
            path: that of the request.
            headers: by their names in lower case.
            owner: the user id of the other end of the connection; `None` if it is not known. Only used if `asks_owner`.
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
        """The client of a request, for the queue: by its key if there are several keys, otherwise by its address."""
        return f"key {self._key_number(headers)}" if len(self.keys) > 1 else client_at(address)

    def _key_number(self, headers: Mapping[str, str]) -> int | None:
        """The number of the key that a request has; `None` if it has none. The key is compared with each of the keys,
        in constant time."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer] if scheme.lower() == "bearer" else []
        given += [headers["x-api-key"]] if "x-api-key" in headers else []
        same = [sum(hmac.compare_digest(one.strip().encode(), key) for one in given) > 0 for key in self.keys]
        return same.index(True) if any(same) else None

    def _is_ours(self, name: str) -> bool:
        return self.hosts is None or name in self.hosts or (self.any_address and _is_address(name))


def client_at(address: tuple[str, int] | None) -> str:
    """The client at an address and port. All IPv6 addresses in a network of 64 bits count as one client, because one
    client may have all of them."""
    return "" if address is None else _client(address[0].partition("%")[0])  # `None`: a Unix socket


@lru_cache(maxsize=1024)
def _client(host: str) -> str:
    """`client_at` for an address without its zone. Cached, as each connection and most requests ask for it."""
    if not _is_address(host):
        return host
    found = ipaddress.ip_address(host)
    if isinstance(found, ipaddress.IPv4Address):
        return host
    return str(found.ipv4_mapped or ipaddress.IPv6Network((found, 64), strict=False))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on this host."""
    name = host.lower().strip("[]")
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _refusal_of(owner: int | None) -> BodyError | None:
    """The reason why requests of a connection are refused without a key; `None` if they are not. Root is answered,
    because root can read everything that the account of the server can."""
    if owner is not None and owner in (os.geteuid(), 0):
        return None
    what = "it is not known which user sent this request" if owner is None else "another user sent this request"
    return BodyError(
        f"{what}, and a server without a key answers only the user who started it, and root: start triforce serve with "
        "--api-key @FILE, with --uds PATH (a Unix socket), or with --no-auth to answer everyone",
        code="other_user", status=401,
    )  # fmt: skip


def _keys(option: str | None) -> tuple[bytes, ...]:
    """The keys of --api-key, without duplicates."""
    if option is None:
        return ()
    if option.startswith("@"):
        lines = read_bytes(Path(option[1:]), "--api-key").splitlines()
        found = [line.strip() for line in lines if line.strip()]
    else:
        found = [option.strip().encode("utf-8", "surrogateescape")]
    if not found or not all(key and all(32 < byte <= 126 for byte in key) for key in found):
        raise UsageError(
            "--api-key must be ASCII letters, digits and signs without spaces; a file (@FILE) has one or several keys, "
            "one per line"
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
