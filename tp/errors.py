"""Errors that a user can act on. The command line prints their message and exits with their code; bugs stay bugs."""


class TriforceError(Exception):
    """What went wrong, with which value, and what to do about it, in one message."""

    exit_code = 1


class UsageError(TriforceError):
    """A request that can never work as written (exit code 2)."""

    exit_code = 2


class ModelError(TriforceError):
    """A model directory that cannot be used: missing, unsupported, damaged."""


class CapacityError(TriforceError):
    """More memory or context than there is."""


class PeerError(TriforceError):
    """Another rank has ended, so this one cannot go on: never the first error of a run, which that rank has."""

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h; the launcher tells it from a rank's own failure
