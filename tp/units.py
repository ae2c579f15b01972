"""Numbers for people. It imports nothing, so that a broken installation can still be described."""


def gib(num_bytes: float) -> str:
    """`num_bytes` for people, in the unit that suits it."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"
