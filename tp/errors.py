"""Errors that a user can act on: the command line prints their message and exits with their code.

Any other exception is a bug.
"""

import traceback
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class TriforceError(Exception):
    """What went wrong, with which value, and what to do about it, in one message."""

    exit_code = 1


class UsageError(TriforceError):
    """An impossible request: wrong options or values (exit code 2)."""

    exit_code = 2


class ModelError(TriforceError):
    """A model directory that cannot be used: missing, unsupported, damaged."""


class CapacityError(TriforceError):
    """A request for more memory or context than there is."""


class PeerError(TriforceError):
    """Another rank has ended, so this one cannot go on. The error that caused it is that rank's."""

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h, by which the launcher knows that another rank failed first


class HangError(PeerError):
    """Another rank has not done its part within the time limit, so this one cannot go on. None has failed."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h, by which the launcher tells it from what follows when a rank ends


def without_frames(error: E) -> E:
    """An error that is kept, without the frames it came through, which hold what they worked on (and if one of them has
    the error, for as long as Python does not look for such circles): of one that is not expected they are kept in
    words."""
    if error.__traceback__ and not isinstance(error, TriforceError):
        error.add_note("".join(traceback.format_exception(error)))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error
