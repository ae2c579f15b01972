"""The one command for a GPU: its parts survive one another, and whatever it found by then is on disk."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_results
import pytest
import torch
from gpu_results import Part, figures, import_path, run_parts
from triforce.tp import CapacityError

SCRIPT = Path(gpu_results.__file__)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def python(name, code, limit_s=30.0, **more):
    return Part(name, [sys.executable, "-c", code, "{json}"], limit_s, **more)


@pytest.mark.slow
def test_a_part_that_fails_hangs_or_dies_costs_no_other(tmp_path):
    write = "import sys; open(sys.argv[1], 'w').write('{\"answer\": 42}')"
    wanted = [
        python("fails", "print('some noise'); raise ValueError('no such kernel')"),
        python("dies", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        python("hangs", write + "; sys.stdout.flush(); import time; time.sleep(60)", limit_s=2.0),
        python("breaks off", "import sys; open(sys.argv[1], 'w').write('{')"),
        python("needs more", "", modules=("json", "a_module_that_is_nowhere")),
        python("works", write),
    ]
    began = time.monotonic()
    done = run_parts(wanted, tmp_path, environment=ENVIRONMENT)["parts"]
    assert time.monotonic() - began < 30
    assert json.loads((tmp_path / "results.json").read_text())["parts"] == done
    statuses = {name: part["status"] for name, part in done.items()}
    assert statuses == {
        "fails": "failed", "dies": "failed", "hangs": "late", "breaks off": "failed", "needs more": "skipped",
        "works": "ok",
    }  # fmt: skip
    assert done["fails"]["reason"] == "ValueError: no such kernel"
    assert "a_module_that_is_nowhere" in done["needs more"]["reason"]
    assert done["hangs"]["result"] == done["works"]["result"] == {"answer": 42}
    assert "some noise" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_a_part_that_ignores_the_end_of_its_time_is_killed_with_all_it_started(tmp_path):
    stubborn = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(60)"
    )
    parts = [python("stubborn", stubborn, limit_s=2.0)]
    done = run_parts(parts, tmp_path, environment=ENVIRONMENT, grace_s=0.5)["parts"]
    assert done["stubborn"]["status"] == "late"
    child = Path(f"/proc/{done['stubborn']['result']}/stat")

    def ended() -> bool:
        try:
            return child.read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True

    until = time.monotonic() + 10.0  # a killed process takes a moment to end
    while not ended() and time.monotonic() < until:
        time.sleep(0.05)
    assert ended()


def test_the_time_for_all_parts_ends_them(tmp_path):
    wanted = [python(str(i), "import time; time.sleep(30)") for i in range(3)]
    done = run_parts(wanted, tmp_path, environment=ENVIRONMENT, total_s=1.5, grace_s=0.5)["parts"]
    assert [part["status"] for part in done.values()] == ["late", "skipped", "skipped"]


def test_triforce_is_found_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    environment = ENVIRONMENT | {"PYTHONPATH": import_path(tmp_path)}
    code = "import triforce.cli.app, triforce.offload as o; from importlib.metadata import version as v; "
    code += "print(o.__file__, v('triforce-cli'))"
    command = [sys.executable, "-c", code]  # elsewhere: an install leaves its metadata in the checkout
    asked = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    place, version = asked.stdout.split()
    assert Path(place).is_relative_to(tmp_path)
    assert version.endswith("+checkout")


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_a_line(tmp_path):
    environment = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    asked = subprocess.run(
        [sys.executable, SCRIPT, "--out", tmp_path / "out"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 1
    assert asked.stderr.count("\n") == 1 and "no CUDA device" in asked.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("quick", [False, True])
def test_parts_fit_into_the_time(quick):
    made = gpu_results.parts("cuda", quick)
    assert gpu_results.TOTAL_S <= 8 * 60 - 2 * gpu_results.GRACE_S
    assert len({part.name for part in made}) == len(made)
    assert all(part.limit_s <= gpu_results.TOTAL_S for part in made)


@pytest.mark.slow
def test_its_own_parts_and_a_command_run_on_a_cpu(tmp_path):
    chosen = ["memory", "machine", "link", "prefill", "steps-32k-streamed"]
    command = [sys.executable, SCRIPT, "--device", "cpu", "--quick", "--out", tmp_path, "--only", *chosen]
    asked = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stdout + (tmp_path / "log.txt").read_text()
    done = json.loads((tmp_path / "results.json").read_text())
    assert set(done["parts"]) == set(chosen) == set(done["options"]["only"])
    assert done["script"] == "gpu_results" and done["machine"]["device"] == "cpu" and done["torch"]
    assert done["parts"]["memory"]["result"]["after_the_run"]["planned"]["weights"] > 0
    assert done["figures"]["link: in_1_mib_gb_per_s"] > 0
    assert done["figures"]["prefill: streamed_300_tokens_per_s"] > 0
    assert done["parts"]["steps-32k-streamed"]["result"]["contexts"][0]["floor"]["streamed_bytes"] > 0
    assert done["figures"]["steps-32k-streamed: verification / floor"] > 0
    assert done["figures"]["steps-32k-streamed: retrieval step / floor"] > 0


def test_memory_comes_first_and_is_said_by_phase():
    """On a CPU what was planned and what is held; figures of an allocator come from a GPU alone."""
    assert [part.name for part in gpu_results.parts("cuda", False)][:2] == ["memory", "machine"]
    found = dict(gpu_results.memory("cpu", quick=True))
    phases = ["weights_loaded", "prefill", "first_refresh", "decoding", "after_the_run"]
    assert list(found) == ["shape", "before", "tokens", *phases]
    for phase in phases:
        planned, held = found[phase]["planned"], found[phase]["held"]
        assert held["weights"] == planned["weights"]
        assert found[phase]["process_at_most"] > held["weights"]
        if phase == "after_the_run":  # what a next turn goes on from
            assert held.keys() == {"weights", "rope", "resident_kv", "mass"}
        elif phase != "weights_loaded":
            for part in ("rope", "resident_kv", "draft_kv"):
                assert held[part] == planned[part] > 0, (phase, part)
            assert 0 < held["mass"] <= planned["mass"] and held.get("retrieval", 0) <= planned["retrieval"]
            assert sum(held.values()) - held.get("captured", 0) <= planned["device"]
    assert not found["prefill"]["held"].get("retrieval") and found["first_refresh"]["held"]["retrieval"] > 0


def test_what_memory_was_planned_for_a_run_that_fails_is_known(monkeypatch):
    def fails(*given: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "index_select", fails)
    found: dict[str, Any] = {}
    with pytest.raises(CapacityError):
        for name, value in gpu_results.memory("cpu", quick=True):
            found[name] = value
    assert list(found) == ["shape", "before", "tokens", "weights_loaded", "prefill"]


def test_the_most_that_was_allocated_is_a_figure():
    at = {"planned": {"device": 200}, "most_allocated": 150}
    done = {"memory": {"status": "ok", "result": {"shape": "x", "before": {"most_allocated": 3}, "prefill": at}}}
    assert figures(done) == {"memory: prefill, most allocated / planned": 0.75}


def test_figures_of_nothing_are_none():
    assert figures({"link": {"status": "failed"}, "tests": {"status": "ok", "result": ["1 passed in 1 s"]}}) == {}
