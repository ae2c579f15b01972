"""Formats and reads numbers of bytes. Imports nothing heavy, so it also works in a broken installation."""

from __future__ import annotations

import re


def gib(num_bytes: float) -> str:
    """`num_bytes` in GiB, or in MiB below half a GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"


def parse_size(text: str) -> int:
    """The bytes of a size such as `500MB`, `20 GB` (powers of 1,000) or `8GiB` (powers of 1,024).

    Raises:
        ValueError: `text` is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is no size; give one such as 20GB or 500MiB")
    power = " KMGT".index((found[2] or " ").upper())
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
