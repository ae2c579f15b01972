"""Errors that a user can act on: the command line prints their message and exits with their code.

Any other exception is a bug.
"""

import traceback
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class TriforceError(Exception):
    """An error whose message names the problem, the value and the remedy (exit code 1)."""

    exit_code = 1


class UsageError(TriforceError):
    """An impossible request: wrong options or values (exit code 2)."""

    exit_code = 2


class ModelError(TriforceError):
    """A model that cannot be used: it is missing, unsupported or damaged (exit code 1)."""


class CapacityError(TriforceError):
    """A request for more memory or context than is available (exit code 1)."""


class PeerError(TriforceError):
    """Another rank has ended, so this rank cannot continue (exit code 69). The other rank reports the cause."""

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h: tells the launcher that another rank failed first


class HangError(PeerError):
    """Another rank has not done its part within the time limit, so this rank cannot continue (exit code 75). No rank
    has failed."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: the launcher tells a hang from the errors that follow when a rank ends


def without_frames(error: E) -> E:
    """Removes the stack frames from an error that is kept, and returns the error.

    Frames keep alive all objects that they use. If one of these refers to the error, they live until Python's garbage
    collector finds the cycle. The traceback of an unexpected error is kept as text, in a note.
    """
    if error.__traceback__ and not isinstance(error, TriforceError):
        error.add_note("".join(traceback.format_exception(error)))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error
