"""What the engine is asked to do for clients, and what it tells of it. Jobs are made by the thread that serves HTTP and
worked on by the engine's."""

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
    """A prompt or a text is being read."""

    total: int
    """Tokens."""
    cached: int
    """Those that were known already."""
    processed: int
    """Those that are known or read by now."""
    seconds: float
    number: int = 0
    """Of the first answer to the prompt."""


@dataclass(frozen=True)
class Piece:
    """More text of one of a request's answers."""

    number: int
    text: str
    logprobs: Sequence[Entry] | None = None
    """Of the tokens that came with it, where they were asked for."""
    timings: Timings | None = None
    """Of that answer so far, where they were asked for."""

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, about."""
        described = sum(1 + len(entry["top_logprobs"]) for entry in self.logprobs or ())
        return len(self.text.encode()) + described * _DESCRIBED_BYTES

    def joined(self, later: Piece) -> Piece:
        """This piece and the next one of the same answer, as one."""
        logprobs = None if later.logprobs is None else [*(self.logprobs or ()), *later.logprobs]
        return Piece(self.number, self.text + later.text, logprobs, later.timings)


_DESCRIBED_BYTES = 512
"""What Python takes for a token with its logarithm and its bytes, about."""


@dataclass(frozen=True)
class Complete:
    """One of a request's answers is complete."""

    number: int
    end: AnswerEnd


@dataclass(frozen=True)
class Saved:
    """A text was read and saved."""

    tokens: int
    """Those that had to be read."""
    seconds: float


@dataclass(frozen=True)
class Failed:
    """Nothing follows."""

    error: BodyError


Event = Progress | Piece | Complete | Saved | Failed


@dataclass(eq=False)
class _Work:
    client: str
    send: Callable[[Event], None]
    """Tells whoever waits for it; from any thread."""
    asked_at: float = field(default_factory=time.perf_counter, init=False)
    abandoned: bool = field(default=False, init=False)
    """Whether nobody waits for it any more. Any thread may set it, and none takes it back."""
    begun: int = field(default=0, init=False)
    """Its parts that have left the queue, which counts them under its lock."""
    ended: int = field(default=0, init=False)
    """Its parts that are done."""
    reading_began: float = field(default=0.0, init=False)
    """When the prompt that is read was first, by `time.perf_counter`; 0 before."""
    reading: int = field(default=0, init=False)
    """The first answer to that prompt."""
    progress_sent: float = field(default=0.0, init=False)
    """When that was last said."""

    @property
    def parts(self) -> int:
        """Those that are done one by one."""
        return 1

    def begin(self) -> bool:
        """Takes note that a part begins; whether it is the last one."""
        self.begun += 1
        return self.begun == self.parts

    def fail(self, error: BaseException) -> None:
        """Says that nothing follows; from any thread."""
        self.abandoned = True
        self.send(Failed(as_body_error(error)))


@dataclass(eq=False)
class Job(_Work):
    """A request for answers, each of which waits for its turn."""

    request: AnswerRequest
    prompts: Sequence[Prompt]
    timed: bool = False
    """Whether timings are wanted with each piece."""
    wants_progress: bool = False
    """Whether it is to be told how its prompt is read."""
    compiled: threading.Event | None = field(default=None, init=False)
    """Set once its grammar is compiled; `None`: nobody has begun to do that for it."""

    @property
    def parts(self) -> int:
        """Its answers."""
        return self.request.answers


@dataclass(eq=False)
class Upload(_Work):
    """A text that is to be read and saved."""

    name: str
    token_ids: list[int]
    frame: Frame
    wants_progress: bool = field(default=True, init=False)
    """As `Job` has it."""
    damaged: Segment | None = field(default=None, init=False)
    """The first segment that is saved of it, but damaged."""

    def fail(self, error: BaseException) -> None:
        if isinstance(error, ContextError):
            error = BodyError(str(error), code="context_not_saved", status=507)
        super().fail(error)

    def verify(self, contexts: ModelContexts, given_up: Callable[[], bool]) -> bool:
        """Whether what is saved of it is undamaged: looks at every checksum, which takes a while.

        Args: `given_up` is asked between segments.

        Raises:
            BodyError: what is saved cannot be used, or this is given up.
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
        """Whether all of it is saved under its name, as far as that is known: what was found damaged was written anew,
        and checksums are not looked at.

        Raises:
            BodyError: another text is, or what is saved cannot be used.
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
    """A few tokens for nobody, which show whether the engine works."""

    wants_progress: bool = field(default=False, init=False)
    """As `Job` has it."""


def as_body_error(error: BaseException) -> BodyError:
    """What a client is told of an error; of one that is a fault here, not more than that."""
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
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return BodyError("the server has no space left on its disk", code="disk_full", status=507)
    return BodyError(f"the server failed ({type(error).__name__})", code="internal_error", status=500)


def rank_ended() -> BodyError:
    """What those are told who wait when another rank has ended."""
    return BodyError("a rank of the server has ended, and the server with it", code="rank_ended", status=500)


def queue_full() -> BodyError:
    """What those are told for whom there is no place in the queue."""
    return BodyError("too many requests wait already; ask again later", code="queue_full", status=429)


def engine_failed() -> BodyError:
    """What those are told who wait when the engine has failed for good, or ask then."""
    return BodyError("the engine has failed, and the server ends with it", code="engine_failed", status=500)


def stopping() -> BodyError:
    """What those are told who wait when the server stops, or ask then."""
    return BodyError("the server is stopping; ask again later, or ask another server", code="stopping", status=503)
