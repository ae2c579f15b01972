"""What a server takes upon itself for clients who do not read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of one server. docs/serving.md states them."""

    unread_bytes: int = 2**23
    """Text and logprobs of a stream that wait to be read; beyond that it is broken off."""
    unread_s: float = 60.0
    """Seconds in which a client takes nothing of what waits for it; after that its connection is closed."""
    whole_bytes: int = 2**27
    """Texts and logprobs of a response that is not streamed."""
    send_buffer_bytes: int = 2**18
    """What the system may hold of a connection, on the way to its client."""
