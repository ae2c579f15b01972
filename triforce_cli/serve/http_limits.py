"""What a server takes upon itself for its clients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of one server. docs/serving.md states them."""

    unread_bytes: int = 2**23
    """Text and logprobs of a stream that wait to be read; beyond that it is broken off."""
    unread_s: float = 60.0
    """Seconds in which a client takes nothing of what waits for it; after that its connection is closed."""
    whole_bytes: int = 2**27
    """Texts and logprobs of a response that is not streamed."""
    send_buffer_bytes: int = 2**18
    """What the system may hold of a connection, on the way to its client."""
    body_bytes: int = 2**25
    """Of a request's body: the text of a million tokens has a fifth of that."""
    held_bytes: int = 2**29
    """Bodies that all requests together may hold until their prompts are made."""
    client_held_bytes: int = 2**27
    """Those of one client's requests."""
    body_s: float = 30.0
    """Seconds in which a body must arrive, and more by its bytes: see `body_rate`."""
    body_rate: float = 2**17
    """Bytes a second that a long body must arrive with."""
    parts: int = 2**18
    """Objects, lists and names of fields in a body."""
    long_bytes: int = 2**18
    """From which on a body is long: prompts of others are made beside that one's."""
    render_s: float = 5.0
    """Seconds that the chat template may take for one prompt."""
    verifications: int = 16
    """Uploads that wait until a saved context is verified, beside the one that is being verified."""
    connections: int = 2048
    """At a time. Beyond that, idle ones of the client that has most of them are closed."""
    idle_s: float = 60.0
    """Seconds in which a connection must begin a request, and send its head."""
    keep_alive_s: float = 5.0
    """A comment goes out where nothing else has for so long, so that proxies and clients go on waiting."""
    first_event_s: float = 1.0
    """How long a stream waits for its first event before it begins: an error within that has a status of its own."""
