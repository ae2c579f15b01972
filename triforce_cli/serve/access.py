"""Who may ask: where this server listens, which names are its own, and the key that requests must bring."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ...tp.errors import TriforceError, UsageError
from ..session.source import read_bytes
from ..session.wire import BodyError
from .options import ServeOptions

_LOOPBACK = ("localhost", "127.0.0.1", "::1")

WITHOUT_KEY = ("/health", "/", "/page.css", "/page.js", "/kept.js", "/markdown.js", "/plot.js", "/server.js")
"""Paths that need no key: what they say is nobody's secret. The page asks for the key."""


@dataclass(frozen=True)
class Access:
    """What is checked of every request before anything else."""

    key: bytes | None
    hosts: frozenset[str]
    """Names and addresses of this server, in lower case."""
    any_address: bool
    """Whether every address is taken for its own: it listens at more than the loopback one. A page elsewhere that has
    its own name lead here still brings that name."""

    @classmethod
    def of(cls, options: ServeOptions) -> Access:
        """Raises:
        UsageError: anybody on the network could ask, and it was not said that they may; or a key that is none.
        TriforceError: the file of the key cannot be read.
        """
        if options.api_key is not None and options.no_auth:
            raise UsageError("--api-key and --no-auth are both given; give one of them")
        loopback = is_loopback(options.host)
        if not loopback and options.api_key is None and not options.no_auth:
            raise UsageError(
                f"--host {options.host} can be reached by others: give --api-key @FILE, which requests must then "
                "bring, or --no-auth to answer anybody"
            )
        own = [] if loopback else [socket.gethostname(), socket.getfqdn()]
        hosts = {host.lower().strip("[]") for host in (options.host, *_LOOPBACK, *own, *(options.allow_host or []))}
        return cls(_key(options.api_key), frozenset(hosts), not loopback)

    def refusal(self, path: str, headers: Mapping[str, str]) -> BodyError | None:
        """Why a request is not answered, if it is not. Names of headers are in lower case."""
        host = headers.get("host", "").lower()
        if not self._is_ours(_hostname(host)):
            return BodyError(
                "the request is for a host that is not this server; triforce serve --allow-host adds a name",
                code="foreign_host", status=403,
            )  # fmt: skip
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host:
            return BodyError("a page of another origin may not ask here", code="foreign_origin", status=403)
        if self.key is None or path in WITHOUT_KEY:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.key):
            return None
        return BodyError(
            "the key of this server is missing or wrong; send it as Authorization: Bearer KEY",
            code="invalid_api_key", status=401,
        )  # fmt: skip

    def _is_ours(self, name: str) -> bool:
        return name in self.hosts or (self.any_address and _is_address(name))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it there."""
    name = host.lower().strip("[]")
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def listener(options: ServeOptions) -> socket.socket:
    """A socket at the host and port, which does not listen yet.

    Raises:
        TriforceError: there cannot be one.
    """
    where = f"--host {options.host} --port {options.port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            options.host.strip("[]"), options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise TriforceError(f"{where} cannot be listened at: {error.strerror or error}") from error
    return found


def _key(option: str | None) -> bytes | None:
    if option is None:
        return None
    if option.startswith("@"):
        raw = read_bytes(Path(option[1:]), "--api-key").strip()
    else:
        raw = option.strip().encode("utf-8", "surrogateescape")
    if not raw or any(byte <= 32 or byte > 126 for byte in raw):
        raise UsageError("--api-key must be letters, digits and signs without spaces, at least one")
    return raw


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
