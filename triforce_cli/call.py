"""The process that a subcommand runs in: its arguments, its signals, and what it imports."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .terminal.stopping import Signals


@dataclass(frozen=True)
class Call:
    """The arguments of this process, with which it can be started again, and the handling of its signals."""

    arguments: list[str]
    signals: Signals

    @property
    def command(self) -> str:
        """The command as it was typed."""
        return shlex.join(["triforce", *self.arguments])

    @contextmanager
    def with_pytorch(self, *, release: bool = False) -> Iterator[None]:
        """Imports PyTorch, and delays signals within this context: an import may swallow what a signal raises.

        Args:
            release: as for `Signals.delayed`.

        Raises:
            Stop: after the context, if a signal came in it and `release` is true.
        """
        with self.signals.delayed(release=release):
            if "torch" not in sys.modules:
                with long_imports():
                    import torch  # noqa: F401 - what is imported in the context imports it again
            yield


@contextmanager
def long_imports() -> Iterator[None]:
    """Within this context, Python does not look for garbage. Afterwards, it never looks through what is there now, not
    even at its exit: modules stay. Looking takes a third of the time in which a command starts and ends."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
