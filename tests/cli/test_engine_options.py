"""Options of model, machine, sampling and speculation mean the same in every command that has them."""

import io
import json
import sys
from dataclasses import fields

import pytest
from command import TEXT, check_refusal, run_here
from triforce.offload import Sampling

SETTINGS = {"budget": 64, "chunk_size": 4, "draft_length": 2, "block_length": 5}
SAMPLING = {"temperature": 0.5, "top_p": 0.8, "top_k": 7, "min_p": 0.2}
NEW_TOKENS = 6
LENGTHS = tuple(word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", value))
SHARED = (
    *LENGTHS,
    *(word for name, value in SAMPLING.items() for word in (f"--{name.replace('_', '-')}", value)),
    *("--resident", 0, "--refresh", 3, "--early-end", 0.4, "--exact", "on", "--pack", "on", "--dtype", "bfloat16"),
    *("--host-memory", 1, "--threads", 1, "--device", "cpu", "--seed", 3, "--max-new-tokens", NEW_TOKENS),
)
RUNS = ("generate", "chat", "batch", "bench", "compare")


@pytest.fixture
def work(pair, tmp_path, capfd, monkeypatch):
    """Gives a command something to do."""
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "requests.jsonl").write_text(json.dumps({"custom_id": "a", "body": {"prompt": TEXT}}) + "\n")

    def run(command, *arguments):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Why?\n")))
        given = {
            "generate": ("--prompt-file", tmp_path / "text.txt"),
            "chat": ("--prompt-file", tmp_path / "text.txt"),
            "batch": (tmp_path / "requests.jsonl", "--output", tmp_path / "answers.jsonl"),
            "bench": ("--prompt-file", tmp_path / "text.txt", "--contexts", 200, "--repeat", 1),
            "compare": ("--prompt-file", tmp_path / "text.txt", "--baseline", "autoregressive", "--repeat", 1),
            "read": (tmp_path / "text.txt",),
        }
        models = ("--model", pair[0]) if command == "read" else ("--model", pair[0], "--draft", pair[1])
        return run_here(capfd, command, *given[command], *models, *arguments)

    return run


def test_every_field_of_sampling_is_an_option_that_is_tried_here():
    assert {*SAMPLING, "seed"} == {field.name for field in fields(Sampling)}


@pytest.mark.parametrize("command", RUNS)
@pytest.mark.slow(keep=("generate", "batch"))
def test_options_reach_the_run(work, tmp_path, pair, command):
    tiers = () if command == "compare" else ("--tiers", 3)
    outcome = work(command, *SHARED, *tiers, "--json", tmp_path / "run.json")
    assert outcome.code == 0, outcome
    document = json.loads((tmp_path / "run.json").read_text())
    run = {
        "chat": lambda: document[0],
        "bench": lambda: document["contexts"][0]["tiers"][0]["runs"][0] | {"sampling": document["sampling"]},
        "compare": lambda: document["systems"][0]["runs"][0]["details"] | {"sampling": document["sampling"]},
    }.get(command, lambda: document)()
    settings = run["settings"]
    assert {name: settings[name] for name in SETTINGS if name != "budget"} | {"budget": 64} == SETTINGS
    assert settings["budget"] <= 64 and settings["tiers"] == 3 and settings["packed"] and settings["exact"] is True
    assert settings["resident_bytes"] == 0 and str(settings["refresh"]) == "3"
    if command != "batch":  # whose requests have their own
        assert SAMPLING.items() <= run["sampling"].items()
    where = document["machine"] if command == "bench" else document[0] if command == "chat" else document
    assert where["device"] == "cpu" and where["threads"] == 1
    assert (document[0] if command == "chat" else document)["dtype"] == "bfloat16"
    assert (document[0] if command == "chat" else document)["draft"] == str(pair[1])


@pytest.mark.parametrize("command", [*RUNS, "read"])
@pytest.mark.slow(keep=("generate", "read"))
def test_less_host_memory_than_a_run_needs_is_said_with_the_option(work, command):
    outcome = work(command, "--host-memory", 0.0001)
    said = outcome.out if command == "compare" else outcome.err
    assert outcome.code == 1 and "--host-memory" in said, outcome


@pytest.mark.parametrize("command", [*RUNS, "read", "serve"])
@pytest.mark.parametrize(
    ("option", "value"), [("--dtype", "int4"), ("--device", "tpu"), ("--pack", "some"), ("--threads", 0)]
)
def test_what_a_machine_cannot_do_is_refused(capfd, command, option, value):
    check_refusal(run_here(capfd, command, option, value), 2, option, str(value))


@pytest.mark.parametrize("command", [*RUNS, "serve"])
@pytest.mark.parametrize(
    ("option", "value"),
    [("--refresh", "sometimes"), ("--early-end", "late"), ("--exact", "maybe"), ("--seed", 2**63), ("--top-k", -1)],
)
def test_what_a_run_cannot_do_is_refused(capfd, pair, tmp_path, command, option, value):
    (tmp_path / "requests.jsonl").write_text(json.dumps({"custom_id": "a", "body": {"prompt": "A"}}) + "\n")
    files = (tmp_path / "requests.jsonl", "-o", tmp_path / "answers.jsonl", "--model", pair[0])
    needed = files if command == "batch" else ()
    refused = run_here(capfd, command, *needed, option, value)
    assert refused.code == 2 and "Traceback" not in refused.err, refused
    assert f"error: {option.lstrip('-')} is" in refused.err or option in refused.err, refused
    assert str(value) in refused.err.split("error: ")[1], refused


@pytest.mark.parametrize(
    "arguments",
    [
        *(("generate", "--model"), ("chat", "--model"), ("bench", "--model"), ("compare", "--model")),
        *(("plan", "--model"), ("contexts", "show"), ("contexts", "verify"), ("contexts", "rm")),
        *(("serve", "--port", "0", "--model"), ("read",), ("batch", "-o", "answers.jsonl")),
    ],
    ids=" ".join,
)
def test_debug_shows_the_traceback_of_an_error(capfd, tmp_path, monkeypatch, arguments):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    outcome = run_here(capfd, *arguments, "no-such-thing", "--debug")
    assert outcome.code == 1 and "Traceback" in outcome.err and "\nerror: " in outcome.err, outcome
    assert "Traceback" not in run_here(capfd, *arguments, "no-such-thing").err


@pytest.mark.parametrize("arguments", [("contexts",), ("contexts", "list"), ("contexts", "prune", "--keep", "1GB")])
def test_debug_changes_nothing_where_all_is_well(capfd, tmp_path, monkeypatch, arguments):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    plain, debug = run_here(capfd, *arguments), run_here(capfd, *arguments, "--debug")
    assert (plain.code, plain.out, plain.err) == (debug.code, debug.out, debug.err) and plain.code == 0
