"""The limits of a server for its clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

_BYTES_A_POSITION = 64
"""Maximum bytes of a body for each position of the model. A letter takes at most 12 bytes, with escapes, and most
tokens have several letters."""

_LEAST_BODY_BYTES = 2**22
"""Every model accepts bodies of this number of bytes: not all of a body is text for the model."""


@dataclass(frozen=True)
class ServerLimits:
    """The limits of one server. docs/serving.md documents them."""

    unread_bytes: int = 2**23
    """Maximum bytes of text and logprobs of a stream that wait to be read. A stream with more is cut."""
    unread_s: float = 60.0
    """If a client reads nothing of the waiting data for this number of seconds, its connection is closed."""
    whole_bytes: int = 2**27
    """Maximum bytes of texts and logprobs of a response that is not streamed."""
    send_buffer_bytes: int = 2**18
    """Bytes that the system may buffer for a connection, on the way to its client."""
    body_bytes: int = 2**25
    """Maximum bytes of a request's body, for any model; see `of_model`. The text of a million tokens has a fifth of
    that."""
    held_bytes: int = 2**29
    """Maximum bytes of the bodies of all requests together, in memory and in files, until their prompts are made."""
    client_held_bytes: int = 2**27
    """Maximum bytes of the bodies of one client's requests, and of its answers that wait to be read."""
    body_s: float = 30.0
    """Seconds within which a body must arrive. A long body has more time: see `body_rate`."""
    body_rate: float = 2**17
    """Minimum rate of a long body, in bytes per second."""
    parts: int = 2**18
    """Maximum number of objects, lists and names of fields in a body."""
    long_bytes: int = 2**18
    """Above this number of bytes, a body is long. It waits in a temporary file. Its prompt is made in another thread
    than those of short bodies."""
    render_s: float = 5.0
    """Maximum seconds that the chat template may take for one prompt."""
    verifications: int = 16
    """Maximum number of uploads that wait until a saved context is verified, besides the one being verified."""
    connections: int = 2048
    """Maximum number of connections at a time. Beyond it, connections are closed that are idle or not read, of the
    client with the most of these."""
    idle_s: float = 60.0
    """Seconds within which a connection must begin a request and send its head."""
    keep_alive_s: float = 5.0
    """If nothing was sent for this number of seconds, a comment is sent, so that proxies and clients keep waiting."""
    first_event_s: float = 1.0
    """Seconds that a stream waits for its first event before it begins. An error within this time is answered with its
    own status."""

    def of_model(self, positions: int) -> Self:
        """These limits for a model with this number of positions: a longer body could hardly be a prompt for it."""
        most = max(_LEAST_BODY_BYTES, _BYTES_A_POSITION * positions)
        return replace(self, body_bytes=min(self.body_bytes, most))
