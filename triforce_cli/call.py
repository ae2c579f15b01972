"""The data about the process that a subcommand runs in."""

from __future__ import annotations

import shlex
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
