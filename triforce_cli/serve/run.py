"""One run of `triforce serve`: a thread for HTTP, a thread for the engine, and signals in the main thread."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import uvicorn
from anyio.to_thread import current_default_thread_limiter, run_sync

from ...offload.vocabulary import check_pair
from ...tp.errors import TriforceError
from ...tp.matrices import num_parameters
from ...tp.parallel.place import Place
from ...tp.parallel.siblings import siblings
from ..session.prompt import saved_text
from ..session.wire import BodyError
from ..terminal.stopping import Signals, Stop
from ..terminal.streams import print_note
from .access import Access
from .answering.jobs import rank_ended, stopping
from .answering.metrics import Metrics
from .answering.worker import Worker
from .http_limits import ServerLimits
from .memory import FreeMemory
from .options import ServeOptions
from .owner import Owners
from .web.app import make_app
from .web.connection import Connection, Connections
from .web.service import Service

_BACKLOG = 2048
"""Maximum number of connections that wait to be accepted."""

_CUT_S = 5.0
"""Maximum seconds that threads may take to end after everything was cut."""

_SWITCH_S = 5e-4
"""Seconds after which a thread must give the interpreter to others. Python's default is ten times as long. An answer
takes the interpreter a hundred times, and beside a chat template that loops, it had to wait each time."""

_OWED_S = 2e-3
"""After this number of seconds of computing, the thread that serves HTTP leaves the interpreter to others."""

_TRIM_S = 2.0
"""Seconds after which free memory is returned to the system, repeatedly."""


def run(
    options: ServeOptions,
    access: Access,
    listening: socket.socket,
    directories: tuple[Path, Path | None],
    signals: Signals,
) -> None:
    """Serves until a signal comes, or the engine fails.

    Args:
        directories: those of the target and the draft.

    Raises:
        TriforceError: the model cannot be loaded, or the server cannot continue.
        Stop: a signal has stopped the server.
    """
    server = Server(options, access, listening, directories, print_note)
    print_note(server.introduction)
    if access.anybody:
        print_note(
            "--no-auth: everyone who can reach this server is answered, and can ask about and delete all saved contexts"
        )
    _allow_many_connections()
    server.start()
    ended: BaseException | None = None
    why = stopping()
    try:
        with signals.interruptible():
            server.worker.ended.wait()
        ended = server.worker.error or TriforceError("the thread that serves HTTP has ended")
    except Stop as stop:
        why = _let_end(server, options.grace, signals)
        ended = server.worker.error or stop
    stopped = server.cut(why)
    if isinstance(ended, Stop) and not stopped:
        _leave(ended)
    if ended is not None and not isinstance(ended, TriforceError | Stop):
        raise TriforceError(f"the engine failed ({type(ended).__name__}: {ended})") from ended
    if ended is not None:
        raise ended


def _allow_many_connections() -> None:
    """Raises the limit of open files and connections of this process to the allowed maximum."""
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _let_end(server: Server, grace_s: float, signals: Signals) -> BodyError:
    """Waits until answers have ended, `grace_s` seconds have passed, or a second signal comes. Does not wait if another
    rank has ended, which the launcher reports with a signal. Returns the error for requests whose answers have not
    ended."""
    worker = server.worker
    loading = worker.state == "loading"
    worker.stop()
    signals.forget_stop(repeats=server.ranks > 1)
    if loading or worker.ended.is_set():
        return stopping()
    if server.lacks_a_rank:
        print_note("a rank has ended: running answers are cut off")
        return rank_ended()
    print_note(f"stopping: {worker.running} answers may go on for {grace_s:g} s; a second signal ends them")
    try:
        with signals.interruptible():
            worker.ended.wait(grace_s)
    except Stop:
        pass
    return rank_ended() if server.lacks_a_rank else stopping()


def _leave(stop: Stop) -> NoReturn:
    """Ends the process although a thread computes. The interpreter must not be finalized then."""
    if stop.message:
        print_note(stop.message)
    sys.stdout.flush()
    os._exit(stop.exit_code)


class Server:
    """The threads of a server, and the objects that they share."""

    def __init__(
        self,
        options: ServeOptions,
        access: Access,
        listening: socket.socket,
        directories: tuple[Path, Path | None],
        note: Callable[[str], None],
        limits: ServerLimits | None = None,
        ranks_here: Callable[[], Collection[object]] = siblings,
    ) -> None:
        """Args:
        note: writes a line for people and the log.
        limits: default `ServerLimits()`.
        ranks_here: returns the running ranks on this machine that one launcher has started.

        Raises:
            TriforceError: the two models do not fit together, or the context that is asked for cannot be used.
        """
        config = check_pair(*directories, options.settings.rope_scaling)
        if options.context is not None:
            saved_text(options.context, config)
        self._note = note
        metrics, limits = Metrics(), (limits or ServerLimits()).of_model(config.max_position_embeddings)
        self._memory = FreeMemory()
        metrics.watch(
            "free_memory_bytes",
            "Host memory that the process keeps for later use; of rank 0 if there are several ranks",
            lambda: self._memory.num_bytes,
        )
        self.worker = Worker(options, directories[0], metrics, note)
        self.service = Service(options, directories[0], config, self.worker, limits)
        self.app = make_app(self.service, access, metrics, note)
        self._http = HttpThread(
            self.app, listening, limits, metrics.unread.inc, self.worker.stop, lambda: self.worker.computes
        )
        self._unix = listening.getsockname() if listening.family == socket.AF_UNIX else None
        self._host, self.port = ("", 0) if self._unix is not None else listening.getsockname()[:2]
        place = Place.from_environment()
        self.ranks = place.size if place else 1
        self._ranks_here, self._ranks_at_first = ranks_here, len(ranks_here())
        self._ended = threading.Event()
        self._million = num_parameters(config) / 1e6

    @property
    def lacks_a_rank(self) -> bool:
        """Whether one of the ranks on this machine has ended."""
        return len(self._ranks_here()) < self._ranks_at_first

    @property
    def introduction(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        where = f"http://{host}:{self.port}" if self._unix is None else f"unix:{self._unix}"
        ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        what = f"{self.service.name}, {self._million:,.1f} M parameters{ranks}"
        return f"{what}: loading; listening at {where}"

    def start(self, *, load: bool = True) -> None:
        """Starts to listen and, if `load`, to load the model."""
        sys.setswitchinterval(_SWITCH_S)
        try:
            tempfile.gettempdir()  # looked for now: on a disk that is full later, none would be found
        except FileNotFoundError:
            self._note("warning: no temporary directory can be written to, so long bodies will fail; set TMPDIR")
        threading.Thread(target=self._give_memory_back, name="memory", daemon=True).start()
        self._http.start()
        if load:
            self.worker.start()

    def cut(self, why: BodyError | None = None) -> bool:
        """Interrupts all work, and refuses waiting requests with `why`; by default, because the server stops. Returns
        whether all threads have ended."""
        stopped = self.worker.cut(_CUT_S, why or stopping())
        why = why or self.worker.refusal()
        self.service.close(why)
        stopped = self._http.stop(_CUT_S) and stopped
        self.service.end(why)
        self._ended.set()
        return stopped

    def _give_memory_back(self) -> None:
        frozen = False
        while not self._ended.wait(_TRIM_S):
            freeze = not frozen and self.worker.state == "ready"
            self._memory.give_back(freeze=freeze, runs=self.worker.running > 0)
            if freeze and self.worker.reserves:
                self._memory.reserve()
            frozen |= freeze


class HttpThread:
    """Runs an application until `stop`."""

    def __init__(
        self,
        app: object,
        listening: socket.socket,
        limits: ServerLimits,
        on_unread: Callable[[], None],
        on_failure: Callable[[], None],
        engine_computes: Callable[[], bool],
    ) -> None:
        """Args:
        on_unread: called if a connection is closed because the client does not read.
        on_failure: called if the thread ends without `stop`.
        engine_computes: returns whether the engine computes. Then this thread pauses for it.
        """
        # What clients send wrong is answered, and does not fill the log; hence `log_level` too.
        logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
        self._owners = Owners()
        config = uvicorn.Config(
            app,  # pyright: ignore[reportArgumentType]
            http=partial(  # pyright: ignore[reportArgumentType]
                Connection, limits, Connections(limits.connections), on_unread, self._owners
            ),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._listening, self._on_failure, self._engine_computes = listening, on_failure, engine_computes
        # Connections inherit it.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.send_buffer_bytes)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        self._listening.listen(_BACKLOG)  # from here on whoever comes waits for the thread
        self._thread.start()

    def stop(self, wait_s: float) -> bool:
        """Stops the thread, and returns whether it has ended within `wait_s` seconds. Responses that are being sent
        have two seconds."""
        self._server.should_exit = True
        self._thread.join(wait_s)
        self._owners.close()
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with asyncio.Runner(
                loop_factory=lambda: asyncio.SelectorEventLoop(SharingSelector(self._engine_computes))
            ) as runner:
                runner.run(self._serve())
        finally:
            if not self._server.should_exit:
                self._on_failure()

    async def _serve(self) -> None:
        # Files of uploads are written and read in a thread, which is begun now. By itself there would be up to 40, as
        # many as upload at a time, and they would stay.
        current_default_thread_limiter().total_tokens = 1
        await run_sync(int)
        await self._server.serve([self._listening])


class SharingSelector(selectors.DefaultSelector):
    """The selector with which an event loop waits for its connections. While the engine computes, it leaves the
    interpreter to other threads for as long as the loop has computed. Otherwise a flood of requests would slow an
    answer down to a tenth of its speed."""

    def __init__(self, engine_computes: Callable[[], bool]) -> None:
        super().__init__()
        self._engine_computes, self._since = engine_computes, time.thread_time()
        self._owed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._owed_s += time.thread_time() - self._since
        if not self._engine_computes():
            self._owed_s = 0.0
        elif self._owed_s > _OWED_S:
            time.sleep(self._owed_s)
            self._owed_s = 0.0
        began = time.monotonic()
        found = super().select(timeout)
        self._owed_s = max(0.0, self._owed_s - (time.monotonic() - began))
        self._since = time.thread_time()
        return found
