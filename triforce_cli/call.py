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
            import_pytorch()
            yield


def import_pytorch() -> None:
    """Imports PyTorch, unless it is imported already. Python does not collect garbage meanwhile, and from then on it
    ignores all objects that exist now: modules stay, and what is garbage among them is not freed.

    A short `triforce generate` took 1.14 seconds of processor time instead of 1.73 (AMD EPYC Zen 5, PyTorch 2.13.0).
    """
    if "torch" in sys.modules:
        return
    collects = gc.isenabled()
    try:
        gc.disable()
        import torch  # noqa: F401 - who calls this imports it again
    finally:
        gc.freeze()
        if collects:
            gc.enable()
