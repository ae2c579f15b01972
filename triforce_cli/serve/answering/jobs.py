"""The work of the engine for clients, and its events. The thread that serves HTTP makes jobs, and the engine's thread
does them."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ....offload.contexts.manifest import ContextError, Frame, Segment
from ....offload.contexts.model import ModelContexts
from ....offload.speculation.grammar import GrammarError
from ....tp.errors import CapacityError, PeerError, TriforceError
from ...session.logprobs import Entry
from ...session.prompt import Prompt
from ...session.response import AnswerEnd, Timings
from ...session.wire import AnswerRequest, BodyError


@dataclass(frozen=True)
class Progress:
    """The progress of the prefill of a prompt or a text."""

    total: int
    """The number of tokens."""
    cached: int
    """The number of tokens that were already in a cache."""
    processed: int
    """The number of tokens that are in the cache by now."""
    seconds: float
    number: int = 0
    """The number of the first answer to the prompt."""


@dataclass(frozen=True)
class Piece:
    """Further text of one of a request's answers."""

    number: int
    text: str
    logprobs: Sequence[Entry] | None = None
    """The log-probabilities of its tokens, if they were asked for."""
    timings: Timings | None = None
    """The timings of the answer so far, if they were asked for."""

    @property
    def num_bytes(self) -> int:
        """Its size in memory in bytes, approximately."""
        described = sum(1 + len(entry["top_logprobs"]) for entry in self.logprobs or ())
        return len(self.text.encode()) + described * _DESCRIBED_BYTES

    def joined(self, later: Piece) -> Piece:
        """Joins this piece and the next piece of the same answer."""
        logprobs = None if later.logprobs is None else [*(self.logprobs or ()), *later.logprobs]
        return Piece(self.number, self.text + later.text, logprobs, later.timings)


_DESCRIBED_BYTES = 512
"""Bytes that Python takes for a token with its logarithm and its bytes, approximately."""


@dataclass(frozen=True)
class Complete:
    """One of a request's answers is complete."""

    number: int
    end: AnswerEnd


@dataclass(frozen=True)
class Saved:
    """A text was read and saved."""

    tokens: int
    """The number of tokens that had to be read."""
    seconds: float


@dataclass(frozen=True)
class Failed:
    """An error. Nothing follows it."""

    error: BodyError


Event = Progress | Piece | Complete | Saved | Failed


@dataclass(eq=False)
class _Work:
    client: str
    send: Callable[[Event], None]
    """Sends an event to the waiting request. May be called from any thread."""
    asked_at: float = field(default_factory=time.perf_counter, init=False)
    abandoned: bool = field(default=False, init=False)
    """Whether nobody waits for it any more. Any thread may set this; it is never reset."""
    begun: int = field(default=0, init=False)
    """The number of its parts that have left the queue. The queue counts them under its lock."""
    ended: int = field(default=0, init=False)
    """The number of its parts that are done."""
    reading_began: float = field(default=0.0, init=False)
    """The time at which the prefill of the present prompt began, by `time.perf_counter`; 0 before."""
    reading: int = field(default=0, init=False)
    """The number of the first answer to that prompt."""
    progress_sent: float = field(default=0.0, init=False)
    """The time at which its progress was last sent."""

    @property
    def parts(self) -> int:
        """The number of parts, which are done one by one."""
        return 1

    def begin(self) -> bool:
        """Notes that a part begins. Returns whether it is the last part."""
        self.begun += 1
        return self.begun == self.parts

    def fail(self, error: BaseException) -> None:
        """Sends an error, after which nothing follows. May be called from any thread."""
        self.abandoned = True
        self.send(Failed(as_body_error(error)))


