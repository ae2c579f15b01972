"""`examples/measure/million_*.py`, over few tokens: a passage is found wherever it is, and steps are measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "examples" / "measure"


def run(name: str, json_path: Path, *options: object) -> dict:
    """The JSON of a script, and what it printed."""
    command = [sys.executable, str(SCRIPTS / name), "--json", str(json_path), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(json_path.read_text())


@pytest.mark.parametrize("place", [0.0, 0.4, 0.99])
@pytest.mark.slow(keep=1)
def test_a_passage_is_found_and_three_tiers_write_one_tiers_tokens(tmp_path, place):
    found = run("million_tokens.py", tmp_path / "read.json", "--tokens", 9000, "--new-tokens", 50, "--place", place)
    assert found["passage_found"] and found["same_tokens"]
    assert found["script"] == "million_tokens" and found["options"]["place"] == place
    assert found["machine"]["device"] == "cpu" and found["machine"]["memory_bytes"] > 0
    three, one = found["three_tiers"], found["one_tier"]
    assert three["acceptance"]["tokens_per_round"] > 2 and one["reused_tokens"] == 9000 - 8
    assert three["settings"]["budget"] < 1000


@pytest.mark.slow
def test_steps_of_the_embedded_shape_go_beyond_its_positions(tmp_path):
    found = run("million_steps.py", tmp_path / "steps.json", "--tokens", 140_000, "--block-length", 4)
    (at,) = found["contexts"]
    assert found["script"] == "million_steps" and found["kind"] == "triforce bench"
    assert at["context"] == 140_000 and at["floor"]["read_bytes"] > 140_000 * 6144
    assert all(at["steps_ms"][name]["median"] > 0 for name in ("plain", "verify", "retrieval", "draft", "refresh"))
