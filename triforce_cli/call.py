"""What a subcommand knows of the process it runs in."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from .terminal.stopping import Signals


@dataclass(frozen=True)
class Call:
    """The arguments of this process, with which it can be started again, and its signals."""

    arguments: list[str]
    signals: Signals

    @property
    def command(self) -> str:
        """As it was typed."""
        return shlex.join(["triforce", *self.arguments])
