"""What tests of `triforce compare` share: a small job, and its table."""

import os
from pathlib import Path

TOKENS = 24
"""Of each answer."""

PROMPT_TOKENS = 120

WITH_STRANGE_SYSTEMS = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
"""`PYTHONPATH`; an empty part would be the folder that tests run in, with packages such as `kernels`."""


def rows_of(outcome):
    """The table's lines by the system's name."""
    lines = outcome.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("system"))
    end = next(i for i in range(start, len(lines)) if not lines[i].strip())
    return lines[start + 1 : end]
