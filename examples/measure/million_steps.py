"""Steps of the embedded pair's shape over a million tokens of synthetic KV, beside the memory floor.

    python examples/measure/million_steps.py --json steps.json
    python examples/measure/million_steps.py --tokens 262144 --dtype bfloat16

It is `triforce bench --shape` of a copy of the configuration with as many positions as that takes: the weights were
trained for 131,072, and a step's time depends neither on weights nor on positions. All other options are those of
`triforce bench`, and so are the table and the figures. At 1,048,576 tokens keys and values take 6 GiB in bfloat16, and
the whole run 7.5 GiB of memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from report import make_parser, write_json
from triforce.tp.weights.registry import EMBEDDED, PRESETS


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=2**20, help="in the cache (default: 1,048,576)")
    given, others = parser.parse_known_args()
    config = json.loads((Path(PRESETS[EMBEDDED].target) / "config.json").read_text())
    with tempfile.TemporaryDirectory() as directory:
        shape, measured = Path(directory) / "embedded", Path(directory) / "bench.json"
        shape.mkdir()
        (shape / "config.json").write_text(json.dumps(config | {"max_position_embeddings": given.tokens}))
        bench = [sys.executable, "-m", "triforce.cli", "bench", "--shape", shape, "--draft", EMBEDDED, "--tiers", "1,3"]
        bench += ["--contexts", str(given.tokens), "--json", measured, *others]
        code = subprocess.run(bench, stdout=sys.stderr if given.json.on_stdout else None, check=False).returncode
        if measured.exists():
            write_json(given, json.loads(measured.read_text()))
    sys.exit(code)


if __name__ == "__main__":
    main()
