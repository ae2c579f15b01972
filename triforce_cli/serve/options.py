"""The options of `triforce serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..options import SERVING, AnsweringOptions, flag, new_tokens, option
from ..parameters import FILE, PORT, SECONDS, TEXT, whole

_HOST, _PORT = "127.0.0.1", 8000


@dataclass(frozen=True, kw_only=True)
class ServeOptions(AnsweringOptions):
    """The options of `triforce serve`."""

    json: Path | None = None  # no option here: a server has no end to report
    host: Annotated[
        str | None,
        option(
            SERVING,
            TEXT,
            "The address to listen at. Any address but loopback (this machine only) needs --api-key or --no-auth. "
            f"Default: {_HOST}.",
        ),
    ] = None
    port: Annotated[
        int | None,
        option(SERVING, PORT, f"The port to listen at; 0 takes a free port and prints it. Default: {_PORT}."),
    ] = None
    uds: Annotated[
        Path | None,
        option(
            SERVING,
            FILE,
            "Listen at a Unix socket instead of --host and --port. The server creates this file; only its owner can "
            "open it, unless its mode is changed. Without a key, everyone who can open it is answered.",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        option(
            SERVING,
            TEXT,
            "The key that requests must contain (Authorization: Bearer KEY). [bold]@FILE[/] reads it from a file, so "
            "that no list of processes shows it. A file may have several keys, one per line; requests with different "
            "keys take turns. Without a key, only the user who runs the server is answered (with --uds: everyone who "
            "can open the socket).",
        ),
    ] = None
    no_auth: Annotated[bool, flag("--no-auth", SERVING, "Answer everyone who can reach the server, without a key.")] = (
        False
    )
    allow_host: Annotated[
        list[str] | None,
        option(
            SERVING,
            TEXT,
            "A further host name by which clients reach this server, such as a proxy's. Requests for other names are "
            "refused. May be repeated.",
        ),
    ] = None
    max_queue: Annotated[
        int, option(SERVING, whole(1), "Maximum number of requests in the queue; further ones are refused (429).")
    ] = 64
    grace: Annotated[
        float,
        option(
            SERVING,
            SECONDS,
            "Seconds that running answers may go on after SIGTERM or Ctrl-C; a second signal ends them.",
        ),
    ] = 30.0
    save_prompts: Annotated[
        bool,
        flag(
            "--save-prompts",
            SERVING,
            "Save prompts of 1,024 tokens or more as contexts during their prefill. Later prompts start from them, "
            "also after a restart. "
            "Without this option, only texts that clients upload are saved.",
        ),
    ] = False
    max_new_tokens: Annotated[
        int, new_tokens(1, "Maximum number of tokens of an answer; a request may give its own.")
    ] = 256

    @property
    def address(self) -> tuple[str, int]:
        """The host and port to listen on, if it is not a Unix socket."""
        return self.host or _HOST, _PORT if self.port is None else self.port
