"""Steps of the embedded pair's shape over a million tokens of synthetic KV, beside the memory floor.

    python examples/measure/million_steps.py --json steps.json
    python examples/measure/million_steps.py --tokens 262144 --dtype bfloat16

It is `triforce bench --shape` of a copy of the configuration with as many positions as that takes: the weights were
trained for 131,072, and a step's time depends neither on weights nor on positions. All other options are those of
`triforce bench`. At 1,048,576 tokens keys and values take 6 GiB in bfloat16, and the whole run 7.5 GiB of memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from triforce.cli.app import main as triforce
from triforce.tp.weights.registry import EMBEDDED, PRESETS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2**20, help="in the cache (default: 1,048,576)")
    options, others = parser.parse_known_args()
    config = json.loads((Path(PRESETS[EMBEDDED].target) / "config.json").read_text())
    with tempfile.TemporaryDirectory() as directory:
        shape = Path(directory) / "embedded"
        shape.mkdir()
        (shape / "config.json").write_text(json.dumps(config | {"max_position_embeddings": options.tokens}))
        bench = ["bench", "--shape", str(shape), "--draft", EMBEDDED, "--contexts", str(options.tokens)]
        sys.argv[1:] = [*bench, "--tiers", "1,3", *others]
        triforce()


if __name__ == "__main__":
    main()
