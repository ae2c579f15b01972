"""Errors that a user can act on: the command line prints their message and exits with their code.

Any other exception is a bug.
"""


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