@dataclass(eq=False)
class Job(_Work):
    """A request for answers. Each answer waits for its turn."""

    request: AnswerRequest
    prompts: Sequence[Prompt]
    timed: bool = False
    """Whether timings are wanted with each piece."""
    wants_progress: bool = False
    """Whether events about the progress of its prefill are wanted."""
    is_taken: Callable[[], bool] = lambda: True
    """Returns whether the stream of the answers has taken all events that were sent, and passed them on. `True` if they
    are not streamed, or if a client may have to read others before the first token."""
    compiled: threading.Event | None = field(default=None, init=False)
    """Set after its grammar is compiled; `None`: compiling has not begun."""

    @property
    def parts(self) -> int:
        """The number of answers."""
        return self.request.answers


@dataclass(eq=False)
class Upload(_Work):
    """A text that is to be read and saved."""

    name: str
    token_ids: Sequence[int]
    frame: Frame
    wants_progress: bool = field(default=True, init=False)
    """See `Job`."""
    damaged: Segment | None = field(default=None, init=False)
    """The first of its saved segments that is damaged."""

    def fail(self, error: BaseException) -> None:
        if isinstance(error, ContextError):
            error = BodyError(str(error), code="context_not_saved", status=507)
        super().fail(error)

    def verify(self, contexts: ModelContexts, given_up: Callable[[], bool]) -> bool:
        """Whether the saved part of the text is undamaged. Checks every checksum, which takes a while.

        Args:
            given_up: asked between segments whether to give up.

        Raises:
            BodyError: the saved part cannot be used, or this is given up.
        """
        try:
            for segment, wrong in contexts.store.verify(self.name):
                if given_up():
                    raise stopping()
                if wrong and segment.first < len(self.token_ids):
                    self.damaged = segment
                    return False
        except ContextError as error:
            raise _name_taken(error) from error
        contexts.tidy(self.name, "client")
        return True

    def is_saved(self, contexts: ModelContexts) -> bool:
        """Whether the whole text is saved under its name, as far as is known: damaged segments that were found are
        written again, and checksums are not checked.

        Raises:
            BodyError: another text is saved under the name, or the saved part cannot be used.
        """
        try:
            saved, segments = contexts.saved(self.name, self.token_ids)
        except ContextError as error:
            raise _name_taken(error) from error
        return saved == len(self.token_ids) and self.damaged not in segments


def _name_taken(error: ContextError) -> BodyError:
    return BodyError(str(error), "name", code="context_exists", status=409)


@dataclass(eq=False)
class Check(_Work):
    """A few tokens that nobody receives, which show whether the engine works."""

    wants_progress: bool = field(default=False, init=False)
    """See `Job`."""


def as_body_error(error: BaseException) -> BodyError:
    """Converts an error for a client. If the error is a fault of the server, the client gets no details."""
    if isinstance(error, BodyError):
        return error
    if isinstance(error, PeerError):
        return rank_ended()
    if isinstance(error, CapacityError):
        return BodyError(str(error), code="out_of_memory", status=503)
    if isinstance(error, ContextError):
        return BodyError(str(error), "context", code="context_not_usable")
    if isinstance(error, GrammarError):
        return BodyError(str(error), code="grammar_not_usable")
    if isinstance(error, TriforceError):
        return BodyError(str(error), code="not_answered", status=500)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BodyError("the server has no space left on its disk", code="disk_full", status=507)
    return BodyError(f"the server failed ({type(error).__name__})", code="internal_error", status=500)


def rank_ended() -> BodyError:
    """The error for waiting requests if another rank has ended."""
    return BodyError("a rank of the server has ended, and the server with it", code="rank_ended", status=500)


def queue_full() -> BodyError:
    """The error for requests for which the queue has no place."""
    return BodyError("too many requests wait already; ask again later", code="queue_full", status=429)


def engine_failed() -> BodyError:
    """The error for requests that wait when the engine has failed permanently, or come later."""
    return BodyError("the engine has failed, and the server ends with it", code="engine_failed", status=500)


def stopping() -> BodyError:
    """The error for requests that wait when the server stops, or come later."""
    return BodyError("the server is stopping; ask again later, or ask another server", code="stopping", status=503)
