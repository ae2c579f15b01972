"""A server in the tests' process, whose limits and threads are at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from served import Client
from triforce.cli.serve.access import Access
from triforce.cli.serve.http_limits import ServerLimits
from triforce.cli.serve.listening import listener
from triforce.cli.serve.options import ServeOptions
from triforce.cli.serve.run import Server


class ServerWithin(Client):
    """A server in this process."""

    def __init__(
        self,
        pair: tuple[Path, Path],
        *,
        load: bool = True,
        limits: dict[str, float] | None = None,
        ranks_here: Callable[[], list[int]] = list,
        **changed: Any,
    ) -> None:
        fixed = {"model": str(pair[0]), "draft": "none", "device": "cpu", "dtype": "float32", "port": 0}
        options = ServeOptions(**(fixed | changed))
        self.log: list[str] = []
        self.listening = listener(options)
        given = ServerLimits(**(limits or {}))  # pyright: ignore[reportArgumentType]
        self.server = Server(
            options, Access.of(options), self.listening, (pair[0], None), self.log.append, given, ranks_here
        )
        self.worker, self.port = self.server.worker, self.server.port
        self.server.start(load=load)
        self.wait_for(lambda: self.worker.state != "loading" or not load)

    def close(self) -> None:
        self.worker.stop()
        assert self.server.cut()


@contextmanager
def serving_within(models: tuple[Path, Path], **options: Any) -> Iterator[ServerWithin]:
    """Makes one: `with serving_within(pair, limits={"unread_s": 1}, max_queue=1) as server`."""
    found = ServerWithin(models, **options)
    try:
        yield found
    finally:
        found.close()
