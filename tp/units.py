"""Formatting numbers for people. It imports nothing, so that it works in a broken installation too."""


def gib(num_bytes: float) -> str:
    """`num_bytes` in GiB, or in MiB below half a GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"
