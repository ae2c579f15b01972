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
            "The address to listen at. Any but this machine's own (loopback) needs --api-key or --no-auth. "
            f"Default: {_HOST}.",
        ),
    ] = None
    port: Annotated[
        int | None,
        option(SERVING, PORT, f"The port to listen at; 0 takes a free one and says which. Default: {_PORT}."),
    ] = None
    uds: Annotated[
        Path | None,
        option(
            SERVING,
            FILE,
            "Listen at a Unix socket instead of --host and --port: a file that is made here, which only its owner can "
            "open unless its mode is changed. Whoever can open it is answered where there is no key.",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        option(
            SERVING,
            TEXT,
            "The key that requests must bring (Authorization: Bearer KEY); [bold]@FILE[/] reads it from a file, so "
            "that no list of processes shows it. A file may have several, one a line: each one's requests take turns. "
            "Without a key only the user who serves is answered.",
        ),
    ] = None
    no_auth: Annotated[bool, flag("--no-auth", SERVING, "Answer anybody who can reach it, without a key.")] = False
    allow_host: Annotated[
        list[str] | None,
        option(
            SERVING,
            TEXT,
            "A further name that this server is reached by, such as a proxy's; requests for others are refused. May be "
            "repeated.",
        ),
    ] = None
    max_queue: Annotated[
        int, option(SERVING, whole(1), "Requests that wait in the queue, at most; further ones are refused (429).")
    ] = 64
    grace: Annotated[
        float,
        option(SERVING, SECONDS, "How long answers may go on after SIGTERM or Ctrl-C; a second one cuts them."),
    ] = 30.0
    save_prompts: Annotated[
        bool,
        flag(
            "--save-prompts",
            SERVING,
            "Save what is read of long prompts as contexts, from which later ones start, also after a restart. Without "
            "it nothing is saved but what is uploaded.",
        ),
    ] = False
    max_new_tokens: Annotated[
        int, new_tokens(1, "Maximum number of tokens of an answer; a request may give its own.")
    ] = 256

    @property
    def address(self) -> tuple[str, int]:
        """The host and port to listen on, if it is not a Unix socket."""
        return self.host or _HOST, _PORT if self.port is None else self.port
